"""The primitives under every JAX and Equinox transformation, alone and nested.

An estimator of one product: the rules know nothing of any estimator. (Small programs show as much
as large ones; XTrace and a diagonal, of which the sum of the entries is taken, are there where
batches nest.) What is an estimator's own, its weights, is in `estimators/test_statistics.py`.

The operator is A(p) = exp(a) B + b_0^2 C + b_1 D with fixed semidefinite B, C, D. An estimate with
weights G is <G, A>, so its derivatives of *every* order are known from the first:

    d/da = exp(a) <G, B> =: g_a,  d/db_0 = 2 b_0 <G, C> =: g_0,  d/db_1 = <G, D> =: g_1
    the second ones: d^2/da^2 = g_a,  d^2/db_0^2 = g_0 / b_0, and zero otherwise.
"""

import contextlib
import dataclasses
import functools
import re
from typing import final

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax import lax

import traceax as tr
import traceax.extend as tre

from ..helpers import PSD, by_products, register_tags, with_spectrum


@final
class OneProbe(tr.AbstractTraceEstimator):
    """v^T A v of one random vector v."""

    def compute(self, key, operator, k, weights):
        del k, weights
        block = tre.BlockOperator(operator)
        v = jax.random.rademacher(key, (block.n, 1), block.dtype)
        samples = v * block.mm(v)
        estimate = tre.Estimate(jnp.sum(samples), jnp.max(jnp.abs(samples)), 1, 1)
        return estimate, tre.LowRankWeights(v, v)


ESTIMATORS = {
    "trace": OneProbe(),
    "xtrace": tr.XTraceEstimator(improved=False),
    "batched": tr.HutchinsonEstimator(batch_size=5),
}
N, K = 12, 7
STRUCTURE = jax.ShapeDtypeStruct((N,), jnp.float64)

_rng = np.random.default_rng(0)
B, C, D = (with_spectrum(_rng, _rng.uniform(0.1, 2, N) ** 3) for _ in range(3))
BATCH = {"a": np.array([0.3, -0.4, 0.1]), "b": np.array([[0.7, 1.3], [0.2, 0.9], [1.1, 2.0]])}
PARAMS = {"a": np.float64(0.3), "b": np.array([0.7, 1.3])}  # the first of the batch
KEYS = jax.random.split(jax.random.key(0), 3)


def dense(params):
    b = params["b"]
    return jnp.exp(params["a"]) * B + b[0] ** 2 * C + b[1] * D


def estimated(key, operator, k=K, name="trace"):
    """A solution: of a diagonal the sums of its entries and of their errors."""
    if name != "diagonal":
        return tr.trace(key, operator, k, ESTIMATORS[name])
    solution = tr.diagonal(key, operator, k, tr.HutchinsonEstimator())
    value, std_err = jnp.sum(solution.value), jnp.sum(solution.std_err)
    return dataclasses.replace(solution, value=value, std_err=std_err)


def solve(params, key, name="trace"):
    return estimated(key, lx.MatrixLinearOperator(dense(params), PSD), name=name)


def value(params, key, name="trace"):
    return solve(params, key, name).value


both = jax.jit(jax.value_and_grad(value), static_argnums=2)


@functools.cache
def reference(name="trace"):
    """Values (3 keys x 3 operators) and gradients, one call at a time."""
    calls = [both(at(j, BATCH), key, name) for key in KEYS for j in range(3)]
    return jax.tree.map(lambda *x: np.array(x).reshape(3, 3, *x[0].shape), *calls)


def close(got, expected, rtol=1e-10):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.shape(x) == np.shape(y)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=1e-12)


def at(index, tree):
    return jax.tree.map(lambda x: x[index], tree)


# --- jit, shapes, and tangents that are not there ------------------------------------------------


def test_jit_and_equinox():
    """Eager, jitted, inlined in another program; the gradient of an operator is an operator."""
    values, gradients = reference()
    eager = solve(PARAMS, KEYS[0])
    assert isinstance(eager.value, jax.Array)
    assert (eager.value.shape, eager.value.dtype) == ((), jnp.float64)
    close(jax.jit(solve)(PARAMS, KEYS[0]), eager)
    inner = eqx.filter_jit(value, inline=True)

    @eqx.filter_jit
    def outer(params, key):
        return 2.0 * inner(params, key), eqx.filter_grad(inner)(params, key)

    params = jax.tree.map(jnp.asarray, PARAMS)
    close(outer(params, KEYS[0]), (2 * values[0, 0], at((0, 0), gradients)))
    operator = lx.MatrixLinearOperator(dense(PARAMS), PSD)
    grad = eqx.filter_grad(lambda op: estimated(KEYS[0], op).value)(operator)
    assert isinstance(grad, lx.MatrixLinearOperator)
    # <G, dA> for A's matrix is G^H.
    close(np.sum(np.asarray(grad.matrix) * C) * 2 * PARAMS["b"][0], gradients["b"][0, 0, 0])


@pytest.mark.parametrize("k", [1, N])
def test_static_not_traced_shapes_under_filter_eval_shape(k):
    def call(key, params):
        return estimated(key, lx.MatrixLinearOperator(dense(params), PSD), k)

    filtered = eqx.filter_eval_shape(call, KEYS[0], PARAMS)
    shapes = jax.eval_shape(lambda key: call(key, PARAMS), KEYS[0])
    for solution in (filtered, shapes):
        assert (solution.value.shape, solution.value.dtype) == ((), jnp.float64)
        assert (solution.std_err.shape, solution.std_err.dtype) == ((), jnp.float64)
        assert (solution.num_matvecs.shape, solution.num_matvecs.dtype) == ((), jnp.int32)
    gradient = jax.eval_shape(jax.grad(lambda p: call(KEYS[0], p).value), PARAMS)
    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, PARAMS)


def test_derivative_with_respect_to_one_of_several_arguments():
    def f(a, b, key):
        solution = solve({"a": a, "b": b}, key)
        return solution.value, solution.std_err + solution.stats["std.err"]

    def first(*arguments):
        return f(*arguments)[0]

    @jax.jit
    def run(*given):
        slopes = [jax.grad(first, argnums=i)(*given) for i in (0, 1)]
        of_error = jax.grad(lambda *given: f(*given)[1], argnums=1)(*given)
        return slopes, of_error, *eqx.filter_jvp(f, given, (jnp.ones(()), None, None))

    values, gradients = reference()
    slopes, of_error, found, tangent = run(PARAMS["a"], PARAMS["b"], KEYS[0])
    close(slopes, [gradients["a"][0, 0], gradients["b"][0, 0]])
    close(found[0], values[0, 0])
    close(tangent[0], gradients["a"][0, 0])
    assert not tangent[1]  # only the value has a derivative
    assert not np.any(of_error)


@jax.custom_jvp
def _cube(x):
    return x**3


@_cube.defjvp
def _(primals, tangents):
    (x,), (x_t,) = primals, tangents
    return _cube(x), 3 * x**2 * x_t


@eqx.filter_custom_jvp
def _penalty(module, key):
    return module.curvature(key)


@_penalty.def_jvp
def _(primals, tangents):
    module, key = primals
    module_t, key_t = tangents
    assert key_t is None
    return eqx.filter_jvp(lambda m: m.curvature(key), (module,), (module_t,))


class Model(eqx.Module):
    weight: jax.Array
    frozen: jax.Array
    label: str = eqx.field(static=True)

    def curvature(self, key):
        matrix = B + _cube(self.weight) * C + lax.stop_gradient(self.frozen) * D
        return estimated(key, lx.MatrixLinearOperator(matrix, PSD)).value


def test_scan_module_jit_symbolic_zero_tangents_no_leaked_tracers():
    model = Model(jnp.asarray(0.8), jnp.asarray(0.5), "m")
    spec = Model(True, False, "m")

    def loss(trained, rest, key):
        return _penalty(eqx.combine(trained, rest), key)

    def step(carry, key):
        trained, rest = eqx.partition(carry, spec)
        value, gradient = jax.value_and_grad(loss)(trained, rest, key)
        assert gradient.frozen is None
        trained = jax.tree.map(lambda p, g: p - 1e-3 * g, trained, gradient)
        return eqx.combine(trained, rest), (value, gradient.weight)

    with jax.checking_leaks():
        final, found = jax.jit(lambda model: lax.scan(step, model, KEYS[:2]))(model)
    one = jax.jit(step)
    carry, first = one(model, KEYS[0])
    carry, second = one(carry, KEYS[1])
    close(found, (np.array([first[0], second[0]]), np.array([first[1], second[1]])))
    close(final.weight, carry.weight)
    assert final.weight != model.weight


# --- operators that close over tracers -----------------------------------------------------------


@pytest.mark.parametrize("closure_convert", [True, False])
def test_operator_closing_over_tracers_inside_while_loop(closure_convert):
    tags = () if closure_convert else PSD  # without a tag, and with one

    def estimate(scale):
        operator = lx.FunctionLinearOperator(
            lambda v: scale * (B @ v), STRUCTURE, tags, closure_convert=closure_convert
        )
        return estimated(KEYS[0], operator).value

    unit = estimated(KEYS[0], lx.MatrixLinearOperator(jnp.asarray(B), tags)).value  # homogeneous

    def body(carry):
        i, scale, total = carry
        return i + 1, 2 * scale, total + estimate(scale)

    def step(scale, _):
        return 2 * scale, jax.value_and_grad(estimate)(scale)

    @jax.jit
    def run():
        start = jnp.asarray(0), jnp.asarray(0.5), jnp.asarray(0.0)
        looped = lax.while_loop(lambda c: c[0] < 3, body, start)
        return looped[2], lax.scan(step, jnp.asarray(0.5), length=3)[1]

    # lineax asks a tagged operator for its outputs, and Equinox keeps whom it asks: these tracers
    # leak without any estimate.
    with contextlib.nullcontext() if tags else jax.checking_leaks():
        total, (values, slopes) = run()
    close(total, 3.5 * unit, rtol=1e-8)
    close(values, np.array([0.5, 1.0, 2.0]) * unit, rtol=1e-8)
    close(slopes, np.ones(3) * unit, rtol=1e-8)


# --- no second trace, and one equation -----------------------------------------------------------

TRACED: list[int] = []  # one entry for each time a product is traced


class CountingOperator(lx.AbstractLinearOperator):
    matrix: jax.Array

    def mv(self, vector):
        TRACED.append(1)
        return self.matrix @ vector

    def as_matrix(self):
        return self.matrix

    def transpose(self):
        return CountingOperator(self.matrix.T)

    def in_structure(self):
        return jax.ShapeDtypeStruct(self.matrix.shape[1:], self.matrix.dtype)

    out_structure = in_structure


register_tags(CountingOperator, lambda operator: True)


def test_second_call_with_same_structure_does_not_trace_again():
    def f(matrix, key):
        return estimated(key, CountingOperator(matrix)).value

    results = []
    for function in (f, jax.jit(f), jax.value_and_grad(f), jax.jit(jax.value_and_grad(f))):
        results.append(function(jnp.asarray(B), KEYS[0]))
        before = len(TRACED)
        results.append(function(jnp.asarray(C), KEYS[1]))
        assert len(TRACED) == before > 0, "the second call was traced again"
    close(results[0], results[2])
    close(results[1], results[3])
    assert float(results[0]) != float(results[1])


def test_jaxpr_holds_one_equation():
    f, one = value, jax.value_and_grad(value)
    transformed = {
        "plain": (f, PARAMS, KEYS[0]),
        "jit": (jax.jit(f), PARAMS, KEYS[0]),
        "vmap keys": (jax.vmap(f, (None, 0)), PARAMS, KEYS),
        "vmap both": (jax.vmap(f), BATCH, KEYS),
        "value_and_grad": (one, PARAMS, KEYS[0]),
        "vmap of value_and_grad": (jax.vmap(one), BATCH, KEYS),
        "jit of vmap of value_and_grad": (jax.jit(jax.vmap(one)), BATCH, KEYS),
        "hessian": (jax.hessian(f), PARAMS, KEYS[0]),
        "linearize": (lambda p, key: jax.linearize(lambda q: f(q, key), p)[0], PARAMS, KEYS[0]),
    }
    for what, (function, *arguments) in transformed.items():
        jaxpr = jax.make_jaxpr(function)(*arguments)
        assert len(re.findall(r"= trace\[", str(jaxpr))) == 1, what


# --- vmap ----------------------------------------------------------------------------------------


def test_vmap_over_keys_operators_and_both():
    """And in a scan."""
    expected, one = reference(), jax.value_and_grad(value)
    diagonal = (np.arange(3), np.arange(3))

    def step(carry, key):
        return carry + 1, jax.vmap(one, (0, None))(BATCH, key)

    @jax.jit
    def run():
        return (
            jax.vmap(one, (None, 0))(PARAMS, KEYS),
            jax.vmap(one, (0, None))(BATCH, KEYS[1]),
            jax.vmap(one)(BATCH, KEYS),
            lax.scan(step, 0, KEYS)[1],
        )

    close(run(), (at(np.s_[:, 0], expected), at(1, expected), at(diagonal, expected), expected))


@pytest.mark.parametrize("name", ["trace", "diagonal", "xtrace"])
def test_nested_vmap_and_gradient_in_either_order(name):
    f = functools.partial(value, name=name)
    one = jax.value_and_grad(f)

    # grad(vmap(vmap)): with three keys, a gradient is the sum over the keys.
    def total(batch):
        return jnp.sum(jax.vmap(jax.vmap(f, (0, None)), (None, 0))(batch, KEYS))

    @jax.jit
    def run(batch):
        table = jax.vmap(jax.vmap(one, (0, None)), (None, 0))(batch, KEYS)
        return table, jax.grad(total)(batch)

    values, gradients = reference(name)
    close(run(BATCH), ((values, gradients), jax.tree.map(lambda g: g.sum(0), gradients)))


def test_vmap_axes_that_are_not_zero():
    """The axis 2 of a stack of matrices and the axis 1 of raw keys; out_axes too."""
    matrices = jnp.asarray(np.stack([dense(at(j, BATCH)) for j in range(3)], axis=2))
    raw = jnp.asarray(np.stack([jax.random.key_data(key) for key in KEYS], axis=1))

    def f(matrix, key):
        value = estimated(key, lx.MatrixLinearOperator(matrix, PSD)).value
        return value, jnp.ones(2) * value

    mapped = jax.vmap(f, (2, 1), (0, 1))

    @jax.jit
    def run(matrices):
        # Nested: an unmapped axis inside, a mapped one outside.
        nested = jax.vmap(jax.vmap(lambda m, k: f(m, k)[0], (None, 1)), (2, None))(matrices, raw)
        # A tangent is batched along the axis of what it is the tangent of.
        slopes = jax.grad(lambda m: jnp.sum(mapped(m, raw)[0]))(matrices)
        one = jax.grad(lambda m, k: f(m, k)[0])
        alone = [one(matrices[..., j], raw[:, j]) for j in range(3)]
        return mapped(matrices, raw), nested, slopes, jnp.stack(alone, axis=2)

    (values, wide), nested, slopes, alone = run(matrices)
    expected = reference()[0]
    close(values, expected[np.arange(3), np.arange(3)])
    assert wide.shape == (2, 3)
    close(nested, expected.T)
    close(slopes, alone, rtol=1e-9)


def test_vmap_over_filtered_operators():
    """`eqx.filter_vmap` over an operator as a PyTree."""
    stacked = eqx.filter_vmap(lambda m: lx.MatrixLinearOperator(m, PSD))(np.stack([B, C, D]))
    values = eqx.filter_vmap(lambda op, key: estimated(key, op).value)(stacked, KEYS)
    alone = jax.jit(lambda m, key: estimated(key, lx.MatrixLinearOperator(m, PSD)).value)
    close(values, np.array([alone(m, key) for m, key in zip((B, C, D), KEYS, strict=True)]))


def test_vmap_axis_name_with_psum_in_the_operator():
    """A = sum_i A_i, spread over the axis: each lane multiplies by its own part and adds up."""

    def f(part, key):
        operator = lx.FunctionLinearOperator(lambda v: lax.psum(part @ v, "i"), STRUCTURE, PSD)
        return estimated(key, operator).value

    parts = jnp.asarray(np.stack([B, C]))
    expected = estimated(KEYS[0], lx.MatrixLinearOperator(jnp.asarray(B + C), PSD)).value
    mapped = jax.vmap(f, (0, None), axis_name="i")
    close(mapped(parts, KEYS[0]), np.full(2, expected), rtol=1e-8)
    # Inside another vmap, which the operator knows nothing of.
    outer = jax.jit(jax.vmap(mapped, (None, 0)))(parts, KEYS[:2])
    assert outer.shape == (2, 2)
    close(outer[0], np.full(2, expected), rtol=1e-8)


# --- derivatives of higher order, and in forward mode --------------------------------------------


def test_derivatives_in_every_mode():
    """First and second ones, forwards and backwards, under `vmap`, linearised and recomputed."""
    x, unravel = jax.flatten_util.ravel_pytree(PARAMS)
    inner, outer = np.array([1.0, -2.0, 0.5]), np.array([0.3, 0.7, -1.1])

    def f(x, key=KEYS[0]):
        return value(unravel(x), key)

    def slopes(x):
        return jax.vmap(lambda key: jax.jvp(lambda x: f(x, key), (x,), (inner,))[1])(KEYS)

    @jax.jit
    def run(x):
        at_x, push = jax.linearize(f, x)
        pull = jax.vjp(f, x)[1]
        first = [jnp.stack([push(e) for e in jnp.eye(3)]), pull(2.0)[0] / 2]
        second = [jax.hessian(f)(x), jax.jacrev(jax.jacrev(f))(x), jax.jacrev(jax.jacfwd(f))(x)]
        rematerialised = jax.value_and_grad(jax.checkpoint(f))(x)
        return at_x, first, second, rematerialised, jax.jvp(slopes, (x,), (outer,))

    at_x, firsts, seconds, rematerialised, (first, second) = run(x)
    values, gradients = reference()
    g = np.concatenate([gradients["a"][:, :1], gradients["b"][:, 0]], axis=1)
    hessians = [np.diag([row[0], row[1] / BATCH["b"][0, 0], 0.0]) for row in g]
    close(at_x, values[0, 0])
    close(firsts, [g[0], g[0]], rtol=1e-9)
    close(seconds, [hessians[0]] * 3, rtol=1e-9)
    close(rematerialised, (values[0, 0], g[0]), rtol=1e-9)
    close(first, g @ inner, rtol=1e-9)
    close(second, np.array([inner @ hessian @ outer for hessian in hessians]), rtol=1e-9)


# --- keys, and what else an operator may hold ----------------------------------------------------


def test_other_key_implementations():
    truth = float(np.trace(dense(PARAMS)))
    key, run = jax.random.key(3, impl="rbg"), jax.jit(solve, static_argnums=2)
    solution = run(PARAMS, key, "batched")
    assert abs(solution.value - truth) < 6 * solution.std_err
    assert solution.value != run(PARAMS, jax.random.key(3), "batched").value
    # Raw and typed keys give the same numbers.
    raw = jax.random.key_data(key)
    with jax.default_prng_impl("rbg"):
        assert raw.shape == (4,)
        close(run(PARAMS, raw, "batched").value, solution.value)
    raw, typed = (run(PARAMS, make(0)) for make in (jax.random.PRNGKey, jax.random.key))
    assert (raw.value, raw.std_err) == (typed.value, typed.std_err)


def test_numbers_do_not_depend_on_jit():
    """Nor where JAX compiles nothing at all."""
    with jax.disable_jit():
        eager = jax.value_and_grad(value)(PARAMS, KEYS[0])
    close(both(PARAMS, KEYS[0], "trace"), eager, rtol=1e-13)


def test_jvp_of_python_numbers():
    """They reach the primitive as they are when a function operator closes over them."""

    def value(c):
        operator = lx.FunctionLinearOperator(lambda x: c * x, STRUCTURE)
        return tr.trace(jax.random.key(0), operator, K, tr.HutchinsonEstimator()).value

    assert jax.jvp(value, (2.0,), (3.0,)) == pytest.approx((2.0 * N, 3.0 * N))


def test_cond_between_two_estimators():
    """Solutions have one structure, whatever the estimator and the budget."""

    def first():
        return tr.trace(KEYS[0], by_products(B, PSD), K, ESTIMATORS["xtrace"])

    def second():
        return tr.trace(KEYS[0], by_products(B, PSD), N, tr.HutchinsonEstimator())

    @jax.jit
    def run(wanted):
        solutions = lax.cond(wanted, first, second), first(), second()
        return [(solution.value, solution.interval()) for solution in solutions]

    for wanted, place in ((True, 1), (False, 2)):
        found = run(wanted)
        close(found[0][0], found[place][0], rtol=1e-12)
        close(found[0][1], found[place][1], rtol=1e-6)

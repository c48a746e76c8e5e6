"""The primitives under every JAX and Equinox transformation, alone and nested.

An estimator of one product: the rules know nothing of any estimator, and are the same for all
primitives. (Small programs show as much as large ones; XTrace and a diagonal are taken, too, where
batches nest.) What is an estimator's own, its weights, is in `estimators/test_statistics.py`. Of a
diagonal the sum of the entries is taken.

The operator is A(p) = exp(a) B + b_0^2 C + b_1 D with fixed semidefinite B, C, D. An estimate with
weights G is <G, A>, so its derivatives of *every* order are known from the first:

    d/da = exp(a) <G, B> =: g_a,  d/db_0 = 2 b_0 <G, C> =: g_0,  d/db_1 = <G, D> =: g_1
    the second ones: d^2/da^2 = g_a,  d^2/db_0^2 = g_0 / b_0, and zero otherwise.
"""

import contextlib
import dataclasses
import functools
import warnings
from typing import final

import equinox as eqx
import jax
import jax.export
import jax.flatten_util
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax import lax

import traceax as tr
import traceax.extend as tre

from ..helpers import (
    PSD,
    by_products,
    keys,
    register_tags,
    with_spectrum,
)


@final
class OneProbe(tr.AbstractTraceEstimator):
    """v^T A v of one random vector v."""

    def compute(self, key, operator, k, weights):
        del k, weights
        block = tre.BlockOperator(operator)
        v = jax.random.rademacher(key, (block.n, 1), block.dtype)
        samples = v * block.mm(v)
        estimate = tre.make_estimate(jnp.sum(samples), jnp.max(jnp.abs(samples)), 1, 1)
        return estimate, tre.LowRankWeights(v, v)


ESTIMATORS = {
    "trace": OneProbe(),
    "diagonal": tr.HutchinsonEstimator(),
}
OTHERS = {
    "xtrace": tr.XTraceEstimator(improved=False),
    "hutchinson-batched": tr.HutchinsonEstimator(batch_size=5),
}
N, K = 12, 7

_rng = np.random.default_rng(0)
B, C, D = (jnp.asarray(with_spectrum(_rng, _rng.uniform(0.1, 2, N) ** 3)) for _ in range(3))
PARAMS = {"a": jnp.asarray(0.3), "b": jnp.asarray([0.7, 1.3])}
BATCH = {"a": jnp.asarray([0.3, -0.4, 0.1]), "b": jnp.asarray([[0.7, 1.3], [0.2, 0.9], [1.1, 2.0]])}
KEYS = keys(3)

each_estimator = pytest.mark.parametrize("name", ["trace"])


def dense(params):
    b = params["b"]
    return jnp.exp(params["a"]) * B + b[0] ** 2 * C + b[1] * D


def estimated(name, key, operator, k=K):
    """A solution: of a diagonal the sums of its entries and of their errors."""
    estimator = {**ESTIMATORS, **OTHERS}[name]
    if isinstance(estimator, tr.AbstractTraceEstimator):
        return tr.trace(key, operator, k, estimator)
    solution = tr.diagonal(key, operator, k, estimator)
    value, std_err = jnp.sum(solution.value), jnp.sum(solution.std_err)
    return dataclasses.replace(solution, value=value, std_err=std_err)


def solve(name, params, key):
    return estimated(name, key, lx.MatrixLinearOperator(dense(params), PSD))


def value_of(name):
    return lambda params, key: solve(name, params, key).value


def params_of(i):
    return jax.tree.map(lambda x: x[i], BATCH)


@functools.cache
def reference(name):
    """Values (3 keys x 3 operators) and gradients, one call at a time."""
    one = jax.jit(jax.value_and_grad(value_of(name)))
    table = [[one(params_of(j), KEYS[i]) for j in range(3)] for i in range(3)]
    values = np.array([[v for v, _ in row] for row in table])

    def stack(name):
        return np.array([[g[name] for _, g in row] for row in table])

    return values, {"a": stack("a"), "b": stack("b")}


def close(got, expected, rtol=1e-10):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.shape(x) == np.shape(y)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=1e-12)


def at(index, tree):
    return jax.tree.map(lambda x: x[index], tree)


def count(jaxpr, name):
    """How many equations called `name` there are, sub-jaxprs included."""
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name == name
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                total += count(inner, name)
    return total


# --- jit -----------------------------------------------------------------------------------------


@each_estimator
def test_jit_equals_eager(name):
    eager = solve(name, PARAMS, KEYS[0])
    jitted = jax.jit(lambda p, key: solve(name, p, key))(PARAMS, KEYS[0])
    close(jitted, eager)
    assert jitted.value.shape == ()
    assert jitted.value.dtype == jnp.float64


@each_estimator
def test_disabled_jit_equals_jit(name):
    with jax.disable_jit():
        eager = solve(name, PARAMS, KEYS[0])
    close(eager.value, solve(name, PARAMS, KEYS[0]).value)
    close(eager.std_err, solve(name, PARAMS, KEYS[0]).std_err, rtol=1e-8)


@each_estimator
def test_filter_jit_inline_inside_filter_jit(name):
    inner = eqx.filter_jit(value_of(name), inline=True)

    @eqx.filter_jit
    def outer(params, key):
        return 2.0 * inner(params, key), eqx.filter_grad(inner)(params, key)

    values, gradients = reference(name)
    doubled, gradient = outer(PARAMS, KEYS[0])
    close(doubled, 2 * values[0, 0])
    close(gradient, at((0, 0), gradients))


@each_estimator
def test_values_stay_scalar_and_gradients_keep_parameter_shape(name):
    values, gradients = reference(name)
    value, gradient = eqx.filter_value_and_grad(value_of(name))(PARAMS, KEYS[0])
    assert isinstance(value, jax.Array)
    assert value.shape == ()
    close(value, values[0, 0])
    close(gradient, at((0, 0), gradients))
    gradient = eqx.filter_jit(eqx.filter_grad(value_of(name)))(PARAMS, KEYS[0])
    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, PARAMS)
    close(gradient, at((0, 0), gradients))


@each_estimator
def test_gradient_of_module_and_of_operator(name):
    """The gradient with respect to an operator is an operator: <G, dA> for its matrix is G^H."""
    operator = lx.MatrixLinearOperator(dense(PARAMS), PSD)
    grad = eqx.filter_grad(lambda op: estimated(name, KEYS[0], op).value)(operator)
    assert isinstance(grad, lx.MatrixLinearOperator)
    assert grad.matrix.shape == (N, N)
    _, gradients = reference(name)
    close(jnp.sum(grad.matrix * C) * 2 * PARAMS["b"][0], gradients["b"][0, 0, 0])


# --- shapes without computing --------------------------------------------------------------------


@each_estimator
@pytest.mark.parametrize("k", [1, N])
def test_static_not_traced_shapes_under_filter_eval_shape(name, k):
    operator = lx.MatrixLinearOperator(dense(PARAMS), PSD)

    def call(key, operator):
        return estimated(name, key, operator, k)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # budgets below the smallest
        filtered = eqx.filter_eval_shape(call, KEYS[0], operator)
        shapes = jax.eval_shape(lambda key: call(key, operator), KEYS[0])
        shape_of_gradient = jax.eval_shape(
            jax.grad(lambda p: call(KEYS[0], lx.MatrixLinearOperator(dense(p), PSD)).value),
            PARAMS,
        )
    for solution in (filtered, shapes):
        assert (solution.value.shape, solution.value.dtype) == ((), jnp.float64)
        assert (solution.std_err.shape, solution.std_err.dtype) == ((), jnp.float64)
        assert (solution.num_matvecs.shape, solution.num_matvecs.dtype) == ((), jnp.int32)
    assert jax.tree.map(jnp.shape, shape_of_gradient) == jax.tree.map(jnp.shape, PARAMS)


# --- tangents that are not there -----------------------------------------------------------------


@each_estimator
def test_derivative_with_respect_to_one_of_several_arguments(name):
    def f(a, b, key):
        return value_of(name)({"a": a, "b": b}, key)

    _, gradients = reference(name)
    a, b = PARAMS["a"], PARAMS["b"]
    close(jax.grad(f, argnums=0)(a, b, KEYS[0]), gradients["a"][0, 0])
    close(jax.grad(f, argnums=1)(a, b, KEYS[0]), gradients["b"][0, 0])
    value, tangent = eqx.filter_jvp(f, (a, b, KEYS[0]), (jnp.ones(()), None, None))
    close(value, reference(name)[0][0, 0])
    close(tangent, gradients["a"][0, 0])


def test_other_fields_have_zero_derivative():
    def f(params):
        solution = solve("trace", params, KEYS[0])
        return solution.std_err + solution.stats["std.err"]

    gradient = jax.grad(f)(PARAMS)
    close(gradient, jax.tree.map(jnp.zeros_like, PARAMS))


@jax.custom_jvp
def _cube(x):
    return x**3


@_cube.defjvp
def _(primals, tangents):
    (x,), (x_t,) = primals, tangents
    return _cube(x), 3 * x**2 * x_t


@eqx.filter_custom_jvp
def _penalty(module, key, name):
    return module.curvature(key, name)


@_penalty.def_jvp
def _(primals, tangents):
    module, key, name = primals
    module_t, key_t, name_t = tangents
    assert key_t is None
    assert name_t is None
    return eqx.filter_jvp(lambda m: m.curvature(key, name), (module,), (module_t,))


class Model(eqx.Module):
    weight: jax.Array
    frozen: jax.Array
    label: str = eqx.field(static=True)

    def curvature(self, key, name):
        matrix = B + _cube(self.weight) * C + lax.stop_gradient(self.frozen) * D
        return estimated(name, key, lx.MatrixLinearOperator(matrix, PSD)).value


@each_estimator
def test_scan_module_jit_symbolic_zero_tangents_no_leaked_tracers(name):
    model = Model(jnp.asarray(0.8), jnp.asarray(0.5), "m")
    step_keys = KEYS[:2]

    def loss(trained, rest, key):
        return _penalty(eqx.combine(trained, rest), key, name)

    spec = Model(True, False, "m")

    def step(carry, key):
        trained, rest = eqx.partition(carry, spec)
        value, gradient = jax.value_and_grad(loss)(trained, rest, key)
        assert gradient.frozen is None
        trained = jax.tree.map(lambda p, g: p - 1e-3 * g, trained, gradient)
        return eqx.combine(trained, rest), (value, gradient.weight)

    with jax.checking_leaks():
        scanned = jax.jit(lambda model: lax.scan(step, model, step_keys))(model)
    (final, (values, gradients)) = scanned

    carry = model
    for i in range(2):
        carry, (value, gradient) = step(carry, step_keys[i])
        close(values[i], value)
        close(gradients[i], gradient)
    close(final.weight, carry.weight)
    assert final.weight != model.weight


# --- operators that close over tracers -----------------------------------------------------------


def lineax_lets_go(closure_convert):
    """Whether a tagged operator that lineax makes inside `jit` leaks nothing, by itself."""

    def make(scale):
        structure = jax.ShapeDtypeStruct((N,), jnp.float64)
        lx.FunctionLinearOperator(
            lambda v: scale * v, structure, PSD, closure_convert=closure_convert
        )
        return scale

    try:
        with jax.checking_leaks():
            jax.jit(make)(jnp.asarray(1.0))
    except Exception as error:  # JAX has no class of its own for it
        if "Leaked trace" not in str(error):
            raise
        return False
    return True


@each_estimator
@pytest.mark.parametrize("closure_convert", [True, False])
def test_operator_closing_over_tracers_inside_while_loop(name, closure_convert):
    tags = () if closure_convert else PSD  # without a tag, and with one
    structure = jax.ShapeDtypeStruct((N,), jnp.float64)
    # lineax asks a tagged operator for its outputs, and Equinox keeps whom it asks: these tracers
    # leak without any estimate. (With a function that was converted: from JAX 0.11 on.)
    checking = jax.checking_leaks
    if tags and not lineax_lets_go(closure_convert):
        checking = contextlib.nullcontext

    def estimate(scale):
        operator = lx.FunctionLinearOperator(
            lambda v: scale * (B @ v), structure, tags, closure_convert=closure_convert
        )
        return estimated(name, KEYS[0], operator).value

    unit = estimated(name, KEYS[0], lx.MatrixLinearOperator(B, tags)).value  # homogeneous

    def body(carry):
        i, scale, total = carry
        return i + 1, 2 * scale, total + estimate(scale)

    start = (jnp.asarray(0), jnp.asarray(0.5), jnp.asarray(0.0))
    with checking():
        looped = jax.jit(lambda: lax.while_loop(lambda c: c[0] < 3, body, start))()
    close(looped[2], 3.5 * unit, rtol=1e-8)

    def step(scale, _):
        value, slope = jax.value_and_grad(estimate)(scale)
        return 2 * scale, (value, slope)

    with checking():
        _, (values, slopes) = jax.jit(lambda: lax.scan(step, jnp.asarray(0.5), length=3))()
    close(values, np.array([0.5, 1.0, 2.0]) * unit, rtol=1e-8)
    assert slopes.shape == (3,)
    np.testing.assert_allclose(slopes, slopes[0], rtol=1e-8)


# --- no second trace -----------------------------------------------------------------------------

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

    def out_structure(self):
        return jax.ShapeDtypeStruct(self.matrix.shape[:1], self.matrix.dtype)


register_tags(CountingOperator, lambda operator: True)


@each_estimator
def test_second_call_with_same_structure_does_not_trace_again(name):
    def f(matrix, key):
        return estimated(name, key, CountingOperator(matrix)).value

    functions = [f, jax.jit(f), jax.value_and_grad(f), jax.jit(jax.value_and_grad(f))]
    results = []
    for function in functions:
        results.append(function(B, KEYS[0]))
        before = len(TRACED)
        results.append(function(C, KEYS[1]))
        assert len(TRACED) == before, "the second call was traced again"
    close(results[0], results[2])
    close(results[1], results[3])
    assert float(results[0]) != float(results[1])
    assert len(TRACED) > 0


# --- one equation --------------------------------------------------------------------------------


@each_estimator
def test_jaxpr_holds_one_equation(name):
    f = value_of(name)
    transformed = {
        "plain": (f, PARAMS, KEYS[0]),
        "jit": (jax.jit(f), PARAMS, KEYS[0]),
        "vmap keys": (jax.vmap(f, (None, 0)), PARAMS, KEYS),
        "vmap both": (jax.vmap(f), BATCH, KEYS),
        "value_and_grad": (jax.value_and_grad(f), PARAMS, KEYS[0]),
        "vmap of value_and_grad": (jax.vmap(jax.value_and_grad(f)), BATCH, KEYS),
        "jit of vmap of value_and_grad": (jax.jit(jax.vmap(jax.value_and_grad(f))), BATCH, KEYS),
        "hessian": (jax.hessian(f), PARAMS, KEYS[0]),
        "linearize": (lambda p, key: jax.linearize(lambda q: f(q, key), p)[0], PARAMS, KEYS[0]),
    }
    for what, (function, *arguments) in transformed.items():
        jaxpr = jax.make_jaxpr(function)(*arguments)
        assert count(jaxpr.jaxpr, name) == 1, what


# --- vmap ----------------------------------------------------------------------------------------


@each_estimator
def test_vmap_over_keys_operators_and_both(name):
    values, gradients = reference(name)
    one = jax.value_and_grad(value_of(name))
    close(jax.vmap(one, (None, 0))(PARAMS, KEYS), (values[:, 0], at(np.s_[:, 0], gradients)))
    close(jax.vmap(one, (0, None))(BATCH, KEYS[1]), (values[1], at(1, gradients)))
    diagonal = (np.arange(3), np.arange(3))
    close(jax.vmap(one)(BATCH, KEYS), (values[diagonal], at(diagonal, gradients)))


@pytest.mark.parametrize("name", [*ESTIMATORS, "xtrace"])
def test_nested_vmap_and_gradient_in_either_order(name):
    values, gradients = reference(name)
    f = value_of(name)
    one = jax.value_and_grad(f)
    table = jax.jit(jax.vmap(jax.vmap(one, (0, None)), (None, 0)))(BATCH, KEYS)
    close(table, (values, gradients))

    # grad(vmap(vmap)): with three keys, a gradient is the sum over the keys.
    def total(batch):
        return jnp.sum(jax.vmap(jax.vmap(f, (0, None)), (None, 0))(batch, KEYS))

    close(jax.grad(total)(BATCH), jax.tree.map(lambda g: g.sum(0), gradients))


@each_estimator
def test_vmap_axes_that_are_not_zero(name):
    """The axis 2 of a stack of matrices and the axis 1 of raw keys; out_axes too."""
    matrices = jnp.stack([dense(params_of(j)) for j in range(3)], axis=2)
    raw = jnp.stack([jax.random.key_data(key) for key in KEYS], axis=1)

    def f(matrix, key):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        value = estimated(name, key, operator).value
        return value, jnp.ones(2) * value

    mapped = jax.vmap(f, (2, 1), (0, 1))
    values, wide = jax.jit(mapped)(matrices, raw)
    expected = reference(name)[0][np.arange(3), np.arange(3)]
    close(values, expected)
    assert wide.shape == (2, 3)
    # Nested: an unmapped axis inside, a mapped one outside, and the other way round.
    nested = jax.vmap(jax.vmap(lambda m, k: f(m, k)[0], (None, 1)), (2, None))(matrices, raw)
    close(nested, reference(name)[0].T)
    # A tangent is batched along the axis of what it is the tangent of.
    slopes = jax.grad(lambda m: jnp.sum(mapped(m, raw)[0]))(matrices)
    one = jax.jit(jax.grad(lambda m, k: f(m, k)[0]))
    alone = jnp.stack([one(matrices[..., j], raw[:, j]) for j in range(3)], axis=2)
    close(slopes, alone, rtol=1e-9)


def test_vmap_over_filtered_operators():
    """`eqx.filter_vmap` over an operator as a PyTree."""
    stacked = eqx.filter_vmap(lambda m: lx.MatrixLinearOperator(m, PSD))(jnp.stack([B, C, D]))
    values = eqx.filter_vmap(lambda op, key: tr.trace(key, op, K).value)(stacked, KEYS)
    for i, matrix in enumerate((B, C, D)):
        expected = tr.trace(KEYS[i], lx.MatrixLinearOperator(matrix, PSD), K).value
        close(values[i], expected)


@each_estimator
def test_vmap_axis_name_with_psum_in_the_operator(name):
    """A = sum_i A_i, spread over the axis: each lane multiplies by its own part and adds up."""
    parts = jnp.stack([B, C])
    structure = jax.ShapeDtypeStruct((N,), jnp.float64)

    def f(part, key):
        operator = lx.FunctionLinearOperator(lambda v: lax.psum(part @ v, "i"), structure, PSD)
        return estimated(name, key, operator).value

    whole = lx.MatrixLinearOperator(B + C, PSD)
    expected = estimated(name, KEYS[0], whole).value
    mapped = jax.vmap(f, (0, None), axis_name="i")
    close(mapped(parts, KEYS[0]), np.full(2, expected), rtol=1e-8)
    close(jax.jit(mapped)(parts, KEYS[0]), np.full(2, expected), rtol=1e-8)
    # Inside another vmap, which the operator knows nothing of.
    outer = jax.vmap(mapped, (None, 0))(parts, KEYS[:2])
    assert outer.shape == (2, 2)
    close(outer[0], np.full(2, expected), rtol=1e-8)


# --- derivatives of higher order, and in forward mode --------------------------------------------


def expected_hessian(name, i=0, j=0):
    _, g = reference(name)
    b0 = BATCH["b"][j, 0]
    return np.diag([g["a"][i, j], g["b"][i, j, 0] / b0, 0.0])


def flat(name, key=KEYS[0]):
    start, unravel = jax.flatten_util.ravel_pytree(PARAMS)
    return lambda x: value_of(name)(unravel(x), key), start


@each_estimator
def test_second_derivatives_in_every_mode(name):
    f, x = flat(name)
    expected = expected_hessian(name)
    modes = {
        "forward over reverse": jax.hessian(f),
        "reverse over reverse": jax.jacrev(jax.jacrev(f)),
        "reverse over forward": jax.jacrev(jax.jacfwd(f)),
    }
    for second in modes.values():
        np.testing.assert_allclose(jax.jit(second)(x), expected, rtol=1e-9, atol=1e-9)


@each_estimator
def test_jvp_of_vmap_of_jvp(name):
    _, x = flat(name)
    inner, outer = jnp.asarray([1.0, -2.0, 0.5]), jnp.asarray([0.3, 0.7, -1.1])

    def slopes(x):
        def along(key):
            g = flat(name, key)[0]
            return jax.jvp(g, (x,), (inner,))[1]

        return jax.vmap(along)(KEYS)

    first, second = jax.jvp(slopes, (x,), (outer,))
    _, gradients = reference(name)
    gradient = np.concatenate([gradients["a"][:, :1], gradients["b"][:, 0]], axis=1)
    np.testing.assert_allclose(first, gradient @ inner, rtol=1e-9)
    expected = [inner @ expected_hessian(name, i) @ outer for i in range(3)]
    np.testing.assert_allclose(second, expected, rtol=1e-9)


@each_estimator
def test_linearize_and_checkpoint(name):
    f, x = flat(name)
    values, gradients = reference(name)
    expected = np.concatenate([[gradients["a"][0, 0]], gradients["b"][0, 0]])
    value, push = jax.linearize(f, x)
    close(value, values[0, 0])
    np.testing.assert_allclose([push(e) for e in jnp.eye(3)], expected, rtol=1e-9)
    _, pull = jax.vjp(f, x)
    np.testing.assert_allclose(pull(jnp.asarray(2.0))[0], 2 * expected, rtol=1e-9)
    rematerialised = jax.jit(jax.value_and_grad(jax.checkpoint(f)))(x)
    close(rematerialised, (values[0, 0], expected), rtol=1e-9)


@each_estimator
def test_scan_of_vmap_of_grad(name):
    _, gradients = reference(name)

    def step(carry, key):
        gradient = jax.vmap(jax.grad(value_of(name)), (0, None))(BATCH, key)
        return carry + 1, gradient

    steps, stacked = jax.jit(lambda: lax.scan(step, 0, KEYS))()
    assert steps == 3
    close(stacked, gradients)


# --- keys ----------------------------------------------------------------------------------------


@each_estimator
def test_raw_and_typed_keys_give_the_same_numbers(name):
    raw = solve(name, PARAMS, jax.random.PRNGKey(0))
    typed = solve(name, PARAMS, jax.random.key(0))
    assert raw.value == typed.value
    assert raw.std_err == typed.std_err
    assert solve(name, PARAMS, jax.random.key(1)).value != typed.value


@pytest.mark.parametrize(("impl", "name"), [("rbg", "hutchinson-batched")])
def test_other_key_implementations(impl, name):
    truth = float(jnp.trace(dense(PARAMS)))
    key = jax.random.key(3, impl=impl)
    solution = solve(name, PARAMS, key)
    assert abs(solution.value - truth) < 6 * solution.std_err
    assert solution.value != solve(name, PARAMS, jax.random.key(3)).value
    gradient = jax.grad(value_of(name))(PARAMS, key)
    assert abs(gradient["b"][1] - jnp.trace(D)) < jnp.trace(D)
    raw = jax.random.key_data(key)
    with jax.default_prng_impl(impl):
        assert raw.shape == (4,)
        close(solve(name, PARAMS, raw).value, solution.value)


def test_batched_products_do_not_depend_on_jit():
    """Hutchinson in batches (5 + 2 probes): the same numbers eagerly, jitted, and unbatched."""
    f = value_of("hutchinson-batched")
    eager, jitted = jax.value_and_grad(f)(PARAMS, KEYS[0]), jax.jit(jax.value_and_grad(f))
    close(jitted(PARAMS, KEYS[0]), eager, rtol=1e-13)
    with jax.disable_jit():
        close(jax.value_and_grad(f)(PARAMS, KEYS[0]), eager, rtol=1e-13)


def test_jvp_of_python_numbers():
    """They reach the primitive as they are when a function operator closes over them."""
    structure = jax.ShapeDtypeStruct((20,), jnp.float64)

    def value(c):
        operator = lx.FunctionLinearOperator(lambda x: c * x, structure)
        return tr.trace(jax.random.key(0), operator, 10).value

    assert jax.jvp(value, (2.0,), (3.0,)) == pytest.approx((40.0, 60.0))


@pytest.mark.parametrize("k", [K, N])
def test_cond_between_two_estimators(k):
    """Solutions have one structure, whatever the estimator and the budget."""
    operator, key = by_products(B, PSD), KEYS[0]

    def first():
        return tr.trace(key, operator, K, tr.XNysTraceEstimator())

    def second():
        return tr.trace(key, operator, k, tr.HutchinsonEstimator())

    run = jax.jit(lambda wanted: lax.cond(wanted, first, second))
    for wanted, alone in ((True, first()), (False, second())):
        found = run(wanted)
        close(found.value, alone.value, rtol=1e-12)
        close(found.interval(), alone.interval(), rtol=1e-6)


@pytest.mark.slow
def test_export_of_batches_of_any_size():
    """`jax.export` with a symbol in the place of the number of lanes."""
    matrix = jnp.eye(20) + 1 / (1.0 + jnp.arange(20.0)[:, None] + jnp.arange(20.0))
    structure = jax.ShapeDtypeStruct((20,), jnp.float64)

    def value(key, c):
        operator = lx.FunctionLinearOperator(lambda v: c * (matrix @ v), structure)
        return tr.trace(jax.random.wrap_key_data(key), operator, 12).value

    run = jax.jit(jax.vmap(value))
    (lanes,) = jax.export.symbolic_shape("lanes")
    arguments = (((lanes, 2), jnp.uint32), ((lanes,), jnp.float64))
    exported = jax.export.export(run)(*(jax.ShapeDtypeStruct(*each) for each in arguments))
    for count in (1, 3):
        key_data = jax.random.key_data(jax.random.split(jax.random.key(0), count))
        factors = jnp.arange(1.0, count + 1)
        close(exported.call(key_data, factors), run(key_data, factors), rtol=1e-12)

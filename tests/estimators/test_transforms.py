"""What an operator may be, and what a derivative costs: PyTrees, forms, closures, batches."""

import itertools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tr
from traceax._operators.block_operator import BlockOperator

from .. import reference
from ..helpers import CLASSES, ESTIMATORS, PROBED, PSD, by_products, operator_for, with_spectrum

N, K = 24, 12
KEY = jr.key(5)
FUNCTIONS = {"trace": tr.trace, "diagonal": tr.diagonal}


def family(dtype=np.float64):
    """B, C: semidefinite, and they do not commute."""
    rng = np.random.default_rng(0)
    spectra = 0.7 ** np.arange(N), np.linspace(1, 2, N)
    return tuple(jnp.asarray(with_spectrum(rng, s, dtype)) for s in spectra)


# ---------------------------------------------------------------------------- forms of operators


PARAMETERS = {"w": np.zeros((4, 4)), "b": (np.zeros(5), np.zeros((1, 3)))}
SIZES = [5, 3, 16]  # leaves in the order of the flattened tree: b[0], b[1], w


def tree_operator(matrix):
    _, unravel = ravel_pytree(PARAMETERS)

    def product(tree):
        return unravel(matrix @ ravel_pytree(tree)[0])

    return lx.FunctionLinearOperator(product, jax.eval_shape(lambda: PARAMETERS), PSD)


@pytest.mark.parametrize("name", PROBED)
def test_pytrees(name):
    """The numbers are those of the flattened operator, where the probes are. (Hutchinson's are
    drawn leaf by leaf.) Block traces are sums of the diagonal.
    """
    matrix = family()[0]
    estimator = PROBED[name]

    @jax.jit
    def run(matrix):
        operator, flat = tree_operator(matrix), by_products(matrix, PSD)
        functions = tr.trace, tr.diagonal, tr.block_traces
        found = [function(KEY, operator, K, estimator) for function in functions]
        return tr.trace(KEY, flat, K, estimator), *found

    flat, trace, diagonal, blocks = run(matrix)
    value, std_err = flat.value, flat.std_err
    if name == "hutchinson":
        draw = partial(tr.RademacherSampler().probes_by_leaf, KEY, [(5,), (3,), (16,)], K)
        omega = jax.jit(lambda: draw(matrix.dtype))()
        samples = reference.hutchinson(np.asarray(matrix), np.concatenate(omega))
        value, std_err = samples.mean(), samples.std(ddof=1) / np.sqrt(K)
    np.testing.assert_allclose(trace.value, value, rtol=1e-10)
    np.testing.assert_allclose(trace.std_err, std_err, rtol=1e-8)
    assert jax.tree.map(jnp.shape, diagonal.value) == jax.tree.map(jnp.shape, PARAMETERS)
    assert jax.tree.structure(blocks.std_err) == jax.tree.structure(PARAMETERS)
    sums = jax.tree.map(np.sum, diagonal.value)
    for found, total in zip(jax.tree.leaves(blocks.value), jax.tree.leaves(sums), strict=True):
        np.testing.assert_allclose(found, total, rtol=1e-9, atol=1e-11)
    ends = itertools.pairwise(np.cumsum([0, *SIZES]))
    expected = [np.diag(matrix)[a:b].sum() for a, b in ends]
    leaves = jax.tree.leaves(blocks.value), jax.tree.leaves(blocks.std_err)
    for found, error, total in zip(*leaves, expected, strict=True):
        assert abs(found - total) <= 6 * error


@pytest.mark.parametrize("dtype", [None, int])
def test_integer_probes(dtype):
    """1.0.2: its default (int) probes crashed on these. A multiple of I is exact for them."""
    function = lx.FunctionLinearOperator(lambda v: 2.5 * v, jax.ShapeDtypeStruct((12,), float))
    jacobian = lx.JacobianLinearOperator(lambda x, _: 1.25 * x**2, jnp.ones(12))
    identity = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((12,), float)) * jnp.asarray(2.5)
    sampler = tr.RademacherSampler(dtype)
    for operator in (function, jacobian, identity):
        value, stats = tr.HutchinsonEstimator(sampler).estimate(KEY, operator, 5)
        assert value == 30.0
        assert stats["std.err"] <= 30 * 10 * np.finfo(np.float64).eps  # rounding alone


@pytest.mark.parametrize("what", FUNCTIONS)
def test_dtypes(what):
    """They follow the operator, in float32 beside x64 as well; nothing is computed. Traces and
    diagonals of what is tagged Hermitian are real.
    """
    for name, estimator in CLASSES.items():
        for dtype in (jnp.float32, jnp.complex64, jnp.bfloat16, jnp.int32):
            if dtype == jnp.int32 and name == "auto":
                continue  # strict promotion refuses such products
            operator = operator_for(estimator, jnp.eye(N, dtype=dtype), PSD)
            solution = eqx.filter_eval_shape(FUNCTIONS[what], KEY, operator, K, estimator)
            expected = {jnp.bfloat16: jnp.float32, jnp.int32: jnp.float32}.get(dtype, dtype)
            real = jnp.finfo(expected).dtype
            expected = real if lx.is_positive_semidefinite(operator) else expected
            assert solution.value.dtype == expected, name
            assert solution.std_err.dtype == real


# ------------------------------------------------------------------------- what derivatives cost


@pytest.mark.parametrize("name", ["hutchinson", "xtrace", "xnystrace", "exact"])
def test_what_is_not_differentiated_costs_nothing(name):
    """A = B + theta C with theta differentiated: no further product with B.

    B's products are counted by a callback, which has no derivative: asking for one is an error.
    """
    b, c = (np.asarray(matrix) for matrix in family())
    spent = []

    def count(x):
        spent.append(int(np.prod(x.shape[:-1])))
        return np.asarray(x) @ b.T

    def product(x):
        structure = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(count, structure, x, vmap_method="expand_dims")

    structure = jax.ShapeDtypeStruct((N,), jnp.float64)
    fixed = lx.FunctionLinearOperator(product, structure, PSD)

    def f(theta):
        moving = by_products(theta * jnp.asarray(c), PSD)
        operator = lx.TaggedLinearOperator(fixed + moving, PSD)
        given = (N, CLASSES["xtrace"]) if name == "exact" else (K, CLASSES[name])
        return tr.trace(KEY, operator, *given)

    solution = jax.block_until_ready(jax.jit(f)(0.3))
    plain, spent[:] = sum(spent), []
    both = jax.jit(jax.value_and_grad(lambda theta: f(theta).value))
    value, gradient = jax.block_until_ready(both(0.3))
    assert plain == int(solution.num_matvecs) == sum(spent)
    np.testing.assert_allclose(value, solution.value, rtol=1e-12)
    assert 0.5 * np.trace(c) < gradient < 2 * np.trace(c)


def test_estimators_hold_no_arrays():
    """They are static: an estimator inside a model adds no leaf to it."""
    for estimator in ESTIMATORS.values():
        assert jax.tree.leaves(eqx.filter(estimator, eqx.is_array)) == []


# ------------------------------------------------------------------------------ batches, memory


@pytest.mark.parametrize("what", FUNCTIONS)
def test_batches_change_no_number(what):
    """Vectors are multiplied seven at once, or all; Hutchinson draws its probes by the batch."""
    weights = jnp.linspace(1.0, 2.0, N)

    @jax.jit
    def run(weights):
        def value(weights, k, size):
            operator = by_products(weights[:, None] * family()[0] * weights, PSD)
            estimator = tr.XTraceEstimator(batch_size=size)
            return jnp.sum(jnp.sin(FUNCTIONS[what](KEY, operator, k, estimator).value))

        return [[jax.value_and_grad(value)(weights, k, size) for size in (None, 7)] for k in (K, N)]

    for (value, gradient), (batched_value, batched_gradient) in run(weights):
        np.testing.assert_allclose(batched_value, value, rtol=1e-12)
        np.testing.assert_allclose(batched_gradient, gradient, rtol=1e-10, atol=1e-12)
    operator = by_products(family()[0], PSD)

    def scaled(c):
        found = FUNCTIONS[what](KEY, c * operator, K, tr.HutchinsonEstimator(batch_size=5))
        return found.value, found

    run = jax.jit(lambda c: jax.jvp(scaled, (c,), (1.0,), has_aux=True))
    _, slope, batched = run(1.0)
    np.testing.assert_allclose(slope, batched.value, rtol=1e-12)
    truth = np.diag(family()[0]) if what == "diagonal" else np.trace(family()[0])
    assert np.all(np.abs(batched.value - truth) <= 6 * batched.std_err)
    assert batched.stats["dof"] == K - 1


def blocks(function, n, width):
    """Temporary memory of a compiled function of a diagonal, in blocks of `n x width` numbers."""
    compiled = jax.jit(function).lower(jax.ShapeDtypeStruct((n,), jnp.float32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (4 * n * width)


def of_diagonal(numbers, k, estimator):
    structure = jax.ShapeDtypeStruct(numbers.shape, numbers.dtype)
    operator = lx.FunctionLinearOperator(lambda v: numbers * v + jnp.mean(v), structure, PSD)
    return tr.trace(KEY, operator, k, estimator).value


# Measured: 1.1 and 2.1 blocks for Hutchinson, value and gradient; 2.3 for Hutch++, 2.5 for XTrace,
# 4.0 for XNysTrace. (1.0.2's Hutchinson held four to six.) In the last line eight of a thousand
# probes are multiplied at once: at most 20 vectors.
@pytest.mark.parametrize(
    ("estimator", "n", "k", "width", "gradient", "limit"),
    [
        (tr.HutchinsonEstimator(), 20_000, 96, 96, True, 3),
        (tr.HutchPlusPlusEstimator(), 20_000, 96, 96, False, 3),
        (tr.XTraceEstimator(), 20_000, 96, 96, False, 3),
        (tr.XNysTraceEstimator(), 20_000, 96, 96, False, 4.5),
        (tr.HutchinsonEstimator(batch_size=8), 10_000_000, 1000, 1, True, 20),
    ],
)
def test_copies_of_the_block_of_probes(estimator, n, k, width, gradient, limit):
    value = partial(of_diagonal, k=k, estimator=estimator)
    assert blocks(jax.value_and_grad(value) if gradient else value, n, width) <= limit


def test_default_is_a_block_of_a_documented_size():
    """2^27 numbers: what is wider is multiplied in several batches, by default as well."""
    structure = jax.ShapeDtypeStruct((2**24,), jnp.float32)
    operator = lx.FunctionLinearOperator(lambda v: 2 * v, structure)

    def loops(size):
        block = BlockOperator(operator, size)
        program = jax.make_jaxpr(block.mm)(jax.ShapeDtypeStruct((2**24, 20), jnp.float32))
        return str(program).count("scan[")

    assert (loops(None), loops(20)) == (1, 0)

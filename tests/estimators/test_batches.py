"""How many vectors are multiplied at once: `batch_size`, a field of every estimator."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._operators.block_operator import BlockOperator
from traceax._operators.width import batch_size_of, in_batches

from ..helpers import PSD, variant

N, K = 60, 24
KEY = jr.key(0)
TRACES = {
    "hutch++": tr.HutchPlusPlusEstimator,
    "xtrace": tr.XTraceEstimator,
    "xnystrace": tr.XNysTraceEstimator,
    "auto": tr.AutoTraceEstimator,
    "exact": tr.ExactTraceEstimator,
}
DIAGONALS = {
    "diag++": tr.DiagPlusPlusEstimator,
    "xdiag": tr.XDiagEstimator,
    "xnysdiag": tr.XNysDiagEstimator,
    "auto": tr.AutoDiagonalEstimator,
    "exact": tr.ExactDiagonalEstimator,
}
EVERY = [tr.HutchinsonEstimator, tr.HutchinsonDiagonalEstimator]
EVERY += [*TRACES.values(), *DIAGONALS.values()]


def _factor(n):
    return np.random.default_rng(1).standard_normal((n, n)) / np.sqrt(n)


def _operator(weights, tags=PSD):
    """`F diag(weights) F^T` as a function; not symmetric without the tag."""
    factor = _factor(len(weights))
    other = factor if tags else np.roll(factor, 1, axis=1)
    structure = jax.ShapeDtypeStruct(weights.shape, weights.dtype)
    return lx.FunctionLinearOperator(lambda v: factor @ (weights * (other.T @ v)), structure, tags)


def _both(estimate):
    """The value and its gradient, for two sizes of batches."""

    @eqx.filter_jit
    def run(weights):
        return [
            jax.value_and_grad(lambda w, size=size: estimate(w, size))(weights)
            for size in (None, 7)
        ]

    return run(jnp.linspace(1.0, 2.0, N))


def _assert_same(results):
    (value, gradient), (batched_value, batched_gradient) = results
    np.testing.assert_allclose(batched_value, value, rtol=1e-12)
    np.testing.assert_allclose(batched_gradient, gradient, rtol=1e-10, atol=1e-12)
    assert np.linalg.norm(gradient) > 0


# (XTrace's batches are those of the run to a tolerance below, the others' those of Diag++.)
@pytest.mark.parametrize(
    "name", [variant(name) if name not in ("xnystrace", "exact") else name for name in TRACES]
)
def test_batches_change_no_trace(name):
    def trace(weights, size):
        return tr.trace(KEY, _operator(weights), K, TRACES[name](batch_size=size)).value

    _assert_same(_both(trace))


@pytest.mark.parametrize(
    "name", [variant(name) if name in ("xdiag", "xnysdiag", "auto") else name for name in DIAGONALS]
)
def test_batches_change_no_diagonal(name):
    tags = PSD if "nys" in name else ()

    def first(weights, size):
        estimator = DIAGONALS[name](batch_size=size)
        return jnp.sum(jnp.sin(tr.diagonal(KEY, _operator(weights, tags), K, estimator).value))

    _assert_same(_both(first))


@pytest.mark.variant
def test_batches_change_no_estimate_to_a_tolerance():
    def trace(weights, size):
        estimator = tr.XTraceEstimator(batch_size=size)
        return tr.trace(KEY, _operator(weights), rtol=1e-2, max_k=40, estimator=estimator).value

    _assert_same(_both(trace))


def _temporary(fn, *structures):
    """Bytes of temporary memory of the compiled program."""
    return jax.jit(fn).lower(*structures).compile().memory_analysis().temp_size_in_bytes


WIDE = 400  # numbers that one product of the operator below holds for every entry of its vector


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [variant(tr.XTraceEstimator), tr.XDiagEstimator])
def test_memory_of_products_is_that_of_a_batch(estimator):
    """An operator whose products hold far more than their vectors (a network's activations)."""
    n, k = 256, 48

    def mv(weights, v):
        x = jnp.sin(weights[:, None] * jnp.arange(1, WIDE + 1, dtype=v.dtype)) * v[:, None]
        return jnp.sum(jnp.cumsum(jnp.flip(jnp.cumsum(x, axis=1), 1), axis=0), axis=1)

    def value(weights, size):
        structure = jax.ShapeDtypeStruct(weights.shape, weights.dtype)
        operator = lx.FunctionLinearOperator(lambda v: mv(weights, v), structure)
        chosen = estimator(batch_size=size)
        if estimator is tr.XTraceEstimator:
            return tr.trace(KEY, operator, k, chosen).value
        return jnp.sum(tr.diagonal(KEY, operator, k, chosen).value)

    weights = jax.ShapeDtypeStruct((n,), jnp.float32)
    for fn in (value, jax.grad(value)):
        at_once, batched = (_temporary(lambda w, s=s, fn=fn: fn(w, s), weights) for s in (None, 2))
        assert batched < at_once / 5


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_of_a_thousand_probes_of_ten_million(gradient):
    """n = 1e7, k = 1000, batch_size = 8, float32: at most 20 vectors, value and gradient."""
    n = 10_000_000

    def value(weights):
        structure = jax.ShapeDtypeStruct((n,), jnp.float32)
        operator = lx.FunctionLinearOperator(
            lambda v: weights * v + jnp.mean(v), structure, lx.symmetric_tag
        )
        return tr.trace(KEY, operator, 1000, tr.HutchinsonEstimator(batch_size=8)).value

    fn = jax.value_and_grad(value) if gradient else value
    temporary = _temporary(fn, jax.ShapeDtypeStruct((n,), jnp.float32))
    assert temporary / (4 * n) <= 20


def test_default_is_a_block_of_a_documented_size():
    """2^27 numbers: what is wider is multiplied in several batches, by default as well."""
    n = 2**24

    def widths(size):
        structure = jax.ShapeDtypeStruct((n,), jnp.float32)
        seen = []

        def product(x):
            operator = lx.FunctionLinearOperator(lambda v: 2 * v, structure)
            block = BlockOperator(in_batches(operator, size))
            seen.append(block._width([x]))
            return block.mm(x)

        jax.eval_shape(product, jax.ShapeDtypeStruct((n, 20), jnp.float32))
        return seen

    assert widths(None) == [7]  # 20 vectors, at most 8 at once, in batches that are even
    assert widths(3) == [3]


def test_a_matrix_is_multiplied_at_once():
    operator = lx.MatrixLinearOperator(jnp.eye(4))
    assert BlockOperator(in_batches(operator, 2))._width([jnp.ones((4, 3))]) == 3


def test_batches_of_the_adjoint():
    operator = in_batches(_operator(jnp.ones(N), ()), 4)
    assert batch_size_of(operator) == 4
    x = jr.normal(KEY, (N, 9))
    expected = operator.as_matrix().T @ x
    np.testing.assert_allclose(BlockOperator(operator).adjoint_mm(x), expected, atol=1e-12)


@pytest.mark.parametrize("estimator", EVERY)
def test_every_estimator_has_a_batch_size(estimator):
    assert estimator().batch_size is None
    assert estimator(batch_size=3).batch_size == 3
    for size in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="must be an int of at least 1, or None"):
            estimator(batch_size=size)

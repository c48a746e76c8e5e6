"""Operators whose entries are stored: the default estimators read the trace and the diagonal."""

import equinox as eqx
import jax
import jax.experimental.sparse
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from ..helpers import NSD, PSD, by_products, operator_for, variant

KEY = jr.key(5)
N = 9
RNG = np.random.default_rng(21)
GENERAL = RNG.standard_normal((N, N))
POSITIVE = GENERAL @ GENERAL.T
COMPLEX = GENERAL + 1j * RNG.standard_normal((N, N))
BANDS = [RNG.standard_normal(N - abs(i)) for i in (0, -1, 1)]
WEIGHTS = np.linspace(0.5, 2.0, N)
THIN = np.where(RNG.random((N, N)) < 0.3, GENERAL, 0.0) + np.diag(WEIGHTS)
INTEGERS = np.arange(N * N).reshape(N, N)
STRUCTURE = jax.ShapeDtypeStruct((N,), jnp.float64)


def matrix(array, tags=()):
    return lx.MatrixLinearOperator(jnp.asarray(array), tags)


def sparse(array, tags=()):
    return tr.SparseLinearOperator(jax.experimental.sparse.BCOO.fromdense(jnp.asarray(array)), tags)


def pytree():
    cut = {"a": slice(0, 4), "b": slice(4, N)}
    blocks = {i: {j: jnp.asarray(GENERAL[cut[i], cut[j]]) for j in cut} for i in cut}
    parts = {"a": jax.ShapeDtypeStruct((4,), float), "b": jax.ShapeDtypeStruct((5,), float)}
    return lx.PyTreeLinearOperator(blocks, parts)


def weights():
    return lx.DiagonalLinearOperator(jnp.asarray(WEIGHTS))


# Operators, and the matrices that they are.
STORED = {
    "matrix": (lambda: matrix(GENERAL), GENERAL),
    "positive": (lambda: matrix(POSITIVE, PSD), POSITIVE),
    "negative": (lambda: matrix(-POSITIVE, NSD), -POSITIVE),
    "complex": (lambda: matrix(COMPLEX), COMPLEX),
    # lineax makes integers float32.
    "integer": (lambda: matrix(INTEGERS), INTEGERS.astype(np.float32)),
    "pytree": (pytree, GENERAL),
    "diagonal": (weights, np.diag(WEIGHTS)),
    "tridiagonal": (
        lambda: lx.TridiagonalLinearOperator(*map(jnp.asarray, BANDS)),
        np.diag(BANDS[0]) + np.diag(BANDS[1], -1) + np.diag(BANDS[2], 1),
    ),
    "identity": (lambda: lx.IdentityLinearOperator(STRUCTURE), np.eye(N)),
    "sparse": (lambda: sparse(THIN), THIN),
    "sparse-positive": (lambda: sparse(POSITIVE, PSD), POSITIVE),
    "tagged": (lambda: lx.TaggedLinearOperator(matrix(POSITIVE), PSD), POSITIVE),
    "transpose": (lambda: (matrix(GENERAL) + sparse(THIN)).T, (GENERAL + THIN).T),
    "adjoint": (lambda: lx.conj(matrix(COMPLEX).T), COMPLEX.conj().T),
    "sum": (
        lambda: matrix(GENERAL) + sparse(THIN) - 0.5 * lx.IdentityLinearOperator(STRUCTURE),
        GENERAL + THIN - 0.5 * np.eye(N),
    ),
    "multiple": (lambda: -(jnp.asarray(3.0) * sparse(THIN)) / 4.0, -0.75 * THIN),
    "scaled": (
        lambda: weights() @ matrix(GENERAL) @ weights(),
        WEIGHTS[:, None] * GENERAL * WEIGHTS,
    ),
}
CALLS = {
    "budget": {"k": 2},
    "whole budget": {"k": N},
    "tolerance": {"rtol": 1e-3},
}


def is_exact(solution, expected):
    np.testing.assert_allclose(solution.value, expected, rtol=1e-13)
    assert solution.value.dtype == expected.dtype
    assert np.all(solution.std_err == 0)
    assert solution.std_err.dtype == expected.real.dtype
    assert solution.num_matvecs == 0
    assert solution.result == tr.RESULTS.successful


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *((name, "budget") for name in STORED),
        *((name, call) for name in ("pytree", "sparse") for call in ("whole budget", "tolerance")),
        *(
            variant(name, call)
            for name in ("complex", "sum")
            for call in ("whole budget", "tolerance")
        ),
    ],
)
def test_what_is_stored_takes_no_products(name, call):
    build, truth = STORED[name]
    operator = build()
    is_exact(tr.trace(KEY, operator, **CALLS[call]), np.trace(truth))
    diagonal = tr.diagonal(KEY, operator, **CALLS[call])
    flat, errors = (
        np.concatenate([np.asarray(x) for x in jax.tree.leaves(part)])
        for part in (diagonal.value, diagonal.std_err)
    )
    is_exact(eqx.tree_at(lambda s: (s.value, s.std_err), diagonal, (flat, errors)), np.diag(truth))
    blocks = tr.block_traces(KEY, operator, **CALLS[call])
    assert jax.tree.structure(blocks.value) == jax.tree.structure(operator.in_structure())
    total = sum(np.asarray(x) for x in jax.tree.leaves(blocks.value))
    np.testing.assert_allclose(total, np.trace(truth), rtol=1e-13)
    assert blocks.num_matvecs == 0


@pytest.mark.parametrize("estimate", [tr.trace, tr.diagonal])
@pytest.mark.parametrize("name", ["sum", "multiple"])
def test_the_program_multiplies_nothing(name, estimate):
    operator = STORED[name][0]()
    arrays, static = eqx.partition(operator, eqx.is_array)

    def value(arrays):
        return estimate(KEY, eqx.combine(arrays, static), 2).value

    assert "dot_general" not in jax.jit(value).lower(arrays).as_text()


def test_the_derivative_is_exact():
    """d tr(A) = tr(dA), in both modes, at every order, for dense and for sparse entries."""
    entries = jnp.asarray(GENERAL)
    slope = jax.grad(lambda m: tr.trace(KEY, matrix(m), 2).value)(entries)
    np.testing.assert_array_equal(slope, np.eye(N))

    def power(c):
        return tr.trace(KEY, c**3 * matrix(GENERAL) + matrix(jnp.sin(c) * GENERAL), 2).value

    for order, factor in enumerate(
        (lambda c: c**3 + np.sin(c), lambda c: 3 * c**2 + np.cos(c), lambda c: 6 * c - np.sin(c))
    ):
        derivative = power
        for _ in range(order):
            derivative = jax.grad(derivative)
        np.testing.assert_allclose(derivative(0.7), factor(0.7) * np.trace(GENERAL), rtol=1e-13)
    _, tangent = jax.jvp(power, (0.7,), (1.0,))
    np.testing.assert_allclose(tangent, jax.grad(power)(0.7), rtol=1e-14)

    operator = sparse(THIN)
    data = jax.grad(lambda d: tr.trace(KEY, operator.with_data(d), rtol=0.1).value)(operator.data)
    on_diagonal = operator.pattern.rows == operator.pattern.columns
    np.testing.assert_array_equal(data, np.asarray(on_diagonal, float))

    moved = jax.jacobian(lambda m: tr.diagonal(KEY, matrix(m), 2).value)(entries)
    for j in range(N):
        np.testing.assert_array_equal(moved[j], np.diag(np.eye(N)[j]))


@pytest.mark.parametrize(
    "estimator",
    [tr.HutchinsonEstimator(), tr.XNysTraceEstimator()],
)
def test_a_named_estimator_estimates(estimator):
    solution = tr.trace(KEY, matrix(POSITIVE, PSD), 6, estimator)
    assert solution.num_matvecs == 6
    assert solution.std_err > 0
    # As it does where the same matrix is known by its products.
    alike = tr.trace(KEY, by_products(POSITIVE, PSD), 6, estimator)
    np.testing.assert_allclose(solution.value, alike.value, rtol=1e-12)


def test_the_default_estimates_where_nothing_is_stored():
    default = tr.AutoTraceEstimator()
    solution = tr.trace(KEY, operator_for(default, POSITIVE, PSD), 6)
    expected = tr.trace(KEY, matrix(POSITIVE, PSD), 6, tr.XNysTraceEstimator())
    np.testing.assert_allclose(solution.value, expected.value, rtol=1e-12)
    np.testing.assert_allclose(solution.std_err, expected.std_err, rtol=1e-10)


def test_the_stored_part_of_a_sum_is_read():
    """tr(F + M) = tr(F), estimated, + tr(M), read; so is the derivative."""
    hidden = by_products(POSITIVE, PSD)
    alone = tr.trace(KEY, hidden, 6)

    def value(c):
        solution = tr.trace(KEY, hidden + c * sparse(THIN), 6)
        return solution.value, solution

    slope, solution = jax.grad(value, has_aux=True)(2.0)
    np.testing.assert_allclose(solution.value, alone.value + 2 * np.trace(THIN), rtol=1e-13)
    np.testing.assert_allclose(solution.std_err, alone.std_err, rtol=1e-13)
    assert solution.num_matvecs == 6
    np.testing.assert_allclose(slope, np.trace(THIN), rtol=1e-14)


@pytest.mark.parametrize("make", [matrix, sparse])
@pytest.mark.parametrize("place", [(3, 3), (2, 5)])
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_nan_and_inf_anywhere_are_reported(make, place, options):
    """Off the diagonal, too, as a product would show it."""
    for bad in (jnp.nan, jnp.inf):
        operator = make(jnp.asarray(POSITIVE).at[place].set(bad))
        for estimate in (tr.trace, tr.diagonal):
            for sum_ in (operator, by_products(POSITIVE) + operator):
                solution = estimate(KEY, sum_, **options)
                assert solution.result == tr.RESULTS.nonfinite_operator


def test_transformations():
    matrices = jnp.asarray(RNG.standard_normal((4, N, N))).at[2, 0, 1].set(jnp.nan)

    def one(m):
        return tr.trace(KEY, matrix(m), 2)

    batch = jax.jit(jax.vmap(one))(matrices)
    traces = jnp.trace(matrices, axis1=1, axis2=2).at[2].set(jnp.nan)
    np.testing.assert_allclose(batch.value, traces, rtol=1e-13)
    good = [True, True, False, True]
    np.testing.assert_array_equal(batch.result == tr.RESULTS.successful, good)
    slopes = jax.vmap(jax.grad(lambda m: one(m).value))(matrices[:2])
    np.testing.assert_array_equal(slopes, np.broadcast_to(np.eye(N), (2, N, N)))

    shape = eqx.filter_eval_shape(tr.trace, KEY, matrix(COMPLEX), 2)
    assert (shape.value.shape, shape.value.dtype) == ((), np.complex128)
    assert (shape.std_err.shape, shape.std_err.dtype) == ((), np.float64)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_half_precision_is_added_up_in_float32(dtype):
    large = jnp.full((300, 300), 1000.0, dtype)  # the sum is beyond float16
    solution = tr.trace(KEY, matrix(large), 2)
    assert solution.value.dtype == jnp.float32
    assert solution.value == 300 * large[0, 0].astype(jnp.float32)


def test_the_exact_estimator_reads_as_well():
    """So do budgets of n products or more, with whatever estimator."""
    is_exact(tr.trace(KEY, matrix(GENERAL), 1, tr.ExactTraceEstimator()), np.trace(GENERAL))
    is_exact(tr.trace(KEY, matrix(GENERAL), N, tr.XTraceEstimator()), np.trace(GENERAL))
    is_exact(tr.diagonal(KEY, sparse(THIN), 1, tr.ExactDiagonalEstimator()), np.diag(THIN))


def test_there_is_no_state_to_go_on_from():
    solution = tr.trace(KEY, matrix(GENERAL), rtol=1e-3, keep_state=True)
    assert solution.state is None

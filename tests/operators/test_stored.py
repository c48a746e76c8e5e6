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

from ..helpers import PSD, by_products

KEY = jr.key(5)
N = 9
RNG = np.random.default_rng(21)
GENERAL = RNG.standard_normal((N, N))
POSITIVE = GENERAL @ GENERAL.T
COMPLEX = GENERAL + 1j * RNG.standard_normal((N, N))
BANDS = [RNG.standard_normal(N - abs(i)) for i in (0, -1, 1)]
WEIGHTS = np.linspace(0.5, 2.0, N)
UNIT = GENERAL - np.diag(np.diag(GENERAL)) + np.eye(N)
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
    "complex": (lambda: matrix(COMPLEX), COMPLEX),
    # lineax makes integers float32.
    "integer": (lambda: matrix(INTEGERS), INTEGERS.astype(np.float32)),
    "pytree": (pytree, GENERAL),
    "diagonal": (weights, np.diag(WEIGHTS)),
    "tridiagonal": (
        lambda: lx.TridiagonalLinearOperator(*map(jnp.asarray, BANDS)),
        np.diag(BANDS[0]) + np.diag(BANDS[1], -1) + np.diag(BANDS[2], 1),
    ),
    "unit": (lambda: by_products(UNIT, lx.unit_diagonal_tag), UNIT),
    "identity": (lambda: lx.IdentityLinearOperator(STRUCTURE), np.eye(N)),
    "sparse": (lambda: sparse(THIN), THIN),
    "tagged": (lambda: lx.TaggedLinearOperator(matrix(POSITIVE), PSD), POSITIVE),
    "transpose": (lambda: (matrix(GENERAL) + sparse(THIN)).T, (GENERAL + THIN).T),
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
    ("name", "call"), [*((name, "budget") for name in STORED), ("sparse", "tolerance")]
)
def test_what_is_stored_takes_no_products(name, call):
    build, truth = STORED[name]
    operator = build()
    diagonal = tr.diagonal(KEY, operator, **CALLS[call])
    flat, errors = (
        np.concatenate([np.asarray(x) for x in jax.tree.leaves(part)])
        for part in (diagonal.value, diagonal.std_err)
    )
    is_exact(eqx.tree_at(lambda s: (s.value, s.std_err), diagonal, (flat, errors)), np.diag(truth))
    if name in ("complex", "integer", "pytree", "sparse"):
        is_exact(tr.trace(KEY, operator, **CALLS[call]), np.trace(truth))
    if name == "pytree":
        blocks = tr.block_traces(KEY, operator, **CALLS[call])
        assert jax.tree.structure(blocks.value) == jax.tree.structure(operator.in_structure())
        total = sum(np.asarray(x) for x in jax.tree.leaves(blocks.value))
        np.testing.assert_allclose(total, np.trace(truth), rtol=1e-13)
        assert blocks.num_matvecs == 0


def test_the_program_multiplies_nothing():
    arrays, static = eqx.partition(STORED["sum"][0](), eqx.is_array)

    def value(arrays):
        return tr.trace(KEY, eqx.combine(arrays, static), 2).value

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
    ("make", "call"), [(matrix, "budget"), (sparse, "budget"), (matrix, "tolerance")]
)
def test_nan_and_inf_anywhere_are_reported(make, call):
    """Off the diagonal, too, as a product would show it."""
    for place, bad in (((3, 3), jnp.inf), ((2, 5), jnp.nan)):
        operator = make(jnp.asarray(POSITIVE).at[place].set(bad))
        for whole in (operator, by_products(POSITIVE) + operator):
            solution = tr.trace(KEY, whole, **CALLS[call])
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


def test_the_log_determinant_of_a_diagonal_is_read():
    """With its derivatives, for sums and multiples, and where it is not defined."""
    identity = lx.IdentityLinearOperator(STRUCTURE)

    def solution(c, entries=WEIGHTS):
        operator = 3.0 * lx.DiagonalLinearOperator(jnp.asarray(entries)) + c * identity
        return tr.logdet(KEY, operator, 4)

    found = solution(0.2)
    np.testing.assert_allclose(found.value, np.sum(np.log(3 * WEIGHTS + 0.2)), rtol=1e-13)
    assert found.num_matvecs == 0
    assert found.std_err == 0
    assert found.result == tr.RESULTS.successful
    slope = jax.grad(lambda c: solution(c).value)
    np.testing.assert_allclose(slope(0.2), np.sum(1 / (3 * WEIGHTS + 0.2)), rtol=1e-13)
    np.testing.assert_allclose(jax.grad(slope)(0.2), -np.sum((3 * WEIGHTS + 0.2) ** -2), rtol=1e-13)
    wrong = np.where(np.arange(N) == 3, [[-1.0], [0.0], [np.nan]], WEIGHTS)
    outcomes = jax.vmap(lambda entries: solution(0.0, entries))(wrong)
    assert np.all(np.isnan(outcomes.value))
    names = ["outside_domain", "outside_domain", "nonfinite_operator"]
    for i, name in enumerate(names):
        assert (outcomes.result == getattr(tr.RESULTS, name))[i]


def test_half_precision_is_added_up_in_float32():
    large = jnp.full((300, 300), 1000.0, jnp.float16)  # the sum is beyond float16
    solution = tr.trace(KEY, matrix(large), 2)
    assert solution.value.dtype == jnp.float32
    assert solution.value == 300 * large[0, 0].astype(jnp.float32)


def test_budgets_of_n_products_read_as_well():
    """With whatever estimator."""
    is_exact(tr.trace(KEY, matrix(GENERAL), N, tr.XTraceEstimator()), np.trace(GENERAL))
    is_exact(tr.diagonal(KEY, sparse(THIN), len(THIN), tr.XTraceEstimator()), np.diag(THIN))

"""Operators whose entries are stored: the default estimators read the trace and the diagonal."""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.sparse

import traceax as tr
from traceax._operators.known_parts import stored_entries
from traceax.extend import columns

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
    return tr.SparseLinearOperator(scipy.sparse.csr_array(array), tags)


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
INDICES = [4, 0, 4, 8]
WITHOUT_COLUMNS = "pytree", "unit"  # theirs are products


@cache
def found():
    """Of every operator its trace, diagonal and entries, by one program, as NumPy arrays."""
    parts = slice(None), np.arange(3)

    @eqx.filter_jit
    def run(operators):
        return {
            name: (
                tr.trace(KEY, operator, 2),
                tr.diagonal(KEY, operator, 2),
                columns(operator, INDICES),
                None
                if name in WITHOUT_COLUMNS
                else [stored_entries(operator, rows, slice(None)) for rows in parts],
            )
            for name, operator in operators.items()
        }

    return jax.device_get(run({name: build() for name, (build, _) in STORED.items()}))


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def is_exact(solution, expected):
    value, std_err = (flat(x).reshape(expected.shape) for x in (solution.value, solution.std_err))
    np.testing.assert_allclose(value, expected, rtol=1e-13)
    assert value.dtype == expected.dtype
    assert np.all(std_err == 0)
    assert std_err.dtype == expected.real.dtype
    assert (solution.num_matvecs, solution.result) == (0, tr.RESULTS.successful)


@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_takes_no_products(name):
    truth = STORED[name][1]
    trace, diagonal, some, entries = found()[name]
    is_exact(diagonal, np.diag(truth))
    is_exact(trace, np.trace(truth))
    np.testing.assert_allclose(some, truth[:, INDICES], rtol=1e-6, atol=1e-12)
    if entries is not None:
        whole, rows = entries
        np.testing.assert_allclose(whole, truth, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(rows, truth[:3], rtol=1e-6, atol=1e-12)


def test_by_a_tolerance_by_blocks_and_by_n_products():
    """With whatever estimator."""
    operator, named = pytree(), tr.XTraceEstimator()

    @eqx.filter_jit
    def run(thin, tree):
        return (
            [function(KEY, thin, rtol=1e-3) for function in (tr.trace, tr.diagonal)],
            [function(KEY, thin, N, named) for function in (tr.trace, tr.diagonal)],
            tr.block_traces(KEY, tree, 2),
        )

    *pairs, blocks = jax.device_get(run(sparse(THIN), operator))
    for trace, diagonal in pairs:
        is_exact(trace, np.trace(THIN))
        is_exact(diagonal, np.diag(THIN))
    assert jax.tree.structure(blocks.value) == jax.tree.structure(operator.in_structure())
    traces = np.trace(GENERAL[:4, :4]), np.trace(GENERAL[4:, 4:])
    np.testing.assert_allclose([blocks.value["a"], blocks.value["b"]], traces, rtol=1e-13)
    assert blocks.num_matvecs == 0


def test_the_program_multiplies_nothing():
    arrays, static = eqx.partition(STORED["sum"][0](), eqx.is_array)

    def value(arrays):
        return tr.trace(KEY, eqx.combine(arrays, static), 2).value

    assert "dot_general" not in jax.jit(value).lower(arrays).as_text()


def test_the_derivative_is_exact():
    """d tr(A) = tr(dA), in both modes, at every order, for dense and for sparse entries."""
    operator = sparse(THIN)

    def power(c):
        return tr.trace(KEY, c**3 * matrix(GENERAL) + matrix(jnp.sin(c) * GENERAL), 2).value

    @jax.jit
    def derivatives(entries, data, c):
        first = jax.grad(power)
        return (
            jax.grad(lambda m: tr.trace(KEY, matrix(m), 2).value)(entries),
            jax.grad(lambda d: tr.trace(KEY, operator.with_data(d), rtol=0.1).value)(data),
            jax.jacobian(lambda m: tr.diagonal(KEY, matrix(m), 2).value)(entries),
            [power(c), first(c), jax.grad(first)(c)],
            jax.jvp(power, (c,), (1.0,))[1],
        )

    slope, of_data, moved, powers, tangent = derivatives(GENERAL, operator.data, 0.7)
    np.testing.assert_array_equal(slope, np.eye(N))
    factors = 0.7**3 + np.sin(0.7), 3 * 0.7**2 + np.cos(0.7), 6 * 0.7 - np.sin(0.7)
    np.testing.assert_allclose(powers, np.array(factors) * np.trace(GENERAL), rtol=1e-13)
    np.testing.assert_allclose(tangent, powers[1], rtol=1e-14)
    on_diagonal = np.equal(operator.pattern.rows, operator.pattern.columns)
    np.testing.assert_array_equal(of_data, on_diagonal.astype(float))
    np.testing.assert_array_equal(moved, [np.diag(row) for row in np.eye(N)])


@pytest.mark.parametrize(("make", "call"), [(matrix, {"rtol": 1e-3}), (sparse, {"k": 2})])
def test_nan_and_inf_anywhere_are_reported(make, call):
    """Off the diagonal, too, as a product would show it."""
    known = by_products(POSITIVE)

    @eqx.filter_jit
    def run(operator):
        return [tr.trace(KEY, whole, **call) for whole in (operator, known + operator)]

    for place, bad in (((3, 3), np.inf), ((2, 5), np.nan)):
        array = POSITIVE.copy()
        array[place] = bad
        for solution in jax.device_get(run(make(array))):
            assert solution.result == tr.RESULTS.nonfinite_operator


def test_transformations():
    matrices = RNG.standard_normal((4, N, N))
    traces = np.trace(matrices, axis1=1, axis2=2)
    traces[2], matrices[2, 0, 1] = np.nan, np.nan

    def one(m):
        return tr.trace(KEY, matrix(m), 2)

    @jax.jit
    def run(matrices):
        return jax.vmap(one)(matrices), jax.vmap(jax.grad(lambda m: one(m).value))(matrices[:2])

    batch, slopes = jax.device_get(run(matrices))
    np.testing.assert_allclose(batch.value, traces, rtol=1e-13)
    good = [True, True, False, True]
    np.testing.assert_array_equal(batch.result == tr.RESULTS.successful, good)
    np.testing.assert_array_equal(slopes, np.broadcast_to(np.eye(N), (2, N, N)))

    shape = eqx.filter_eval_shape(tr.trace, KEY, matrix(COMPLEX), 2)
    assert (shape.value.shape, shape.value.dtype) == ((), np.complex128)
    assert (shape.std_err.shape, shape.std_err.dtype) == ((), np.float64)


def test_the_log_determinant_of_a_diagonal_is_read():
    """With its derivatives, for sums and multiples, and where it is not defined."""
    identity = lx.IdentityLinearOperator(STRUCTURE)
    wrong = np.where(np.arange(N) == 3, [[-1.0], [0.0], [np.nan]], WEIGHTS)

    def solution(c, entries=WEIGHTS):
        operator = 3.0 * lx.DiagonalLinearOperator(jnp.asarray(entries)) + c * identity
        return tr.logdet(KEY, operator, 4)

    @jax.jit
    def run(c, wrong):
        slope = jax.grad(lambda c: solution(c).value)
        outcomes = jax.vmap(lambda entries: solution(0.0, entries))(wrong)
        return solution(c), slope(c), jax.grad(slope)(c), outcomes

    found, slope, second, outcomes = jax.device_get(run(0.2, wrong))
    entries = 3 * WEIGHTS + 0.2
    np.testing.assert_allclose(found.value, np.sum(np.log(entries)), rtol=1e-13)
    assert (found.num_matvecs, found.std_err, found.result) == (0, 0, tr.RESULTS.successful)
    np.testing.assert_allclose(slope, np.sum(1 / entries), rtol=1e-13)
    np.testing.assert_allclose(second, -np.sum(entries**-2), rtol=1e-13)
    assert np.all(np.isnan(outcomes.value))
    for i, name in enumerate(["outside_domain", "outside_domain", "nonfinite_operator"]):
        assert (outcomes.result == getattr(tr.RESULTS, name))[i]


def test_half_precision_is_added_up_in_float32():
    large = np.full((300, 300), 1000.0, np.float16)  # the sum is beyond float16
    solution = tr.trace(KEY, matrix(large), 2)
    assert solution.value.dtype == jnp.float32
    assert solution.value == np.float32(300_000)

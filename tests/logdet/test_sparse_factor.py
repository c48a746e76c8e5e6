"""Low rank plus a sparse inverse factor: the identities against loops, what is chosen, and what
rounding does.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.sparse

import traceax as tr
from traceax._core.precision import any_promotion
from traceax._logdet.sparse_factor import neighbours, sparse_factors
from traceax._operators.known_parts import submatrices

from ..helpers import PSD, keys, over_keys, with_spectrum

pytestmark = pytest.mark.slow(quick=True)

N, RANK = 70, 9
STEPS = np.eye(20, k=1) + np.eye(20, k=-1)
W = np.kron(STEPS, np.eye(20)) + np.kron(np.eye(20), STEPS)  # who is next to whom on a grid


def problem():
    """A dense matrix whose entries tell who is near to whom, noise that differs, and the sum."""
    points = np.random.default_rng(0).uniform(size=(N, 2))
    phases = np.exp(2j * points[:, 0])
    distance = np.linalg.norm(points[:, None] - points, axis=2)
    kernel = phases[:, None] * np.exp(-distance / 0.5) * phases.conj()
    noise = np.random.default_rng(1).uniform(0.01, 0.1, N).astype(complex)
    operator = lx.MatrixLinearOperator(jnp.asarray(kernel), PSD)
    return kernel, noise, operator + lx.DiagonalLinearOperator(jnp.asarray(noise))


def test_the_factors_are_those_of_loops():
    """L column by column, P^{-1} from Woodbury's formula, W, log det P, and <P^{-1}, A>. With all
    neighbours P is A.
    """
    dtype = np.complex128
    kernel, noise, operator = problem()
    a = kernel + np.diag(noise)
    factors = tr.KernelPreconditioner(RANK, 5).build(jr.key(0), operator).factors
    sets, values = np.asarray(factors.sets), np.asarray(factors.values)
    lower = np.zeros((N, N), dtype)
    np.add.at(lower, (sets, np.arange(N)[:, None]), values)
    f = np.linalg.solve(lower.conj().T, np.asarray(factors.basis))
    pivots = np.argsort(np.diag(kernel - f @ f.conj().T).real)[:RANK]
    columns = kernel[:, pivots]
    f = columns @ np.linalg.inv(np.linalg.cholesky(kernel[np.ix_(pivots, pivots)])).conj().T
    r = a - f @ f.conj().T
    lower = np.zeros((N, N), dtype)
    for i, (row, value) in enumerate(zip(sets, values, strict=True)):
        s = row[value != 0]
        assert s[-1] == i
        z = np.linalg.solve(r[np.ix_(s, s)], (s == i).astype(dtype))
        lower[s, i] = z / np.sqrt(z[-1].real)
    p = np.linalg.inv(lower @ lower.conj().T) + f @ f.conj().T

    @eqx.filter_jit
    def views(factors, operator):
        one = jnp.eye(N, dtype=dtype)
        roots = factors.inverse_root_adjoint(one), factors.inverse_root(one)
        parts = factors.log_det, factors.inverse_diagonal(), factors.captured()
        return *roots, *parts, factors.known_part(operator)

    with any_promotion():
        w, adjoint, log_det, diagonal, captured, known = map(np.asarray, views(factors, operator))
    np.testing.assert_allclose(w @ w.conj().T @ p, np.eye(N), atol=1e-8)
    np.testing.assert_allclose(adjoint, w.conj().T, atol=1e-9 * np.abs(w).max())
    np.testing.assert_allclose(log_det, np.linalg.slogdet(p)[1], rtol=1e-10)
    inverse = np.linalg.inv(p)
    np.testing.assert_allclose(diagonal, np.diag(inverse).real, rtol=1e-8)
    sparse = inverse + captured @ captured.conj().T
    np.testing.assert_allclose(known, np.sum(sparse * a.conj()).real)
    exact = tr.KernelPreconditioner(RANK, N - 1).build(jr.key(0), operator).factors
    np.testing.assert_allclose(exact.log_det, np.linalg.slogdet(a)[1], rtol=1e-8)


def test_neighbours_are_those_that_correlate_most():
    """Among the points before each, by the residual, at any scale; hardly one in a hundred is
    missed.
    """
    n, m = 400, 8
    points = np.random.default_rng(0).uniform(size=(n, 3))
    kernel = np.exp(-np.linalg.norm(points[:, None] - points, axis=2)) + 0.1 * np.eye(n)
    f = kernel[:, :3] / 2
    r = kernel - f @ f.T
    order = np.random.default_rng(1).permutation(n)

    @jax.jit
    def run(root):
        operator = lx.MatrixLinearOperator(root**2 * kernel, PSD)
        return neighbours(operator, root * f, root**2 * np.diag(r), jnp.asarray(order), m)

    found = np.asarray(run(1.0))
    np.testing.assert_array_equal(run(2.0**-60), found)
    score = r**2 / np.diag(r)
    hits = 0
    for i, row in enumerate(found):
        before = np.flatnonzero(order < order[i])
        best = before[np.argsort(-score[i, before])][:m]
        chosen = set(row[row < n])
        assert len(chosen) == len(best)
        assert chosen <= set(before)
        hits += len(set(best) & chosen) / max(len(best), 1)
    assert hits >= 0.99 * (n - 1)


def rbf(x, y):
    return jnp.exp(-jnp.sum((x - y) ** 2))


@jax.jit
def of_points(x, s, key):
    """The log-determinant, its slope, and the matrix of a kernel."""
    kernel = tr.KernelLinearOperator(rbf, x)

    def value(s):
        operator = kernel + s * lx.IdentityLinearOperator(kernel.in_structure())
        found = tr.logdet(key, operator, 40, fallback=None)
        return found.value, found

    return jax.value_and_grad(value, has_aux=True)(s), kernel.as_matrix()


@pytest.mark.parametrize("noise", [1e-6, 0.1])
@pytest.mark.parametrize("kind", ["twice", "line", "one"])
def test_float32_gives_no_silent_nan(kind, noise):
    """Duplicate points, far more columns than the kernel has, and one point many times."""
    n = 150
    x = np.random.default_rng(0).uniform(size=(n, 1))
    x = {"twice": np.repeat(x[: n // 2], 2, axis=0), "line": x, "one": np.zeros_like(x)}[kind]
    given = x.astype(np.float32), np.float32(noise)
    for key in keys(2):
        ((_, found), slope), matrix = jax.device_get(of_points(*given, key))
        dense = matrix.astype(float) + float(np.float32(noise)) * np.eye(n)
        truth = np.linalg.slogdet(dense)[1]
        # Noise of 1e-6 beside an eigenvalue of 150 is lost in rounding, which is said.
        lost = bool(found.result == tr.RESULTS.outside_domain)
        assert lost <= (noise < 1e-3)
        assert lost == np.isnan(found.value)
        if not lost:
            bar = float(4 * found.std_err + found.quadrature_error)
            # Equal rows have equal rounding errors.
            assert abs(float(found.value) - truth) <= bar + 1e-5 * abs(truth)
            np.testing.assert_allclose(slope, np.trace(np.linalg.inv(dense)), rtol=1e-2)


def test_submatrices_of_everything_that_knows_its_entries():
    rng = np.random.default_rng(0)
    matrix = with_spectrum(rng, np.linspace(1, 2, N), np.complex128)
    scale = rng.uniform(1, 2, N)
    x = jnp.asarray(rng.standard_normal((N, 2)))
    stored = lx.MatrixLinearOperator(jnp.asarray(matrix), PSD)
    diagonal = lx.DiagonalLinearOperator(jnp.asarray(scale, complex))
    kernel = tr.KernelLinearOperator(rbf, x)
    band = lx.TridiagonalLinearOperator(x[:, 0], x[1:, 1], x[:-1, 1])
    real = lx.DiagonalLinearOperator(jnp.asarray(scale))
    sets = np.stack([rng.integers(0, N, 6) for _ in range(4)])
    sums = (2 * stored, stored + diagonal, real @ kernel @ real, -kernel / 2 + kernel, band)

    @eqx.filter_jit
    def run(operators):
        return [(submatrices(each, sets), each.as_matrix()) for each in operators]

    with any_promotion():
        for found, dense in jax.device_get(run(sums)):
            expected = np.stack([dense[np.ix_(s, s)] for s in sets])
            np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("neighbour", [range(-1, 5), 6 * [6]], ids=["indefinite", "none"])
def test_a_neighbourhood_that_rounding_makes_indefinite_counts_as_uncorrelated(neighbour):
    """As one without neighbours. The derivative follows."""
    n = 6
    matrix = np.ones((n, n)) + np.diag([0, 0, 0, 1e-3, 1e-3, 1e-3]) - 0.1 * np.eye(n)
    sets = jnp.stack([jnp.asarray(neighbour) % (n + 1), jnp.arange(n)], axis=1)

    def log_det(matrix):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        given = jnp.zeros((n, 1)), sets, jnp.diag(matrix), jnp.full(n, 1e-9)
        found = sparse_factors(operator, *given, moving=True)
        return found.log_det, found.values

    (value, values), slope = jax.jit(jax.value_and_grad(log_det, has_aux=True))(matrix)
    left = np.diag(matrix) + 1e-9
    expected = np.stack([np.zeros(n), 1 / np.sqrt(left)], axis=1)
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    np.testing.assert_allclose(value, np.sum(np.log(left)), rtol=1e-9)
    np.testing.assert_allclose(slope, np.diag(1 / left), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dim", "limit"), [(2, 0.7), (5, 5.0)])
def test_rough_kernels(dim, limit):
    """Where low rank alone is 23 nats off."""
    n, noise = 1500, 1e-2
    x = np.random.default_rng(0).uniform(size=(n, dim)).astype(np.float32)
    length = 0.3 * float(np.sqrt(dim / 2))

    def kernel(a, b):
        return jnp.exp(-jnp.sqrt(jnp.sum((a - b) ** 2) + 1e-20) / length)

    square = sum(np.subtract.outer(c, c) ** 2 for c in x.T.astype(float))
    dense = np.exp(-np.sqrt(square + 1e-20) / length) + float(np.float32(noise)) * np.eye(n)
    truth = np.linalg.slogdet(dense)[1]
    K = tr.KernelLinearOperator(kernel, jnp.asarray(x))
    operator = K + noise * lx.IdentityLinearOperator(K.in_structure())
    found = over_keys(10, lambda key: tr.logdet(key, operator, 100, fallback=None))
    off = found.value.astype(float) - truth
    assert np.sqrt(np.mean(off**2)) < 2 * limit
    assert np.sum(np.abs(off) <= 2 * found.std_err + found.quadrature_error) >= 8


def test_neighbours_in_a_sparse_matrix_are_several_steps_away():
    """The precision of a random field on a grid: those of one step leave twice the error."""
    grid = 4.01 * np.eye(400) - W
    operator = tr.SparseLinearOperator(scipy.sparse.csr_array(grid), PSD)
    found = over_keys(20, lambda key: tr.logdet(key, operator, 60, fallback=None))
    off = np.abs(found.value - np.linalg.slogdet(grid)[1])
    assert np.sum(off <= 2.2 * found.std_err + found.quadrature_error) >= 17
    assert np.max(found.std_err) < 2.1


def test_one_leads_to_the_smallest_eigenvector_of_a_field():
    """A precision D - (1 - s) W, nearly intrinsic: this eigenvector makes 1 / s of the derivative,
    and probes hardly see it.
    """
    laplacian = np.diag(W.sum(axis=0)) - W
    operator = tr.SparseLinearOperator(scipy.sparse.csr_array(laplacian), PSD)

    def value(s, key):
        entries = jnp.where(operator.data < 0, (1 - s) * operator.data, operator.data)
        return tr.logdet(key, operator.with_data(entries), 60, fallback=None).value

    slopes = jax.jit(jax.vmap(jax.grad(value), (None, 0)))(1e-5, keys(20))
    truth = np.trace(np.linalg.solve(laplacian + 1e-5 * W, W))
    assert np.all(np.abs(slopes / truth - 1) < 0.1)

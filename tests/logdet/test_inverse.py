"""Trace and diagonal of the inverse: the identity on the same vectors, no bias, errors, derivatives
of two orders, what is exact.
"""

from pathlib import Path

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.io
import scipy.sparse

import traceax as tr
from traceax._logdet.run import Policy, run_of

from ..helpers import PSD, by_products, keys, with_spectrum

BUS = Path(tr.__file__).parent / "data/1138_bus.mtx"
N, K = 60, 30
NOISE = 0.05


def matrix_of(eigenvalues, dtype=np.float64, seed=0):
    return with_spectrum(np.random.default_rng(seed), eigenvalues, dtype)


def decaying(dtype=np.float64, n=N):
    return matrix_of(10 * 0.7 ** np.arange(n), dtype)


def shifted(matrix, s=NOISE, *, hidden=True):
    """K + s I, where K is known by its products alone or by its entries."""
    structure = jax.ShapeDtypeStruct((len(matrix),), matrix.dtype)
    kernel = by_products(matrix, PSD) if hidden else lx.MatrixLinearOperator(matrix, PSD)
    return kernel + s * lx.IdentityLinearOperator(structure)


@eqx.filter_jit
def trace_and_diagonal(key, operator, k, **options):
    """The diagonal, and its sum."""
    return tuple(fn(key, operator, k, **options) for fn in (tr.inverse_diagonal, tr.inverse_trace))


def dense(matrix, s=NOISE):
    matrix = np.asarray(matrix)
    return matrix.astype(np.result_type(matrix.dtype, np.float64)) + s * np.eye(len(matrix))


@pytest.mark.parametrize("compute", [tr.inverse_trace, tr.logdet])
def test_rounding_of_equal_eigenvalues_is_stated(compute):
    """All terms of a multiple of the identity have the same rounding error: their sum has n times
    that, not sqrt(n) times.
    """
    dtype = np.float64
    n, count, size = 200, 30, 0.375
    operator = by_products(size * np.eye(n, dtype=dtype), PSD)
    found = jax.jit(jax.vmap(lambda key: compute(key, operator, 25)))(keys(count))
    truth = n / size if compute is tr.inverse_trace else n * np.log(size)
    std_err, error = (np.asarray(x, np.float64) for x in (found.std_err, found.quadrature_error))
    bars = 2 * std_err + error
    assert np.all(np.abs(np.asarray(found.value, np.float64) - truth) <= bars)
    assert np.all(bars <= 20 * np.finfo(dtype).eps * abs(truth))


# --- the identity, on the same vectors -----------------------------------------------------------


def spent(key, operator, k):
    """R^{-1}, the signs, the solutions, what they miss on average, and the number of steps."""
    policy = Policy("auto", inverse=True)

    def outcome(key, operator):
        run = run_of(key, operator, k, policy, weights=False)
        inverse_root = run.built.factors.inverse_root(jnp.eye(N, dtype=run.block.dtype))
        omega, _, solved = run.sums.kept
        x = run.built.factors.inverse_root_adjoint(solved[0])
        return inverse_root, omega, x, run.sums.error * N, run.sums.steps, run.sums.drawn

    with jax.numpy_dtype_promotion("standard"):  # as inside of the primitive
        inverse_root, omega, x, missed, q, p = eqx.filter_jit(outcome)(key, operator)
    omega, x = (np.asarray(each)[:, : int(p)] for each in (omega, x))
    return np.asarray(inverse_root), omega, x, float(missed), int(q)


@pytest.mark.parametrize(("hidden", "dtype"), [(True, np.float64), (False, np.complex128)])
def test_the_identity_on_the_same_vectors(hidden, dtype):
    """diag P^{-1} and the mean of omega o (x - P^{-1} omega), with x from an explicit basis of the
    Krylov space.
    """
    matrix = matrix_of(np.linspace(0.1, 3, N), dtype)  # P is poor, and x is not that of a solve
    operator, a = shifted(matrix, hidden=hidden), dense(matrix)
    key = jr.key(3)
    inverse_root, omega, solutions, missed, q = spent(key, operator, K)
    m = inverse_root @ a @ inverse_root.conj().T
    assert set(np.unique(omega)) == {-1.0, 1.0}
    solved, residuals = [], []
    for z in (inverse_root @ omega).T:
        basis = [z]
        for _ in range(q - 1):
            basis.append(m @ basis[-1])
            basis[-1] /= np.linalg.norm(basis[-1])
        v = np.linalg.qr(np.stack(basis, axis=1))[0]
        t = v.conj().T @ m @ v
        y = v @ np.linalg.solve(t, v.conj().T @ z)
        solved.append(inverse_root.conj().T @ y)
        residuals.append(z - m @ y)
    x = np.stack(solved, axis=1)
    np.testing.assert_allclose(solutions, x, atol=1e-8 * np.abs(x).max())
    # What is missing of omega^H A^{-1} omega is r^H M^{-1} r, of which |r|^2 / a is a bound for any
    # a below the eigenvalues of M, as the shift (K + s I) gives.
    forms = [(r.conj() @ np.linalg.solve(m, r)).real for r in residuals]
    assert missed > 0
    if hidden:  # P has the least eigenvalue mu, and a = s / mu
        sizes = np.sum(np.square(np.abs(residuals)), axis=1)
        bound = np.mean(sizes) / (NOISE * np.linalg.norm(inverse_root, 2) ** 2)
        np.testing.assert_allclose(missed, bound, rtol=1e-6)
        assert np.mean(forms) <= bound
    for form, signs, w in zip(forms, omega.T, x.T, strict=True):
        left = signs @ np.linalg.solve(a, signs) - signs @ w
        np.testing.assert_allclose(left.real, form, rtol=1e-6)
    p_inverse = inverse_root.conj().T @ inverse_root
    samples = omega * (x - p_inverse @ omega).real
    expected = np.diag(p_inverse).real + samples.mean(axis=1)
    found, total = trace_and_diagonal(key, operator, K, fallback=None)
    inside = np.clip(expected, 0, 1 / NOISE)  # what an entry of the inverse of K + s I can be
    assert np.any(inside != expected) == hidden
    np.testing.assert_allclose(found.value, inside, rtol=1e-7)
    assert found.num_matvecs <= K
    np.testing.assert_allclose(total.value, expected.sum(), rtol=1e-8)
    assert int(total.num_matvecs) == int(found.num_matvecs)


# --- exact values --------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "hidden"), [(np.float32, True), (np.complex128, False)])
def test_exact_with_n_products_or_with_entries(dtype, hidden):
    """With n products, and from n/6 of them on where the entries are known."""
    matrix = decaying(dtype)
    operator, inverse = shifted(matrix, hidden=hidden), np.linalg.inv(dense(matrix))
    k = N if hidden else N // 6
    diagonal, trace = trace_and_diagonal(jr.key(0), operator, k)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(diagonal.value, np.diag(inverse).real, rtol=2e3 * eps)
    np.testing.assert_allclose(trace.value, np.trace(inverse).real, rtol=2e3 * eps)
    for solution, truth in ((diagonal, np.diag(inverse).real), (trace, np.trace(inverse).real)):
        assert np.all(np.asarray(solution.std_err) == 0)
        errors = np.abs(np.asarray(solution.value, np.float64) - truth)
        stated = np.asarray(solution.quadrature_error, np.float64)
        assert np.all(errors <= stated + 4 * eps * truth)
        assert np.all(stated <= 2e3 * eps * truth)
        assert solution.value.dtype == jnp.finfo(dtype).dtype
        assert int(solution.num_matvecs) == (N if hidden else 0)


def test_the_power_network_within_one_percent_from_200_products():
    """diag A^-1 of a sparse matrix whose small eigenvalues no Krylov space of 200 dimensions has
    met: the entries are known, and the exact value takes no more operations.
    """
    matrix = scipy.sparse.csr_array(scipy.io.mmread(BUS, spmatrix=False))
    operator = tr.SparseLinearOperator(matrix, PSD)
    truth = np.diag(np.linalg.inv(matrix.toarray()))
    found = tr.inverse_diagonal(jr.key(0), operator, 200)
    assert np.linalg.norm(found.value - truth) <= 1e-2 * np.linalg.norm(truth)
    assert int(found.num_matvecs) == 0
    few = tr.inverse_diagonal(jr.key(0), operator, 100)
    assert few.result == tr.RESULTS.not_converged  # and the quadrature error says by how much
    error = np.linalg.norm(few.value - truth)
    assert error <= np.linalg.norm(2 * few.std_err + few.quadrature_error)


# --- accuracy ------------------------------------------------------------------------------------

SPECTRA = {
    "decaying": 10 * 0.7 ** np.arange(N),
    "slow": 10 / np.arange(1.0, N + 1) ** 2,
    "flat": np.linspace(1.0, 2.0, N),
    "low rank": np.where(np.arange(N) < 5, 3.0, 0.0),
    "zero": np.zeros(N),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "hidden"), [(np.float32, True), (np.float64, False), (np.complex128, True)]
)
@pytest.mark.parametrize("name", SPECTRA)
def test_no_bias_and_bars_that_cover(name, dtype, hidden):
    """400 keys: every mean is within 4.5 standard errors (61 means a case), and 92 % of the bars
    cover, of the trace and on average of the entries.
    """
    matrix = matrix_of(SPECTRA[name], dtype)
    operator, inverse = shifted(matrix, hidden=hidden), np.linalg.inv(dense(matrix))

    def both(key):
        arguments = key, operator, K
        return (
            tr.inverse_trace(*arguments, fallback=None),
            tr.inverse_diagonal(*arguments, fallback=None),
        )

    eps = float(jnp.finfo(dtype).eps)
    truths = np.trace(inverse).real, np.diag(inverse).real
    for found, truth in zip(jax.jit(jax.vmap(both))(keys(400)), truths, strict=True):
        errors = np.asarray(found.value, np.float64) - truth
        left = np.asarray(found.quadrature_error, np.float64)
        rounding = 100 * eps * np.max(truth)
        scatter = errors.std(axis=0) / 20
        assert np.all(np.abs(errors.mean(axis=0)) <= 4.5 * scatter + left.mean(axis=0) + rounding)
        ends = jax.vmap(lambda s: s.interval())(found)
        low, high = (np.asarray(end, np.float64) for end in ends)
        inside = (low - rounding <= truth) & (truth <= high + rounding)
        assert np.mean(inside) > 0.92
        # And bars are not larger than they need to be.
        bars = np.sqrt(np.mean(np.square(np.asarray(found.std_err, np.float64))))
        assert bars <= 2 * np.sqrt(np.mean(errors**2)) + 1e3 * rounding


def test_small_eigenvalues_that_only_begin_to_show_are_not_missed():
    """Five eigenvalues of 1e-5 to 1e-3 below 195 of 1 to 3 make nearly all of the trace. After 13,
    9 and 5 steps the values agree with each other, and are a tenth of the truth.
    """
    matrix = matrix_of(np.r_[np.logspace(-5, -3, 5), np.linspace(1, 3, 195)])
    operator = lx.MatrixLinearOperator(matrix, PSD)
    truth = np.trace(np.linalg.inv(np.asarray(matrix)))

    @jax.jit
    @jax.vmap
    def solve(key):
        found = tr.inverse_trace(key, operator, 40, fallback=None)
        return found, found.interval()

    found, (low, high) = jax.device_get(solve(keys(20)))
    assert np.median(found.value) < truth / 2  # far too few steps
    assert np.all(found.quadrature_error > found.value / 2)
    assert np.mean((low <= truth) & (truth <= high)) > 0.92


def test_the_shift_says_what_probes_may_have_missed():
    """The Laplacian of a graph, plus 0.05 I: whether a call is successful does not depend on how
    much its probes see of the null vector, which is nearly all of the trace.
    """
    rng = np.random.default_rng(1)
    edges = np.triu(rng.random((200, 200)) < 0.1, 1).astype(float)
    edges += edges.T
    laplacian = np.diag(edges.sum(axis=0)) - edges

    @jax.jit
    @jax.vmap
    def solve(key):
        found = tr.inverse_trace(key, shifted(laplacian), 30)
        return found.result == tr.RESULTS.successful, found.interval()

    right, (low, high) = solve(keys(100))
    truth = np.trace(np.linalg.inv(dense(laplacian)))
    assert np.mean(right) > 0.5
    assert np.mean(((low <= truth) & (truth <= high))[right]) >= 0.92


# --- derivatives ---------------------------------------------------------------------------------


def _value(name, key, matrix, tangent, t, k, *, fallback=None):
    fn = {"trace": tr.inverse_trace, "diagonal": tr.inverse_diagonal}[name]
    operator = shifted(matrix + t.astype(matrix.dtype) * tangent)
    return fn(key, operator, k, fallback=fallback).value


@pytest.mark.parametrize(
    ("k", "name", "dtype"), [(N, "diagonal", np.float64), (K, "trace", np.complex128)]
)
def test_two_derivatives(k, name, dtype):
    """Exact: those of a dense inverse. From probes: omega and P are fixed, and x is a solution.
    (K is low rank to rounding, so that x has converged.)
    """
    matrix = matrix_of(np.where(np.arange(N) < 5, 3.0, 0.0), dtype)
    tangent = matrix_of(np.where(np.arange(N) < 8, np.cos(np.arange(N)), 0.0), dtype, seed=1)
    key, a, c = jr.key(5), dense(matrix), np.asarray(tangent)
    inverse = np.linalg.inv(a)
    first, second = inverse @ c @ inverse, inverse @ c @ inverse @ c @ inverse
    if k == N:
        slope, curvature = -np.diag(first).real, 2 * np.diag(second).real
    else:
        omega = spent(key, shifted(matrix), k)[1]
        slope = -np.mean(omega * (first @ omega).real, axis=1)
        curvature = 2 * np.mean(omega * (second @ omega).real, axis=1)
    if name == "trace":
        slope, curvature = slope.sum(), curvature.sum()
    fn = lambda t: _value(name, key, matrix, tangent, t, k)  # noqa: E731
    size = np.max(np.abs(slope)), np.max(np.abs(curvature))

    def reverse(t):
        first = jax.jacrev(fn)(t)
        return first, first

    both = jax.jit(lambda t: (jax.jacfwd(fn)(t), jax.jacfwd(reverse, has_aux=True)(t)))
    forward, (second, backward) = both(np.zeros(()))
    for first in (forward, backward):
        np.testing.assert_allclose(first, slope, atol=1e-6 * size[0])
    np.testing.assert_allclose(second, curvature, atol=1e-6 * size[1])


# --- transformations, structures, what is wrong --------------------------------------------------


def test_pytrees_and_intervals():
    """Value, both errors and the interval have the structure of the input."""
    matrix = decaying()
    structure = {
        "a": jax.ShapeDtypeStruct((20, 2), matrix.dtype),
        "b": jax.ShapeDtypeStruct((20,), matrix.dtype),
    }

    def product(tree):
        y = dense(matrix) @ jnp.concatenate([tree["a"].ravel(), tree["b"]])
        return {"a": y[:40].reshape(20, 2), "b": y[40:]}

    operator = lx.FunctionLinearOperator(product, structure, PSD)

    @jax.jit
    def run(key):
        found = tr.inverse_diagonal(key, operator, 24)
        return found, found.interval()

    found, (low, high) = jax.device_get(run(jr.key(0)))
    for tree in (found.value, found.std_err, found.quadrature_error, low, high):
        assert jax.tree.map(lambda x: x.shape, tree) == {"a": (20, 2), "b": (20,)}
    truth = np.diag(np.linalg.inv(dense(matrix)))
    flat = lambda tree: np.concatenate([np.ravel(tree["a"]), tree["b"]])  # noqa: E731
    assert np.mean((flat(low) - 1e-9 <= truth) & (truth <= flat(high) + 1e-9)) > 0.9


@pytest.mark.parametrize(("k", "fn"), [(24, tr.inverse_diagonal), (N, tr.inverse_trace)])
def test_no_silent_nan(fn, k):
    solve = jax.jit(lambda matrix, s: fn(jr.key(0), shifted(matrix, s), k))
    for matrix, s, result in (
        (matrix_of(np.linspace(-1, 2, N)), 0.0, tr.RESULTS.outside_domain),
        (np.full((N, N), np.nan), NOISE, tr.RESULTS.nonfinite_operator),
    ):
        solution = jax.device_get(solve(matrix, s))
        assert solution.result == result
        assert np.all(np.isnan(solution.value))


def test_a_derivative_that_does_not_exist_is_nan():
    """In its own lane of a `vmap`, without a callback to the host, which no export could hold."""
    kernel = np.diag(1 / np.arange(1.0, 41.0)) + 1

    def value(s):
        return tr.inverse_trace(jr.key(0), shifted(kernel, s), 6, preconditioner=None).value

    slope, points = jax.grad(value), np.array([1.001, 0.999])
    run = jax.jit(lambda s: (jax.vmap(slope)(s), jax.vmap(value)(points)))
    found, (more, less) = map(np.asarray, run(np.array([1.0, -0.5])))
    exported = jax.export.export(jax.jit(slope))(np.array(1.0))
    assert np.isnan(found[1])
    np.testing.assert_allclose(found[0], (more - less) / 0.002, rtol=1e-2)
    np.testing.assert_allclose(exported.call(np.array(1.0)), found[0], rtol=1e-10)


def test_extreme_scales():
    """In float32, where squares over- and underflow. (A unit that is a power of two changes no
    digit.)
    """

    @jax.jit
    def solve(matrix, noise):
        operator = shifted(matrix, noise)
        return [tr.inverse_diagonal(jr.key(0), operator, k, fallback=None) for k in (K, N)]

    def at(unit):
        return jax.device_get(solve(unit * decaying(np.float32), unit * np.float32(NOISE)))

    usual = at(np.float32(1))
    for unit in (2.0**-100, 2.0**100):
        for one, other in zip(usual, at(np.float32(unit)), strict=True):
            for name in ("value", "std_err", "quadrature_error"):
                expected, found = (np.asarray(getattr(x, name), float) for x in (one, other))
                np.testing.assert_allclose(
                    found * unit, expected, rtol=1e-3, atol=1e-5 * expected.max()
                )

"""Trace and diagonal of the inverse: the identity on the same vectors, no bias, errors, derivatives
of two orders, what is exact.
"""

from functools import partial

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
from traceax._logdet.inverse import InverseEstimator
from traceax._logdet.run import run_of

from .. import reference
from ..helpers import PSD, ROOT, by_products, keys, over_keys, with_spectrum
from .test_logdet import N, decaying, hidden, shifted

BUS = ROOT / "traceax/data/1138_bus.mtx"
# Each compiles for 15 seconds or more.
SLOW = partial(pytest.param, marks=pytest.mark.slow(quick=True))
K = 30
FIXED = tr.NystromPreconditioner(rank=12)
NOISE = 0.05


def matrix_of(eigenvalues, dtype=np.float64, seed=0):
    return with_spectrum(np.random.default_rng(seed), eigenvalues, dtype)


def dense(matrix, s=NOISE):
    matrix = np.asarray(matrix)
    return matrix.astype(np.result_type(matrix.dtype, np.float64)) + s * np.eye(len(matrix))


@pytest.mark.parametrize("compute", [tr.inverse_trace, tr.logdet])
@pytest.mark.slow(quick=True)
def test_rounding_of_equal_eigenvalues_is_stated(compute):
    """All terms of a multiple of the identity have the same rounding error: their sum has n times
    that, not sqrt(n) times.
    """
    n, size = 200, 0.375
    operator = by_products(size * np.eye(n), PSD)
    found = over_keys(30, lambda key: compute(key, operator, 25, preconditioner=None))
    truth = n / size if compute is tr.inverse_trace else n * np.log(size)
    bars = 2 * found.std_err + found.quadrature_error
    assert np.all(np.abs(found.value - truth) <= bars)
    assert np.all(bars <= 20 * np.finfo(float).eps * abs(truth))


# --- the identity, on the same vectors -----------------------------------------------------------


@eqx.filter_jit
def _run(key, operator):
    """What a run has made, and what it has drawn, of `drawn` probes."""
    run = run_of(InverseEstimator("auto", None, None, True), key, operator, K, weights=False)
    factors, sums = run.built.factors, run.sums
    inverse_root = factors.inverse_root(jnp.eye(N, dtype=run.sampling.block.dtype))
    omega, _, solved = sums.vectors
    x = factors.inverse_root_adjoint(solved[0])
    return inverse_root, omega, x, sums.error * N, sums.steps, sums.drawn


def spent(key, operator):
    """R^{-1}, the signs, the solutions, what they miss on average, and the number of steps."""
    with jax.numpy_dtype_promotion("standard"):  # as inside of the primitive
        inverse_root, omega, x, missed, q, p = jax.device_get(_run(key, operator))
    return inverse_root, omega[:, :p], x[:, :p], missed, q


@eqx.filter_jit
def estimate(fn, key, operator):
    return fn(key, operator, K, fallback=None)


@pytest.mark.parametrize(
    ("make", "dtype", "fn", "seed"),
    [SLOW(hidden, complex, tr.inverse_diagonal, 4), (shifted, np.float64, tr.inverse_trace, 3)],
)
def test_the_identity_on_the_same_vectors(make, dtype, fn, seed):
    """diag P^{-1} and the mean of omega o (x - P^{-1} omega), with x from an explicit basis of the
    Krylov space.
    """
    matrix = matrix_of(np.linspace(0.1, 3, N), dtype)  # P is poor, and x is not that of a solve
    operator, a = make(matrix, NOISE), dense(matrix)
    inverse_root, omega, solutions, missed, q = spent(jr.key(seed), operator)
    m = inverse_root @ a @ inverse_root.conj().T
    assert set(np.unique(omega)) == {-1.0, 1.0}
    solved, residuals = [], []
    for z in (inverse_root @ omega).T:
        v = reference.krylov_basis(m, z[:, None], q)
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
    if make is hidden:  # P has the least eigenvalue mu, and a = s / mu
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
    found = estimate(fn, jr.key(seed), operator)
    assert found.num_matvecs <= K
    if fn is tr.inverse_trace:
        np.testing.assert_allclose(found.value, expected.sum(), rtol=1e-8)
        return
    inside = np.clip(expected, 0, 1 / NOISE)  # what an entry of the inverse of K + s I can be
    assert np.any(inside != expected)
    np.testing.assert_allclose(found.value, inside, rtol=1e-7)


@pytest.mark.parametrize(("make", "exact"), [SLOW(hidden, False), (shifted, False), (hidden, True)])
def test_no_silent_nan(make, exact):
    for matrix, result in (
        (matrix_of(np.linspace(-1, 2, N), np.complex128), tr.RESULTS.outside_domain),
        (matrix_of(np.linspace(-2, 1, N), np.complex128), tr.RESULTS.outside_domain),
        (np.full((N, N), np.nan, np.complex128), tr.RESULTS.nonfinite_operator),
    ):
        operator = make(matrix, NOISE)
        if exact:
            solution = tr.inverse_trace(jr.key(0), operator, N)
        else:
            solution = estimate(tr.inverse_diagonal, jr.key(0), operator)
        assert solution.result == result
        assert np.all(np.isnan(solution.value))


# --- exact values --------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "make"), [(np.float32, hidden), (np.complex128, shifted)])
def test_exact_with_n_products_or_with_entries(dtype, make):
    """With n products, and from n/6 of them on where the entries are known."""
    matrix = decaying(dtype=dtype)
    operator, inverse = make(matrix, NOISE), np.linalg.inv(dense(matrix))
    k = N if make is hidden else N // 6
    functions = tr.inverse_diagonal, tr.inverse_trace
    diagonal, trace = jax.jit(lambda key: [fn(key, operator, k) for fn in functions])(jr.key(0))
    eps = float(jnp.finfo(dtype).eps)
    for solution, truth in ((diagonal, np.diag(inverse).real), (trace, np.trace(inverse).real)):
        assert np.all(np.asarray(solution.std_err) == 0)
        errors = np.abs(np.asarray(solution.value, np.float64) - truth)
        stated = np.asarray(solution.quadrature_error, np.float64)
        assert np.all(errors <= stated + 4 * eps * truth)
        assert np.all(stated <= 2e3 * eps * truth)
        assert solution.value.dtype == jnp.finfo(dtype).dtype
        assert int(solution.num_matvecs) == (N if make is hidden else 0)


@pytest.mark.slow(quick=True)
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


@partial(jax.jit, static_argnums=(0, 1))
def solutions(fn, make, matrix, keys):
    """One program for all spectra."""
    return jax.vmap(lambda key: fn(key, make(matrix, NOISE), K, fallback=None))(keys)


@pytest.mark.slow(quick=True)
@pytest.mark.parametrize(
    ("dtype", "make"), [(np.float32, hidden), (np.float64, shifted), (np.complex128, hidden)]
)
@pytest.mark.parametrize("name", SPECTRA)
def test_no_bias_and_bars_that_cover(name, dtype, make):
    """400 keys: every mean is within 4.5 standard errors (61 means a case), and 92 % of the bars
    cover, of the trace and on average of the entries.
    """
    matrix = matrix_of(SPECTRA[name], dtype)
    inverse = np.linalg.inv(dense(matrix))
    truths = {tr.inverse_trace: np.trace(inverse).real, tr.inverse_diagonal: np.diag(inverse).real}
    for fn, truth in truths.items():
        found = solutions(fn, make, matrix, keys(400))
        errors = np.asarray(found.value, np.float64) - truth
        left = np.asarray(found.quadrature_error, np.float64)
        rounding = 100 * float(jnp.finfo(dtype).eps) * np.max(truth)
        scatter = errors.std(axis=0) / 20
        assert np.all(np.abs(errors.mean(axis=0)) <= 4.5 * scatter + left.mean(axis=0) + rounding)
        low, high = (np.asarray(x, np.float64) for x in jax.vmap(lambda s: s.interval())(found))
        inside = (low - rounding <= truth) & (truth <= high + rounding)
        assert np.mean(inside) > 0.92
        # And bars are not larger than they need to be.
        bars = np.sqrt(np.mean(np.square(np.asarray(found.std_err, np.float64))))
        assert bars <= 2 * np.sqrt(np.mean(errors**2)) + 1e3 * rounding


@pytest.mark.slow(quick=True)
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
        found = tr.inverse_trace(key, operator, 40, preconditioner=None)
        return found, found.interval()

    found, (low, high) = jax.device_get(solve(keys(20)))
    assert np.median(found.value) < truth / 2  # far too few steps
    assert np.all(found.quadrature_error > found.value / 2)
    assert np.mean((low <= truth) & (truth <= high)) > 0.92


@pytest.mark.slow(quick=True)
def test_the_shift_says_what_probes_may_have_missed():
    """The Laplacian of a graph (or another null vector), plus 0.05 I: whether a call is successful
    does not depend on how much its probes see of the null vector, which is much of the trace.
    """
    edges = np.triu(np.random.default_rng(1).random((200, 200)) < 0.1, 1).astype(float)
    laplacian = np.diag((edges + edges.T).sum(axis=0)) - edges - edges.T

    def solve(matrix, k, s, key):
        found = tr.inverse_trace(key, hidden(matrix, s), k)
        return found.result == tr.RESULTS.successful, found.interval()

    run = jax.jit(jax.vmap(solve, (None, None, None, 0)), static_argnums=1)
    turned = matrix_of(np.r_[0, np.linspace(1, 8, 199)])
    for matrix, s, most in ((laplacian, 1e-3, 0), (turned, 0.05, 0), (dense(laplacian), 0.0, 0.05)):
        assert np.mean(run(matrix, 12, s, keys(100))[0]) <= most  # none would cover
    right, (low, high) = run(laplacian, 31, 0.05, keys(100))
    truth = np.trace(np.linalg.inv(dense(laplacian)))
    assert np.mean(right) > 0.5
    assert np.mean(((low <= truth) & (truth <= high))[right]) >= 0.92
    # A product shows the null vector itself.
    assert not np.any(run(laplacian, 31, 0.0, keys(100))[0])

    def value(s, key):
        found = tr.logdet(key, hidden(laplacian, s), 60)
        return found.value, found.result

    slope = jax.jit(jax.vmap(jax.grad(value, has_aux=True), (None, 0)))
    for shift in (0.0, -0.5):
        assert np.all(slope(shift, keys(200))[1] == tr.RESULTS.outside_domain)
    slopes, _ = slope(0.05, keys(200))
    assert abs(slopes.mean() - truth) < 4 * slopes.std() / 200**0.5 + 0.01 * truth


@pytest.mark.slow(quick=True)
def test_bounds_by_the_diagonal_part():
    """Entries of (D + K)^-1 are from 0 to 1 / d_i, and so are intervals; not those of D - K."""
    d, matrix = np.linspace(3.5, 4, N), matrix_of(np.linspace(0.1, 3, N))
    for sign in (1, -1):
        operator = lx.DiagonalLinearOperator(d) + sign * by_products(matrix, PSD)
        found = estimate(tr.inverse_diagonal, jr.key(0), lx.TaggedLinearOperator(operator, PSD))
        low, high = found.interval()
        truth = np.diag(np.linalg.inv(np.diag(d) + sign * np.asarray(matrix)))
        assert np.mean((low <= truth) & (truth <= high)) >= 0.8  # entries of one key are correlated
        assert np.all((low >= 0) & (high <= 1 / d if sign > 0 else high > truth.min()))


# --- derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "compute", "dtype"),
    [(N, tr.inverse_diagonal, np.float64), SLOW(K, tr.inverse_trace, np.complex128)],
)
def test_two_derivatives(k, compute, dtype):
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
        omega = spent(key, hidden(matrix, NOISE))[1]
        slope = -np.mean(omega * (first @ omega).real, axis=1)
        curvature = 2 * np.mean(omega * (second @ omega).real, axis=1)
    if compute is tr.inverse_trace:
        slope, curvature = slope.sum(), curvature.sum()
    size = np.max(np.abs(slope)), np.max(np.abs(curvature))

    def value(t):
        operator = hidden(matrix + t.astype(dtype) * tangent, NOISE)
        return compute(key, operator, k, fallback=None).value

    def reverse(t):
        first = jax.jacrev(value)(t)
        return first, first

    second, first = jax.jit(jax.jacfwd(reverse, has_aux=True))(np.zeros(()))
    np.testing.assert_allclose(first, slope, atol=1e-6 * size[0])
    np.testing.assert_allclose(second, curvature, atol=1e-6 * size[1])


# --- transformations, structures, what is wrong --------------------------------------------------


def test_pytrees_and_intervals():
    """Value, both errors and the interval have the structure of the input."""
    matrix = dense(decaying())
    structure = {"a": jax.ShapeDtypeStruct((20, 2), float), "b": jax.ShapeDtypeStruct((20,), float)}

    def product(tree):
        y = matrix @ jnp.concatenate([tree["a"].ravel(), tree["b"]])
        return {"a": y[:40].reshape(20, 2), "b": y[40:]}

    operator = lx.FunctionLinearOperator(product, structure, PSD)

    @jax.jit
    def run(key):
        found = tr.inverse_diagonal(key, operator, N)
        return found, found.interval()

    found, (low, high) = jax.device_get(run(jr.key(0)))
    for tree in (found.value, found.std_err, found.quadrature_error, low, high):
        assert jax.tree.map(lambda x: x.shape, tree) == {"a": (20, 2), "b": (20,)}
    values = np.r_[np.ravel(found.value["a"]), found.value["b"]]
    np.testing.assert_allclose(values, np.diag(np.linalg.inv(matrix)), rtol=1e-9)


def test_a_derivative_that_does_not_exist_is_nan():
    """In its own lane of a `vmap`, without a callback to the host, which no export could hold."""
    kernel = np.diag(1 / np.arange(1.0, 41.0)) + 1

    def value(s):
        return tr.inverse_trace(jr.key(0), hidden(kernel, s), 6, preconditioner=None).value

    exported = jax.export.export(jax.jit(jax.vmap(jax.grad(value))))(np.array([1.0, -0.5]))
    found = exported.call(np.array([1.0, -0.5]))
    assert -np.inf < found[0] < 0
    assert np.isnan(found[1])


def test_extreme_scales():
    """In float32, where squares over- and underflow. (A unit that is a power of two changes no
    digit.)
    """

    @jax.jit
    def solve(matrix, noise):
        operator = hidden(matrix, noise)
        options = {"preconditioner": FIXED}, {"fallback": None}
        given = zip((K, N), options, strict=True)
        return [tr.inverse_diagonal(jr.key(0), operator, k, **more) for k, more in given]

    def at(unit):
        return jax.device_get(solve(unit * decaying(dtype=np.float32), unit * np.float32(NOISE)))

    usual = at(np.float32(1))
    for unit in (2.0**-100, 2.0**100):
        for one, other in zip(usual, at(np.float32(unit)), strict=True):
            for name in ("value", "std_err", "quadrature_error"):
                expected, found = (np.asarray(getattr(x, name), float) for x in (one, other))
                least = 1e-5 * expected.max()
                np.testing.assert_allclose(found * unit, expected, rtol=1e-3, atol=least)


def test_a_large_unit_without_a_preconditioner():
    """tr A^{-1} is not the difference of tr I and another number."""
    unit = np.float32(2.0**100)
    operator = hidden(unit * decaying(dtype=np.float32), unit * np.float32(NOISE))
    found = tr.inverse_trace(jr.key(0), operator, 40, preconditioner=None, fallback=None)
    exact = np.trace(np.linalg.inv(decaying() + NOISE * np.eye(N)))
    np.testing.assert_allclose(found.value.item() * float(unit), exact, rtol=0.1)


def test_exact_inverses_at_extreme_scales_state_their_rounding():
    """Errors of tiny or huge inverses do not underflow to 0, and nothing does before the end."""
    matrix = decaying() + NOISE * np.eye(N)
    exact = np.diag(np.linalg.inv(matrix))
    for unit in np.float32([2.0**-110, 2.0**118]):
        operator = lx.MatrixLinearOperator(unit * np.float32(matrix), PSD)
        found = jax.device_get(tr.inverse_diagonal(jr.key(0), operator, N))
        away = np.abs(found.value.astype(float) * unit - exact)
        np.testing.assert_array_less(away, (4 * found.std_err + found.quadrature_error) * unit)
        assert away.max() < 1e-3 * exact.max()

"""Spectral sums by leaving out: the identity on the same vectors, no bias, derivatives, shifts."""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._functions.krylov_aware import GROUPS, sizes_of

from ..helpers import PSD, by_products, drawn, keys, with_spectrum
from ..reference import function_of, krylov_basis

pytestmark = pytest.mark.slow(quick=True)

N, K = 80, 32


def matrix_of(eigenvalues, dtype=np.float64):
    return with_spectrum(np.random.default_rng(0), eigenvalues, dtype)


DECAYING = 1 / np.arange(1.0, N + 1) ** 2 + 0.01
SPECTRA = {
    "decaying": DECAYING,
    "flat": np.linspace(1, 2, N),
    "low rank": np.where(np.arange(N) < 5, 1.0, 0.0),
    "clustered": np.where(np.arange(N) < 20, 1.0, 0.01),
    "indefinite": np.cos(np.arange(N)),
}


def operator_of(matrix):
    tag = PSD if jnp.iscomplexobj(matrix) else lx.symmetric_tag
    return by_products(matrix, tag)


def weights_of(matrix, start, depth):
    """W of the estimator, an n x n matrix, from the definition."""
    n, b = start.shape
    groups = np.arange(b).reshape(GROUPS, -1)
    total = np.zeros((n, n), start.dtype)
    for group in groups:
        q = krylov_basis(matrix, np.delete(start, group, axis=1), depth)
        for i in group:
            g = start[:, i] - q @ (q.conj().T @ start[:, i])
            share = (n - q.shape[1]) / np.vdot(g, g).real
            total = total + (q @ q.conj().T + share * np.outer(g, g.conj())) / b
    return total


@pytest.mark.parametrize(("dtype", "k"), [(np.float64, 32), (np.complex128, 75)])
def test_the_identity_and_its_derivative_on_the_same_vectors(dtype, k):
    """The value is tr(W V f(T) V^H), and its derivative that with W and V held fixed."""
    matrix, tangent = matrix_of(DECAYING, dtype), matrix_of(0.01 * np.cos(np.arange(N)), dtype)
    size, steps, depth = sizes_of(k)
    assert size == (1 if k == 32 else 2)
    key = jr.key(1)

    def value(t):
        solution = tr.spectral_sum(key, jnp.sqrt, operator_of(matrix + t * tangent), k)
        return solution.value, solution.num_matvecs

    (found, spent), slope = jax.jit(jax.value_and_grad(value, has_aux=True))(0.0)
    a, da = matrix, tangent
    start = drawn(tr.SphereSampler(), key, N, GROUPS * size, dtype)
    v, w = krylov_basis(a, start, steps), weights_of(a, start, depth)

    def form(t):
        inner = function_of(v.conj().T @ (a + t * da) @ v, np.sqrt)
        return np.trace(w @ v @ inner @ v.conj().T).real

    np.testing.assert_allclose(found, form(0), rtol=1e-11)
    np.testing.assert_allclose(slope, (form(1e-4) - form(-1e-4)) / 2e-4, rtol=1e-5)
    assert spent == GROUPS * size * steps <= k


@pytest.mark.parametrize("k", [24, 25, 31, 64, 120, 500, 1500, 4000, 40000])
def test_budgets_are_kept(k):
    size, steps, depth = sizes_of(k)
    assert 0.8 * k <= GROUPS * size * steps <= k
    assert 1 <= depth <= steps - 2 * max(1, steps // 8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("name", SPECTRA)
def test_no_bias_and_bars_that_cover(name, dtype):
    """400 keys: the means of value and derivative are within 4 standard errors, and 92 % of the
    intervals of 95 % cover (95 % less three standard errors of the count).
    """
    eigenvalues = SPECTRA[name]
    matrix = matrix_of(eigenvalues, dtype)
    tangent = matrix_of(np.sin(np.arange(N)), dtype)
    fn = lambda x: jnp.log1p(5 * jnp.square(x))  # noqa: E731

    # The matrices are arguments: one program for all spectra.
    def value(t, key, matrix, tangent):
        operator = operator_of(matrix + t.astype(matrix.dtype) * tangent)
        solution = tr.spectral_sum(key, fn, operator, 40)
        return solution.value, (solution, solution.interval())

    t = jnp.zeros((), matrix.real.dtype)
    mapped = jax.vmap(jax.grad(value, has_aux=True), in_axes=(None, 0, None, None))
    slopes, (found, ends) = jax.jit(mapped)(t, keys(400), matrix, tangent)
    lower, upper = (np.asarray(end, np.float64) for end in ends)
    truth = np.sum(np.log1p(5 * eigenvalues**2))
    rounding = 100 * float(jnp.finfo(dtype).eps) * N
    errors = np.asarray(found.value, np.float64) - truth
    left = float(jnp.mean(found.quadrature_error))  # what the recurrences leave out is no noise
    assert abs(np.mean(errors)) < 4 * np.std(errors) / 20 + left + rounding
    covered = (lower - rounding <= truth) & (truth <= upper + rounding)
    assert np.mean(covered) > 0.92
    slope = function_of(np.asarray(matrix).astype(np.complex128), lambda x: 10 * x / (1 + 5 * x**2))
    expected = np.trace(slope @ np.asarray(tangent)).real
    slopes = np.asarray(slopes, np.float64)
    assert abs(np.mean(slopes) - expected) < 4 * np.std(slopes) / 20 + 20 * left + 100 * rounding


@pytest.mark.parametrize(
    ("eigenvalues", "fn", "k"),
    [
        (np.append(4.0, 1 + np.arange(2, 101) / 200), jnp.exp, 24),
        (1 / np.arange(1.0, 101) ** 2, jnp.square, 48),
    ],
    ids=["outlier", "decaying"],
)
def test_the_depth_causes_no_bias_and_bars_are_at_most_twice_too_large(eigenvalues, fn, k):
    """600 keys: the means of value and derivative are within 4 standard errors. (They were off by
    7.5 on the outlier, as the depth of the smallest standard error was taken. On the decaying
    spectrum bars were 2.9 times too large.)
    """
    structure, count = jax.ShapeDtypeStruct(eigenvalues.shape, float), 600

    def value(scale, key):
        mv = lambda x: scale * eigenvalues * x  # noqa: E731
        solution = tr.spectral_sum(key, fn, lx.FunctionLinearOperator(mv, structure, PSD), k)
        return solution.value, solution

    @jax.jit
    def run(keys):
        truth = jax.value_and_grad(lambda scale: jnp.sum(fn(scale * eigenvalues)))(1.0)
        grad = jax.grad(value, has_aux=True)
        return jax.lax.map(lambda key: grad(1.0, key), keys), truth

    (slopes, found), (total, slope) = jax.device_get(run(keys(count)))
    for each, truth in ((found.value, total), (slopes, slope)):
        assert abs(np.mean(each) - truth) < 4 * np.std(each) / np.sqrt(count)
    bar = np.sqrt(np.mean(np.square(found.std_err)))
    assert 0.9 < bar / np.std(found.value) < 2.2


def test_at_least_as_accurate_as_quadrature_alone():
    """Four functions, 120 products, n = 1000, 40 keys: the rms error is at most 0.9 times that of
    quadrature alone, and 0.3 to 0.1 of it where f(A) is nearly of low rank.
    """
    i, n = np.arange(1.0, 1001), 1000
    random = np.random.default_rng(0).standard_normal((n, n))
    semicircle = np.linalg.eigvalsh((random + random.T) / np.sqrt(8 * n))
    path = 2 - 2 * np.cos(np.pi * np.arange(n) / n)
    cases = (
        (i**-2, lambda x: jnp.sqrt(jnp.abs(x)), 0.1),
        (i**-2, lambda x: jnp.log1p(1e4 * jnp.abs(x)), 0.3),
        (semicircle, lambda x: jnp.exp(20 * x), 0.9),
        (path, lambda x: jnp.exp(-10 * x), 0.9),
    )
    structure = jax.ShapeDtypeStruct((n,), float)
    for values, fn, ratio in cases:

        def errors(key, values=values, fn=fn):
            operator = lx.FunctionLinearOperator(lambda v: values * v, structure, lx.symmetric_tag)
            steps = None, 40
            found = [tr.spectral_sum(key, fn, operator, 120, num_steps=q).value for q in steps]
            return jnp.stack(found) - jnp.sum(fn(values))

        rms = np.sqrt(np.mean(np.square(jax.jit(jax.vmap(errors))(keys(40))), axis=0))
        assert rms[0] < ratio * rms[1]


# --- shifts --------------------------------------------------------------------------------------

SHIFTS = np.array([0.01, 0.1, 1.0, 10.0])


def test_log_determinants_with_shifts_are_this_sum():
    operator = by_products(matrix_of(DECAYING - 0.01), PSD)

    @jax.jit
    def run(key):
        calls = partial(tr.spectral_sum, key, jnp.log), partial(tr.logdet, key)
        # Below its smallest eigenvalue no shift leaves the operator positive definite.
        below = tr.logdet(key, operator, K, shifts=-0.5).result
        return *[call(operator, K, shifts=SHIFTS) for call in calls], below

    expected, found, below = run(jr.key(0))
    assert below == tr.RESULTS.outside_domain
    for name in ("value", "std_err", "quadrature_error", "num_matvecs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_derivatives_by_shifts_and_operator():
    """By the shifts the derivative is that of the returned value."""
    matrix = matrix_of(DECAYING)

    def values(shifts, t):
        operator = by_products((1 + t) * matrix, PSD)
        return tr.spectral_sum(jr.key(1), jnp.log, operator, K, shifts=shifts).value

    h = 1e-5

    @jax.jit
    def run(shifts, t):
        moved = [values(shifts * factor, t) for factor in (1 + h, 1 - h)]
        slopes = jax.jacrev(values, (0, 1))(shifts, t), jax.jacfwd(values)(shifts, t)
        return *slopes, moved

    (by_shifts, by_t), forward, (more, less) = jax.device_get(run(SHIFTS, np.zeros(())))
    differences = (more - less) / (2 * h)
    np.testing.assert_allclose(np.diag(by_shifts), differences / SHIFTS, rtol=1e-6)
    np.testing.assert_allclose(by_shifts - np.diag(np.diag(by_shifts)), 0, atol=1e-12)
    np.testing.assert_allclose(forward, by_shifts, rtol=1e-10)
    # d/dt log det((1 + t) A + s I) = tr A (A + s I)^{-1} = n - s d/ds.
    np.testing.assert_allclose(by_t, N - SHIFTS * np.diag(by_shifts), rtol=0.1)


# --- corners -------------------------------------------------------------------------------------


def test_exact_where_the_space_is_invariant():
    """Zero, a multiple of the identity, a matrix of rank 3."""

    @jax.jit
    def run(matrix):
        return tr.spectral_sum(jr.key(0), lambda x: x * jnp.cos(x), operator_of(matrix), N - 1)

    rounding = 2e3 * float(jnp.finfo(np.float32).eps)
    for eigenvalues in (np.zeros(N), np.full(N, 2.0), np.r_[1.0, 2.0, 3.0, np.zeros(N - 3)]):
        solution = jax.device_get(run(matrix_of(eigenvalues, np.float32)))
        truth = np.sum(eigenvalues * np.cos(eigenvalues))
        assert abs(float(solution.value) - truth) <= rounding
        assert solution.std_err <= rounding
        assert solution.quadrature_error <= rounding
        assert solution.num_matvecs <= N - 1
        assert solution.result == tr.RESULTS.successful


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shifts_at_the_size_of_rounding_errors(dtype):
    """Log-determinants of rank 30, with shifts down to 1e-8 times the largest eigenvalue."""
    n, count, shifts = 300, 40, np.array([1e-4, 1e-3, 1e-2, 0.1, 1])

    def solve(key, matrix):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        return tr.logdet(key, operator, 60, shifts=jnp.asarray(shifts, dtype))

    mapped = jax.jit(jax.vmap(solve, (0, None)))
    for top in (1e2, 1e4):
        eigenvalues = top * np.append(np.arange(1.0, 31) ** -2, np.zeros(n - 30))
        matrix = with_spectrum(np.random.default_rng(0), eigenvalues).astype(dtype)
        found = mapped(keys(count), jnp.asarray((matrix + matrix.T) / 2))
        given = found.value, found.std_err, found.quadrature_error
        value, std_err, quadrature_error = (np.asarray(x, np.float64) for x in given)
        off = np.abs(value - np.sum(np.log(eigenvalues[:, None] + shifts), axis=0))
        covers = np.mean(off <= 2 * std_err + quadrature_error, axis=0)
        assert np.all(covers > 0.95 - 3 * np.sqrt(0.05 * 0.95 / count)), covers

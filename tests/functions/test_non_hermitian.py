"""tr f(A) of operators that are not Hermitian: functions of small matrices, the recurrence, the
identities on the same probes, no bias, errors that cover, what is exact.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from scipy.linalg import expm

import traceax as tr
from traceax._linalg.diagonalisation import diagonalised

from ..helpers import by_products, drawn, keys
from ..reference import each

pytestmark = pytest.mark.slow(quick=True)

N = 70
JORDAN = np.eye(N, k=1)


def gaussian(dtype=np.float64, seed=0, n=N):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((n, n))
    if np.issubdtype(dtype, np.complexfloating):
        matrix = (matrix + 1j * rng.standard_normal((n, n))) / np.sqrt(2)
    return (matrix / np.sqrt(n)).astype(dtype)


def sphere(key, p, dtype):
    return drawn(tr.SphereSampler(), key, N, p, dtype)


@functools.partial(jax.jit, static_argnames=("fn", "k", "num_steps"))
def estimate(key, matrix, fn, k, num_steps=None):
    return tr.spectral_sum(key, fn, lx.MatrixLinearOperator(matrix), k, num_steps=num_steps)


def turned(x):
    """A function with complex values for real numbers."""
    return jnp.exp(1j * x)


FUNCTIONS = {  # f, f(A), f'(A)
    "exp": (jnp.exp, expm, expm),
    "turned": (turned, lambda a: expm(1j * a), lambda a: 1j * expm(1j * a)),
}


# --- functions of small matrices -----------------------------------------------------------------


def test_functions_of_small_matrices():
    """Of defective, nilpotent, triangular and other matrices, against the Pade approximation."""
    rng = np.random.default_rng(1)
    triangular = np.triu(rng.standard_normal((N, N))) / np.sqrt(N)
    defective = {
        "nilpotent": JORDAN,
        "jordan": JORDAN + np.eye(N),
        "blocks": np.kron(np.eye(N // 2), [[2.0, 1], [0, 2]]),
        "triangular": triangular,
    }
    others = {"zero": 0 * JORDAN, "identity": np.eye(N), "gaussian": gaussian()}
    stack = np.stack([*(defective | others).values()])

    @jax.jit
    @jax.vmap
    def exponential(matrix):
        with jax.numpy_dtype_promotion("standard"):  # as inside of the primitive
            found = diagonalised(matrix)
            return found.left @ (jnp.exp(found.nodes)[:, None] * found.right)

    found, eps = np.asarray(exponential(stack)), np.finfo(float).eps
    for (name, matrix), value in zip((defective | others).items(), found, strict=True):
        truth = expm(matrix.astype(np.complex128))
        error = np.linalg.norm(value - truth) / np.linalg.norm(truth)
        # Rounding by eigenvectors that are as good as is asked for, or of both neighbours.
        assert error < (100 * eps if name in others else 30 * eps ** (2 / 3)), (name, error)


# --- the estimate on the same probes -------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "dtype", "p"), [("exp", np.complex128, 3), ("turned", np.float64, 1)]
)
def test_equals_the_dense_function_on_the_same_probes(function, dtype, p):
    """With as many steps as a converged recurrence needs: value, errors, derivative."""
    matrix, tangent, q, key = gaussian(dtype), gaussian(dtype, 1), 20, jr.key(5)
    traced, dense, slope_of = FUNCTIONS[function]

    @jax.jit
    def solve(matrix, tangent):
        def value(a):
            operator = lx.MatrixLinearOperator(a)
            solution = tr.spectral_sum(key, traced, operator, p * q + 1, num_steps=q)
            return solution.value, solution

        _, slope, solution = jax.jvp(value, (matrix,), (tangent,), has_aux=True)
        return slope, solution

    slope, solution = solve(matrix, tangent)
    probes, b = sphere(key, p, dtype), dense(matrix)
    forms = np.einsum("np,nm,mp->p", probes.conj(), b, probes)
    value = np.mean(forms)
    np.testing.assert_allclose(solution.value, value, rtol=1e-10)
    scatter = np.sqrt(np.sum(np.abs(forms - value) ** 2) / (p * (p - 1))) if p > 1 else np.inf
    np.testing.assert_allclose(solution.std_err, scatter, rtol=1e-8)
    assert solution.stats["dof"] == p - 1
    assert solution.quadrature_error < 1e-6
    assert int(solution.num_matvecs) == p * q
    assert solution.result == tr.RESULTS.successful
    assert jnp.iscomplexobj(solution.value)

    expected = np.einsum("np,nm,mp->p", probes.conj(), tangent @ slope_of(matrix), probes)
    np.testing.assert_allclose(slope, np.mean(expected), rtol=1e-8)


def test_few_steps_and_their_quadrature_error():
    """By an orthonormal basis of the Krylov space, after q, q - d and q - 2d steps."""
    matrix, key, q, d = 2 * gaussian(), jr.key(0), 6, 2
    solution = estimate(key, matrix, jnp.exp, q, q)
    z, forms = sphere(key, 1, np.float64)[:, 0], []
    for m in (q, q - d, q - 2 * d):
        powers = np.stack([np.linalg.matrix_power(matrix, i) @ z for i in range(m)], axis=1)
        v = np.linalg.qr(powers)[0]
        first = v.T @ z
        forms.append(first @ expm(v.T @ matrix @ v) @ first)
    np.testing.assert_allclose(solution.value, forms[0], rtol=1e-10)
    assert not jnp.iscomplexobj(solution.value)
    last, rate = abs(forms[0] - forms[1]), abs((forms[0] - forms[1]) / (forms[1] - forms[2]))
    rate = min(rate, 0.95)
    expected = last * max(1, 8 * rate / (1 - rate))
    np.testing.assert_allclose(solution.quadrature_error, expected, rtol=1e-7)
    assert abs(forms[0] - z @ expm(matrix) @ z) < solution.quadrature_error


# --- exact cases, and what is none ---------------------------------------------------------------


def test_exact_with_as_many_products_as_rows():
    """For a Gaussian and a defective matrix, with the derivative."""
    eps, tangent = np.finfo(float).eps, gaussian(seed=1)

    @jax.jit
    def solve(matrix):
        def value(a):
            solution = estimate(jr.key(0), a, jnp.exp, N)
            return solution.value, solution

        _, slope, solution = jax.jvp(value, (matrix,), (tangent,), has_aux=True)
        return slope, solution

    for matrix in (gaussian(), JORDAN + np.eye(N)):
        slope, solution = jax.device_get(solve(matrix))
        truth = np.trace(expm(matrix))
        np.testing.assert_allclose(solution.value, truth, rtol=100 * eps)
        assert solution.std_err == 0
        assert abs(solution.value - truth) <= solution.quadrature_error < 1e4 * eps * abs(truth)
        assert solution.num_matvecs == N
        expected = np.sum(expm(matrix).T * tangent)
        size = np.linalg.norm(expm(matrix)) * np.linalg.norm(tangent)
        assert abs(slope - expected) < 30 * eps ** (2 / 3) * size


def test_exhausted_spaces_are_exact():
    """The forms of zero, a multiple of the identity and a nilpotent matrix, at any scale."""
    dtype, key = np.float32, jr.key(2)
    eps = np.finfo(dtype).eps
    nilpotent = np.zeros((N, N))
    nilpotent[:3, 1:4] = np.diag([1.0, 2.0, 3.0])

    @jax.jit
    def solve(matrix, scale):
        operator = lx.MatrixLinearOperator(matrix)
        return tr.spectral_sum(key, lambda x: jnp.exp(x / scale), operator, 10, num_steps=10)

    z = sphere(key, 1, dtype)[:, 0].astype(np.float64)
    for scale in (1.0, 1e20, 1e-20):
        for matrix in (np.zeros((N, N)), 2 * np.eye(N), nilpotent):
            solution = solve((scale * matrix).astype(dtype), np.asarray(scale, dtype))
            defective = matrix is nilpotent
            tolerance = 30 * (eps ** (2 / 3) if defective else eps)
            np.testing.assert_allclose(solution.value, z @ expm(matrix) @ z, rtol=tolerance)
            assert (solution.result, solution.quadrature_error) == (tr.RESULTS.successful, 0)


def test_what_is_no_estimate_says_so():
    """A cut along the real line, poles, and NaN in the operator; never a NaN that is silent."""
    with_negative = np.diag(np.r_[-1.0, np.ones(N - 1)]) + np.triu(gaussian(), 1)
    for k, steps in ((N, None), (12, 12)):
        solution = estimate(jr.key(0), with_negative, jnp.log, k, steps)
        # A recurrence may have no negative node: then the value is real, and the form's own.
        assert np.isnan(solution.value) == (solution.result == tr.RESULTS.outside_domain)
        assert k < N or np.isnan(solution.value)
        bad = estimate(jr.key(0), gaussian() * np.nan, jnp.log, k, steps)
        assert bad.result == tr.RESULTS.nonfinite_operator
        assert np.isnan(bad.value)
    pole = estimate(jr.key(0), 0 * JORDAN, jnp.log, 12, 12)
    assert pole.result == tr.RESULTS.outside_domain
    assert np.isnan(pole.value)
    # The determinant of a matrix whose field of values is to the right of 0.
    positive = 3 * np.eye(N) + gaussian()
    solution = estimate(jr.key(0), positive, jnp.log, N)
    np.testing.assert_allclose(solution.value, np.linalg.slogdet(positive)[1], rtol=1e-13)


# --- transformations -----------------------------------------------------------------------------


def test_transformations_and_parameters_of_the_function():
    matrix, two = gaussian(), keys(2)
    thetas = jnp.asarray([0.5, 1.0])

    def loss(theta, key):  # of the operator, and of what the function closes over
        operator = by_products(theta * matrix)
        return tr.spectral_sum(key, lambda x: jnp.exp(theta * x), operator, 16, num_steps=16).value

    of_each = jax.jit(jax.grad(lambda t: jnp.sum(jax.vmap(loss)(t, two))))(thetas)
    for theta, key, slope in zip(thetas, two, of_each, strict=True):
        probe = sphere(key, 1, np.float64)[:, 0]
        inner = 2 * theta * matrix @ expm(theta**2 * matrix)
        np.testing.assert_allclose(slope, probe @ inner @ probe, rtol=1e-7)


# --- bias and errors -----------------------------------------------------------------------------


def matrices():
    """Gaussian, complex, defective, nearly skew, of low rank, and a directed network."""
    real, rng = gaussian(), np.random.default_rng(4)
    return {
        "gaussian": real,
        "complex": gaussian(np.complex128),
        "nilpotent": JORDAN,
        "skew": real - real.T + 0.05 * real,
        "low rank": 10 * np.outer(real[0], real[1]),
        "network": 0.7 * (rng.random((N, N)) < 3 / N),
    }


@pytest.mark.parametrize("name", list(matrices()))
def test_no_bias_and_bars_that_cover(name):
    """400 keys: z scores below 4.5, 92 % of the bars cover, the variance is known to a quarter."""
    matrix, p, q = matrices()[name], 3, 16
    tangent = gaussian(matrix.dtype, 1)

    def one(key, matrix, tangent):
        def value(t):
            operator = lx.MatrixLinearOperator(matrix + t.astype(matrix.dtype) * tangent)
            solution = tr.spectral_sum(key, jnp.exp, operator, p * q, num_steps=q)
            return solution.value, solution

        zero = jnp.zeros(())
        _, slope, solution = jax.jvp(value, (zero,), (jnp.ones(()),), has_aux=True)
        return slope.real, solution, solution.interval()

    slopes, found, (low, high) = each(one, keys(400), jnp.asarray(matrix), jnp.asarray(tangent))
    b = expm(matrix)
    truth = np.trace(b)
    for samples, mean in ((found.value.real, truth.real), (slopes, np.trace(b @ tangent).real)):
        samples = np.asarray(samples)
        assert abs(samples.mean() - mean) < 4.5 * samples.std(ddof=1) / 20
    # The variance itself, not only what is seen of it.
    away = b - truth / N * np.eye(N)
    if not np.iscomplexobj(matrix):
        away = (away + away.T) / 2
    c = N / (N + 1) if np.iscomplexobj(matrix) else 2 * N / (N + 2)
    variance = c * np.linalg.norm(away) ** 2 / p
    ratio = np.mean(np.asarray(found.std_err) ** 2) / variance
    assert 0.75 < ratio < 1.35
    assert np.mean((low <= truth.real) & (truth.real <= high)) > 0.92


def test_exact_sums_of_matrices_that_are_not_normal_state_their_rounding():
    """A rotated nilpotent matrix and one with a triangular part; roots of eigenvalues that are
    nothing but rounding.
    """
    rng = np.random.default_rng(0)
    q = np.linalg.qr(rng.standard_normal((40, 40)))[0]
    triangular = np.eye(40) + q @ np.triu(rng.standard_normal((40, 40)), 1) @ q.T / 4
    cases = ((q @ np.eye(40, k=1) @ q.T, jnp.exp, 40.0), (triangular, jnp.log, 0.0))
    low = rng.standard_normal((40, 5)) @ rng.standard_normal((5, 40))
    roots = np.sqrt(np.linalg.eigvals(low) + 0j)
    roots = np.sum(roots[np.abs(roots) > 1e-3])
    cases += ((low, jnp.sqrt, roots),)
    for (matrix, fn, truth), most in zip(cases, (1e-3, 0.2, 1.0), strict=True):
        operator = lx.MatrixLinearOperator(jnp.asarray(matrix + 0j, jnp.complex64))
        found = tr.spectral_sum(jax.random.key(0), fn, operator, 40)
        assert abs(complex(found.value) - truth) <= float(found.quadrature_error) < most

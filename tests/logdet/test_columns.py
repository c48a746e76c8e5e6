"""Log-determinants of operators whose columns are cheap: preconditioners from columns, exact values
where they are cheaper, and derivatives that never form the matrix.
"""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._logdet.run import budget_or_all

from ..helpers import PSD, by_products, keys, over_keys
from .test_logdet import shifted

pytestmark = pytest.mark.slow(quick=True)

N, K = 250, 30
X = np.random.default_rng(0).uniform(size=(N, 2))


def kernel(length, x=X):
    def k(a, b):
        r = jnp.sqrt(jnp.maximum(5 * jnp.sum((a - b) ** 2) / length**2, 1e-30))
        return (1 + r + r**2 / 3) * jnp.exp(-r)

    return tr.KernelLinearOperator(k, x, block_size=100)


def covariance(theta, x=X):
    length, amplitude, noise = theta
    K = kernel(length, x)
    return amplitude * K + noise * lx.IdentityLinearOperator(K.in_structure())


THETA = jax.device_put(tuple(np.array([0.4, 1.5, 0.1])))


@jax.jit
def dense(theta, x=X):
    return covariance(theta, x).as_matrix()


@jax.jit
def exact(theta, x=X):
    return jnp.linalg.slogdet(dense(theta, x))[1]


def test_derivatives_against_dense_ones():
    """Hyperparameters, noise and inputs, over 20 keys: within four standard errors of the mean."""

    def value(theta, x, key):
        return tr.logdet(key, covariance(theta, x), K, fallback=None).value

    found = over_keys(20, partial(jax.grad(value, (0, 1)), THETA, X))
    expected = jax.jit(jax.grad(exact, (0, 1)))(THETA, X)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scatter = np.std(ours, axis=0) / np.sqrt(20)
        apart = np.mean(ours, axis=0) - theirs
        # (The quadrature of a few steps, too, leaves a small bias.)
        allowed = 4 * np.linalg.norm(scatter) + 1e-3 * np.linalg.norm(theirs)
        assert np.linalg.norm(apart) < allowed
        assert allowed < 0.3 * np.linalg.norm(theirs)  # half of a derivative would not pass


# --- exact values --------------------------------------------------------------------------------


def test_the_exact_value_where_it_is_cheaper():
    operator = covariance(THETA)
    solution = jax.jit(lambda key: tr.logdet(key, operator, -(-N // 6)))(jr.key(0))
    np.testing.assert_allclose(solution.value, exact(THETA), rtol=1e-10)
    assert (solution.std_err, solution.num_matvecs, solution.stats["columns"]) == (0, 0, N)
    assert budget_or_all(by_products(dense(THETA), PSD), N - 1) == N - 1
    cases = (1200, 199, False, 199), (1200, 200, False, 1200), (4096, 9, True, 4096)
    for n, k, tolerance, chosen in (*cases, (4097, 9, True, 9)):
        assert budget_or_all(kernel(0.4, jnp.zeros((n, 2))), k, tolerance=tolerance) == chosen
    assert budget_or_all(operator, 2) == N  # few rows


@pytest.mark.parametrize(("length", "noise"), [(0.4, 1e-4), (0.05, 1e-2)])
def test_exact_values_state_their_rounding(length, noise):
    """In float32 the error of a factorisation is not small beside half a nat."""
    x, theta = X.astype(np.float32), tuple(np.float32([length, 1.0, noise]))
    solution = jax.jit(lambda theta: tr.logdet(jr.key(0), covariance(theta, x), N))(theta)
    truth = np.linalg.slogdet(np.asarray(dense(theta, x), np.float64))[1]
    error, stated = abs(float(solution.value) - truth), float(solution.quadrature_error)
    assert solution.std_err == 0
    # The sum of the logarithms is rounded, too.
    assert error <= stated + 1e-6 * abs(truth)
    assert stated <= 1
    assert solution.result == tr.RESULTS.successful


@pytest.mark.parametrize("jitter", [None, 1e-7])
def test_noise_inside_of_the_matrix_is_found(jitter):
    """Alone, or next to a known term that is far smaller."""
    f = np.random.default_rng(3).standard_normal((N, 20))
    matrix = f @ f.T + 0.01 * np.eye(N)
    operator = lx.MatrixLinearOperator(matrix, PSD) if jitter is None else shifted(matrix, jitter)
    found = jax.jit(lambda key: tr.logdet(key, operator, 30, fallback=None))(jr.key(0))
    assert found.result == tr.RESULTS.successful
    assert found.stats["columns"] > 20
    truth = np.linalg.slogdet(matrix + (jitter or 0) * np.eye(N))[1]
    assert abs(found.value - truth) <= 3 * found.std_err + found.quadrature_error < 0.3


@pytest.mark.parametrize("kind", ["rough", "tridiagonal"])
def test_values_and_derivatives_with_noise_inside_are_unbiased(kind):
    """300 keys; 4 standard errors of the means. The bars (2 of them) cover 0.91 at least, which is
    4 standard errors below 0.95 and 2 % for the degrees of freedom.
    """
    if kind == "rough":
        matrix = np.exp(-np.linalg.norm(X[:, None] - X, axis=2) / 0.3) + 0.1 * np.eye(N)
    else:
        matrix = 2.1 * np.eye(N) - np.eye(N, k=1) - np.eye(N, k=-1)

    @jax.jit
    def run(key):
        def value(s):
            operator = lx.MatrixLinearOperator(matrix + s * jnp.eye(N), PSD)
            solution = tr.logdet(key, operator, 60, fallback=None)
            return solution.value, solution

        (_, solution), slope = jax.value_and_grad(value, has_aux=True)(jnp.zeros(()))
        return solution.value, slope, solution.std_err, solution.quadrature_error

    found = [run(key) for key in keys(300)]
    values, slopes, errors, quadrature = (np.array([one[i] for one in found]) for i in range(4))
    truth = np.linalg.slogdet(matrix)[1], np.trace(np.linalg.inv(matrix))
    for numbers, expected in ((values, truth[0]), (slopes, truth[1])):
        allowance = 4 * np.std(numbers) / np.sqrt(len(numbers))
        slack = np.mean(quadrature) / len(matrix) if numbers is slopes else np.mean(quadrature)
        assert abs(np.mean(numbers) - expected) < allowance + slack
    assert np.mean(np.abs(values - truth[0]) <= 2 * errors + quadrature) > 0.91


def test_noise_that_exceeds_the_kernel():
    """Entries are rounded before the shift is subtracted from them."""
    dtype = np.float32
    x = np.asarray(X, dtype)
    matrix = dtype(1e-3) * np.exp(-np.sum((x[:, None] - x) ** 2, axis=-1) / dtype(0.2))
    relative = np.linalg.slogdet(np.asarray(matrix, np.float64) + np.eye(len(x)))[1]

    @jax.jit
    def run(s, key):
        solution = tr.logdet(key, shifted(s * matrix, s), K, fallback=None)
        return solution.value, 3 * solution.std_err + solution.quadrature_error, solution.result

    for s in 10.0 ** np.arange(-2, 7):
        for key in keys(2):
            value, bar, result = run(dtype(s), key)
            assert result == tr.RESULTS.successful
            assert abs(float(value) - relative - len(x) * np.log(s)) <= float(bar)


def test_close_points_among_isolated_ones_get_longer_recurrences():
    """The columns that were chosen look like those of a multiple of the identity; the rows of close
    points beside them say that there are smaller eigenvalues. (Three steps were then far too few
    for 25 of 40 keys.)
    """
    n = 400
    x = np.random.default_rng(2).uniform(size=(n, 2))
    matrix = 2 * np.exp(-np.sum((x[:, None] - x) ** 2, axis=-1) / (2 * 0.01**2))
    truth = np.linalg.slogdet(matrix + 0.05 * np.eye(n))[1]

    def run(key):
        solution = tr.logdet(key, shifted(matrix, 0.05), 60, fallback=None)
        failed = solution.result != tr.RESULTS.successful
        return solution.value, 2 * solution.std_err + solution.quadrature_error, failed

    value, bar, failed = over_keys(40, run)
    assert np.sum(failed) <= 6
    assert np.sum(np.abs(value - truth) <= bar) >= 36

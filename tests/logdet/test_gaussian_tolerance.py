"""Log densities to a tolerance; budgets that are too small are said to be."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from traceax import RESULTS, NystromPreconditioner, gaussian_log_density, logdet

from ..helpers import keys, with_spectrum
from .test_gaussian import cholesky_density, observations
from .test_logdet import dense_logdet, distances, hidden, matern32, shifted

N = 200


# --- a fixed budget that is too small -------------------------------------------------------------


@pytest.mark.variant
def test_recurrences_that_have_not_converged():
    """A spectrum over seven decades, and a few steps: the value is kept, with its quadrature error.
    With a shift that leaves less than a decade the same budget is enough.
    """
    matrix, y = with_spectrum(np.random.default_rng(0), np.geomspace(1e-3, 1e4, N)), observations(N)
    truth = dense_logdet(matrix + 1e-3 * np.eye(N))
    exact = truth_of(y, jnp.asarray(matrix), jnp.asarray(1e-3))

    def both(s, k, throw=False):
        operator = shifted(jnp.asarray(matrix), s)
        options = {"preconditioner": NystromPreconditioner(rank=20), "throw": throw}
        key = jr.key(0)
        return (
            logdet(key, operator, k, **options),
            gaussian_log_density(key, y, operator, k, **options),
        )

    s = jnp.asarray(1e-3)
    for solution, expected in zip(both(s, 30), (truth, exact), strict=True):
        assert solution.result == RESULTS.not_converged
        error = abs(solution.value - expected)
        assert error > max(4 * solution.std_err, 0.05 * abs(expected))
        assert error < 3 * solution.std_err + solution.quadrature_error

    def successful(s):
        return jnp.stack([x.result == RESULTS.successful for x in both(s, 30)])

    lanes = jax.jit(jax.vmap(successful))(jnp.array([1e-3, 1e5]))
    assert lanes.tolist() == [[False, False], [True, True]]
    with pytest.raises(eqx.EquinoxRuntimeError, match="exceeds four standard errors"):
        both(s, 30, throw=True)


# --- to a tolerance -------------------------------------------------------------------------------


@eqx.filter_jit
def density(key, y, matrix, s, atol, rtol=None, max_k=64):
    return gaussian_log_density(key, y, hidden(matrix, s), atol=atol, rtol=rtol, max_k=max_k)


@jax.jit
def truth_of(y, matrix, s):
    return cholesky_density(y, matrix + jnp.asarray(s, matrix.dtype) * jnp.eye(len(matrix)))


@pytest.mark.slow
def test_values_are_within_the_tolerance():
    """A kernel, three tolerances, and a relative one: at most those, and the products grow."""
    n, s = 400, 0.05
    matrix = jnp.asarray(matern32(distances(n, 2), 0.3))
    factor = np.linalg.cholesky(np.asarray(matrix) + s * np.eye(n))
    y = jnp.asarray(factor @ np.asarray(observations(n)))
    truth, spent = truth_of(y, matrix, s), []
    x = np.linalg.solve(np.asarray(matrix) + s * np.eye(n), y)
    zero = jnp.zeros(())
    relative = 0.1
    for atol, rtol in ((10.0, 0.0), (1.0, 0.0), (0.0, relative)):
        given = jnp.asarray(s), zero + atol, zero + rtol, 390
        found = [density(key, y, matrix, *given) for key in keys(4)]
        spent.append(np.median([solution.num_matvecs for solution in found]))
        for solution in found:
            assert solution.result == RESULTS.successful
            assert solution.num_matvecs <= 390
            tolerance = atol + rtol * abs(solution.value)
            assert 2 * solution.std_err + solution.quadrature_error <= tolerance
            assert abs(solution.value - truth) <= tolerance
            form, log_det = solution.stats["quadratic_form"], solution.stats["log_det"]
            np.testing.assert_allclose(
                solution.value, -(form + log_det + n * np.log(2 * np.pi)) / 2, rtol=1e-10
            )
            # x^H A x errs by what the form lacks, at most twice the tolerance.
            away = np.asarray(solution.stats["solve"]) - x
            assert away @ (np.asarray(matrix) @ away + s * away) <= 2 * tolerance
    assert spent[0] < spent[1]


@pytest.mark.variant
def test_exact_as_the_last_resort():
    """With the derivatives of the exact density, in the covariance and in y."""
    n, values = 260, np.linspace(0.01, 1, 260)
    matrix = jnp.asarray(with_spectrum(np.random.default_rng(2), values))
    y = observations(n)

    def value(s, y):
        solution = density(jr.key(0), y, matrix, s, jnp.asarray(1e-6), None, None)
        return solution.value, solution

    both = eqx.filter_jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))
    (found, solution), slopes = both(jnp.asarray(0.1), y)
    truth, exact_slopes = jax.value_and_grad(lambda s, y: truth_of(y, matrix, s), argnums=(0, 1))(
        jnp.asarray(0.1), y
    )
    assert solution.result == RESULTS.successful
    assert n + 16 <= solution.num_matvecs <= n + n // 4
    assert solution.std_err == 0 < solution.quadrature_error < 1e-9
    np.testing.assert_allclose(found, truth, rtol=1e-11)
    np.testing.assert_allclose(slopes[0], exact_slopes[0], rtol=1e-9)
    np.testing.assert_allclose(slopes[1], exact_slopes[1], rtol=1e-7, atol=1e-9)


@pytest.mark.variant
def test_not_converged_and_derivatives():
    """The best estimate, with its errors; the derivative of one that has converged; and a batch of
    both, of which each gets what it gets alone.
    """
    matrix = jnp.asarray(with_spectrum(np.random.default_rng(2), np.linspace(0.01, 1, N)))
    y = observations(N)

    def run(s):
        solution = density(jr.key(0), y, matrix, s, jnp.asarray(3.0))
        rest = solution.std_err, solution.quadrature_error, solution.num_matvecs
        return solution.value, (*rest, solution.result == RESULTS.successful)

    shifts = jnp.array([1e-3, 5.0])
    both = jax.value_and_grad(run, has_aux=True)
    alone = [jax.jit(both)(s) for s in shifts]
    lanes = jax.jit(jax.vmap(both))(shifts)
    for i, ((value, rest), slope) in enumerate(alone):
        truth, exact_slope = jax.value_and_grad(lambda s: truth_of(y, matrix, s))(shifts[i])
        std_err, error, spent, successful = rest
        assert spent <= 64
        assert successful == (i == 1)
        assert abs(value - truth) < (3 * std_err + error if i == 0 else 3.0)
        if i == 1:
            np.testing.assert_allclose(slope, exact_slope, rtol=0.05)
        picked = jax.tree_util.tree_map(lambda x, i=i: x[i], lanes)
        np.testing.assert_allclose(picked[0][0], value, rtol=1e-8)
        np.testing.assert_allclose(picked[1], slope, rtol=1e-6)
        assert picked[0][1][2:] == rest[2:]


def test_arguments():
    y, matrix = observations(N), jnp.eye(N)
    operator = shifted(matrix, 0.1)
    with pytest.raises(TypeError, match="give a tolerance instead, `gaussian_log_density"):
        gaussian_log_density(jr.key(0), y, operator)
    with pytest.raises(TypeError, match="both a budget, k=10, and a tolerance"):
        gaussian_log_density(jr.key(0), y, operator, 10, atol=0.1)
    with pytest.raises(ValueError, match="a Gaussian log density needs max_k of at least 64"):
        gaussian_log_density(jr.key(0), y, operator, atol=0.1, max_k=30)
    build = jax.jit(lambda key: NystromPreconditioner(rank=5).build(key, operator))
    for chosen in (None, build(jr.key(0))):
        with pytest.raises(ValueError, match="To a tolerance, the preconditioner must be 'auto'"):
            gaussian_log_density(jr.key(0), y, operator, atol=0.1, preconditioner=chosen)


def test_small_operators_are_exact_at_once():
    """No more than 256 rows, where the budget allows it."""
    matrix = jnp.asarray(with_spectrum(np.random.default_rng(2), np.linspace(0, 1, N)))
    y = observations(N)
    solution = density(jr.key(0), y, matrix, jnp.asarray(0.1), jnp.asarray(10.0), None, None)
    assert solution.num_matvecs == N
    assert solution.std_err == 0 < solution.quadrature_error < 1e-9
    np.testing.assert_allclose(solution.value, truth_of(y, matrix, 0.1), rtol=1e-11)

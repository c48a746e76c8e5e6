"""Log densities to a tolerance; budgets that are too small are said to be."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from traceax import RESULTS, NystromPreconditioner, gaussian_log_density, logdet

from .helpers import with_spectrum
from .test_gaussian import cholesky_density, observations
from .test_logdet import dense_logdet, shifted

N = 200


# --- a fixed budget that is too small -------------------------------------------------------------


def test_recurrences_that_have_not_converged():
    """A spectrum over seven decades, and a few steps: the value is kept, with its quadrature error.
    With a shift that leaves less than a decade the same budget is enough.
    """
    matrix, y = with_spectrum(np.random.default_rng(0), np.geomspace(1e-3, 1e4, N)), observations(N)
    truth = dense_logdet(matrix + 1e-3 * np.eye(N))
    exact = cholesky_density(y, jnp.asarray(matrix + 1e-3 * np.eye(N)))

    @eqx.filter_jit
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

"""Estimates with two errors: of the random probes, and of ending Lanczos' recurrence early."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ._estimate import Estimate, has_no_logarithm, make_estimate
from ._estimator import AbstractEstimator, solve
from ._primitive import trace_p
from ._solution import Solution


def with_quadrature_error(
    value, error, std_err, num_matvecs: Array | int, dof: Array | int, status
) -> Estimate:
    """An estimate whose value is a pair: the value, and its quadrature error. NaN, both of them, if
    f is not finite where it is needed, or the operator is not Hermitian.
    """
    failed = has_no_logarithm(status)

    def masked(x):
        return jnp.where(failed, jnp.nan, x)

    parts = (masked(value), masked(error))
    errors = (masked(std_err), jnp.zeros_like(error))
    return make_estimate(parts, errors, num_matvecs, dof, status)


def solve_pair(key, operator, k: Any, estimator: AbstractEstimator, throw: bool) -> Solution:
    """Solve, and take apart the pair of the value and its quadrature error."""
    solution = solve(trace_p, key, operator, k, estimator, throw=throw)
    (value, quadrature_error), (std_err, _) = solution.value, solution.std_err
    stats = {**solution.stats, "std.err": std_err}
    return Solution(value, std_err, solution.num_matvecs, stats, solution.result, quadrature_error)

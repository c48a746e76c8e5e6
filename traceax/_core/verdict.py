"""The result of an estimate: what users compare with, and the one function that decides it."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array

from .estimate import Estimate, all_finite


class RESULTS(lx.RESULTS):  # pyright: ignore[reportGeneralTypeIssues]
    """The outcomes of an estimate: compare with `solution.result == tr.RESULTS.successful`.

    They are `successful`, `nonfinite_operator`, `not_semidefinite`, `not_symmetric`,
    `outside_domain` and `not_converged`. `RESULTS[solution.result]` is the message, empty on
    success.
    """

    nonfinite_operator = (
        "A product with the operator holds NaN or inf. Check the arrays inside of the operator, "
        "its products and their sum for overflow, and a preconditioner of your own for being "
        "positive definite; `jax.config.update('jax_debug_nans', True)` finds the first NaN."
    )
    not_semidefinite = (
        "The operator is tagged semidefinite, but its products say that it is not: the value is a "
        "Hutchinson estimate from them. Remove the tag, or use `XTraceEstimator`."
    )
    outside_domain = (
        "A Ritz value (an approximate eigenvalue) lies where the function is not finite (for log: "
        "A is not positive definite to rounding), the value overflows, or observations are missing "
        "(NaN). Shift the operator (A + s I), compute in float64, or tag a semidefinite one so."
    )
    not_converged = (
        "The budget was spent before the error was small enough; the stated errors say how good "
        "the value is. Raise `k`, or for a tolerance `max_k`; where the value is exact (its "
        "standard error is 0), compute in float64."
    )
    not_symmetric = (
        "The operator is tagged symmetric or semidefinite, but its products say that it is not "
        "symmetric (Hermitian): functions and eigenvalues are wrong. Remove the tag, use "
        "(A + A^H) / 2, or say with `traceax.inexact` how precise iterative solves are."
    )


def verdict(estimate: Estimate, is_real: bool = False) -> Estimate:
    """The estimate with its result. What is no estimate becomes NaN: values computed from NaN or
    inf, even finite ones (but for `separate` entries), and values that are not defined. Of values
    that are real by a tag the imaginary part is noise.
    """
    value = jtu.tree_map(jnp.real, estimate.value) if is_real else estimate.value
    failures = estimate.evidence.failures
    # An infinite error says that nothing is known of it.
    error = estimate.quadrature_error
    errors = [jnp.where(jnp.isinf(x), 0, x) for x in jtu.tree_leaves(error)]
    finite = all_finite(*jtu.tree_leaves(value), *errors)
    # The most serious comes last. A sum of finite products may overflow.
    outcomes = (
        (failures.unconverged, RESULTS.not_converged),
        (~finite, RESULTS.nonfinite_operator),
        (failures.negative, RESULTS.not_semidefinite),
        (failures.outside, RESULTS.outside_domain),
        (failures.skew, RESULTS.not_symmetric),
        (failures.nonfinite, RESULTS.nonfinite_operator),
    )
    result: Any = RESULTS.successful
    for failed, outcome in outcomes:
        result = RESULTS.where(failed, outcome, result)
    void = (result == RESULTS.nonfinite_operator) | failures.outside

    def masked(x, entries=None):
        lost = void if entries is None or not estimate.separate else void & ~jnp.isfinite(entries)
        return jnp.where(lost, jnp.full((), jnp.nan, x.dtype), x)

    return dataclasses.replace(
        estimate,
        value=jtu.tree_map(masked, value, value),
        std_err=jtu.tree_map(masked, estimate.std_err, value),
        quadrature_error=error if error is None else jtu.tree_map(masked, error, value),
        aux=jtu.tree_map(masked, estimate.aux),
        result=result,
    )


def raised(found: Any) -> Any:
    """A solution, or an estimate with a result, that raises an error at run time where it fails."""
    return found.result.error_if(found, found.result != RESULTS.successful)


def transformed(solution: Any, throw: bool, value: Array, std_err: Array, **more: Any) -> Any:
    """The solution with a function of its value, which is outside of the domain if it overflows."""
    overflows = jnp.isinf(value)
    found = dataclasses.replace(
        solution,
        value=jnp.where(overflows, jnp.nan, value),
        std_err=std_err,
        result=RESULTS.where(jnp.any(overflows), RESULTS.outside_domain, solution.result),
        stats={**solution.stats, "std.err": std_err},
        **more,
    )
    return raised(found) if throw else found


_OUTCOMES = [
    "successful",
    "nonfinite_operator",
    "not_semidefinite",
    "outside_domain",
    "not_converged",
    "not_symmetric",
]


def outcome_of(result: Any) -> str:
    """The name of a concrete member of `RESULTS`, or "failed" if it is none of this package's."""
    names = (name for name in _OUTCOMES if bool(result == getattr(RESULTS, name)))
    return next(names, "failed")

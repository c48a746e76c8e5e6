"""The log-determinant of a positive definite operator: the function that users call."""

from typing import Literal, final

import jax.numpy as jnp
import lineax as lx
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from .._core.primitive import logdet_p
from .._estimators.estimator import check_key, estimated
from .._estimators.solution import Solution
from .._functions.spectral import spectral_sum
from .._operators.known_parts import is_diagonal
from .estimator import estimate_from, exact_logdet, logdet_of_diagonal
from .factors import BuiltPreconditioner
from .held import held_estimate
from .preconditioners import AbstractPreconditioner
from .run import (
    AbstractPreconditionedEstimator,
    check_budget_alone,
    check_fallback,
    fields_and_budget,
    run_of,
)
from .weights import weights_of


@final
class LogdetEstimator(AbstractPreconditionedEstimator):
    """The log-determinant."""

    label = "logdet"  # pyright: ignore

    def size(self, operator):
        """See `AbstractEstimator`."""
        return 0 if is_diagonal(operator) else operator.in_size()

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        built = self.preconditioner
        if isinstance(built, BuiltPreconditioner):
            estimate, _, made = held_estimate(key, built, operator, k, weights)
            return estimate, made
        run = run_of(self, key, operator, k, weights=weights)
        return estimate_from(run), weights_of(run) if weights else None

    def exact(self, operator):
        """See `AbstractEstimator`."""
        if is_diagonal(operator):
            return logdet_of_diagonal(operator)
        estimate, made, *_ = exact_logdet(operator)
        return estimate, made


def logdet(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    max_k: int | None = None,
    shifts: ArrayLike | None = None,
    preconditioner: AbstractPreconditioner | BuiltPreconditioner | Literal["auto"] | None = "auto",
    fallback: Literal["exact"] | None = "exact",
    throw: bool = False,
) -> Solution:
    r"""Estimate $\log\det A$ of a positive definite operator, such as $K + s I$.

    $\log\det A = \log\det P + \mathrm{tr} \log(P^{-1/2} A P^{-1/2})$ with a preconditioner P, by
    stochastic Lanczos quadrature. A diagonal part (`K + s I`, `K + D`) is read off. With a
    [`traceax.BuiltPreconditioner`][] the first derivative is exactly that of the value for a fixed
    key; else derivatives of every order are unbiased as far as the quadrature has converged.

    **Cost:** `k` matvecs, six blocks of `n x k` numbers. From `k = n` on the value is exact.

    **Arguments:**

    - `key`: a random key.
    - `operator`: an operator that is tagged positive semidefinite, or its sum with diagonal ones.
    - `k`: the budget of matvecs, a static Python int.
    - `rtol`, `atol`, `max_k`: a tolerance in the place of a budget, as for [`traceax.trace`][].
    - `shifts`: numbers s, for the values of all A + s I ([`traceax.spectral_sum`][]).
    - `preconditioner`: `"auto"`, one such as [`traceax.NystromPreconditioner`][], a
        [`traceax.BuiltPreconditioner`][], or None.
    - `fallback`: `"exact"`: the value is exact, without products, up to 1,024 rows or 6 k (at most
        16,384), with a tolerance up to 4,096 rows, if the operator knows its entries and the
        preconditioner is `"auto"`. None: it is not.
    - `throw`: whether to raise an error if the result is not successful.

    **Returns:** a [`traceax.Solution`][] with two errors: `std_err` of the probes, and
    `quadrature_error` of ending the recurrence early and of rounding. The value is NaN if the
    operator is found not to be positive definite (`outside_domain`) or Hermitian (`not_symmetric`),
    `not_converged` if the quadrature error exceeds four standard errors, 5 % of the value, and 1.
    `stats["columns"]` is the number of columns that were read.

    **Raises:** `TypeError`, `ValueError` as [`traceax.trace`][].

    **Source:** A. Cortinovis, P. Toni, 2026, arXiv:2601.05778.
    """
    tolerance = {"rtol": rtol, "atol": atol, "max_k": max_k}
    if shifts is not None:
        check_fallback(fallback)
        if preconditioner is not None and preconditioner != "auto":
            raise ValueError(
                "Log-determinants for several shifts share a Krylov space of A, which the "
                f"{type(preconditioner).__name__} would change. Leave `preconditioner` out, or "
                "make one call for each shift."
            )
        check_budget_alone("`logdet` with several shifts", tolerance)
        return spectral_sum(key, jnp.log, operator, k, shifts=shifts, throw=throw)  # pyright: ignore[reportArgumentType]
    check_key(key)  # of a call without one, k is missing, too
    fields, budget = fields_and_budget("logdet", operator, k, preconditioner, fallback, tolerance)
    return estimated(logdet_p, key, operator, budget, LogdetEstimator(*fields), throw=throw)

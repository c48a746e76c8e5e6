r"""Trace and diagonal of the inverse of a positive definite operator.

With the preconditioner P = R R^H of a log-determinant (see `preparation`), M = R^{-1} A R^{-H}
and vectors omega of random signs,

    A^{-1} = P^{-1} + E[B omega omega^T],      B = A^{-1} - P^{-1} = R^{-H} (M^{-1} - I) R^{-1}.

The diagonal of P^{-1} is known, and B goes to 0 as M goes to I. From z = R^{-1} omega, q steps of
Lanczos' recurrence for M give M^{-1} z ~ ||z|| V T^{-1} e_1, and so x = A^{-1} omega. The sum of
the entries of omega o x is Gauss quadrature, and converges twice as fast as the entries.

*Standard errors.* Entry i of a sample, y_i = omega_i (B omega)_i, has the mean B_ii and the
variance sum_{j != i} B_ij^2 = E y_i^2 - B_ii^2 (over the complex numbers with the real part of B);
the sum of the entries has twice the sum of these variances. The scatter of the probes gives both.

*Quadrature errors* compare the samples after q, q - d and q - 2d steps, entry by entry, as in
`_functions.funm`. These samples may agree before small eigenvalues show. But the error of the sum
of the entries is r^H M^{-1} r, with the residual r of the solve with M: the quadrature error is at
least |r|^2 / theta, theta the smallest Ritz value, and what an eigenvalue of K + s I at s adds if
all probes may have missed it (see `log_quadrature`). Entries have shares of |r|^2 / theta in
proportion to those of P^{-1}. An exact inverse has rounding errors: a change e_j of every squared
pivot (see `estimator`) changes (A^{-1})_ii by sum_j e_j |(A^{-1})_ij|^2.

*The derivative* is that of x, dx = -A^{-1} dA x, with omega and P held fixed: unbiased, since
E[x omega^T] = A^{-1}, at every order. Each probe takes a solve with A.
"""

import math
from typing import Any, ClassVar, Literal, final

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from .._core.estimate import safe_norm
from .._core.primitive import Primitive, inverse_diagonal_p, inverse_trace_p
from .._estimators.estimator import check_key, estimated
from .._estimators.solution import Solution, restructure
from .._functions.quadrature_error import (
    entries_std_err,
    entries_truncation_error,
    quadrature_estimate,
    truncation_error,
)
from .._operators.known_parts import has_entries, noise_of
from .estimator import exact_inverse, rounding_in
from .log_quadrature import missed_inverse
from .preconditioners import AbstractPreconditioner
from .run import AbstractPreconditionedEstimator, fields_and_budget, run_of
from .sampled_inverse import SampledInverseEstimator
from .weights import InverseWeights


@final
class InverseEstimator(AbstractPreconditionedEstimator):
    """The diagonal of the inverse, or its sum."""

    of_trace: bool = eqx.field(static=True)
    inverse: ClassVar[bool] = True

    @property
    def label(self):
        """The name of the function that a user calls."""
        return "inverse_trace" if self.of_trace else "inverse_diagonal"

    def allowed_of_sampled(self, factors, sampled):
        """See `AbstractPreconditionedEstimator`."""
        known = factors.inverse_diagonal()
        if self.of_trace:
            return self.allowed(sampled + (jnp.sum(known) if factors.has_low_rank else 0))
        # The variances of all entries add up to half of that of their sum.
        return self.allowed(safe_norm(known)) / math.sqrt(0.5)

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        run = run_of(self, key, operator, k, weights=weights)
        sums = run.sums
        factors = run.built.factors
        p = sums.probes.number
        omega, starts, solved = sums.vectors  # omega, z, and M^{-1} z after q, q - d, q - 2d steps
        n, room = omega.shape
        apart = solved - starts if factors.has_low_rank else solved
        away = jax.vmap(factors.inverse_root_adjoint)(apart)  # B omega, for each of the 3
        samples = jnp.moveaxis(omega * away.real, 2, 1)  # 0 for probes that are not in use
        known = factors.inverse_diagonal()
        std_err, of_sum = entries_std_err(samples[0], p)
        rounding, evidence = rounding_in(run)
        missed = n * sums.error
        if run.sampling.floor is not None:
            of_one = missed_inverse(sums.probes, run.sampling.floor)
            missed = missed + jnp.where(of_one > 4 * of_sum, of_one, 0)
        means = jnp.sum(samples, axis=1) / p
        entries = known + means[0] if factors.has_low_rank else means[0]
        if self.of_trace:
            std_err = jnp.hypot(of_sum, rounding * safe_norm(entries))
            dof = run.sampling.sum_over(sums.probes)[2]
            value = jnp.sum(entries)
            # The mean is one over all places, in use or not.
            error = truncation_error(jnp.sum(samples, axis=2), sums.probes.exhausted) * (room / p)
        else:
            std_err = jnp.hypot(std_err, rounding * jnp.abs(entries))
            dof = jnp.maximum(p - 1, 1)
            value = entries
            error = entries_truncation_error(means, jnp.all(sums.probes.exhausted))
            missed = missed * (known / jnp.sum(known))
        error = jnp.maximum(error, missed)
        most = 1 / noise_of(operator)  # of K + D, 0 < (A^-1)_ii <= 1 / d_i
        most = jnp.sum(most) if self.of_trace else most
        value, std_err, error = (jnp.clip(x, 0, most) for x in (value, std_err, error))
        # Equal eigenvalues, whose inverses have the same rounding error; numbers that underflow.
        least = (n if self.of_trace else math.sqrt(n)) * float(jnp.finfo(value.dtype).tiny)
        rounding = 2 * float(jnp.finfo(value.dtype).eps) * jnp.abs(value) + least
        std_err = jnp.hypot(std_err, rounding)
        counts = run.spent, dof, evidence
        more = {"stats": run.stats, "bounds": (jnp.zeros_like(value), most)}
        estimate = quadrature_estimate(value, error, std_err, *counts, **more)
        if not weights:
            return estimate, None
        x = factors.inverse_root_adjoint(solved[0])  # A^{-1} omega
        return estimate, InverseWeights(x, omega / p, factors, self.of_trace)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        return exact_inverse(operator, self.of_trace)


def inverse_trace(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    max_k: int | None = None,
    preconditioner: AbstractPreconditioner | Literal["auto"] | None = "auto",
    fallback: Literal["exact"] | None = "exact",
    throw: bool = False,
) -> Solution:
    r"""Estimate $\mathrm{tr}\, A^{-1}$ of a positive definite operator, such as $K + s I$.

    $\mathrm{tr}\, A^{-1} = \mathrm{tr}\, P^{-1} + E[\omega^\top (A^{-1} - P^{-1}) \omega]$ with the
    preconditioner P of [`traceax.logdet`][], and one solve for every probe. The first term is
    exact, the second is small if P is good. Derivatives of every order are unbiased as far as the
    solves have converged, and take a product and a solve for every probe.

    **Cost:** that of [`traceax.logdet`][].

    **Arguments:**

    - `key`, `operator`, `k`, `rtol`, `atol`, `max_k`, `throw`: as for [`traceax.logdet`][].
    - `preconditioner`: as for [`traceax.logdet`][], but not one that was built before.
    - `fallback`: as for [`traceax.logdet`][], for sparse matrices, too: no preconditioner of low
        rank captures small eigenvalues, which decide.

    **Returns:** a [`traceax.Solution`][] with a real value and two errors: `std_err` of the probes,
    and `quadrature_error` of ending the solves early, or of rounding. It is `not_converged`, with
    the best estimate, if the quadrature error exceeds four standard errors and 5 % of the value;
    other results are those of [`traceax.logdet`][].

    **Raises:** `TypeError`, `ValueError`: for arguments that do not fit.
    """
    given = key, operator, k, preconditioner, fallback, throw
    return _inverse(inverse_trace_p, *given, rtol=rtol, atol=atol, max_k=max_k)


def inverse_diagonal(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    max_k: int | None = None,
    preconditioner: AbstractPreconditioner | Literal["auto"] | None = "auto",
    fallback: Literal["exact"] | None = "exact",
    throw: bool = False,
) -> Solution[Any]:
    r"""Estimate the diagonal of $A^{-1}$ of a positive definite operator: the marginal variances,
    if A is a precision matrix.

    Every entry is $(P^{-1})_{ii}$ and a mean over the probes of [`traceax.inverse_trace`][]. With
    `preconditioner="auto"`, sparse matrices, and their sums with diagonal operators, take about
    $\sqrt{k} / 2$ samples x with the covariance $A^{-1}$ instead. The variance of $x_i$ given all
    other entries is $1 / A_{ii}$, and the variance of its mean given them is estimated
    (Rao-Blackwell): the error is relative to the entry, whatever the range of the correlations.

    **Cost:** that of [`traceax.inverse_trace`][].

    **Arguments:**

    - `key`, `operator`, `k`, `preconditioner`, `fallback`, `throw`: as of
        [`traceax.inverse_trace`][].
    - `rtol`, `atol`, `max_k`: as of [`traceax.logdet`][], with Euclidean norms.

    **Returns:** a [`traceax.Solution`][] whose `value`, `std_err` and `quadrature_error` have the
    structure of the operator's input PyTree, real. With few probes the standard errors of single
    entries scatter: take `interval()` for an interval of 95 %.

    **Raises:** `TypeError`, `ValueError`: as [`traceax.inverse_trace`][].

    **Source:** P. Siden, F. Lindgren, D. Bolin, M. Villani, 2018, arXiv:1705.08656, for sparse
    matrices.
    """
    given = key, operator, k, preconditioner, fallback, throw
    solution = _inverse(inverse_diagonal_p, *given, rtol=rtol, atol=atol, max_k=max_k)
    return restructure(solution, operator.in_structure())


def _inverse(
    primitive: Primitive, key, operator, k, preconditioner, fallback, throw, **tolerance
) -> Solution:
    of_trace = primitive is inverse_trace_p
    check_key(key)
    given = primitive.name, operator, k, preconditioner, fallback
    fields, budget = fields_and_budget(*given, tolerance, inverse=True)
    estimator: Any = InverseEstimator(*fields, of_trace)
    plain = estimator.preconditioner == "auto" and estimator.atol is None
    # Of sparse matrices the diagonal is known, but no cheap columns to make a preconditioner of.
    diagonal_only = not has_entries(operator) and has_entries(operator, sparse=True)
    if plain and not of_trace and diagonal_only:
        estimator = SampledInverseEstimator()
    return estimated(primitive, key, operator, budget, estimator, throw=throw)

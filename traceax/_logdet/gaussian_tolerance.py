r"""Log densities that spend what a tolerance needs.

The loop is that of `tolerance`, with another aim. With c standard errors and the quadrature error
of the log-determinant, and with what the solve leaves out (see `gaussian_estimator`), it is

    (t (c std_err + quadrature_error) + left) / 2  <=  atol + rtol |density|

for t vectors y (without the 2 over the complex numbers). Three quarters of the tolerance are for
the log-determinant, one quarter is for the solve. At the end the solve goes on until its quarter is
reached, or the budget is spent. What rounding does to the quadratic form is taken off the tolerance
before (as far as half of it), with P^{-1} y in the place of the solution.

For a relative tolerance, |density| has to be known before. The solve then takes a few steps of
conjugate gradients with every round of probes, with the preconditioner of this round, from the x
that it has reached. The residual is computed anew, so that no step is lost. For a given
log-determinant the density lies between two known numbers, and |density| is at least the smaller
of their absolute values (or 0, if their signs differ).
"""

from typing import ClassVar, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._core.control_flow import if_any
from .._core.estimate import NOT_CONVERGED, SUCCESSFUL, Estimate, if_wanted
from .._functions.quadrature_error import with_quadrature_error
from .._linalg.lanczos import largest_ritz_value
from .._operators.block_operator import BlockOperator
from .._sketch.leave_one_out import square_norms
from .._sketch.low_rank import BuiltPreconditioner
from .budget_policy import PreconditionedQuadrature
from .conjugate_gradients import conjugate_gradients
from .estimator import exact_logdet
from .gaussian_estimator import (
    AbstractGaussianEstimator,
    GaussianWeights,
    QuadraticForm,
    inner,
    log_density,
    rounding_of_form,
    steps_of_solve,
)
from .preconditioners import check_definite
from .tolerance import Loop, check_most, completed, judged, most_products

#: The number of steps of conjugate gradients with every round of probes, and the part of the
#: tolerance that is for the solve.
STEPS, SHARE = 16, 0.25


class _Solve(NamedTuple):
    """The state of a solve."""

    x: Inexact[Array, "n t"]
    residual: Inexact[Array, "n t"]  # y - A x
    left: Real[Array, " t"]  # a bound of what the quadratic forms leave out; inf at the start
    floor: Real[Array, ""]  # a lower bound of the eigenvalues of M
    largest: Real[Array, ""]  # the largest Ritz value of M
    rounding: Real[Array, ""]  # of all quadratic forms, before they are known
    spent: Int[Array, ""]

    def form(self, y: Inexact[Array, "n t"]) -> Real[Array, " t"]:
        """The quadratic forms."""
        return inner(y, self.x) + inner(self.x, self.residual)


class _DensityAim(NamedTuple):
    """The aim of a log density, with the methods of `LogdetAim`."""

    block: BlockOperator
    y: Inexact[Array, "n t"]
    half: float
    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    reserved: int  # products for the solve

    @property
    def start(self) -> _Solve:
        """The state before the first step: x = 0."""
        real = jnp.finfo(self.y.dtype).dtype
        unknown, one = jnp.full(self.y.shape[1], jnp.inf, real), jnp.ones((), real)
        nothing = jnp.zeros((), jnp.int32)
        return _Solve(jnp.zeros_like(self.y), self.y, unknown, one, one, 0 * one, nothing)

    def _whole(self, log_det: Array, solve: _Solve) -> Real[Array, ""]:
        """The error that twice the density (once, over the complex numbers) may have."""
        form, n = solve.form(self.y), self.y.shape[0]
        most = log_density(self.half, n, log_det, form)
        least = log_density(self.half, n, log_det, form + solve.left)
        size = jnp.where((most > 0) & (least < 0), 0, jnp.minimum(jnp.abs(most), jnp.abs(least)))
        whole = (self.rtol.astype(size.dtype) * size + self.atol.astype(size.dtype)) / self.half
        return jnp.maximum(whole - solve.rounding, whole / 2)

    def tolerance(self, value: Array, known: _Solve) -> Real[Array, ""]:
        """See `LogdetAim`."""
        return (1 - SHARE) * self._whole(value, known) / self.y.shape[1]

    def advanced(self, known: _Solve, run: PreconditionedQuadrature, estimate: Estimate) -> _Solve:
        """See `LogdetAim`."""
        # An absolute tolerance can do without |density|: then the solve comes at the end alone.
        left = jnp.minimum((STEPS + 1) * self.y.shape[1], self.reserved - known.spent)
        left = jnp.where(self.rtol > 0, left, 0)
        factors, largest = run.built.factors, largest_ritz_value(run.krylov)
        solved = factors.solve(self.y)
        rounding = jnp.sum(rounding_of_form(factors, largest, solved, self.block.eps))
        known = known._replace(floor=run.floor, largest=largest, rounding=rounding)
        return self.go_on(known, run.built, estimate.value[0], left)

    def go_on(
        self, solve: _Solve, built: BuiltPreconditioner, log_det: Array, products: Int[Array, ""]
    ) -> _Solve:
        """Further steps with this preconditioner, until the share of the solve is reached, with no
        more than so many products.
        """
        factors, floor, t = built.factors, solve.floor, self.y.shape[1]
        steps = products // t - 1  # one product of each right-hand side is for its residual

        def left_of(residual):
            return square_norms(factors.inverse_root(residual)) / floor

        solve = solve._replace(left=left_of(solve.residual))
        goal = SHARE * self._whole(log_det, solve)
        eps = float(jnp.finfo(goal.dtype).eps)
        ratio = jnp.sqrt(goal / t / jnp.where(solve.left > 0, solve.left, 1))
        ratio = jnp.clip(ratio, eps, 1)

        def further():
            rhs = solve.residual
            change, taken = conjugate_gradients(self.block, factors, rhs, ratio, steps)
            x = solve.x + change
            residual = self.y - self.block.mm(x)
            spent = (solve.spent + taken + t).astype(jnp.int32)
            left = left_of(residual)
            return solve._replace(x=x, residual=residual, left=left, spent=spent)

        return if_any((jnp.sum(solve.left) > goal) & (steps > 0), further, solve)


@final
class ToleranceGaussianEstimator(AbstractGaussianEstimator):
    """The log density to a tolerance."""

    y: Inexact[Array, "n t"]
    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    max_k: int = eqx.field(static=True)
    smallest: ClassVar[int] = 1

    def check(self, operator):
        """See `AbstractEstimator`."""
        check_definite(operator, "A Gaussian log density")
        check_most(self.max_k, operator.in_size(), "a Gaussian log density")

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        most, falls_back_to_exact = most_products(operator, self.max_k)
        t = self.y.shape[1]
        reserved = min(t * steps_of_solve(most, t), 4 * most // 5)
        block = BlockOperator(operator).linearised()
        aim = _DensityAim(block, self.y, self._factor, self.rtol, self.atol, reserved)
        loop = Loop(aim, key, operator, most - reserved, falls_back_to_exact)
        state = loop.run()
        value, error, std_err = state.sums.means()
        left = most - state.work - state.known.spent
        if falls_back_to_exact:  # and will, without a log-determinant
            left = jnp.where(state.status == SUCCESSFUL, left, 0)
        solve = aim.go_on(state.known, state.built, value, left)
        spent = state.spent + solve.spent
        counts = spent, state.sums.dof, state.status, loop.sketch.read(state.y)
        log_det = with_quadrature_error(value, error, std_err, *counts)
        rounding = rounding_of_form(state.built.factors, solve.largest, solve.x, block.eps)
        form = QuadraticForm(solve.form(self.y), solve.left + rounding, solve.x)
        estimate = self.density(log_det, form, spent)
        estimate = judged(estimate, self.rtol, self.atol)
        weights = if_wanted(lambda: GaussianWeights(loop.weights(state), solve.x))
        if not falls_back_to_exact:
            return estimate, weights

        def complete():
            found = exact_logdet(operator)
            form = self.exact_form(found)
            exact = self.density(found.estimate, form, found.estimate.num_matvecs)
            exact = judged(completed(estimate, exact), self.rtol, self.atol)

            def moving():
                return GaussianWeights(weights.log_det.replaced_by(found.weights()), form.x)

            return exact, if_wanted(moving)

        return if_any(estimate.status == NOT_CONVERGED, complete, (estimate, weights))

    def exact(self, operator):
        """See `AbstractEstimator`."""
        estimate, weights = super().exact(operator)
        return judged(estimate, self.rtol, self.atol), weights

r"""The log density of a normal distribution whose covariance is known by its products: what all
estimators of it share, and the estimator for a given budget.

    log N(y; 0, A) = -(y^H A^{-1} y + log det A + n log 2 pi) / 2

(for complex, circular distributions twice that, with pi instead of 2 pi). The solve is by conjugate
gradients with the preconditioner P of the log-determinant (see `budget_policy`), and takes at most
a fifth of the budget, or 2 products. If it ends at x, with r = y - A x,

    y^H A^{-1} y = y^H x + x^H r + r^H A^{-1} r.

The last term is left out. With P = R R^H and M = R^{-1} A R^{-H} it is at most
||R^{-1} r||^2 / lambda_min(M). For K + s I a lower bound of this eigenvalue is known; otherwise the
smallest Ritz value of the probes stands for it. Half of this bound is part of the quadrature error.

*Derivatives.* With x held fixed,

    d(y^H A^{-1} y) = 2 Re(x^H dy) - x^H dA x,

which is the derivative of y^H x + x^H r, too. For the second derivative, dx = A^{-1} (dy - dA x).
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple, final

import jax.numpy as jnp
import jax.tree_util as jtu
from equinox import AbstractVar
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._core.estimate import Estimate, has_no_logarithm, if_wanted, make_estimate, status_of
from .._estimators.estimator import AbstractEstimator
from .._functions.quadrature_error import fixed_budget_status
from .._operators.block_operator import BlockOperator
from .._sketch.leave_one_out import square_norms
from .._sketch.weights import AbstractWeights
from .budget_policy import BudgetPolicy
from .conjugate_gradients import conjugate_gradients
from .estimator import ExactLogdet, estimate_from, exact_logdet
from .weights import ExactLogdetWeights, LogdetWeights, weights_of

#: The residual that ends the solve, relative to its right-hand side R^{-1} y.
TOLERANCE = 1e-6


class QuadraticForm(NamedTuple):
    """`y^H A^{-1} y`, from a solve."""

    value: Real[Array, ""]
    left: Real[Array, ""]  # a bound of what the value leaves out
    x: Inexact[Array, " n"]


def log_density(half: float, n: int, log_det: Array, form: Array) -> Real[Array, ""]:
    """The density from its two parts; `half` is 1 over the complex numbers."""
    return -half * (form + log_det + n * math.log(math.pi / half))


def solution_budget(k: int) -> int:
    """The part of a budget for the solve."""
    return max(2, k // 5)


@final
class GaussianWeights(AbstractWeights):
    """The weights of the log-determinant, and x."""

    log_det: LogdetWeights | ExactLogdetWeights
    x: Inexact[Array, " n"]

    def contract(self, operator):
        """`<G, A> - x^H A x`. A contraction costs one matvec more than for `log_det`."""
        product = BlockOperator(operator).mm(self.x[:, None])[:, 0]
        return self.log_det.contract(operator) - jnp.vdot(self.x, product).real

    def moved_with(self, operator, y):
        """The weights as a function of A and y: see above."""
        residual = y - BlockOperator(operator).mm(self.x[:, None])[:, 0]
        change = (residual - lax.stop_gradient(residual))[:, None]
        x = self.x + self.log_det.solve(operator, change)[:, 0]
        return GaussianWeights(self.log_det.weights_at(operator), x)


class AbstractGaussianEstimator(AbstractEstimator):
    """The log density at y. The value of the estimate has five parts: the density, which alone has
    a derivative, the quadrature error, the log-determinant, the quadratic form, and x.

    The weights are those of `log det A + y^H A^{-1} y`: `contract` is for A, their `x` for y, and
    they are functions of both (`moved_with`).
    """

    y: AbstractVar[Inexact[Array, " n"]]
    weights_depend_on_operator: ClassVar[bool] = True

    @property
    def _factor(self) -> float:
        return 1.0 if jnp.iscomplexobj(self.y) else 0.5

    def exact(self, operator):
        """See `AbstractEstimator`."""
        exact = exact_logdet(operator)
        form = self.exact_form(exact)
        estimate = self.density(exact.estimate, form, exact.estimate.num_matvecs)
        return estimate, if_wanted(lambda: GaussianWeights(exact.weights(), form.x))

    def exact_form(self, exact: ExactLogdet) -> QuadraticForm:
        """The quadratic form from a Cholesky factorisation."""
        x = exact.solve(self.y[:, None])[:, 0]
        value = jnp.vdot(self.y, x).real
        # A backward error of the matrix that changes no pivot by more than the rounding changes
        # the quadratic form by at most this.
        left = jnp.sum(exact.rounding * jnp.square(jnp.abs(x)))
        return QuadraticForm(value, left, x)

    def density(self, log_det: Estimate, form: QuadraticForm, spent: Any) -> Estimate:
        """The density from its two parts.

        **Arguments:**

        - `log_det`: the log-determinant.
        - `form`: the quadratic form.
        - `spent`: the number of matvecs for both.
        """
        half, n = self._factor, self.y.shape[0]
        (value, error), (std_err, _) = log_det.value, log_det.std_err
        status = jnp.maximum(log_det.status, status_of(self.y))
        failed = has_no_logarithm(status)
        density = log_density(half, n, value, form.value)
        parts = (density, half * (form.left + error), value, form.value, form.x)
        parts = jtu.tree_map(lambda part: jnp.where(failed, jnp.nan, part), parts)
        errors = (half * std_err, *(jnp.zeros_like(part.real) for part in parts[1:]))
        estimate = make_estimate(parts, errors, spent, log_det.dof, status)
        return dataclasses.replace(estimate, columns=log_det.columns)

    def density_of_budget(self, log_det: Estimate, form: QuadraticForm, spent: Any) -> Estimate:
        """As `density`, for a budget that the user gave: the status says if it was too small."""
        estimate = self.density(log_det, form, spent)
        (value, error, *_), (std_err, *_) = estimate.value, estimate.std_err
        status = fixed_budget_status(value, error, std_err, estimate.status)
        return dataclasses.replace(estimate, status=status)

    def contract(self, weights, operator):
        """See `AbstractEstimator`."""
        along = jnp.vdot(weights.x, self.y).real
        return -self._factor * (weights.contract(operator) + 2 * along)

    def weights_at(self, weights, operator):
        """See `AbstractEstimator`."""
        return weights.moved_with(operator, self.y)


@final
class GaussianEstimator(AbstractGaussianEstimator):
    """The log density for a given budget."""

    y: Inexact[Array, " n"]
    policy: BudgetPolicy
    smallest: ClassVar[int] = 4

    def check(self, operator):
        """See `AbstractEstimator`."""
        self.policy.check(operator, "A Gaussian log density")

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        reserved = solution_budget(k)
        run = self.policy.apply(key, operator, k - reserved)
        log_det, factors, block = estimate_from(run), run.built.factors, run.block
        tolerance = max(TOLERANCE, math.sqrt(float(jnp.finfo(block.dtype).eps)))
        x, steps = conjugate_gradients(block, factors, self.y, tolerance, reserved - 1)
        residual = self.y - block.mm(x[:, None])[:, 0]
        form = jnp.vdot(self.y, x).real + jnp.vdot(x, residual).real
        left = square_norms(factors.inverse_root(residual[:, None]))[0] / run.floor
        spent = log_det.num_matvecs + steps + 1
        estimate = self.density_of_budget(log_det, QuadraticForm(form, left, x), spent)
        return estimate, if_wanted(lambda: GaussianWeights(weights_of(run.for_derivative), x))

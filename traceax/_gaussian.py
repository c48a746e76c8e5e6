r"""The log density of a normal distribution whose covariance is known by products.

    log N(y; 0, A) = -(y^H A^{-1} y + log det A + n log 2 pi) / 2

(over the complex numbers, for circular ones: twice that, with pi instead of 2 pi). The solve takes
conjugate gradients with the preconditioner P of the log-determinant (see `_spending`), in at most a
fifth of the budget. With x where they end and r = y - A x,

    y^H A^{-1} y = y^H x + x^H r + r^H A^{-1} r,

and the last term, left out, is at most ||R^{-1} r||^2 / lambda_min(M), P = R R^H and
M = R^{-1} A R^{-H}: for K + s I a bound of the eigenvalue is known, otherwise the smallest Ritz
value of the probes stands for it. Half of it is part of the quadrature error.

*Derivatives.* With x held fixed,

    d(y^H A^{-1} y) = 2 Re(x^H dy) - x^H dA x,

the derivative of y^H x + x^H r, too; for the second derivative dx = A^{-1} (dy - dA x).
"""

import math
from typing import Any, ClassVar, Literal, final

import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, ArrayLike, Inexact, PRNGKeyArray, PyTree

from ._definite_solve import conjugate_gradients
from ._estimate import Estimate, has_no_logarithm, if_wanted, make_estimate, status_of
from ._estimator import AbstractEstimator, solve
from ._logdet_estimator import estimate_from, exact_logdet
from ._logdet_weights import ExactLogdetWeights, LogdetWeights, weights_of
from ._operator import BlockOperator, as_operator
from ._precondition import AbstractPreconditioner
from ._primitive import trace_p
from ._sketch import square_norms
from ._solution import Solution
from ._spending import Spending, for_derivative, spending_of
from ._weights import AbstractWeights

#: What the residual of the solve is to come down to, relative to y.
TOLERANCE = 1e-6


@final
class GaussianWeights(AbstractWeights):
    """Those of the log-determinant, and x."""

    log_det: LogdetWeights | ExactLogdetWeights
    x: Inexact[Array, " n"]

    def contract(self, operator):
        """`<G, A> - x^H A x`. Contracting costs one matvec more than for the log-determinant."""
        product = BlockOperator(operator).mm(self.x[:, None])[:, 0]
        return self.log_det.contract(operator) - jnp.vdot(self.x, product).real


@final
class GaussianEstimator(AbstractEstimator):
    """The log density at y. Its value has five parts: the density, which alone has a derivative,
    the quadrature error, the log-determinant, the quadratic form, and x.
    """

    y: Inexact[Array, " n"]
    spending: Spending
    smallest: ClassVar[int] = 4
    weights_move: ClassVar[bool] = True

    def check(self, operator):
        """See `AbstractEstimator`."""
        self.spending.check(operator, "A Gaussian log density")

    @property
    def _factor(self) -> float:
        return 1.0 if jnp.iscomplexobj(self.y) else 0.5

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        reserved = max(2, k // 5)

        def finish(run):
            # A bound where one is known; M's smallest Ritz value says about as much elsewhere.
            floor = jnp.where(jnp.isnan(run.built.floor), run.bounds.smallest, run.built.floor)
            weights = if_wanted(lambda: for_derivative(run, weights_of))
            return estimate_from(run), weights, floor, run.built.factors.padded(run.rank)

        log_det, weights, floor, factors = self.spending.spend(key, operator, k - reserved, finish)
        block = BlockOperator(operator).linearised()
        tolerance = max(TOLERANCE, math.sqrt(float(jnp.finfo(block.dtype).eps)))
        x, steps = conjugate_gradients(block, factors, self.y, tolerance, reserved - 1)
        residual = self.y - block.mm(x[:, None])[:, 0]
        form = jnp.vdot(self.y, x).real + jnp.vdot(x, residual).real
        left = square_norms(factors.inverse_root(residual[:, None]))[0] / floor
        spent = log_det.num_matvecs + steps + 1
        estimate = self._estimate(log_det, form, left, x, spent)
        return estimate, if_wanted(lambda: GaussianWeights(weights, x))

    def exact(self, operator):
        """See `AbstractEstimator`."""
        exact = exact_logdet(operator)
        x = exact.solve(self.y[:, None])[:, 0]
        form = jnp.vdot(self.y, x).real
        spent = exact.estimate.num_matvecs
        estimate = self._estimate(exact.estimate, form, jnp.zeros_like(form), x, spent)
        return estimate, if_wanted(lambda: GaussianWeights(exact.weights(), x))

    def _estimate(self, log_det: Estimate, form, left, x, spent) -> Estimate:
        """The density from the log-determinant, the quadratic form, and what that leaves out."""
        half, n = self._factor, x.shape[0]
        (value, error), (std_err, _) = log_det.value, log_det.std_err
        status = jnp.maximum(log_det.status, status_of(self.y))
        failed = has_no_logarithm(status)
        density = -half * (form + value + n * math.log(math.pi / half))
        parts = (density, half * (left + error), value, form, x)
        parts = jtu.tree_map(lambda part: jnp.where(failed, jnp.nan, part), parts)
        errors = (half * std_err, *(jnp.zeros_like(part.real) for part in parts[1:]))
        return make_estimate(parts, errors, spent, log_det.dof, status)

    def contract(self, weights, operator):
        """See `AbstractEstimator`."""
        along = jnp.vdot(weights.x, self.y).real
        return -self._factor * (weights.contract(operator) + 2 * along)

    def moved(self, weights, operator):
        """See above."""
        residual = self.y - BlockOperator(operator).mm(weights.x[:, None])[:, 0]
        change = (residual - lax.stop_gradient(residual))[:, None]
        x = weights.x + weights.log_det.solve(operator, change)[:, 0]
        return GaussianWeights(weights.log_det.moved(operator), x)


def _flat(y: Any, operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"]:
    """The observations as one vector of the working dtype, or an error that says what is wrong."""
    structure, dtype = operator.in_structure(), BlockOperator(operator).dtype
    shapes = jtu.tree_map(jnp.shape, y)
    expected = jtu.tree_map(lambda leaf: leaf.shape, structure)
    if jtu.tree_structure(y) != jtu.tree_structure(structure) or shapes != expected:
        raise ValueError(
            f"The observations y must look like the operator's input, {structure}; their shape is "
            f"{shapes}. For several vectors y, use `jax.vmap`."
        )
    leaves = [jnp.asarray(leaf) for leaf in jtu.tree_leaves(y)]
    real = not jnp.issubdtype(dtype, jnp.complexfloating)
    if real and any(jnp.iscomplexobj(leaf) for leaf in leaves):
        raise ValueError(
            f"The observations y are complex, but the operator is real ({dtype}). Declare the "
            "operator's input structure complex, or pass `y.real`."
        )
    return jnp.concatenate([leaf.reshape(-1).astype(dtype) for leaf in leaves])


def gaussian_log_density(
    key: PRNGKeyArray,
    y: PyTree[ArrayLike],
    operator: lx.AbstractLinearOperator,
    k: int,
    *,
    preconditioner: AbstractPreconditioner | Literal["auto"] | None = "auto",
    throw: bool = False,
) -> Solution:
    r"""Estimate the log density of the normal distribution $N(0, A)$ at $y$,

    $$\log N(y; 0, A) = -\tfrac{1}{2} \left(y^\top A^{-1} y + \log\det A + n \log 2\pi\right),$$

    such as the marginal likelihood of a Gaussian process, $A = K + s I$. Over the complex numbers
    it is that of the circular normal distribution,
    $-(y^* A^{-1} y + \log\det A + n \log \pi)$.

    The log-determinant is that of [`traceax.logdet`][], with at least four fifths of the budget;
    the rest goes to the solve by conjugate gradients with the same preconditioner, which ends
    early where that is good.

    The same key gives the same probes: the value is a deterministic function of the
    hyperparameters (smooth as long as the rule of [`traceax.logdet`][] divides the budget in the
    same way; with a `preconditioner` of your own it always does). The gradient is unbiased over the
    keys; for a fixed key it may differ from the derivative of the value by as much as both err,
    which a line search (L-BFGS) notices where that is not small. Subtract a mean from `y` yourself.

    !!! Example

        ```python
        kernel = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        covariance = kernel + noise * lx.IdentityLinearOperator(kernel.in_structure())
        solution = tr.gaussian_log_density(jax.random.key(0), y, covariance, k=120)
        solution.value, solution.std_err, solution.quadrature_error
        alpha = solution.stats["solve"]  # A^{-1} y: the posterior mean is K_* alpha
        ```

    Cost: at most `k` matvecs; memory and operations as for [`traceax.logdet`][]. First derivatives,
    with respect to what A depends on and to `y`, cost about as many tangent products. Second and
    higher derivatives are those of [`traceax.logdet`][].

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `y`: the observations, of the structure of the operator's input: an array of shape `(n,)`, or
        a PyTree.
    - `operator`: the covariance, as for [`traceax.logdet`][].
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `preconditioner`: as for [`traceax.logdet`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] with a real value. Its `quadrature_error` includes what the solve may
    lack. `stats` has (without derivatives) `"log_det"`, `"quadratic_form"` ($y^* A^{-1} y$) and
    `"solve"` ($A^{-1} y$, of the structure of `y`). The result is `outside_domain`, and the value
    NaN, if the operator is found not to be positive definite to rounding, as far as
    [`traceax.logdet`][] finds it; `not_symmetric` likewise.

    **Raises:**

    - `TypeError`: for a key, operator, `k` or preconditioner of the wrong type.
    - `ValueError`: for an operator that is not square or not tagged positive semidefinite,
        observations that do not fit it, `k < 1`, or a preconditioner that cannot be built for it.

    ??? cite "References"

        J. Wenger et al., *Preconditioning for scalable Gaussian process hyperparameter
        optimization*, 2022, arXiv:2107.00243; and those of [`traceax.logdet`][].
    """
    operator = as_operator(operator)
    estimator = GaussianEstimator(_flat(y, operator), spending_of(preconditioner, operator))
    solution = solve(trace_p, key, operator, k, estimator, throw=throw)
    value, error, log_det, form, x = solution.value
    std_err = solution.std_err[0]
    unflat = BlockOperator(operator).unflatten(x)
    stats = {"log_det": log_det, "quadratic_form": form, "solve": unflat}
    stats = {**solution.stats, "std.err": std_err, **stats}
    return Solution(value, std_err, solution.num_matvecs, stats, solution.result, error)

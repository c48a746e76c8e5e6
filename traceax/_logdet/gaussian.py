r"""The log density of a normal distribution whose covariance is known by its products.

    log N(y; 0, A) = -(y^H A^{-1} y + log det A + n log 2 pi) / 2

(for complex, circular distributions twice that, with pi instead of 2 pi). For t vectors y, the
columns of Y, the value is the sum of t log densities,

    -(sum_j y_j^H A^{-1} y_j + t (log det A + n log 2 pi)) / 2.

Conjugate gradients solve with the preconditioner P of the log-determinant (see `preparation`), in
k / (t + 4) products for each y, or 2 if that is more. If a solve ends at x, with r = y - A x,

    y^H A^{-1} y = y^H x + x^H r + r^H A^{-1} r.

The value leaves the last term out. With P = R R^H and M = R^{-1} A R^{-H} that term is at most
||R^{-1} r||^2 / lambda_min(M), for which the smallest Ritz value of the probes stands. Half of this
bound is part of the quadrature error, and so is half of the rounding error of x^H A x.

*Derivatives.* With x held fixed,

    d(y^H A^{-1} y) = 2 Re(x^H dy) - x^H dA x,

which is the derivative of y^H x + x^H r, too. For the second derivative, dx = A^{-1} (dy - dA x).
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Inexact, PRNGKeyArray, PyTree, Real

from .._core.derivatives import change_of
from .._core.estimate import Estimate
from .._core.precision import column_dots, square_norms
from .._core.primitive import gaussian_log_density_p
from .._estimators.estimator import check_key, estimated
from .._estimators.solution import Solution
from .._functions.quadrature_error import quadrature_estimate
from .._linalg.factorisations import cholesky_solve
from .._operators.block_operator import BlockOperator, unflatten
from .._operators.checks import as_operator
from .._sketch.weights import AbstractWeights
from .estimator import estimate_from, exact_logdet, rounding_of_form
from .factors import BuiltPreconditioner
from .held import held_estimate
from .preconditioners import AbstractPreconditioner
from .run import AbstractPreconditionedEstimator, fields_and_budget, run_of
from .weights import ExactLogdetWeights, LogdetWeights, weights_of


def log_density(half: float, n: int, log_det: Array, form: Real[Array, " t"]) -> Real[Array, ""]:
    """The sum of t log densities, from log det A and the t forms; `half` is 1 over C."""
    return -half * (jnp.sum(form) + form.size * (log_det + n * math.log(math.pi / half)))


@final
class GaussianWeights(AbstractWeights):
    """The weights of log det A, and the solutions x_j as columns."""

    log_det: LogdetWeights | ExactLogdetWeights
    x: Inexact[Array, "n t"]

    def contract(self, block, y):  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `LogdetWeights`; with `2 Re sum_j x_j^H y_j`."""
        overlap = jnp.sum(column_dots(self.x, y).real)
        return self.log_det.contract(block, self.x) + 2 * overlap

    def weights_at(self, operator, y):  # pyright: ignore[reportIncompatibleMethodOverride]
        """G and x as functions of A and y: dx = A^{-1} (dy - dA x)."""
        residual = y - BlockOperator(operator).mm(self.x)
        x = self.x + self.log_det.solve(operator, change_of(residual))
        return GaussianWeights(self.log_det.weights_at(operator), x)


@final
class GaussianEstimator(AbstractPreconditionedEstimator):
    """The sum of the log densities at the columns of y. `aux` of the estimate is (log det A, the t
    forms, x). The weights are those of t log det A + sum_j y_j^H A^{-1} y_j, as functions of A and
    y.
    """

    y: Inexact[Array, "n t"]
    label = "gaussian_log_density"  # pyright: ignore

    @property
    def smallest(self):  # pyright: ignore
        """Two products for the log-determinant, and for each right-hand side."""
        return 2 * self.y.shape[1] + 2

    @property
    def _factor(self) -> float:
        return 1.0 if jnp.iscomplexobj(self.y) else 0.5

    def exact(self, operator):
        """See `AbstractEstimator`."""
        log_det, made, factor, rounding = exact_logdet(operator)
        x = cholesky_solve(factor, self.y)
        # With the factor of A + E, where E is diagonal and as large as the errors of the pivots, a
        # form is off by at most this. (As E is full, it may be off by twice as much; but in the sum
        # with the log-determinant, whose error has the opposite sign, these errors cancel.)
        left = jnp.sum(jnp.square(rounding[:, None] * jnp.abs(x)), axis=0)
        form = column_dots(self.y, x).real, left, x
        return self.density(log_det, form, log_det.num_matvecs), GaussianWeights(made, x)

    def density(self, log_det: Estimate, forms: Any, spent: Any) -> Estimate:
        """The density from log det A and (y_j^H A^{-1} y_j of a solve, a bound of what they leave
        out, x), after `spent` products for both. Errors up to one nat are no failure.
        """
        form, left, x = forms
        half = self._factor
        n, t = self.y.shape
        value = log_det.value
        density = log_density(half, n, value, form)
        sizes = jnp.sum(jnp.abs(form)) + t * (jnp.abs(value) + n * math.log(math.pi / half))
        rounding = float(jnp.finfo(value.dtype).eps) * sizes  # of the sum
        error = half * (jnp.sum(left) + t * log_det.quadrature_error + rounding)
        std_err = half * t * log_det.std_err
        # Whether the density has converged is asked anew, of its own error.
        evidence = dataclasses.replace(log_det.evidence, unconverged=0.0)
        counts = spent, log_det.dof
        more = {"stats": log_det.stats, "aux": (value, form, x)}
        return quadrature_estimate(density, error, std_err, *counts, evidence, 1.0, **more)

    def contract(self, weights, operator):
        """See `AbstractEstimator`."""
        return -self._factor * weights.contract(BlockOperator(operator), self.y)

    def weights_at(self, weights, operator):
        """See `AbstractEstimator`."""
        return weights.weights_at(operator, self.y)

    def allowed_of_sampled(self, factors, sampled):
        """See `AbstractPreconditionedEstimator`; the forms have P for A."""
        form = square_norms(factors.inverse_root(self.y))
        density = log_density(self._factor, len(self.y), factors.log_det + sampled, form)
        return self.allowed(density) / (self._factor * form.size)

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        built = self.preconditioner
        if isinstance(built, BuiltPreconditioner):
            log_det, form, made = held_estimate(key, built, operator, k, weights, self.y)
            return self.density(log_det, form, log_det.num_matvecs), made
        t = self.y.shape[1]
        most = max(2, k // (t + 4))  # products for each y_j: together t / (t + 4) of the budget
        given = self, key, operator, k - t * most
        run = run_of(*given, weights=weights, y=self.y, most_solve=most - 1)
        block = run.sampling.block
        factors = run.built.factors
        solve = run.sums.solve
        x = factors.inverse_root_adjoint(solve.z * solve.unit)
        residual = self.y - block.mm(x)  # r
        form = (column_dots(self.y, x) + column_dots(x, residual)).real
        left = square_norms(factors.inverse_root(residual)) / run.smallest
        left += rounding_of_form(factors, run.sums.probes.largest, x, block.eps)
        log_det = estimate_from(run)
        spent = log_det.num_matvecs + jnp.sum(solve.steps) + t
        made = GaussianWeights(weights_of(run), x) if weights else None
        return self.density(log_det, (form, left, x), spent), made


def _flat(y: Any, operator: lx.AbstractLinearOperator) -> tuple[Inexact[Array, "n t"], bool]:
    """Returns (the observations Y as columns of the working dtype, whether `y` is one vector
    without a last axis for several); or a `ValueError` that says what is wrong.
    """
    structure = operator.in_structure()
    block = BlockOperator(operator)
    leaves = [jnp.asarray(leaf) for leaf in jtu.tree_leaves(y)]
    fits = jtu.tree_structure(y) == jtu.tree_structure(structure)
    found = [leaf.shape for leaf in leaves]
    # Several vectors have the same last axis in all leaves.
    last = {shape[-1:] for shape in found}
    several = fits and len(last) == 1 and [shape[:-1] for shape in found] == block.shapes
    several = several and last != {()} and last != {(0,)}
    if not several and not (fits and found == block.shapes):
        raise ValueError(
            f"The observations y must look like the operator's input, {structure}, or have one "
            "more axis at the end of every leaf, for several vectors; their shape is "
            f"{jtu.tree_map(jnp.shape, y)}. If the vectors are rows, pass `y.T`."
        )
    real = not jnp.issubdtype(block.dtype, jnp.complexfloating)
    if real and any(jnp.iscomplexobj(leaf) for leaf in leaves):
        raise ValueError(
            f"The observations y are complex, but the operator is real ({block.dtype}). Declare "
            "the operator's input structure complex, or pass `y.real`."
        )
    t = found[0][-1] if several else 1
    rows = [leaf.reshape(-1, t).astype(block.dtype) for leaf in leaves]
    return jnp.concatenate(rows), not several


def gaussian_log_density(
    key: PRNGKeyArray,
    y: PyTree[ArrayLike],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    max_k: int | None = None,
    preconditioner: AbstractPreconditioner | BuiltPreconditioner | Literal["auto"] | None = "auto",
    fallback: Literal["exact"] | None = "exact",
    throw: bool = False,
) -> Solution:
    r"""Estimate the log density of the normal distribution $N(0, A)$ at $y$,

    $$\log N(y; 0, A) = -\tfrac{1}{2} \left(y^\top A^{-1} y + \log\det A + n \log 2\pi\right),$$

    such as the marginal likelihood of a Gaussian process; for complex $A$ (circular) twice this,
    with $\pi$ for $2 \pi$. Log densities of several vectors are added. Conjugate gradients solve
    for $A^{-1} y$. Derivatives are those of [`traceax.logdet`][].

    **Cost:** that of [`traceax.logdet`][].

    **Arguments:**

    - `key`, `operator`, `rtol`, `atol`, `max_k`, `preconditioner`, `fallback`, `throw`: as for
        [`traceax.logdet`][].
    - `y`: the observations, with the structure of the operator's input: an array of shape `(n,)`,
        or a PyTree. Several vectors have one more axis, the last one of every leaf.
    - `k`: the budget of matvecs. Less than `2 t + 2`, for t vectors, is raised to that.

    **Returns:** a [`traceax.Solution`][] as that of [`traceax.logdet`][]. Its `quadrature_error`
    includes the error of the solve. `stats` has (without derivatives) `"log_det"`,
    `"quadratic_form"` ($y^* A^{-1} y$; of shape `(t,)` for several vectors) and `"solve"` ($A^{-1}
    y$, with the structure of `y`).

    **Raises:** `TypeError`, `ValueError`: for arguments that do not fit.

    **Source:** J. Wenger et al., 2022, arXiv:2107.00243.
    """
    check_key(key)  # first: of a call without one, all arguments are off by one
    operator = as_operator(operator)
    observed, alone = _flat(y, operator)
    given = "gaussian_log_density", operator, k, preconditioner, fallback
    fields, k = fields_and_budget(*given, {"rtol": rtol, "atol": atol, "max_k": max_k})
    estimator = GaussianEstimator(*fields, observed)
    solution = estimated(gaussian_log_density_p, key, operator, k, estimator, throw=throw)
    log_det, form, x = solution.aux
    shaped = jax.vmap(partial(unflatten, operator.in_structure()), -1, -1)
    of_columns = {"quadratic_form": form, "solve": shaped(x)}
    if alone:
        of_columns = jtu.tree_map(lambda x: x[..., 0], of_columns)
    stats = {**solution.stats, "log_det": log_det, **of_columns}
    return dataclasses.replace(solution, stats=stats, aux=None)

"""To a tolerance: the arguments, and the estimator under the primitive (see `_blocks`)."""

from typing import Any, ClassVar, final

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, PRNGKeyArray, Real

from ._auto import compute_split
from ._blocks import Rule, Run, RunState
from ._diagonal.auto import AutoDiagonalEstimator
from ._diagonal.blocks import RowWeights
from ._estimate import Estimate
from ._estimator import (
    AbstractDiagonalEstimator,
    AbstractEstimator,
    AbstractTraceEstimator,
    solve,
)
from ._exact import exact
from ._growth import AbstractGrowth
from ._operator import BlockOperator, as_operator
from ._primitive import Primitive
from ._rows import Rows
from ._solution import Solution
from ._tolerance_arguments import Tolerance, budgets_for
from ._trace.adaptive import AdaptiveHutchPlusPlusEstimator
from ._trace.auto import AutoTraceEstimator
from ._weights import AbstractWeights


@final
class ToleranceEstimator(AbstractEstimator):
    """An estimator that works to a tolerance: see the module."""

    estimator: AbstractTraceEstimator | AbstractDiagonalEstimator
    rows: Rows | None  # None for traces
    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    before: RunState | None
    max_k: int = eqx.field(static=True)
    keep_state: bool = eqx.field(static=True)
    progress: bool = eqx.field(static=True)
    smallest: ClassVar[int] = 1

    @property
    def width(self):
        """That of the estimator."""
        return self.estimator.width

    def check(self, operator):
        """See `AbstractEstimator`."""
        self.estimator.check(operator)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        estimate, weights = exact(operator, self.rows)
        return estimate, self._summed(weights)

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        auto, rows = self.estimator, self.rows
        if not isinstance(auto, AutoTraceEstimator | AutoDiagonalEstimator):
            one = jnp.ones((), BlockOperator(operator).dtype)
            estimate, weights = self._run(key, operator, auto, self.max_k, None, one)
            return estimate, self._summed(weights)

        def estimate_rest(key, parts, left):
            most = self.max_k - parts.num_matvecs
            offset = parts.exact if rows is None else rows.of_vector(parts.exact)
            estimator = auto.select(parts.rest, left)
            return self._run(key, parts.rest, estimator, most, offset, parts.scale)

        estimate, weights = compute_split(key, operator, k, estimate_rest, rows)
        return estimate, self._summed(weights)

    def _summed(self, weights: AbstractWeights) -> AbstractWeights:
        if self.rows is None or self.rows.sizes is None:
            return weights
        return RowWeights(weights, self.rows)

    def _run(
        self,
        key: PRNGKeyArray,
        operator: lx.AbstractLinearOperator,
        estimator: AbstractTraceEstimator | AbstractDiagonalEstimator,
        most: int,
        offset: Array | None,
        scale: Array,
    ) -> tuple[Estimate, AbstractWeights]:
        if isinstance(estimator, AdaptiveHutchPlusPlusEstimator):
            if self.before is not None or self.keep_state:
                raise ValueError(
                    "AdaptiveHutchPlusPlusEstimator has no state to go on from, got "
                    f"keep_state={self.keep_state} and a `state` of {type(self.before).__name__}. "
                    "Leave both out, or use HutchPlusPlusEstimator()."
                )
            tolerances = self.rtol, self.atol, self.progress
            return estimator.compute_to_tolerance(key, operator, most, *tolerances)
        rows = () if self.rows is None else (self.rows,)
        growth = estimator.growth(operator, most >= operator.in_size(), *rows)
        before = self.before
        if before is not None:
            _check_state(before, growth, operator, most)
        rule = Rule(self.rtol, self.atol, offset, scale)
        run = Run(growth, key, operator, rule, most, before, self.progress)
        outcome = run.outcome()
        state = run.state(outcome) if self.keep_state else None
        e = outcome.estimate
        counts = e.num_matvecs, e.dof, e.status
        bars = growth.calibration.interval_of_run, growth.calibration.tail
        return Estimate(e.value, e.std_err, *counts, state, *bars), run.weights(outcome)


def _check_state(before: RunState, growth: AbstractGrowth, operator: Any, most: int) -> None:
    n = operator.in_size()
    if before.n != n or before.growth != growth:
        raise ValueError(
            f"The state is that of {before.growth} on an operator with {before.n} rows; it cannot "
            f"be continued by {growth} on one with {n} rows."
        )
    if most < before.budgets[-1] or (before.completes and most < n):
        least = n if before.completes else before.budgets[-1]
        raise ValueError(f"To go on from this state, max_k must be at least {least}, got {most}.")


def solve_to_tolerance(
    primitive: Primitive,
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    estimator: AbstractTraceEstimator | AbstractDiagonalEstimator,
    rows: Rows | None,
    options: Tolerance,
    *,
    throw: bool,
) -> Solution:
    """`traceax.trace` (`rows=None`), or a diagonal, with a tolerance in place of a budget."""
    state = options.state
    if state is not None and not isinstance(state, RunState):
        raise TypeError(
            f"The state must be the `state` of a Solution, got {state!r}. Make one with "
            "`trace(key, operator, rtol=..., keep_state=True).state`."
        )
    operator = as_operator(operator)
    n = operator.in_size()
    least = 1
    if state is not None:
        least = n if state.completes else state.budgets[-1]
    name = type(estimator).__name__
    max_k, k = budgets_for(options.max_k, n, estimator.smallest, name, default_least=least)
    shown = max_k, options.keep_state, options.progress
    adaptive = ToleranceEstimator(
        estimator, rows, *options.arrays(), lax.stop_gradient(state), *shown
    )
    return solve(primitive, key, operator, k, adaptive, throw=throw)

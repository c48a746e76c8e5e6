"""Traces to a tolerance: the arguments, and the estimator under the primitive (see `_blocks`)."""

from typing import Any, ClassVar, final

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, PRNGKeyArray, Real

from ._auto import compute_split
from ._blocks import Rule, Run, RunState
from ._estimate import Estimate
from ._estimator import AbstractTraceEstimator, solve
from ._growth import AbstractGrowth
from ._operator import BlockOperator, as_operator
from ._primitive import trace_p
from ._solution import Solution
from ._tolerance_arguments import budgets_for, tolerance_of
from ._trace.adaptive import AdaptiveHutchPlusPlusEstimator
from ._trace.auto import AutoTraceEstimator
from ._weights import AbstractWeights


@final
class ToleranceEstimator(AbstractTraceEstimator):
    """An estimator that works to a tolerance: see the module."""

    estimator: AbstractTraceEstimator
    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    before: RunState | None
    max_k: int = eqx.field(static=True)
    keep_state: bool = eqx.field(static=True)
    progress: bool = eqx.field(static=True)
    smallest: ClassVar[int] = 1

    def check(self, operator):
        """See `AbstractEstimator`."""
        self.estimator.check(operator)

    def inflation(self, operator, k):
        """See `AbstractEstimator`."""
        return max(1.1, self.estimator.inflation(operator, k))

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        if not isinstance(self.estimator, AutoTraceEstimator):
            zero = jnp.zeros((), BlockOperator(operator).dtype)
            return self._run(key, operator, self.estimator, self.max_k, zero, zero + 1)
        auto = self.estimator

        def estimate_rest(key, parts, left):
            most = self.max_k - parts.num_matvecs
            estimator = auto.select(parts.rest, left)
            return self._run(key, parts.rest, estimator, most, parts.exact, parts.scale)

        return compute_split(key, operator, k, estimate_rest)

    def _run(
        self,
        key: PRNGKeyArray,
        operator: lx.AbstractLinearOperator,
        estimator: AbstractTraceEstimator,
        most: int,
        offset: Array,
        scale: Array,
    ) -> tuple[Estimate, AbstractWeights]:
        if isinstance(estimator, AdaptiveHutchPlusPlusEstimator):
            if self.before is not None or self.keep_state:
                raise ValueError("AdaptiveHutchPlusPlusEstimator has no state to go on from.")
            tolerances = self.rtol, self.atol, self.progress
            return estimator.compute_to_tolerance(key, operator, most, *tolerances)
        growth = estimator.growth(operator, most >= operator.in_size())
        before = self.before
        if before is not None:
            _check_state(before, growth, operator, most)
        rule = Rule(self.rtol, self.atol, offset, scale)
        run = Run(growth, key, operator, rule, most, before, self.progress)
        outcome = run.outcome()
        state = run.state(outcome) if self.keep_state else None
        e = outcome.estimate
        counts = e.num_matvecs, e.dof, e.status
        return Estimate(e.value, e.std_err, *counts, state), run.weights(outcome)


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
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    estimator: AbstractTraceEstimator,
    rtol: Any,
    atol: Any,
    max_k: int | None,
    state: Any,
    keep_state: bool,
    progress: bool,
    *,
    throw: bool,
) -> Solution:
    """`traceax.trace` with a tolerance in place of a budget."""
    if state is not None and not isinstance(state, RunState):
        raise TypeError(f"The state must be the `state` of a Solution, got {state!r}.")
    operator = as_operator(operator)
    n = operator.in_size()
    least = 1
    if state is not None:
        least = n if state.completes else state.budgets[-1]
    name = type(estimator).__name__
    max_k, k = budgets_for(max_k, n, estimator.smallest, name, default_least=least)
    tolerances = tolerance_of(rtol, "rtol"), tolerance_of(atol, "atol")
    state = lax.stop_gradient(state)
    adaptive = ToleranceEstimator(estimator, *tolerances, state, max_k, keep_state, progress)
    return solve(trace_p, key, operator, k, adaptive, throw=throw)

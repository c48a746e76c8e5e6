"""Calls with a tolerance: the arguments, and the estimator that the primitive sees (see `run`)."""

import dataclasses
from typing import Any, ClassVar, final

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, PRNGKeyArray, Real

from .._core.estimate import Estimate
from .._core.primitive import Primitive, diagonal_p, trace_p
from .._estimators.arguments import Tolerance, budgets_for
from .._estimators.estimator import (
    AbstractDiagonalEstimator,
    AbstractEstimator,
    AbstractToleranceRun,
    AbstractTraceEstimator,
    check_key,
    solve,
)
from .._estimators.exact import exact
from .._estimators.extendable import AbstractExtendable
from .._estimators.row_sums import BlockTraceEstimator, RowWeights
from .._estimators.rows import Rows
from .._estimators.solution import Solution
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._sketch.weights import AbstractWeights
from .run import Rule, Run, RunState, generator_of


@final
class ToleranceRun(AbstractToleranceRun):
    """A run that can go on from a state, and return one: see `run`."""

    rows: Rows | None
    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    before: RunState | None
    #: From the known parts: the value is `offset` plus `scale` times what is estimated.
    offset: Array | None
    scale: Array | None
    #: A budget that need not be static, in place of a tolerance.
    budget: Array | None
    max_k: int = eqx.field(static=True)
    keep_state: bool = eqx.field(static=True)
    progress: bool = eqx.field(static=True)

    @property
    def has_state(self):
        """See `AbstractToleranceRun`."""
        return self.before is not None or self.keep_state

    def of_rest(self, parts):
        """See `AbstractToleranceRun`."""
        offset = parts.exact if self.rows is None else self.rows.of_vector(parts.exact)
        return dataclasses.replace(self, offset=offset, scale=parts.scale)

    def extended(self, key, operator, extendable):
        """See `AbstractToleranceRun`."""
        before, most = self.before, self.max_k
        if before is not None:
            _check_state(before, extendable, key, operator, most)
        scale = jnp.ones((), BlockOperator(operator).dtype) if self.scale is None else self.scale
        rule = Rule(self.rtol, self.atol, self.offset, scale)
        run = Run(extendable, key, operator, rule, most, before, self.progress, self.budget)
        outcome = run.outcome()
        state = run.state(outcome) if self.keep_state else None
        e = outcome.estimate
        counts = e.num_matvecs, e.dof, e.status
        calibration = extendable.calibration
        interval = calibration.interval_of_run if self.budget is None else calibration.interval
        bars = interval, calibration.tail
        return Estimate(e.value, e.std_err, *counts, state, *bars), run.weights(outcome)


@final
class ToleranceEstimator(AbstractEstimator):
    """An estimator that works to a tolerance."""

    estimator: AbstractTraceEstimator | AbstractDiagonalEstimator
    run: ToleranceRun
    smallest: ClassVar[int] = 1

    @property
    def batch_size(self):
        """The `batch_size` of the estimator."""
        return self.estimator.batch_size

    def check(self, operator):
        """See `AbstractEstimator`."""
        self.estimator.check(operator)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        return self._summed(*exact(operator, self.run.rows))

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        return self._summed(*self.estimator.to_tolerance(key, operator, self.run))

    def _summed(self, estimate: Estimate, weights: AbstractWeights):
        rows = self.run.rows
        if rows is None or rows.sizes is None:
            return estimate, weights
        return estimate, RowWeights(weights, rows)


def _check_state(
    before: RunState, extendable: AbstractExtendable, key: Any, operator: Any, most: int
) -> None:
    n, dtype, other = operator.in_size(), BlockOperator(operator).dtype, before.extendable
    if most < before.least_budget:
        least = before.least_budget
        raise ValueError(f"To go on from this state, max_k must be at least {least}, got {most}.")
    same = type(other) is type(extendable) and before.n == n
    if same and other != extendable and most >= n and not before.falls_back_to_exact:
        raise ValueError(
            f"The state is that of a run with max_k below n={n}, in which {type(other).__name__} "
            "keeps no products to complete the exact value from. To go on from it, give a max_k "
            f"below {n}, too; or make the first run with max_k={n}."
        )
    if (other, before.n, before.dtype) != (extendable, n, dtype):
        raise ValueError(
            f"The state is that of {other} on an operator with {before.n} rows of {before.dtype}; "
            f"it cannot be continued by {extendable} on one with {n} rows of {dtype}."
        )
    generator = generator_of(key)
    if generator != before.generator:
        raise ValueError(
            f"The state is that of a run with keys of the generator {before.generator}, and this "
            f"key is of {generator}. Make it by `jax.random.key(0, impl='{before.generator}')`."
        )


def solve_to_tolerance(
    primitive: Primitive,
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    estimator: AbstractTraceEstimator | AbstractDiagonalEstimator,
    rows: Rows | None,
    options: Tolerance,
    *,
    budget: Array | None,
    throw: bool,
) -> Solution:
    """`traceax.trace` (`rows=None`), or a diagonal, with a tolerance, or with a budget that is an
    array.
    """
    state = options.state
    if state is not None and not isinstance(state, RunState):
        raise TypeError(
            f"The state must be the `state` of a Solution, got {state!r}. Make one with "
            "`trace(key, operator, rtol=..., keep_state=True).state`."
        )
    if state is not None and state.level.ndim:
        raise ValueError(
            f"The state is a stack of states, of shape {state.level.shape}. Continue each of them "
            "under `equinox.filter_vmap`, as they were made; or take one, "
            "`jax.tree.map(lambda x: x[0], state)`."
        )
    operator = as_operator(operator)
    n = operator.in_size()
    least = 1
    if state is not None:
        least = state.least_budget
    name = type(estimator).__name__
    max_k, k = budgets_for(options.max_k, n, estimator.smallest, name, default_least=least)
    if budget is not None and n > estimator.smallest:
        max_k = k = min(max_k, n - 1)  # no exact value
    rtol, atol = options.arrays()
    run = ToleranceRun(
        rows=rows,
        rtol=rtol,
        atol=atol,
        before=lax.stop_gradient(state),
        offset=None,
        scale=None,
        budget=budget,
        max_k=max_k,
        keep_state=options.keep_state,
        progress=options.progress,
    )
    return solve(primitive, key, operator, k, ToleranceEstimator(estimator, run), throw=throw)


def solve_either(
    name: str,
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | Array | None,
    estimator: AbstractTraceEstimator | AbstractDiagonalEstimator,
    options: Tolerance,
    throw: bool,
    rows: Rows | None = None,
) -> Solution:
    """A trace (`rows=None`), a diagonal, or sums of its entries; with a budget or a tolerance."""
    check_key(key)
    primitive = trace_p if rows is None else diagonal_p
    budget = options.budget(k)
    if budget is not None or options.wanted(k, name, "`state`, `keep_state`, `progress`"):
        given = primitive, key, operator, estimator, rows, options
        return solve_to_tolerance(*given, budget=budget, throw=throw)
    blocks = rows is not None and rows.sizes is not None
    budgeted: Any = BlockTraceEstimator(estimator, rows) if blocks else estimator  # pyright: ignore
    return solve(primitive, key, operator, k, budgeted, throw=throw)

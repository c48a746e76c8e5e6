r"""The loop of a run that a tolerance ends, over stages of probes.

A run adds stage after stage, each with as many probes as all stages before it, until

    c_j std_err <= atol + rtol |t|

with the value t (for diagonals, with the Euclidean norms of std_err and of t), or until the budget
is spent. All stages are one program: arrays have room for the most probes, and a stage fills those
panels of them that are its own (see `_estimators.extendable`), so that the work is proportional to
the number of products that were needed. Only the algebra of an estimate is compiled for a few
sizes. Under `vmap` the run goes on until the slowest lane is done; the numbers of a lane are those
of a separate call.

*The constants c_j* (`_estimators.calibration`) are calibrated with a check after every stage. As an
error bar that happens to be too small ends the run, 1.96 standard errors would cover less than
95 %. The norm of many errors scatters less than a single error: see `norm_factor`.

*The last resort.* If the budget allows n products, stages end at n / 2. If the estimate is not good
enough by then, the exact value is completed: if the algorithm allows it, with products on the
orthogonal complement of the vectors that were multiplied before, and no others.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._core.control_flow import any_lane, apart, if_any, keep, nothing_like, of_size
from .._core.estimate import (
    NOT_CONVERGED,
    SUCCESSFUL,
    Estimate,
    if_wanted,
    is_scalar,
    make_estimate,
    norm_of,
    status_of,
)
from .._estimators.auto import add_parts
from .._estimators.calibration import norm_factor, stopping_factor
from .._estimators.exact import ExactWeights
from .._estimators.extendable import (
    PANEL,
    TOGETHER,
    AbstractExtendable,
    Growth,
    kept,
    masked,
    resized,
)
from .._operators.block_operator import BlockOperator
from .._probes.random import numbered
from .._sketch.columns import Columns
from .._sketch.weights import AbstractWeights, InUse

#: The algebra of an estimate is compiled for the largest number of probes, and for others (see
#: `apart`), none of which is less than this number.
LEAST = 128


def schedule(limit: int, width: int, spent: Sequence[int] = ()) -> tuple[int, ...]:
    """The number of probes up to the end of each stage.

    **Arguments:**

    - `limit`: the largest number of probes.
    - `width`: a number of probes of which every stage has a multiple. (A rest is not spent.)
    - `spent`: the schedule of an earlier run, which this one continues.

    **Returns:**

    A tuple of ascending numbers.
    """
    probes = list(spent) or [min(max(PANEL // width, 1) * width, limit)]
    while probes[-1] + width <= limit:
        probes.append(min(2 * probes[-1], limit // width * width))
    return tuple(probes)


class Rule(NamedTuple):
    """When to stop. The value of interest is offset + scale * (what is estimated)."""

    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    offset: Inexact[Array, "..."] | None  # None if there are no known parts
    scale: Inexact[Array, ""]

    def sizes(self, estimate: Estimate, block: BlockOperator) -> tuple[PyTree, Array]:
        """The value of interest, and the norm of its standard error."""
        error = jnp.abs(self.scale) * norm_of(estimate.std_err)
        if self.offset is None:
            return estimate.value, error
        return add_parts(block, self.offset, self.scale, estimate.value), error

    def met(self, estimate: Estimate, block: BlockOperator, factor: Any) -> Array:
        """Whether `factor` standard errors are within the tolerance."""
        value, error = self.sizes(estimate, block)
        error = factor * norm_factor(estimate.std_err) * error
        return error <= self.atol + self.rtol * norm_of(value)


def generator_of(key: PRNGKeyArray) -> str:
    """The name of the generator of a random key."""
    return str(jr.key_impl(key))


@final
class RunState(eqx.Module):
    """All that a run has learnt."""

    arrays: Any
    keys: Array  # the key of each panel, as data
    level: Int[Array, ""]  # the last stage, or the number of stages if the value was completed
    completed: PyTree[Inexact[Array, "..."]]  # the value, exact if it was completed
    extendable: AbstractExtendable = eqx.field(static=True)
    probes: tuple[int, ...] = eqx.field(static=True)  # up to the end of each stage
    width: int = eqx.field(static=True)  # of a panel
    falls_back_to_exact: bool = eqx.field(static=True)  # whether it may be completed
    n: int = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)
    generator: str = eqx.field(static=True)  # of the keys

    @property
    def last_stage(self) -> Int[Array, ""]:
        """The last stage that the run made."""
        return jnp.minimum(self.level, len(self.probes) - 1).astype(jnp.int32)

    @property
    def is_complete(self) -> Bool[Array, ""]:
        """Whether the value was completed."""
        return self.level == len(self.probes)

    @property
    def least_budget(self) -> int:
        """The smallest budget with which a run can go on from here."""
        return self.n if self.falls_back_to_exact else self.spent

    @property
    def spent(self) -> int:
        """The products of all stages."""
        return self.probes[-1] * self.extendable.matvecs_per_probe


@final
class RunWeights(AbstractWeights):
    """The weights of the probes, or those of the exact value if it was completed."""

    inner: AbstractWeights
    completed: Array
    diagonal: bool = eqx.field(static=True)

    def contract(self, operator):
        """See `AbstractWeights`."""
        block, exact = BlockOperator(operator), ExactWeights(self.diagonal)
        like = jax.eval_shape(lambda: self.inner.contract(operator))

        def total():
            found = exact.contract(operator)
            found = block.leaves(found) if isinstance(like, list) else found
            return jtu.tree_map(lambda x, y: x.astype(y.dtype).reshape(y.shape), found, like)

        return lax.cond(self.completed, total, lambda: self.inner.contract(operator))


class _Carry(NamedTuple):
    """What the loop over the stages changes."""

    stage: Int[Array, ""]  # the next one
    arrays: Any
    estimate: Estimate
    level: Int[Array, ""]
    done: Array
    met: Array


def _lacking(estimate: Estimate, short: Array) -> Estimate:
    """The estimate, whose status says if it fell short of the tolerance."""
    status = jnp.where((estimate.status == SUCCESSFUL) & short, NOT_CONVERGED, estimate.status)
    return eqx.tree_at(lambda e: e.status, estimate, status.astype(estimate.status.dtype))


class Run:
    """One run of an extendable algorithm. (It is not a PyTree, as it exists only in a trace.)"""

    def __init__(self, extendable, key, operator, rule, most, before=None, budget=None):
        """**Arguments:**

        - `extendable`: the algorithm.
        - `key`: the random key.
        - `operator`: the operator.
        - `rule`: when to stop.
        - `most`: the largest budget.
        - `before`: the state of an earlier run, or None.
        - `budget`: a budget that is an array, up to `most`, for a run of a single stage. None with
            a tolerance.
        """
        if budget is not None and not extendable.takes_any_budget:
            raise ValueError(
                f"{type(extendable.estimator).__name__} has no `extendable` of its own, and takes "
                "static budgets only: give k without max_k."
            )
        self.extendable, self.rule, self.before = extendable, rule, before
        self.key, self.most, self.budget = key, most, budget
        self.block = extendable.prepare(operator)
        self.real = jnp.finfo(self.block.dtype).dtype
        n = self.block.n
        self.falls_back_to_exact = most >= n
        # The exact value comes after n / 2 products.
        limit = max((n // 2 if most >= n else most) // extendable.matvecs_per_probe, 1)
        self.width = before.width if before else extendable.panel_width(limit)
        self.parts = schedule(limit, self.width, before.probes if before else ())
        self.probes = self.parts
        if budget is not None:  # with a stage for every number of panels
            self.probes = tuple(range(self.width, self.parts[-1] + 1, self.width))
        self.panels = np.array(self.probes) // self.width
        room = self.probes[-1] // self.width
        self.room = room if room < TOGETHER else -(-room // TOGETHER) * TOGETHER
        self.keys = self._keys()

    def _keys(self) -> Array:
        """The key of each panel, as data: an earlier run may have drawn with another key."""
        key = self.key
        numbers = jnp.arange(1, self.room)
        more = jax.vmap(lambda j: jr.key_data(numbered(key, j)))(numbers)
        keys = jnp.concatenate([jr.key_data(key)[None], more])
        if self.before is None:
            return keys
        old = self.before.keys
        old = jnp.pad(old, ((0, max(0, len(keys) - len(old))), (0, 0)))[: len(keys)]
        earlier = jnp.arange(len(keys)) < jnp.asarray(self.panels)[self.before.last_stage]
        return jnp.where(earlier[:, None], old, keys)

    def _key(self, panel: Any) -> Array:
        """The key of a panel."""
        return jr.wrap_key_data(self.keys[panel], impl=jr.key_impl(self.key))

    def _count(self, level: Any) -> Int[Array, ""]:
        """The number of probes after a stage."""
        return jnp.asarray(self.probes, jnp.int32)[level]

    def _columns(self, level: Any, rows: int) -> Columns:
        """The columns that are in use after a stage."""
        count = self._count(level)
        return Columns(count.astype(self.real), jnp.arange(rows, dtype=jnp.int32) < count)

    def _masked(self, level: Any, arrays: Any) -> Any:
        """The arrays without rows that are not in use after a stage (but in other lanes)."""
        inside = self._columns(level, self.room * self.width).inside
        assert inside is not None
        return masked(arrays, inside)

    def _growth(self, start: Any, stop: Any, stage: Any) -> Growth:
        return Growth(self._key, self.width, self.room, start, stop, stage, self.probes)

    # ---------------------------------------------------------------------------- the stages

    def first(self) -> tuple[Any, Int[Array, ""]]:
        """The arrays at the start, and the number of the first stage."""
        empty = self.extendable.start(self._growth(0, 0, 0), self.block)
        if self.budget is not None:
            probes = self.budget // self.extendable.matvecs_per_probe
            level = jnp.clip(probes // self.width, 1, len(self.probes)) - 1
            return empty, level.astype(jnp.int32)
        if self.before is None:
            return empty, jnp.zeros((), jnp.int32)
        level = self.before.last_stage
        arrays = resized(self.before.arrays, self.room * self.width)
        return self._masked(level, arrays), level

    def _sized(self, level: Any, state: Any, fn: Callable[[Any, Columns], Any]) -> Any:
        """`fn(state, columns)`, on arrays of the smallest size that there is a program for."""
        sizes = apart([*self.parts[:-1], self.room * self.width], LEAST)

        def cut(size):
            return fn(resized(state, size), self._columns(level, size))

        return of_size(sizes, self._count(level), cut)

    def _estimate(self, level: Any, state: Any) -> Estimate:
        def estimate(state, columns):
            value, std_err, status = self.extendable.estimate(state, columns, self.block)
            return make_estimate(*self._cast(value, std_err), 0, 0, status)

        e = self._sized(level, state, estimate)
        spent, dof = self.extendable.counts(state, self._count(level))
        return make_estimate(e.value, e.std_err, spent, dof, e.status)

    def _cast(self, value: PyTree, std_err: PyTree) -> tuple[PyTree, PyTree]:
        """Values and standard errors in the dtypes of this operator."""
        real = jtu.tree_map(lambda x: x.astype(self.real), std_err)
        return jtu.tree_map(lambda x: x.astype(self.block.dtype), value), real

    def extended(self, arrays: Any, stage: Int[Array, ""]) -> tuple[Any, Estimate]:
        """The arrays and the estimate after one more stage."""
        panels = jnp.asarray([0, *self.panels], jnp.int32)
        start, stop = panels[stage], panels[stage + 1]
        if self.budget is not None:
            start = jnp.zeros_like(start)
        if self.before is not None:
            # The stages of the earlier run are not made again.
            start = jnp.where(stage <= self.before.last_stage, stop, start)
        arrays = self.extendable.extend(arrays, self._growth(start, stop, stage), self.block)
        return arrays, self._estimate(stage, arrays)

    def _stage(self, c: _Carry) -> _Carry:
        """One more stage, and a look at the estimate."""
        stage, last = c.stage, len(self.probes) - 1
        arrays, estimate = self.extended(c.arrays, stage)
        met = jnp.array(True)
        if self.budget is None:
            stop = self.extendable.calibration.stop
            factors = [stopping_factor(stop, probes - 1) for probes in self.probes]
            met = self.rule.met(estimate, self.block, jnp.asarray(factors, self.real)[stage])
            met |= estimate.status != SUCCESSFUL
        arrays = kept(c.done, c.arrays, arrays)
        new = estimate, stage, met | (stage == last), met
        return _Carry(stage + 1, arrays, *keep(c.done, (c.estimate, c.level, c.done, c.met), new))

    def outcome(self) -> _Carry:
        """Make the run."""
        arrays, first = self.first()
        no = jnp.array(False)
        nothing = nothing_like(self._estimate, first, arrays)
        carry = _Carry(first, arrays, nothing, first, no, no)
        end = lax.while_loop(lambda c: any_lane(~c.done), self._stage, carry)
        short = ~end.met
        if not self.falls_back_to_exact:
            return end._replace(estimate=_lacking(end.estimate, short))
        here = end.estimate, end.level
        if self.before is not None:
            short |= self.before.is_complete  # the exact value is there, whatever the tolerance
        estimate, level = if_any(short, lambda: self._completed(end), here)
        return end._replace(estimate=estimate, level=level)

    def _completed(self, end: _Carry) -> tuple[Estimate, Array]:
        state = resized(end.arrays, self.probes[-1])
        value, std_err, more = self.extendable.complete(state, self.block)
        spent = self.probes[-1] * self.extendable.matvecs_per_probe + more
        if self.before is not None:
            completed = partial(jnp.where, self.before.is_complete)
            value = jtu.tree_map(completed, self.before.completed, value)
        status = status_of(*jtu.tree_leaves(value))
        estimate = make_estimate(*self._cast(value, std_err), spent, end.estimate.dof, status)
        estimate = _lacking(estimate, ~self.rule.met(estimate, self.block, 1.96))
        return estimate, jnp.asarray(len(self.probes), jnp.int32)

    # --------------------------------------------------------------------- what comes out of it

    def weights(self, outcome: _Carry) -> Any:
        """The weights of the probes that were used, and 0 for the others."""
        count = len(self.probes)
        level = jnp.minimum(outcome.level, count - 1)

        def make():
            growth = self._growth(0, jnp.asarray(self.panels)[level], level)
            columns = self._columns(level, self.room * self.width)
            arrays = self._masked(level, outcome.arrays)
            weights = self.extendable.weights(arrays, columns, growth, self.block)
            in_use = InUse((*self.parts[:-1], self.room * self.width), self._count(level))
            if hasattr(weights, "in_use"):
                weights = dataclasses.replace(weights, in_use=in_use)
            if not self.falls_back_to_exact:
                return weights
            diagonal = not is_scalar(outcome.estimate.value)
            return RunWeights(weights, outcome.level == count, diagonal)

        return if_wanted(make)

    def state(self, outcome: _Carry) -> RunState:
        """What a later run can go on from."""
        return RunState(
            outcome.arrays,
            self.keys,
            outcome.level,
            outcome.estimate.value,
            self.extendable,
            self.probes,
            self.width,
            self.falls_back_to_exact,
            self.block.n,
            self.block.dtype,
            generator_of(self.key),
        )

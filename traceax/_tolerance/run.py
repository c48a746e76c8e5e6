r"""The loop of a run that a tolerance ends, over blocks of probes.

A run adds block after block (see `_estimators.extendable`), each as large as all blocks before it,
until

    c_j std_err <= atol + rtol |t|

with the value t (for diagonals, with the Euclidean norms of std_err and of t), or until the budget
is spent. Every block has static shapes and a branch of its own (`jax.lax.cond`), so that the work
is proportional to the number of products that were needed. Under `vmap` the run goes on until the
slowest lane is done (see `_core.control_flow`); the numbers of a lane are those of a separate call.

*The constants c_j* (`_estimators.calibration`) are calibrated with a check after every block. As an
error bar that happens to be too small ends the run, 1.96 standard errors would cover less than
95 %. The norm of many errors scatters less than a single error: see `norm_factor`.

*The last resort.* If the budget allows n products, blocks end at n / 2. If the estimate is not good
enough by then, the exact value is completed: if the algorithm allows it, with products on the
orthogonal complement of the vectors that were multiplied before, and no others.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.control_flow import any_lane, keep
from .._core.estimate import (
    NOT_CONVERGED,
    SUCCESSFUL,
    Estimate,
    is_scalar,
    make_estimate,
    norm_of,
    status_of,
)
from .._core.progress import report
from .._estimators.auto import add_parts
from .._estimators.calibration import norm_factor, stopping_factor
from .._estimators.exact import ExactWeights
from .._estimators.extendable import AbstractExtendable, probe_axes
from .._operators.block_operator import BlockOperator
from .._probes.random import numbered
from .._sketch.weights import AbstractTwoSidedWeights, AbstractWeights

#: The number of probes in the first block. With fewer, their scatter says too little.
FIRST = 16


def schedule(
    matvecs_per_probe: int,
    most: int,
    n: int,
    spent: Sequence[int] = (),
    least_probes: int = 1,
) -> tuple[int, ...]:
    """The matvecs up to the end of each block.

    **Arguments:**

    - `matvecs_per_probe`: the matvecs that a probe takes.
    - `most`: the budget. If it is n or more, blocks end at n / 2, and the exact trace is next.
    - `n`: the size of the operator.
    - `spent`: the schedule of an earlier run, which this one continues.
    - `least_probes`: the fewest probes that a further block may have. A smaller rest of the budget
        is not spent.

    **Returns:**

    A tuple of ascending multiples of `matvecs_per_probe`.
    """
    limit = (n // 2 if most >= n else most) // matvecs_per_probe * matvecs_per_probe
    budgets = list(spent) or [min(FIRST * matvecs_per_probe, max(limit, matvecs_per_probe))]
    while limit - budgets[-1] >= least_probes * matvecs_per_probe:
        budgets.append(min(2 * budgets[-1], limit))
    return tuple(budgets)


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

    def met(self, estimate: Estimate, block: BlockOperator, factor: float) -> Array:
        """Whether `factor` standard errors are within the tolerance."""
        value, error = self.sizes(estimate, block)
        error = factor * norm_factor(estimate.std_err) * error
        return error <= self.atol + self.rtol * norm_of(value)


@final
class RunState(eqx.Module):
    """All that a run has learnt. Arrays are for the largest number of probes, padded with 0."""

    arrays: Any
    keys: Array  # the key of each block, as data
    level: Int[Array, ""]  # the last block used, or the number of blocks if the value was completed
    completed: PyTree[Inexact[Array, "..."]]  # the value, exact if it was completed
    extendable: AbstractExtendable = eqx.field(static=True)
    budgets: tuple[int, ...] = eqx.field(static=True)
    falls_back_to_exact: bool = eqx.field(static=True)  # whether it may be completed
    n: int = eqx.field(static=True)


@final
class RunWeights(AbstractWeights):
    """The weights of all blocks. Only those of blocks that were used are contracted."""

    parts: list[AbstractWeights]
    factors: Real[Array, " blocks"]
    level: Int[Array, ""]
    columns: tuple[int, ...] = eqx.field(static=True)  # their number up to the end of each block
    falls_back_to_exact: bool = eqx.field(static=True)
    diagonal: bool = eqx.field(static=True)

    def contract(self, operator):
        """See `AbstractWeights`."""
        block = BlockOperator(operator)
        count = len(self.columns)

        def used(j):
            return (j <= self.level) & (self.level < count)

        def if_used(flag, contract):
            def total():
                return jtu.tree_map(lambda x: x.astype(block.dtype), contract(operator))

            zeros = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(total))
            return lax.cond(flag, total, lambda: zeros)

        def products(multiply, x):
            """Products with the columns of blocks that were used; 0 for the others."""
            ends = zip([0, *self.columns[:-1]], self.columns, strict=True)
            columns = [x[:, start:end] for start, end in ends]
            blocks = [lax.cond(used(j), multiply, jnp.zeros_like, c) for j, c in enumerate(columns)]
            return jnp.concatenate(blocks, axis=1)

        terms = []
        if self.falls_back_to_exact:
            terms.append(if_used(self.level == count, ExactWeights(self.diagonal).contract))
        for j, part in enumerate(self.parts):
            if isinstance(part, AbstractTwoSidedWeights):
                factors = products(block.mm, part.omega), products(block.adjoint_mm, part.q)
                terms.append(part.combine(*factors))
            else:
                factor = self.factors[j].astype(block.dtype)
                term = if_used(used(j), part.contract)
                terms.append(jtu.tree_map(lambda x, factor=factor: factor * x, term))
        if any(isinstance(term, list) for term in terms):
            terms = [term if isinstance(term, list) else block.leaves(term) for term in terms]
        return jtu.tree_map(lambda *x: sum(x[1:], start=x[0]), *terms)


class RunOutcome(NamedTuple):
    estimate: Estimate
    level: Int[Array, ""]
    arrays: Any


class Run:
    """One run of an extendable algorithm. (It is not a PyTree, as it exists only in a trace.)"""

    def __init__(self, extendable, key, operator, rule, most, before, progress):
        self.extendable, self.rule, self.before, self.progress = extendable, rule, before, progress
        self.key = key
        self.block = extendable.prepare(operator)
        n, self.most = self.block.n, most
        self.budgets = schedule(
            extendable.matvecs_per_probe,
            most,
            n,
            before.budgets if before else (),
            extendable.least_probes,
        )
        self.falls_back_to_exact = most >= n
        keys = [numbered(key, j) if j else key for j in range(len(self.budgets))]
        self.key_impl = jr.key_impl(key)
        self.keys = jnp.stack([jr.key_data(key) for key in keys])
        if before is not None:
            old = jnp.pad(before.keys, ((0, len(keys) - len(before.keys)), (0, 0)))
            earlier = jnp.arange(len(keys)) <= before.level
            self.keys = jnp.where(earlier[:, None], old, self.keys)

    # ------------------------------------------------------------------ states of static shape

    def _resized(self, state, columns: int):
        """The state with its arrays cut, or padded with zeros, to this number of probes."""

        def resize(array, axes):
            index = [slice(columns if a in axes else None) for a in range(array.ndim)]
            array = array[tuple(index)]
            width = [(0, columns - s if a in axes else 0) for a, s in enumerate(array.shape)]
            return jnp.pad(array, width) if axes else array

        fields = zip(state, probe_axes(type(state)), strict=True)
        return type(state)(
            *[jtu.tree_map(lambda x, axes=axes: resize(x, axes), field) for field, axes in fields]
        )

    def _columns(self, j: int) -> int:
        return self.budgets[j] // self.extendable.matvecs_per_probe

    def _padded(self, state):
        return self._resized(state, self._columns(-1))

    def _loaded(self, j: int):
        return self._resized(self.before.arrays, self._columns(j))

    def _advanced(self, j: int, state):
        """The state after block j: extended, or from an earlier run."""
        key = jr.wrap_key_data(self.keys[j], impl=self.key_impl)
        k = self.budgets[j] - (self.budgets[j - 1] if j else 0)

        def extend():
            return self.extendable.extend(state, key, self.block, k)

        if self.before is None or j >= len(self.before.budgets):
            return extend()
        known = j <= self.before.level
        loaded = self._loaded(j)
        return lax.cond(any_lane(~known), lambda: keep(known, loaded, extend()), lambda: loaded)

    # ---------------------------------------------------------------------------- the blocks

    def _outcome(self, estimate: Estimate, level: Any, arrays) -> RunOutcome:
        dtype = self.block.dtype
        real = jnp.finfo(dtype).dtype
        value = jtu.tree_map(lambda x: x.astype(dtype), estimate.value)
        std_err = jtu.tree_map(lambda x: x.astype(real), estimate.std_err)
        estimate = make_estimate(
            value, std_err, estimate.num_matvecs, estimate.dof, estimate.status
        )
        return RunOutcome(estimate, jnp.asarray(level, jnp.int32), arrays)

    def _report(self, estimate: Estimate, last):
        if self.progress:
            value, error = self.rule.sizes(estimate, self.block)
            value = value if is_scalar(value) else norm_of(value)
            report(self.key, self.most, estimate.num_matvecs, value, error, last)

    def _after(self, j: int, state) -> RunOutcome:
        """Check the estimate after block j, and go on if it is not good enough."""
        last = j == len(self.budgets) - 1
        estimate = self.extendable.estimate(state, self.block)
        factor = stopping_factor(self.extendable.calibration.stop, self._columns(j) - 1)
        met = self.rule.met(estimate, self.block, factor)
        stop = met | (estimate.status != SUCCESSFUL)
        if self.before is not None:
            stop &= j >= self.before.level
        if last and not self.falls_back_to_exact:
            status = jnp.where(stop, estimate.status, NOT_CONVERGED)
            estimate = eqx.tree_at(lambda e: e.status, estimate, status)
        here = self._outcome(estimate, j, self._padded(state))
        end = stop | (last and not self.falls_back_to_exact)
        self._report(estimate, end)
        if last and not self.falls_back_to_exact:
            return here

        def go_on():
            if last:
                return keep(stop, here, self._complete(state, here))
            return keep(stop, here, self._after(j + 1, self._advanced(j + 1, state)))

        return lax.cond(any_lane(~stop), go_on, lambda: here)

    def _complete(self, state, here: RunOutcome) -> RunOutcome:
        value, std_err, more = self.extendable.complete(state, self.block)
        spent, dof = self.budgets[-1] + more, here.estimate.dof
        if self.before is not None:
            done = self.before.level == len(self.before.budgets)
            value = jtu.tree_map(partial(jnp.where, done), self.before.completed, value)
        status = status_of(*jtu.tree_leaves(value))
        estimate = make_estimate(value, std_err, spent, dof, status)
        met = self.rule.met(estimate, self.block, 1.96)
        lacking = (status == SUCCESSFUL) & ~met
        status = jnp.where(lacking, NOT_CONVERGED, status)
        estimate = eqx.tree_at(lambda e: e.status, estimate, status)
        outcome = self._outcome(estimate, len(self.budgets), here.arrays)
        self._report(outcome.estimate, jnp.array(True))
        return outcome

    def outcome(self) -> RunOutcome:
        """Make the run."""
        return self._after(0, self._advanced(0, None))

    # --------------------------------------------------------------------- what comes out of it

    def weights(self, outcome: RunOutcome) -> RunWeights:
        """The weights of the blocks that were used, and 0 for the others."""

        def up_to(j):
            keys = [(self.keys[i], self.key_impl) for i in range(j + 1)]
            state = self._resized(outcome.arrays, self._columns(j))
            return self.extendable.weights(state, self.block, keys, self.budgets[: j + 1])

        count = len(self.budgets)
        like = jax.eval_shape(lambda: up_to(count - 1)[0])

        def padded(x, like):
            """The array, with zeros for the columns of blocks that were not used."""
            width = [(0, m - s) for m, s in zip(like.shape, x.shape, strict=True)]
            return jnp.pad(x, width) if width else x

        def branch(j):
            parts, factors = up_to(j)
            used = len(parts)
            unused = [jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), x) for x in like[used:]]
            factors = jnp.array([*factors, *[0.0] * len(unused)], jnp.finfo(self.block.dtype).dtype)
            return [*jtu.tree_map(padded, parts, like[:used]), *unused], factors

        branches = [lambda j=j: branch(j) for j in range(count)]
        parts, factors = lax.switch(jnp.minimum(outcome.level, count - 1), branches)
        columns = tuple(self._columns(j) for j in range(count))
        diagonal = not is_scalar(outcome.estimate.value)
        return RunWeights(
            parts, factors, outcome.level, columns, self.falls_back_to_exact, diagonal
        )

    def state(self, outcome: RunOutcome) -> RunState:
        """What a later run can go on from."""
        return RunState(
            outcome.arrays,
            self.keys,
            outcome.level,
            outcome.estimate.value,
            self.extendable,
            self.budgets,
            self.falls_back_to_exact,
            self.block.n,
        )

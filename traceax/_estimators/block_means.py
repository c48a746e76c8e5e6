r"""Means of independent blocks: runs to a tolerance for algorithms that know of no tolerance.

Block j has k_j products and a key of its own. It gives an estimate v_j with standard error s_j and
nu_j degrees of freedom. The shares w_j = k_j / sum_i k_i are fixed in advance, so that for a given
number of blocks the mean sum_j w_j v_j is unbiased. Its squared standard error is V = sum_j V_j,
V_j = w_j^2 s_j^2, and its degrees of freedom nu are Satterthwaite's (doi:10.2307/3002019),

    1 / nu = sum_j (V_j / V)^2 / nu_j.

All three are updated block by block.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._core.control_flow import nothing_like
from .._core.estimate import Estimate, norm_of, weights_wanted
from .._operators.block_operator import BlockOperator
from .._sketch.weights import AbstractWeights, InUse
from .calibration import CALIBRATION, Calibration
from .exact import exact
from .extendable import AbstractExtendable, Completed, Growth
from .rows import Rows

if TYPE_CHECKING:
    from .estimator import AbstractDiagonalEstimator, AbstractTraceEstimator


class BlockMeansState(NamedTuple):
    """The mean of the blocks so far. No array in it grows with the number of probes."""

    products: Real[Array, ""]  # the sum of the k_j
    value: PyTree[Inexact[Array, "..."]]
    std_err: PyTree[Real[Array, "..."]]
    num_matvecs: Int[Array, ""]
    dof: Real[Array, ""]
    status: Int[Array, ""]


def _fixed(tree: Any) -> Any:
    """A PyTree through which no derivative flows."""
    return jtu.tree_map(lambda x: lax.stop_gradient(x) if eqx.is_inexact_array(x) else x, tree)


@final
class BlockWeights(AbstractWeights):
    """The weights of a block, computed again from its key when they are needed. This costs the
    products of the block once more, but nothing of the block has to be kept.
    """

    blocks: "BlockMeans"
    key_data: Array
    key_impl: Any = eqx.field(static=True)
    k: int = eqx.field(static=True)

    def contract(self, operator):
        """See `AbstractWeights`."""
        key = jr.wrap_key_data(self.key_data, impl=self.key_impl)
        with weights_wanted(True):
            _, weights = _fixed(self.blocks).of_block(key, _fixed(operator), self.k)
        return self.blocks.estimator.contract(_fixed(weights), operator)


@final
class BlockMeansWeights(AbstractWeights):
    """The mean of the weights of the blocks in use."""

    blocks: list[BlockWeights]
    products: Real[Array, ""]  # of these blocks
    in_use: InUse | None = None

    def contract(self, operator):
        """See `AbstractWeights`."""
        assert self.in_use is not None
        ends = self.in_use.ends

        def part(_, end):
            block = self.blocks[ends.index(end)]
            share = block.k / self.products
            contracted = block.contract(operator)
            return jtu.tree_map(lambda x: share.astype(x.dtype) * x, contracted)

        return self.in_use.total(part)


def _merged(state: BlockMeansState, new: Estimate, k: int) -> BlockMeansState:
    """The mean after one more block of k products."""
    real = state.products.dtype
    # If every entry has its own degrees of freedom, the smallest number counts.
    dof = jnp.min(new.dof).astype(real)
    products = state.products + k
    share = k / products

    def mean(old, new):
        return old + share.astype(old.dtype) * (new - old)

    def hypot(old, new):
        # At first `old` is 0, and so is what it is multiplied with, even if `new` is inf.
        return jnp.hypot((1 - share).astype(old.dtype) * old, share.astype(old.dtype) * new)

    std_err = jtu.tree_map(hypot, state.std_err, new.std_err)
    size = norm_of(std_err)
    usable = (size > 0) & jnp.isfinite(size)
    safe = jnp.where(usable, size, 1)
    parts = (1 - share) * norm_of(state.std_err) / safe, share * norm_of(new.std_err) / safe
    inverse = sum(
        p**4 / jnp.maximum(nu, 0.5) for p, nu in zip(parts, (state.dof, dof), strict=True)
    )
    return BlockMeansState(
        products,
        jtu.tree_map(mean, state.value, new.value),
        std_err,
        state.num_matvecs + new.num_matvecs,
        jnp.where(usable, 1 / inverse, state.dof + dof),
        jnp.maximum(state.status, new.status),
    )


@final
class BlockMeans(AbstractExtendable):
    """The mean of an estimator over independent blocks of products.

    The exact value takes n further products, as an estimator does not return the products that it
    made.
    """

    estimator: "AbstractTraceEstimator | AbstractDiagonalEstimator"
    rows: Rows | None  # the entries of a diagonal that are wanted; None for traces
    matvecs_per_probe: int = eqx.field(static=True)
    calibration: Calibration = eqx.field(static=True)
    takes_any_budget: ClassVar[bool] = False

    def panel_width(self, limit):
        """See `AbstractExtendable`. One probe often gives a single sample, which says nothing about
        the spread.
        """
        return min(2, limit)

    def prepare(self, operator):
        """The operator as it is: the estimator prepares it itself."""
        return BlockOperator(operator)

    def of_block(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
    ) -> tuple[Estimate, AbstractWeights]:
        """The estimate from one block, and its weights.

        **Arguments:** those of `compute` of an estimator.
        """
        estimator: Any = self.estimator
        if self.rows is None:
            return estimator.compute(key, operator, k)
        return estimator.compute_rows(key, operator, k, self.rows)

    def _sizes(self, growth: Growth) -> list[int]:
        """The budget of the block that belongs to each stage."""
        ends = [probes * self.matvecs_per_probe for probes in growth.probes]
        return [end - start for start, end in pairwise((0, *ends))]

    def _value(self, growth: Growth, block: BlockOperator, stage: int) -> Estimate:
        """The estimate from the block of a stage."""
        with weights_wanted(False):
            k = self._sizes(growth)[stage]
            return self.of_block(growth.keys(stage), block.operator, k)[0]

    def start(self, growth, block):
        """See `AbstractExtendable`."""
        like = nothing_like(lambda: self._value(growth, block, 0))
        zero, none = jnp.zeros((), jnp.finfo(block.dtype).dtype), jnp.zeros((), jnp.int32)
        return BlockMeansState(zero, like.value, like.std_err, none, zero, none)

    def extend(self, state, growth, block):
        """See `AbstractExtendable`."""
        branches = [
            lambda j=j, k=k: _merged(state, self._value(growth, block, j), k)
            for j, k in enumerate(self._sizes(growth))
        ]
        known = growth.start == growth.stop
        return lax.cond(known, lambda: state, lambda: lax.switch(growth.stage, branches))

    def estimate(self, state, columns, block):
        """See `AbstractExtendable`."""
        return state.value, state.std_err, state.status

    def counts(self, state, probes):
        """See `AbstractExtendable`."""
        return state.num_matvecs, state.dof

    def weights(self, state, columns, growth, block):
        """See `AbstractExtendable`."""
        blocks = [
            BlockWeights(self, jr.key_data(growth.keys(j)), jr.key_impl(growth.keys(j)), k)
            for j, k in enumerate(self._sizes(growth))
        ]
        return BlockMeansWeights(blocks, state.products)

    def complete(self, state, block):
        """See `AbstractExtendable`."""
        done, _ = exact(block.operator, self.rows)
        value, std_err = done.value, done.std_err
        if isinstance(state.value, list):
            value, std_err = (block.leaves(part) for part in (value, std_err))
        return Completed(value, std_err, done.num_matvecs)


def block_means(
    estimator: "AbstractTraceEstimator | AbstractDiagonalEstimator", rows: Rows | None = None
) -> BlockMeans:
    """The mean of an estimator over independent blocks, whose budgets are multiples of its smallest
    one.

    The calibration is that of Hutchinson's estimators, which are means of independent samples, too.

    **Arguments:**

    - `estimator`: the estimator.
    - `rows`: the entries of a diagonal that are wanted; None for traces.

    **Returns:**

    An `AbstractExtendable`.
    """
    calibration = CALIBRATION["hutchinson" if rows is None else "hutchinson-diagonal"]
    return BlockMeans(
        estimator=estimator,
        rows=rows,
        matvecs_per_probe=estimator.smallest,
        calibration=calibration,
    )

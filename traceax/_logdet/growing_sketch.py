"""A sketch of a positive definite operator that grows, and the preconditioner from its columns."""

import math
from itertools import pairwise

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int, PRNGKeyArray

from .._core.control_flow import if_any, of_size
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import has_entries, scaling_of, terms_of
from .._probes.samplers import NormalSampler
from .._sketch.low_rank import PADDING, BuiltPreconditioner, LowRank, nystrom_of


class GrowingSketch:
    """Products of the scaled operator (see `_sketch.low_rank`) with normal probes, for a number of
    ranks of which one is in use. Arrays have the size of the largest rank; columns that are not
    there yet are 0. (It is not a PyTree, as it exists only during a trace.)
    """

    def __init__(
        self,
        key: PRNGKeyArray,
        operator: lx.AbstractLinearOperator,
        block: BlockOperator,
        ranks: tuple[int, ...],
    ):
        """Make the first products, which fix the unit of D.

        **Arguments:**

        - `key`: the random key of the probes.
        - `operator`: the operator.
        - `block`: the operator, as it is multiplied.
        - `ranks`: the ranks, in ascending order.
        """
        self._block, self._scaling, self._ranks = block, scaling_of(operator), ranks
        self._columns = 0 if has_entries(operator) else None
        n, most = block.n, ranks[-1]
        probes = NormalSampler().probes(key, n, most, block.dtype)
        self._omega = probes / math.sqrt(n)
        first = self._products(0, ranks[0])
        self._unit, self.known = self._scaling.fixed(first, block.eps)
        self._floor_known = self.known & terms_of(operator).positive
        self.first = jnp.pad(first, ((0, 0), (0, most - ranks[0])))
        # Sizes to which arrays are cut: one for every rank whose padding would take long.
        self._sizes = [most]
        for rank in reversed(ranks):
            if n * (self._sizes[-1] ** 2 - rank**2) > PADDING:
                self._sizes.append(rank)

    def _products(self, start: int, end: int) -> Inexact[Array, "n m"]:
        """D^{-1/2} A D^{-1/2} times some of the probes, with D relative to its unit."""
        root = self._scaling.relative[:, None].astype(self._block.dtype)
        return self._block.mm(self._omega[:, start:end] / root) / root

    def grown(self, y: Inexact[Array, "n r"], level: Int[Array, ""]) -> Inexact[Array, "n r"]:
        """The products so far, and those that the rank of this level takes in addition."""
        for j, (before, rank) in enumerate(pairwise(self._ranks), 1):

            def extended(y=y, before=before, rank=rank):
                return y.at[:, before:rank].set(self._products(before, rank))

            y = if_any(level == j, extended, y)
        return y

    def low_rank(self, y: Inexact[Array, "n r"], level: Int[Array, ""] | int) -> LowRank:
        """The approximation from the first products, as many as the rank of this level."""
        several = len(self._ranks) > 1  # otherwise all columns are in use
        rank = jnp.array(self._ranks, jnp.int32)[level] if several else None

        def cut(size):
            omega, products = self._omega[:, :size], y[:, :size] / self._unit
            found = nystrom_of(omega, products, self.known, self._block.eps, rank)
            return found._replace(f=jnp.pad(found.f, ((0, 0), (0, y.shape[1] - size))))

        return of_size(self._sizes, self._sizes[0] if rank is None else rank, cut)

    def built(self, low_rank: LowRank) -> BuiltPreconditioner:
        """The preconditioner from an approximation."""
        root = jnp.sqrt(self._unit) * self._scaling.relative
        return low_rank.built_of_size(self._sizes, root, self._floor_known)

    def read(self, y: Inexact[Array, "n r"]) -> int | None:
        """The number of columns that were read without a product: 0, or None if there are none."""
        del y
        return self._columns

"""A sketch of a positive definite operator that grows, and the preconditioner from its columns."""

import math

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray

from .._operators.block_operator import BlockOperator
from .._operators.known_parts import scaling_of, terms_of
from .._probes.samplers import NormalSampler
from .._sketch.low_rank import BuiltPreconditioner, LowRank, nystrom_of
from .preconditioners import scaled_products


class GrowingSketch:
    """Products of the scaled operator (see `_sketch.low_rank`) with normal probes. (It is not a
    PyTree, as it exists only during a trace.)
    """

    def __init__(
        self,
        key: PRNGKeyArray,
        operator: lx.AbstractLinearOperator,
        block: BlockOperator,
        first: int,
        most: int,
    ):
        """Make the first products, which fix the unit of D.

        **Arguments:**

        - `key`: the random key of the probes.
        - `operator`: the operator.
        - `block`: the operator, as it is multiplied.
        - `first`: the number of columns to start with.
        - `most`: the largest number of columns.
        """
        self._block, self._scaling = block, scaling_of(operator)
        probes = NormalSampler().probes(key, block.n, most, block.dtype)
        self._omega = probes / math.sqrt(block.n)
        self.first = self.products(0, first)
        self._unit, self._known = self._scaling.fixed(self.first, block.eps)
        self._floor_known = self._known & terms_of(operator).positive

    def products(self, start: int, end: int) -> Inexact[Array, "n m"]:
        """The products with the probes from `start` to `end`."""
        return scaled_products(self._block, self._scaling.relative, self._omega[:, start:end])

    def low_rank(self, y: Inexact[Array, "n l"]) -> LowRank:
        """The approximation from the first l products."""
        omega = self._omega[:, : y.shape[1]]
        return nystrom_of(omega, y / self._unit, self._known, self._block.eps)

    def built(self, low_rank: LowRank) -> BuiltPreconditioner:
        """The preconditioner from this approximation."""
        return low_rank.built(jnp.sqrt(self._unit) * self._scaling.relative, self._floor_known)

"""A sketch of a positive definite operator, and the preconditioner from its products."""

import math

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray

from .._operators.block_operator import BlockOperator
from .._operators.known_parts import scaling_of, split_shift
from .._probes.samplers import NormalSampler
from .._sketch.low_rank import BuiltPreconditioner, LowRank, nystrom_of


class Sketch:
    """Products of the scaled operator (see `_sketch.low_rank`) with normal probes. (No PyTree: a
    `Sketch` exists only during a trace.)
    """

    def __init__(
        self,
        key: PRNGKeyArray,
        operator: lx.AbstractLinearOperator,
        first: int,
        most: int,
    ):
        """Make the `first` of at most `most` products. They fix the unit of D."""
        block = BlockOperator(operator)
        self._block = block
        self._scaling = scaling_of(operator)
        probes = NormalSampler().probes(key, block.n, most, block.dtype)
        self._omega = probes / math.sqrt(block.n)
        self.first = self.products(0, first)
        self._unit, self.known = self._scaling.fixed(self.first, block.eps)
        self._floor_known = self.known & split_shift(operator).is_positive

    def products(self, start: int, end: int) -> Inexact[Array, "n m"]:
        """D^{-1/2} A D^{-1/2} times probes `start` to `end`, with D relative to its unit."""
        root = self._scaling.relative[:, None].astype(self._block.dtype)
        return self._block.mm(self._omega[:, start:end] / root) / root

    def extended(self, y: Inexact[Array, "n m"], rank: int) -> Inexact[Array, "n r"]:
        """The products y, and as many more as this rank takes."""
        return jnp.concatenate([y, self.products(y.shape[1], rank)], axis=1)

    def low_rank(self, y: Inexact[Array, "n m"]) -> LowRank:
        """The Nystrom approximation from the products y."""
        omega = self._omega[:, : y.shape[1]]
        return nystrom_of(omega, y / self._unit, self.known, self._block.eps)

    def built(self, low_rank: LowRank) -> BuiltPreconditioner:
        """The preconditioner from an approximation."""
        root = jnp.sqrt(self._unit) * self._scaling.relative
        return low_rank.built(root, self._floor_known, self._omega.shape[1])

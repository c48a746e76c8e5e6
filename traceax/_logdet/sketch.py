"""The sketch that a preconditioner from products is made of.

Everything is computed for the scaled operator A' = D^{-1/2} A D^{-1/2} = K' + s I. If the operator
is a sum with a diagonal part D, that part is read (`_operators.known_parts`), and s = 1. Otherwise
D is a scalar unit and s is estimated. With K' ~ F F^H = U Lambda U^H, and t the mean eigenvalue of
what is left out (`_sketch.low_rank`), the preconditioner is

    P = D^{1/2} (U Lambda U^H + mu I) D^{1/2},      mu = s + t / 10.

If K' decays slowly, the part left out is far larger than s I, and with mu = s the low-rank part
of little use: t / 10 is close to the best choice on many kernels. As U Lambda U^H <= K', no
eigenvalue of P^{-1} A is below s / mu.
"""

import math

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray, Real

from .._core.precision import column_dots
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import noise_of, scaling_of
from .._probes.samplers import NormalSampler
from .._sketch.low_rank import LowRank, low_rank_of
from .factors import BuiltPreconditioner, low_rank_plus_diagonal


class Sketch:
    """Products of the scaled operator (see above) with normal probes. (No PyTree: a
    `Sketch` exists only during a trace.)
    """

    def __init__(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, first: int, most: int
    ):
        """Make the `first` of at most `most` products. They fix the unit of D."""
        block = BlockOperator(operator)
        self._block = block
        self._scaling = scaling_of(operator)
        probes = NormalSampler().probes(key, block.n, most, block.dtype)
        self.omega = probes / math.sqrt(block.n)
        self.first = self.products(0, first)
        self._unit, self.known = self._scaling.fixed(self.first, block.eps)
        self._floor_known = self.known & jnp.all(noise_of(operator) > 0)

    def products(self, start: int, end: int) -> Inexact[Array, "n m"]:
        """D^{-1/2} A D^{-1/2} times probes `start` to `end`, with D relative to its unit."""
        root = self._scaling.relative[:, None].astype(self._block.dtype)
        return self._block.mm(self.omega[:, start:end] / root) / root

    def whole(self) -> Inexact[Array, "n r"]:
        """The first products, and all others."""
        others = self.products(self.first.shape[1], self.omega.shape[1])
        return jnp.concatenate([self.first, others], axis=1)

    def low_rank(self, y: Inexact[Array, "n m"]) -> LowRank:
        """The Nystrom approximation from the products y."""
        omega = self.omega[:, : y.shape[1]]
        s = jnp.where(self.known, 1, jnp.nan)
        return low_rank_of(omega, y / self._unit, s, self._block.eps)

    def forms(self) -> tuple[Inexact[Array, "n m"], Real[Array, " m"]]:
        """Returns (the first probes w, w^H A' w)."""
        omega = self.omega[:, : self.first.shape[1]]
        return omega, column_dots(omega, self.first).real / self._unit

    def built(self, chosen: LowRank) -> BuiltPreconditioner:
        """The preconditioner, and the lower bound of the eigenvalues if s is known."""
        root = jnp.sqrt(self._unit) * self._scaling.relative
        f = root[:, None].astype(chosen.f.dtype) * chosen.f
        factors = low_rank_plus_diagonal(f, chosen.mu * jnp.square(root))
        weight = jnp.fmax(chosen.shift / (chosen.shift + 3 * chosen.left_out), 0)  # 0 for NaN
        floor = jnp.where(self._floor_known, chosen.shift / chosen.mu, 0)
        return BuiltPreconditioner(factors, weight, chosen.evidence, floor=floor)

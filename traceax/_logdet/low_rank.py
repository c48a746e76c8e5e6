"""Low rank plus a multiple of the identity, from products.

Everything is computed for the scaled operator A' = D^{-1/2} A D^{-1/2} = K' + s I. If the operator
is a sum with a diagonal part D, that part is read (`_operators.known_parts`), and s = 1. Otherwise
D is a scalar unit and s is estimated: with theta the smallest Ritz value on the span of the probes,
and r the norm of its residual, s = theta - min(r, theta / 2). (A Gaussian-process kernel of low
numerical rank plus s I has r = 0 to rounding, so that K' is free of the flat tail.)

A Nystrom approximation (`_sketch.nystrom`, with the real shift s) gives K' ~ U Lambda U^H.
Holding out one probe after the other, as in XNysTrace, estimates the mean eigenvalue t of the part
of K' that is left out, without a product. The preconditioner is

    P = D^{1/2} (U Lambda U^H + mu I) D^{1/2},      mu = s + t / 10.

If K' decays slowly, the part left out is far larger than s I, and with mu = s the low-rank part
of little use: t / 10 is close to the best choice on many kernels. As U Lambda U^H <= K', no
eigenvalue of P^{-1} A is below s / mu.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Inexact, PRNGKeyArray, Real

from .._core.estimate import Evidence, evidence_of
from .._linalg.factorisations import diagonal_of, divide_by_upper, qr, svd
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import noise_of, scaling_of
from .._probes.samplers import NormalSampler
from .._sketch.leave_one_out import column_dots, matmul
from .._sketch.nystrom import nystrom, skew_of_core, xnystrace_parts
from .._sketch.ranges import mean_square_cosine
from .factors import BuiltPreconditioner, low_rank_plus_diagonal


class LowRank(NamedTuple):
    """An approximation F F^H of K', and how much it leaves out."""

    f: Inexact[Array, "n l"]  # U Lambda^{1/2}
    shift: Real[Array, ""]  # s
    left_out: Real[Array, ""]  # t
    evidence: Evidence  # whether the products are those of a definite matrix
    dimension: Real[Array, ""]  # d of what is left out
    is_flat: Bool[Array, ""]  # whether s is known, or seen: r <= theta / 2

    @property
    def mu(self) -> Real[Array, ""]:
        """The multiple of the identity: never 0, as A' is of size 1."""
        least = float(jnp.finfo(self.left_out.dtype).eps) ** 2
        return jnp.maximum(self.shift + self.left_out / 10, least)


def low_rank_of(
    omega: Inexact[Array, "n l"], products: Inexact[Array, "n l"], s: Real[Array, ""], eps: float
) -> LowRank:
    """The Nystrom approximation of K' = A' - s I from products of A' with normal probes of norm
    about 1; s is estimated where it is NaN. Cost: about `12 n l^2` operations.
    """
    n, m = omega.shape
    p, r = qr(omega)
    factors = nystrom(p, r, divide_by_upper(products, r), eps)
    scale = factors.products.scale
    theta = factors.eigenvalues[0] - factors.nu
    size = jnp.sqrt(diagonal_of(factors.rest_gram)[0].real)  # of the residual
    floor = 4 * eps * jnp.max(jnp.abs(factors.eigenvalues))
    seen = theta - jnp.clip(size, floor, jnp.maximum(theta / 2, floor))
    shift = jnp.where(jnp.isnan(s), jnp.maximum(seen, floor), s / scale)
    # With nu the core of K' is positive definite, as it need not be without.
    nu = jnp.maximum(factors.nu, -2 * (theta - shift))
    shifted = factors.shifted(shift + factors.nu - nu)
    sketch = factors.products.numbers - (shift - nu).astype(p.dtype) * p
    f = matmul(sketch, factors.vectors) * jnp.sqrt(scale * shifted.inverse_core).astype(p.dtype)
    q, r = qr(f)
    # The eigenvalues of F F^H, less nu. With orthogonal columns G^H G of `factors` is diagonal.
    u, sigma, _ = svd(r)
    lengths = jnp.sqrt(jnp.maximum(jnp.square(sigma) - scale * nu, 0))

    parts = xnystrace_parts(factors, shifted)
    left_out = jnp.mean(n * parts.residual - parts.lost) / max(n - m, 1) - nu
    left_out = jnp.where(jnp.isfinite(left_out), jnp.maximum(left_out, 0), jnp.nan)
    root = jnp.sqrt(jnp.abs(shifted.inverse))
    skew = skew_of_core(factors.core, factors.products.norm, n, eps)
    outside = factors.evidence.negative
    return LowRank(
        f=matmul(q, u * lengths.astype(q.dtype)),
        shift=scale * shift,
        left_out=scale * left_out,
        evidence=evidence_of(factors.products.square, skew=skew, outside=outside),
        # The cosines of E^{1/2} omega for two probes each, with E what all others leave out.
        dimension=1 / mean_square_cosine(root[:, None] * shifted.gram * root),
        is_flat=~jnp.isnan(s) | (size <= theta / 2),
    )


class Sketch:
    """Products of the scaled operator (see `low_rank`) with normal probes. (No PyTree: a
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

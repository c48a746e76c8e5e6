"""Low rank plus a multiple of the identity, A ~ F F^H + s I, from products with A.

s is known, or estimated: with theta the smallest Ritz value on the span of the probes, and r the
norm of its residual, s = theta - min(r, theta / 2). (A Gaussian-process kernel of low numerical
rank plus s I has r = 0 to rounding, so that K = A - s I is free of the flat tail.) A Nystrom
approximation of K (`nystrom`, with the real shift s) gives F. Holding out one probe after the
other, as in XNysTrace, estimates the mean eigenvalue t of the part of K that is left out, without a
product.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .._core.estimate import Evidence, evidence_of
from .._core.precision import matmul
from .._linalg.factorisations import diagonal_of, divide_by_upper, qr, svd
from .nystrom import nystrom, skew_of_core, xnystrace_parts
from .ranges import mean_square_cosine


class LowRank(NamedTuple):
    """An approximation F F^H of K, and how much it leaves out."""

    f: Inexact[Array, "n l"]  # U Lambda^{1/2}
    shift: Real[Array, ""]  # s
    left_out: Real[Array, ""]  # t
    evidence: Evidence  # whether the products are those of a definite matrix
    dimension: Real[Array, ""]  # d of what is left out
    is_flat: Bool[Array, ""]  # whether s is known, or seen: r <= theta / 2

    @property
    def mu(self) -> Real[Array, ""]:
        """The multiple of the identity: never 0, for an A of size 1."""
        least = float(jnp.finfo(self.left_out.dtype).eps) ** 2
        return jnp.maximum(self.shift + self.left_out / 10, least)


def low_rank_of(
    omega: Inexact[Array, "n l"], products: Inexact[Array, "n l"], s: Real[Array, ""], eps: float
) -> LowRank:
    """The Nystrom approximation of K = A - s I from products of A with normal probes of norm
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
    # With nu the core of K is positive definite, as it need not be without.
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

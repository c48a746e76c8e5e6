"""Low rank plus a multiple of the identity, from products.

Everything is computed for the scaled operator A' = D^{-1/2} A D^{-1/2} = K' + s I. If the operator
is a sum with a diagonal part D, that part is read (`_operators.known_parts`), and s = 1. Otherwise
D is a scalar unit and s is estimated: with theta the smallest Ritz value on the span of the sketch,
and r the norm of its residual, s = theta - min(r, theta / 2). (A Gaussian-process kernel of low
numerical rank plus s I has r = 0 to rounding, so that K' is free of the flat tail.)

A Nystrom approximation gives K' ~ U Lambda U^H. With t the mean eigenvalue of the part of K' that
is left out, the preconditioner is

    P = D^{1/2} (U Lambda U^H + mu I) D^{1/2},      mu = s + t / 10.

If K' decays slowly, the part left out is far larger than s I, and with mu = s the low-rank part
of little use: t / 10 is close to the best choice on many kernels. As U Lambda U^H <= K', no
eigenvalue of P^{-1} A is below s / mu.
"""

import math
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, Bool, Inexact, PRNGKeyArray, Real

from .._core.estimate import Evidence, evidence_of, safe_norm
from .._linalg.factorisations import cholesky, divide_by_upper, eigh, qr, svd
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import scaling_of, split_shift
from .._probes.samplers import NormalSampler
from .._sketch.leave_one_out import adjoint, matmul, shift_of, square_norms, square_of
from .._sketch.nystrom import shifted_cholesky, skew_of_core
from .factors import BuiltPreconditioner, low_rank_plus_diagonal


class LowRank(NamedTuple):
    """An approximation F F^H of K', and how much it leaves out."""

    f: Inexact[Array, "n l"]
    nu: Real[Array, ""]  # the shift: F F^H approximates K' + nu I
    shift: Real[Array, ""]  # s
    left_out: Real[Array, ""]  # t
    evidence: Evidence  # whether the products are those of a definite matrix
    left_out_by_half: Real[Array, ""]  # t of the first half of the columns
    dimension: Real[Array, ""]  # of what is left out: see `nystrom_of`
    is_flat: Bool[Array, ""]  # whether s is known, or seen: r <= theta / 2

    def built(
        self, root: Real[Array, " n"], known: Bool[Array, ""], rank: int
    ) -> BuiltPreconditioner:
        """The preconditioner, with `rank` columns, the last ones 0, and the lower bound of the
        eigenvalues. Cost: a QR factorisation, l^3.
        """
        q, r = qr(self.f)
        u, sigma, _ = svd(r)  # orthogonal columns keep rounding errors apart
        lengths = jnp.sqrt(jnp.maximum(jnp.square(sigma) - self.nu, 0))
        f = root[:, None].astype(q.dtype) * matmul(q, u * lengths.astype(q.dtype))
        f = jnp.pad(f, ((0, 0), (0, rank - lengths.size)))
        factors = low_rank_plus_diagonal(f, self.mu * jnp.square(root))
        # Without a known s there is no bound.
        floor = jnp.where(known, self.shift / self.mu, jnp.nan)
        control_variate_weight = self.shift / (self.shift + 3 * self.left_out)
        control_variate_weight = jnp.where(control_variate_weight >= 0, control_variate_weight, 0)
        return BuiltPreconditioner(factors, floor, control_variate_weight, self.evidence)

    @property
    def mu(self) -> Real[Array, ""]:
        """The multiple of the identity: never 0, as A' is of size 1."""
        least = float(jnp.finfo(self.left_out.dtype).eps) ** 2
        return jnp.maximum(self.shift + self.left_out / 10, least)


def _smallest(omega: Array, products: Array, eps: float) -> tuple[Array, Array]:
    """Returns (an estimate of the smallest eigenvalue, s; whether r <= theta / 2): see above."""
    factor = cholesky(matmul(adjoint(omega), omega))
    # Omega C^{-1} is orthonormal. C is well-conditioned: its inverse is as good as solving with it.
    inverse = divide_by_upper(jnp.eye(factor.shape[0], dtype=factor.dtype), factor)
    core = matmul(adjoint(inverse), matmul(matmul(adjoint(omega), products), inverse))
    values, vectors = eigh((core + adjoint(core)) / 2)  # theta = values[0]
    vector = matmul(inverse, vectors[:, :1])
    residual = matmul(products, vector) - values[0] * matmul(omega, vector)
    size = jnp.sqrt(square_norms(residual))[0]  # r
    floor = 4 * eps * jnp.max(jnp.abs(values))
    shift = values[0] - jnp.clip(size, floor, jnp.maximum(values[0] / 2, floor))
    return jnp.maximum(shift, floor), size <= values[0] / 2


def dimension_of(directions: Inexact[Array, "m m"]) -> Real[Array, ""]:
    """With E what all but two of the probes leave out, the cosine of two directions is that of the
    vectors E^{1/2} omega of these two (but for its sign). The mean of its square is 1 / d if E has
    d equal eigenvalues, and else about ||E||_F^2 / (tr E)^2. No eigenvalue is needed.
    """
    m = len(directions)
    cosines = square_of(matmul(adjoint(directions), directions))
    return m * (m - 1) / jnp.sum(jnp.where(jnp.eye(m, dtype=bool), 0, cosines))


def nystrom_of(
    omega: Inexact[Array, "n l"],
    products: Inexact[Array, "n l"],
    known: Bool[Array, ""],
    eps: float,
) -> LowRank:
    """The Nystrom approximation of K' = A' - s I from products of A' with normal probes of norm
    about 1; s = 1 if `known`, and is estimated otherwise.

    Holding out one probe after the other, as in XNysTrace, estimates the mean eigenvalue t of the
    part left out, without a product. Cost: about `8 n l^2` operations.
    """
    n, m = omega.shape
    one = jnp.ones((), jnp.finfo(omega.dtype).dtype)
    seen = partial(_smallest, eps=eps)
    shift, is_flat = lax.cond(known, lambda *_: (one, known), seen, omega, products)  # s
    sketch = products - shift.astype(omega.dtype) * omega
    # shift_of expects probes of norm sqrt(n). Its norm is that of A', as the products with A' were
    # rounded, not those with K'.
    least = shift_of(math.sqrt(n) * jnp.linalg.norm(products), n, eps)
    core = matmul(adjoint(omega), sketch)
    nu, factor = shifted_cholesky(core, least)
    limit = 100 * math.sqrt(n) * least

    def negative():
        """Whether Omega^H A' Omega, too, has an eigenvalue below 0 by more than rounding."""
        core = matmul(adjoint(omega), products)
        shifted = core + limit * jnp.eye(m, dtype=core.dtype)
        return ~jnp.isfinite(cholesky(shifted)[-1, -1])

    # Where K' looks semidefinite on the sketch, A' = K' + s I is definite there.
    indefinite = lax.cond(nu <= limit, lambda: jnp.array(False), negative)
    norm = jnp.linalg.norm(products)
    skew = skew_of_core(core, norm, n, eps)
    sketch = sketch + nu.astype(omega.dtype) * omega
    f = divide_by_upper(sketch, factor)
    inverse = divide_by_upper(jnp.eye(m, dtype=omega.dtype), factor)

    # t of all columns, and of the first half alone: these columns, and their part of C^{-1}, do not
    # depend on the others.
    half = max(m // 2, 1)
    rows = jnp.concatenate([inverse, jnp.where(jnp.arange(m) < half, inverse[:half], 0)])
    length = safe_norm(rows)
    directions = adjoint(rows / length.astype(omega.dtype)[:, None])
    held_out = n * jnp.square(1 / length) - square_norms(matmul(f, directions))

    def left_out(held_out):
        mean = jnp.mean(held_out) / max(n - held_out.size, 1) - nu
        return jnp.where(jnp.isfinite(mean), jnp.maximum(mean, 0), jnp.nan)

    return LowRank(
        f=f,
        nu=nu,
        shift=shift,
        left_out=left_out(held_out[:m]),
        evidence=evidence_of(norm, skew=skew, outside=indefinite),
        left_out_by_half=left_out(held_out[m:]),
        dimension=dimension_of(directions[:, :m]).astype(one.dtype),
        is_flat=is_flat,
    )


class Sketch:
    """Products of the scaled operator (see `low_rank`) with normal probes. (No PyTree: a
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

    def whole(self) -> Inexact[Array, "n r"]:
        """The first products, and all others."""
        others = self.products(self.first.shape[1], self._omega.shape[1])
        return jnp.concatenate([self.first, others], axis=1)

    def low_rank(self, y: Inexact[Array, "n m"]) -> LowRank:
        """The Nystrom approximation from the products y."""
        omega = self._omega[:, : y.shape[1]]
        return nystrom_of(omega, y / self._unit, self.known, self._block.eps)

    def built(self, low_rank: LowRank) -> BuiltPreconditioner:
        """The preconditioner from an approximation."""
        root = jnp.sqrt(self._unit) * self._scaling.relative
        return low_rank.built(root, self._floor_known, self._omega.shape[1])

"""Leave-one-out algebra, each piece written once.

Throughout, `Omega` (n x m) holds the probes, `Y = A Omega` is the sketch, and `Y = Q R`.

*Leaving out probe i.* The columns of `S = cn(R^{-H})` (cn: columns scaled to unit norm) obey
`s_i^H R e_j = 0` for j != i, so `Q (I - s_i s_i^H) Q^H` projects on the range of `A Omega_{-i}`.

*Leaving out probes i and j.* The projector loses the plane spanned by s_i and s_j; with the unit
vector `u_ij = (s_j - s_i gamma_ij) / nu_ij`, `gamma_ij = s_i^H s_j`, `nu_ij^2 = 1 - |gamma_ij|^2`,
that plane is spanned by the orthonormal pair (s_i, u_ij).

*The error of the mean of leave-one-out samples.* Let t_i be the estimate that tests with probe i
what was built from all the others, and t_ij the same with probe j held out as well. Given all
probes but i, t_i and t_ij have mean tau = tr(A). Given all probes but j, t_ij is fixed and t_j has
mean tau; hence E[(t_ij - tau)(t_j - tau)^*] = 0. The same holds with i and j exchanged, and for the
pair (t_ij, t_ji), so that with D_ij = t_i - t_ij

    Cov(t_i, t_j) = E[D_ij conj(D_ji)].

The sample variance of the t_i has mean Var(t_i) - Cov(t_i, t_j), hence

    E[ s^2 / m + mean_{i != j} Re D_ij conj(D_ji) ] = Var(mean_i t_i)     exactly.

The customary s^2 / m leaves the covariance out.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .._core.estimate import mean_and_std_err, safe_norm, scale_of
from .._core.precision import (
    adjoint,
    column_dots,
    matmul,
    square_norms,
    square_of,
)
from .._linalg.factorisations import diagonal_of, divide_by_upper, qr
from .._operators.block_operator import BlockOperator
from .weights import LowRankWeights


def reciprocal(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """1 / x, for numbers whose squares are representable. (A complex division scales against
    others, and compiles for longer.)
    """
    return jnp.conj(x) / square_of(x) if jnp.iscomplexobj(x) else 1 / x


def quadratic_forms(h, x):
    """The numbers x_i^H H x_i."""
    return column_dots(x, matmul(h, x))


def resphering(dimension: float, square: Array, resphere: bool) -> Array:
    """The factors c = dimension / ||g||^2 for residual probes g, or 1 without resphering."""
    return dimension / square if resphere else jnp.ones_like(square)


def rescale_error(size: Array, std_err: Array) -> Array:
    """`size * std_err`. For a sketch that is zero it is 0, or inf if the error is unknown (inf)."""
    return jnp.where(size > 0, size * std_err, jnp.where(jnp.isinf(std_err), std_err, 0))


def without_zero_pivots(r: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """R, the triangular factor of probes or of a sketch of size 1, with no zero on its diagonal.

    A probe in the span of earlier ones has R_jj = 0. Any tiny number in its place will do: s_j then
    has the direction of the arbitrary column q_j, which is right, as the range loses nothing else
    if one of two equal probes is held out.
    """
    least = float(jnp.finfo(r.dtype).eps) ** 2
    zero = jnp.eye(r.shape[0], dtype=bool) & (jnp.abs(r) < least)
    return jnp.where(zero, jnp.asarray(least, r.dtype), r)


def leave_one_out_directions(r: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """`cn(R^{-H})` for an upper triangular, non-singular R."""
    inverse = divide_by_upper(jnp.eye(r.shape[0], dtype=r.dtype), r)
    return adjoint(inverse / safe_norm(inverse)[:, None])


class Pairs(NamedTuple):
    """The geometry of the planes (s_i, s_j), as m x m arrays over (i, j).

    The Gram matrix is Hermitian, and nu_ij^2 real, unless a complex shift has been taken off
    (`_sketch.nystrom`).
    """

    gamma: Inexact[Array, "m m"]
    square: Inexact[Array, "m m"]  # nu_ij^2, or 1 where there is no plane
    valid: Bool[Array, "m m"]  # i != j, and s_i, s_j not parallel to rounding

    def forms(self, k: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
        """u_ij^H H u_ij from K = S^H H S."""
        gamma = self.gamma
        diagonal = diagonal_of(k)
        cross = gamma * k.T + gamma.T * k
        expanded = diagonal[None, :] - cross + gamma * gamma.T * diagonal[:, None]
        return expanded * reciprocal(self.square)

    def components(self, dots: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
        """u_ij^H y_i from the inner products `dots[j, i] = s_j^H y_i`."""
        own = diagonal_of(dots)[:, None]
        return (dots.T - jnp.conj(self.gamma) * own) / jnp.sqrt(self.square)


def pairs_of(s: Inexact[Array, "m m"]) -> Pairs:
    """The planes spanned by pairs of the unit columns of S."""
    return pairs_of_gram(matmul(adjoint(s), s))


def pairs_of_gram(gamma: Inexact[Array, "m m"], hermitian: bool = True) -> Pairs:
    """The planes of pairs of the unit columns of S, from the Gram matrix S^H S, or from one that is
    not Hermitian: of columns scaled to a diagonal of 1.
    """
    m = gamma.shape[0]
    square = 1 - (square_of(gamma) if hermitian else gamma * gamma.T)
    least = 64 * m * jnp.finfo(gamma.dtype).eps
    valid = (square_of(square) > least**2) & ~jnp.eye(m, dtype=bool)
    return Pairs(gamma, jnp.where(valid, square, jnp.ones_like(square)), valid)


def usable_covariance(covariance: Array, variance: Array, rounding: Array, m: int) -> Array:
    """The covariance of two of m samples, from the D_ij, or 0 where the D_ij say nothing.

    If the samples scatter (`variance`, of the mean) by less than `rounding`, m - 1 probes capture
    the operator, and the D_ij, which hold two out, say nothing. (For m = 2 the samples may agree
    because each is symmetric in the probes, as those of a multiple of I are.)
    """
    return jnp.where((m < 3) | (variance > rounding), jnp.maximum(covariance, 0), 0)


def leave_one_out_error(samples: Array, differences: Array, rounding: Array) -> Array:
    """The standard error of the mean of m samples t_i (inf for m = 1), from the D_ij (0 for i = j)
    and the standard error of rounding:

        sqrt(s^2 / m + max(0, mean_{i != j} Re D_ij conj(D_ji)) + rounding^2).
    """
    m = samples.shape[0]
    variance = jnp.square(mean_and_std_err(samples)[1])  # of the mean
    pairs = max(m * (m - 1), 1)
    covariance = jnp.sum((jnp.conj(differences.T) * differences).real) / pairs
    covariance = usable_covariance(covariance, variance, rounding**2, m)
    return jnp.sqrt(variance + covariance + rounding**2)


class Scaled(NamedTuple):
    """Products as a scale times numbers of size 1. The norm and the size follow from one sum."""

    numbers: Inexact[Array, "n m"]
    scale: Real[Array, ""]
    square: Real[Array, ""]  # the squared norm of the numbers; 0 only if all of them are 0

    @property
    def norm(self) -> Real[Array, ""]:
        """The norm of the numbers."""
        return jnp.sqrt(self.square)

    @property
    def size(self) -> Real[Array, ""]:
        """The factor from results for A / scale to results for A; 0 if all products vanish: the
        result is then 0, and not the rounding error of the shift.
        """
        return jnp.where(self.square != 0, self.scale, jnp.zeros_like(self.scale))


def scaled(products: Inexact[Array, "n m"]) -> Scaled:
    """These products, scaled."""
    scale = scale_of(products)
    numbers = products / scale
    return Scaled(numbers, scale, jnp.sum(square_of(numbers)))


def shifted_sketch(
    block: BlockOperator, omega: Array, products: Inexact[Array, "n m"]
) -> tuple[Scaled, Real[Array, ""], Inexact[Array, "n m"]]:
    """The scaled products with probes (of norm sqrt(n)), nu, and the sketch of A / scale + nu I."""
    made = scaled(products)
    nu = shift_of(made.norm, block.n, block.eps)
    return made, nu, made.numbers + nu * omega


class RangeFinder(NamedTuple):
    """The factors of a sketch and the residuals of its probes."""

    q: Inexact[Array, "n m"]
    r: Inexact[Array, "m m"]
    s: Inexact[Array, "m m"]  # the leave-one-out directions
    w: Inexact[Array, "m m"]  # Q^H Omega
    x: Inexact[Array, "m m"]  # x_i = (I - s_i s_i^H) w_i: g_i = omega_i - Q x_i
    square: Real[Array, " m"]  # ||g_i||^2


def range_finder(omega: Array, sketch: Array) -> RangeFinder:
    """The factors of a (shifted, hence full-rank) sketch. Cost: about `6 n m^2` operations."""
    q, r = qr(sketch)
    r = without_zero_pivots(r)
    s = leave_one_out_directions(r)
    w = matmul(adjoint(q), omega)
    x = w - s * column_dots(s, w)
    norms = square_norms(omega)
    square = jnp.maximum(norms - square_norms(x), jnp.finfo(norms.dtype).eps * norms)
    return RangeFinder(q, r, s, w, x, square)


def mean_of_others(pairs: Real[Array, "m m"], valid: Bool[Array, "m m"]) -> Real[Array, " m"]:
    """For each i the mean over j != i of the nonnegative numbers V_ji."""
    others = jnp.sum(jnp.where(valid, jnp.maximum(pairs, 0), 0), axis=0)
    return others / max(len(pairs) - 1, 1)


class LeaveOneOut(NamedTuple):
    """What is left without probe i (arrays over i), and without j as well (over i and j)."""

    base: Inexact[Array, ""]  # the trace of the low-rank part of all probes
    lost: Inexact[Array, " m"]  # what it loses of that
    residual: Inexact[Array, " m"]  # e_i: what probe i says of the rest
    square: Real[Array, " m"]  # ||g_i||^2
    pair_lost: Inexact[Array, "m m"]  # what j takes after i
    pair_residual: Inexact[Array, "m m"]  # e_ij
    pair_square: Real[Array, "m m"]  # ||g_ij||^2
    energy: Real[Array, "m m"]  # V_ij, see `_sketch.shrunk`
    valid: Bool[Array, "m m"]


class Samples(NamedTuple):
    """Samples t_i of a trace, less `base`, and the m x m differences D_ij."""

    values: Inexact[Array, " m"]
    differences: Inexact[Array, "m m"]
    weight: Real[Array, " m"]  # beta_i, see `_sketch.shrunk`; 1 for samples that are not shrunk
    variance: Real[Array, " m"]  # of t_i, from the other probes; half of it for real probes


def published_samples(parts: LeaveOneOut, n: int, resphere: bool) -> Samples:
    """The samples of XTrace and XNysTrace:

        t_i = c_i e_i - lost_i,    D_ij = t_i - t_ij = pair_lost_ij + c_i e_i - c_ij e_ij

    with c_i = (n - m + 1) / ||g_i||^2 and c_ij = (n - m + 2) / ||g_ij||^2 if resphered, else 1.
    """
    m = len(parts.square)
    tested = resphering(n - m + 1.0, parts.square, resphere) * parts.residual
    pair_tested = resphering(n - m + 2.0, parts.pair_square, resphere) * parts.pair_residual
    differences = parts.pair_lost + tested[:, None] - pair_tested
    differences = jnp.where(parts.valid, differences, jnp.zeros_like(differences))
    weight = jnp.ones_like(parts.square)
    energy = mean_of_others(parts.energy, parts.valid)
    return Samples(tested - parts.lost, differences, weight, energy)


def xtrace_weights(omega: Array, factors: RangeFinder, resphere: bool) -> LowRankWeights:
    """U = [Q (I - S S^H / m), c_i g_i / m], V = [Q, g_i], with g_i = omega_i - Q x_i."""
    n, m = omega.shape
    residual = omega - matmul(factors.q, factors.x)
    held_out = jnp.eye(m, dtype=omega.dtype) - matmul(factors.s, adjoint(factors.s)) / m
    factor = resphering(n - m + 1.0, factors.square, resphere)
    u = jnp.concatenate([matmul(factors.q, held_out), residual * (factor / m)], axis=1)
    return LowRankWeights(u.astype(omega.dtype), jnp.concatenate([factors.q, residual], axis=1))


def shift_of(norm: Array, n: int, eps: Array | float) -> Array:
    """The shift nu = eps ||Y||_F / sqrt(n), from the norm of a sketch Y of probes of norm sqrt(n),
    or 1 for the norm 0: A + nu I has no singular factor, and estimates stay unbiased, as nu n is
    known.
    """
    shift = eps / math.sqrt(n) * norm
    return jnp.where(shift > 0, shift, jnp.ones_like(shift))

"""The Nystrom approximation of a semidefinite operator A, what leaving out a probe does to it, and
the multiple of the identity that is best taken off A before.

With probes Omega = P R, P orthonormal (better in floating point than Omega, whose columns are
nearly dependent for k close to n), H = P^H A P = C^H C and F = A P C^{-1}, the approximation is
F F^H. Without probe i it is F (I - q_i q_i^H) F^H, where q_i = cn(C^{-H} s_i), s_i = cn(R^{-H})_i.
The difference between A and that, applied to omega_i, is z_i rho_i / sqrt(d_i), where z_i = F q_i,
d_i = ||C^{-H} s_i||^2 and rho_i = s_i^H r_i.

*Real shifts.* Of a flat tail, t I plus something small, an approximation of rank m misses
(n - m) t. That of A - delta I misses little for delta ~ t, and the trace of delta I is known. For
any delta below the smallest eigenvalue theta of H that does not depend on the probes, all of the
above holds. The products are those of A.

*Complex shifts.* Where the tail is not quite flat, delta should lie in the middle of it; but there
H - delta I is nearly singular. So let z = delta - i eta, with eta about as large as the tail is
wide, and approximate A - delta I by

    B = Re F (H - z I)^{-1} F^H,      F = (A - delta I) P,      Re X = (X + X^H) / 2.

B does not reproduce the products. So what it leaves of the space that the probes other than i span
(a projector Pi_i) is added exactly, and probe i tests the rest:

    t_i = n delta + tr B_i + tr Pi_i (A - delta I - B_i) + c_i g_i^H (A - delta I - B_i) g_i,

g_i = (I - Pi_i) omega_i = rho_i P s_i. For a z that does not depend on the probes this is unbiased.

*All shifts for one decomposition.* Let H = V E V^H, D = E - delta, G = E - z, S' = V^H S, and X =
(I - P P^H) A P V. Then F V = P V D + X. Without probe i the inverse core is
W_i = G^{-1} - b_i a_i^H / d_i, with b_i = G^{-1} s'_i, a_i^H = s'_i^H G^{-1},
d_i = s'_i^H G^{-1} s'_i, so that with the Gram matrix M = X^H X

    tr B_i + tr P^H (A - delta I - B_i) P = tr D + Re tr W_i M,
    s'_i^H (D - Re D W_i D) s'_i = Re 1 / d_i,
    q_i^H q_j = s'_i^H b_j / sqrt(d_i d_j),
    z_i^H z_j = (s_i^H s_j + a_i^H M b_j) / sqrt(d_i d_j).

*Which shift.* For spectra that decay a shift is bad. Several are tried if the smallest eigenvalues
of H are alike. Each probe takes the one for which V_t (`_sketch.shrunk`), which the other probes
estimate, is smallest (`best_samples`). As shifts depend on all probes, there is a small bias.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Complex, Inexact, Real

from .._core.estimate import Evidence, evidence_of, relative, rounding_of, skew_of
from .._core.precision import adjoint, column_dots, matmul
from .._linalg.factorisations import diagonal_of, eigh
from .leave_one_out import (
    LeaveOneOut,
    Pairs,
    Samples,
    Scaled,
    leave_one_out_directions,
    leave_one_out_error,
    pairs_of,
    pairs_of_gram,
    published_samples,
    reciprocal,
    rescale_error,
    scaled,
    shift_of,
    without_zero_pivots,
)

T = TypeVar("T")

#: The real shifts that are tried, as multiples of theta (see above). The last leaves a flat tail to
#: rounding.
MULTIPLES = (0.0, 0.9, 0.99, 0.999, 0.999999)

#: The complex shifts that are tried: for each q the eigenvalue delta of the core that exceeds a
#: q-th part of them (and two at least), and eta a multiple of its distance from the smallest. With
#: the multiple 2, or if it exceeds only one, the bias is half as large again.
PARTS = (8, 3)
LEAST_PART = 2
DAMPING = 2.5

#: Shifts are tried if a quarter of the eigenvalues of the core lie within this multiple of theta.
#: If the spectrum decays fast, samples have heavy tails, and a gain would be an accident of a few.
FLAT = 3.0

#: Fewer probes than these have no say: the bias that comes with the choice falls fast with their
#: number.
FEWEST = 8

#: A shift is taken if the standard error (of the sample of a probe, or of a diagonal's trace) is
#: below this share of that without a shift: less is not worth the bias that comes with the choice.
WORTH = 0.9


class Nystrom(NamedTuple):
    """The pieces of the approximations of A / scale + (nu - delta) I for all delta (A positive
    semidefinite), in the eigenbasis of the core.
    """

    products: Scaled  # A P, as multiplied
    nu: Real[Array, ""]
    p: Inexact[Array, "n m"]
    r: Inexact[Array, "m m"]
    core: Inexact[Array, "m m"]  # P^H A P / scale, as multiplied
    eigenvalues: Real[Array, " m"]  # E, with nu
    vectors: Inexact[Array, "m m"]  # V
    rest_gram: Inexact[Array, "m m"]  # M
    directions: Inexact[Array, "m m"]  # V^H S
    probes: Pairs  # of S
    rho: Real[Array, " m"]
    precision: Real[Array, ""]  # of the products: `eps`, or more where the core says so clearly
    evidence: Evidence  # whether the tag is wrong

    @property
    def theta(self) -> Real[Array, ""]:
        """How far shifts may go: the smallest eigenvalue, without nu, or 0."""
        return jnp.maximum(self.eigenvalues[0] - self.nu, 0)

    @property
    def is_flat(self) -> Bool[Array, ""]:
        """Whether the tail of the spectrum is flat, see `FLAT`."""
        quarter = self.eigenvalues[len(self.eigenvalues) // 4]
        return quarter - self.nu <= FLAT * self.theta

    def rounding(self) -> Real[Array, ""]:
        """The standard error that rounding adds to the trace."""
        # The orthonormal columns of P are shorter than probes.
        n, m = self.p.shape
        return rounding_of_nystrom(math.sqrt(n / m) * self.products.norm, self.precision)

    def estimate(
        self, sign: int | Array, estimated: tuple[Array, Array], plain: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """The value and the standard error for A, where the factors are those of sign * A / scale:
        from the first or, if the tag is wrong, from the second, which needs no tag.
        """
        wrong = self.evidence.fails
        size = self.products.size
        value = jnp.where(wrong, plain[0], estimated[0]).astype(self.p.dtype)
        std_err = jnp.where(wrong, plain[1], estimated[1])
        return sign * size * value, rescale_error(size, std_err)

    def complex_shifts(self) -> Complex[Array, " c"]:
        """The complex shifts that are tried, the first of which is 0."""
        m = len(self.eigenvalues)
        delta = self.eigenvalues[np.array([max(m // part, LEAST_PART) for part in PARTS])]
        eta = jnp.maximum(DAMPING * (delta - self.eigenvalues[0]), self.nu)
        return jnp.concatenate([jnp.zeros_like(delta[:1]), delta - 1j * eta])

    def shifted(self, z: Inexact[Array, ""]) -> "ShiftedNystrom":
        """The approximation with the shift z: real, below the smallest eigenvalue, or complex."""
        hermitian = not jnp.iscomplexobj(z)
        inverse_core = reciprocal(self.eigenvalues - z)
        b = self.directions * inverse_core[:, None]
        gram = matmul(adjoint(self.directions), b)
        # d_i may be large: only its inverse is used.
        inverse = reciprocal(diagonal_of(gram).real if hermitian else diagonal_of(gram))
        return ShiftedNystrom(z.real - self.nu, inverse_core, b, gram, inverse)


def rounding_of_nystrom(size: Array, eps: Array) -> Array:
    """`rounding_of` and the rounding of the core's eigenvalues, as large as the least shift."""
    return rounding_of(size, eps) + 32 * float(jnp.finfo(size.dtype).eps) * size


class ShiftedNystrom(NamedTuple):
    """The approximation of A / scale - shift I. Its numbers are complex if the shift was."""

    shift: Real[Array, ""]  # delta - nu
    inverse_core: Inexact[Array, " m"]  # 1 / (E - z)
    b: Inexact[Array, "m m"]
    gram: Inexact[Array, "m m"]  # s_i^H b_j
    inverse: Inexact[Array, " m"]  # 1 / d_i


def xnystrace_parts(factors: Nystrom, shifted: ShiftedNystrom) -> LeaveOneOut:
    """What leaving out probes does to the approximation of A / scale.

    Without probe i the approximation F F^H loses ||F q_i||^2 of its trace and leaves
    e_i = omega_i^H (A - A_i) omega_i = rho_i^2 / d_i. Since s_j^H r_i = 0, with j held out as well
    the residual changes only by a factor: with gamma' of the pair (q_i, q_j), gamma of (s_i, s_j),

        e_ij = e_i / (1 - |gamma'_ij|^2),    ||g_ij||^2 = rho_i^2 / (1 - |gamma_ij|^2),
        pair_lost_ij = ||F u'_ij||^2.

    With a complex shift, the real parts of the same expressions, with gamma'_ij gamma'_ji for
    |gamma'_ij|^2: what is lost is Re tr K^{-1} (L + Gamma), and what is left on the plane
    Re Gamma K^{-1} Gamma, with the 2 x 2 matrices K = S_ij^H G^{-1} S_ij,
    L = S_ij^H G^{-1} M G^{-1} S_ij and Gamma = S_ij^H S_ij of the pair. With K^{-1} e_1 = h + i k,
    h and k from the Hermitian parts of K^{-1}, A - B_ij maps g_ij to the products with
    rho_i (Re G^{-1} S_ij h - Im G^{-1} S_ij k), and the squared norm beyond the other probes is
    rho_i^2 (h^H R_1 h + k^H R_2 k + 2 Re h^H R_3 k), with R_1, R_2 and R_3 as below.
    """
    n, m = factors.p.shape
    inverse = shifted.inverse
    probes = factors.probes
    # The sum of the eigenvalues is the trace of the core, which has smaller rounding errors.
    base = jnp.trace(factors.core).real + float(n - m) * shifted.shift
    base = base + jnp.sum(diagonal_of(factors.rest_gram).real * shifted.inverse_core.real)
    square = factors.rho**2
    real = shifted.inverse_core.real[:, None] * factors.directions
    r_1 = probes.gamma + matmul(adjoint(real), matmul(factors.rest_gram, real))
    # Column j is divided by d_j, in place of the roots of d_i and d_j.
    pairs = pairs_of_gram(shifted.gram * inverse, hermitian=False)  # gamma'_ij, of (q_i, q_j)
    first = inverse[:, None] * reciprocal(pairs.square)  # K^{-1} e_1 = [first, second]
    second = -pairs.gamma.T * inverse * reciprocal(pairs.square)
    pair_residual = square[:, None] * first.real
    pair_square = square[:, None] / probes.square
    h = first.real, (second + adjoint(second)) / 2
    lengths = r_1
    mapped = _plane_forms(h, r_1, h)
    if jnp.iscomplexobj(inverse):
        imag = shifted.inverse_core.imag[:, None] * factors.directions
        gram_imag = matmul(factors.rest_gram, imag)
        r_2 = matmul(adjoint(imag), gram_imag)
        r_3 = matmul(adjoint(real), gram_imag)
        k = -first.imag, (second - adjoint(second)) * 0.5j
        lengths = r_1 - r_2 + 1j * (r_3 + adjoint(r_3))
        mapped = mapped + _plane_forms(k, r_2, k) + 2 * _plane_forms(h, r_3, k)
    lengths = lengths * inverse  # z_i^H z_j
    return LeaveOneOut(
        base=base,
        lost=diagonal_of(lengths).real,
        residual=square * inverse.real,
        square=square,
        pair_lost=pairs.forms(lengths).real,
        pair_residual=pair_residual,
        pair_square=pair_square,
        energy=square[:, None] * mapped.real - pair_residual**2 / pair_square,
        valid=pairs.valid & probes.valid,
    )


def _plane_forms(
    a: tuple[Array, Array], r: Inexact[Array, "m m"], b: tuple[Array, Array]
) -> Inexact[Array, "m m"]:
    """a_ij^H R_ij b_ij with the 2 x 2 blocks R_ij of the rows and columns i and j of R."""
    d = diagonal_of(r)
    top = jnp.conj(a[0]) * (d[:, None] * b[0] + r * b[1])
    return top + jnp.conj(a[1]) * (r.T * b[0] + d * b[1])


def _tried(factors: Nystrom, shifts: Inexact[Array, " c"], trial: Callable[[LeaveOneOut], T]) -> T:
    """The results of `trial` with each of the shifts. If no tail of the spectrum is flat, all
    numbers are inf but those of the first shift, 0.
    """

    def attempt(z):
        return trial(xnystrace_parts(factors, factors.shifted(z)))

    def skip(z):
        inf = partial(jnp.full_like, fill_value=jnp.inf)
        return jtu.tree_map(inf, jax.eval_shape(attempt, z))

    if len(factors.eigenvalues) < FEWEST:
        shifts = shifts[:1]
    return lax.map(lambda z: lax.cond(factors.is_flat | (z == 0), attempt, skip, z), shifts)


def _best(variance: Real[Array, "..."]) -> Array:
    """The shift (along the first axis) with the least variance, or the first for a small gain."""
    best = jnp.argmin(variance, axis=0)
    return jnp.where(jnp.min(variance, axis=0) < WORTH**2 * variance[0], best, 0)


def best_samples(factors: Nystrom, samples_of: Callable[[LeaveOneOut], Samples]) -> Samples:
    """The samples, `base` included, each with the complex shift that the other probes find best."""

    def trial(parts):
        samples = samples_of(parts)
        return samples._replace(values=parts.base + samples.values)

    samples = _tried(factors, factors.complex_shifts(), trial)
    best = _best(samples.variance)
    return jtu.tree_map(lambda x: x[best, np.arange(x.shape[1])], samples)


def best_shift(factors: Nystrom) -> Real[Array, ""]:
    """The real shift with the smallest standard error of the trace."""
    shifts = jnp.asarray(MULTIPLES, factors.nu.dtype) * factors.theta  # the first is 0

    def variance(parts):
        samples = published_samples(parts, len(factors.p), resphere=False)
        return leave_one_out_error(samples.values, samples.differences, factors.rounding()) ** 2

    return shifts[_best(_tried(factors, shifts, variance))]


def skew_of_core(
    core: Inexact[Array, "m m"], norm: Real[Array, ""], n: int, eps: float
) -> Real[Array, ""]:
    """How far a core Omega^H A Omega shows that A^H != A, see `skew_of`; `norm` is ||A Omega||_F.

    For A = S + X with X^H = -X the core differs from its adjoint by 2 Omega^H X Omega, and without
    X by rounding alone: at most 2 eps ||Y||_F with Y = A Omega, ||Omega|| = 1. An X below the limit
    does little harm: the error of the approximation is ||X P C^{-1}||_F^2 <= ||X P||_F^2 / nu.
    """
    return skew_of(jnp.linalg.norm(core - adjoint(core)), norm, n, eps)


def nystrom(
    p: Inexact[Array, "n m"], r: Inexact[Array, "m m"], products: Inexact[Array, "n m"], eps: float
) -> Nystrom:
    """The pieces of the Nystrom approximations, in `8 n m^2` operations, from a basis P of the
    probes P R, and its products with +A or -A, whichever is positive.
    """
    r = without_zero_pivots(r)
    s = leave_one_out_directions(r)
    multiplied = scaled(products)
    n, m = p.shape
    core = matmul(adjoint(p), multiplied.numbers)
    # Products with the error of a solve are those of A + E. If E is like a random matrix,
    # P^H E P - P^H E^H P has the norm sqrt(2 m / n) ||E P||_F.
    asymmetry = relative(jnp.linalg.norm(core - adjoint(core)), multiplied.norm)
    seen = math.sqrt(n / (2 * m)) * asymmetry
    precision = jnp.where(seen > 16 * eps, seen, eps)
    # shift_of expects probes of norm sqrt(n); the columns of P have norm 1.
    least = shift_of(math.sqrt(n) * multiplied.norm, n, precision)
    # Below 1e-2, what is not Hermitian counts as the error of solves. (Else see `skew_of`.)
    skew = precision / max(1e-2, 100 * math.sqrt(n) * eps)
    limit = 100 * math.sqrt(n) * least
    eigenvalues, vectors = eigh((core + adjoint(core)) / 2)
    lowest = eigenvalues[0]
    # With nu the core is positive definite. To truncate an eigenvalue would bias the estimate.
    nu = jnp.maximum(least, -2 * lowest)

    # X^T = V^T (A P - P H)^T: the long vectors are stored as rows.
    rows = matmul(vectors.T, multiplied.numbers.T - matmul(core.T, p.T))
    return Nystrom(
        products=multiplied,
        nu=nu,
        p=p,
        r=r,
        core=core,
        eigenvalues=eigenvalues + nu,
        vectors=vectors,
        rest_gram=matmul(jnp.conj(rows), rows.T),
        directions=matmul(adjoint(vectors), s),
        probes=pairs_of(s),
        rho=jnp.abs(column_dots(s, r)),
        precision=precision,
        # Its eigenvalues are Rayleigh quotients: one below -limit is no semidefinite operator's.
        evidence=evidence_of(multiplied.square, skew=skew, negative=-lowest / limit),
    )

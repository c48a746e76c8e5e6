r"""Leave-one-out algebra, each piece written once.

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

The customary s^2 / m leaves the covariance out. Its root is too small by up to 4 times for
XNysTrace on decaying spectra, and for XTrace at the edge of a spectrum.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.estimate import safe_norm, scale_of, status_of
from .._core.precision import matmul as matmul
from .._linalg.factorisations import diagonal_of, divide_by_upper, qr
from .._operators.block_operator import BlockOperator
from .._probes.samplers import AbstractSampler
from .weights import LowRankWeights


def adjoint(a: Inexact[Array, "a b"]) -> Inexact[Array, "b a"]:
    """The conjugate transpose."""
    return jnp.conj(a.T)


def column_dots(a: Inexact[Array, "n m"], b: Inexact[Array, "n m"]) -> Inexact[Array, " m"]:
    """The inner products a_i^H b_i of corresponding columns."""
    return jnp.sum(jnp.conj(a) * b, axis=0)


def square_norms(a: Inexact[Array, "n m"]) -> Real[Array, " m"]:
    """The squared norms of the columns."""
    return jnp.sum(_squares(a), axis=0)


def _squares(a: Inexact[Array, "n m"]) -> Real[Array, "n m"]:
    return jnp.square(a.real) + jnp.square(a.imag) if jnp.iscomplexobj(a) else jnp.square(a)


def frobenius_norm_of(sketch: Inexact[Array, "n m"]) -> Real[Array, ""]:
    """An estimate of ||A||_F, whose square is unbiased: the root mean square of the norms of the
    columns of a sketch, or of its triangular factor R.
    """
    return jnp.sqrt(jnp.mean(square_norms(sketch)))


def quadratic_forms(h, x):
    """The numbers x_i^H H x_i."""
    return column_dots(x, matmul(h, x))


def resphering(dimension: float | Array, square: Array, resphere: bool) -> Array:
    """The factors c = dimension / ||g||^2 for residual probes g in a space of this dimension, or 1
    without resphering. (The dimension is a float, as it need not fit into an int32.)
    """
    return dimension / square if resphere else jnp.ones_like(square)


def rescale_error(size: Array, std_err: Array) -> Array:
    """`size * std_err`. For a sketch that is zero it is 0, or inf if the error is unknown (inf)."""
    return jnp.where(size > 0, size * std_err, jnp.where(jnp.isinf(std_err), std_err, 0))


def without_zero_pivots(r: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """R, the triangular factor of probes or of a sketch of size 1, with no zero on its diagonal.

    Probes of few distinct values can coincide, and a probe in the span of those before it has
    R_jj = 0. Any tiny number in the place of this zero will do. The direction s_j is then that of
    the arbitrary column q_j, and this is right: if one of two equal probes is held out, nothing
    else leaves the range.
    """
    least = float(jnp.finfo(r.dtype).eps) ** 2
    zero = jnp.eye(r.shape[0], dtype=bool) & (jnp.abs(r) < least)
    return jnp.where(zero, jnp.asarray(least, r.dtype), r)


def leave_one_out_directions(r: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """`cn(R^{-H})` for an upper triangular, non-singular R."""
    inverse = divide_by_upper(jnp.eye(r.shape[0], dtype=r.dtype), r)
    return adjoint(inverse / safe_norm(inverse)[:, None])


class Pairs(NamedTuple):
    """The geometry of the planes (s_i, s_j), as m x m arrays over (i, j)."""

    gamma: Inexact[Array, "m m"]
    square: Real[Array, "m m"]  # nu_ij^2, or 1 where there is no plane
    valid: Bool[Array, "m m"]  # i != j, and s_i, s_j not parallel to rounding

    def forms(self, k: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
        """u_ij^H H u_ij from K = S^H H S."""
        gamma, diagonal = self.gamma, diagonal_of(k)
        cross = gamma * k.T + jnp.conj(gamma) * k
        expanded = diagonal[None, :] - cross + jnp.abs(gamma) ** 2 * diagonal[:, None]
        return expanded / self.square

    def components(self, dots: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
        """u_ij^H y_i from the inner products `dots[j, i] = s_j^H y_i`."""
        own = diagonal_of(dots)[:, None]
        return (dots.T - jnp.conj(self.gamma) * own) / jnp.sqrt(self.square)


def pairs_of(s: Inexact[Array, "m m"]) -> Pairs:
    """The planes spanned by pairs of the unit columns of S."""
    m = s.shape[0]
    gamma = matmul(adjoint(s), s)
    square = 1 - jnp.abs(gamma) ** 2
    valid = (square > 64 * m * jnp.finfo(s.dtype).eps) & ~jnp.eye(m, dtype=bool)
    return Pairs(gamma, jnp.where(valid, square, jnp.ones_like(square)), valid)


def leave_one_out_error(samples: Array, differences: Array, rounding: Array) -> Array:
    """The standard error of the mean of leave-one-out samples t_i.

    **Arguments:**

    - `samples`: the m values t_i.
    - `differences`: the m x m values D_ij = t_i - t_ij, zero where i = j.
    - `rounding`: the standard error that rounding adds to the mean. If the samples agree to within
        `sqrt(m) * rounding`, then m - 1 probes already capture the operator. The D_ij, which hold
        two probes out, then say nothing about the error, and are left out.

    **Returns:**

    The root of `s^2 / m + max(0, mean_{i != j} Re D_ij conj(D_ji)) + rounding^2`; inf for a single
    sample.
    """
    m = samples.shape[0]
    real = samples.real.dtype
    if m == 1:
        return jnp.full((), jnp.inf, real)
    variance = jnp.var(samples, ddof=1)
    covariance = jnp.sum((jnp.conj(differences.T) * differences).real) / (m * (m - 1))
    covariance = jnp.where(variance / m > rounding**2, jnp.maximum(covariance, 0), 0)
    return jnp.sqrt(variance / m + covariance + rounding**2).astype(real)


class Scaled(NamedTuple):
    """Products as a scale times numbers of size 1. The norm, the size and the status all follow
    from one sum.
    """

    numbers: Inexact[Array, "n m"]
    scale: Real[Array, ""]
    square: Real[Array, ""]  # the squared norm of the numbers; 0 only if all of them are 0

    @property
    def norm(self) -> Real[Array, ""]:
        """The norm of the numbers."""
        return jnp.sqrt(self.square)

    @property
    def size(self) -> Real[Array, ""]:
        """The factor from results for A / scale to results for A. It is 0 if all products vanish,
        so that the result is then 0 rather than the rounding error of the shift.
        """
        return jnp.where(self.square != 0, self.scale, jnp.zeros_like(self.scale))

    @property
    def status(self) -> Int[Array, ""]:
        """NONFINITE if the products hold NaN or inf."""
        return status_of(self.square)


def scaled(products: Inexact[Array, "n m"]) -> Scaled:
    """These products, scaled."""
    scale = scale_of(products)
    numbers = products / scale
    return Scaled(numbers, scale, jnp.sum(_squares(numbers)))


class Sketch(NamedTuple):
    """The products with the probes, and the sketch of A / scale + nu I made from them."""

    products: Scaled
    nu: Real[Array, ""]
    shifted: Inexact[Array, "n m"]


def sketch_of(block: BlockOperator, omega: Inexact[Array, "n m"]) -> Sketch:
    """Multiply probes (of norm sqrt(n)), scale, and shift."""
    products = scaled(block.mm(omega))
    nu = shift_of(products.norm, block.n, block.eps)
    return Sketch(products, nu, products.numbers + nu * omega)


def append_sketch(
    state: Any, sampler: AbstractSampler, key: PRNGKeyArray, block: BlockOperator, m: int
) -> tuple[Array, Array, dict[str, Array]]:
    """Append m probes to the QR factorisation of a sketch of A / scale + nu I.

    **Arguments:**

    - `state`: None, or a NamedTuple with the factors `omega`, `q`, `r` so far, the `scale` and `nu`
        of the first probes, `size` (the scale, or 0 if all products vanish), and `status`.
    - `sampler`: the distribution of the probes.
    - `key`: the random key of the new probes.
    - `block`: the operator.
    - `m`: the number of new probes.

    **Returns:**

    The basis so far (without columns if `state` is None), its new columns, and a dictionary of the
    new values of all these fields of the state.
    """
    omega = sampler.probes(key, block.n, m, block.dtype)
    if state is None:
        sketch = sketch_of(block, omega)
        products, shifted, status = sketch.products, sketch.shifted, sketch.products.status
        before, r = shifted[:, :0], jnp.zeros((0, 0), shifted.dtype)
        constants = {"scale": products.scale, "nu": sketch.nu, "size": products.size}
        probes = omega
    else:
        products = block.mm(omega)
        shifted = products / state.scale + state.nu * omega
        status = jnp.maximum(state.status, status_of(products))
        before, r = state.q, state.r
        constants = {"scale": state.scale, "nu": state.nu, "size": state.size}
        probes = jnp.concatenate([state.omega, omega], axis=1)
    q, c, r_new = append_basis(before, shifted)
    basis = jnp.concatenate([before, q], axis=1)
    r = extend_factor(r, c, r_new)
    return before, q, {"omega": probes, "q": basis, "r": r, "status": status, **constants}


def empty_state(kind: Callable[..., Any], sketch: Array, keeps: bool) -> Any:
    """A state of Hutch++ or Diag++ without probes: four blocks of vectors, two blocks that have
    rows only if `keeps` is set, the scale of the first sketch, and the status.
    """
    nothing = sketch[:, :0]
    kept = nothing if keeps else nothing[:0]
    return kind(nothing, nothing, nothing, nothing, kept, kept, scale_of(sketch), status_of())


def products_of_sketch(state: Any) -> Array:
    """A Omega, from a state as `append_sketch` describes it."""
    return state.scale * (matmul(state.q, state.r) - state.nu * state.omega)


class RangeFinder(NamedTuple):
    """The factors of a sketch and the residuals of its probes."""

    q: Inexact[Array, "n m"]
    r: Inexact[Array, "m m"]
    s: Inexact[Array, "m m"]  # the leave-one-out directions
    w: Inexact[Array, "m m"]  # Q^H Omega
    x: Inexact[Array, "m m"]  # x_i = (I - s_i s_i^H) w_i: g_i = omega_i - Q x_i
    square: Real[Array, " m"]  # ||g_i||^2
    factor: Real[Array, " m"]  # c_i: (n - m + 1) / ||g_i||^2 with resphering, 1 without


def range_finder(omega: Array, sketch: Array, resphere: bool) -> RangeFinder:
    """Factorise a (shifted, hence full-rank) sketch.

    **Arguments:**

    - `omega`: the probes.
    - `sketch`: their products.
    - `resphere`: whether to renormalise the residual probes.

    **Returns:**

    A `RangeFinder`. Cost: one QR factorisation (4 n m^2 operations) and 2 n m^2 more.
    """
    q, r = qr(sketch)
    return range_finder_of(omega, q, r, matmul(adjoint(q), omega), resphere)


def range_finder_of(omega: Array, q: Array, r: Array, w: Array, resphere: bool) -> RangeFinder:
    """A `RangeFinder` from the factors Q and R of the sketch, and `w = Q^H Omega`."""
    n, m = omega.shape
    r = without_zero_pivots(r)
    s = leave_one_out_directions(r)
    x = w - s * column_dots(s, w)
    norms = square_norms(omega)
    square = jnp.maximum(norms - square_norms(x), jnp.finfo(norms.dtype).eps * norms)
    return RangeFinder(q, r, s, w, x, square, resphering(float(n - m + 1), square, resphere))


def append_basis(q: Array, new: Array) -> tuple[Array, Array, Array]:
    """Append columns to an orthonormal basis: `new = q c + q_new r_new`.

    If a new column nearly lies in the span of q, what is left after projection is mostly rounding
    errors, and not orthogonal to q. So the projection and the factorisation are made twice.

    **Arguments:**

    - `q`: the basis, of any number of columns.
    - `new`: the columns to append.

    **Returns:**

    `(q_new, c, r_new)`. Cost: two QR factorisations and four products with `q`.
    """
    if q.shape[1] == 0:
        q_new, r_new = qr(new)
        return q_new, jnp.zeros((0, new.shape[1]), new.dtype), r_new
    c = matmul(adjoint(q), new)
    first, r = qr(new - matmul(q, c))
    again = matmul(adjoint(q), first)
    q_new, second = qr(first - matmul(q, again))
    return q_new, c + matmul(again, r), matmul(second, r)


def extend_factor(r: Array, c: Array, r_new: Array) -> Array:
    """The triangular factor `[[r, c], [0, r_new]]`."""
    below = jnp.zeros((r_new.shape[0], r.shape[1]), r.dtype)
    return jnp.block([[r, c], [below, r_new]]) if r.size else r_new


def extend_dots(dots: Array, left: Array, left_new: Array, right: Array, right_new: Array) -> Array:
    """`[left, left_new]^H [right, right_new]` from `dots = left^H right`."""
    if dots.size == 0:
        return matmul(adjoint(left_new), right_new)
    above = jnp.concatenate([dots, matmul(adjoint(left), right_new)], axis=1)
    below = matmul(adjoint(left_new), jnp.concatenate([right, right_new], axis=1))
    return jnp.concatenate([above, below])


def xtrace_weights(omega: Array, factors: RangeFinder) -> LowRankWeights:
    """U = [Q (I - S S^H / m), c_i g_i / m], V = [Q, g_i], with g_i = omega_i - Q x_i."""
    m = omega.shape[1]
    residual = omega - matmul(factors.q, factors.x)
    held_out = jnp.eye(m, dtype=omega.dtype) - matmul(factors.s, adjoint(factors.s)) / m
    u = jnp.concatenate([matmul(factors.q, held_out), residual * (factors.factor / m)], axis=1)
    return LowRankWeights(u.astype(omega.dtype), jnp.concatenate([factors.q, residual], axis=1))


def shift_of(norm: Array, n: int, eps: float) -> Array:
    """The shift nu = eps ||Y||_F / sqrt(n), from the norm of a sketch Y of probes of norm sqrt(n).
    It is 1 if the norm is 0.

    With A + nu I in place of A no factor is singular, and estimates remain unbiased: the trace of
    the shift, nu n, is known and subtracted.
    """
    shift = eps / math.sqrt(n) * norm
    return jnp.where(shift > 0, shift, jnp.ones_like(shift))

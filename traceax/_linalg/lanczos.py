r"""Lanczos' recurrence for a block of probes, and the Gauss quadrature that it gives.

For a Hermitian A and a start vector z, q steps give an orthonormal basis V of the Krylov space of z
and T = V^H A V, tridiagonal. With T = S Theta S^T and the weights w_j = S_1j^2,

    z^H f(A) z  ~  ||z||^2 sum_j w_j f(theta_j),

which is exact for polynomials f of degree 2q - 1. (G. H. Golub, G. Meurant, *Matrices, moments and
quadrature*, 1994.)

Every new vector is made orthogonal to all earlier ones, twice. Otherwise copies of converged Ritz
values would appear, and neither the weights nor a derivative could be trusted.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Real

from .._core.estimate import Evidence, evidence_of, rounding_unit, scale_of, skew_of
from .._core.precision import einsum
from .factorisations import eigh, one_by_one


class Lanczos(NamedTuple):
    """The Krylov spaces of p probes after q steps.

    If the space of a probe is exhausted after m < q steps, `beta[m-1]` is exactly 0, and so are
    `basis`, `alpha` and `beta` of all later steps.
    """

    basis: Inexact[Array, "q n p"]  # orthonormal for each probe; zero once a space is exhausted
    alpha: Real[Array, "q p"]
    beta: Real[Array, "q p"]  # beta[j] couples steps j and j + 1; beta[q-1]: norm of the residual
    size: Real[Array, " p"]  # the largest |alpha| or beta, before any beta is set to 0
    skew: Real[Array, " p"] | None = None  # what A^H = A would make 0: see `lanczos`

    @property
    def residual(self) -> Real[Array, " p"]:
        """The norm of the residual: the beta of the last step."""
        return self.beta[-1]

    @property
    def exhausted(self) -> Bool[Array, " p"]:
        """Which of the spaces are exhausted."""
        return self.residual == 0

    @property
    def unit(self) -> Real[Array, "p 1"]:
        """A positive number that no |alpha| and no beta exceeds, if all are finite."""
        return scale_of(self.size[:, None], axis=1)

    @property
    def evidence(self) -> Evidence:
        """If any of the numbers is NaN or inf, the largest is."""
        return evidence_of(self.size)

    def hermitian_evidence(self, eps: float) -> Evidence:
        """The evidence, that A^H != A included. `eps` is the relative precision of a product."""
        assert self.skew is not None
        n = self.basis.shape[1]
        return evidence_of(self.size, skew=skew_of(jnp.max(self.skew), jnp.max(self.size), n, eps))


def largest_ritz_value(krylov: Lanczos) -> Real[Array, ""]:
    """The largest Ritz value to within a factor of two, without the eigenvalues of T."""
    return jnp.max(krylov.alpha + krylov.beta)


def recurrences(
    mm: Callable[[Array], Array],
    start: Inexact[Array, "n p"],
    basis: Array,
    num_steps: int,
    eps: float | None,
    put: Callable[[Array, Array, Array], Array],
    outside: Callable[[Array, Array, Array], tuple[Array, Array]],
) -> Lanczos:
    """What `lanczos` and `arnoldi` share. They differ in the layout of the basis:
    `put` writes a vector of every probe into it, and `outside` makes vectors orthogonal to it,
    twice, and returns coefficients, too: in Lanczos' recurrence of those that were written last,
    in Arnoldi's of all. They are the alpha of the result.
    """
    p = start.shape[1]
    real = jnp.finfo(start.dtype).dtype
    tolerance = rounding_unit(float(jnp.finfo(real).eps) if eps is None else eps, real)

    norms = jnp.linalg.norm(start.T, axis=1)
    first = start.T / jnp.where(norms > 0, norms, 1).astype(start.dtype)[:, None]

    def step(j, carry):
        basis, v, size, scale, alpha, beta = carry
        basis = put(basis, v, j)
        w = mm(v.T)
        # The first product fixes a unit, in which no square over- or underflows.
        scale = jnp.where(j == 0, scale_of(w), scale)
        w, along = outside(basis, (w / scale).T, j)
        norm = jnp.linalg.norm(w, axis=1)
        largest = jnp.max(jnp.abs(along).reshape(p, -1), axis=1)
        size = jnp.maximum(size, jnp.maximum(largest, norm))
        exhausted = norm <= tolerance * size
        norm = jnp.where(exhausted, 0, norm)
        unit = jnp.where(exhausted, 1, norm).astype(w.dtype)[:, None]
        v = jnp.where(exhausted[:, None], 0, w / unit)
        alpha = lax.dynamic_update_index_in_dim(alpha, along, j, 0)
        beta = lax.dynamic_update_index_in_dim(beta, norm, j, 0)
        return basis, v, size, scale, alpha, beta

    along = jax.eval_shape(lambda: outside(basis, first, jnp.uint32(0))[1])
    alpha, beta = jnp.zeros((num_steps, *along.shape), along.dtype), jnp.zeros((num_steps, p), real)
    carry = (basis, first, jnp.zeros((p,), real), jnp.ones((), real), alpha, beta)
    # Unsigned: an index that may be negative is one more thing to compile.
    ends = jnp.uint32(0), jnp.uint32(num_steps)
    basis, _, size, scale, alpha, beta = lax.fori_loop(*ends, step, carry)
    return Lanczos(basis, alpha * scale, beta * scale, size * scale)


def lanczos(
    mm: Callable[[Inexact[Array, "n p"]], Inexact[Array, "n p"]],
    start: Inexact[Array, "n p"],
    num_steps: int,
    eps: float | None = None,
) -> Lanczos:
    """Advance the recurrences of all probes together, one block product per step.

    A space counts as exhausted when the part of a product outside of it is no larger than the
    rounding errors of the product. (A few steps too many do no harm: the directions that rounding
    errors then choose are orthogonal to the others, and Ritz values remain within the spectrum.)

    The numbers v_i^H A v_j, i <= j, are computed to make A v_j orthogonal to the space. If A^H = A,
    that of i = j is real, that of i = j - 1 is beta[j-1], and the others are 0. `skew` is the norm
    of what differs from this.

    Cost: `num_steps` products with a block of p vectors, `n p num_steps` numbers, and
    `8 n p num_steps^2` operations.

    **Arguments:**

    - `mm`: a Hermitian operator, as a function that multiplies blocks.
    - `start`: the probes z. (Their norms are computed without scaling, and may overflow.)
    - `num_steps`: the number q of steps, `1 <= q <= n`.
    - `eps`: the relative precision of a product, by default that of the dtype.

    **Returns:**

    A `Lanczos`.
    """
    n, p = start.shape

    def put(basis, v, j):
        return lax.dynamic_update_index_in_dim(basis, v, j, axis=1)

    place = jnp.arange(num_steps, dtype=jnp.uint32)

    def outside(basis, w, j):
        along = jnp.zeros((p, num_steps), w.dtype)
        for _ in range(2):
            coefficients = einsum("pjn,pn->pj", jnp.conj(basis), w)
            w = w - einsum("pjn,pj->pn", basis, coefficients)
            along = along + coefficients
        last, before = (jnp.where(at == j, along.real, 0) for at in (place, place + 1))
        others = jnp.linalg.norm(along - last - before, axis=1)
        return w, jnp.stack([jnp.sum(last, axis=1), jnp.sum(before, axis=1), others], axis=1)

    # Probes come first, so that products with their bases are those of matrices and vectors.
    basis = jnp.zeros((p, num_steps, n), start.dtype)
    krylov = recurrences(mm, start, basis, num_steps, eps, put, outside)
    alpha, before, others = jnp.moveaxis(krylov.alpha, 2, 0)
    apart = (before[1:] - krylov.beta[:-1], others)
    skew = jnp.sqrt(sum(jnp.sum(jnp.square(x / krylov.unit.T), axis=0) for x in apart))
    return krylov._replace(
        basis=jnp.transpose(krylov.basis, (1, 2, 0)), alpha=alpha, skew=skew * krylov.unit[:, 0]
    )


def quadrature(
    krylov: Lanczos,
) -> tuple[Real[Array, "p q"], Real[Array, "p q"], Real[Array, "p q q"]]:
    """The nodes theta, the weights w and the eigenvectors S of every probe's T.

    If a space is exhausted after m steps, only the first m nodes count. The others repeat the first
    node, with weights and eigenvectors that are exactly 0.

    **Arguments:**

    - `krylov`: the recurrences.

    **Returns:**

    A 3-tuple of the nodes, of shape `(p, q)`, ascending as far as they count; of their weights,
    which add up to 1; and of T's eigenvectors, the columns of arrays of shape `(p, q, q)`. The
    caller must check that the recurrences are finite.
    """
    alpha, beta = krylov.alpha.T, krylov.beta.T
    scale = krylov.unit
    # Not `beta > 0`: NaN must not look like the end of a space.
    counts = jnp.pad(beta[:, :-1] != 0, ((0, 0), (1, 0)), constant_values=True)
    # |theta| <= 3 in this unit. A 4 stands for what does not count: it comes last, and by itself.
    diagonal = jnp.where(counts, alpha / scale, 4)
    off = jnp.where(jnp.roll(counts, -1, axis=1), beta / scale, 0)
    q = alpha.shape[1]
    place = jnp.arange(q)
    row, column = place[:, None], place
    t = jnp.where(row == column, diagonal[:, :, None], 0)
    t = jnp.where(row + 1 == column, off[:, :, None], t)
    t = jnp.where(row == column + 1, off[:, None, :], t)

    nodes, vectors = jax.vmap(one_by_one(eigh))(t)
    inside = nodes < 3.5
    vectors = jnp.where(inside[:, None, :], vectors, 0)
    nodes = jnp.where(inside, nodes, nodes[:, :1]) * scale
    return nodes, jnp.square(vectors[:, 0, :]), vectors


def positive_quadrature(
    krylov: Lanczos,
) -> tuple[Real[Array, "p q"], Real[Array, "p q"], Real[Array, "p q q"]]:
    """The quadrature of a positive definite operator. (Tiny numbers replace nodes that are not
    positive, to avoid NaN. The caller must report such nodes.)

    **Arguments:**

    - `krylov`: as for `quadrature`.
    """
    nodes, weights, vectors = quadrature(krylov)
    tiny = float(jnp.finfo(nodes.dtype).eps) ** 2 * krylov.unit
    return jnp.maximum(nodes, tiny), weights, vectors

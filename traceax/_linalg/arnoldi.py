r"""Arnoldi's recurrence for a block of probes: Krylov spaces, one for each.

For any A and a start vector z, q steps give an orthonormal basis V of the Krylov space of z and
H = V^H A V, upper Hessenberg, with

    f(A) z ~ ||z|| V f(H) e_1,      z^H f(A) z ~ ||z||^2 e_1^T f(H) e_1,

exact for polynomials f of degree q - 1 and q. (Y. Saad, *Analysis of some Krylov subspace
approximations to the matrix exponential operator*, 1992, for the exponential.) Every new vector is
made orthogonal to all earlier ones, twice: otherwise copies of converged Ritz values would appear,
and neither quadrature weights nor a derivative could be trusted.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._core.control_flow import if_any
from .._core.estimate import rounding_unit, scale_of
from .._core.precision import einsum

#: An operator, as a function that multiplies blocks.
Product = Callable[[Inexact[Array, "n p"]], Inexact[Array, "n p"]]


class Arnoldi(NamedTuple):
    """The Krylov spaces of p probes after q steps.

    If the space of a probe is exhausted after m < q steps, and nothing fresh continues it,
    `hessenberg[m, m-1]` is exactly 0, and so are all vectors, and all columns of `hessenberg`, of
    later steps.
    """

    basis: Inexact[Array, "p q n"]  # orthonormal for each probe, as rows
    hessenberg: Inexact[Array, "p q q"]
    following: Inexact[Array, "p n"]  # the next vectors; zero once a space is exhausted
    # The norm of what the last product has outside of the space: 0 once a space is exhausted.
    residual: Real[Array, " p"]
    size: Real[Array, " p"]  # the largest number in H, before any is set to 0
    scale: Real[Array, ""]  # the unit of the numbers, while the recurrence goes on

    @property
    def unit(self) -> Real[Array, "p 1 1"]:
        """A positive number that no number in H exceeds, if all are finite."""
        return scale_of(self.size[:, None, None], axis=1)

    def ended_after(self, steps: int) -> Inexact[Array, "p q q"]:
        """H / `unit` after so many steps. Rows and columns of later steps, and after the end of a
        space, have H_11 on the diagonal and 0 elsewhere: a separate block, whose eigenvalue is
        within the field of values and has no part in e_1.
        """
        q = self.hessenberg.shape[1]
        subdiagonal = jnp.diagonal(self.hessenberg, -1, axis1=1, axis2=2)
        # Not `subdiagonal > 0`: NaN must not look like the end of a space.
        goes_on = jnp.pad(subdiagonal != 0, ((0, 0), (1, 0)), constant_values=True)
        used = jnp.cumprod(goes_on, axis=1, dtype=bool) & (jnp.arange(q) < steps)
        h = self.hessenberg / self.unit
        filled = jnp.where(used[:, :, None], 0, h[:, :1, :1]) * jnp.eye(q, dtype=h.dtype)
        return jnp.where(used[:, :, None] & used[:, None, :], h, filled)


def begun(start: Inexact[Array, "n p"], num_steps: int) -> Arnoldi:
    """The recurrences before their first step, with room for `num_steps`."""
    n, p = start.shape
    real = jnp.finfo(start.dtype).dtype
    norms = jnp.linalg.norm(start.T, axis=1)[:, None]
    zeros = jnp.zeros(p, real)
    return Arnoldi(
        basis=jnp.zeros((p, num_steps, n), start.dtype),
        hessenberg=jnp.zeros((p, num_steps, num_steps), start.dtype),
        following=start.T / jnp.where(norms > 0, norms, 1).astype(start.dtype),
        residual=zeros,
        size=zeros,
        scale=jnp.ones((), real),
    )


def orthogonal_part(
    basis: Inexact[Array, "p q n"], w: Inexact[Array, "p n"]
) -> tuple[Inexact[Array, "p n"], Inexact[Array, "p q"]]:
    """The part of each vector orthogonal to its basis, by two passes, and the coefficients."""
    column = jnp.zeros(basis.shape[:2], w.dtype)
    for _ in range(2):
        coefficients = einsum("pjn,pn->pj", jnp.conj(basis), w)
        w = w - einsum("pjn,pj->pn", basis, coefficients)
        column = column + coefficients
    return w, column


def with_product(krylov: Arnoldi, j: Array, products: Inexact[Array, "n p"], eps: float) -> Arnoldi:
    """The recurrences after step j, from the products with the vectors `following`."""
    basis = lax.dynamic_update_index_in_dim(krylov.basis, krylov.following, j, axis=1)
    # The first product fixes a unit, in which no square over- or underflows.
    scale = jnp.where(j == 0, scale_of(products), krylov.scale)
    w, column = orthogonal_part(basis, (products / scale).T)
    norm = jnp.linalg.norm(w, axis=1)
    largest = jnp.maximum(jnp.max(jnp.abs(column), axis=1), norm)
    size = jnp.maximum(krylov.size, largest)
    exhausted = norm <= rounding_unit(eps, krylov.size.dtype) * size
    norm = jnp.where(exhausted, 0, norm)
    place = jnp.arange(basis.shape[1], dtype=j.dtype)
    entry = jnp.where(place == j + 1, norm[:, None], 0).astype(w.dtype)
    unit = jnp.where(exhausted, 1, norm).astype(w.dtype)[:, None]
    return Arnoldi(
        basis=basis,
        hessenberg=lax.dynamic_update_index_in_dim(krylov.hessenberg, column + entry, j, axis=2),
        following=jnp.where(exhausted[:, None], 0, w / unit),
        residual=norm,
        size=size,
        scale=scale,
    )


def in_own_unit(krylov: Arnoldi) -> Arnoldi:
    """The recurrences with their numbers in the unit of the operator."""
    scale = krylov.scale
    return krylov._replace(
        hessenberg=krylov.hessenberg * scale.astype(krylov.hessenberg.dtype),
        residual=krylov.residual * scale,
        size=krylov.size * scale,
        scale=jnp.ones_like(scale),
    )


def arnoldi(
    mm: Product,
    start: Inexact[Array, "n p"],
    num_steps: int,
    eps: float,
    fresh: Callable[[Array, Array], Inexact[Array, "1 n"]] | None = None,
) -> Arnoldi:
    """Advance the recurrences of all probes together, one block product per step. For a single
    probe (p = 1), `fresh(j, basis)` returns the vector that continues an exhausted space.

    A space counts as exhausted when the part of a product outside of it is no larger than the
    rounding errors of the product. (A few steps too many do no harm: the directions that rounding
    errors then choose are orthogonal to the others, and Ritz values remain where they are.)

    **Cost:** `num_steps` products with a block of p vectors, `n p num_steps` numbers, and
    `8 n p num_steps^2` operations.
    """

    def step(j, krylov):
        krylov = with_product(krylov, j, mm(krylov.following.T), eps)
        if fresh is None:
            return krylov
        more = partial(fresh, j, krylov.basis)
        return krylov._replace(following=if_any(krylov.residual[0] == 0, more, krylov.following))

    # Unsigned: an index that may be negative is one more thing to compile.
    ends = jnp.uint32(0), jnp.uint32(num_steps)
    return in_own_unit(lax.fori_loop(*ends, step, begun(start, num_steps)))

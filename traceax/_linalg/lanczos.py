r"""Lanczos' recurrence for a block of probes, and the Gauss quadrature that it gives.

For a Hermitian A and a start vector z, q steps give an orthonormal basis V of the Krylov space of z
and T = V^H A V, tridiagonal. With T = S Theta S^T and the weights w_j = S_1j^2,

    z^H f(A) z  ~  ||z||^2 sum_j w_j f(theta_j),

which is exact for polynomials f of degree 2q - 1. (G. H. Golub, G. Meurant, *Matrices, moments and
quadrature*, 1994.)

The recurrence is Arnoldi's (see `arnoldi`), of which T is what a Hermitian A leaves.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .._core.estimate import Evidence, evidence_of, scale_of, skew_of
from .arnoldi import Arnoldi, Product, arnoldi
from .factorisations import ritz_values


class Lanczos(NamedTuple):
    """The Krylov spaces of p probes after q steps.

    If the space of a probe is exhausted after m < q steps, `beta[m-1]` is exactly 0, and so are
    `basis`, `alpha` and `beta` of all later steps.
    """

    basis: Inexact[Array, "q n p"]  # orthonormal for each probe; zero once a space is exhausted
    alpha: Real[Array, "q p"]
    beta: Real[Array, "q p"]  # beta[j] couples steps j and j + 1; beta[q-1]: norm of the residual
    following: Inexact[Array, "n p"]  # the next vectors; zero once a space is exhausted
    size: Real[Array, " p"]  # the largest |alpha| or beta, before any beta is set to 0
    skew: Real[Array, " p"]  # what A^H = A would make 0: see `tridiagonal`

    @property
    def residual(self) -> Real[Array, " p"]:
        """The norm of the residual: the beta of the last step."""
        return self.beta[-1]

    @property
    def exhausted(self) -> Bool[Array, " p"]:
        """Which of the spaces are exhausted."""
        return self.residual == 0

    def evidence(self, eps: float, top: Array | float = 0.0) -> Evidence:
        """Whether the numbers are finite (the largest is), and those of an A^H = A. `eps` is the
        precision of products, relative to A or to `top`, the unit of their rounding errors.
        """
        size = jnp.maximum(jnp.max(self.size), top)
        skew = skew_of(jnp.max(self.skew), size, self.basis.shape[1], eps)
        return evidence_of(self.size, skew=skew)


def tridiagonal(krylov: Arnoldi) -> Lanczos:
    """Arnoldi's recurrence of a Hermitian A: H = V^H A V is real and tridiagonal but for rounding.
    `skew` is the norm of the difference.
    """
    h = krylov.hessenberg / krylov.unit.astype(krylov.basis.dtype)
    alpha = jnp.diagonal(h, axis1=1, axis2=2).real
    subdiagonal = jnp.diagonal(h, -1, axis1=1, axis2=2).real
    # The last step so far has left a number in the row of a vector that is not in the basis yet.
    made = jnp.any(krylov.basis != 0, axis=2)
    t = jax.vmap(symmetric_tridiagonal)(alpha, jnp.where(made[:, 1:], subdiagonal, 0))
    unit = krylov.unit[:, :, 0]
    return Lanczos(
        basis=jnp.transpose(krylov.basis, (1, 2, 0)),
        alpha=(alpha * unit).T,
        beta=jnp.concatenate([subdiagonal * unit, krylov.residual[:, None]], axis=1).T,
        following=krylov.following.T,
        size=krylov.size,
        skew=jnp.linalg.norm(jnp.where(made[:, :, None], h - t, 0), axis=(1, 2)) * unit[:, 0],
    )


def lanczos(mm: Product, start: Inexact[Array, "n p"], num_steps: int, eps: float) -> Lanczos:
    """Advance the recurrences of all probes together, see `arnoldi`."""
    return tridiagonal(arnoldi(mm, start, num_steps, eps))


def quadrature(
    krylov: Lanczos,
) -> tuple[Real[Array, "p q"], Real[Array, "p q"], Real[Array, "p q q"]]:
    """The nodes theta, the weights w and the eigenvectors S of every probe's T.

    If a space is exhausted after m steps, the first m nodes count, in ascending order. The others
    repeat the first node, with weights and eigenvectors that are exactly 0. The caller must check
    that the recurrences are finite.
    """
    beta = krylov.beta[:-1].T
    # Not `beta > 0`: NaN must not look like the end of a space.
    counts = jnp.pad(beta != 0, ((0, 0), (1, 0)), constant_values=True)
    t = jax.vmap(symmetric_tridiagonal)(krylov.alpha.T, beta)
    nodes, vectors = jax.vmap(ritz_values)(t, counts)
    return nodes, jnp.square(vectors[:, 0, :]), vectors


def symmetric_tridiagonal(
    diagonal: Real[Array, " q"], subdiagonal: Real[Array, " q-1"]
) -> Real[Array, "q q"]:
    """The matrix with these numbers."""
    return jnp.diag(diagonal) + jnp.diag(subdiagonal, 1) + jnp.diag(subdiagonal, -1)


def positive(nodes: Real[Array, "p q"]) -> Real[Array, "p q"]:
    """The nodes, with tiny numbers, against NaN, in the place of those that are not positive: the
    caller must report such nodes.
    """
    return jnp.maximum(nodes, float(jnp.finfo(nodes.dtype).eps) ** 2 * scale_of(nodes, axis=1))

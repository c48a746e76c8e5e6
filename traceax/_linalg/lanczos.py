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
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.estimate import scale_of, status_of
from .._core.precision import einsum
from .factorisations import eigh


class Lanczos(NamedTuple):
    """The Krylov spaces of p probes after q steps.

    If the space of a probe is exhausted after m < q steps, `beta[m-1]` is exactly 0, and so are
    `basis`, `alpha` and `beta` of all later steps.
    """

    basis: Inexact[Array, "q n p"]  # orthonormal for each probe; zero once a space is exhausted
    alpha: Real[Array, "q p"]
    beta: Real[Array, "q p"]  # beta[j] couples steps j and j + 1; beta[q-1]: norm of the residual
    size: Real[Array, " p"]  # the largest |alpha| or beta, before any beta is set to 0

    @property
    def exhausted(self) -> Bool[Array, " p"]:
        """Which of the spaces are exhausted."""
        return self.beta[-1] == 0

    @property
    def unit(self) -> Real[Array, "p 1"]:
        """A positive number that no |alpha| and no beta exceeds, if all are finite."""
        return scale_of(self.size[:, None], axis=1)

    @property
    def status(self) -> Int[Array, ""]:
        """NONFINITE if any of the numbers is NaN or inf, as the largest is then."""
        return status_of(self.size)


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
    real = jnp.finfo(start.dtype).dtype
    tolerance = 16 * (float(jnp.finfo(real).eps) if eps is None else eps)

    norms = jnp.linalg.norm(start.T, axis=1)
    first = start.T / jnp.where(norms > 0, norms, 1).astype(start.dtype)[:, None]
    # Probes come first, so that products with their bases are those of matrices and vectors.
    basis = jnp.zeros((p, num_steps, n), start.dtype)

    def step(carry, j):
        basis, v, size, scale = carry
        basis = lax.dynamic_update_index_in_dim(basis, v, j, axis=1)
        w = mm(v.T)
        # The first product fixes a unit, in which no square over- or underflows.
        scale = jnp.where(j == 0, scale_of(w), scale)
        w = (w / scale).T
        alpha = jnp.zeros((p,), real)
        for _ in range(2):
            coefficients = einsum("pjn,pn->pj", jnp.conj(basis), w)
            w = w - einsum("pjn,pj->pn", basis, coefficients)
            alpha = alpha + coefficients[:, j].real
        beta = jnp.linalg.norm(w, axis=1)
        size = jnp.maximum(size, jnp.maximum(jnp.abs(alpha), beta))
        exhausted = beta <= tolerance * size
        beta = jnp.where(exhausted, 0, beta)
        unit = jnp.where(exhausted, 1, beta).astype(w.dtype)[:, None]
        v = jnp.where(exhausted[:, None], 0, w / unit)
        return (basis, v, size, scale), (alpha, beta)

    carry = (basis, first, jnp.zeros((p,), real), jnp.ones((), real))
    # Unsigned: an index that may be negative is one more thing to compile.
    steps = jnp.arange(num_steps, dtype=jnp.uint32)
    (basis, _, size, scale), (alpha, beta) = lax.scan(step, carry, steps)
    return Lanczos(jnp.transpose(basis, (1, 2, 0)), alpha * scale, beta * scale, size * scale)


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
    diagonal, off = jnp.where(counts, alpha / scale, 4), beta / scale
    place = jnp.arange(alpha.shape[1])
    row, column = place[:, None], place
    t = jnp.where(row == column, diagonal[:, :, None], 0)
    t = jnp.where(row + 1 == column, off[:, :, None], t)
    t = jnp.where(row == column + 1, off[:, None, :], t)
    nodes, vectors = jax.vmap(eigh)(t)

    inside = nodes < 3.5
    vectors = jnp.where(inside[:, None, :], vectors, 0)
    nodes = jnp.where(inside, nodes, nodes[:, :1]) * scale
    return nodes, jnp.square(vectors[:, 0, :]), vectors

r"""Arnoldi's recurrence for a block of probes: Krylov spaces of operators that are not Hermitian.

For any A and a start vector z, q steps give an orthonormal basis V of the Krylov space of z and
H = V^H A V, upper Hessenberg, with

    f(A) z ~ ||z|| V f(H) e_1,      z^H f(A) z ~ ||z||^2 e_1^T f(H) e_1,

exact for polynomials f of degree q - 1 and q. (Y. Saad, *Analysis of some Krylov subspace
approximations to the matrix exponential operator*, 1992, for the exponential.)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Real

from .._core.estimate import Evidence, evidence_of, scale_of
from .._core.precision import einsum
from .lanczos import recurrences


class Arnoldi(NamedTuple):
    """The Krylov spaces of p probes after q steps.

    If the space of a probe is exhausted after m < q steps, `hessenberg[m, m-1]` is exactly 0, and
    so are all vectors, and all columns of `hessenberg`, of later steps.
    """

    basis: Inexact[Array, "p q n"]  # orthonormal for each probe, as rows
    hessenberg: Inexact[Array, "p q q"]
    residual: Real[Array, " p"]  # the norm of what the last product has outside of the space
    size: Real[Array, " p"]  # the largest number in H, before any is set to 0

    @property
    def exhausted(self) -> Bool[Array, " p"]:
        """Which of the spaces are exhausted."""
        return self.residual == 0

    @property
    def evidence(self) -> Evidence:
        """If any of the numbers is NaN or inf, the largest is."""
        return evidence_of(self.size)

    @property
    def unit(self) -> Real[Array, "p 1 1"]:
        """A positive number that no number in H exceeds, if all are finite."""
        return scale_of(self.size[:, None, None], axis=1)

    def ended_after(self, steps: int) -> Inexact[Array, "p q q"]:
        """H / `unit` after so many steps. Rows and columns of later steps, and of those after the
        end of a space, have the number H_11 on the diagonal and 0 elsewhere: a block of its own,
        with an eigenvalue within the field of values, that e_1 knows nothing of.
        """
        q = self.hessenberg.shape[1]
        below = jnp.diagonal(self.hessenberg, -1, axis1=1, axis2=2)
        # Not `below > 0`: NaN must not look like the end of a space.
        goes_on = jnp.pad(below != 0, ((0, 0), (1, 0)), constant_values=True)
        used = jnp.cumprod(goes_on, axis=1, dtype=bool) & (jnp.arange(q) < steps)
        h = self.hessenberg / self.unit
        filled = jnp.where(used[:, :, None], 0, h[:, :1, :1]) * jnp.eye(q, dtype=h.dtype)
        return jnp.where(used[:, :, None] & used[:, None, :], h, filled)


def arnoldi(
    mm: Callable[[Inexact[Array, "n p"]], Inexact[Array, "n p"]],
    start: Inexact[Array, "n p"],
    num_steps: int,
    eps: float,
) -> Arnoldi:
    """Advance the recurrences of all probes together, one block product per step. Every new vector
    is made orthogonal to all earlier ones, twice; see `lanczos` for the end of a space.

    Cost: `num_steps` products with a block of p vectors, `n p num_steps` numbers, and
    `8 n p num_steps^2` operations.

    **Arguments:**

    - `mm`: an operator, as a function that multiplies blocks.
    - `start`: the probes z. (Their norms are computed without scaling, and may overflow.)
    - `num_steps`: the number q of steps, `1 <= q <= n`.
    - `eps`: the relative precision of a product.

    **Returns:**

    An `Arnoldi`.
    """
    n, p = start.shape

    def put(basis, v, j):
        return lax.dynamic_update_index_in_dim(basis, v, j, axis=1)

    def outside(basis, w, j):
        along = jnp.zeros((p, num_steps), w.dtype)
        for _ in range(2):
            coefficients = einsum("pjn,pn->pj", jnp.conj(basis), w)
            w = w - einsum("pjn,pj->pn", basis, coefficients)
            along = along + coefficients
        return w, along

    basis = jnp.zeros((p, num_steps, n), start.dtype)
    krylov = recurrences(mm, start, basis, num_steps, eps, put, outside)
    h = jnp.transpose(krylov.alpha, (1, 2, 0))
    below = krylov.beta[:-1].T.astype(h.dtype)
    h = h + jnp.eye(num_steps, k=-1, dtype=h.dtype) * jnp.pad(below, ((0, 0), (0, 1)))[:, None, :]
    return Arnoldi(krylov.basis, h, krylov.residual, krylov.size)

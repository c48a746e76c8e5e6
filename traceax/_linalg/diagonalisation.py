"""Functions of small matrices that are not Hermitian, by eigenvectors.

*The perturbation.* With H = X diag(theta) X^{-1}, f(H) = X diag(f(theta)) X^{-1}, whose rounding
errors are eps times the condition number of X: infinite for a Jordan block. But matrices nearby
have better eigenvectors (E. B. Davies, *Approximate diagonalization*, 2007): those of H + delta E
have a condition number of about 1 / delta. One such matrix leaves an error of delta; the mean

    f(H) ~ (f(H + delta E) + f(H - delta E)) / 2

is right to first order, and leaves delta^2. Together with eps / delta from rounding this is least
for delta = eps^(1/3), and then eps^(2/3). H itself is taken where its eigenvectors are better:
where their condition number is at most eps^(-1/3).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Complex, Inexact

from .factorisations import eigenpairs, one_by_one


class Diagonalised(NamedTuple):
    """A square matrix H as `left diag(nodes) right`, for functions of H: the eigenpairs of both
    neighbours of H, or those of H itself, twice. f(H) is `left diag(f(nodes)) right`.
    """

    nodes: Complex[Array, "... 2q"]
    left: Complex[Array, "... q 2q"]
    right: Complex[Array, "... 2q q"]


@one_by_one
def diagonalised(h: Inexact[Array, "q q"]) -> Diagonalised:
    """The eigenpairs for f(H), see above; 0 replaces NaN and inf. The largest number is about 1.

    **Cost:** up to three eigendecompositions.
    """
    h = jnp.where(jnp.isfinite(h), h, 0)
    q = len(h)
    delta = float(jnp.finfo(h.dtype).eps) ** (1 / 3)
    own = eigenpairs(h)

    def neighbours():
        e = jr.normal(jr.key(0), (q, q), jnp.finfo(h.dtype).dtype)
        e = e * (delta * jnp.linalg.norm(h) / jnp.linalg.norm(e))
        return eigenpairs(h + e), eigenpairs(h - e)

    condition = math.sqrt(q) * jnp.linalg.norm(own[2])  # NaN or inf if there is no inverse
    first, second = lax.cond(condition * delta <= 1, lambda: (own, own), neighbours)
    nodes, left, right = (jnp.concatenate([first[i], second[i]], (0, 1, 0)[i]) for i in range(3))
    return Diagonalised(nodes, left, right / 2)

"""Bases of the range of a sketch, and diagonals on them."""

import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._core.estimate import scale_of
from .._core.precision import adjoint, matmul, square_norms, square_of
from .._linalg.factorisations import diagonal_of, qr
from .._operators.block_operator import BlockOperator


def range_basis(block: BlockOperator, omega: Inexact[Array, "n m"]) -> Inexact[Array, "n m"]:
    """An orthonormal basis of the range of A Omega, in which NaN and inf count as 0."""
    sketch = block.mm(omega)
    sketch = jnp.where(jnp.isfinite(sketch), sketch, 0)
    # Scaled, so that the QR factorisation does not overflow. The basis stays the same.
    q, _ = qr(sketch / scale_of(sketch))
    return q


def residual_products(q: Array, omega: Array, products: Array, adjoint_products: Array) -> Array:
    """(I - Q Q^H) A Omega, from A Omega and A^H Q. (For A = I that is what is orthogonal to Q.)"""
    return products - matmul(q, matmul(adjoint(adjoint_products), omega))


def captured_diagonal(q: Array, adjoint_products: Array) -> Array:
    """diag(Q Q^H A), from A^H Q."""
    return jnp.sum(q * jnp.conj(adjoint_products), axis=1)


def mean_square_cosine(cosines: Inexact[Array, "m m"]) -> Real[Array, ""]:
    """The mean squared cosine of two of m directions, from all cosines. For directions B omega it
    is about ||B^H B||_F^2 / ||B||_F^4: 1 / d if B has d equal singular values. No eigenvalue is
    needed.
    """
    m = len(cosines)
    squares = square_of(cosines)
    return (jnp.sum(squares) - jnp.sum(diagonal_of(squares))) / max(m * (m - 1), 1)


def concentration_of(block: Inexact[Array, "n m"]) -> Real[Array, ""]:
    """The `mean_square_cosine` of the columns."""
    block = block / scale_of(block)
    lengths = jnp.sqrt(square_norms(block))
    block = block / jnp.where(lengths > 0, lengths, 1).astype(block.dtype)
    return mean_square_cosine(matmul(adjoint(block), block))

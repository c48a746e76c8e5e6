r"""Lanczos' recurrence for a block of vectors, which share one Krylov space.

s steps from b vectors Z give an orthonormal basis V of the span of Z, A Z, ..., A^{s-1} Z, and
T = V^H A V, which is block tridiagonal. (G. H. Golub, R. Underwood, *The block Lanczos method for
computing eigenvalues*, 1977.) Every new block is made orthogonal to all earlier ones, twice, and T
is read off the coefficients.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact

from .._core.estimate import Evidence, evidence_of, rounding_unit, scale_of, skew_of
from .._core.precision import matmul
from .arnoldi import Product


class BlockLanczos(NamedTuple):
    """A block Krylov space after s steps. A vector in the span of earlier ones is not in use: it is
    0, and so are its row and column of T.
    """

    rows: Inexact[Array, "s*b n"]  # the vectors v_i, one in each row
    t: Inexact[Array, "s*b s*b"]
    exhausted: Bool[Array, ""]  # whether the space is invariant
    evidence: Evidence


def _orthonormal(block: Array, least: Array | float) -> Array:
    """Gram and Schmidt's method, twice for each row; a rest of norm at most `least` becomes 0."""

    def one(i, found):
        v = lax.dynamic_index_in_dim(block, i, keepdims=False)
        for _ in range(2):
            v = v - matmul(matmul(jnp.conj(found), v), found)
        norm = jnp.linalg.norm(v)
        gone = norm <= least
        v = jnp.where(gone, 0, v / jnp.where(gone, 1, norm).astype(v.dtype))
        return lax.dynamic_update_index_in_dim(found, v, i, 0)

    return lax.fori_loop(0, block.shape[0], one, jnp.zeros_like(block))


def block_lanczos(
    mm: Product,
    start: Inexact[Array, "n b"],
    num_steps: int,
    eps: float,
    negligible: float | None = None,
) -> BlockLanczos:
    """The recurrence after `num_steps` products with a block of b vectors Z, neither tiny nor huge.

    Step j has the rows from `b j` to `b (j + 1)`. A new vector becomes 0 if its length, relative to
    the longest image, is at most `negligible`, by default a `rounding_unit`. Cost: `n b num_steps`
    numbers, and `12 n (b num_steps)^2` operations.
    """
    n, b = start.shape
    m, real = b * num_steps, jnp.finfo(start.dtype).dtype
    if negligible is None:
        negligible = rounding_unit(eps, real)

    def orthogonal_part(rows, block):
        coefficients = matmul(jnp.conj(rows), block.T)
        return block - matmul(coefficients.T, rows), coefficients

    def step(j, carry):
        basis, block, columns, size, scale = carry
        j = jnp.asarray(j, jnp.uint32)  # an int where nothing is compiled
        zero, place = jnp.zeros_like(j), j * jnp.uint32(b)
        basis = lax.dynamic_update_slice(basis, block, (place, zero))
        images = mm(block.T)
        # The first product fixes a unit, in which no square over- or underflows.
        scale = jnp.where(j == 0, scale_of(images), scale)
        images = (images / scale.astype(images.dtype)).T
        size = jnp.maximum(size, jnp.max(jnp.linalg.norm(images, axis=1)))
        rest, coefficients = orthogonal_part(basis, images)
        rest, more = orthogonal_part(basis, rest)
        columns = lax.dynamic_update_slice(columns, coefficients + more, (zero, place))
        # A row that is small beside the images has lost its orthogonality to what was there before.
        block, _ = orthogonal_part(basis, _orthonormal(rest, negligible * size))
        return basis, _orthonormal(block, 0.5), columns, size, scale

    square = jnp.zeros((m, m), start.dtype)
    first = _orthonormal(start.T, negligible * jnp.max(jnp.linalg.norm(start.T, axis=1)))
    basis = jnp.zeros((m, n), start.dtype)
    carry = (basis, first, square, jnp.zeros((), real), jnp.ones((), real))
    # Unsigned: an index that may be negative is one more thing to compile.
    ends = jnp.uint32(0), jnp.uint32(num_steps)
    basis, block, columns, size, scale = lax.fori_loop(*ends, step, carry)
    of_step = jnp.arange(m) // b
    upper = jnp.where(of_step[:, None] < of_step, columns, 0)
    diagonal = jnp.where(of_step[:, None] == of_step, columns, 0)
    t = upper + jnp.conj(upper.T) + (diagonal + jnp.conj(diagonal.T)) / 2
    # If A^H = A, the blocks on the diagonal are Hermitian, and those above the next ones are 0.
    far = jnp.where(of_step[:, None] + 1 < of_step, columns, 0)
    asymmetry = jnp.linalg.norm(diagonal - jnp.conj(diagonal.T) + far)
    evidence = evidence_of(size, skew=skew_of(asymmetry, size, n, eps))
    return BlockLanczos(basis, t * scale.astype(t.dtype), ~jnp.any(block != 0), evidence)

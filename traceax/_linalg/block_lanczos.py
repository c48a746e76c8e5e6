r"""Lanczos' recurrence for a block of vectors, which share one Krylov space.

s steps from b vectors Z give an orthonormal basis V of the span of Z, A Z, ..., A^{s-1} Z, and
T = V^H A V, which is block tridiagonal. (G. H. Golub, R. Underwood, *The block Lanczos method for
computing eigenvalues*, 1977.) Every new block is made orthogonal to all earlier ones, twice, and T
is read off the coefficients. `Strands` is the same for vectors of which some join late.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.estimate import scale_of, status_of
from .._core.precision import matmul
from .factorisations import eigh


class BlockLanczos(NamedTuple):
    """A block Krylov space after s steps. A vector that has no part outside of the earlier ones is
    not in use: it is 0, and so are its row and column of T.
    """

    rows: Inexact[Array, "s*b n"]  # the vectors v_i, one in each row
    t: Inexact[Array, "s*b s*b"]
    in_use: Bool[Array, " s*b"]
    exhausted: Bool[Array, ""]  # whether the space is invariant
    status: Int[Array, ""]


def _orthonormal(block: Array, least: Array | float) -> Array:
    """The rows of a block by the method of Gram and Schmidt, twice for each. What remains of a row
    is 0 if its norm is not above `least`.
    """

    def one(i, found):
        v = lax.dynamic_index_in_dim(block, i, keepdims=False)
        for _ in range(2):
            v = v - matmul(matmul(jnp.conj(found), v), found)
        norm = jnp.linalg.norm(v)
        gone = norm <= least
        v = jnp.where(gone, 0, v / jnp.where(gone, 1, norm).astype(v.dtype))
        return lax.dynamic_update_index_in_dim(found, v, i, 0)

    return lax.fori_loop(0, block.shape[0], one, jnp.zeros_like(block))


class _Carry(NamedTuple):
    """What a step of `Strands` hands on to the next."""

    rows: Inexact[Array, "m n"]
    columns: Inexact[Array, "m m"]  # T, of which the entries above the diagonal count
    pending: Inexact[Array, "w b n"]  # what each strand goes on with
    least: Real[Array, " w"]  # the norm below which a row of it is rounding
    scale: Real[Array, ""]
    size: Real[Array, ""]


class Strands(NamedTuple):
    """Block Lanczos for several blocks of start vectors, the strands, in any order.

    A step advances one strand: what is left of its last product, made orthogonal to all vectors so
    far, is the next block. After q steps of each strand the vectors span the Krylov space of all
    start vectors together, of depth q, whatever the order was. So vectors may join late. A block
    takes up `stride` rows (fewer than its width if its last vectors are 0).
    """

    mm: Callable[[Array], Array]
    eps: float
    stride: int | Int[Array, ""]

    def start(self, starts: Inexact[Array, "w n b"], rows: int) -> _Carry:
        """The state before the first step, for at most this number of vectors."""
        w, n, b = starts.shape
        dtype = starts.dtype
        real = jnp.finfo(dtype).dtype
        vectors = jnp.swapaxes(starts, 1, 2)
        norms = jnp.linalg.norm(vectors, axis=2, keepdims=True)
        pending = vectors / jnp.where(norms > 0, norms, 1).astype(dtype)
        least = jnp.full((w,), 16 * self.eps, real)
        zero, one = jnp.zeros((), real), jnp.ones((), real)
        basis, columns = jnp.zeros((rows, n), dtype), jnp.zeros((rows, rows), dtype)
        return _Carry(basis, columns, pending, least, one, zero)

    def step(self, j: Array, strand: Array, carry: _Carry) -> _Carry:
        """Step j, which is that of this strand."""
        rows, columns, pending, least, scale, size = carry
        zero, place = jnp.zeros_like(j), j * jnp.asarray(self.stride, j.dtype)

        def outside(block):
            along = matmul(jnp.conj(rows), block.T)
            return block - matmul(along.T, rows), along

        block = lax.dynamic_index_in_dim(pending, strand, keepdims=False)
        block, _ = outside(block)
        # A row that is small beside the images has lost its orthogonality to what was there before.
        block, _ = outside(_orthonormal(block, least[strand]))
        block = _orthonormal(block, 0.5)
        rows = lax.dynamic_update_slice(rows, block, (place, zero))
        images = self.mm(block.T)
        # The first product fixes a unit, in which no square over- or underflows.
        scale = jnp.where(j == 0, scale_of(images), scale)
        images = (images / scale.astype(images.dtype)).T
        size = jnp.maximum(size, jnp.max(jnp.linalg.norm(images, axis=1)))
        rest, along = outside(images)
        rest, more = outside(rest)
        columns = lax.dynamic_update_slice(columns, along + more, (zero, place))
        pending = lax.dynamic_update_index_in_dim(pending, rest, strand, 0)
        return _Carry(rows, columns, pending, least.at[strand].set(16 * self.eps * size), scale, size)

    def found(self, carry: _Carry, used: Bool[Array, " w"]) -> BlockLanczos:
        """What is known after some steps, all of which were those of the strands in use."""
        of_step = jnp.arange(len(carry.rows)) // self.stride
        columns = carry.columns
        above = jnp.where(of_step[:, None] < of_step, columns, 0)
        within = jnp.where(of_step[:, None] == of_step, columns, 0)
        t = above + jnp.conj(above.T) + (within + jnp.conj(within.T)) / 2
        norms = jnp.linalg.norm(carry.pending, axis=2)
        exhausted = ~jnp.any((norms > carry.least[:, None]) & used[:, None])
        in_use = jnp.any(carry.rows != 0, axis=1)
        t = t * carry.scale.astype(t.dtype)
        return BlockLanczos(carry.rows, t, in_use, exhausted, status_of(carry.size))


def advance(
    strands: Strands,
    carry: _Carry,
    ends: tuple[int | Array, int | Array],
    strand: Callable[[Array], Array],
) -> _Carry:
    """Make the steps from `ends[0]` to `ends[1]`, step j with the strand `strand(j)`."""
    # Unsigned: an index that may be negative is one more thing to compile.
    lower, upper = (jnp.asarray(x, jnp.uint32) for x in ends)
    return lax.fori_loop(lower, upper, lambda j, c: strands.step(j, strand(j), c), carry)


def block_lanczos(
    mm: Callable[[Inexact[Array, "n b"]], Inexact[Array, "n b"]],
    start: Inexact[Array, "n b"],
    num_steps: int,
    eps: float,
) -> BlockLanczos:
    """Advance the recurrence by `num_steps` products with a block of b vectors.

    Cost: `n b num_steps` numbers, and `16 n (b num_steps)^2` operations.

    **Arguments:**

    - `mm`: a Hermitian operator, as a function that multiplies blocks.
    - `start`: the vectors Z.
    - `num_steps`: the number s of steps, `1 <= b s <= n`.
    - `eps`: the relative precision of a product.

    **Returns:**

    A `BlockLanczos`.
    """
    b = start.shape[1]
    strands = Strands(mm, eps, b)
    carry = strands.start(start[None], b * num_steps)
    carry = advance(strands, carry, (0, num_steps), jnp.zeros_like)
    return strands.found(carry, jnp.ones((1,), bool))


def ritz_values(
    t: Inexact[Array, "m m"], in_use: Bool[Array, " m"]
) -> tuple[Real[Array, " m"], Inexact[Array, "m m"]]:
    """The eigenvalues and eigenvectors of the rows and columns of T that are in use.

    The others give eigenvectors that are 0, and eigenvalues that repeat the first one.
    """
    unit = scale_of(jnp.sum(jnp.abs(t), axis=1))
    inside = in_use[:, None] & in_use
    # No eigenvalue exceeds 1 in this unit. A 4 stands for what is not in use: it comes last.
    four = jnp.diag(jnp.where(in_use, jnp.zeros_like(unit), 4)).astype(t.dtype)
    values, vectors = eigh(jnp.where(inside, t / unit.astype(t.dtype), 0) + four)
    counts = values < 2
    return jnp.where(counts, values, values[0]) * unit, jnp.where(counts, vectors, 0)

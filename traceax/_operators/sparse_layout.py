"""The positions of the entries of a sparse matrix, in the order in which a product takes them.

XLA has no fast sparse product on a CPU: a scatter of every term is slow, and runs on one core. What
is fast is to gather rows of a block `X`, scale them, and add them up inside one fused loop. So each
row of the matrix is cut into *chunks* of `width` slots, the last one padded, and a Python loop over
the slots, which XLA fuses, computes the sums of all chunks at once:

    s_c = sum_j value[slots[c, j]] x[columns[c, j]]

Where every row is one chunk, these sums are the product. Otherwise they are added to their rows.
The width is chosen for the least work, so that a dense row costs little padding.
"""

from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int32

from .._core.precision import at_least_single

# The longest unrolled loop. A longer one takes more time to compile, and hardly less for a product.
_MAX_WIDTH = 48
# The cost of adding the sum of a chunk to its row, in multiplications (measured on two cores).
_CHUNK_COST = 16
# The most slots for each entry and each row, even if more would save time.
_MAX_PADDING = 3


@final
class RowLayout(eqx.Module):
    """The rows of a sparse matrix, cut into chunks of one width.

    **Attributes:**

    - `slots`: for each slot the position of its entry in the data; for padding, one past the end.
    - `columns`: for each slot the column of its entry. Padding repeats the first of its chunk, so
        that a NaN in a vector reaches only the rows that multiply it.
    - `rows`: the row of each chunk, ascending; None if every row is one chunk.
    - `num_rows`: the number of rows of the matrix.
    """

    slots: Int32[Array, "chunks width"]
    columns: Int32[Array, "chunks width"]
    rows: Int32[Array, " chunks"] | None
    num_rows: int = eqx.field(static=True)


@final
class SparsityPattern(eqx.Module):
    """The sparsity of a matrix: everything but the values of its entries.

    **Attributes:**

    - `rows`, `columns`: the row and column of each entry, in the order of the data.
    - `forward`: the layout of a product with the matrix.
    - `backward`: the layout of a product with the transpose.
    - `shape`: the shape of the matrix.
    """

    rows: Int32[Array, " nnz"]
    columns: Int32[Array, " nnz"]
    forward: RowLayout
    backward: RowLayout
    shape: tuple[int, int] = eqx.field(static=True)

    def transpose(self) -> "SparsityPattern":
        """The sparsity of the transpose. This costs nothing: both layouts are kept."""
        m, n = self.shape
        return SparsityPattern(self.columns, self.rows, self.backward, self.forward, (n, m))


def sparsity_pattern(
    rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]
) -> SparsityPattern:
    """The layouts of a sparse matrix, in O(nnz log nnz) on the host; any order, any repeats."""
    if _MAX_PADDING * (max(shape) + rows.size) >= np.iinfo(np.int32).max:
        raise ValueError(
            f"A sparse operator is indexed with 32 bits, got shape {shape} with {rows.size} "
            "entries: split it into blocks."
        )
    m, n = shape
    rows = rows.astype(np.int32)
    columns = columns.astype(np.int32)
    return SparsityPattern(
        rows=jnp.asarray(rows),
        columns=jnp.asarray(columns),
        forward=_row_layout(rows, columns, m),
        backward=_row_layout(columns, rows, n),
        shape=(m, n),
    )


def _best_width(lengths: np.ndarray) -> int:
    """The width of chunks that takes the least work, for rows with `lengths` entries."""
    distinct, counts = np.unique(lengths[lengths > 0], return_counts=True)
    if distinct.size == 0:
        return 0
    widths = np.arange(1, min(int(distinct[-1]), _MAX_WIDTH) + 1)
    num_chunks = counts @ -(-distinct[:, None] // widths)
    is_direct = (widths >= distinct[-1]) & (num_chunks == lengths.size)
    # The last term keeps small matrices from compiling a long loop that saves nothing.
    cost = num_chunks * (widths + np.where(is_direct, 0, _CHUNK_COST)) + 16 * widths
    fits = num_chunks * widths <= _MAX_PADDING * (lengths.sum() + lengths.size)
    return int(widths[np.argmin(np.where(fits, cost, np.inf))])


def _row_layout(rows: np.ndarray, columns: np.ndarray, m: int) -> RowLayout:
    lengths = np.bincount(rows, minlength=m)
    width = _best_width(lengths)
    chunks = -(-lengths // max(width, 1))
    entries = np.lexsort((columns, rows))
    row = rows[entries]
    place = np.arange(row.size) - (np.cumsum(lengths) - lengths)[row]  # of each entry in its row
    chunk = (np.cumsum(chunks) - chunks)[row] + place // width
    slots = np.full((np.sum(chunks), width), rows.size)
    slots[chunk, place % width] = entries
    row = np.repeat(np.arange(m), chunks)
    is_direct = np.array_equal(row, np.arange(m))
    return RowLayout(
        slots=jnp.asarray(slots, jnp.int32),
        columns=jnp.asarray(columns[np.where(slots < rows.size, slots, slots[:, :1])], jnp.int32),
        rows=None if is_direct else jnp.asarray(row, jnp.int32),
        num_rows=m,
    )


# Jitted so that the loop is traced once for all products with one sparsity.
@jax.jit
def row_product(
    layout: RowLayout, data: Inexact[Array, " nnz"], vector: Inexact[Array, " n"]
) -> Inexact[Array, " m"]:
    """The product of a sparse matrix with a vector, in the dtype of the entries (half precision
    is added in float32). Under `jax.vmap` the last axis of a block is the fast case.
    """
    dtype = data.dtype
    accumulate = at_least_single(dtype)
    vector = vector.astype(accumulate)
    values = (
        data.astype(accumulate)
        .at[layout.slots]
        .get(mode="fill", fill_value=0, wrap_negative_indices=False)
    )
    sums = jnp.zeros(values.shape[0], accumulate)
    for j in range(values.shape[1]):
        gathered = vector.at[layout.columns[:, j]].get(
            mode="promise_in_bounds", wrap_negative_indices=False
        )
        # This is `values[:, j] * gathered`, but as a `dot_general`: there `jax.vmap` puts its axis
        # last, in a product first. In the derivative the sum over that axis then runs along memory,
        # up to three times as fast. (The precision matters on a GPU, where that sum is a matrix
        # product.)
        sums = sums + jax.lax.dot_general(
            values[:, j],
            gathered,
            dimension_numbers=(((), ()), ((0,), (0,))),
            precision=jax.lax.Precision.HIGHEST,
        )
    if layout.rows is not None:
        # In the derivative every slot above uses the cotangent of the sums. Without a barrier each
        # would gather it anew.
        sums = jax.lax.optimization_barrier(sums)
        sums = (
            jnp.zeros(layout.num_rows, accumulate)
            .at[layout.rows]
            .add(
                sums,
                mode="promise_in_bounds",
                indices_are_sorted=True,
                wrap_negative_indices=False,
            )
        )
    return sums.astype(dtype)

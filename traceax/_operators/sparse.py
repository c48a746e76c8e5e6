"""A sparse matrix as a lineax operator.

XLA has no fast sparse product on a CPU: a scatter of every term is slow, and runs on one core. What
is fast is to gather rows of a block `X`, scale them, and add them up inside one fused loop. So each
row of the matrix is cut into *chunks* of `width` slots, the last one padded, and a Python loop over
the slots, which XLA fuses, computes the sums of all chunks at once:

    s_c = sum_j value[slots[c, j]] x[columns[c, j]]

Where every row is one chunk, these sums are the product. Otherwise they are added to their rows.
The width is chosen for the least work, so that a dense row costs little padding.
"""

import sys
from collections.abc import Iterable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Inexact, Int32

from .._core.precision import at_least_single
from .tags import inexact_dtype, register_tags

# --- the layout -----------------------------------------------------------------------------------

# The longest unrolled loop. A longer one takes more time to compile, and hardly less for a product.
_MAX_WIDTH = 48
# The cost of adding the sum of a chunk to its row, in multiplications (measured on two cores).
_CHUNK_COST = 16
# The most slots for each entry and each row, even if more would save time.
_MAX_PADDING = 3


@final
class RowLayout(eqx.Module):
    """The rows of a sparse matrix, cut into chunks of one width: for each slot the position of its
    entry in the data (for padding, one past the end) and its column (padding repeats the first of
    its chunk: a NaN in a vector reaches only the rows that multiply it); the row of each chunk,
    ascending (None if every row is one chunk); and the number of rows.
    """

    slots: Int32[Array, "chunks width"]
    columns: Int32[Array, "chunks width"]
    rows: Int32[Array, " chunks"] | None
    num_rows: int = eqx.field(static=True)


@final
class SparsityPattern(eqx.Module):
    """The sparsity of a matrix: the row and column of each entry, in the order of the data, and the
    layouts of products with the matrix (`forward`) and its transpose (`backward`).
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
            "entries. Split it into blocks."
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
    padded = data.astype(accumulate).at[layout.slots]
    values = padded.get(mode="fill", fill_value=0, wrap_negative_indices=False)
    in_bounds: Any = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
    sums = jnp.zeros(values.shape[0], accumulate)
    for j in range(values.shape[1]):
        gathered = vector.at[layout.columns[:, j]].get(**in_bounds)
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
        rows = jnp.zeros(layout.num_rows, accumulate).at[layout.rows]
        sums = rows.add(sums, indices_are_sorted=True, **in_bounds)
    return sums.astype(dtype)


# --- the operator ---------------------------------------------------------------------------------


def _inexact(data: Any) -> Inexact[Array, " nnz"]:
    data = jnp.asarray(data)
    return data.astype(inexact_dtype(data.dtype))


def _scipy_entries(matrix: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    csr = matrix.tocsr(copy=True)
    csr.sum_duplicates()  # in place, as is the next
    csr.prune()
    coo = csr.tocoo()
    return coo.data, coo.row, coo.col


def _jax_entries(matrix: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    indices = np.asarray(matrix.indices)
    if hasattr(matrix, "indptr"):  # BCSR, whose buffers can be longer than the entries
        lengths = np.diff(np.asarray(matrix.indptr, np.int64))
        rows = np.repeat(np.arange(lengths.size), lengths)
        return matrix.data[: rows.size], rows, indices[: rows.size]
    # The padding of a BCOO lies outside of the matrix, and may hold anything, NaN included.
    mask = np.all(indices < np.array(matrix.shape), axis=1)
    data = matrix.data if mask.all() else matrix.data[np.flatnonzero(mask)]
    return data, indices[mask, 0], indices[mask, 1]


def _is_jax_sparse(matrix: Any) -> bool:
    # Importing the module takes time, and a user who has such a matrix has imported it.
    module = sys.modules.get("jax.experimental.sparse")
    known = module is not None and isinstance(matrix, module.BCOO | module.BCSR)
    return known and not (matrix.n_batch or matrix.n_dense or isinstance(matrix.indices, Tracer))


def _entries(matrix: Any) -> tuple[Array, SparsityPattern]:
    """The values of the entries and their pattern, of a matrix or from such a pair."""
    if isinstance(matrix, tuple):
        return matrix
    is_scipy = hasattr(matrix, "tocsr") and hasattr(matrix, "nnz")
    if not is_scipy and not _is_jax_sparse(matrix):
        raise TypeError(
            "A sparse operator is made from a SciPy sparse array, or from a BCOO or BCSR without "
            f"batch or dense dimensions or traced indices, got {type(matrix).__name__}. Convert it "
            "with `scipy.sparse.csr_array(matrix)`, wrap a dense matrix in "
            "`lineax.MatrixLinearOperator(matrix)`, or make the operator outside of `jax.jit`, and "
            "pass `operator.with_data(entries)`."
        )
    data, rows, columns = _scipy_entries(matrix) if is_scipy else _jax_entries(matrix)
    m, n = map(int, matrix.shape)
    return _inexact(data), sparsity_pattern(rows, columns, (m, n))


@final
class SparseLinearOperator(lx.AbstractLinearOperator):
    """A sparse matrix as a linear operator, with fast products with blocks of vectors.

    The fast case is a block of vectors, `jax.vmap(operator.mv, in_axes=1, out_axes=1)`, which is
    what every estimator uses. A product is differentiable with respect to `data` and to the vector,
    though for the latter `operator.T.mv(cotangent)` is many times as fast as reverse mode.

    **Cost:** a multiplication and an addition for each entry; some 30 bytes of indices for each.

    **Attributes:**

    - `data`: the values of the entries, of shape `(nnz,)`: from a SciPy matrix in row-major order,
        duplicates summed; from a BCOO or BCSR in its order, without padding.
    - `pattern`: the rows and columns of the entries.
    - `tags`: the lineax tags.
    """

    data: Inexact[Array, " nnz"]
    pattern: SparsityPattern
    tags: frozenset[object] = eqx.field(static=True)

    def __init__(self, matrix: Any, tags: object | frozenset[object] = ()):
        """**Arguments:**

        - `matrix`: a two-dimensional SciPy sparse array or matrix of any format, or a `BCOO` or
            `BCSR` of `jax.experimental.sparse`, whose entries may be traced, but whose indices may
            not. Integers and booleans become floats.
        - `tags`: lineax tags such as `lineax.symmetric_tag`. They are not checked.
        """
        self.tags = frozenset(tags if isinstance(tags, Iterable) else [tags])
        self.data, self.pattern = _entries(matrix)

    def __check_init__(self):
        if self.data.shape != self.pattern.rows.shape:
            raise ValueError(
                f"`data` has shape {self.data.shape}, but there are {self.nnz} places for entries. "
                "Give one number for each, in the order of `operator.data`."
            )

    @property
    def nnz(self) -> int:
        """The number of stored entries, explicit zeros and duplicates included."""
        return self.pattern.rows.shape[-1]

    def with_data(self, data: Inexact[Array, " nnz"]) -> "SparseLinearOperator":
        """An operator with the same sparsity and tags, and other entries. This costs nothing.

        **Arguments:**

        - `data`: the new entries, in the order of `operator.data`; they may be traced.
        """
        return SparseLinearOperator((_inexact(data), self.pattern), self.tags)

    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        """The product with a vector: about `nnz` multiply-adds, of half precision in float32."""
        if jnp.shape(vector) != (self.in_size(),):
            raise ValueError(
                f"The operator has shape {self.pattern.shape}: it multiplies vectors of shape "
                f"({self.in_size()},), got {jnp.shape(vector)}. For a block of vectors use "
                "`jax.vmap(operator.mv, in_axes=1, out_axes=1)`."
            )
        dtype = jnp.result_type(self.data, vector)
        return row_product(self.pattern.forward, self.data.astype(dtype), jnp.asarray(vector))

    def as_matrix(self) -> Inexact[Array, "m n"]:
        """The dense matrix."""
        zeros = jnp.zeros(self.pattern.shape, self.data.dtype)
        return zeros.at[self.pattern.rows, self.pattern.columns].add(self.data)

    def transpose(self) -> "SparseLinearOperator":
        """The transpose, as fast as the operator itself. A symmetric operator is its own."""
        if lx.is_symmetric(self):
            return self
        entries = self.data, self.pattern.transpose()
        return SparseLinearOperator(entries, lx.transpose_tags(self.tags))

    def in_structure(self) -> jax.ShapeDtypeStruct:
        """The structure of the vectors that the operator multiplies."""
        return jax.ShapeDtypeStruct((self.pattern.shape[1],), self.data.dtype)

    def out_structure(self) -> jax.ShapeDtypeStruct:
        """The structure of the products."""
        return jax.ShapeDtypeStruct((self.pattern.shape[0],), self.data.dtype)


def _diagonal(operator: SparseLinearOperator) -> Inexact[Array, " size"]:
    """The diagonal, in O(nnz)."""
    rows = operator.pattern.rows
    size = min(operator.pattern.shape)
    place = jnp.where(rows == operator.pattern.columns, rows, size)
    return jnp.zeros(size, operator.data.dtype).at[place].add(operator.data, mode="drop")


lx.linearise.register(SparseLinearOperator)(lambda operator: operator)
lx.materialise.register(SparseLinearOperator)(lambda operator: operator)
lx.diagonal.register(SparseLinearOperator)(_diagonal)
lx.conj.register(SparseLinearOperator)(lambda operator: operator.with_data(operator.data.conj()))
register_tags(SparseLinearOperator)

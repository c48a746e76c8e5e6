"""A sparse matrix as a lineax operator."""

import sys
from collections.abc import Iterable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Inexact

from .sparse_layout import SparsityPattern, row_product, sparsity_pattern
from .tags import register_tags


def _inexact(data: Any) -> Inexact[Array, " nnz"]:
    data = jnp.asarray(data)
    inexact = jnp.issubdtype(data.dtype, jnp.inexact)
    return data if inexact else data.astype(jax.dtypes.canonicalize_dtype(float))


def _scipy_entries(matrix: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    csr = matrix.tocsr(copy=True)
    csr.sum_duplicates()  # in place, as is the next
    csr.prune()
    coo = csr.tocoo()
    return coo.data, coo.row, coo.col


def _concrete(indices: Any) -> np.ndarray:
    if isinstance(indices, Tracer):
        raise ValueError(
            "The indices of a sparse matrix must be known when the operator is made, but they are "
            "traced (by jit, vmap, ...). Make the operator outside of the transformation, and "
            "inside replace its entries with `operator.with_data(data)`."
        )
    return np.asarray(indices)


def _jax_entries(matrix: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    if matrix.n_batch or matrix.n_dense:
        raise ValueError(
            f"A {type(matrix).__name__} with batch or dense dimensions (n_batch={matrix.n_batch}, "
            f"n_dense={matrix.n_dense}) is not one sparse matrix. Convert it with `n_batch=0` and "
            "`n_dense=0`."
        )
    indices = _concrete(matrix.indices)
    if hasattr(matrix, "indptr"):  # BCSR, whose buffers can be longer than the entries
        lengths = np.diff(_concrete(matrix.indptr))
        rows = np.repeat(np.arange(lengths.size), lengths)
        return matrix.data[: rows.size], rows, indices[: rows.size]
    # The padding of a BCOO lies outside of the matrix, and may hold anything, NaN included.
    inside = np.all(indices < np.array(matrix.shape), axis=1)
    data = matrix.data if inside.all() else matrix.data[np.flatnonzero(inside)]
    return data, indices[inside, 0], indices[inside, 1]


def _is_jax_sparse(matrix: Any) -> bool:
    # Importing the module takes time, and a user who has such a matrix has imported it.
    module = sys.modules.get("jax.experimental.sparse")
    return module is not None and isinstance(matrix, module.BCOO | module.BCSR)


def _entries(matrix: Any) -> tuple[Array, SparsityPattern]:
    """The values of the entries and their pattern, of a matrix or from such a pair."""
    if isinstance(matrix, tuple):
        return matrix
    is_scipy = hasattr(matrix, "tocsr") and hasattr(matrix, "nnz")
    if not is_scipy and not _is_jax_sparse(matrix):
        raise TypeError(
            "A sparse operator is made from a SciPy sparse array, a BCOO or a BCSR, got "
            f"{type(matrix).__name__}. Convert it with `scipy.sparse.csr_array(matrix)`, or wrap a "
            "dense matrix in `lineax.MatrixLinearOperator(matrix)`."
        )
    data, rows, columns = _scipy_entries(matrix) if is_scipy else _jax_entries(matrix)
    m, n = map(int, matrix.shape)
    return _inexact(data), sparsity_pattern(rows, columns, (m, n))


@final
class SparseLinearOperator(lx.AbstractLinearOperator):
    """A sparse matrix as a linear operator, with fast products with blocks of vectors.

    A product costs one multiplication and one addition for each entry. The fast case is a block of
    vectors, `jax.vmap(operator.mv, in_axes=1, out_axes=1)`, which is what every estimator uses. A
    product is differentiable with respect to `data` and to the vector, though for the latter
    `operator.T.mv(cotangent)` is many times as fast as reverse mode.

    Memory: the entries, and some 30 bytes of indices for each, which NumPy works out once, when the
    operator is made.

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

r"""A kernel matrix, K_ij = k(x_i, x_j), which is never formed.

Products go over K in square tiles, which are evaluated, multiplied and forgotten. As K is
Hermitian, a tile beside the diagonal stands for two: it multiplies from either side. Reverse mode
evaluates a tile again, so that derivatives, too, take memory for a tile alone.

With c blocks of rows, the j-th one has the rows j, j + c, j + 2 c, ...: where the rows of x are cut
over devices, each device has the same number of rows of every block.
"""

import math
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, PyTree

from .._core.counts import checked_count
from .._core.precision import matmul, platform
from .._core.programs import closed_function
from .parameters import structure_of
from .tags import inexact_dtype, register_tags

#: The most numbers in one tile: 4 MiB in float32 on a CPU, whose caches should hold it, and 64 MiB
#: elsewhere, where small tiles do not fill the device.
_BLOCK = 2**20
_BLOCK_ELSEWHERE = 2**24

#: A matrix of so many numbers is stored while an algorithm takes products, which then read it in a
#: quarter of the time of evaluations.
_STORED = 2**24


def _conjugated(kernel: Callable[..., Any], x: PyTree[Array], y: PyTree[Array]) -> Array:
    """The transpose of a complex kernel, which is Hermitian."""
    return jnp.conj(kernel(x, y))


def _cut(rows: PyTree[Array], count: int) -> PyTree[Array]:
    """`count` blocks of rows, see above. Copies of the first row fill up the last blocks."""

    def cut(leaf):
        more = jnp.broadcast_to(leaf[:1], (-leaf.shape[0] % count, *leaf.shape[1:]))
        padded = jnp.concatenate([leaf, more]) if more.shape[0] else leaf
        return jnp.moveaxis(padded.reshape(-1, count, *leaf.shape[1:]), 1, 0)

    return jtu.tree_map(cut, rows)


def _inputs(x: PyTree[Any]) -> PyTree[Array]:
    """The inputs as arrays, or an error that says what is wrong with them."""
    leaves, treedef = jtu.tree_flatten(x)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    rows = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(rows) != 1 or None in rows:
        raise ValueError(
            "The inputs x of a kernel must be an array with one row for each point, or a PyTree of "
            f"such arrays with equally many rows, got shapes {[x.shape for x in leaves]}. Give an "
            "array of shape (n,) or (n, d)."
        )
    return jtu.tree_unflatten(treedef, leaves)


@final
class KernelLinearOperator(lx.AbstractLinearOperator):
    """The matrix $K_{ij} = k(x_i, x_j)$ of a kernel at n points, positive semidefinite and never
    formed.

    It is differentiable with respect to the points and to all arrays that the kernel depends on.
    `amplitude * K + noise * I` with any (traced) scalars, `K + D`, `K1 + K2` and `D @ K @ D` with
    diagonal operators `D` are recognised: see [`traceax.extend.columns`][].

    **Cost:** about `n^2 / 2` evaluations of the kernel for a product with any number of vectors at
    once, and again for its derivative; `block_size` x n numbers of memory; n evaluations for a
    column. If the rows of `x` are cut over several devices, so is the work.

    **Attributes:**

    - `kernel`, `x`, `block_size`: as given, the kernel closure-converted.
    """

    kernel: Any
    x: PyTree[Array]
    block_size: int | None = eqx.field(static=True)
    _dtype: np.dtype = eqx.field(static=True)
    tags: ClassVar[frozenset[object]] = frozenset([lx.positive_semidefinite_tag])

    def __init__(
        self, kernel: Callable[..., Any], x: PyTree[Any], *, block_size: int | None = None
    ):
        """**Arguments:**

        - `kernel`: a function or module: `kernel(x_i, x_j)` is a number, for any two points. It
            must be positive semidefinite (which is not checked).
        - `x`: the points, an array of shape `(n,)` or `(n, d)`, or a PyTree of arrays with n rows.
        - `block_size`: so many rows' worth of numbers of K are evaluated at once, in a square tile.
            By default $2^{20}$ numbers, which fit into the cache of a CPU.
        """
        self.x = _inputs(x)
        self.block_size = checked_count(
            block_size, "block_size (rows evaluated at once)", none="it is chosen from n"
        )
        point = structure_of(self.x, axes=1)
        value = jax.eval_shape(kernel, point, point)
        if getattr(value, "shape", None) != ():
            raise ValueError(
                f"The kernel must return a number for two points, got {value} for points {point}. "
                "Add up over the coordinates of a point; of a function of blocks take a block of "
                "one, `lambda a, b: kernel(a[None], b[None])[0, 0]`."
            )
        self._dtype = inexact_dtype(value.dtype)
        self.kernel = closed_function(kernel, point, point)

    def block(self, x: PyTree[Array], y: PyTree[Array]) -> Inexact[Array, "b m"]:
        """The kernel of all pairs of two blocks of points."""
        b, m = (jtu.tree_leaves(points)[0].shape[0] for points in (x, y))

        # The axes of the pairs are the last: on CPUs a sum over a last axis of coordinates is slow.
        def spread(points, axis):
            def pairs(leaf):
                last = jnp.expand_dims(jnp.moveaxis(leaf, 0, -1), axis)
                return jnp.broadcast_to(last, (*leaf.shape[1:], b, m))

            return jtu.tree_map(pairs, points)

        of_pairs = jax.vmap(jax.vmap(self.kernel, -1, -1), -2, -2)
        return of_pairs(spread(x, -1), spread(y, -2)).astype(self._dtype)

    def _tiles(self) -> int:
        """The number of blocks of rows, and of columns, that tiles of the matrix are cut into."""
        n = self.in_size()
        most = _BLOCK if platform() == "cpu" else _BLOCK_ELSEWHERE
        return -(-n // math.isqrt((self.block_size or max(1, most // n)) * n))

    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        """The product with a vector: `n^2 / 2` evaluations, shared by all vectors of a `vmap`."""
        n = self.in_size()
        count = self._tiles()  # c
        if count == 1:
            return jax.checkpoint(lambda x: matmul(self.block(x, x), vector))(self.x)
        x = _cut(self.x, count)
        v = _cut(jnp.pad(vector, (0, -n % count)), count)

        @partial(jax.checkpoint, prevent_cse=False)
        def products(i, j):
            tile = self.block(*(jtu.tree_map(itemgetter(number), x) for number in (i, j)))
            return matmul(tile, v[j]), jnp.where(i == j, 0, matmul(v[i], jnp.conj(tile)))

        def add(total, pair):
            for number, product in zip(pair, products(*pair), strict=True):
                total = lax.dynamic_update_index_in_dim(total, total[number] + product, number, 0)
            return total, None

        pairs = tuple(map(jnp.asarray, np.triu_indices(count)))
        total, _ = lax.scan(add, jnp.zeros_like(v), pairs)
        return total.T.reshape(-1)[:n]

    def entries(self, rows: Any, columns: Any) -> Inexact[Array, "a b"]:
        """The entries `K[rows][:, columns]`, one evaluation for each. Their derivative evaluates
        them again.

        **Arguments:**

        - `rows`, `columns`: vectors of indices, or `slice(None)` for all.
        """

        def block(x):
            return self.block(*(jtu.tree_map(itemgetter(i), x) for i in (rows, columns)))

        return jax.checkpoint(block)(self.x)

    def as_matrix(self) -> Inexact[Array, "n n"]:
        """The dense matrix: `n^2` evaluations."""
        return self.entries(slice(None), slice(None))

    def transpose(self) -> "KernelLinearOperator":
        """The transpose: the operator itself, unless the kernel is complex."""
        if not jnp.issubdtype(self._dtype, jnp.complexfloating):
            return self
        conjugated = jtu.Partial(_conjugated, self.kernel)
        return eqx.tree_at(lambda operator: operator.kernel, self, conjugated)

    def in_structure(self) -> jax.ShapeDtypeStruct:
        """The structure of the vectors that the operator multiplies."""
        return jax.ShapeDtypeStruct((jtu.tree_leaves(self.x)[0].shape[0],), self._dtype)

    def out_structure(self) -> jax.ShapeDtypeStruct:
        """The structure of the products."""
        return self.in_structure()


@lx.materialise.register(KernelLinearOperator)
def _(operator):
    return lx.MatrixLinearOperator(operator.as_matrix(), lx.positive_semidefinite_tag)


@lx.diagonal.register(KernelLinearOperator)
def _(operator):
    numbers = jnp.arange(operator.in_size())[:, None]
    return jax.vmap(lambda i: operator.entries(i, i)[0, 0])(numbers)


@lx.linearise.register(KernelLinearOperator)
def _(operator):
    few = operator.in_size() ** 2 <= _STORED and operator.block_size is None
    return lx.materialise(operator) if few else operator


lx.conj.register(KernelLinearOperator)(lambda operator: operator.T)  # the matrix is Hermitian
register_tags(KernelLinearOperator)

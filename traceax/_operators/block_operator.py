"""A lineax operator seen as an `n x n` matrix that multiplies blocks of vectors."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, PyTree

from .._core.precision import any_promotion, at_least_single, matmul
from .curvature import CurvatureOperator
from .kernel import KernelLinearOperator
from .precision import product_precision
from .sparse import SparseLinearOperator
from .tags import inexact_dtype, is_hermitian, leaf_dtypes, parts_of, without_tags

#: The most numbers in one block of vectors (512 MiB in float32), where an algorithm is free to work
#: in several smaller blocks.
BLOCK_LIMIT = 2**27

#: The most numbers in one block of vectors that share no work, such as quadratic forms without
#: products: a block larger than the cache saves no time then.
APART_LIMIT = 2**18

#: The most vectors that a function is given at once. Wider programs take more memory, and can give
#: wrong results: they did with JAX 0.10.2 on CPUs, in products with the transposed Jacobian of a
#: transformer that is scanned over its layers.
FUNCTION_LIMIT = 64

#: Operators that do arithmetic with what they store: reading their diagonal costs no product.
STORED = (
    lx.MatrixLinearOperator,
    lx.PyTreeLinearOperator,
    lx.DiagonalLinearOperator,
    lx.TridiagonalLinearOperator,
    lx.IdentityLinearOperator,
    SparseLinearOperator,
)


@final
class BlockOperator:
    """A square operator as the estimators see it: `n`, a working dtype, and block products.

    **Attributes:**

    - `operator`: the lineax operator. Products run in its own dtypes.
    - `batch_size`: how many vectors to multiply at once. By default a block has at most $2^{27}$
        numbers, and at most 64 vectors if the operator calls functions.
    - `n`: the number of rows.
    - `dtype`: the working dtype, of probes, products and estimates: the widest of the operator's
        dtypes, but at least float32.
    - `eps`: the relative precision of a product: that of the narrowest dtype, in functions too.
    """

    def __init__(self, operator: lx.AbstractLinearOperator, batch_size: int | None = None):
        self.operator = operator
        self._untagged = without_tags(operator)
        self.batch_size = batch_size
        self.n = operator.in_size()
        dtypes = leaf_dtypes(operator) or [jax.dtypes.canonicalize_dtype(float)]
        with any_promotion():
            self.dtype = at_least_single(jnp.result_type(*dtypes))

    @cached_property
    def eps(self) -> float:
        """The relative precision of a product."""
        of_dtypes = [float(jnp.finfo(dtype).eps) for dtype in leaf_dtypes(self.operator)]
        return max(product_precision(self.operator), *of_dtypes)

    def linearised(self) -> "BlockOperator":
        """The operator with the shared work of products done once: a Jacobian's primal pass."""
        try:
            linear = BlockOperator(lx.linearise(self.operator), self.batch_size)
        except NotImplementedError:  # a user's operator that does not register `linearise`
            return self
        linear.eps = self.eps  # the precision of what it is from does not show in it
        return linear

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the leaves of the input structure."""
        return [leaf.shape for leaf in jtu.tree_leaves(self.operator.in_structure())]

    @property
    def sizes(self) -> list[int]:
        """The sizes of the leaves of the input structure."""
        return [math.prod(shape) for shape in self.shapes]

    def leaves(self, rows: Inexact[Array, "n ..."]) -> list[Inexact[Array, "size ..."]]:
        """The rows that belong to each leaf of the input structure."""
        return jnp.split(rows, np.cumsum(self.sizes)[:-1])

    @staticmethod
    def join(blocks: Sequence[Inexact[Array, "*leaf m"]]) -> Inexact[Array, "n m"]:
        """The blocks of all leaves, joined to one block of n rows."""
        rows = [x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in blocks]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows)

    def mm(self, block: Inexact[Array, "n m"]) -> Inexact[Array, "n m"]:
        """The product `A @ block` with a block of m vectors: m matvecs."""
        # For leaves that are matrices, such as the weights of a network, one transpose of the whole
        # block takes less time than one of each leaf.
        if any(len(shape) > 1 for shape in self.shapes):
            return by_columns(self._products_of_rows, self.batch_width(block.shape[-1]), [block])[0]
        return self.join(self.mm_by_leaf(self.leaves(block)))

    def mm_by_leaf(self, blocks: Sequence[Inexact[Array, "*leaf m"]]) -> list[Array]:
        """The product `A @ block` of lists with one block for each leaf, of the axes of the leaf or
        one of its size: no array has all n rows.
        """
        products = partial(self._products, axis=-1)
        return by_columns(products, self.batch_width(blocks[0].shape[-1]), list(blocks))

    def _products_of_rows(self, blocks: list[Inexact[Array, "n m"]]) -> list[Array]:
        """The product with one block, whose transpose is cut into leaves."""
        rows = jnp.split(blocks[0].T, np.cumsum(self.sizes)[:-1], axis=1)
        return [jnp.concatenate(self._products(rows, axis=0), axis=1).T]

    def batch_width(self, wanted: int) -> int:
        """How many vectors to multiply at once, of so many."""
        if isinstance(self._untagged, lx.MatrixLinearOperator):
            return wanted
        return self.batch_size or default_width(self.operator, wanted)

    def _products(self, blocks: list[Array], axis: int) -> list[Array]:
        """The products with m vectors, one block a leaf; `axis`, 0 or -1, numbers them."""
        vectors = self._as_vectors(blocks, axis)
        operator = self._untagged
        if isinstance(operator, lx.MatrixLinearOperator):
            products = matmul(operator.matrix, vectors)
        else:
            products = jax.vmap(operator.mv, in_axes=axis, out_axes=axis)(vectors)
        m = blocks[0].shape[axis]
        self._check_products(products, m)
        leaves = [x.astype(self.dtype) for x in jtu.tree_leaves(products)]
        if [x.size for x in leaves] != [m * size for size in self.sizes]:
            # The leaves of the output have other sizes than those of the input.
            flat = [x.reshape(m, -1) if axis == 0 else x.reshape(-1, m) for x in leaves]
            whole = jnp.concatenate(flat, axis=1 + axis)
            leaves = jnp.split(whole, np.cumsum(self.sizes)[:-1], axis=1 + axis)
        return [x.reshape(block.shape) for x, block in zip(leaves, blocks, strict=True)]

    def _check_products(self, products: PyTree, m: int) -> None:
        """Raise a `ValueError` if m products have another size or field than the operator says."""
        leaves = jtu.tree_leaves(products)
        real = not jnp.issubdtype(self.dtype, jnp.complexfloating)
        fits = sum(x.size for x in leaves) == m * self.n
        if not fits or (real and any(map(jnp.iscomplexobj, leaves))):
            raise ValueError(
                f"{m} products of this {type(self._untagged).__name__} are "
                f"{eqx.tree_pformat(products, width=1000)}, but its structures say {self.n} "
                f"{'real' if real else 'complex'} numbers each. Return from `mv` what "
                "`out_structure` says, and declare the input of a complex operator complex."
            )

    def quadratic_forms(self, blocks: Sequence[Inexact[Array, "*leaf m"]]) -> Inexact[Array, " m"]:
        """The numbers $v_i^* A v_i$, for m vectors given leaf by leaf: m matvecs, or the quadratic
        forms of a curvature operator.
        """
        blocks = list(blocks)
        if not self.has_forms:
            return self.forms(blocks, blocks)
        operator: Any = self._untagged

        def of_columns(blocks):
            form = partial(operator.mean, operator.form)
            values = jax.vmap(form, in_axes=-1)(self._as_vectors(blocks, -1))
            return [values.astype(self.dtype)]

        return by_columns(of_columns, self.batch_width(blocks[0].shape[-1]), blocks)[0]

    def forms(
        self, left: list[Inexact[Array, "*leaf m"]], right: list[Inexact[Array, "*leaf m"]]
    ) -> Inexact[Array, " m"]:
        """The numbers $v_i^* A u_i$: m matvecs. Only one width of products is held at a time."""

        def of_columns(left, right):
            dots = [
                jnp.sum(jnp.conj(v) * p, axis=tuple(range(v.ndim - 1)))
                for v, p in zip(left, self._products(right, axis=-1), strict=True)
            ]
            return [sum(dots, start=jnp.zeros(left[0].shape[-1], self.dtype))]

        return by_columns(of_columns, self.batch_width(right[0].shape[-1]), left, right)[0]

    @property
    def has_forms(self) -> bool:
        """Whether quadratic forms take no products."""
        operator = self._untagged
        return isinstance(operator, CurvatureOperator) and operator.form is not None

    def _as_vectors(self, blocks: Sequence[Array], axis: int) -> PyTree:
        """Blocks of vectors (first or last axis) with the shapes and dtypes of the operator."""
        leaves, treedef = jtu.tree_flatten(self.operator.in_structure())
        m = blocks[0].shape[axis]

        def shaped(leaf, block):
            shape = (m, *leaf.shape) if axis == 0 else (*leaf.shape, m)
            return block.reshape(shape).astype(inexact_dtype(leaf.dtype))

        vectors = [shaped(leaf, block) for leaf, block in zip(leaves, blocks, strict=True)]
        return jtu.tree_unflatten(treedef, vectors)

    def adjoint_mm(self, block: Inexact[Array, "n m"]) -> Inexact[Array, "n m"]:
        """The product of $A^*$ with a block of m vectors: m matvecs, of A if A is Hermitian."""
        if is_hermitian(self.operator):
            return self.mm(block)
        # A^H x = conj(A^T conj(x))
        transposed = BlockOperator(transpose_of(self.operator), self.batch_size)
        return jnp.conj(transposed.mm(jnp.conj(block)))


def transpose_of(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The transpose, or an error that says which product is not linear."""
    try:
        return operator.transpose()
    except (AssertionError, NotImplementedError) as error:  # of JAX
        raise ValueError(
            f"JAX cannot transpose the product of this {type(operator).__name__} (with vectors "
            f"{operator.in_structure()}): it is not linear in the vector, or its class has no "
            "`transpose`. Give a linear function, or the derivative of this one: "
            "`lineax.JacobianLinearOperator`."
        ) from error


def unflatten(
    structure: PyTree, vector: Inexact[Array, " n"] | Sequence[Inexact[Array, " size"]]
) -> PyTree[Inexact[Array, "..."]]:
    """A vector, whole or leaf by leaf, as a PyTree of this structure. The dtype stays."""
    leaves, treedef = jtu.tree_flatten(structure)
    if not isinstance(vector, list | tuple):
        ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])
        vector = jnp.split(jnp.asarray(vector), ends[:-1])
    shaped = [part.reshape(leaf.shape) for part, leaf in zip(vector, leaves, strict=True)]
    return jtu.tree_unflatten(treedef, shaped)


# --- how many vectors are multiplied at once ------------------------------------------------------


def block_width(n: int, wanted: int, limit: int = BLOCK_LIMIT) -> int:
    """How many vectors of size `n` to multiply at once: `wanted`, or what the limit allows."""
    return max(1, min(wanted, limit // max(n, 1)))


def default_width(operator: lx.AbstractLinearOperator, wanted: int) -> int:
    """How many vectors to multiply at once: as many as are wanted, within the limits."""
    width = block_width(operator.in_size(), wanted)
    if calls_functions(operator):
        width = min(width, FUNCTION_LIMIT)
    return -(-wanted // -(-wanted // width))  # as many blocks as needed, of widths nearly the same


def calls_functions(operator: lx.AbstractLinearOperator) -> bool:
    """Whether a product calls a function, rather than multiplying stored numbers."""
    inner = parts_of(operator)
    if inner:
        return any(map(calls_functions, inner))
    # A kernel is evaluated once for all vectors.
    return not isinstance(operator, (*STORED, KernelLinearOperator))


def by_columns(fn: Callable[..., list[Array]], width: int, *blocks: list[Array]) -> list[Array]:
    """`fn(*blocks)`, evaluated on `width` columns (along the last axes) at a time.

    Reverse mode evaluates `fn` on these columns again, so that no intermediate values are kept.
    """
    m = blocks[0][0].shape[-1]
    if width >= m:
        return fn(*blocks)

    @partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
    def panel(start, blocks, size):
        cut = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=-1)
        return fn(*jtu.tree_map(cut, blocks))

    def put(results, start, size):
        pairs = zip(results, panel(start, blocks, size), strict=True)
        return [lax.dynamic_update_slice_in_dim(x, y, start, axis=-1) for x, y in pairs]

    whole, rest = divmod(m, width)
    # All initial values are overwritten. New zeros would take memory from the start; a block that
    # exists anyway does not.
    results = [
        lax.stop_gradient(x).astype(y.dtype) if x.shape == y.shape else jnp.zeros(y.shape, y.dtype)
        for x, y in zip(blocks[0], jax.eval_shape(fn, *blocks), strict=False)
    ]
    starts = width * jnp.arange(whole)
    results, _ = lax.scan(lambda results, i: (put(results, i, width), None), results, starts)
    return put(results, whole * width, rest) if rest else results

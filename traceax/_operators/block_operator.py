"""A lineax operator seen as an `n x n` matrix that multiplies blocks of vectors."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, PyTree

from .._core.estimate import scale_of
from .._core.precision import any_promotion, at_least_single, matmul, widened
from .._core.programs import (
    ClosedFunction,
    closed_function,
    closed_functions,
    is_converted,
    is_plain,
)
from .curvature import CurvatureOperator
from .precision import eps_of_product
from .width import batch_width, by_columns, parts_of


def _answer(check: Callable[[lx.AbstractLinearOperator], bool], operator) -> bool | None:
    """`check(operator)`, or None where a user's operator does not register the check."""
    try:
        return bool(check(operator))
    except NotImplementedError:
        return None


def is_tagged(check: Callable[[lx.AbstractLinearOperator], bool], operator) -> bool:
    """`check(operator)`, or False where a user's operator does not register the check."""
    return bool(_answer(check, operator))


def semidefinite_sign(operator: lx.AbstractLinearOperator) -> int:
    """1 if the operator is tagged positive semidefinite, -1 if tagged negative, 0 if neither."""
    if is_tagged(lx.is_positive_semidefinite, operator):
        return 1
    return -1 if is_tagged(lx.is_negative_semidefinite, operator) else 0


def check_semidefinite(operator: lx.AbstractLinearOperator, name: str, instead: str) -> None:
    """Raise a `ValueError` unless the operator is tagged semidefinite."""
    if semidefinite_sign(operator) == 0:
        raise ValueError(
            f"{name} needs a semidefinite operator, and this {type(operator).__name__} is not "
            "tagged so. If it is, say so with `lineax.TaggedLinearOperator(operator, "
            "lineax.positive_semidefinite_tag)` (or `negative_semidefinite_tag`); otherwise use "
            f"{instead}."
        )


def is_complex(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the operator is over the complex numbers."""
    return any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in _leaf_dtypes(operator))


def gram(
    operator: lx.AbstractLinearOperator, *, rows: bool = False, unit: Array | float | None = None
) -> lx.AbstractLinearOperator:
    """The Gram operator A^H A (of the columns), or A A^H (of the rows), tagged semidefinite: of A
    divided by a unit, if one is given.

    For an operator in half precision it is one in single precision, with images that are scaled to
    1 before the second product: squares have twice as many orders of magnitude.
    """
    adjoint = _as_part(operator.T)
    adjoint = lx.conj(adjoint) if is_complex(operator) else adjoint
    operator = _as_part(operator)
    second, first = (operator, adjoint) if rows else (adjoint, operator)
    wide = jtu.tree_map(_at_least_single, operator.in_structure())
    if wide != operator.in_structure():
        unit = jnp.ones((), jnp.float32) if unit is None else unit
        product = _NarrowGram(first, second, jnp.asarray(unit, jnp.float32))
        return _operator_of(product, wide, frozenset({lx.positive_semidefinite_tag}))
    if unit is not None:
        # Most of the square of the unit goes between both products, so that the image of an extreme
        # operator is not extreme, and some of it to the end, where reverse mode begins.
        narrowest = min(_leaf_dtypes(operator), key=lambda dtype: jnp.finfo(dtype).bits)
        unit = jnp.asarray(unit, jnp.finfo(narrowest).dtype)  # leaves may be of several dtypes
        root = jnp.sqrt(unit)
        first, second = first / (unit * root), second / root
    return lx.TaggedLinearOperator(second @ first, lx.positive_semidefinite_tag)


def _at_least_single(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jax.ShapeDtypeStruct(leaf.shape, at_least_single(leaf.dtype) if inexact else leaf.dtype)


@final
class _NarrowGram(eqx.Module):
    """The product with a Gram operator of half precision, for vectors of single precision."""

    first: lx.AbstractLinearOperator
    second: lx.AbstractLinearOperator
    unit: Array

    @property
    def precision(self) -> float:
        """The relative precision of a product."""
        return max(float(jnp.finfo(dtype).eps) for dtype in _leaf_dtypes(self.first))

    def __call__(self, vector):
        """See above."""

        def cast(tree, structure):
            return jtu.tree_map(lambda x, like: x.astype(like.dtype), tree, structure)

        with any_promotion():  # the factor of a multiple may be of any dtype
            image, _ = widened(self.first.mv(cast(vector, self.first.in_structure())))
            sizes = [jnp.max(jnp.abs(x), initial=0.0) for x in jtu.tree_leaves(image)]
            size = lax.stop_gradient(scale_of(jnp.stack([x.astype(jnp.float32) for x in sizes])))
            scaled = jtu.tree_map(lambda x: x / size, image)
            product = self.second.mv(cast(scaled, self.second.in_structure()))
        factor = size / self.unit / self.unit
        return jtu.tree_map(lambda x, like: x.astype(like.dtype) * factor, product, vector)


def _eps_of(operator: lx.AbstractLinearOperator) -> float:
    """The relative precision of products as functions and attributes in an operator show it: that
    of half precision inside of a function, or what an attribute `precision` says (of differences of
    gradients, of iterative solutions). 0 where nothing shows it.
    """
    function, worst = getattr(operator, "fn", None), 0.0
    if isinstance(operator, lx.FunctionLinearOperator):
        worst = eps_of_product(function, (operator.in_structure(), True))
    elif isinstance(operator, lx.JacobianLinearOperator):
        worst = eps_of_product(function, (operator.x, True), (operator.args, False))
    said = [getattr(x, "precision", None) or 0.0 for x in (operator, function)]
    return max(worst, *said, *map(_eps_of, parts_of(operator)))


def is_hermitian(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the tags say that A^H = A: symmetric (real operators) or semidefinite.

    **Arguments:**

    - `operator`: the operator.

    **Returns:**

    A Python bool.
    """
    if semidefinite_sign(operator) != 0:
        return True
    return not is_complex(operator) and is_tagged(lx.is_symmetric, operator)


def _leaf_dtypes(operator: lx.AbstractLinearOperator) -> list[np.dtype]:
    leaves = jtu.tree_leaves((operator.in_structure(), operator.out_structure()))
    floating = jax.dtypes.canonicalize_dtype(float)
    return [x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else floating for x in leaves]


def as_operator(operator: Any) -> lx.AbstractLinearOperator:
    """Check that `operator` is a square lineax operator over one field. Return it with every array
    that it depends on as a leaf, see `hoist_closures`.

    **Raises:**

    - `TypeError`: if it is an array, a function or anything else that is not an operator.
    - `ValueError`: if it is not square, or mixes real and complex arrays, or holds 64-bit numbers
        that are switched off.
    """
    if not isinstance(operator, lx.AbstractLinearOperator):
        got = f"got a {type(operator).__name__}"
        if eqx.is_array(operator):
            got = f"got an array of shape {operator.shape} and dtype {operator.dtype}"
        if eqx.is_array_like(operator) or isinstance(operator, list):
            hint = "wrap a matrix in `lineax.MatrixLinearOperator(matrix)`"
        elif hasattr(operator, "tocsr") or hasattr(operator, "todense"):
            hint = "wrap a sparse matrix in `traceax.SparseLinearOperator(matrix)`"
        elif callable(operator):
            hint = (
                "wrap a function in `lineax.FunctionLinearOperator(fn, input_structure)`, where "
                "`input_structure` is a `jax.ShapeDtypeStruct` (or a PyTree of them)"
            )
        else:
            hint = "pass one of lineax's operators, e.g. `lineax.MatrixLinearOperator(matrix)`"
        raise TypeError(f"The operator must be a lineax.AbstractLinearOperator, {got}: {hint}.")
    leaves = [x for x in jtu.tree_leaves(operator) if isinstance(x, jax.Array)]
    dtypes = {x.dtype for x in [*leaves, *jtu.tree_leaves(operator.in_structure())]}
    inexact = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    unknown = [dtype for dtype in inexact if jax.dtypes.canonicalize_dtype(dtype) != dtype]
    if unknown:
        raise ValueError(
            f"The operator has numbers of {unknown[0]}, which JAX does not compute with here: "
            "64-bit numbers are switched off. Call this where the operator was made, in "
            "`jax.enable_x64(True)`."
        )
    operator = hoist_closures(operator)
    rows, columns = operator.out_size(), operator.in_size()
    if columns == 0:
        raise ValueError(
            f"The operator has no columns, its input structure is {operator.in_structure()}: there "
            "is nothing to estimate. Check what the operator was made from."
        )
    if rows != columns:
        raise ValueError(
            f"The operator must be square, got {rows} x {columns} (outputs x inputs). "
            "For A with more rows than columns, tr(A^H A) is the trace of `A.T @ A` (real A); and "
            "`spectral_sum` of x^(p/2) for `A.T @ A`, tagged positive semidefinite, is the p-th "
            "power of its Schatten norm."
        )
    fields = {jnp.issubdtype(dtype, jnp.complexfloating) for dtype in _leaf_dtypes(operator)}
    if len(fields) > 1:
        raise ValueError(
            "The operator mixes real and complex arrays "
            f"(inputs {operator.in_structure()}, outputs {operator.out_structure()}), so it is "
            "not linear over one field. Declare its whole input structure complex."
        )
    return operator


def _without_tags(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    while isinstance(operator, lx.TaggedLinearOperator):
        operator = operator.operator
    return operator


def hoist_closures(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The operator with every array that it depends on as a leaf.

    NumPy arrays become JAX arrays, and so do the Python numbers that an operator is multiplied
    with. Functions (in an operator made with `closure_convert=False`, or without a closure) are
    converted to jaxprs: an array inside a function would be invisible to the primitive. An operator
    of somebody else's class is replaced by one that has only its product and its tags where a
    function in it or a static field may hold an array; and where it is a part of a sum or product,
    and does not say whether it is diagonal or tridiagonal, which sums and products of lineax ask
    for.
    """
    whole = _without_tags(operator)

    def convert(node):
        if isinstance(node, lx.FunctionLinearOperator) and not _is_closed(node.fn):
            closed = closed_function(node.fn, node.in_structure())
            return _operator_of(closed, node.in_structure(), node.tags)
        if isinstance(node, lx.JacobianLinearOperator) and not _is_closed(node.fn):
            closed = closed_function(node.fn, node.x, node.args)
            return lx.JacobianLinearOperator(
                closed, node.x, node.args, node.tags, node.jac, closure_convert=False
            )
        if isinstance(node, lx.MulLinearOperator | lx.DivLinearOperator):
            inner = jtu.tree_map(convert, node.operator, is_leaf=stops)
            return _multiple(type(node), inner, node.scalar)
        if is_foreign(node):
            leaves, treedef = jtu.tree_flatten(node)
            others = [leaf for leaf in leaves if not isinstance(leaf, jax.Array | np.ndarray)]
            if not all(map(is_plain, [treedef, *others])):
                return _by_products(node)
            return node if node is whole else _as_part(node)
        return node

    def is_foreign(node):
        known = type(node).__module__.partition(".")[0] in ("lineax", "traceax")
        return isinstance(node, lx.AbstractLinearOperator) and not known

    def stops(node):
        own = lx.FunctionLinearOperator | lx.JacobianLinearOperator
        return is_foreign(node) or isinstance(
            node, own | lx.MulLinearOperator | lx.DivLinearOperator
        )

    def as_array(leaf):
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf

    operator = jtu.tree_map(convert, operator, is_leaf=stops)
    return jtu.tree_map(as_array, closed_functions(operator))


def _is_closed(function: Callable[..., Any]) -> bool:
    """Whether all arrays that a function holds are its leaves, or are after `closed_functions`."""
    return isinstance(function, ClosedFunction) or is_converted(function)


def _multiple(kind: Any, operator: lx.AbstractLinearOperator, scalar: Any):
    """A multiple or quotient, tagged semidefinite where the sign of the scalar is known. It must be
    read here: inside a program the scalar is traced.
    """
    if jnp.iscomplexobj(scalar) and not is_complex(operator):
        raise ValueError(
            f"A real operator was multiplied with (or divided by) the complex number {scalar}, and "
            "still says that its vectors are real. Make the operator complex first: of a matrix "
            "`lineax.MatrixLinearOperator(matrix.astype(complex))`, of a function one with a "
            "complex input structure."
        )
    multiple, sign = kind(operator, jnp.asarray(scalar)), semidefinite_sign(operator)
    if sign == 0 or isinstance(scalar, jax.core.Tracer):
        return multiple
    number = complex(np.asarray(scalar))  # NumPy, because under a trace JAX would return a tracer
    if number.imag != 0:
        return multiple
    # As inside a program, 0 and NaN pass for positive numbers: the outcome says what is wrong.
    positive = (number.real < 0) == (sign < 0)
    tag = lx.positive_semidefinite_tag if positive else lx.negative_semidefinite_tag
    return lx.TaggedLinearOperator(multiple, tag)


def _operator_of(function: Callable[..., Any], structure: PyTree, tags: frozenset[object]):
    return lx.FunctionLinearOperator(function, structure, tags, closure_convert=False)


def _by_products(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The operator with nothing but its product and its tags."""
    closed = closed_function(operator.mv, operator.in_structure())
    return _operator_of(closed, operator.in_structure(), _tags(operator))


def _as_part(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The operator as a part of a sum or product of lineax, which asks its parts whether they are
    diagonal or tridiagonal: `_by_products`, if it does not say.
    """
    answers = [_answer(check, operator) for check in (lx.is_diagonal, lx.is_tridiagonal)]
    return _by_products(operator) if None in answers else operator


def _tags(operator: lx.AbstractLinearOperator) -> frozenset[object]:
    """The tags for what a user's class says of itself."""
    checks = {
        lx.symmetric_tag: lx.is_symmetric,
        lx.diagonal_tag: lx.is_diagonal,
        lx.tridiagonal_tag: lx.is_tridiagonal,
        lx.unit_diagonal_tag: lx.has_unit_diagonal,
        lx.positive_semidefinite_tag: lx.is_positive_semidefinite,
        lx.negative_semidefinite_tag: lx.is_negative_semidefinite,
    }
    return frozenset(tag for tag, check in checks.items() if is_tagged(check, operator))


@final
class BlockOperator:
    """A square operator as the estimators see it: `n`, a working dtype, and block products.

    Products run in the operator's own dtypes, everything else in `dtype`: the widest of the
    operator's dtypes, but at least float32.

    **Attributes:**

    - `operator`: the lineax operator.
    - `n`: its size.
    - `dtype`: the working dtype, of probes, products and estimates.
    - `eps`: the relative precision of a product: that of the operator's narrowest dtype, which may
        be bfloat16, also where only the functions inside of it compute in bfloat16.

    The width of a product is what `in_batches` says. Otherwise a block has at most 2^27 numbers,
    and at most 64 vectors if the operator calls functions. A stored matrix multiplies all vectors
    at once, which takes no more memory.
    """

    def __init__(self, operator: lx.AbstractLinearOperator):
        self.operator = operator
        self.n = operator.in_size()
        dtypes = _leaf_dtypes(operator) or [jax.dtypes.canonicalize_dtype(float)]
        with any_promotion():
            self.dtype = at_least_single(jnp.result_type(*dtypes))

    @cached_property
    def eps(self) -> float:
        """The relative precision of a product."""
        dtypes = _leaf_dtypes(self.operator)
        return max(_eps_of(self.operator), *(float(jnp.finfo(dtype).eps) for dtype in dtypes))

    def linearised(self) -> "BlockOperator":
        """The same operator, with the work that all products share done once: for a Jacobian, the
        primal pass.
        """
        try:
            linear = BlockOperator(lx.linearise(self.operator))
        except NotImplementedError:  # a user's operator that does not register `linearise`
            return self
        linear.eps = self.eps  # the precision of what it is from does not show in it
        return linear

    @property
    def is_inexact(self) -> bool:
        """Whether products are less precise than the working dtype: those of half precision, and
        those that say so (differences of gradients).
        """
        return self.eps > float(jnp.finfo(self.dtype).eps)

    @property
    def shares_no_work(self) -> bool:
        """Whether products, once linearised, take no less time in a block than one by one."""
        operator = self._untagged()
        is_curvature = isinstance(operator, CurvatureOperator)
        return is_curvature and operator.batches is None and not operator.differences

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
        return split_rows(self.operator.in_structure(), rows)

    @staticmethod
    def join(blocks: Sequence[Inexact[Array, "*leaf m"]]) -> Inexact[Array, "n m"]:
        """The blocks of all leaves, joined to one block of n rows."""
        rows = [x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in blocks]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows)

    def mm(self, block: Inexact[Array, "n m"]) -> Inexact[Array, "n m"]:
        """The product `A @ block`: `m` matvecs."""
        if all(len(shape) < 2 for shape in self.shapes):
            return self.join(self.mm_by_leaf(self.leaves(block)))
        return by_columns(self._products_of_rows, self._width([block]), [block])[0]

    def mm_by_leaf(self, blocks: Sequence[Inexact[Array, "*leaf m"]]) -> list[Array]:
        """The product `A @ block`, where both the factor and the product are a list with one block
        for each leaf: no array with all n rows is made. A block may have the axes of its leaf, or
        one axis of the size of the leaf; its product has the same.
        """
        return by_columns(self._products, self._width(blocks), list(blocks))

    def _width(self, blocks: Sequence[Inexact[Array, "*leaf m"]]) -> int:
        """The number of vectors to multiply at once."""
        m = blocks[0].shape[-1]
        if isinstance(self._untagged(), lx.MatrixLinearOperator):
            return m
        return batch_width(self.operator, m)

    def _products(self, blocks: list[Inexact[Array, "*leaf m"]]) -> list[Array]:
        vectors = self._as_vectors(blocks, blocks[0].shape[-1:])
        operator = self._untagged()
        if isinstance(operator, lx.MatrixLinearOperator):
            products = matmul(operator.matrix, vectors)
        else:
            products = jax.vmap(operator.mv, in_axes=-1, out_axes=-1)(vectors)
        self._check_products(products, stacked=1)
        leaves = [x.astype(self.dtype) for x in jtu.tree_leaves(products)]
        if [math.prod(x.shape[:-1]) for x in leaves] != self.sizes:
            # The leaves of the output have other sizes than those of the input.
            leaves = self.leaves(self.join(leaves))
        return [x.reshape(block.shape) for x, block in zip(leaves, blocks, strict=True)]

    def _products_of_rows(self, blocks: list[Inexact[Array, "n m"]]) -> list[Array]:
        """The product with one block, for leaves that are matrices, such as the weights of a
        network. With the vectors as the first axis, one transpose of the whole block takes less
        time than a transpose of each leaf.
        """

        def product(vector):
            image = self._untagged().mv(self._as_vectors(self.leaves(vector), ()))
            self._check_products(image)
            leaves = [x.reshape(-1).astype(self.dtype) for x in jtu.tree_leaves(image)]
            return jnp.concatenate(leaves)

        return [jax.vmap(product)(blocks[0].T).T]

    def _check_products(self, products: PyTree, stacked: int = 0) -> None:
        """Raise a `ValueError` if products, stacked along so many last axes, do not have the size
        that the operator says, or are complex where the operator says that they are real.
        """
        leaves, name = jtu.tree_leaves(products), type(self._untagged()).__name__
        real = not jnp.issubdtype(self.dtype, jnp.complexfloating)
        if real and any(map(jnp.iscomplexobj, leaves)):
            raise ValueError(
                f"A product of this {name} is complex, but its structures say that it is real. "
                "Declare its whole input structure complex."
            )
        size = sum(math.prod(x.shape[: x.ndim - stacked]) for x in leaves)
        if size != self.n:
            raise ValueError(
                f"A product of this {name} has {size} numbers (leaves "
                f"{jax.tree.map(jnp.shape, products)}), but its `out_structure` says {self.n}. "
                "Return from `mv` what `out_structure` says."
            )

    def quadratic_forms(self, blocks: Sequence[Inexact[Array, "*leaf m"]]) -> Inexact[Array, " m"]:
        """The numbers `v_i^H A v_i`, for vectors given leaf by leaf: `m` matvecs.

        If the operator has a method `quadratic_form`, that computes them.
        """
        form, blocks = self._form(), list(blocks)
        if form is None:
            return self.forms(blocks, blocks)

        def forms(blocks):
            vectors = self._as_vectors(blocks, blocks[0].shape[-1:])
            return [jax.vmap(form, in_axes=-1)(vectors).astype(self.dtype)]

        return by_columns(forms, self._width(blocks), blocks)[0]

    def forms(
        self, left: list[Inexact[Array, "*leaf m"]], right: list[Inexact[Array, "*leaf m"]]
    ) -> Inexact[Array, " m"]:
        """The numbers `v_i^H A u_i`: `m` matvecs. Only one width of products is held at a time."""

        def forms(left, right):
            dots = [
                jnp.sum(jnp.conj(v) * p, axis=tuple(range(v.ndim - 1)))
                for v, p in zip(left, self._products(right), strict=True)
            ]
            return [sum(dots, start=jnp.zeros(left[0].shape[-1], self.dtype))]

        return by_columns(forms, self._width(right), left, right)[0]

    @property
    def has_forms(self) -> bool:
        """Whether the operator has a method of its own for `v^H A v`."""
        return self._form() is not None

    def _form(self) -> Callable[..., Any] | None:
        return getattr(self._untagged(), "quadratic_form", None)

    def _untagged(self) -> lx.AbstractLinearOperator:
        return _without_tags(self.operator)

    def _as_vectors(
        self, blocks: Sequence[Inexact[Array, "*leaf m"]], last: tuple[int, ...]
    ) -> PyTree:
        """Blocks as a PyTree of arrays of shape `(*shape, *last)` in the operator's dtypes."""
        leaves, treedef = jtu.tree_flatten(self.operator.in_structure())
        floating = jax.dtypes.canonicalize_dtype(float)

        def shaped(leaf, rows):
            dtype = leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.inexact) else floating
            return rows.reshape(*leaf.shape, *last).astype(dtype)

        vectors = [shaped(leaf, rows) for leaf, rows in zip(leaves, blocks, strict=True)]
        return jtu.tree_unflatten(treedef, vectors)

    def adjoint_mm(self, block: Inexact[Array, "n m"]) -> Inexact[Array, "n m"]:
        """The product `A^H @ block`: `m` matvecs, with A itself if A is Hermitian."""
        if is_hermitian(self.operator):
            return self.mm(block)
        # A^H x = conj(A^T conj(x))
        transposed = BlockOperator(self.operator.transpose())
        return jnp.conj(transposed.mm(jnp.conj(block)))

    def unflatten(self, vector: Inexact[Array, " n"] | Sequence[Inexact[Array, " size"]]) -> PyTree:
        """A vector, whole or leaf by leaf, as a PyTree of the operator's input structure (in the
        working dtype).
        """
        return unflatten(self.operator.in_structure(), vector)


def split_rows(
    structure: PyTree, rows: Inexact[Array, "n ..."]
) -> list[Inexact[Array, "size ..."]]:
    """The rows that belong to each leaf of a structure."""
    sizes = [math.prod(leaf.shape) for leaf in jtu.tree_leaves(structure)]
    if len(sizes) == 1:
        return [rows]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [rows[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def unflatten(
    structure: PyTree, vector: Inexact[Array, " n"] | Sequence[Inexact[Array, " size"]]
) -> PyTree[Inexact[Array, "..."]]:
    """A vector, whole or leaf by leaf, as a PyTree of this structure. The dtype stays."""
    leaves, treedef = jtu.tree_flatten(structure)
    whole = not isinstance(vector, list | tuple)
    parts = split_rows(structure, jnp.asarray(vector)) if whole else vector
    shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    return jtu.tree_unflatten(treedef, shaped)

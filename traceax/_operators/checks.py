"""The checks of an operator that a user passes, which make every array that it depends on a leaf of
it: in a function an array would be a constant of the program, and a tracer hidden from the rules of
the primitive.
"""

import dataclasses
from functools import partial, singledispatch
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np

from .._core.programs import (
    ClosedFunction,
    closed_function,
    closed_functions,
    is_converted,
    is_plain,
)
from .parameters import as_jax
from .precision import product_precision
from .tags import CHECKS, is_complex, is_part, is_tagged, leaf_dtypes, semidefinite_sign


def as_operator(operator: Any, square: bool = True) -> lx.AbstractLinearOperator:
    """The operator with every array as a leaf: NumPy arrays, numbers that multiply an operator, and
    contents of functions. An operator of another package keeps only its product and its tags where
    a function in it or a static field may hold an array. An error says if it is no lineax operator
    over one field, or not `square`.
    """
    if not isinstance(operator, lx.AbstractLinearOperator):
        raise TypeError(
            "The operator must be a lineax.AbstractLinearOperator, got "
            f"{type(operator).__name__}. Wrap a matrix in `lineax.MatrixLinearOperator(matrix)`, a "
            "sparse one in `traceax.SparseLinearOperator(matrix)`, and a function in "
            "`lineax.FunctionLinearOperator(fn, input_structure)`, where `input_structure` is a "
            "`jax.ShapeDtypeStruct` (or a PyTree of them)."
        )
    operator = as_jax(closed_functions(_hoisted(operator)))
    rows = operator.out_size()
    columns = operator.in_size()
    if columns == 0:
        raise ValueError(
            f"The operator has no columns, its input structure is {operator.in_structure()}: there "
            "is nothing to estimate. Check what the operator was made from."
        )
    if square and rows != columns:
        raise ValueError(
            f"The operator must be square, got {rows} x {columns} (outputs x inputs). "
            "Give `A.T @ A` (real A) for tr(A^H A); norms (`frobenius_norm`, `row_norms`) take A."
        )
    fields = {jnp.issubdtype(dtype, jnp.complexfloating) for dtype in leaf_dtypes(operator)}
    if len(fields) > 1:
        raise ValueError(
            "The operator mixes real and complex arrays "
            f"(inputs {operator.in_structure()}, outputs {operator.out_structure()}), so it is "
            "not linear over one field. Declare its whole input structure complex."
        )
    return operator


# --- arrays ---------------------------------------------------------------------------------------


@singledispatch
def _hoisted(node: Any) -> Any:
    """An operator (or a leaf of one) with its arrays as leaves."""
    return node


@_hoisted.register(lx.AbstractLinearOperator)
def _(node):
    if type(node).__module__.partition(".")[0] in ("lineax", "traceax"):
        return jtu.tree_map(_hoisted, node, is_leaf=partial(is_part, node))
    leaves, treedef = jtu.tree_flatten(node)
    others = [leaf for leaf in leaves if not isinstance(leaf, jax.Array | np.ndarray)]
    return node if all(map(is_plain, [treedef, *others])) else inexact(node, 0.0)


@_hoisted.register(lx.FunctionLinearOperator)
@_hoisted.register(lx.JacobianLinearOperator)
def _(node):
    if isinstance(node.fn, ClosedFunction) or is_converted(node.fn):
        return node
    is_function = isinstance(node, lx.FunctionLinearOperator)
    example = (node.in_structure(),) if is_function else (node.x, node.args)
    return eqx.tree_at(lambda x: x.fn, node, closed_function(node.fn, *example))


@_hoisted.register(lx.MulLinearOperator)
@_hoisted.register(lx.DivLinearOperator)
def _(node):
    """Tagged semidefinite by the sign of the scalar, read here, as programs trace the scalar."""
    operator = _hoisted(node.operator)
    scalar = node.scalar
    if jnp.iscomplexobj(scalar) and not is_complex(operator):
        raise ValueError(
            f"A real operator was multiplied with (or divided by) the complex number {scalar}, and "
            "still says that its vectors are real. Make the operator complex first: of a matrix "
            "`lineax.MatrixLinearOperator(matrix.astype(complex))`, of a function one with a "
            "complex input structure."
        )
    multiple = type(node)(operator, jnp.asarray(scalar))
    sign = semidefinite_sign(operator)
    if sign == 0 or isinstance(scalar, jax.core.Tracer):
        return multiple
    number = complex(np.asarray(scalar))  # NumPy, because under a trace JAX would return a tracer
    if number.imag != 0:
        return multiple
    # As inside a program, 0 and NaN pass for positive numbers: the outcome says what is wrong.
    positive = (number.real < 0) == (sign < 0)
    tag = lx.positive_semidefinite_tag if positive else lx.negative_semidefinite_tag
    return lx.TaggedLinearOperator(multiple, tag)


def inexact(operator: lx.AbstractLinearOperator, precision: float) -> lx.FunctionLinearOperator:
    """The same operator, with products declared coarser than their dtype, such as solutions by
    conjugate gradients. Standard errors and checks of symmetry allow for that.

    **Arguments:**

    - `operator`: the operator, whose tags stay.
    - `precision`: the relative error of a product, such as the `rtol` of its solves.

    **Returns:** a lineax operator.
    """
    structure = operator.in_structure()
    closed = closed_function(operator.mv, structure)
    precision = max(precision, product_precision(operator))
    closed = dataclasses.replace(closed, precision=precision)
    tags = frozenset(tag for tag, check in CHECKS.items() if is_tagged(check, operator))
    return lx.FunctionLinearOperator(closed, structure, tags, closure_convert=False)

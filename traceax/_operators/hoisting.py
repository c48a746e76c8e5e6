"""Every array that an operator depends on, as a leaf of it: within a function an array would be a
constant of the program, and a tracer invisible to the rules of the primitive.
"""

import dataclasses
from collections.abc import Callable
from functools import partial, singledispatch
from typing import Any

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
from .questions import product_precision
from .tags import CHECKS, is_complex, is_part, is_tagged, semidefinite_sign


def hoist_closures(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The operator with every array as a leaf: NumPy arrays, numbers that multiply an operator, and
    contents of functions. An operator of another package keeps only its product and its tags where
    a function in it or a static field may hold an array.
    """
    return as_jax(closed_functions(_hoisted(operator)))


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
def _(node):
    if _is_closed(node.fn):
        return node
    closed = closed_function(node.fn, node.in_structure())
    structure = node.in_structure()
    return lx.FunctionLinearOperator(closed, structure, node.tags, closure_convert=False)


@_hoisted.register(lx.JacobianLinearOperator)
def _(node):
    if _is_closed(node.fn):
        return node
    closed = closed_function(node.fn, node.x, node.args)
    return lx.JacobianLinearOperator(
        closed, node.x, node.args, node.tags, node.jac, closure_convert=False
    )


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


def _is_closed(function: Callable[..., Any]) -> bool:
    """Whether all arrays that a function holds are its leaves, or are after `closed_functions`."""
    return isinstance(function, ClosedFunction) or is_converted(function)


def inexact(operator: lx.AbstractLinearOperator, precision: float) -> lx.FunctionLinearOperator:
    """The same operator, with products declared coarser than their dtype, such as solutions by
    conjugate gradients. Standard errors and checks of symmetry allow for that.

    !!! Example

        ```python
        hat = lx.FunctionLinearOperator(smoothed, structure, lx.positive_semidefinite_tag)
        tr.trace(key, tr.inexact(hat, 1e-6), k=50)  # solved with `rtol=1e-6`
        ```

    **Arguments:**

    - `operator`: the operator, whose tags stay.
    - `precision`: the relative error of a product.
    """
    structure = operator.in_structure()
    closed = closed_function(operator.mv, structure)
    precision = max(precision, product_precision(operator))
    closed = dataclasses.replace(closed, precision=precision)
    tags = frozenset(tag for tag, check in CHECKS.items() if is_tagged(check, operator))
    return lx.FunctionLinearOperator(closed, structure, tags, closure_convert=False)

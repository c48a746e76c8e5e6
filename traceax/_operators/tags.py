"""What the tags and the structures of an operator say of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np

Check = Callable[[lx.AbstractLinearOperator], bool]

#: lineax's tags, and the functions that ask for them.
CHECKS: dict[object, Check] = {
    lx.symmetric_tag: lx.is_symmetric,
    lx.diagonal_tag: lx.is_diagonal,
    lx.tridiagonal_tag: lx.is_tridiagonal,
    lx.unit_diagonal_tag: lx.has_unit_diagonal,
    lx.lower_triangular_tag: lx.is_lower_triangular,
    lx.upper_triangular_tag: lx.is_upper_triangular,
    lx.positive_semidefinite_tag: lx.is_positive_semidefinite,
    lx.negative_semidefinite_tag: lx.is_negative_semidefinite,
}

#: A^H = A where it holds for the operators that these are made of, and scalars are real.
LINEAR = lx.AddLinearOperator, lx.MulLinearOperator, lx.DivLinearOperator, lx.NegLinearOperator


def register_tags(kind: type[lx.AbstractLinearOperator]) -> None:
    """Let a class with the attribute `tags` answer what lineax asks as lineax's matrices do."""
    for check in CHECKS.values():
        registry: Any = check
        registry.register(kind)(registry.dispatch(lx.MatrixLinearOperator))


def is_tagged(check: Check, operator: lx.AbstractLinearOperator) -> bool:
    """`check(operator)`, or False where a user's operator does not register the check."""
    try:
        return bool(check(operator))
    except NotImplementedError:
        return False


def without_tags(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The operator inside of tagged ones."""
    while isinstance(operator, lx.TaggedLinearOperator):
        operator = operator.operator
    return operator


def semidefinite_sign(operator: lx.AbstractLinearOperator) -> int:
    """1 if the operator is tagged positive semidefinite, -1 if tagged negative, 0 if neither."""
    if is_tagged(lx.is_positive_semidefinite, operator):
        return 1
    return -1 if is_tagged(lx.is_negative_semidefinite, operator) else 0


def is_hermitian(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the tags say that $A^* = A$: symmetric (real operators) or semidefinite, or made by
    sums and real scalars, traced or not, from operators that are.

    **Arguments:**

    - `operator`: the operator.
    """
    if semidefinite_sign(operator) != 0:
        return True
    if isinstance(operator, LINEAR) and not jnp.iscomplexobj(getattr(operator, "scalar", 0)):
        return all(map(is_hermitian, parts_of(operator)))
    return not is_complex(operator) and is_tagged(lx.is_symmetric, operator)


def is_complex(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the operator is over the complex numbers."""
    return any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in leaf_dtypes(operator))


def inexact_dtype(dtype: Any) -> np.dtype:
    """The dtype, or JAX's floating dtype in place of integers."""
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return np.dtype(dtype if inexact else jax.dtypes.canonicalize_dtype(float))


def leaf_dtypes(operator: lx.AbstractLinearOperator) -> list[np.dtype]:
    """The dtypes of the leaves of both structures, where integers count as floats."""
    leaves = jtu.tree_leaves((operator.in_structure(), operator.out_structure()))
    return [inexact_dtype(x.dtype) for x in leaves]


def is_part(operator: Any, x: Any) -> bool:
    """Whether x is an operator, but not this one."""
    return x is not operator and isinstance(x, lx.AbstractLinearOperator)


def parts_of(operator: lx.AbstractLinearOperator) -> list[lx.AbstractLinearOperator]:
    """The operators that an operator is made of, without those that these are made of."""
    part = partial(is_part, operator)
    return list(filter(part, jtu.tree_leaves(operator, is_leaf=part)))

"""Small diagonal blocks of an operator, where its entries are known: what the neighbourhoods of a
sparse factor are made of.
"""

from functools import singledispatch
from typing import Any

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int

from .block_operator import BlockOperator
from .kernel import KernelLinearOperator
from .known_parts import (
    _MULTIPLES,
    _factor,
    _is_stored_diagonal,
    _read_diagonal,
    stored_columns,
    stored_diagonal,
)


@singledispatch
def submatrices(operator: Any, indices: Int[Array, "b s"]) -> Inexact[Array, "b s s"]:
    """The matrices `A[s, s]` for sets s of indices: `b s^2` entries.

    A class whose entries cost more by columns registers a function; by default the matrix is
    formed.

    **Arguments:**

    - `operator`: an operator that knows its entries (see `known_parts.has_entries`).
    - `indices`: the sets, one in each row. They may be traced, and indices may be equal.
    """
    matrix = stored_columns(operator, slice(None))
    assert matrix is not None  # such operators are not asked
    return matrix[indices[:, :, None], indices[:, None, :]]


@submatrices.register(lx.AddLinearOperator)
def _(operator, indices):
    first = submatrices(operator.operator1, indices)
    return first + submatrices(operator.operator2, indices)


def _of_multiple(operator, indices):
    return _factor(operator) * submatrices(operator.operator, indices)


for _kind in _MULTIPLES:
    submatrices.register(_kind)(_of_multiple)


@submatrices.register(lx.TaggedLinearOperator)
def _(operator, indices):
    return submatrices(operator.operator, indices)


@submatrices.register(lx.MatrixLinearOperator)
def _(operator, indices):
    entries = operator.matrix[indices[:, :, None], indices[:, None, :]]
    return entries.astype(BlockOperator(operator).dtype)


@submatrices.register(lx.DiagonalLinearOperator)
@submatrices.register(lx.IdentityLinearOperator)
def _(operator, indices):
    diagonal = _read_diagonal(operator)[indices][:, :, None]
    return jnp.where(indices[:, :, None] == indices[:, None, :], diagonal, 0)


@submatrices.register(KernelLinearOperator)
def _(operator, indices):
    return operator.submatrices(indices).astype(BlockOperator(operator).dtype)


@submatrices.register(lx.ComposedLinearOperator)
def _(operator, indices):
    by_rows = _is_stored_diagonal(operator.operator1)  # D A, or A D
    factors = operator.operator1, operator.operator2
    diagonal, other = factors if by_rows else factors[::-1]
    scaling = stored_diagonal(diagonal)
    assert scaling is not None
    scaling = scaling[indices]
    scaling = scaling[:, :, None] if by_rows else scaling[:, None, :]
    return scaling * submatrices(other, indices)

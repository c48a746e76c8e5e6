"""The Gram operator of an operator."""

from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import PyTree

from .._core.precision import at_least_single
from .hoisting import as_part
from .tags import is_complex


def gram(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The Gram operator A^H A of the columns, tagged positive semidefinite; A may be rectangular.

    Its vectors have at least single precision, in which the products of an operator of half
    precision are returned.
    """
    return _semidefinite_product(_adjoint(operator), as_part(operator))


def row_gram(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The Gram operator A A^H of the rows, see `gram`."""
    return _semidefinite_product(as_part(operator), _adjoint(operator))


def _adjoint(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    transpose = as_part(operator.T)
    return lx.conj(transpose) if is_complex(operator) else transpose


def _semidefinite_product(
    second: lx.AbstractLinearOperator, first: lx.AbstractLinearOperator
) -> lx.AbstractLinearOperator:
    product = _widened(second) @ _widened(first)
    return lx.TaggedLinearOperator(product, lx.positive_semidefinite_tag)


def _widened(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """An operator between vectors of at least single precision."""
    narrow = operator.in_structure()
    wide = jtu.tree_map(_wide_structure, narrow)
    if wide == narrow:
        return operator
    return lx.FunctionLinearOperator(_WideProduct(operator), wide, closure_convert=False)


def _wide_structure(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jax.ShapeDtypeStruct(leaf.shape, at_least_single(leaf.dtype) if inexact else leaf.dtype)


def _cast(tree: PyTree, structure: PyTree) -> PyTree:
    return jtu.tree_map(lambda x, like: x.astype(like.dtype), tree, structure)


@final
class _WideProduct(eqx.Module):
    operator: lx.AbstractLinearOperator

    def __call__(self, vector):
        product = self.operator.mv(_cast(vector, self.operator.in_structure()))
        return _cast(product, jtu.tree_map(_wide_structure, product))

"""Gram operators."""

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, PyTree, Real

from .._core.estimate import scale_of
from .._core.precision import any_promotion, at_least_single
from .block_operator import transpose_of
from .hoisting import by_products
from .tags import is_complex


def unit_of(key: Array, operator: lx.AbstractLinearOperator) -> Real[Array, ""]:
    """A power of two near the largest number in a product with a random vector: divided by it, the
    operator has squares and powers that neither over- nor underflow. Cost: one product.
    """
    leaves, treedef = jtu.tree_flatten(operator.in_structure())
    keys = jr.split(key, len(leaves))
    draws = [jr.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    product = jtu.tree_leaves(operator.mv(jtu.tree_unflatten(treedef, draws)))
    sizes = [scale_of(x.astype(at_least_single(x.dtype))) for x in product]
    size = lax.stop_gradient(jnp.max(jnp.stack(sizes)))
    return jnp.ldexp(jnp.ones_like(size), jnp.frexp(size)[1] - 1)


def gram(
    operator: lx.AbstractLinearOperator, unit: Real[Array, ""], rows: bool = False
) -> lx.AbstractLinearOperator:
    """The Gram operator of A / unit, A^H A or (of its rows) A A^H, tagged positive semidefinite. A
    may be rectangular.

    Its vectors have at least single precision, in which the products of an operator of half
    precision are returned.
    """
    dtypes = [x.dtype for x in jtu.tree_leaves(operator.in_structure())]
    unit = unit.astype(min(dtypes, key=lambda dtype: jnp.finfo(dtype).bits)).real
    plain = _as_part(operator) / unit
    transpose = _as_part(transpose_of(operator))
    adjoint = (lx.conj(transpose) if is_complex(operator) else transpose) / unit
    second, first = (plain, adjoint) if rows else (adjoint, plain)
    product = _widened(second) @ _widened(first)
    return lx.TaggedLinearOperator(product, lx.positive_semidefinite_tag)


def _as_part(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The operator as a part of a product of lineax, which asks whether its parts are diagonal:
    `by_products`, if it does not say.
    """
    try:
        lx.is_diagonal(operator)
    except NotImplementedError:
        return by_products(operator)
    return operator


def _widened(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """An operator between vectors of at least single precision."""
    narrow = operator.in_structure()
    wide = jtu.tree_map(_wide_leaf, narrow)
    if wide == narrow:
        return operator
    product = jtu.Partial(_wide_product, operator)
    return lx.FunctionLinearOperator(product, wide, closure_convert=False)


def _wide_leaf(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jax.ShapeDtypeStruct(leaf.shape, at_least_single(leaf.dtype) if inexact else leaf.dtype)


def _wide_product(operator: lx.AbstractLinearOperator, vector: PyTree[Array]) -> PyTree[Array]:
    """The product of an operator of half precision, for a vector of single precision. It is scaled
    to 1 for it: an image of an image can be beyond half precision.
    """
    largest = [jnp.max(jnp.abs(x), initial=0.0) for x in jtu.tree_leaves(vector)]
    size = lax.stop_gradient(scale_of(jnp.stack(largest)))
    narrow = operator.in_structure()
    wide = jtu.tree_map(_wide_leaf, operator.out_structure())
    with any_promotion():  # the factor of a multiple may be of any dtype
        product = operator.mv(_cast(jtu.tree_map(lambda x: x / size, vector), narrow))
        return jtu.tree_map(lambda x: x * size, _cast(product, wide))


def _cast(tree: PyTree, structure: PyTree) -> PyTree:
    return jtu.tree_map(lambda x, like: x.astype(like.dtype), tree, structure)

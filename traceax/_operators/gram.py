"""Gram operators."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree, Real

from .._core.estimate import scale_of
from .._core.precision import any_promotion, at_least_single
from .block_operator import transpose_of


def unit_of(key: Array, operator: lx.AbstractLinearOperator) -> Real[Array, ""]:
    """A power of two near the largest number in a product with a random vector (one product):
    squares and powers of A over the unit neither over- nor underflow.
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
) -> lx.FunctionLinearOperator:
    """The Gram operator of A / unit, A^H A or (`rows`) A A^H, tagged positive semidefinite, with
    vectors of at least single precision. A may be rectangular.
    """
    transposed = transpose_of(operator)

    def adjoint(vector):
        return jtu.tree_map(jnp.conj, transposed.mv(jtu.tree_map(jnp.conj, vector)))

    sides = (operator.mv, operator.in_structure()), (adjoint, operator.out_structure())
    first, second = sides[::-1] if rows else sides

    def product(vector):
        return _wide_product(*second, _wide_product(*first, vector, unit), unit)

    structure = jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, _wide(x.dtype)), first[1])
    with any_promotion():  # leaves may be of several dtypes
        return lx.FunctionLinearOperator(product, structure, lx.positive_semidefinite_tag)


def _wide(dtype: np.dtype) -> np.dtype:
    return at_least_single(dtype) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _wide_product(
    mv: Callable[[Any], Any], structure: PyTree, vector: PyTree[Array], unit: Real[Array, ""]
) -> PyTree[Array]:
    """A product over the unit, in at least single precision. For operators of less precision the
    vector is scaled to 1: an image of an image can exceed half precision.
    """
    size: Any = 1.0
    with any_promotion():  # the factor of a multiple may be of any dtype
        if any(_wide(x.dtype) != x.dtype for x in jtu.tree_leaves(structure)):
            largest = [jnp.max(jnp.abs(x), initial=0.0) for x in jtu.tree_leaves(vector)]
            size = lax.stop_gradient(scale_of(jnp.stack(largest)))
            vector = jtu.tree_map(lambda x, y: (x / size).astype(y.dtype), vector, structure)

        def scaled(x):
            return (x * (size / unit)).astype(_wide(x.dtype))

        return jtu.tree_map(scaled, mv(vector))

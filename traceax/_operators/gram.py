"""Gram operators."""

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Real

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

    sides = [(operator.mv, operator.in_structure()), (adjoint, operator.out_structure())]
    sides = sides[::-1] if rows else sides

    def product(vector):
        # Leaves, and the factors of multiples, may be of several dtypes.
        with any_promotion():
            for multiply, structure in sides:
                given = jtu.tree_map(lambda x, y: x.astype(y.dtype), vector, structure)
                vector = jtu.tree_map(
                    lambda x: (x / unit).astype(at_least_single(x.dtype)), multiply(given)
                )
        return vector

    structure = jtu.tree_map(
        lambda x: jax.ShapeDtypeStruct(x.shape, at_least_single(x.dtype)), sides[0][1]
    )
    with any_promotion():
        return lx.FunctionLinearOperator(product, structure, lx.positive_semidefinite_tag)

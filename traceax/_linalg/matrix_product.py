"""The product of a stored matrix and a block of vectors."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact

from .._core.precision import matmul


@jax.custom_jvp
def _transposed(matrix: Array, block: Array) -> Array:
    """A X as (X^T A^T)^T. Without the barriers, XLA would turn it into the usual product."""
    product = matmul(lax.optimization_barrier(block.T), matrix.T)
    return lax.optimization_barrier(product).T


_transposed.defjvps(
    lambda change, _, matrix, block: matmul(change, block),
    lambda change, _, matrix, block: matmul(matrix, change),
)


def matrix_product(
    matrix: Inexact[Array, "n n"], block: Inexact[Array, "n m"]
) -> Inexact[Array, "n m"]:
    """`matrix @ block` in full precision.

    XLA's product on CPUs is made for widths that are multiples of 32. For other widths the product
    takes a third less time with the long side last. For small matrices and narrow blocks this does
    not outweigh the transposes that it takes, and their compilation.
    """
    n, m = block.shape
    is_real = not jnp.iscomplexobj(block) and not jnp.iscomplexobj(matrix)
    if not is_real or n < 2000 or m <= 48 or m % 32 == 0:
        return matmul(matrix, block)
    return lax.platform_dependent(matrix, block, cpu=_transposed, default=matmul)

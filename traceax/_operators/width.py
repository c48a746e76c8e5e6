"""How many vectors are multiplied at once."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array

from .kernel import KernelLinearOperator
from .sparse import SparseLinearOperator
from .tags import parts_of

#: The most numbers in one block of vectors (512 MiB in float32), where an algorithm is free to work
#: in several smaller blocks.
BLOCK_LIMIT = 2**27

#: The most numbers in one block of vectors that share no work, such as quadratic forms without
#: products: a block larger than the cache saves no time then.
APART_LIMIT = 2**18

#: The most vectors that a function is given at once. Wider programs take more memory, and can give
#: wrong results: they did with JAX 0.10.2 on CPUs, in products with the transposed Jacobian of a
#: transformer that is scanned over its layers.
FUNCTION_LIMIT = 64

#: Operators that do arithmetic with what they store: reading their diagonal costs no product.
STORED = (
    lx.MatrixLinearOperator,
    lx.PyTreeLinearOperator,
    lx.DiagonalLinearOperator,
    lx.TridiagonalLinearOperator,
    lx.IdentityLinearOperator,
    SparseLinearOperator,
)


def block_width(n: int, wanted: int, limit: int = BLOCK_LIMIT) -> int:
    """How many vectors of size `n` to multiply at once: `wanted`, or what the limit allows."""
    return max(1, min(wanted, limit // max(n, 1)))


def default_width(operator: lx.AbstractLinearOperator, wanted: int) -> int:
    """How many vectors to multiply at once: as many as are wanted, within the limits."""
    width = block_width(operator.in_size(), wanted)
    if calls_functions(operator):
        width = min(width, FUNCTION_LIMIT)
    return -(-wanted // -(-wanted // width))  # as many blocks as needed, of widths nearly the same


def calls_functions(operator: lx.AbstractLinearOperator) -> bool:
    """Whether a product calls a function, rather than multiplying stored numbers."""
    inner = parts_of(operator)
    if inner:
        return any(map(calls_functions, inner))
    # A kernel is evaluated once for all vectors.
    return not isinstance(operator, (*STORED, KernelLinearOperator))


def by_columns(fn: Callable[..., list[Array]], width: int, *blocks: list[Array]) -> list[Array]:
    """`fn(*blocks)`, evaluated on `width` columns (along the last axes) at a time.

    Reverse mode evaluates `fn` on these columns again, so that no intermediate values are kept.
    """
    m = blocks[0][0].shape[-1]
    if width >= m:
        return fn(*blocks)

    @partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
    def panel(start, blocks, size):
        cut = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=-1)
        return fn(*jtu.tree_map(cut, blocks))

    def put(results, start, size):
        pairs = zip(results, panel(start, blocks, size), strict=True)
        return [lax.dynamic_update_slice_in_dim(x, y, start, axis=-1) for x, y in pairs]

    whole, rest = divmod(m, width)
    shapes = jax.eval_shape(fn, *blocks)
    results = [jnp.zeros(x.shape, x.dtype) for x in shapes]
    if [x.shape for x in shapes] == [x.shape for x in blocks[0]]:
        # All initial values are overwritten. New zeros would take memory from the start; a block
        # that exists anyway does not.
        pairs = zip(blocks[0], shapes, strict=True)
        results = [lax.stop_gradient(x).astype(shape.dtype) for x, shape in pairs]
    starts = width * jnp.arange(whole)
    results, _ = lax.scan(lambda results, i: (put(results, i, width), None), results, starts)
    return put(results, whole * width, rest) if rest else results

"""Arithmetic that does not depend on the user's settings of JAX: products in full precision (on a
GPU, no TF32), and promotion of dtypes and ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array


def matmul(a: Array, b: Array) -> Array:
    """The product of two matrices (or of stacks of them) in full precision, whatever the default of
    the user is.

    **Arguments:**

    - `a`, `b`: arrays, as of `jax.numpy.matmul`.

    **Returns:**

    An array. Cost: a real matrix multiplies a complex one as two real ones, which on CPUs takes a
    sixth of the time of a product of two complex matrices.
    """
    if jnp.iscomplexobj(b) and not jnp.iscomplexobj(a):
        return lax.complex(matmul(a, b.real), matmul(a, b.imag))
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def at_least_single(dtype: Any) -> np.dtype:
    """The dtype, or float32 in place of half precision, in which sums of many terms cease to grow.

    **Arguments:**

    - `dtype`: a floating or complex dtype.
    """
    return np.dtype(dtype if jnp.finfo(dtype).bits >= 32 else np.float32)


def widened(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A tree with float32 in place of half precision, and a function that undoes this.

    What a loop reads of a tree that is widened outside of the loop, and narrowed inside, is the
    same; but in reverse mode the cotangents of its steps are added in float32. (In half precision a
    sum of many terms ceases to grow.)

    **Arguments:**

    - `tree`: a PyTree.
    """

    def is_narrow(x):
        floating = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
        return floating and at_least_single(x.dtype) != x.dtype

    def narrow(wide):
        return jtu.tree_map(lambda x, like: x if like is False else x.astype(like), wide, dtypes)

    dtypes = jtu.tree_map(lambda x: x.dtype if is_narrow(x) else False, tree)
    return jtu.tree_map(lambda x: x.astype(jnp.float32) if is_narrow(x) else x, tree), narrow


@contextmanager
def any_promotion() -> Iterator[None]:
    """A context in which arrays of different dtypes and ranks may be combined: the algebra of
    estimates mixes real and complex numbers, scalars and blocks.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield

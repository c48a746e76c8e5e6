"""Keys of items, and random bits."""

import math

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.random import split as split
from jaxtyping import Array, Int, PRNGKeyArray, UInt


def numbered(key: PRNGKeyArray, number: int | Int[Array, ""]) -> PRNGKeyArray:
    """The key of an item in a sequence of unknown length, such as batches or steps.

    It differs from all the keys of `split`. (`jax.random.fold_in(key, j)` is the j-th of those: a
    function that folds the key, and another that splits it, would draw the same probes.)

    **Arguments:**

    - `key`: a JAX random key.
    - `number`: the number of the item, from 0 to $2^{31} - 1$.

    **Returns:** a key.
    """
    return jr.fold_in(key, jnp.asarray(number).astype(np.uint32) | np.uint32(2**31))


def random_bits(key: PRNGKeyArray, shape: tuple[int, ...], k: int) -> UInt[Array, "... k"]:
    """Random numbers 0 and 1, from one bit each, of shape `(*shape, k)`."""
    # A last axis that is a multiple of 32 is unpacked row by row, so that a leaf that is cut over
    # devices stays on them. Other leaves are unpacked as one long row.
    *outer, last = shape if shape and shape[-1] % 32 == 0 else (math.prod(shape),)
    rows = (*outer, -(-last // 32))
    words = jr.bits(key, (*rows, k), np.uint32)
    unpacked = (words[..., None, :] >> jnp.arange(32, dtype=np.uint32)[:, None]) & np.uint32(1)
    return unpacked.reshape(*outer, rows[-1] * 32, k)[..., :last, :].reshape(*shape, k)

"""The random numbers of `jax.random` with its default keys (complex ones to rounding), in one pass.

For CPUs JAX writes the threefry hash (J. K. Salmon et al., *Parallel random numbers: as easy as 1,
2, 3*, 2011, doi:10.1145/2063384.2063405) as a loop over its rounds, each of which reads and writes
the whole block (`benchmarks/bench_replacements.py`). Unrolled, the hash is one elementwise
expression of a counter, which XLA fuses into one pass. The number of the vector is the first axis,
because XLA does not vectorise over a short last axis. Barriers keep XLA from copying the hash into
every expression that reads the numbers. (Before JAX 0.12 they change nothing.)
"""

import math

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jax.random import split as split
from jaxtyping import Array, Float, Inexact, Int, PRNGKeyArray, UInt

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


def numbered(key: PRNGKeyArray, number: int | Int[Array, ""]) -> PRNGKeyArray:
    """The key of an item in a sequence of unknown length, such as blocks, rounds or pivots.

    It differs from all the keys of `split`. (`jax.random.fold_in(key, j)` is the j-th of those: a
    function that folds the key, and another that splits it, would draw the same probes.)

    **Arguments:**

    - `key`: a JAX random key.
    - `number`: the number of the item, from 0 to 2^31 - 1.

    **Returns:**

    A key.
    """
    return jr.fold_in(key, jnp.asarray(number).astype(np.uint32) | np.uint32(2**31))


def _threefry(key: PRNGKeyArray, counter: UInt[Array, "..."]) -> tuple[Array, Array]:
    """The two words of the hash of a counter, which is the low word; its high word is 0."""
    k0, k1 = jr.key_data(key)
    schedule = k0, k1, k0 ^ k1 ^ _PARITY
    x0, x1 = jnp.broadcast_to(k0, counter.shape), counter + k1
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(by)) | (x1 >> np.uint32(32 - by)))
        x0 = x0 + schedule[(i + 1) % 3]
        x1 = x1 + (schedule[(i + 2) % 3] + np.uint32(i + 1))
    return x0, x1


def _bits(key: PRNGKeyArray, shape: tuple[int, ...], k: int, width: int) -> UInt[Array, "k ..."]:
    """Random words of 32 or 64 bits."""
    dtype = np.dtype(f"uint{width}")
    is_one = jr.key_impl(key) == "threefry2x32" and jr.key_data(key).shape == (2,)
    if not is_one or math.prod(shape) * k > 2**32:  # JAX says what is wrong with several keys
        return jnp.moveaxis(jr.bits(key, (*shape, k), dtype), -1, 0)
    full = (k, *shape)
    counter = jnp.zeros(full, np.uint32)
    for axis in (*range(1, len(full)), 0):
        counter = counter * np.uint32(full[axis]) + lax.broadcasted_iota(np.uint32, full, axis)
    high, low = _threefry(key, counter)
    if width == 32:
        return high ^ low
    return (high.astype(dtype) << dtype.type(32)) | low.astype(dtype)


def ones(key: PRNGKeyArray, shape: tuple[int, ...], k: int) -> UInt[Array, "... k"]:
    """Random numbers 0 and 1, from one bit each, of shape `(*shape, k)`."""
    # A last axis that is a multiple of 32 is unpacked row by row, so that a leaf that is cut over
    # devices stays on them. Other leaves are unpacked as one long row.
    *outer, last = shape if shape and shape[-1] % 32 == 0 else (math.prod(shape),)
    rows = (*outer, -(-last // 32))
    words = lax.optimization_barrier(jnp.moveaxis(_bits(key, rows, k, 32), 0, -1))
    unpacked = (words[..., None, :] >> jnp.arange(32, dtype=np.uint32)[:, None]) & np.uint32(1)
    return unpacked.reshape(*outer, rows[-1] * 32, k)[..., :last, :].reshape(*shape, k)


def uniform(
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    k: int,
    dtype: np.dtype,
    lowest: float = 0.0,
    highest: float = 1.0,
) -> Float[Array, "k ..."]:
    """Those of `jax.random.uniform(key, (*shape, k))`, of shape `(k, *shape)`."""
    info, real = jnp.finfo(dtype), dtype.type
    words = _bits(key, shape, k, info.bits)
    # Random bits for the mantissa, with the exponent of 1: uniform in [1, 2).
    mantissas = words >> words.dtype.type(info.bits - info.nmant)
    from_1 = lax.bitcast_convert_type(mantissas | real(1).view(words.dtype), dtype)
    lowest, highest = real(lowest), real(highest)
    return jnp.maximum(lowest, (from_1 - real(1)) * (highest - lowest) + lowest)


def normal(
    key: PRNGKeyArray, shape: tuple[int, ...], k: int, dtype: np.dtype
) -> Inexact[Array, "k ..."]:
    """`jax.random.normal(key, (*shape, k))`, of shape `(k, *shape)`; short dtypes are rounded."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = (normal(part, shape, k, jnp.finfo(dtype).dtype) for part in split(key))
        return lax.complex(*parts) / dtype.type(np.sqrt(2))
    wide = dtype if jnp.finfo(dtype).bits >= 32 else np.dtype(np.float32)
    real = wide.type
    lowest = np.nextafter(real(-1), real(0))
    numbers = real(np.sqrt(2)) * lax.erf_inv(uniform(key, shape, k, wide, float(lowest)))
    return lax.optimization_barrier(numbers.astype(dtype))

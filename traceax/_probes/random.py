"""The random numbers of `jax.random` with its default keys (complex ones to rounding), in one pass.

For CPUs JAX writes the threefry hash (J. K. Salmon et al., *Parallel random numbers: as easy as 1,
2, 3*, 2011, doi:10.1145/2063384.2063405) as a loop over its rounds, each of which reads and writes
the whole block. Unrolled, the hash is one elementwise expression of a counter, which XLA fuses into
one pass, and cuts over devices like any other. The number of the vector is the first axis, because
XLA does not vectorise over a short last axis.

XLA would also copy the hash into every expression that reads the numbers, to save a pass over
memory. It takes more time to compute than to read, and each copy a quarter of a second to compile.
Barriers therefore hold what follows apart from the numbers. (XLA respects them here from JAX 0.12
on. With JAX 0.10 they change nothing.)
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Inexact, Int, PRNGKeyArray, UInt

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA
_WORDS = 2**32

#: Up to this many bits are unpacked from words in one fused expression, which may compute a word
#: again for each of its bits. For more bits JAX's loop is used, which computes each word once.
UNPACKED = 2**17


def _is_threefry(key: PRNGKeyArray) -> bool:
    # JAX says what is wrong with anything that is not one key.
    return jr.key_impl(key) == "threefry2x32" and jr.key_data(key).shape == (2,)


def _threefry(key: PRNGKeyArray, counter: UInt[Array, "..."]) -> tuple[Array, Array]:
    """The two words of the hash of a counter, which is the low word; its high word is 0."""
    word = np.uint32
    k0, k1 = (jr.key_data(key)[i] for i in range(2))
    schedule = k0, k1, k0 ^ k1 ^ word(_PARITY)
    x0, x1 = k0, counter + k1
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << word(by)) | (x1 >> word(32 - by)))
        x0 = x0 + schedule[(i + 1) % 3]
        x1 = x1 + (schedule[(i + 2) % 3] + word(i + 1))
    return x0, x1


def _keys(key: PRNGKeyArray, counter: UInt[Array, "*shape"]) -> PRNGKeyArray:
    """Keys from the hash of a counter, typed or raw as `key` is. (Without a barrier each use of one
    would compile a hash of its own: a tenth of a second.)
    """
    data = lax.optimization_barrier(jnp.stack(_threefry(key, counter), axis=-1))
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jr.wrap_key_data(data, impl=jr.key_impl(key))
    return data


@partial(jax.jit, static_argnums=1)
def split(key: PRNGKeyArray, num: int = 2) -> PRNGKeyArray:
    """Independent keys: those of `jax.random.split`, in less time.

    **Arguments:**

    - `key`: a JAX random key.
    - `num`: how many, a Python int.

    **Returns:**

    An array of `num` keys.
    """
    return _keys(key, lax.iota(np.uint32, num)) if _is_threefry(key) else jr.split(key, num)


@jax.jit
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
    data = jnp.asarray(number).astype(np.uint32) | np.uint32(2**31)
    return _keys(key, data) if _is_threefry(key) else jr.fold_in(key, data)


@partial(jax.jit, static_argnums=(1, 2, 3))
def bits(
    key: PRNGKeyArray, shape: tuple[int, ...], k: int, width: int = 32
) -> UInt[Array, "k ..."]:
    """Random words: those of `jax.random.bits(key, (*shape, k))`, with the last axis first.

    **Arguments:**

    - `key`: a JAX random key.
    - `shape`: the shape of one vector.
    - `k`: the number of vectors.
    - `width`: the bits of a word, 32 or 64.

    **Returns:**

    An array of unsigned integers of shape `(k, *shape)`.
    """
    dtype = np.dtype(f"uint{width}")
    if not _is_threefry(key) or math.prod(shape) * k > _WORDS:
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
    """Random numbers 0 and 1, from one bit each.

    **Arguments:** as for `bits`.

    **Returns:**

    An array of unsigned integers of shape `(*shape, k)`. Unlike elsewhere, the number of the vector
    is the last axis, so that JAX's words need no transpose.
    """
    size = math.prod(shape)
    # A last axis that is a multiple of 32 is unpacked row by row, so that a leaf that is cut over
    # devices stays on them. Other leaves are unpacked as one long row.
    *outer, last = shape if shape and shape[-1] % 32 == 0 else (size,)
    rows = (*outer, -(-last // 32))
    few = size * k <= UNPACKED
    words = jnp.moveaxis(bits(key, rows, k), 0, -1) if few else jr.bits(key, (*rows, k), np.uint32)
    words = lax.optimization_barrier(words)
    shifts = jnp.arange(32, dtype=np.uint32)[:, None]
    unpacked = (words[..., None, :] >> shifts) & np.uint32(1)
    return unpacked.reshape(*outer, rows[-1] * 32, k)[..., :last, :].reshape(*shape, k)


def uniform(
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    k: int,
    dtype: np.dtype,
    lowest: float = 0.0,
    highest: float = 1.0,
) -> Float[Array, "k ..."]:
    """Uniform numbers: those of `jax.random.uniform(key, (*shape, k))`, with the last axis first.

    **Arguments:** as for `bits`, and

    - `dtype`: float32 or float64.
    - `lowest`, `highest`: the ends of the interval.

    **Returns:**

    An array of shape `(k, *shape)`.
    """
    info, real = jnp.finfo(dtype), dtype.type
    words = bits(key, shape, k, info.bits)
    # Random bits for the mantissa, with the exponent of 1: uniform in [1, 2).
    mantissas = words >> words.dtype.type(info.bits - info.nmant)
    from_1 = lax.bitcast_convert_type(mantissas | real(1).view(words.dtype), dtype)
    lowest, highest = real(lowest), real(highest)
    return jnp.maximum(lowest, (from_1 - real(1)) * (highest - lowest) + lowest)


def normal(
    key: PRNGKeyArray, shape: tuple[int, ...], k: int, dtype: np.dtype
) -> Inexact[Array, "k ..."]:
    """Normal numbers: those of `jax.random.normal(key, (*shape, k))`, with the last axis first.

    **Arguments:** as for `bits`, and

    - `dtype`: a floating or complex dtype. Numbers of less than 32 bits are rounded.

    **Returns:**

    An array of shape `(k, *shape)`.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = (normal(part, shape, k, jnp.finfo(dtype).dtype) for part in split(key))
        return lax.complex(*parts) / dtype.type(np.sqrt(2))
    wide = dtype if jnp.finfo(dtype).bits >= 32 else np.dtype(np.float32)
    real = wide.type
    lowest = np.nextafter(real(-1), real(0))
    numbers = real(np.sqrt(2)) * lax.erf_inv(uniform(key, shape, k, wide, float(lowest)))
    return lax.optimization_barrier(numbers.astype(dtype))

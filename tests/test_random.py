"""Random numbers are those of `jax.random`, however they are computed."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from traceax import _random

KEYS = {
    "new": jr.key(3),
    "old": jr.PRNGKey(3),
    "rbg": jr.key(3, impl="rbg"),
    "unsafe-rbg": jr.key(3, impl="unsafe_rbg"),
}
SHAPES = [(), (5,), (0,), (3, 64), (1000,)]
COUNTS = [0, 6]


def vectors_first(array):
    return jnp.moveaxis(array, -1, 0)


def assert_same(ours, theirs):
    if jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
        assert ours.dtype == theirs.dtype
        ours, theirs = jr.key_data(ours), jr.key_data(theirs)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(params=KEYS)
def key(request):
    return KEYS[request.param]


def test_keys(key):
    for num in (1, 2, 5):
        assert_same(_random.split(key, num), jr.split(key, num))
    for data in (0, 7, 2**31 + 1, jnp.int32(5)):
        assert_same(_random.fold_in(key, data), jr.fold_in(key, data))


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers(key, shape):
    for k in COUNTS:
        theirs = (*shape, k)
        for width in (32, 64):
            expected = vectors_first(jr.bits(key, theirs, f"uint{width}"))
            assert_same(_random.bits(key, shape, k, width), expected)
        for dtype in map(np.dtype, ("float32", "float64")):
            expected = vectors_first(jr.uniform(key, theirs, dtype, -1.0, 3.0))
            assert_same(_random.uniform(key, shape, k, dtype, -1.0, 3.0), expected)
            assert_same(
                _random.normal(key, shape, k, dtype), vectors_first(jr.normal(key, theirs, dtype))
            )
        ours = _random.normal(key, shape, k, np.dtype("complex128"))
        expected = vectors_first(jr.normal(key, theirs, "complex128"))
        np.testing.assert_allclose(ours, expected, rtol=1e-14, atol=1e-15)


def test_few_bits_are_rounded_normal_numbers(key):
    """(Numbers drawn in bfloat16 have 128 different sizes.)"""
    for dtype in (jnp.bfloat16, jnp.float16):
        ours = _random.normal(key, (1000,), 4, np.dtype(dtype))
        expected = vectors_first(jr.normal(key, (1000, 4), np.float32)).astype(dtype)
        np.testing.assert_array_equal(ours.astype(np.float32), expected.astype(np.float32))


def test_bits_of_words(key):
    """Both ways of unpacking, on either side of the number from which words are kept."""
    for size in (100, 32 * 40, _random.UNPACKED // 2, _random.UNPACKED):
        k, words = 2, -(-size // 32)
        drawn = np.asarray(jr.bits(key, (words, k), "uint32"))
        expected = np.unpackbits(drawn.T.copy().view(np.uint8), axis=1, bitorder="little")
        np.testing.assert_array_equal(_random.ones(key, (size,), k), expected[:, :size].T)


def test_under_vmap():
    keys = jr.split(jr.key(0), 3)

    def draw(key):
        return _random.normal(key, (4,), 2, np.dtype("float32"))

    assert_same(jax.vmap(draw)(keys), jnp.stack([draw(key) for key in keys]))


@pytest.mark.parametrize("name", ["new", "old"])
def test_a_batch_of_keys_is_refused(name):
    batch = jr.split(KEYS[name], 3)
    for draw in (
        lambda: _random.split(batch),
        lambda: _random.fold_in(batch, 1),
        lambda: _random.normal(batch, (4,), 2, np.dtype("float32")),
        lambda: _random.ones(batch, (4,), 2),
    ):
        with pytest.raises(ValueError, match="single key"):
            draw()

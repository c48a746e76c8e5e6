"""Keys, random bits, and that no key is drawn from twice."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._probes import random, samplers

KEYS = {"new": jr.key(3), "old": jr.PRNGKey(3), "rbg": jr.key(3, impl="rbg")}


def data_of(key):
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.asarray(jr.key_data(key) if typed else key)


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_items(name):
    """None of them is a key of `split`."""
    key = KEYS[name]
    for number in (0, 7, 2**31 - 1, jnp.int32(5)):
        ours, theirs = random.numbered(key, number), jr.fold_in(key, np.uint32(2**31 + int(number)))
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(*(data_of(key) for key in (ours, theirs)))


def test_short_dtypes_are_rounded():
    """Numbers that are drawn in bfloat16 have 128 different sizes."""
    drawn = [tr.NormalSampler()(jr.key(3), 64, 6, dtype) for dtype in ("bfloat16", "float32")]
    np.testing.assert_array_equal(drawn[0], drawn[1].astype(jnp.bfloat16))


@pytest.mark.parametrize("name", KEYS)
def test_bits_of_words(name):
    key, size, k = KEYS[name], 100, 2
    drawn = np.asarray(jr.bits(key, (-(-size // 32), k), "uint32"))
    expected = np.unpackbits(drawn.T.copy().view(np.uint8), axis=1, bitorder="little")
    np.testing.assert_array_equal(random.random_bits(key, (size,), k), expected[:, :size].T)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA drops barriers before it fuses")
def test_numbers_are_drawn_once():
    """However many expressions read the probes."""

    def several(key):
        z = tr.SphereSampler().probes(key, 40, 8, np.dtype("float32"))
        y = jnp.cumsum(z, axis=0)
        return y, jnp.sum(z * y, axis=0), jnp.sum(jnp.abs(z), axis=1), z[:, :3]

    text = jax.jit(several).lower(jr.key(0)).compile().as_text()
    assert text.count(" select(") < 20  # 55 if the inverse of erf is computed for each of them


@pytest.mark.parametrize("name", ["new", "old"])
def test_a_batch_of_keys_is_refused(name):
    batch = jr.split(KEYS[name], 3)
    for draw in (
        lambda: random.numbered(batch, 1),
        lambda: tr.NormalSampler()(batch, 4, 2),
        lambda: random.random_bits(batch, (4,), 2),
    ):
        with pytest.raises(ValueError, match="single key"):
            draw()


DATA = []  # of the keys that were drawn from


def _operator(leaves, tags=()):
    """An operator whose structure has so many leaves. (N is of no other test: it is compiled here,
    with the callbacks.)
    """
    n = 123 // leaves * leaves
    weights = np.linspace(0.5, 3.0, n)
    sizes = [n // leaves] * leaves
    structure = [jax.ShapeDtypeStruct((size,), jnp.float64) for size in sizes]

    def mv(parts):
        flat = jnp.concatenate(parts)
        flat = weights * flat + 0.1 * np.sin(np.arange(n)) * jnp.vdot(weights, flat)
        return jnp.split(flat, np.cumsum(sizes)[:-1])

    return lx.FunctionLinearOperator(mv, structure, tags)


RUNS = {
    # Two batches, then a block as wide as a batch; of several leaves.
    "batches": lambda key: tr.trace(
        key, _operator(3), estimator=tr.HutchinsonEstimator(batch_size=8), rtol=1e-9, max_k=24
    ),
    "hutch++": lambda key: tr.trace(
        key, _operator(3), estimator=tr.HutchPlusPlusEstimator(), rtol=1e-9, max_k=60
    ),
    "logdet": lambda key: tr.logdet(
        key, _operator(1, lx.positive_semidefinite_tag), 60, fallback=None
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_no_key_is_drawn_from_twice(run, monkeypatch):
    """Blocks, batches, leaves and rounds: each has a key of its own. (Complex numbers are two.)"""
    DATA.clear()

    def recorded(draw):
        def with_note(key, *arguments, **options):
            data = jr.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
            jax.debug.callback(lambda data: DATA.append(tuple(np.asarray(data).tolist())), data)
            return draw(key, *arguments, **options)

        return with_note

    for name in ("_normal", "random_bits"):
        monkeypatch.setattr(samplers, name, recorded(getattr(samplers, name)))
    jax.block_until_ready(jax.jit(RUNS[run])(jr.key(5)))
    jax.effects_barrier()
    assert DATA
    assert len(set(DATA)) == len(DATA)

"""Random numbers are those of `jax.random`, however they are computed."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._probes import random, samplers

from ..helpers import variant

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
        assert_same(random.split(key, num), jr.split(key, num))
    for number in (0, 7, 2**31 - 1, jnp.int32(5)):
        word = np.uint32(2**31 + int(number))
        assert_same(random.numbered(key, number), jr.fold_in(key, word))


# Keys of the old style hold the words of new ones, and of both "rbg" the bits are the same.
DRAWN = [("new", ()), ("new", (3, 64)), ("old", (3, 64)), ("rbg", (3, 64))]
OTHERS = [variant(name, shape) for name in KEYS for shape in SHAPES if (name, shape) not in DRAWN]


@pytest.mark.parametrize(("name", "shape"), [*DRAWN, *OTHERS])
def test_numbers(name, shape):
    key = KEYS[name]
    for k in COUNTS if shape == (5,) else COUNTS[1:]:
        theirs = (*shape, k)
        for width in (32, 64):
            expected = vectors_first(jr.bits(key, theirs, f"uint{width}"))
            assert_same(random.bits(key, shape, k, width), expected)
        for dtype in map(np.dtype, ("float32", "float64")):
            expected = vectors_first(jr.uniform(key, theirs, dtype, -1.0, 3.0))
            assert_same(random.uniform(key, shape, k, dtype, -1.0, 3.0), expected)
            assert_same(
                random.normal(key, shape, k, dtype), vectors_first(jr.normal(key, theirs, dtype))
            )
        ours = random.normal(key, shape, k, np.dtype("complex128"))
        expected = vectors_first(jr.normal(key, theirs, "complex128"))
        np.testing.assert_allclose(ours, expected, rtol=1e-14, atol=1e-15)


def test_few_bits_are_rounded_normal_numbers(key):
    """(Numbers drawn in bfloat16 have 128 different sizes.)"""
    for dtype in (jnp.bfloat16, jnp.float16):
        ours = random.normal(key, (1000,), 4, np.dtype(dtype))
        expected = vectors_first(jr.normal(key, (1000, 4), np.float32)).astype(dtype)
        np.testing.assert_array_equal(ours.astype(np.float32), expected.astype(np.float32))


def test_bits_of_words(key):
    """Both ways of unpacking, on either side of the number from which words are kept."""
    for size in (100, 32 * 40, random.UNPACKED // 2, random.UNPACKED):
        k, words = 2, -(-size // 32)
        drawn = np.asarray(jr.bits(key, (words, k), "uint32"))
        expected = np.unpackbits(drawn.T.copy().view(np.uint8), axis=1, bitorder="little")
        np.testing.assert_array_equal(random.ones(key, (size,), k), expected[:, :size].T)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA drops barriers before it fuses")
@pytest.mark.parametrize("sampler", [tr.SphereSampler(), tr.RademacherSampler()])
def test_the_hash_is_compiled_once(sampler, key):
    """However many expressions read the probes."""

    def several(key):
        z = sampler.probes(key, 40, 8, np.dtype("float32"))
        y = jnp.cumsum(z, axis=0)
        return y, jnp.sum(z * y, axis=0), jnp.sum(jnp.abs(z), axis=1), z[:, :3]

    def count(fn):
        return jax.jit(fn).lower(key).compile().as_text().count(" shift-right-logical(")

    once = count(lambda key: random.bits(key, (40,), 8))
    # Besides the shifts of the hash: to a mantissa, or to a bit.
    assert count(several) <= once + 5


def test_under_vmap():
    keys = jr.split(jr.key(0), 3)

    def draw(key):
        return random.normal(key, (4,), 2, np.dtype("float32"))

    assert_same(jax.vmap(draw)(keys), jnp.stack([draw(key) for key in keys]))


@pytest.mark.parametrize("name", ["new", "old"])
def test_a_batch_of_keys_is_refused(name):
    batch = jr.split(KEYS[name], 3)
    for draw in (
        lambda: random.split(batch),
        lambda: random.numbered(batch, 1),
        lambda: random.normal(batch, (4,), 2, np.dtype("float32")),
        lambda: random.ones(batch, (4,), 2),
    ):
        with pytest.raises(ValueError, match="single key"):
            draw()


# --- no probe twice ------------------------------------------------------------------------------


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


def _definite():
    x = np.linspace(0.0, 1.0, 127)
    kernel = np.exp(-10 * np.abs(x[:, None] - x[None, :]))
    kernel = lx.MatrixLinearOperator(jnp.asarray(kernel), lx.positive_semidefinite_tag)
    return kernel + 0.01 * lx.IdentityLinearOperator(kernel.in_structure())


PSD = lx.positive_semidefinite_tag
TIGHT = {"rtol": 1e-9, "max_k": 60}
RUNS = {
    # Two batches, then a block as wide as a batch.
    "hutchinson": lambda key: tr.trace(
        key, _operator(1), estimator=tr.HutchinsonEstimator(batch_size=8), rtol=1e-9, max_k=24
    ),
    "diagonal of batches": lambda key: tr.diagonal(
        key,
        _operator(1),
        estimator=tr.HutchinsonDiagonalEstimator(batch_size=8),
        rtol=1e-9,
        max_k=24,
    ),
    "hutchinson leaves": lambda key: tr.trace(
        key, _operator(3), estimator=tr.HutchinsonEstimator(batch_size=3), **TIGHT
    ),
    "hutch++": lambda key: tr.trace(
        key, _operator(3), estimator=tr.HutchPlusPlusEstimator(), **TIGHT
    ),
    "xtrace": lambda key: tr.trace(key, _operator(3), estimator=tr.XTraceEstimator(), **TIGHT),
    "xnystrace": lambda key: tr.trace(
        key, _operator(3, PSD), estimator=tr.XNysTraceEstimator(), **TIGHT
    ),
    "adaptive": lambda key: tr.trace(
        key, _operator(3, PSD), estimator=tr.AdaptiveHutchPlusPlusEstimator(), **TIGHT
    ),
    "diagonal": lambda key: tr.diagonal(
        key, _operator(3), estimator=tr.HutchinsonDiagonalEstimator(batch_size=8), **TIGHT
    ),
    "diag++": lambda key: tr.diagonal(
        key, _operator(3), estimator=tr.DiagPlusPlusEstimator(), **TIGHT
    ),
    "xdiag": lambda key: tr.diagonal(key, _operator(3), estimator=tr.XDiagEstimator(), **TIGHT),
    "logdet": lambda key: tr.logdet(key, _definite(), 60, fallback=None),
    "spectral_sum": lambda key: tr.spectral_sum(key, jnp.exp, _definite(), 60),
    "summary": lambda key: tr.summary(key, _operator(3), 60),
}


# Programs with callbacks are kept by no cache. The other runs have the keys of these: the same
# blocks, of other estimators.
QUICK = ("hutchinson", "hutchinson leaves", "diagonal of batches", "hutch++", "adaptive")


@pytest.mark.parametrize("run", [run if run in QUICK else variant(run) for run in RUNS])
def test_no_key_is_drawn_from_twice(run, monkeypatch):
    """Blocks, batches, leaves and rounds: each has a key of its own. (Complex numbers are two.)"""
    DATA.clear()

    def recorded(draw):
        def with_note(key, *arguments, **options):
            data = jr.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
            jax.debug.callback(lambda data: DATA.append(tuple(np.asarray(data).tolist())), data)
            return draw(key, *arguments, **options)

        return with_note

    for name in ("normal", "ones", "uniform"):
        monkeypatch.setattr(samplers, name, recorded(getattr(random, name)))
    jax.block_until_ready(jax.jit(RUNS[run])(jr.key(5)))
    jax.effects_barrier()
    assert DATA
    assert len(set(DATA)) == len(DATA)

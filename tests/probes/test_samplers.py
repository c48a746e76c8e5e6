"""Distributions of probes: their moments, their entries, and their dtypes."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from ..helpers import drawn

KEY = jax.random.key(0)
N, COUNT = 6, 100_000
REAL = {
    "normal": tr.NormalSampler(),
    "sphere": tr.SphereSampler(),
    "rademacher": tr.RademacherSampler(),
}
COMPLEX = {**REAL, "steinhaus": tr.SteinhausSampler()}
ROTATION_INVARIANT = {"normal": True, "sphere": True, "rademacher": False, "steinhaus": False}
BOTH = [(name, np.float64) for name in REAL] + [(name, np.complex128) for name in COMPLEX]


def check_mean(samples, mean, bound=4.5):
    """A z-test for each entry. (72 entries at most: 4.5 standard errors are passed by chance once
    in 2000 runs.)
    """
    for part in (np.real, np.imag):
        error = part(samples.mean(-1) - mean)
        standard = part(samples).std(-1) / np.sqrt(samples.shape[-1])
        assert np.all(np.abs(error) <= bound * standard + 1e-12)


@pytest.mark.parametrize(("name", "dtype"), BOTH)
def test_moments(name, dtype):
    """E[omega] = 0, E[omega omega^H] = I, and E |omega_i^H omega_j|^2 = n for i != j; without a
    preferred phase if complex. Fourth moments along e_1 and along another unit vector agree only
    where rotation invariance is declared.
    """
    probes = drawn(COMPLEX[name], KEY, N, COUNT, dtype)
    check_mean(probes, np.zeros(N))
    check_mean(probes[:, None, :] * probes[None, :, :].conj(), np.eye(N))
    check_mean(np.abs(np.sum(probes[:, ::2].conj() * probes[:, 1::2], axis=0)) ** 2, N)
    if dtype == np.complex128 and name != "rademacher":
        check_mean(probes[:, None, :] * probes[None, :, :], np.zeros((N, N)))
    rng = np.random.default_rng(0)
    direction = rng.standard_normal(N) + (1j * rng.standard_normal(N) if dtype != np.float64 else 0)
    direction = direction / np.linalg.norm(direction)
    along, first = np.abs(direction.conj() @ probes) ** 4, np.abs(probes[0]) ** 4
    z = (along - first).mean() / ((along - first).std() / np.sqrt(COUNT))
    assert (abs(z) < 4.5) == COMPLEX[name].rotation_invariant == ROTATION_INVARIANT[name]


@pytest.mark.parametrize(("n", "dtype"), [(33, np.complex128), (64, np.int32)])
def test_rademacher_entries_are_signs(n, dtype):
    probes = drawn(tr.RademacherSampler(), KEY, n, 9, dtype)
    assert probes.shape == (n, 9)
    assert probes.dtype == dtype
    assert np.all((probes == 1) | (probes == -1))


def test_leaves_are_drawn_in_their_shapes():
    """One leaf has the numbers of one long vector; several have keys of their own."""
    dtype = np.dtype(np.complex128)

    @jax.jit
    def run(key):
        return {
            name: (
                sampler.probes_by_leaf(key, [(3, 32)], 4, dtype)[0],
                sampler.probes(key, 96, 4, dtype),
                sampler.probes_by_leaf(key, [(5,), (5,)], 4, dtype),
            )
            for name, sampler in COMPLEX.items()
        }

    for leaf, whole, (one, two) in run(KEY).values():
        np.testing.assert_allclose(np.reshape(leaf, (96, 4)), whole, rtol=1e-14)
        assert not np.any(np.all(np.asarray(one) == np.asarray(two), axis=0))


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_sphere_probes_have_norm_root_n(dtype):
    probes = drawn(tr.SphereSampler(), KEY, 21, 50, dtype)
    assert probes.dtype == dtype
    norms = np.linalg.norm(probes, axis=0)
    np.testing.assert_allclose(norms, np.sqrt(21), rtol=10 * np.finfo(dtype).eps)


def test_steinhaus_entries_are_phases():
    probes = drawn(tr.SteinhausSampler(), KEY, 30, 400, np.complex64)
    assert probes.dtype == np.complex64
    np.testing.assert_allclose(np.abs(probes), 1, rtol=1e-6)
    # Uniform on the circle: the counts in 16 sectors, 15 degrees of freedom.
    sectors = np.floor((np.angle(probes) / (2 * np.pi) % 1) * 16).astype(int).ravel()
    expected = sectors.size / 16
    chi_square = np.sum((np.bincount(sectors, minlength=16) - expected) ** 2 / expected)
    assert chi_square < 15 + 5 * np.sqrt(30)


def test_dtypes():
    """That of the sampler wins over that of the call; without both it is JAX's. Positional Python
    types, as in 1.0.2.
    """

    def dtype_of(sampler, *dtype):
        return jax.eval_shape(lambda key: sampler(key, 4, 3, *dtype), KEY).dtype

    for name, sampler in COMPLEX.items():
        is_complex = name == "steinhaus"
        assert dtype_of(sampler) == (jnp.complex128 if is_complex else jnp.float64)
        with jax.enable_x64(False):
            assert dtype_of(sampler) == (jnp.complex64 if is_complex else jnp.float32)
        chosen = type(sampler)(np.complex64)
        assert chosen.dtype == np.complex64
        assert dtype_of(chosen, np.complex128) == np.complex64
        assert dtype_of(sampler, np.complex64) == np.complex64
        wide = jax.eval_shape(lambda key, s=chosen: s.probes(key, 4, 3, np.dtype(complex)), KEY)
        assert wide.dtype == np.complex128
    assert dtype_of(tr.NormalSampler(complex)) == jnp.complex128
    assert dtype_of(tr.RademacherSampler(int)) == jnp.int64
    named = jax.eval_shape(lambda: tr.RademacherSampler()(key=KEY, n=5, k=2))
    assert named.shape == (5, 2)


def test_samplers_are_hashable_and_compare_by_value():
    """They are static parts of estimators: equal ones must share a compiled program."""
    for cls in (tr.NormalSampler, tr.SphereSampler, tr.RademacherSampler):
        assert cls() == cls()
        assert hash(cls()) == hash(cls())
        assert jax.tree.structure(cls(float)) == jax.tree.structure(cls("float64"))
        assert jax.tree.structure(cls()) != jax.tree.structure(cls(np.float32))


def test_samplers_with_and_without_a_dtype_are_different_cache_keys():
    # NumPy says `np.dtype("float64") == None`; a compiled estimate must not be shared between them.
    operator = lx.MatrixLinearOperator(jnp.asarray(np.eye(6) + 1j))
    follows, real = (tr.HutchinsonEstimator(tr.SphereSampler(d)) for d in (None, float))
    assert jax.tree.structure(follows) != jax.tree.structure(real)
    values = [tr.trace(KEY, operator, 4, e).value for e in (follows, real, follows)]
    assert values[0] == values[2] != values[1]

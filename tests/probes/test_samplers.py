"""Distributions of probes: their second moment, their entries, and their dtypes."""

from functools import cache

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr

KEY = jax.random.key(0)
REAL = {
    "normal": tr.NormalSampler(),
    "sphere": tr.SphereSampler(),
    "rademacher": tr.RademacherSampler(),
}
COMPLEX = {**REAL, "steinhaus": tr.SteinhausSampler()}
COUNT = 100_000


@cache
def draw(name, dtype):
    """The probes of several tests: six numbers each."""
    return np.asarray(COMPLEX[name](KEY, 6, COUNT, dtype))


BOTH = [(name, np.float64) for name in REAL] + [(name, np.complex128) for name in COMPLEX]


@pytest.mark.parametrize(("name", "dtype"), BOTH)
def test_second_moment_is_the_identity(name, dtype):
    """E[omega omega^H] = I and E[omega] = 0: a z-test for each entry, 100,000 probes."""
    n, count, probes = 6, COUNT, draw(name, dtype)
    products = probes[:, None, :] * probes[None, :, :].conj()
    for samples, mean in ((products, np.eye(n)), (probes, np.zeros(n))):
        for part in (np.real, np.imag):
            error = part(samples.mean(-1) - mean)
            standard = part(samples).std(-1) / np.sqrt(count)
            # 72 entries at most: 4.5 standard errors are passed by chance once in 2000 runs.
            assert np.all(np.abs(error) <= 4.5 * standard + 1e-12)


@pytest.mark.parametrize(("name", "dtype"), BOTH)
def test_columns_are_independent(name, dtype):
    """E |omega_i^H omega_j|^2 = n for i != j, from 50,000 pairs of neighbours."""
    n, probes = 6, draw(name, dtype)
    samples = np.abs(np.sum(probes[:, ::2].conj() * probes[:, 1::2], axis=0)) ** 2
    z = (samples.mean() - n) / (samples.std(ddof=1) / np.sqrt(samples.size))
    assert abs(z) < 4


def test_circular_complex_probes():
    """E[omega omega^T] = 0: no phase is preferred."""
    for name in ("normal", "sphere", "steinhaus"):
        probes = draw(name, np.complex128)
        products = probes[:, None, :] * probes[None, :, :]
        for part in (np.real, np.imag):
            standard = part(products).std(-1) / np.sqrt(COUNT)
            assert np.all(np.abs(part(products.mean(-1))) <= 4.5 * standard)


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        *((n, np.float64) for n in (1, 31, 32, 33, 100)),
        *((33, dtype) for dtype in (np.float32, np.complex128, np.int32)),
    ],
)
def test_rademacher_entries_are_signs(n, dtype):
    probes = tr.RademacherSampler()(KEY, n, 9, dtype)
    assert probes.shape == (n, 9)
    assert probes.dtype == dtype
    assert np.all((np.asarray(probes) == 1) | (np.asarray(probes) == -1))


@pytest.mark.parametrize("n", [32, 50, 96])
def test_rademacher_unpacks_all_bits(n):
    """Each of the 32 positions in a word is a fair coin, and no two are the same coin."""
    count = 20_000
    signs = np.asarray(tr.RademacherSampler()(KEY, n, count))
    # sum_i z_i^2 over n rows has mean n and variance 2 n.
    chi_square = np.sum((signs.sum(1) / np.sqrt(count)) ** 2)
    assert abs(chi_square - n) < 5 * np.sqrt(2 * n)
    correlations = (signs @ signs.T / np.sqrt(count))[np.triu_indices(n, 1)]
    assert np.max(np.abs(correlations)) < 5.5
    assert abs(np.sum(correlations**2) / correlations.size - 1) < 5 * np.sqrt(2 / correlations.size)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
def test_sphere_probes_have_norm_root_n(dtype):
    probes = tr.SphereSampler()(KEY, 21, 50, dtype)
    assert probes.dtype == dtype
    norms = np.linalg.norm(np.asarray(probes), axis=0)
    np.testing.assert_allclose(norms, np.sqrt(21), rtol=10 * np.finfo(dtype).eps)


def test_sphere_probes_in_one_dimension_are_signs():
    probes = np.asarray(tr.SphereSampler()(KEY, 1, 400))
    np.testing.assert_allclose(np.abs(probes), 1, rtol=1e-15)
    assert abs(probes.sum()) < 4 * 20


def test_steinhaus_entries_are_phases():
    for dtype, eps in ((np.complex64, 1e-6), (np.complex128, 1e-14)):
        probes = tr.SteinhausSampler()(KEY, 30, 400, dtype)
        assert probes.dtype == dtype
        np.testing.assert_allclose(np.abs(probes), 1, rtol=eps)
        # Uniform on the circle: the counts in 16 sectors, 15 degrees of freedom.
        sectors = np.floor((np.angle(probes) / (2 * np.pi) % 1) * 16).astype(int).ravel()
        expected = sectors.size / 16
        chi_square = np.sum((np.bincount(sectors, minlength=16) - expected) ** 2 / expected)
        assert chi_square < 15 + 5 * np.sqrt(30)


def test_normal_probes_are_normal():
    """Kurtosis 3 of the real, and E|omega|^4 = 2 of the circular complex distribution."""
    real = np.asarray(tr.NormalSampler()(KEY, 100, 1000)).ravel()
    assert abs((real**4).mean() - 3) < 5 * np.sqrt(96 / real.size)
    circular = np.asarray(tr.NormalSampler(complex)(KEY, 100, 1000)).ravel()
    assert abs((np.abs(circular) ** 4).mean() - 2) < 5 * np.sqrt(20 / circular.size)


# --- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPLEX)
def test_default_dtype_is_that_of_jax(name):
    expected = jnp.complex128 if name == "steinhaus" else jnp.float64
    assert COMPLEX[name](KEY, 4, 3).dtype == expected
    with jax.enable_x64(False):
        low = jnp.complex64 if name == "steinhaus" else jnp.float32
        assert COMPLEX[name](KEY, 4, 3).dtype == low


@pytest.mark.parametrize(
    "cls", [tr.NormalSampler, tr.SphereSampler, tr.RademacherSampler, tr.SteinhausSampler]
)
def test_explicit_dtype_wins_over_that_of_the_call(cls):
    sampler = cls(np.complex64)
    assert sampler.dtype == np.complex64
    assert sampler(KEY, 4, 3).dtype == np.complex64
    assert sampler(KEY, 4, 3, np.complex128).dtype == np.complex64
    assert sampler.probes(KEY, 4, 3, np.dtype(np.complex128)).dtype == np.complex128
    assert cls()(KEY, 4, 3, np.complex64).dtype == np.complex64


def test_constructors_of_1_0_2():
    """Positional Python types as dtypes, and the call `sampler(key, n, k)`."""
    assert tr.NormalSampler(complex)(KEY, 5, 2).dtype == jnp.complex128
    assert tr.NormalSampler(float)(KEY, 5, 2).dtype == jnp.float64
    assert tr.SphereSampler(float)(KEY, 5, 2).dtype == jnp.float64
    assert tr.RademacherSampler(int)(KEY, 5, 2).dtype == jnp.int64
    assert tr.RademacherSampler()(key=KEY, n=5, k=2).shape == (5, 2)
    assert tr.NormalSampler(dtype=jnp.float32).dtype == np.dtype("float32")


def test_rotation_invariance_is_declared():
    flags = {name: type(sampler).rotation_invariant for name, sampler in COMPLEX.items()}
    assert flags == {"normal": True, "sphere": True, "rademacher": False, "steinhaus": False}


@pytest.mark.parametrize(("name", "dtype"), BOTH)
def test_declared_rotation_invariance_holds(name, dtype):
    """Fourth moments along e_1 and along another unit vector agree only if it is so."""
    rng = np.random.default_rng(0)
    n = 6
    direction = rng.standard_normal(n) + (1j * rng.standard_normal(n) if dtype != np.float64 else 0)
    direction = direction / np.linalg.norm(direction)
    probes = draw(name, dtype)
    along, first = np.abs(direction.conj() @ probes) ** 4, np.abs(probes[0]) ** 4
    z = (along - first).mean() / ((along - first).std() / np.sqrt(COUNT))
    assert (abs(z) < 4.5) == COMPLEX[name].rotation_invariant


def test_samplers_are_hashable_and_compare_by_value():
    """They are static parts of estimators: equal ones must share a compiled program."""
    for cls in (tr.NormalSampler, tr.SphereSampler, tr.RademacherSampler):
        assert cls() == cls()
        assert hash(cls()) == hash(cls())
        assert jax.tree.structure(cls(float)) == jax.tree.structure(cls("float64"))
        assert jax.tree.structure(cls()) != jax.tree.structure(cls(np.float32))


def test_probes_depend_on_the_key_alone():
    for sampler in COMPLEX.values():
        one, two = sampler(KEY, 40, 3), jax.jit(lambda k, s=sampler: s(k, 40, 3))(KEY)
        np.testing.assert_allclose(one, two, rtol=1e-14)
        assert np.any(np.asarray(sampler(jax.random.key(1), 40, 3)) != np.asarray(one))


def test_samplers_with_and_without_a_dtype_are_different_cache_keys():
    # NumPy says `np.dtype("float64") == None`; a compiled estimate must not be shared between them.
    key = jax.random.key(0)
    operator = lx.MatrixLinearOperator(jax.lax.complex(jnp.eye(6), jnp.ones((6, 6))))
    follows, real = (tr.HutchinsonEstimator(tr.SphereSampler(d)) for d in (None, float))
    assert jax.tree.structure(follows) != jax.tree.structure(real)
    values = [tr.trace(key, operator, 4, e).value for e in (follows, real, follows)]
    assert values[0] == values[2] != values[1]

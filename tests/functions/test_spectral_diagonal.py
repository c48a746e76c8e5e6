"""Diagonals of functions: the identity on the same vectors, no bias, errors that
cover, what is exact.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._functions.krylov_aware import GROUPS, sizes_of

from ..helpers import PSD, by_products, drawn, keys, with_spectrum
from ..reference import function_of, krylov_basis

pytestmark = pytest.mark.slow(quick=True)

N, K = 60, 48
SYMMETRIC = lx.symmetric_tag
DECAYING = np.arange(1.0, N + 1) ** -2
SPECTRUM = np.r_[3.0, 2.5, np.linspace(-1, 1, N - 2)]  # two eigenvalues apart, and a bulk


def matrix_of(eigenvalues=SPECTRUM, dtype=np.float64, seed=0):
    return with_spectrum(np.random.default_rng(seed), eigenvalues, dtype)


def operator_of(matrix):
    """Complex matrices are positive definite here: lineax has no tag for the others."""
    return by_products(matrix, PSD if jnp.iscomplexobj(matrix) else SYMMETRIC)


def diagonal_of(matrix, fn=np.exp):
    wide = np.asarray(matrix)
    return np.diag(function_of(wide.astype(np.promote_types(wide.dtype, np.float64)), fn)).real


def frechet(matrix, direction, fn, slope):
    """The derivative of f(A) by the theorem of Daleckii and Krein."""
    values, basis = np.linalg.eigh(np.asarray(matrix))
    gap = values[:, None] - values
    same = np.abs(gap) < 1e-9
    quotient = (fn(values)[:, None] - fn(values)) / np.where(same, 1, gap)
    core = np.where(same, slope(values)[:, None], quotient)
    return basis @ (core * (basis.conj().T @ np.asarray(direction) @ basis)) @ basis.conj().T


def starts(key, k, dtype):
    """The vectors of each group that the estimator draws for this key, and the number of steps."""
    size, steps, _ = sizes_of(k)
    omega = np.asarray(drawn(tr.RademacherSampler(), key, N, GROUPS * size, np.float64))
    assert set(np.unique(omega)) == {-1.0, 1.0}
    return np.split(omega.astype(dtype), GROUPS, axis=1), steps


def median(values, masses):
    order = np.argsort(values)
    below = np.cumsum(masses[order])
    return values[order][np.searchsorted(below, below[-1] / 2)]


def parts(key, matrix, k, fn):
    """V, and for each group (its vectors, V_i, c_i), from explicit bases."""
    a = np.asarray(matrix)
    groups, steps = starts(key, k, a.dtype)
    found = []
    for i, omega in enumerate(groups):
        others = np.concatenate(groups[:i] + groups[i + 1 :], axis=1)
        v = krylov_basis(a, others, steps)
        nodes, s = np.linalg.eigh(v.conj().T @ a @ v)
        first = v[:, : others.shape[1]].conj().T @ (v @ s)
        found.append((omega, v, median(fn(nodes), np.sum(np.abs(first) ** 2, axis=0))))
    return krylov_basis(a, np.concatenate(groups, axis=1), steps), found


# --- the identity, on the same vectors -----------------------------------------------------------


def test_the_identity_on_the_same_vectors():
    """The mean of omega_i o (f(A) - L_i) omega_i + diag L_i, with f(A) omega_i from V f(T) V^H."""
    a, key = np.asarray(matrix_of(DECAYING, np.complex128)), jr.key(3)
    v, groups = parts(key, a, K, np.sqrt)
    of_all = v @ function_of(v.conj().T @ a @ v, np.sqrt) @ v.conj().T
    samples = []
    for omega, left, c in groups:
        inner = function_of(left.conj().T @ a @ left, lambda x, c=c: np.sqrt(x) - c)
        known = left @ inner @ left.conj().T
        rest = (omega * ((of_all - known) @ omega)).real
        samples.extend(np.diag(known).real + x for x in rest.T)
    found = tr.spectral_diagonal(key, jnp.sqrt, by_products(jnp.asarray(a), PSD), K)
    np.testing.assert_allclose(found.value, np.mean(samples, axis=0), rtol=1e-9)
    scatter = np.std(samples, axis=0, ddof=1) / np.sqrt(len(samples))
    assert len(samples) == 8
    np.testing.assert_allclose(found.std_err, scatter, rtol=1e-7, atol=1e-13)
    assert int(found.num_matvecs) <= K


# --- derivatives ---------------------------------------------------------------------------------


def direction_of(dtype, seed=7):
    return matrix_of(np.linspace(-1, 2, N), dtype, seed)


def test_exact_with_n_products():
    dtype = np.complex128
    # Complex operators have the spectrum shifted above 0.
    matrix, change = matrix_of(SPECTRUM + 1.1, dtype), direction_of(dtype)

    def solve(t, key=jr.key(0)):
        return tr.spectral_diagonal(key, jnp.exp, operator_of(matrix + t * change), N)

    both = jax.jit(lambda t: (solve(t), jax.jacrev(lambda t: solve(t).value)(t)))
    (found, slope), eps = jax.device_get(both(0.0)), float(jnp.finfo(dtype).eps)
    truth = diagonal_of(matrix)
    np.testing.assert_allclose(found.value, truth, rtol=1e3 * eps)
    assert np.all(np.asarray(found.std_err) == 0)
    error = np.abs(np.asarray(found.value, np.float64) - truth)
    stated = np.asarray(found.quadrature_error, np.float64)
    assert np.all(error <= stated)  # rounding
    assert np.all(stated < 1e3 * eps * np.max(truth))
    expected = np.diag(frechet(matrix, change, np.exp, np.exp)).real
    np.testing.assert_allclose(slope, expected, atol=1e4 * eps * np.abs(expected).max())


# --- accuracy ------------------------------------------------------------------------------------


@jax.jit
def estimate(key, matrix, number):
    fn = lambda x: jax.lax.switch(number, [jnp.exp, jnp.log], x)  # noqa: E731
    found = tr.spectral_diagonal(key, fn, by_products(matrix, SYMMETRIC), K)
    return found, found.interval(0.999)


@pytest.mark.parametrize("eigenvalues", [np.linspace(1, 2, 5), [0.0], np.ones(N), [1e-20]])
def test_exact_where_the_space_is_invariant(eigenvalues):
    matrix = matrix_of(np.r_[eigenvalues, np.zeros(N - len(eigenvalues))])
    found, (low, high) = jax.device_get(estimate(jr.key(1), matrix, 0))
    truth = diagonal_of(matrix)
    np.testing.assert_allclose(found.value, truth, rtol=1e-12)
    room = 1e-13 * np.abs(truth).max()
    assert np.all((low - room <= truth) & (truth <= high + room))
    assert found.result == tr.RESULTS.successful


def test_failures_are_told():
    """f that is not finite at a Ritz value, NaN in the operator, recurrences that are too short."""
    key = jr.key(0)

    def log(matrix):
        return jax.device_get(estimate(key, matrix, 1)[0])

    outside, broken = log(matrix_of()), matrix_of()
    broken[3, 4] = np.nan
    assert outside.result == tr.RESULTS.outside_domain
    assert np.all(np.isnan(outside.value))
    assert np.all(np.isnan(outside.std_err))
    wrong = log(broken)
    assert wrong.result == tr.RESULTS.nonfinite_operator
    assert np.all(np.isnan(wrong.value))
    early = log(matrix_of(np.logspace(-9, 0, N)))
    assert early.result == tr.RESULTS.not_converged
    truth = diagonal_of(matrix_of(np.logspace(-9, 0, N)), np.log)
    error = np.linalg.norm(early.value - truth)
    assert error <= np.linalg.norm(2 * early.std_err + early.quadrature_error)
    with pytest.raises(ValueError, match="Hermitian"):
        tr.spectral_diagonal(key, jnp.exp, by_products(matrix_of()), K)
    with pytest.raises(TypeError, match="must be a lineax"):
        tr.spectral_diagonal(key, operator_of(matrix_of()), jnp.exp, K)


SPECTRA = {
    "decaying": (DECAYING, jnp.sqrt),
    "flat": (np.linspace(1, 3, N), jnp.log),
    "outlier": (np.r_[5.0, np.linspace(0, 0.1, N - 1)], jnp.exp),
    "clustered": (np.repeat([0.5, 1.0, 4.0], N // 3), jnp.reciprocal),
    "ill-conditioned": (np.logspace(-4, 0, N), lambda x: x / (x + 1e-2)),
}


@functools.partial(jax.jit, static_argnums=3)
def solutions(keys, matrix, number, k):
    """One program for all spectra."""

    def solve(key):
        fn = lambda x: jax.lax.switch(number, [fn for _, fn in SPECTRA.values()], x)  # noqa: E731
        found = tr.spectral_diagonal(key, fn, by_products(matrix, PSD), k)
        return found, found.interval()

    return jax.vmap(solve)(keys)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("name", list(SPECTRA))
def test_no_bias_and_bars_that_cover(name, dtype):
    (spectrum, fn), number = SPECTRA[name], list(SPECTRA).index(name)
    matrix = matrix_of(spectrum, dtype, 4)
    truth = diagonal_of(matrix, lambda x: np.asarray(fn(jnp.maximum(x, 0))))
    room = 20 * np.finfo(dtype).eps * np.abs(truth).max()
    for k in (24, K):
        found, (low, high) = jax.device_get(solutions(keys(300), matrix, number, k))
        assert np.mean((low <= truth + room) & (truth - room <= high)) >= 0.92
        value, stated, bars = (
            x.astype(float) for x in (found.value, found.quadrature_error, found.std_err)
        )
        scatter = np.std(value, axis=0, ddof=1) / np.sqrt(len(value))
        bias = np.abs(np.mean(value, axis=0) - truth)
        # The largest of 120 means is within 4.5 standard errors; truncation is stated.
        stated = np.mean(stated, axis=0)
        assert np.all(bias <= 4.5 * scatter + stated + room)
        errors, bars = (np.linalg.norm(x, axis=1) for x in (value - truth, bars))
        if np.linalg.norm(stated) < np.mean(errors) / 10 and np.mean(errors) > 100 * room:
            assert 0.8 <= np.mean(bars) / np.mean(errors) <= 1.25

"""Block Lanczos: an orthonormal basis of the Krylov space, and the matrix in it."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from traceax._linalg.block_lanczos import block_lanczos
from traceax._linalg.factorisations import ritz_values

from ..helpers import with_spectrum

N, B, S = 40, 3, 5


def spectral(eigenvalues, dtype):
    return with_spectrum(np.random.default_rng(0), eigenvalues, dtype)


def in_use(krylov):
    return jnp.any(krylov.rows != 0, axis=1)


@jax.jit
def _run(matrix, start):
    start = jr.normal(jr.key(0), (N, B), matrix.dtype) if start is None else start
    eps = float(jnp.finfo(matrix.dtype).eps)
    krylov = block_lanczos(lambda x: matrix @ x, start, S, eps)
    failures = krylov.evidence.failures.nonfinite, krylov.evidence.fails
    return start, krylov, ritz_values(krylov.t, in_use(krylov)), failures


def run(matrix, start=None):
    """The start, the recurrence, its Ritz values, and whether it is not finite, or fails."""
    return jax.device_get(_run(matrix, start))


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_the_space_and_the_matrix_in_it(dtype, scale):
    matrix = spectral(scale / np.arange(1, N + 1) ** 1.5, dtype)
    start, krylov, *_ = run(matrix)
    v, eps = np.asarray(krylov.rows).T, float(np.finfo(dtype).eps)
    np.testing.assert_allclose(v.conj().T @ v, np.eye(B * S), atol=50 * eps)
    t = v.conj().T @ np.asarray(matrix) @ v
    np.testing.assert_allclose(krylov.t, t, atol=50 * eps * scale)
    assert np.all(in_use(krylov))
    assert not krylov.exhausted
    # Every block A^i Z lies in the space of the first i + 1 blocks.
    power = np.asarray(start)
    for i in range(S):
        power = power / np.linalg.norm(power, axis=0)
        so_far = v[:, : (i + 1) * B]
        rest = power - so_far @ (so_far.conj().T @ power)
        assert np.linalg.norm(rest) < 100 * eps
        power = np.asarray(matrix) @ (power / scale)


@pytest.mark.parametrize("distinct", [1, 4])
def test_an_invariant_space(distinct):
    """A matrix with few different eigenvalues: there are no more vectors than b times as many."""
    matrix = spectral(1 + np.arange(N) % distinct, np.float64)
    _, krylov, (values, vectors), _ = run(matrix)
    assert np.sum(in_use(krylov)) == B * distinct
    assert krylov.exhausted
    counts = np.sum(np.abs(vectors), axis=0) > 0
    expected = np.repeat(np.arange(1, distinct + 1), B)
    np.testing.assert_allclose(np.sort(values[counts]), expected, rtol=1e-12)


def test_start_vectors_that_depend_on_each_other():
    matrix = spectral(1 / np.arange(1, N + 1), np.float64)
    one = np.random.default_rng(0).standard_normal((N, 1))
    start = np.concatenate([one, 2 * one, one], axis=1)
    _, krylov, (values, vectors), _ = run(matrix, start)
    assert np.sum(in_use(krylov)) == S
    counts = np.sum(np.abs(vectors), axis=0) > 0
    _, alone, *_ = run(matrix, one)
    expected = np.linalg.eigvalsh(alone.t)
    np.testing.assert_allclose(np.sort(values[counts]), expected, rtol=1e-10)


def test_zero_and_nan():
    _, krylov, _, (_, fails) = run(np.zeros((N, N)))
    assert krylov.exhausted
    assert not fails
    assert np.sum(in_use(krylov)) == B
    *_, (nonfinite, _) = run(np.full((N, N), np.nan))
    assert nonfinite

"""Samples that are shrunk towards Hutchinson's: the identities, no bias, never much worse than the
better of the two.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._estimators.estimator import RowsEstimator
from traceax._estimators.rows import Rows

from .. import reference
from ..helpers import PSD, by_products, over_keys, with_spectrum
from .test_identities import computed

pytestmark = pytest.mark.slow(quick=True)

N = 24
XTRACE = tr.XTraceEstimator(shrink=True)
XNYSTRACE = tr.XNysTraceEstimator(shrink=True)


def phases(m, dtype, seed=0):
    rng = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.complexfloating):
        return np.exp(2j * np.pi * rng.uniform(size=(N, m))).astype(dtype)
    return rng.choice([-1.0, 1.0], (N, m)).astype(dtype)


def matrices(dtype):
    """A decaying spectrum, a diagonal that dominates, both, and (not Hermitian) the rest."""
    rng = np.random.default_rng(0)
    i = np.arange(1, N + 1.0)
    noise = rng.standard_normal((N, N))
    if np.issubdtype(dtype, np.complexfloating):
        noise = noise + 1j * rng.standard_normal((N, N))
    diagonal = np.diag(2 + i % 7)
    few = noise[:, :3]
    return {
        "decay": with_spectrum(rng, 0.8**i, dtype),
        "diagonal": diagonal + 0.01 * (noise + noise.conj().T),
        "mixed": diagonal + few @ few.conj().T,
        "general": diagonal + noise / np.sqrt(N),
        "skew": diagonal + 0.3 * (noise - noise.conj().T),
    }


def shrunk(matrix, omega, estimator, k, tags, diagonal=False):
    """The estimate, and its weights contracted with A and with I."""
    made = type(estimator)(reference.GivenProbes((omega,), rotation_invariant=False), shrink=True)
    made = RowsEstimator(made, Rows()) if diagonal else made
    estimate, (of_a, of_i, _) = computed(matrix, matrix, made, k, tags)
    return estimate, of_a, of_i


@pytest.mark.parametrize(("m", "dtype"), [(3, np.float64), (5, np.complex128), (8, np.float64)])
def test_traces(m, dtype):
    """The pair formulas are those of leaving probes out by hand, and <G, I> = n."""
    omega = phases(m, dtype)
    for name, matrix in matrices(dtype).items():
        hermitian = name in ("decay", "diagonal", "mixed")
        size = np.linalg.norm(matrix)
        tags = PSD if hermitian else ()
        for estimator in (XTRACE, XNYSTRACE) if hermitian else (XTRACE,):
            nystrom = estimator is XNYSTRACE
            probes = omega[:, :7] if nystrom else omega  # from 8 on there may be a shift
            value, error, beta = reference.shrunk(matrix, probes, nystrom, skew=not hermitian)
            k = probes.shape[1] if nystrom else 2 * m
            found, of_a, of_i = shrunk(matrix, probes, estimator, k, tags)
            np.testing.assert_allclose(found.value, value, rtol=1e-10)
            np.testing.assert_allclose(found.std_err, error, rtol=1e-6, atol=1e-12 * size)
            np.testing.assert_allclose(of_i, N, rtol=1e-12)
            if not nystrom:  # whose weights are those of XTrace
                np.testing.assert_allclose(of_a, value, rtol=1e-12)
            if m == 8 and name in ("decay", "diagonal"):
                assert np.all((beta > 0.5) == (name == "decay"))


def test_diagonals():
    """One weight for all entries."""
    m, dtype = 6, np.complex128
    omega = phases(m, dtype)
    for name, matrix in matrices(dtype).items():
        hermitian = name in ("decay", "diagonal", "mixed")
        for estimator in (XTRACE, XNYSTRACE) if hermitian else (XTRACE,):
            nystrom = estimator is XNYSTRACE
            expected = reference.shrunk_diagonal(matrix, omega, nystrom)
            k = m if nystrom else 2 * m
            tags = PSD if hermitian else ()
            found, of_a, _ = shrunk(matrix, omega, estimator, k, tags, diagonal=True)
            atol = 1e-9 * np.linalg.norm(matrix)
            np.testing.assert_allclose(found.value, expected, atol=atol)
            if not nystrom:
                np.testing.assert_allclose(of_a, expected, atol=atol)


def errors(matrix, k, estimator, count, tags):
    """The errors of traces, and the standard errors, of so many keys."""
    operator = by_products(matrix, tags)
    solution = over_keys(count, lambda key: tr.trace(key, operator, k, estimator))
    return solution.value - np.trace(matrix), solution.std_err


def rank_two():
    """A diagonal and two directions: the case in which weights that see the probe are biased."""
    rng = np.random.default_rng(1)
    e = rng.standard_normal((40, 2))
    return np.diag(1 + np.arange(40) % 7.0) + e @ e.T


@pytest.mark.parametrize("kind", ["diagonal + rank 2", "1 + e e^T"])
@pytest.mark.parametrize("m", [3, 4, 6])
def test_weights_do_not_see_their_own_probe(kind, m):
    """No bias over 4,000 keys, where that of weights from all probes is .2 of the rms: 13 standard
    errors.
    """
    matrix = rank_two() if kind == "diagonal + rank 2" else np.eye(40) + np.ones((40, 40))
    for estimator, k in ((XTRACE, 2 * m), (XNYSTRACE, m)):
        error, _ = errors(matrix, k, estimator, 4000, PSD)
        z = error.mean() / error.std(ddof=1) * np.sqrt(len(error))
        assert abs(z) < 4, (kind, m, estimator)


@pytest.mark.parametrize("definite", [True, False])
def test_never_worse_than_hutchinson(definite):
    """n = 200, random signs off the diagonal 1 ... 7, a decaying spectrum, and a mixed one; the
    limits are those of one and of two products a probe, and three standard errors of 200 keys.
    """
    n = 200
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((n, n))
    few = rng.standard_normal((n, 10))
    i = np.arange(1, n + 1.0)
    cases = (
        np.diag(1 + i % 7) + 0.01 * (noise + noise.T),
        with_spectrum(rng, i**-2),
        np.diag(1 + i % 7) + few @ few.T / 3,
    )
    tags = PSD if definite else lx.symmetric_tag
    published = tr.XNysTraceEstimator() if definite else tr.XTraceEstimator()
    for matrix in cases:
        for k in (8, 32):
            others = tr.HutchinsonEstimator(), published
            best = min(np.mean(errors(matrix, k, each, 200, tags)[0] ** 2) for each in others)
            error, std_err = errors(matrix, k, tr.AutoTraceEstimator(), 200, tags)
            ratio = np.sqrt(np.mean(error**2) / best)
            assert ratio < (1.2 if definite else 1.5) * (1 + 3 / np.sqrt(200))
            assert np.mean(abs(error) <= 3.2 * std_err) > 0.92


def test_diagonal_operators_are_exact():
    """Hutchinson's samples of a diagonal are exact; the error bar says rounding, not 0."""
    matrix = np.diag(1 + np.arange(N) % 7.0)
    for tags, k in ((PSD, 4), ((), 8)):
        error, std_err = errors(matrix, k, tr.AutoTraceEstimator(), 5, tags)
        assert np.all(abs(error) <= 4 * std_err)
        assert np.all((std_err > 0) & (std_err < 1e-12 * np.trace(matrix)))


def test_derivative_by_a_multiple_of_the_identity():
    """d tr(A + c I) / dc = n exactly, with the level's own part."""
    matrix = matrices(np.float64)["mixed"]

    def values(c):
        operators = [by_products(matrix + c * np.eye(N), tag) for tag in (PSD, lx.symmetric_tag)]
        pairs = zip(operators, (5, 10), strict=True)
        return jnp.stack([tr.trace(jr.key(0), operator, k).value for operator, k in pairs])

    np.testing.assert_allclose(jax.jit(jax.jacrev(values))(0.3), N, rtol=1e-12)

"""Extreme eigenpairs: identities, recovery, bounds that hold, warm starts, derivatives."""

import functools

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._functions.eigenpairs import log_sum, recurrence
from traceax._linalg.lanczos import tridiagonal

from ..helpers import NSD, PSD, drawn, keys, with_spectrum
from ..reference import each

pytestmark = pytest.mark.slow(quick=True)

SYM = lx.symmetric_tag
N = 40


@functools.partial(jax.jit, static_argnames=("k", "num", "which", "tags"), inline=True)
def solve(key, matrix, k, num=1, which="LA", start=None, tags=SYM):
    return tr.eigenpairs(key, lx.MatrixLinearOperator(matrix, tags), k, num, which, start)


# --- identities ----------------------------------------------------------------------------------


def test_sum_of_squares_is_that_of_the_basis():
    """sum_j <v_j, u>^2 = <v_0, u>^2 sum_j pi_j(x)^2, at both ends."""
    eigenvalues = np.linspace(-1, 2, N)
    matrix = with_spectrum(np.random.default_rng(0), eigenvalues)
    start = drawn(tr.SphereSampler(), jax.random.key(1), N, 1)[:, 0]
    ends = (-1, 1), (0, -1)

    @jax.jit
    def run(start, key):
        found = recurrence(lambda x: matrix @ x, start, key, 12, 1e-16)
        krylov = tridiagonal(found)
        alpha, beta = krylov.alpha[:, 0], krylov.beta[:, 0]
        totals = [
            log_sum(sign * alpha, beta, jnp.asarray(1e-30), sign * eigenvalues[[end]])[0]
            for end, sign in ends
        ]
        return jnp.concatenate([found.basis[0], found.following]), totals

    with jax.numpy_dtype_promotion("standard"):
        rows, totals = jax.device_get(run(start, jax.random.key(2)))
    np.testing.assert_allclose(rows @ rows.T, np.eye(13), atol=1e-12)
    u = np.linalg.eigh(matrix)[1]
    first = start / np.linalg.norm(start) @ u
    for (end, _), total in zip(ends, totals, strict=True):
        truth = np.sum((rows @ u[:, end]) ** 2) / first[end] ** 2
        np.testing.assert_allclose(np.exp(total), truth, rtol=1e-8)


# --- recovery ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "dtype", "k"),
    [("LA", np.complex128, 30), ("SA", np.float64, 36), ("LM", np.float32, 30)]
    + [("BE", np.float64, 36), ("BE", np.float64, N + 3)],
)
def test_against_eigh(which, dtype, k):
    eigenvalues = np.r_[-3.0, np.linspace(-1, 2, N - 1)] + (4 if dtype == np.complex128 else 0)
    matrix = with_spectrum(np.random.default_rng(0), eigenvalues, dtype)
    tags = PSD if dtype == np.complex128 else SYM
    pairs = solve(jax.random.key(0), matrix, k, 3, which, tags=tags)
    up, eps = np.sort(eigenvalues), np.finfo(dtype).eps
    largest = up[np.argsort(-np.abs(up))][:3]
    truth = {"LA": up[:-4:-1], "SA": up[:3], "LM": largest, "BE": up[[0, -2, -1]]}[which]
    assert pairs.values.dtype == np.finfo(dtype).dtype
    pairs = jax.tree.map(np.asarray, pairs)
    assert int(pairs.num_matvecs) == min(k, N)
    # The error of a Ritz value is of the order of the square of the residual, over the gap.
    np.testing.assert_allclose(pairs.values, truth, atol=1e-3)
    assert np.all(np.abs(pairs.values - truth) <= pairs.residuals)
    ends = [0, 2] if which == "BE" else [0]
    assert np.all(np.abs(pairs.values - truth)[ends] <= pairs.errors[ends])
    assert pairs.bounds[0] <= eigenvalues.min() <= eigenvalues.max() <= pairs.bounds[1]
    # Bounds are sharp where an eigenvalue stands alone.
    assert np.max(pairs.errors) < 0.1
    assert which != "SA" or pairs.errors[0] < 1e-3
    vectors = np.asarray(pairs.vectors)
    np.testing.assert_allclose(vectors @ vectors.conj().T, np.eye(3), atol=100 * eps)
    residuals = np.linalg.norm(vectors @ matrix.T - pairs.values[:, None] * vectors, axis=1)
    np.testing.assert_allclose(pairs.residuals, residuals, rtol=1e-3, atol=200 * eps)


def test_a_warm_start_follows_a_drifting_operator():
    """With four products a look, from PyTrees; k steps may be divided into several calls."""
    rng = np.random.default_rng(0)
    base = with_spectrum(rng, np.r_[np.linspace(-0.5, 1, N - 1), 2.0])
    drift = with_spectrum(rng, np.linspace(-1, 1, N))
    structure = {"a": jax.ShapeDtypeStruct((4, 5), float), "b": jax.ShapeDtypeStruct((20,), float)}

    @functools.partial(jax.jit, static_argnames="k")
    def look(key, t, start, k):
        def product(v):
            image = (base + t * drift) @ jnp.concatenate([v["a"].reshape(-1), v["b"]])
            return {"a": image[:20].reshape(4, 5), "b": image[20:]}

        operator = lx.FunctionLinearOperator(product, structure, SYM)
        return tr.eigenpairs(key, operator, k, start=start)

    pairs = look(jax.random.key(0), 0.0, None, 20)
    for i, key in enumerate(keys(10)):
        pairs = jax.device_get(look(key, 0.02 * i, pairs, 4))
        truth = np.linalg.eigvalsh(base + 0.02 * i * drift)[-1]
        assert pairs.vectors["a"].shape == (1, 4, 5)
        assert 0 <= truth - pairs.values[0] < 0.002
        assert truth - pairs.values[0] <= pairs.errors[0]


def test_degenerate_operators():
    """Copies of a multiple eigenvalue, the zero operator, rank 1, n = 1: never NaN."""
    step = with_spectrum(np.random.default_rng(0), np.where(np.arange(N) < 4, 1.0, 1e-3))
    scale = np.float32(1e-20)
    pairs = solve(jax.random.key(0), step.astype(np.float32) * scale, 20, 4)
    np.testing.assert_allclose(pairs.values / scale, 1, rtol=1e-5)
    one = np.ones((N, N), np.float32) * scale
    for matrix, truth in ((0 * one, 0), (one, N * scale), (one[:1, :1], scale)):
        pairs = jax.device_get(solve(jax.random.key(0), matrix, 3, 1, "BE"))
        np.testing.assert_allclose(pairs.values, truth, rtol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(pairs.vectors, axis=-1), 1, rtol=1e-5)
        assert np.all(pairs.residuals <= 1e-5 * truth)
        assert abs(float(pairs.values[0] - truth)) <= float(pairs.errors[0])
        assert pairs.result == tr.RESULTS.successful


def test_a_tag_is_a_bound_nan_says_so_and_a_start_of_nan_is_none():
    matrix = with_spectrum(np.random.default_rng(0), -np.linspace(0.01, 2, N))
    bounded = jax.device_get(solve(jax.random.key(0), matrix, 8, tags=NSD))
    assert bounded.values[0] <= bounded.bounds[1] <= 0
    matrix = np.diag(np.arange(N, dtype=float))
    bad = solve(jax.random.key(0), np.where(matrix == 3, np.nan, matrix), 8, tags=NSD)
    assert bad.result == tr.RESULTS.nonfinite_operator
    assert np.all(np.isnan(bad.values))
    after = solve(jax.random.key(0), matrix, 20, start=bad)
    assert after.result == tr.RESULTS.successful
    np.testing.assert_allclose(after.values, N - 1, atol=0.1)


# --- errors --------------------------------------------------------------------------------------


FLAT = np.linspace(-1, 1, 60)
# Nearly double, and a tight cluster at the end.
CLUSTER = np.r_[np.linspace(-1, 0.5, 50), 1 - 1e-3 * np.arange(10)]


@pytest.mark.parametrize(("spectrum", "warm"), [(FLAT, False), (CLUSTER, True)])
def test_bounds_hold(spectrum, warm):
    """No more than 1 % miss an end, nor half of 1 % one of them, also from a start that is an exact
    eigenvector in the middle of the spectrum, which hides all the others. The shares of 3000 keys
    are known to 0.2 and 0.13 %: three times that is allowed. (Where an eigenvalue stands alone the
    bounds are sharp, and nearly as many miss.)
    """
    matrix = with_spectrum(np.random.default_rng(1), spectrum)
    values, vectors = np.linalg.eigh(matrix)
    start = vectors[:, 30] if warm else None
    # It computes for longer than it compiles.
    jax.config.update("jax_disable_most_optimizations", False)
    found = jax.device_get(each(lambda key: solve(key, matrix, 8, 1, "LA", start), keys(3000)))
    low, high = found.bounds.T
    missed = np.mean((low > values[0]) | (high < values[-1]))
    assert missed <= 0.01 + 0.006
    error = values[-1] - found.values[:, 0]
    assert np.mean(error > found.errors[:, 0]) <= 0.005 + 0.004
    assert np.all(error > -1e-12)
    # They say something: an operator with this extent, and twice as much for the noise.
    extent = values[-1] - values[0]
    assert np.median(found.errors) < (8 if warm else 1.5) * extent
    # An eigenvalue is within the residual, always.
    distance = np.min(np.abs(found.values - values), axis=1)
    assert np.all(distance <= found.residuals[:, 0])


# --- derivatives and batching --------------------------------------------------------------------


def test_derivatives_and_batches():
    rng, dtype = np.random.default_rng(0), np.complex128
    base = with_spectrum(rng, 0.5 ** np.arange(N), dtype)
    slope = with_spectrum(rng, np.linspace(0, 0.1, N), dtype)

    def ours(t, key, k=20):
        operator = lx.MatrixLinearOperator(base + t.astype(dtype) * slope, PSD)
        return tr.eigenpairs(key, operator, k, 2).values

    def exact(t):
        return jnp.linalg.eigvalsh(base + t.astype(dtype) * slope)[::-1][:2]

    @jax.jit
    def run(times, keys):
        t, key = times[2], keys[2]
        return (
            jax.jacobian(exact)(t),
            jax.jacfwd(ours)(t, key),
            jax.jacrev(lambda t: ours(t, key, N))(t),
            # vmap over keys and operators, around the derivative and inside of it.
            jax.vmap(jax.jacrev(ours))(times, keys),
            jax.grad(lambda t: jnp.sum(jax.vmap(ours)(t, keys)[:, 0]))(times),
        )

    with jax.numpy_dtype_promotion("standard"):
        truth, forward, exactly, reverse, summed = run(np.array([0.1, 0.2, 0.3]), keys(3))
    for found in (forward, reverse[2]):
        np.testing.assert_allclose(found, truth, rtol=1e-6)
    np.testing.assert_allclose(exactly, truth, rtol=1e-9)
    np.testing.assert_allclose(summed, reverse[:, 0], rtol=1e-9)

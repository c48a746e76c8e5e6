"""Extreme eigenpairs: identities, recovery, bounds that hold, warm starts, derivatives."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tr
from benchmarks.common import with_eigenvalues
from traceax._functions.thick_restart import _log_sum, _mirrored, run_cycles

from ..helpers import NSD, PSD, keys, spectra, variant, with_spectrum

SYM = lx.symmetric_tag
N = 40


@functools.partial(
    jax.jit, static_argnames=("k", "num", "which", "tags", "basis_size"), inline=True
)
def solve(key, matrix, k, num=1, which="LA", start=None, tags=SYM, basis_size=None):
    operator = lx.MatrixLinearOperator(matrix, tags)
    return tr.eigenpairs(key, operator, k, num, which, start, basis_size=basis_size)


def wanted(eigenvalues, num, which):
    """The wanted ones of these, by NumPy."""
    ascending = np.sort(eigenvalues)
    low = num // 2
    return {
        "LA": ascending[::-1][:num],
        "SA": ascending[:num],
        "LM": ascending[np.argsort(-np.abs(ascending))][:num],
        "BE": np.r_[ascending[:low], ascending[len(ascending) - (num - low) :]],
    }[which]


# --- identities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("basis_size", [12, 6])
def test_sum_of_squares_is_that_of_the_basis(basis_size):
    """sum_j <v_j, u>^2 = <v_0, u>^2 sum_j pi_j(x)^2, with and without restarts, at both ends."""
    eigenvalues = np.linspace(-1, 2, N)
    matrix = jnp.asarray(with_spectrum(np.random.default_rng(0), eigenvalues))
    start = tr.SphereSampler()(jax.random.key(1), N, 1, float)[:, 0]
    with jax.numpy_dtype_promotion("standard"):
        run = run_cycles(
            lambda x: matrix @ x, start, jax.random.key(2), 12, 1, "BE", basis_size, 1e-16
        )
        history, scale = run.carry.history, float(run.carry.scale)
        rows = np.asarray(run.carry.rows[: run.used + 1])
        np.testing.assert_allclose(rows @ rows.T, np.eye(len(rows)), atol=1e-12)
        u = np.linalg.eigh(matrix)[1]
        first = np.asarray(start) / np.linalg.norm(start) @ u
        for end, sign in ((-1, 1), (0, -1)):
            x = jnp.asarray([sign * eigenvalues[end] / scale])
            of_end = history if sign > 0 else _mirrored(history)
            found = _log_sum(of_end, jnp.asarray(1e-30), x)[0]
            truth = np.sum((rows @ u[:, end]) ** 2) / first[end] ** 2
            np.testing.assert_allclose(np.exp(found), truth, rtol=1e-8)


# --- recovery ------------------------------------------------------------------------------------

CASES = {
    "LA": (np.linspace(-1, 2, N), np.float64, SYM),
    "SA": (np.linspace(-1, 2, N), np.float64, SYM),
    "LM": (np.r_[-3.0, np.linspace(-1, 2, N - 1)], np.float32, SYM),
    "BE": (np.r_[-3.0, np.linspace(-1, 2, N - 1)], np.float64, SYM),
}


@pytest.mark.parametrize(
    ("which", "k", "basis_size"),
    [
        ("LA", 30, None),
        ("SA", 36, 16),
        variant("LM", 30, 16),
        ("BE", 36, 16),
        variant("LA", 36, 16),
    ],
)
def test_against_eigh(which, k, basis_size):
    eigenvalues, dtype, tags = CASES[which]
    matrix = with_spectrum(np.random.default_rng(0), eigenvalues, dtype)
    pairs = solve(jax.random.key(0), matrix, k, 3, which, tags=tags, basis_size=basis_size)
    truth = wanted(eigenvalues, 3, which)
    eps = np.finfo(dtype).eps
    assert pairs.values.dtype == dtype
    pairs = jax.tree.map(np.asarray, pairs)
    assert int(pairs.num_matvecs) == k
    # The error of a Ritz value is of the order of the square of the residual, over the gap.
    np.testing.assert_allclose(pairs.values, truth, atol=1e-3)
    assert np.all(np.abs(pairs.values - truth) <= pairs.residuals)
    ends = {"BE": [0, 2]}.get(which, [0])
    assert np.all(np.abs(pairs.values - truth)[ends] <= pairs.errors[ends])
    assert pairs.bounds[0] <= eigenvalues.min() <= eigenvalues.max() <= pairs.bounds[1]
    assert np.max(pairs.errors) < 0.1
    vectors = np.asarray(pairs.vectors)
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(3), atol=100 * eps)
    residuals = np.linalg.norm(vectors @ matrix - pairs.values[:, None] * vectors, axis=1)
    np.testing.assert_allclose(pairs.residuals, residuals, rtol=1e-3, atol=200 * eps)


@pytest.mark.parametrize(
    "name", [variant("complex"), variant("negative"), variant("exact"), "exact-complex"]
)
def test_complex_negative_and_exact(name):
    eigenvalues = np.linspace(0.01, 2, N) ** 3
    dtype = np.complex128 if "complex" in name else np.float64
    tags, sign = (NSD, -1) if name == "negative" else (PSD, 1)
    matrix = with_spectrum(np.random.default_rng(0), sign * eigenvalues, dtype)
    k = N + 3 if "exact" in name else 25
    for which in ("LA", "SA"):
        pairs = solve(jax.random.key(0), matrix, k, 2, which, tags=tags)
        pairs = jax.tree.map(np.asarray, pairs)
        truth = wanted(sign * eigenvalues, 2, which)
        assert int(pairs.num_matvecs) == min(k, N)
        assert not jnp.iscomplexobj(pairs.values)
        assert abs(pairs.values[0] - truth[0]) <= pairs.errors[0]
        np.testing.assert_allclose(pairs.values, truth, atol=1e-13 if "exact" in name else 0.06)
        assert np.max(pairs.errors) < (1e-13 if "exact" in name else 0.2)
        # The tag is a bound as well.
        assert np.min(sign * np.asarray(pairs.bounds)) >= 0
        images = np.asarray(pairs.vectors) @ matrix.T
        residuals = np.linalg.norm(images - pairs.values[:, None] * pairs.vectors, axis=1)
        np.testing.assert_allclose(pairs.residuals, residuals, atol=1e-12)


@pytest.mark.parametrize("scale", [variant(1.0), 1e-20, variant(1e20)])
def test_degenerate_operators(scale):
    """Copies of a multiple eigenvalue, the zero operator, rank 1, n = 1: never NaN."""
    step = with_spectrum(np.random.default_rng(0), np.where(np.arange(N) < 4, 1.0, 1e-3))
    scale = np.float32(scale)
    pairs = solve(jax.random.key(0), step.astype(np.float32) * scale, 20, 4)
    np.testing.assert_allclose(pairs.values / scale, 1, rtol=1e-5)
    one = np.ones((N, N), np.float32) * scale
    for matrix, truth in ((0 * one, 0), (one, N * scale), (one[:1, :1], scale)):
        for which in ("LA", "BE"):
            pairs = solve(jax.random.key(0), matrix, 3, 1, which)
            np.testing.assert_allclose(pairs.values, truth, rtol=1e-5)
            np.testing.assert_allclose(np.linalg.norm(pairs.vectors, axis=-1), 1, rtol=1e-5)
            assert np.all(pairs.residuals <= 1e-5 * truth)
            assert abs(float(pairs.values[0] - truth)) <= float(pairs.errors[0])
            assert pairs.result == tr.RESULTS.successful


def test_nan_says_so_and_a_start_of_nan_is_none():
    matrix = np.diag(np.arange(N, dtype=float))
    bad = solve(jax.random.key(0), np.where(matrix == 3, np.nan, matrix), 5)
    assert bad.result == tr.RESULTS.nonfinite_operator
    assert np.all(np.isnan(bad.values))
    after = solve(jax.random.key(0), matrix, 20, start=bad)
    assert after.result == tr.RESULTS.successful
    np.testing.assert_allclose(after.values, N - 1, atol=0.1)


# --- errors --------------------------------------------------------------------------------------


@functools.cache
def bound_cases():
    flat, outlier = np.linspace(-1, 1, 60), np.r_[np.linspace(-1, 1, 59), 2.0]
    rng = np.random.default_rng(1)
    # Nearly double, and a tight cluster at the end.
    cluster = np.r_[np.linspace(-1, 0.5, 50), 1 - 1e-3 * np.arange(10)]
    return {
        "flat": with_spectrum(rng, flat),
        "outlier": with_spectrum(rng, outlier),
        "cluster": with_spectrum(rng, cluster),
        "complex": with_spectrum(rng, flat, np.complex128),
    }


@pytest.mark.parametrize(
    ("name", "warm"),
    [("flat", False), variant("cluster", True), variant("flat", True), variant("cluster", False)]
    + [variant(name, warm) for name in ("outlier", "complex") for warm in (False, True)],
)
def test_bounds_hold(name, warm):
    """No more than 1 % miss an end, nor half of 1 % one of them, also from a start that is an exact
    eigenvector in the middle of the spectrum, which hides all the others. The shares of 3000 keys
    are known to 0.2 and 0.13 %: three times that is allowed. (Where an eigenvalue stands alone the
    bounds are sharp, and nearly as many miss.)
    """
    matrix = bound_cases()[name]
    values, vectors = np.linalg.eigh(matrix)
    tags = PSD if np.iscomplexobj(matrix) else SYM
    shifted = matrix + 2 * np.eye(60) if np.iscomplexobj(matrix) else matrix
    values = values + 2 if np.iscomplexobj(matrix) else values
    start = jnp.asarray(vectors[:, 30]) if warm else None
    found = jax.jit(jax.vmap(lambda key: solve(key, shifted, 8, 1, "LA", start, tags)))(keys(3000))
    low, high = np.asarray(found.bounds).T
    missed = np.mean((low > values[0]) | (high < values[-1]))
    assert missed <= 0.01 + 0.006
    error = values[-1] - np.asarray(found.values[:, 0])
    assert np.mean(error > np.asarray(found.errors[:, 0])) <= 0.005 + 0.004
    assert np.all(error > -1e-12)
    # They say something: an operator with this extent, and twice as much for the noise.
    extent = values[-1] - values[0]
    assert np.median(found.errors) < (8 if warm else 1.5) * extent
    # An eigenvalue is within the residual, always.
    distance = np.min(np.abs(np.asarray(found.values) - values), axis=1)
    assert np.all(distance <= np.asarray(found.residuals[:, 0]))


def test_bound_is_sharp_where_an_eigenvalue_stands_alone():
    matrix = bound_cases()["outlier"]
    found = jax.jit(jax.vmap(lambda key: solve(key, matrix, 14)))(keys(50))
    assert np.max(found.errors) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["poly", "exp0.9", "step1e-3"])
def test_not_worse_than_eigsh_at_equal_products(name):
    """As many products as `eigsh` (ARPACK, a basis of 20) takes to a tolerance, five starts."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    eigenvalues = spectra(300)[name]
    matrix = with_eigenvalues(eigenvalues)
    theirs, spent = [], []
    for seed in range(5):
        start = np.random.default_rng(seed).standard_normal(300)
        spent.append(0)

        def product(v):
            spent[-1] += 1
            return matrix @ v

        operator = LinearOperator(matrix.shape, product, dtype=float)
        value = eigsh(operator, 1, which="LA", v0=start, tol=1e-3, return_eigenvectors=False)[0]
        theirs.append(abs(eigenvalues.max() - value))
    found = jax.jit(jax.vmap(lambda key: solve(key, matrix, min(spent))))(keys(5))
    ours = np.abs(eigenvalues.max() - np.asarray(found.values[:, 0]))
    assert np.median(ours) <= 1.05 * np.median(theirs) + 1e-13 * np.ptp(eigenvalues)


# --- products, structures, starts ----------------------------------------------------------------


def test_products_are_counted_honestly():
    counted = []

    def product(v):
        def host(v):
            counted.append(1)
            return np.linspace(-1, 1, N) * v

        return jax.pure_callback(host, structure, v, vmap_method="sequential")

    structure = jax.ShapeDtypeStruct((N,), float)
    operator = lx.FunctionLinearOperator(product, structure, SYM)
    for k, basis_size in ((9, None), (23, 8)):
        counted.clear()
        pairs = jax.block_until_ready(
            tr.eigenpairs(jax.random.key(0), operator, k, basis_size=basis_size)
        )
        assert len(counted) == int(pairs.num_matvecs) == k


@pytest.mark.variant
def test_pytrees_one_program_and_warm_starts():
    """Following a drifting operator with four products a look."""
    rng = np.random.default_rng(0)
    base = jnp.asarray(with_spectrum(rng, np.r_[np.linspace(-0.5, 1, N - 1), 2.0]))
    drift = jnp.asarray(with_spectrum(rng, np.linspace(-1, 1, N)))
    flat, unravel = ravel_pytree({"a": jnp.zeros((4, 5)), "b": [jnp.zeros(20)]})
    traced = []

    @eqx.filter_jit
    def look(key, t, start, k):
        traced.append(k)
        matrix = base + t * drift
        operator = lx.FunctionLinearOperator(
            lambda v: unravel(matrix @ ravel_pytree(v)[0]),
            jax.eval_shape(lambda: unravel(flat)),
            SYM,
        )
        return tr.eigenpairs(key, operator, k, start=start), jnp.linalg.eigvalsh(matrix)[-1]

    pairs, _ = look(jax.random.key(0), jnp.asarray(0.0), None, 20)
    warm, cold = [], []
    for i, key in enumerate(keys(10)):
        t = jnp.asarray(0.02 * i)
        pairs, truth = look(key, t, pairs, 4)
        assert pairs.vectors["a"].shape == (1, 4, 5)
        warm.append(float(truth - pairs.values[0]))
        cold.append(float(truth - look(key, t, None, 4)[0].values[0]))
        assert 0 <= warm[-1] <= float(pairs.errors[0])
    assert len(traced) == 3
    assert max(warm) < 0.002
    assert np.median(cold) > 0.005
    # A vector of the user will do as well.
    vector = jax.tree.map(lambda x: x[0], pairs.vectors)
    again, truth = look(jax.random.key(0), t, vector, 4)
    assert float(truth - again.values[0]) < 0.02


# --- derivatives and batching --------------------------------------------------------------------


@pytest.mark.variant
@pytest.mark.parametrize("dtype", [variant(np.float64), np.complex128])
def test_derivatives_and_batches(dtype):
    rng = np.random.default_rng(0)
    base = jnp.asarray(with_spectrum(rng, 0.5 ** np.arange(N), dtype))
    slope = jnp.asarray(with_spectrum(rng, np.linspace(0, 0.1, N), dtype))

    def ours(t, key, k=20):
        operator = lx.MatrixLinearOperator(base + t.astype(dtype) * slope, PSD)
        return tr.eigenpairs(key, operator, k, 2).values

    def exact(t):
        return jnp.linalg.eigvalsh(base + t.astype(dtype) * slope)[::-1][:2]

    t, key = jnp.asarray(0.3), jax.random.key(0)
    with jax.numpy_dtype_promotion("standard"):
        truth = jax.jacobian(exact)(t)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(ours))(t, key), truth, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.jacrev(ours))(t, key), truth, rtol=1e-6)
    exactly = jax.jit(jax.jacrev(lambda t: ours(t, key, N)))(t)
    np.testing.assert_allclose(exactly, truth, rtol=1e-9)

    # vmap over keys and operators, around the derivative and inside of it.
    times = jnp.asarray([0.1, 0.2, 0.3])
    each = jax.vmap(jax.jacrev(ours))(times, keys(3))
    one = jax.jit(jax.jacrev(ours))(times[1], keys(3)[1])
    np.testing.assert_allclose(each[1], one, rtol=1e-9)
    summed = jax.grad(lambda t: jnp.sum(jax.vmap(ours)(t, keys(3))[:, 0]))(times)
    np.testing.assert_allclose(summed, each[:, 0], rtol=1e-9)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        jax.eval_shape(jax.grad(jax.grad(lambda t: ours(t, key)[0])), t)


@pytest.mark.variant
def test_in_a_scan():
    matrix = with_spectrum(np.random.default_rng(0), np.linspace(-1, 2, N))

    def step(pairs, key):
        pairs = solve(key, matrix, 5, 2, "BE", pairs)
        return pairs, pairs.values

    first = solve(jax.random.key(0), matrix, 6, 2, "BE")
    with jax.checking_leaks():
        _, values = jax.jit(lambda first: jax.lax.scan(step, first, keys(12)))(first)
    np.testing.assert_allclose(values[-1], [-1, 2], atol=0.02)


def test_rounding_of_many_restarts():
    """After 285 restarts values are off by five times the rounding of one cycle."""
    rng = np.random.default_rng(0)
    ends = [-5.0, -4.2, 7.0, 6.0, 5.5, 5.2]
    eigenvalues = np.concatenate([ends, rng.uniform(-3.5, 4.5, 294)])
    matrix = jnp.asarray(with_spectrum(rng, eigenvalues))
    for key in keys(6):
        pairs = solve(key, matrix, 290, 3, "BE", basis_size=5)
        apart = np.min(np.abs(np.asarray(pairs.values)[:, None] - eigenvalues), axis=1)
        assert np.all(apart <= np.asarray(pairs.residuals))
        assert np.all(pairs.residuals < 1e-11)

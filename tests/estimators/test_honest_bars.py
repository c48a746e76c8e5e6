"""Error bars that can be believed: rounding is part of them, and few products say so."""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from traceax._diagonal import norms

import traceax as tr
from benchmarks.common import eight_spectra, with_eigenvalues

from .. import reference
from ..helpers import (
    PSD,
    keys,
    variant,
)

# ----------------------------------------------------------------- rounding is part of the error


SKETCHING = [tr.HutchPlusPlusEstimator(), tr.XTraceEstimator(), tr.XNysTraceEstimator()]
EVERY = [tr.HutchinsonEstimator(), *SKETCHING]


@pytest.mark.parametrize(
    ("estimator", "completed"),
    [
        (tr.HutchinsonEstimator(), False),
        variant(tr.XNysTraceEstimator(), True),
        *(variant(e, False) for e in EVERY[1:]),
        *(variant(e, True) for e in EVERY[:-1]),
    ],
)
def test_half_precision_is_not_exact(estimator, completed):
    """A tolerance beyond products in bfloat16 is not_converged, also of the completed trace, and
    the error bar covers the error.
    """
    n = 150
    noise = np.random.default_rng(0).standard_normal((n, n))
    matrix = jnp.asarray(np.eye(n) + 0.01 * (noise + noise.T), jnp.bfloat16)
    truth = np.trace(np.asarray(matrix.astype(jnp.float64)))

    def solve(key, matrix):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        options = {"rtol": 1e-6, "max_k": n if completed else 50, "estimator": estimator}
        return tr.trace(key, operator, **options)

    solutions = reference.each(solve, keys(20), matrix)
    assert bool(jnp.all(solutions.result == tr.RESULTS.not_converged))
    std_err = np.asarray(solutions.std_err)
    assert np.all(std_err > 1e-6 * truth / 2)
    # 20 errors of some 3 standard errors at most: P(|t_15| > 5) = 2e-4.
    assert np.all(np.abs(np.asarray(solutions.value) - truth) < 5 * std_err)


def test_exact_values_of_half_precision_state_its_rounding():
    """Of products with unit vectors, whose images are rounded. Stored entries are what they are."""
    n = 150
    noise = np.random.default_rng(0).standard_normal((n, n))
    matrix = jnp.asarray(np.eye(n) + 0.01 * (noise + noise.T), jnp.bfloat16)
    structure = jax.ShapeDtypeStruct((n,), jnp.bfloat16)

    def mv(v):
        product = matrix.astype(jnp.float32) @ v.astype(jnp.float32) / 3
        # XLA may leave out the rounding of a cast alone.
        return jax.lax.reduce_precision(product, 8, 7).astype(jnp.bfloat16)

    truth = np.asarray(matrix.astype(float)) / 3
    operator = lx.FunctionLinearOperator(mv, structure, lx.symmetric_tag)
    trace, diagonal = tr.trace(jr.key(0), operator, n), tr.diagonal(jr.key(0), operator, n)
    error = abs(np.asarray(trace.value) - np.trace(truth))
    assert 0 < error < 4 * np.asarray(trace.std_err) < 0.1 * np.trace(truth)
    errors = np.abs(np.asarray(diagonal.value) - np.diag(truth))
    assert np.all(errors < 4 * np.asarray(diagonal.std_err))
    stored = tr.trace(jr.key(0), lx.MatrixLinearOperator(matrix), n)
    assert stored.std_err == 0


@pytest.mark.parametrize("n", [100, variant(1000)])
@pytest.mark.parametrize("k", [variant(16), 64])
@pytest.mark.parametrize("estimator", SKETCHING[:2])
def test_rounding_is_in_the_error_bar(estimator, k, n):
    """float32, a pair of eigenvalues +-1e3 and 0.01 I: all that is left is rounding."""
    pair = np.linalg.qr(np.random.default_rng(0).standard_normal((n, 2)))[0]
    dense = (pair * [1e3, -1e3]) @ pair.T + 0.01 * np.eye(n)
    matrix = jnp.asarray(dense, jnp.float32)
    truth = np.trace(np.asarray(matrix, np.float64))
    symmetric = lx.symmetric_tag
    solutions = reference.solutions(keys(100), matrix, k, estimator, symmetric)
    lower, upper = jax.vmap(lambda s: s.interval())(solutions)
    covered = (np.asarray(lower) <= truth) & (truth <= np.asarray(upper))
    # With a coverage of 95 %, 100 keys have a standard deviation of 2.2 %.
    assert covered.mean() >= 0.95 - 3 * 0.022
    error = np.sqrt(np.mean((np.asarray(solutions.value, np.float64) - truth) ** 2))
    assert np.median(solutions.std_err) < 20 * error  # and is not far larger


def test_a_standard_error_of_zero_is_exact():
    """What a sketch has captured still has rounding errors; n products have none but those of a
    sum, and products that are 0 none at all.
    """
    basis = np.linalg.qr(np.random.default_rng(1).standard_normal((60, 3)))[0]
    captured = jnp.asarray(basis @ basis.T)
    for estimator in SKETCHING:
        for matrix in (captured, jnp.zeros((60, 60))):
            operator = lx.MatrixLinearOperator(matrix, PSD)
            solution = tr.trace(jr.key(0), operator, 30, estimator)
            assert (solution.std_err == 0) == bool(jnp.all(matrix == 0))
            assert abs(solution.value - jnp.trace(matrix)) <= 3 * solution.std_err
            # Units of the rounding of algebra: 8 of products, up to 32 of eigenvalues.
            assert solution.std_err <= 48 * jnp.finfo(matrix.dtype).eps * jnp.linalg.norm(matrix)
            assert tr.trace(jr.key(0), operator, 60, estimator).std_err == 0


# -------------------------------------------------------------------------- bars of few products


FEW = (8, 12, 24, 60)


def uncovered(call, truth, k, n, count=1000):
    """The spectra on which 95 % intervals cover less than 92 %, over 1000 keys (other ones than the
    constants were measured with), entry by entry.
    """

    @jax.jit
    def ends(keys, matrix):
        def one(key):
            return call(key, lx.MatrixLinearOperator(matrix, PSD), k).interval()

        return jax.lax.map(one, keys, batch_size=50)

    found = {}
    for name, eigenvalues in eight_spectra(n).items():
        matrix = jnp.asarray(with_eigenvalues(eigenvalues))
        lower, upper = map(np.asarray, ends(keys(count, seed=11), matrix))
        expected = np.asarray(truth(matrix))
        found[name] = np.mean((lower <= expected) & (expected <= upper))
    return {name: share for name, share in found.items() if share < 0.92}


@pytest.mark.slow
@pytest.mark.parametrize("k", FEW)
@pytest.mark.parametrize("estimator", EVERY)
def test_intervals_of_traces_from_few_products(estimator, k):
    assert uncovered(partial(tr.trace, estimator=estimator), jnp.trace, k, 200) == {}


def _row_norms(matrix):
    return jnp.linalg.norm(matrix, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("k", [8, 16, 40])
@pytest.mark.parametrize(
    ("call", "truth"),
    [
        (tr.frobenius_norm, jnp.linalg.norm),
        (tr.row_norms, _row_norms),
        (partial(tr.diagonal, estimator=tr.HutchinsonDiagonalEstimator()), jnp.diagonal),
        (partial(tr.diagonal, estimator=tr.DiagPlusPlusEstimator()), jnp.diagonal),
        (partial(tr.diagonal, estimator=tr.XDiagEstimator()), jnp.diagonal),
        (partial(tr.diagonal, estimator=tr.XNysDiagEstimator()), jnp.diagonal),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_intervals_of_diagonals_and_norms_from_few_products(call, truth, k):
    assert uncovered(call, truth, k, 100, 300) == {}


def _log_det(matrix):
    return jnp.linalg.slogdet(matrix)[1]


def _of_eigenvalues(fn):
    return lambda matrix: jnp.sum(fn(jnp.linalg.eigvalsh(matrix)))


def _count(key, operator, k):
    return tr.eigenvalue_count(key, operator, 0.5, jnp.inf, k)


@pytest.mark.slow
@pytest.mark.parametrize("k", [8, 12, 24, 40])
@pytest.mark.parametrize(
    ("call", "truth"),
    [
        (partial(tr.logdet, fallback=None), _log_det),
        (
            lambda key, operator, k: tr.spectral_sum(key, jnp.sqrt, operator, k),
            _of_eigenvalues(lambda x: jnp.sqrt(jnp.maximum(x, 0))),
        ),
        (_count, _of_eigenvalues(lambda x: x >= 0.5)),
    ],
    ids=["logdet", "sqrt", "count"],
)
def test_intervals_of_functions_from_few_products(call, truth, k):
    assert uncovered(call, truth, k, 50) == {}


SIGNS = tr.RademacherSampler()


@pytest.mark.parametrize(
    ("call", "k"),
    [
        (tr.diagonal, 2),
        (partial(tr.diagonal, estimator=tr.XDiagEstimator()), 5),
        (partial(tr.trace, estimator=tr.XNysTraceEstimator(SIGNS)), 2),
        (partial(tr.trace, estimator=tr.XTraceEstimator(SIGNS)), 4),
        (tr.row_norms, 4),
    ],
)
def test_two_samples_that_agree_by_symmetry(call, k):
    """Two leave-one-out samples of a multiple of I are the same function of the two probes: that
    they agree says nothing, but holding out both does.
    """
    n = 12
    twice = lx.FunctionLinearOperator(lambda v: 2 * v, jax.ShapeDtypeStruct((n,), float), PSD)
    found = jax.vmap(lambda key: call(key, twice, k))(keys(200))
    truth = 2 * n if found.value.ndim == 1 else 2
    errors = np.abs(np.asarray(found.value) - truth)
    assert np.mean(errors > 1e-3) > 0.5
    assert np.all(errors <= 1.96 * np.asarray(found.std_err) + 1e-12)
    stated = np.sqrt(np.mean(np.square(found.std_err)))
    assert stated < 1.2 * np.sqrt(np.mean(np.square(errors)))


def test_a_probe_that_hardly_meets_the_only_eigenvalue_says_so():
    """I + v v^T, one probe: degrees of freedom of 1, and Student's quantile, 12.7."""
    eigenvalues = np.where(np.arange(50) < 1, 2.0, 1.0)
    operator = lx.MatrixLinearOperator(jnp.asarray(with_eigenvalues(eigenvalues)), PSD)
    solution = tr.spectral_sum(jr.key(0), jnp.log, operator, 20)
    np.testing.assert_allclose(solution.stats["dof"], 1, atol=0.5)
    lower, upper = solution.interval()
    np.testing.assert_allclose((upper - lower) / 2, 12.7 * solution.std_err, rtol=0.5)
    # All eigenvalues alike: as many degrees of freedom as there are.
    flat = lx.MatrixLinearOperator(jnp.asarray(with_eigenvalues(np.linspace(1, 3, 50))), PSD)
    assert tr.spectral_sum(jr.key(0), jnp.log, flat, 20).stats["dof"] > 10


def test_a_root_of_an_estimate_that_is_not_positive():
    """The error of the root of 0 +- s is of the size of sqrt(s), whatever the unit."""
    found = norms.root_error(jnp.asarray([0.0, 0.0, 3.0]), jnp.asarray([1e-4, 1e4, 0.6]))
    np.testing.assert_allclose(found, [1e-2, 1e2, 0.1])

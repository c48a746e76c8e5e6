"""The same numbers as the naive published formulas, on the same probes, and the weights with them.

A sampler that returns given probes is an operand: one program serves all rows of a table.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._estimators.estimator import RowsEstimator
from traceax._estimators.rows import Rows
from traceax._operators.block_operator import BlockOperator
from traceax._sketch.leave_one_out import mean_of_others
from traceax._sketch.nystrom import nystrom, xnystrace_parts

from .. import reference
from ..helpers import NSD, PSD, with_spectrum

pytestmark = pytest.mark.slow(quick=True)

N = 18
# (A - A_i) cancels to about 1e-3 |A| and d_i, a square, to 1e-6: some 1e4 roundings at most.
RTOL = 1e-10


def sphere_probes(m, dtype, seed=0):
    omega = np.random.default_rng(seed).standard_normal((2, N, m))
    omega = omega[0] + 1j * omega[1] if np.issubdtype(dtype, np.complexfloating) else omega[0]
    return (np.sqrt(N) * omega / np.linalg.norm(omega, axis=0)).astype(dtype)


def general(dtype, seed=0):
    """A matrix that is neither Hermitian nor normal, with a trace that is not small."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((N, N)) + np.eye(N)
    if np.issubdtype(dtype, np.complexfloating):
        matrix = matrix + 1j * rng.standard_normal((N, N)) + 0.5j * np.eye(N)
    return matrix.astype(dtype)


def hermitian(dtype):
    matrix = general(dtype)
    return (matrix + matrix.conj().T) / 2


def semidefinite(dtype):
    return with_spectrum(np.random.default_rng(0), 0.7 ** np.arange(N), dtype)


def with_tail(width, rank, dtype):
    """A few large eigenvalues over a tail that is more or less flat."""
    tail = 0.1 + width * np.linspace(0, 1, N) ** 2
    large = np.concatenate([2.0 + np.arange(rank), np.zeros(N - rank)])
    return with_spectrum(np.random.default_rng(1), large + tail, dtype)


@eqx.filter_jit
def computed(matrix, unrelated, estimator, k, tags):
    """The value, its error, and the weights contracted with A, with I and with an unrelated D."""
    with jax.numpy_dtype_promotion("standard"):  # as the primitive does it
        operator = lx.MatrixLinearOperator(matrix, tags)
        estimate, weights = estimator.compute(jr.key(0), operator, k, True)
        others = matrix, jnp.eye(len(matrix), dtype=matrix.dtype), unrelated
        blocks = [BlockOperator(lx.MatrixLinearOperator(other, tags)) for other in others]
        contracted = [weights.contract(block) for block in blocks]
        return estimate, contracted


def estimated(matrix, estimator, k, *blocks, diagonal=False, improved=None, tags=()):
    """The same, as NumPy arrays, with these probes."""
    options = {} if estimator is tr.HutchinsonEstimator else {"improved": improved}
    made = estimator(reference.GivenProbes(tuple(map(jnp.asarray, blocks))), **options)
    made = RowsEstimator(made, Rows()) if diagonal else made
    unrelated = jnp.asarray(general(matrix.dtype, seed=5))
    estimate, contracted = computed(jnp.asarray(matrix), unrelated, made, k, tags)
    return estimate.value, estimate.std_err, *map(np.asarray, contracted)


def assert_same(found, expected, size, rtol=RTOL):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol * 100, atol=rtol * size)


FIELDS = [np.float64, np.complex128]
both = pytest.mark.parametrize(("improved", "dtype"), [(True, FIELDS[1]), (False, FIELDS[0])])
MATRICES = {"general": general, "hermitian": hermitian, "semidefinite": semidefinite}


# ------------------------------------------------------------------------------------- traces


def naive_hutchinson(matrix, improved, omega):
    samples = reference.hutchinson(matrix, omega)
    return samples.mean(), samples.std(ddof=1) / np.sqrt(len(samples))  # complex: E|t - mean t|^2


def naive_hutchpp(matrix, improved, *blocks):
    return reference.hutchpp_estimate(matrix, *blocks, improved)


def naive_xtrace(matrix, improved, omega):
    return reference.leave_one_out(reference.xtrace_sample, matrix, omega, improved)[:2]


@both
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize(
    ("estimator", "k", "sizes", "naive"),
    [
        (tr.HutchinsonEstimator, 7, (7,), naive_hutchinson),
        # 4 products for the sketch, 4 for its basis, and 6 probes: none is wasted.
        (tr.HutchPlusPlusEstimator, 14, (4, 6), naive_hutchpp),
        (tr.XTraceEstimator, 12, (6,), naive_xtrace),
    ],
)
def test_traces(estimator, k, sizes, naive, kind, improved, dtype):
    matrix = MATRICES[kind](dtype)
    blocks = [sphere_probes(m, dtype, seed) for seed, m in enumerate(sizes)]
    found = estimated(matrix, estimator, k, *blocks, improved=improved)
    value, std_err, of_a, of_i, _ = found
    assert_same((value, std_err), naive(matrix, improved, *blocks), np.linalg.norm(matrix))
    assert_same([of_a], [value], np.linalg.norm(matrix), 1e-13)
    if improved:
        assert_same([of_i], [N], N, 1e-13)


TAILS = {f"{width}-{rank}": (width, rank) for width in (0.01, 0.1) for rank in (1, 4)}


@both
@pytest.mark.parametrize("kind", ["decaying", *TAILS])
def test_xnystrace(kind, improved, dtype):
    """Of +A and of -A. From a tail that is nearly flat, a complex shift is taken off."""
    matrix = with_tail(*TAILS[kind], dtype) if kind in TAILS else semidefinite(dtype)
    omega = sphere_probes(8, dtype, seed=6)
    given = tr.XNysTraceEstimator, 8, omega
    value, std_err, of_a, of_i, _ = estimated(matrix, *given, improved=improved, tags=PSD)
    shift, *expected, customary = reference.with_best_shifts(matrix, omega, improved)
    if kind in TAILS:
        assert np.all(shift.real > 0.08)
        assert np.all(shift.imag < -1e-4)
    else:
        assert np.all(shift == 0)
        assert std_err > 1.01 * customary  # the covariance is positive: a test of it is one
    size = np.linalg.norm(matrix)
    assert_same((value, std_err), expected, size)
    if kind == "decaying":  # the weights are those of XTrace, from the same sketch
        assert_same([of_a], [naive_xtrace(matrix, improved, omega)[0]], size, 1e-9)
    if improved:
        assert_same([of_i], [N], N, 1e-13)
        negative = estimated(-matrix, *given, improved=improved, tags=NSD)
        assert_same(negative[:3], (-value, std_err, -of_a), size)


@pytest.mark.parametrize("dtype", FIELDS)
@pytest.mark.parametrize("z", [0, 0.05, 0.1 - 0.05j])
def test_variance_of_a_test(z, dtype):
    """From the other probes, with a complex shift as well."""
    matrix, omega = with_tail(0.1, 4, dtype), sphere_probes(6, dtype)

    @jax.jit
    def variances(p, r, products):
        factors = nystrom(p, r, products, np.finfo(float).eps)
        scale = factors.products.scale
        parts = xnystrace_parts(factors, factors.shifted(z / scale + factors.nu + 0j))
        return scale**2 * mean_of_others(parts.energy, parts.valid)

    with jax.numpy_dtype_promotion("standard"):
        p, r = np.linalg.qr(omega)
        found = variances(p, r, matrix @ p)
    expected = [reference.variance_of_test(matrix, omega, i, z) for i in range(6)]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_float32():
    matrix, omega = semidefinite(np.float32), sphere_probes(6, np.float32)
    wide = matrix.astype(float), omega.astype(float)
    found = estimated(matrix, tr.XTraceEstimator, 12, omega, improved=True)
    assert_same(found[:2], naive_xtrace(wide[0], True, wide[1]), 1, 1e-4)
    assert {x.dtype for x in found} == {np.dtype(np.float32)}
    found = estimated(matrix, tr.XNysTraceEstimator, 6, omega, improved=True, tags=PSD)
    assert_same(found[:2], reference.with_best_shifts(*wide, True)[1:3], 1, 1e-4)
    assert {x.dtype for x in found} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("estimator", "m", "k", "dtype"),
    [
        (tr.XTraceEstimator, 2, 4, np.complex128),
        (tr.XTraceEstimator, 8, 17, np.complex128),
        (tr.XNysTraceEstimator, 2, 2, np.complex128),
        (tr.XNysTraceEstimator, 17, 17, np.float64),
    ],
)
def test_fewest_and_most_probes(estimator, m, k, dtype):
    """Two probes, of which holding out both leaves none; and as many as there can be (n = 18)."""
    matrix, omega = semidefinite(dtype), sphere_probes(m, dtype)
    found = estimated(matrix, estimator, k, omega, improved=True, tags=PSD)
    expected = naive_xtrace(matrix, True, omega)
    if estimator is tr.XNysTraceEstimator:
        expected = reference.with_best_shifts(matrix, omega, True)[1:3]
    assert_same(found[:2], expected, np.linalg.norm(matrix))


# ----------------------------------------------------------------------------------- diagonals


def signs(m, dtype, seed=0):
    rng = np.random.default_rng(seed)
    phases = rng.integers(4, size=(N, m))
    unit = 1j if np.issubdtype(dtype, np.complexfloating) else -1.0
    return (unit**phases).astype(dtype)


@pytest.mark.parametrize("dtype", FIELDS)
def test_diagonals(dtype):
    """Of Hutchinson, Diag++ and XDiag; every entry is the contraction of its weights with A."""
    for kind in MATRICES:
        matrix = MATRICES[kind](dtype)
        size = np.linalg.norm(matrix)
        omega, few, fresh = signs(7, dtype), signs(4, dtype), signs(6, dtype, 1)
        samples = omega.conj() * (matrix @ omega)
        plain = samples.mean(axis=1), samples.std(axis=1, ddof=1) / np.sqrt(7)
        diagpp = reference.diagpp_estimate(matrix, few, fresh)
        xdiag = reference.leave_one_out_diagonal(reference.range_rest, matrix, fresh)
        for estimator, k, blocks, expected in (
            (tr.HutchinsonEstimator, 7, [omega], plain),
            (tr.HutchPlusPlusEstimator, 14, [few, fresh], diagpp),
            (tr.XTraceEstimator, 12, [fresh], xdiag),
        ):
            found = estimated(matrix, estimator, k, *blocks, diagonal=True)
            assert_same(found[:2], expected, size)
            assert_same([found[2]], [found[0]], size, 1e-13)
            if estimator is tr.HutchinsonEstimator:
                np.testing.assert_allclose(found[3], np.ones(N), rtol=1e-13)


@pytest.mark.parametrize("dtype", FIELDS)
@pytest.mark.parametrize("kind", ["decaying", "0.01-1"])
def test_diagonal_of_xnystrace(kind, dtype):
    """With the real shift for the trace; the weights are XDiag's, from the same sketch."""
    matrix = with_tail(*TAILS[kind], dtype) if kind in TAILS else semidefinite(dtype)
    omega = signs(8, dtype)
    given = tr.XNysTraceEstimator, 8, omega
    value, std_err, of_a, *_ = estimated(matrix, *given, diagonal=True, tags=PSD)
    (shift, *_), *_ = reference.with_best_shifts(matrix, omega, False, real=True)
    assert (shift > 0.05) == (kind in TAILS)
    naive, error = reference.leave_one_out_diagonal(
        reference.nystrom_rest, matrix - shift * np.eye(N), omega
    )
    size = np.linalg.norm(matrix)
    assert_same((value, std_err), (naive + shift, error), size, 1e-9)
    xdiag, _ = reference.leave_one_out_diagonal(reference.range_rest, matrix, omega)
    assert_same([of_a], [xdiag], size, 1e-9)


def test_who_renormalises():
    """By default wherever it is unbiased: real probes of a complex operator are not invariant."""
    real, complex_ = np.dtype(float), np.dtype(complex)
    for sampler, in_real, in_complex in (
        (tr.SphereSampler(), True, True),
        (tr.NormalSampler(), True, True),
        (tr.SphereSampler(dtype=np.float64), True, False),
        (tr.RademacherSampler(), False, False),
    ):
        assert sampler.respheres(None, real) == in_real
        assert sampler.respheres(None, complex_) == in_complex
        assert not sampler.respheres(False, real)

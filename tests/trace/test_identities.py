"""Step 1 of the ladder: the same numbers as the naive published formulas on the same probes."""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from .. import reference
from ..helpers import PSD, keys, variant, with_spectrum

N = 18
KEY = jr.key(7)
# (A - A_i) cancels to about 1e-3 |A| and d_i, a square, to 1e-6: some 1e4 roundings at most.
RTOL = 1e-10

REAL = {
    "sphere": (tr.SphereSampler(), None),
    "sphere-plain": (tr.SphereSampler(), False),
    "normal": (tr.NormalSampler(), True),
    "normal-plain": (tr.NormalSampler(), False),
    "rademacher": (tr.RademacherSampler(), None),
}
# Real probes of a complex operator are not invariant under its rotations: no resphering.
COMPLEX = {
    **REAL,
    "steinhaus": (tr.SteinhausSampler(), None),
    "real-sphere": (tr.SphereSampler(dtype=np.float64), None),
}


def general(dtype, seed=0):
    """A matrix that is neither Hermitian nor normal, with a trace that is not small."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((N, N)) + np.eye(N)
    if np.issubdtype(dtype, np.complexfloating):
        matrix = matrix + 1j * rng.standard_normal((N, N)) + 0.5j * np.eye(N)
    return matrix.astype(dtype)


def hermitian(dtype, seed=0):
    matrix = general(dtype, seed)
    return (matrix + matrix.conj().T) / 2


def semidefinite(dtype, seed=0):
    return with_spectrum(np.random.default_rng(seed), 0.7 ** np.arange(N), dtype)


MATRICES = {
    "nonsymmetric": general(np.float64),
    "hermitian": hermitian(np.complex128),
    "nonhermitian": general(np.complex128),
}
SEMIDEFINITE = {"real": semidefinite(np.float64), "complex": semidefinite(np.complex128)}


# Resphered and not (as told to, and as the probes demand it) in every field: the rest are variants.
QUICK = {
    np.dtype(np.float64): ("normal", "rademacher"),
    np.dtype(np.complex128): ("sphere", "normal-plain"),
}


def table(matrices, skip="none"):
    """Every matrix with every sampler that its field admits, except the `skip` ones. (Of what is
    true for all matrices one special case is enough.)
    """

    def marks(name, kind):
        quick = name != "hermitian" and kind in QUICK[matrices[name].dtype]
        return [] if quick else [pytest.mark.variant]

    return [
        pytest.param(matrix, sampler, improved, id=f"{name}-{kind}", marks=marks(name, kind))
        for name, matrix in matrices.items()
        for kind, (sampler, improved) in (COMPLEX if np.iscomplexobj(matrix) else REAL).items()
        if not kind.endswith(skip) and (name != "hermitian" or kind == "sphere")
    ]


def probes(key, sampler, m, dtype):
    return np.asarray(sampler.probes(key, N, m, np.dtype(dtype)))


def respheres(sampler, improved, matrix):
    """Whether the definition asks for resphering, spelled out independently of the package."""
    invariant = isinstance(sampler, tr.SphereSampler | tr.NormalSampler)
    # (`is None`, because NumPy holds that np.dtype("float64") == None.)
    return improved is not False and invariant and sampler.dtype is None


def assert_same(solution, value, std_err, scale):
    np.testing.assert_allclose(complex(solution.value), value, rtol=0, atol=RTOL * scale)
    np.testing.assert_allclose(float(solution.std_err), std_err, rtol=1e-8)


def solve(matrix, k, estimator, tags=()):
    return tr.trace(KEY, lx.MatrixLinearOperator(jnp.asarray(matrix), tags), k, estimator)


@pytest.mark.parametrize(("matrix", "sampler", "improved"), table(MATRICES, skip="plain"))
def test_hutchinson(matrix, sampler, improved):
    del improved  # there is nothing to resphere
    solution = solve(matrix, 7, tr.HutchinsonEstimator(sampler))
    samples = reference.hutchinson(matrix, probes(KEY, sampler, 7, matrix.dtype))
    std_err = samples.std(ddof=1) / np.sqrt(7)  # of complex numbers: E|t - mean t|^2
    assert_same(solution, samples.mean(), std_err, np.linalg.norm(matrix))


def check_hutchpp(matrix, sampler, improved, k):
    solution = solve(matrix, k, tr.HutchPlusPlusEstimator(sampler, improved))
    sketch_key, probe_key = jr.split(KEY)
    value, std_err = reference.hutchpp_estimate(
        matrix,
        probes(sketch_key, sampler, 4, matrix.dtype),
        probes(probe_key, sampler, k - 8, matrix.dtype),
        respheres(sampler, improved, matrix),
    )
    assert int(solution.num_matvecs) == k
    assert_same(solution, value, std_err, np.linalg.norm(matrix))


@pytest.mark.parametrize(("matrix", "sampler", "improved"), table(MATRICES))
def test_hutchpp(matrix, sampler, improved):
    check_hutchpp(matrix, sampler, improved, 12)


@pytest.mark.parametrize("k", [variant(13), 14])  # 4 + 4 + (5 or 6 probes): no matvec is wasted
def test_hutchpp_with_a_remainder(k):
    check_hutchpp(MATRICES["nonhermitian"], tr.SphereSampler(), None, k)


@pytest.mark.parametrize(("matrix", "sampler", "improved"), table(MATRICES))
def test_xtrace(matrix, sampler, improved):
    m = 6
    solution = solve(matrix, 2 * m, tr.XTraceEstimator(sampler, improved))
    value, std_err, customary = reference.leave_one_out(
        reference.xtrace_sample,
        matrix,
        probes(KEY, sampler, m, matrix.dtype),
        respheres(sampler, improved, matrix),
    )
    assert_same(solution, value, std_err, np.linalg.norm(matrix))
    assert std_err >= customary


@pytest.mark.parametrize(("matrix", "sampler", "improved"), table(SEMIDEFINITE))
def test_xnystrace(matrix, sampler, improved):
    m = 6
    solution = solve(matrix, m, tr.XNysTraceEstimator(sampler, improved), PSD)
    _, value, std_err, customary = reference.shift_of_best_error(
        matrix, probes(KEY, sampler, m, matrix.dtype), respheres(sampler, improved, matrix)
    )
    assert_same(solution, value, std_err, np.linalg.norm(matrix))
    # Here the covariance is positive, so a test of it is one.
    assert std_err > 1.01 * customary


XTRACE = tr.XTraceEstimator(), partial(reference.leave_one_out, reference.xtrace_sample)
XNYSTRACE = (
    tr.XNysTraceEstimator(),
    lambda *args: reference.shift_of_best_error(*args)[1:],
)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("rank", [1, variant(4)])
@pytest.mark.parametrize(("width", "improved"), [(0.01, True), (0.1, True), (0.1, False)])
def test_a_shift_of_xnystrace(width, improved, rank, dtype):
    """A few large eigenvalues over a tail that is more or less flat: a part of the tail is taken
    off, of -A as well. The shift is complex in all of these cases.
    """
    tail = 0.1 + width * np.linspace(0, 1, N) ** 2
    large = np.concatenate([2.0 + np.arange(rank), np.zeros(N - rank)])
    matrix = with_spectrum(np.random.default_rng(1), large + tail, dtype)
    omega = probes(KEY, tr.SphereSampler(), 8, dtype)
    shift, value, std_err, _ = reference.shift_of_best_error(matrix, omega, improved)
    estimator = tr.XNysTraceEstimator(improved=improved)
    assert shift.real > 0.08
    assert shift.imag < -1e-4
    assert_same(solve(matrix, 8, estimator, PSD), value, std_err, 1)
    negative = solve(-matrix, 8, estimator, lx.negative_semidefinite_tag)
    assert_same(negative, -value, std_err, 1)


@pytest.mark.parametrize(
    ("estimator", "sample", "m", "k", "name"),
    [
        variant(*XTRACE, 2, 4, "real"),
        variant(*XTRACE, 2, 4, "complex"),
        variant(*XTRACE, 8, 17, "real"),
        (*XTRACE, 8, 17, "complex"),
        variant(*XNYSTRACE, 2, 2, "real"),
        variant(*XNYSTRACE, 2, 2, "complex"),
        (*XNYSTRACE, 17, 17, "real"),
        variant(*XNYSTRACE, 17, 17, "complex"),
    ],
)
def test_fewest_and_most_probes(estimator, sample, m, k, name):
    """Two probes, of which holding out both leaves none; and as many as there can be (n = 18)."""
    matrix = SEMIDEFINITE[name]
    solution = solve(matrix, k, estimator, PSD)
    omega = probes(KEY, tr.SphereSampler(), m, matrix.dtype)
    value, std_err, _ = sample(matrix, omega, True)
    assert_same(solution, value, std_err, np.linalg.norm(matrix))


WEIGHTED = {
    "hutchinson": (tr.HutchinsonEstimator(), 8),
    "hutchinson-batched": (tr.HutchinsonEstimator(batch_size=3), 8),
    "hutch++": (tr.HutchPlusPlusEstimator(), 10),
    "hutch++-plain": (tr.HutchPlusPlusEstimator(improved=False), 10),
    "xtrace": (tr.XTraceEstimator(), 10),
    "xtrace-plain": (tr.XTraceEstimator(improved=False), 10),
    "xtrace-rademacher": (tr.XTraceEstimator(tr.RademacherSampler()), 10),
    "xnystrace": (tr.XNysTraceEstimator(), 8),
    "xnystrace-plain": (tr.XNysTraceEstimator(improved=False), 8),
    "xnystrace-rademacher": (tr.XNysTraceEstimator(tr.RademacherSampler()), 8),
}
# XNysTrace's weights are XTrace's, of the same sketch: not what its value is a contraction with.
CONTRACTED = [name for name in WEIGHTED if not name.startswith("xnystrace")]


@partial(jax.jit, static_argnums=(3, 4))
def contractions(keys, matrix, unrelated, estimator, k):
    """For each key the value, <G, A> and <G, dA>."""
    operator = lx.MatrixLinearOperator(matrix, PSD)
    other = lx.MatrixLinearOperator(unrelated)

    def one(key):
        # As the primitive does it: the algebra mixes real and complex.
        with jax.numpy_dtype_promotion("standard"):
            estimate, weights = estimator.compute(key, operator, k)
            return estimate.value, weights.contract(operator), weights.contract(other)

    return jax.lax.map(one, keys)  # not vmap: see `reference.each`


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        if name in ("hutchinson", "hutch++", "xtrace", "xtrace-plain") and kind == "nonhermitian"
        else variant(name, kind)
        for name in CONTRACTED
        for kind in MATRICES
    ],
)
def test_value_is_a_contraction(name, kind):
    matrix = MATRICES[kind]
    value, contracted, _ = contractions(keys(5), jnp.asarray(matrix), matrix, *WEIGHTED[name])
    # All terms are of the size of |A|_F and few: some roundings of a few |A|_F each.
    np.testing.assert_allclose(value, contracted, rtol=0, atol=1e-13 * np.linalg.norm(matrix))


@pytest.mark.slow
@pytest.mark.parametrize("field", SEMIDEFINITE)
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_average_to_the_identity(name, field):
    """E<G, dA> = tr(dA) for a dA that has nothing to do with A."""
    count = 4000
    matrix = SEMIDEFINITE[field]
    unrelated = general(matrix.dtype, seed=5)
    _, _, samples = contractions(keys(count, 1), jnp.asarray(matrix), unrelated, *WEIGHTED[name])
    error = np.asarray(samples) - np.trace(unrelated)
    # z-tests of the real and the imaginary part: |z| > 4 has probability 6e-5 under the
    # hypothesis, so all 30 of them together reject it wrongly with probability 0.002.
    for part in [error.real, error.imag] if np.iscomplexobj(error) else [error]:
        standard = part.std(ddof=1) / np.sqrt(count)
        # The power of it: the trace is about 18, a lost factor (n - m) / (n - m + 1) is 8 %.
        assert standard < 0.01 * abs(np.trace(unrelated))
        assert abs(part.mean()) < 4 * standard

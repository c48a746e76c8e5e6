"""Diagonals, block traces and norms: identities, recovery, bias, error bars, derivatives."""

import itertools

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tr

from .. import reference
from ..helpers import PSD, keys, operator_for, spectra, variant, with_spectrum

ESTIMATORS = {
    "hutchinson": tr.HutchinsonDiagonalEstimator(),
    "hutchinson-batched": tr.HutchinsonDiagonalEstimator(batch_size=7),
    "diag++": tr.DiagPlusPlusEstimator(),
    "xdiag": tr.XDiagEstimator(),
    "xnysdiag": tr.XNysDiagEstimator(),
    "auto": tr.AutoDiagonalEstimator(),
}
N, K = 40, 16


def general(complex_=False, n=N):
    rng = np.random.default_rng(3)
    matrix = rng.standard_normal((n, n)) * 0.9 ** np.arange(n)
    return matrix + 1j * rng.standard_normal((n, n)) if complex_ else matrix


def semidefinite(complex_=False):
    dtype = np.complex128 if complex_ else np.float64
    return with_spectrum(np.random.default_rng(4), 0.8 ** np.arange(N), dtype)


def solutions(matrix, tags, estimator, k=K, count=400):
    operator = operator_for(estimator, matrix, tags)
    return jax.jit(jax.vmap(lambda key: tr.diagonal(key, operator, k, estimator)))(keys(count))


# The identity: the fast algebra against the published formula, probe by probe held out.


def naive_xdiag(a, omega, held_out=()):
    m = omega.shape[1]
    samples = {}
    for i in range(m):
        if i in held_out[1:]:
            continue
        others = [j for j in range(m) if j != i and j not in held_out]
        q = np.linalg.qr(a @ omega[:, others])[0]
        rest = a @ omega[:, i] - q @ (q.conj().T @ (a @ omega[:, i]))
        samples[i] = np.diag(q @ (q.conj().T @ a)) + omega[:, i].conj() * rest
    return samples


def naive_xnysdiag(a, omega, held_out=()):
    m = omega.shape[1]
    samples = {}
    for i in range(m):
        others = [j for j in range(m) if j != i and j not in held_out]
        o = omega[:, others]
        y = a @ o
        approximation = y @ np.linalg.solve(o.conj().T @ y, y.conj().T)
        rest = a @ omega[:, i] - approximation @ omega[:, i]
        samples[i] = np.diag(approximation) + omega[:, i].conj() * rest
    return samples


def naive_error(naive, a, omega):
    """The root of s^2 / m + max(0, mean over pairs of Re D_ij conj(D_ji)), entry by entry."""
    m = omega.shape[1]
    t = naive(a, omega)
    without = {j: naive(a, omega, (-1, j)) for j in range(m)}
    samples = np.stack([t[i] for i in range(m)])
    variance = np.sum(np.abs(samples - samples.mean(0)) ** 2, axis=0) / (m - 1)
    pairs = [(i, j) for i in range(m) for j in range(m) if i != j]
    products = [(t[i] - without[j][i]) * np.conj(t[j] - without[i][j]) for i, j in pairs]
    covariance = np.mean(np.real(products), axis=0)
    return samples.mean(0), np.sqrt(variance / m + np.maximum(covariance, 0))


@pytest.mark.parametrize("complex_", [variant(False), True])
@pytest.mark.parametrize("name", ["xdiag", "xnysdiag", "xnysdiag-tail"])
def test_leave_one_out_algebra_equals_the_naive_formula(name, complex_):
    name, _, tail = name.partition("-")
    estimator = ESTIMATORS[name]
    a = semidefinite(complex_) if name == "xnysdiag" else general(complex_)
    if tail:
        a = a @ a @ a + 0.1 * np.eye(N)
    k, m = (12, 12) if name == "xnysdiag" else (12, 6)
    key = jax.random.key(5)
    operator = lx.MatrixLinearOperator(jnp.asarray(a), PSD if name == "xnysdiag" else ())
    omega = np.asarray(estimator.sampler.probes(key, N, m, a.dtype))
    if name == "xnysdiag":
        # The shift for the trace.
        shift, *_ = reference.shift_of_best_error(a, omega, False, real=True)
        value, error = naive_error(naive_xnysdiag, a - shift * np.eye(N), omega)
        value = value + shift
    else:
        value, error = naive_error(naive_xdiag, a, omega)
    solution = tr.diagonal(key, operator, k, estimator)
    np.testing.assert_allclose(solution.value, value, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(solution.std_err, error, rtol=1e-6, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("complex_", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_unbiased_with_calibrated_errors(name, complex_):
    tagged = name in ("xnysdiag", "auto")
    matrix = semidefinite(complex_) if tagged else general(complex_)
    solution = solutions(matrix, PSD if tagged else (), ESTIMATORS[name])
    errors = np.asarray(solution.value) - np.diag(matrix)
    z = np.abs(errors.mean(0)) / (errors.std(0, ddof=1) / np.sqrt(len(errors)))
    # The largest of 40 |z| stays below 4.3 with probability 99.9 % (real or complex).
    assert z.max() < 4.3
    ratio = np.mean(np.abs(errors) ** 2) / np.mean(np.asarray(solution.std_err) ** 2)
    assert 0.8 < ratio < 1.25


def test_projecting_on_both_sides_would_be_biased():
    # What the published Diag++ drops; the z-test above would see it.
    a, key = general(), jax.random.key(0)
    omega = np.asarray(tr.RademacherSampler()(key, N, K // 3))
    q = np.linalg.qr(a @ omega)[0]
    p = q @ q.T
    dropped = np.diag(a - p @ a @ p - (np.eye(N) - p) @ a @ (np.eye(N) - p))
    assert np.linalg.norm(dropped) > 0.05 * np.linalg.norm(np.diag(a))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spectrum", "figures"),
    [
        ("poly", {"hutchinson": 1.5, "diag++": 1.6e-2, "xdiag": 7.9e-3, "xnysdiag": 3.5e-3}),
        ("exp0.7", {"hutchinson": 1.1, "diag++": 8e-5, "xdiag": 3e-7, "xnysdiag": 3e-13}),
    ],
)
def test_accuracy_reaches_the_prototype(spectrum, figures):
    n = 1000
    matrix = with_spectrum(np.random.default_rng(0), spectra(n)[spectrum])
    truth = np.diag(matrix)
    for name, figure in figures.items():
        solution = solutions(matrix, PSD, ESTIMATORS[name], k=100, count=10)
        errors = np.linalg.norm(np.asarray(solution.value) - truth, axis=1)
        assert np.median(errors) / np.linalg.norm(truth) < 1.3 * figure, name


RECOVERED = [("diag++", np.complex64), ("xdiag", np.float32), ("xnysdiag", np.complex64)]


@pytest.mark.parametrize(
    ("name", "dtype", "scale"),
    [
        (name, dtype, scale) if (name, dtype) in RECOVERED else variant(name, dtype, scale)
        for dtype, scale in ((np.float32, 1e20), (np.complex64, 1e-20), (np.complex128, 1.0))
        for name in ("diag++", "xdiag", "xnysdiag")
    ],
)
def test_low_rank_is_exact_at_any_scale(name, dtype, scale):
    rng = np.random.default_rng(0)
    factor = rng.standard_normal((N, 3)).astype(dtype) * dtype(np.sqrt(scale))
    matrix = factor @ factor.conj().T
    eps = np.finfo(dtype).eps
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), PSD)
    solution = tr.diagonal(jax.random.key(1), operator, 24, ESTIMATORS[name])
    error = np.abs(np.asarray(solution.value) - np.diag(matrix)).max()
    assert error < 100 * eps * np.abs(matrix).max()
    assert solution.value.dtype == dtype
    assert solution.result == tr.RESULTS.successful


@pytest.mark.parametrize("name", ESTIMATORS)
def test_zero_nan_and_whole_budget(name):
    def solve(matrix, k):
        return tr.diagonal(
            jax.random.key(0),
            lx.MatrixLinearOperator(jnp.asarray(matrix), PSD),
            k,
            ESTIMATORS[name],
        )

    zero = solve(np.zeros((N, N)), K)
    assert not np.any(zero.value)
    matrix = semidefinite()
    np.testing.assert_allclose(solve(matrix, N).value, np.diag(matrix), rtol=1e-14)
    matrix[2, 3] = np.nan
    failed = solve(matrix, K)
    assert failed.result == tr.RESULTS.nonfinite_operator
    assert np.all(np.isnan(failed.value))


def test_wrong_tag_is_said():
    operator = lx.MatrixLinearOperator(-jnp.asarray(semidefinite()), PSD)
    solution = tr.diagonal(jax.random.key(0), operator, K, tr.XNysDiagEstimator())
    assert solution.result == tr.RESULTS.not_semidefinite
    untagged = lx.MatrixLinearOperator(jnp.eye(9))
    with pytest.raises(ValueError, match="XNysDiagEstimator needs a semidefinite operator"):
        tr.diagonal(jax.random.key(0), untagged, 4, tr.XNysDiagEstimator())
    with pytest.raises(TypeError, match="AbstractDiagonalEstimator"):
        tr.diagonal(jax.random.key(0), operator, K, tr.XTraceEstimator())  # pyright: ignore


# (Batches of it have a test of their own, and `auto` runs XNysDiag.)
@pytest.mark.parametrize(
    "name", [variant(n) if n in ("hutchinson-batched", "auto") else n for n in ESTIMATORS]
)
def test_derivatives(name):
    """d diag(A) is unbiased, forward equals reverse, and the Jacobian averages to the identity."""
    base = jnp.asarray(semidefinite())
    direction = jnp.asarray(with_spectrum(np.random.default_rng(9), np.linspace(-1, 1, N)))

    def value(theta, key):
        operator = operator_for(ESTIMATORS[name], base + theta * direction, PSD)
        return tr.diagonal(key, operator, K, ESTIMATORS[name]).value

    @jax.jit
    def both(keys):
        forward = jax.vmap(lambda key: jax.jvp(lambda t: value(t, key), (0.0,), (1.0,))[1])(keys)
        reverse = jax.vmap(lambda key: jax.jacrev(value)(0.0, key))(keys)
        return forward, reverse

    forward, reverse = both(keys(300))
    np.testing.assert_allclose(forward, reverse, rtol=1e-9, atol=1e-12)
    errors = np.asarray(forward) - np.diag(direction)
    z = np.abs(errors.mean(0)) / (errors.std(0, ddof=1) / np.sqrt(len(errors)))
    assert z.max() < 4.3


def test_structure_is_split_off():
    kernel = lx.MatrixLinearOperator(jnp.asarray(semidefinite()), PSD)
    noise = lx.DiagonalLinearOperator(jnp.linspace(1.0, 2.0, N))
    key = jax.random.key(0)
    alone, both = (tr.diagonal(key, operator, K) for operator in (kernel, kernel + noise))
    np.testing.assert_allclose(both.value, alone.value + jnp.linspace(1.0, 2.0, N), rtol=1e-14)
    np.testing.assert_array_equal(both.std_err, alone.std_err)
    exact = tr.diagonal(key, 2.0 * noise, K)
    np.testing.assert_allclose(exact.value, np.linspace(2.0, 4.0, N))
    assert (int(exact.num_matvecs), float(exact.std_err.max())) == (0, 0.0)


# PyTrees: the diagonal in the parameters' structure, and one trace a leaf.

PARAMETERS = {"w": jnp.zeros((4, 5)), "b": (jnp.zeros(12), jnp.zeros((2, 4)))}
SIZES = [12, 8, 20]  # leaves in the order of the flattened tree: b[0], b[1], w


def tree_operator(matrix, tags=()):
    _, unravel = ravel_pytree(PARAMETERS)
    structure = jax.eval_shape(lambda: PARAMETERS)
    matrix = jnp.asarray(matrix)
    return lx.FunctionLinearOperator(
        lambda tree: unravel(matrix @ ravel_pytree(tree)[0]), structure, tags
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_block_traces(name):
    matrix = semidefinite()
    starts = np.cumsum([0, *SIZES])
    truth = [np.diag(matrix)[a:b].sum() for a, b in itertools.pairwise(starts)]
    operator = tree_operator(matrix, PSD)
    estimator = ESTIMATORS[name]

    @jax.jit
    def run(keys):
        traces = jax.vmap(lambda key: tr.block_traces(key, operator, K, estimator))(keys)
        diagonals = jax.vmap(lambda key: tr.diagonal(key, operator, K, estimator).value)(keys)
        return traces, diagonals

    traces, diagonals = run(keys(400))
    assert jax.tree.structure(traces.value) == jax.tree.structure(PARAMETERS)
    assert jax.tree.structure(traces.std_err) == jax.tree.structure(PARAMETERS)
    leaves = zip(
        jax.tree.leaves(traces.value),
        jax.tree.leaves(traces.std_err),
        jax.tree.leaves(diagonals),
        truth,
        strict=True,
    )
    for value, std_err, diagonal, true in leaves:
        # The same probes: block traces are the sums of the diagonal.
        np.testing.assert_allclose(value, diagonal.reshape(400, -1).sum(1), rtol=1e-9, atol=1e-11)
        errors = np.asarray(value) - true
        assert abs(errors.mean()) < 4 * errors.std(ddof=1) / 20
        # Variances over 400 keys: each side is known to about 10 %.
        assert 0.6 < np.mean(errors**2) / np.mean(np.asarray(std_err) ** 2) < 1.6


def test_diagonal_has_the_structure_of_the_parameters():
    matrix = semidefinite()
    solution = tr.diagonal(jax.random.key(0), tree_operator(matrix), N)
    shapes = jax.tree.map(jnp.shape, solution.value)
    assert shapes == jax.tree.map(jnp.shape, PARAMETERS)
    np.testing.assert_allclose(ravel_pytree(solution.value)[0], np.diag(matrix), rtol=1e-13)


def test_gradient_of_block_traces_selects_the_block():
    def block(matrix, key):
        return tr.block_traces(key, tree_operator(matrix), K).value["b"][1]

    gradients = jax.jit(jax.vmap(jax.grad(block), (None, 0)))(jnp.asarray(general()), keys(300))
    truth = np.diag(np.r_[np.zeros(12), np.ones(8), np.zeros(20)])
    mean, deviation = np.mean(gradients, axis=0), np.std(gradients, axis=0, ddof=1)
    # 1600 entries, each unbiased: |z| < 5 (1e-3 in all).
    assert np.max(np.abs(mean - truth) / (deviation / np.sqrt(300))) < 5


# Norms.


@pytest.mark.parametrize("complex_", [variant(False), True])
def test_norms(complex_):
    matrix = general(complex_)
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix))

    @jax.jit
    def run(keys):
        norm = jax.vmap(lambda key: tr.frobenius_norm(key, operator, 40))(keys)
        return norm, jax.vmap(lambda key: tr.row_norms(key, operator, 40))(keys)

    norm, rows = run(keys(300))
    assert int(norm.num_matvecs[0]) == 40
    for solution, truth in ((norm, np.linalg.norm(matrix)), (rows, np.linalg.norm(matrix, axis=1))):
        # The squares are unbiased.
        squares = np.asarray(solution.value) ** 2 - truth**2
        z = squares.mean(0) / (squares.std(0, ddof=1) / np.sqrt(300))
        assert np.max(np.abs(z)) < 4.3
        errors = np.asarray(solution.value) - truth
        assert 0.7 < np.mean(errors**2) / np.mean(np.asarray(solution.std_err) ** 2) < 1.4


@pytest.mark.parametrize("k", [10, variant(2 * N)])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (np.float32, [1e-30, 1e-25, 1e-19, 1e19, 1e30]),
        variant(np.complex128, [1e-240, 1e-200, 1e-150, 1e160, 1e240]),
    ],
)
@pytest.mark.parametrize("fn", [tr.frobenius_norm, variant(tr.row_norms)])
def test_norms_whose_squares_under_or_overflow(fn, dtype, scales, k):
    """They are those of a matrix of usual scale, times the scale: values, errors, derivatives."""
    matrix = jnp.asarray(general(np.issubdtype(dtype, np.complexfloating)).astype(dtype))
    real = jnp.finfo(dtype).dtype

    @jax.jit
    def solve(scale):
        def norm(c):
            operator = lx.MatrixLinearOperator((c * scale).astype(dtype) * matrix)
            solution = fn(jax.random.key(0), operator, k)
            return jnp.sum(solution.value), solution

        (_, solution), slope = jax.value_and_grad(norm, has_aux=True)(jnp.ones((), real))
        return solution, slope

    usual, slope = solve(np.asarray(1, real))
    eps = float(jnp.finfo(real).eps)
    for scale in scales:
        found, found_slope = solve(np.asarray(scale, real))
        assert found.result == tr.RESULTS.successful
        for x, expected in (
            (found.value, usual.value),
            (found.std_err, usual.std_err),
            (found_slope, slope),
        ):
            expected = np.asarray(expected, np.float64)
            wide = np.asarray(x, np.float64) / scale
            np.testing.assert_allclose(wide, expected, rtol=1e4 * eps, atol=1e3 * eps)


@pytest.mark.variant
@pytest.mark.parametrize("fn", [tr.frobenius_norm, tr.schatten_norm])
@pytest.mark.parametrize("scale", [3e-5, 1.0, 100.0])
def test_norms_in_half_precision(fn, scale):
    """The images are within the range of float16, and their squares are not."""
    matrix = jnp.asarray(general(False) * scale, jnp.float16)
    structure = jax.ShapeDtypeStruct((N,), jnp.float16)
    # A factor makes a product of single precision, which the second factor must not get.
    operator = 2.0 * lx.FunctionLinearOperator(lambda x: matrix @ x, structure)
    order = "nuc" if fn is tr.schatten_norm else None
    truth = np.linalg.norm(2 * np.asarray(matrix, np.float64), order)
    exact = fn(jax.random.key(0), operator, 2 * N)
    np.testing.assert_allclose(exact.value, truth, rtol=2e-2)
    found = fn(jax.random.key(0), operator, 30)
    assert abs(float(found.value) - truth) <= 5 * float(found.std_err)


def test_norm_of_nan_is_nan():
    operator = lx.MatrixLinearOperator(jnp.full((N, N), jnp.nan))
    for solution in (
        tr.frobenius_norm(jax.random.key(0), operator, 10),
        tr.row_norms(jax.random.key(0), operator, 10),
    ):
        assert solution.result == tr.RESULTS.nonfinite_operator
        assert np.all(np.isnan(solution.value))
        assert np.all(np.isnan(solution.std_err))


def test_norms_exact_and_zero():
    matrix = general()
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix))
    key = jax.random.key(0)
    exact = tr.frobenius_norm(key, operator, 2 * N)
    np.testing.assert_allclose(exact.value, np.linalg.norm(matrix), rtol=1e-13)
    assert exact.std_err == 0
    np.testing.assert_allclose(
        tr.row_norms(key, operator, 2 * N).value, np.linalg.norm(matrix, axis=1), rtol=1e-13
    )

    def norm(a):
        return tr.frobenius_norm(key, lx.MatrixLinearOperator(a), 2 * N).value

    gradient = jax.grad(norm)(jnp.asarray(matrix))
    np.testing.assert_allclose(gradient, matrix / np.linalg.norm(matrix), rtol=1e-9, atol=1e-12)
    zero = jnp.zeros((N, N))
    assert norm(zero) == 0
    np.testing.assert_array_equal(jax.grad(norm)(zero), zero)


@pytest.mark.parametrize(
    ("name", "k"), [("xdiag", 8), ("diag++", 12), ("inverse", 20), ("function", 12)]
)
def test_ties_of_few_signs_are_in_the_error(name, k):
    """An entry whose row has one large number off the diagonal: with p probes all signs agree with
    probability 2^(1 - p), and then the samples do not scatter, though their mean is far off.
    """
    order = np.random.default_rng(1).permutation(N)
    involution = np.zeros((N, N))
    involution[order, np.roll(order.reshape(-1, 2), 1, axis=1).ravel()] = 1
    matrix = jnp.asarray(1.5 * np.eye(N) + involution)
    operator = lx.FunctionLinearOperator(
        lambda v: matrix @ v, jax.ShapeDtypeStruct((N,), matrix.dtype), PSD
    )

    def estimate(key):
        if name == "inverse":
            return tr.inverse_diagonal(key, operator, k, fallback=None)
        if name == "function":
            return tr.spectral_diagonal(key, lambda x: jnp.exp(-x), operator, k)
        return tr.diagonal(key, operator, k, ESTIMATORS[name])

    functions = {"inverse": np.reciprocal, "function": lambda x: np.exp(-x)}
    eigenvalues, vectors = np.linalg.eigh(matrix)
    exact = np.sum(vectors**2 * functions.get(name, np.asarray)(eigenvalues), axis=1)

    @jax.jit
    @jax.vmap
    def run(key):
        solution = estimate(key)
        return solution.value, solution.std_err, solution.interval()

    value, std_err, (low, high) = jax.tree.map(np.asarray, run(keys(100)))
    wrong = np.abs(value - exact) > 0.05
    assert np.any(wrong)
    assert not np.any(wrong & (std_err < 1e-6))
    assert np.mean((low <= exact) & (exact <= high)) >= 0.92  # as promised for few products

"""Exact where it can be, and never broken: degenerate operators, scales, dtypes, NaN, wrong tags.

The operators of a table are stacked: one program for each estimator maps over them.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from ..helpers import NSD, PROBED, PSD, by_products, over_keys, random_unitary, with_spectrum

N, K = 40, 24
KEY = jr.key(0)
FUNCTIONS = {"trace": tr.trace, "diagonal": tr.diagonal}


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def mapped(what, estimator, k, tags, matrices):
    """The solution for each of the matrices, by products alone."""

    def solve(matrix):
        return FUNCTIONS[what](KEY, by_products(matrix, tags), k, estimator)

    return jax.lax.map(solve, matrices)


def solved(*arguments):
    """The same, as NumPy arrays."""
    return jax.device_get(mapped(*arguments))


def truths(what, matrices):
    wide = np.asarray(matrices, np.result_type(matrices.dtype, np.float64))
    diagonals = np.diagonal(wide, axis1=1, axis2=2)
    return diagonals if what == "diagonal" else diagonals.sum(axis=1)


def low_rank(rank, dtype, hermitian):
    rng = np.random.default_rng(rank)
    left, right = random_unitary(rng, N, dtype)[:, :rank], random_unitary(rng, N, dtype)[:, :rank]
    right = left if hermitian else left + 0.3 * right
    return (left * np.arange(1.0, rank + 1)) @ right.conj().T


@cache
def captured(dtype, hermitian):
    """Matrices of low rank, at scales whose squares are not representable in float32."""
    bases = [low_rank(rank, dtype, hermitian) for rank in (1, 3, 5)]
    bases += [np.ones((N, N)), np.diag(np.arange(N) < 6).astype(float)]
    scales = (1.0, 1e20, 1e-20, 1e30, 1e-30)
    return np.stack([0 * bases[0], *(s * base for base in bases for s in scales)]).astype(dtype)


@pytest.mark.parametrize("what", FUNCTIONS)
@pytest.mark.parametrize(
    ("name", "complex_for"),
    [("hutch++", "diagonal"), ("xtrace", "trace"), ("xnystrace", "diagonal")],
)
def test_low_rank_is_exact_at_every_scale(what, name, complex_for):
    """To 100 roundings of the norm; and 0 is exactly 0."""
    dtype = np.complex64 if what == complex_for else np.float32
    matrices = captured(dtype, hermitian=name == "xnystrace")
    solution = solved(what, PROBED[name], K, PSD if name == "xnystrace" else (), matrices)
    assert solution.value.dtype == (np.finfo(dtype).dtype if name == "xnystrace" else dtype)
    assert np.all(solution.result == tr.RESULTS.successful)
    value = np.asarray(solution.value, np.result_type(dtype, np.float64))
    std_err = np.asarray(solution.std_err, np.float64).reshape(len(matrices), -1)
    error = np.abs(value - truths(what, matrices)).reshape(len(matrices), -1)
    bound = 100 * np.finfo(dtype).eps * np.linalg.norm(matrices.astype(value.dtype), axis=(1, 2))
    assert np.all(error <= bound[:, None])
    assert np.all(std_err <= bound[:, None])
    assert np.all(error[0] == 0)
    assert np.all(std_err[0] == 0)
    assert np.all(std_err[1:].max(axis=1) > 0)  # what a sketch has captured has rounding errors


@cache
def troubled(dtype):
    """A matrix that is not captured at several scales, and copies of it with NaN and inf."""
    good = with_spectrum(np.random.default_rng(6), 0.8 ** np.arange(N), dtype)
    powers = 1.0, 2.0**66, 2.0**-66, 2.0**100, 2.0**-100
    scaled = [good.astype(np.float64) * power for power in powers]
    bad = [good.copy() for _ in range(6)]
    for i, number in enumerate((np.nan, np.inf, -np.inf)):
        bad[2 * i][3, 3] = number
        bad[2 * i + 1][2, 7] = bad[2 * i + 1][7, 2] = number
    return np.stack([*scaled, *bad]).astype(dtype), np.array(powers)


@pytest.mark.parametrize("what", FUNCTIONS)
@pytest.mark.parametrize("name", [*PROBED, "exact"])
def test_scales_and_numbers_that_are_not_finite(what, name):
    """A power of two changes no digit; NaN and inf end as NaN, and the result says why."""
    matrices, powers = troubled(np.float32)
    exact = name == "exact"
    given = (PROBED["xtrace"], N) if exact else (PROBED[name], 16)
    solution = solved(what, *given, PSD, matrices)
    count = len(powers)
    value = np.asarray(solution.value[:count], np.float64).reshape(count, -1) / powers[:, None]
    std_err = np.asarray(solution.std_err[:count], np.float64).reshape(count, -1) / powers[:, None]
    size = np.abs(value[0]).max()
    np.testing.assert_allclose(value, value[[0] * count], rtol=0, atol=1e-5 * size)
    np.testing.assert_allclose(std_err, std_err[[0] * count], rtol=1e-2, atol=1e-5 * size)
    failed = np.asarray(solution.result == tr.RESULTS.nonfinite_operator)
    np.testing.assert_array_equal(failed, np.arange(len(matrices)) >= count)
    lost = np.isnan(solution.value[count:])
    np.testing.assert_array_equal(np.isnan(solution.std_err[count:]), lost)
    if what == "trace":
        assert np.all(lost)
        return
    # The entries whose rows are finite stand.
    rows = [[3], [2, 7]] * 3
    np.testing.assert_array_equal(lost, [np.isin(np.arange(N), row) for row in rows])
    np.testing.assert_array_equal(solution.stats["nonfinite"], [0] * count + [*map(len, rows)])
    error = np.abs(np.asarray(solution.value[count:]) - np.diagonal(matrices[0]))
    assert np.all((error <= 6 * np.asarray(solution.std_err[count:]) + 1e-5 * size) | lost)


def test_the_leaf_that_holds_nan_is_named():
    """The traces of the other leaves stand, as if there were zeros in its place."""
    good = with_spectrum(np.random.default_rng(6), 0.8 ** np.arange(N), np.float64)
    good[:8, 8:] = good[8:, :8] = 0
    sizes = {"broken": 8, "a": 12, "b": N - 20}
    structure = {name: jax.ShapeDtypeStruct((size,), float) for name, size in sizes.items()}

    zeros, nans = good.copy(), good.copy()
    zeros[:8] = 0
    nans[:8, :8] = np.nan
    cases = ("xtrace", {"k": 16}), ("xnystrace", {"k": 16}), ("xtrace", {"rtol": 0.3})
    for kind, options in cases:

        @jax.jit
        def blocks(matrix, kind=kind, options=options):
            def product(v):
                y = matrix @ jnp.concatenate([v[name] for name in sizes])
                return dict(zip(sizes, jnp.split(y, [8, 20]), strict=True))

            tags = PSD if kind == "xnystrace" else ()
            operator = lx.FunctionLinearOperator(product, structure, tags)
            return tr.block_traces(KEY, operator, estimator=PROBED[kind], **options)

        expected, solution = jax.device_get((blocks(zeros), blocks(nans)))
        assert solution.result == tr.RESULTS.nonfinite_operator
        assert solution.stats["nonfinite"] == {"broken": 1, "a": 0, "b": 0}
        assert np.isnan([solution.value["broken"], solution.std_err["broken"]]).all()
        for name in ("a", "b"):
            within = 6 * solution.std_err[name]
            if "k" in options:  # XNysTrace falls back on Hutchinson's samples for one of them
                np.testing.assert_allclose(solution.value[name], expected.value[name], rtol=1e-9)
            assert abs(solution.value[name] - expected.value[name]) < within + 1e-9


def test_overflow_is_reported():
    """All products are finite in float32, and the trace is not; or in float16 the products."""
    structure = jax.ShapeDtypeStruct((40,), jnp.float32)
    operator = lx.FunctionLinearOperator(lambda v: jnp.float32(2.0**125) * v, structure, PSD)
    for name in ("xtrace", "xnystrace"):
        solution = tr.trace(KEY, operator, 12, PROBED[name])
        assert solution.result == tr.RESULTS.nonfinite_operator
        assert np.isnan([solution.value, solution.std_err]).all()
    half = by_products(jnp.full((40, 40), 3e4, jnp.float16))
    assert tr.trace(KEY, half, 16).result == tr.RESULTS.nonfinite_operator


@pytest.mark.parametrize("what", FUNCTIONS)
def test_wrong_tags(what):
    """Negative, indefinite, and right: the value of a wrong one is Hutchinson's mean."""
    decaying = with_spectrum(np.random.default_rng(6), 0.8 ** np.arange(N))
    indefinite = with_spectrum(np.random.default_rng(10), np.linspace(-1, 2, N))
    matrices = np.stack([decaying, -decaying, indefinite])
    solution = solved(what, tr.XNysTraceEstimator(), 16, PSD, matrices)
    wrong = np.asarray(solution.result == tr.RESULTS.not_semidefinite)
    np.testing.assert_array_equal(wrong, [False, True, True])
    error = np.abs(solution.value - truths(what, matrices))
    assert np.all(error <= 6 * solution.std_err)
    assert np.all(solution.std_err > 0)
    if what == "diagonal":
        return
    negative = solved(what, tr.XNysTraceEstimator(), 16, NSD, -matrices)
    np.testing.assert_array_equal(negative.value, -solution.value)
    np.testing.assert_array_equal(negative.std_err, solution.std_err)


@pytest.mark.parametrize(
    ("what", "name", "dtype"),
    [
        ("trace", "hutch++", jnp.bfloat16),
        ("trace", "xnystrace", jnp.bfloat16),
        ("diagonal", "xtrace", jnp.float16),
    ],
)
def test_half_precision(what, name, dtype):
    """Each of five matrices is within the error and the rounding. Everything is done in float32."""
    rng = np.random.default_rng(11)
    matrices = [with_spectrum(rng, np.linspace(1, 3, N)) for _ in range(5)]
    solution = solved(what, PROBED[name], 12, PSD, jnp.asarray(np.stack(matrices), dtype))
    assert solution.value.dtype == jnp.float32
    assert np.all(solution.result == tr.RESULTS.successful)
    truth = truths(what, np.asarray(jnp.asarray(np.stack(matrices), dtype).astype(float)))
    error = np.abs(np.asarray(solution.value, np.float64) - truth)
    rounding = 4 * float(jnp.finfo(dtype).eps) * np.abs(truth)
    assert np.all(error <= 6 * np.asarray(solution.std_err, np.float64) + rounding)
    assert np.mean(np.asarray(solution.std_err)) < np.mean(truth) / 3


def test_exact_values_of_half_precision_state_its_rounding():
    """Of products with unit vectors, whose images are rounded. Stored entries are what they are."""
    noise = np.random.default_rng(0).standard_normal((150, 150))
    matrix = jnp.asarray(np.eye(150) + 0.01 * (noise + noise.T), jnp.bfloat16)
    structure = jax.ShapeDtypeStruct((150,), jnp.bfloat16)

    def mv(v):
        product = matrix.astype(jnp.float32) @ v.astype(jnp.float32) / 3
        # XLA may leave out the rounding of a cast alone.
        return jax.lax.reduce_precision(product, 8, 7).astype(jnp.bfloat16)

    truth = np.asarray(matrix.astype(float)) / 3
    operator = lx.FunctionLinearOperator(mv, structure, lx.symmetric_tag)

    @jax.jit
    def run(matrix):
        stored = tr.trace(KEY, lx.MatrixLinearOperator(matrix), 150).std_err
        return tr.trace(KEY, operator, 150), tr.diagonal(KEY, operator, 150), stored

    trace, diagonal, stored = jax.device_get(run(matrix))
    error = abs(trace.value - np.trace(truth))
    assert 0 < error < 4 * trace.std_err < 0.1 * np.trace(truth)
    assert np.all(np.abs(diagonal.value - np.diag(truth)) < 4 * diagonal.std_err)
    assert stored == 0


@pytest.mark.parametrize("name", ["hutch++", "xtrace"])
def test_rounding_is_in_the_error_bar(name):
    """float32, a pair of eigenvalues +-1e3 and 0.01 I: all that is left is rounding."""
    pair = np.linalg.qr(np.random.default_rng(0).standard_normal((100, 2)))[0]
    matrix = jnp.asarray((pair * [1e3, -1e3]) @ pair.T + 0.01 * np.eye(100), jnp.float32)
    operator = lx.MatrixLinearOperator(matrix, lx.symmetric_tag)

    def one(key):
        solution = tr.trace(key, operator, 64, PROBED[name])
        return solution.value, solution.std_err, *solution.interval()

    value, std_err, low, high = over_keys(100, one)
    truth = np.trace(np.asarray(matrix, np.float64))
    covered = (low <= truth) & (truth <= high)
    # With a coverage of 95 %, 100 keys have a standard deviation of 2.2 %.
    assert covered.mean() >= 0.95 - 3 * 0.022
    error = np.sqrt(np.mean((value.astype(float) - truth) ** 2))
    assert np.median(std_err) < 20 * error  # and is not far larger


def test_rounding_that_is_common_to_all_samples():
    """Hutchinson: with random signs and a huge entry on the diagonal, rounding is the same in all
    samples, and their scatter does not show it.
    """
    n = 100_000
    diagonal = np.random.default_rng(0).random(n) + 0.5
    diagonal[n // 2] *= 1e6
    numbers = jnp.asarray(diagonal, jnp.complex64)
    trace = np.sum(np.asarray(numbers).real.astype(float))
    operator = lx.FunctionLinearOperator(
        lambda v: numbers * v + jnp.asarray(1e-4, v.dtype) * (jnp.roll(v, 1) + jnp.roll(v, -1)),
        jax.ShapeDtypeStruct((n,), numbers.dtype),
        PSD,
    )
    found = over_keys(4, lambda key: tr.trace(key, operator, 40, tr.HutchinsonEstimator()))
    assert np.all(np.abs(found.value.real.astype(float) - trace) <= 2 * found.std_err)
    assert np.all(found.std_err <= 2e-6 * trace)


# ------------------------------------------------------------------------- what is known exactly


def test_known_parts():
    """`K + s I` spends its products on K; what is stored spends none; the rest is estimated."""
    matrix = with_spectrum(np.random.default_rng(4), 0.8 ** np.arange(N))
    noise = lx.DiagonalLinearOperator(jnp.linspace(1.0, 2.0, N))
    for what, function in FUNCTIONS.items():

        @jax.jit
        def run(matrix, function=function):
            kernel = by_products(matrix, PSD)
            stored = 2.0 * noise, lx.MatrixLinearOperator(matrix) + noise
            operators = kernel, kernel + noise, 3.0 * kernel + noise, *stored
            return [function(KEY, operator, K) for operator in operators]

        alone, both, tripled, *exact = jax.device_get(run(matrix))
        known = np.linspace(1.0, 2.0, N)
        dense = 2 * np.diag(known), matrix + np.diag(known)
        known = known if what == "diagonal" else 1.5 * N
        np.testing.assert_allclose(both.value, alone.value + known, rtol=1e-13)
        np.testing.assert_array_equal(both.std_err, alone.std_err)
        assert np.all(both.std_err > 0)
        np.testing.assert_allclose(tripled.value, 3 * alone.value + known, rtol=1e-12)
        np.testing.assert_allclose(tripled.std_err, 3 * alone.std_err, rtol=1e-12)
        for found, expected in zip(exact, truths(what, np.stack(dense)), strict=True):
            np.testing.assert_allclose(found.value, expected, rtol=1e-13)
            assert (int(found.num_matvecs), np.max(found.std_err)) == (0, 0.0)


def test_the_choice_of_the_default():
    """By the tag, by memory, and by the budget."""
    auto = tr.AutoTraceEstimator()
    tagged, plain = by_products(np.eye(N), PSD), by_products(np.eye(N))
    assert isinstance(auto.select(tagged, 9), tr.XNysTraceEstimator)
    assert isinstance(auto.select(plain, 9), tr.XTraceEstimator)
    few = tr.AutoTraceEstimator(memory_limit=N * 9 * 8 - 1, batch_size=3)
    for estimator in (auto.select(plain, 3), auto.select(tagged, 1), few.select(plain, 9)):
        assert isinstance(estimator, tr.HutchinsonEstimator)
    assert few.select(plain, 9).batch_size == 3

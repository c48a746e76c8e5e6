"""One regression test for each defect that was measured in traceax 1.0.2 or in matfree."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from .. import reference
from ..helpers import (
    CLASSES,
    ESTIMATORS,
    NSD,
    PROBED,
    PSD,
    estimates,
    keys,
    operator_for,
    spectra,
    variant,
    with_spectrum,
)

KEY = jax.random.key(0)


def matrix_operator(matrix, tags=PSD):
    return lx.MatrixLinearOperator(jnp.asarray(matrix), tags)


# --- small budgets -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*needs at least.*:UserWarning")
@pytest.mark.parametrize(
    ("name", "k"),
    [("hutch++", 1), ("xtrace", 1), variant("xtrace", 3), ("xnystrace", 2), variant("auto", 1)],
)
def test_nan_for_small_budgets(name, k):
    """1.0.2: Hutch++ gave NaN for k <= 2 and XTrace for k = 1. Here: unbiased, by a z-test."""
    matrix = with_spectrum(np.random.default_rng(0), np.linspace(1, 3, 10))
    values = np.asarray(estimates(matrix, k, CLASSES[name], 400).value)
    z = (values.mean() - np.trace(matrix)) / (values.std(ddof=1) / 20)
    assert abs(z) < 4


@pytest.mark.parametrize(
    ("estimator", "k"),
    [
        (tr.HutchinsonEstimator(), 1),
        (tr.HutchPlusPlusEstimator(), 3),
        (tr.XTraceEstimator(), 2),
        (tr.XTraceEstimator(), 3),
        (tr.XNysTraceEstimator(), 1),
        (tr.AutoTraceEstimator(), 1),
    ],
)
def test_zero_error_from_a_single_probe(estimator, k):
    """1.0.2 reported 0.0: a single sample says nothing of its spread."""
    matrix = with_spectrum(np.random.default_rng(1), np.linspace(1, 3, 10))
    solution = tr.trace(KEY, operator_for(estimator, matrix, PSD), k, estimator)
    assert solution.std_err == np.inf
    assert solution.stats["dof"] == 0
    assert abs(solution.value - np.trace(matrix)) < np.trace(matrix)


# --- operators that crashed ----------------------------------------------------------------------


def _function():
    return lx.FunctionLinearOperator(lambda v: 2.5 * v, jax.ShapeDtypeStruct((12,), jnp.float64))


def _jacobian():
    return lx.JacobianLinearOperator(lambda x, _: 1.25 * x**2, jnp.ones(12))


def _identity():
    return lx.IdentityLinearOperator(jax.ShapeDtypeStruct((12,), jnp.float64)) * jnp.asarray(2.5)


@pytest.mark.parametrize("build", [_function, _jacobian, _identity])
@pytest.mark.parametrize("dtype", [None, int, float])
def test_integer_probes_on_function_jacobian_and_identity_operators(build, dtype):
    """1.0.2: the default (int) Rademacher probes crashed. A multiple of I is exact for them."""
    sampler = tr.RademacherSampler() if dtype is None else tr.RademacherSampler(dtype)
    value, stats = tr.HutchinsonEstimator(sampler).estimate(KEY, build(), 5)
    assert value == 30.0
    assert stats["std.err"] <= 30 * 10 * np.finfo(np.float64).eps  # rounding alone


@pytest.mark.parametrize("name", PROBED)
def test_float32_operators_with_x64(name):
    """1.0.2 drew float64 probes for a float32 operator, which is an error in strict promotion."""
    matrix = with_spectrum(np.random.default_rng(2), np.linspace(1, 3, 12))
    low = operator_for(CLASSES[name], matrix.astype(np.float32), PSD)
    high = operator_for(CLASSES[name], matrix, PSD)
    solution = tr.trace(KEY, low, 8, CLASSES[name])
    assert solution.value.dtype == jnp.float32
    assert abs(float(solution.value) - np.trace(matrix)) <= 6 * float(solution.std_err)
    wide = eqx.filter_eval_shape(tr.trace, KEY, high, 8, CLASSES[name])
    assert wide.value.dtype == jnp.float64


@pytest.mark.parametrize("name", ["hutchinson", variant("hutch++"), "xtrace", variant("xnystrace")])
def test_pytree_and_two_dimensional_structures(name):
    """1.0.2 took vectors only. The numbers are those of the flattened operator, where the probes
    are: Hutchinson's are drawn leaf by leaf.
    """
    matrix = jnp.asarray(with_spectrum(np.random.default_rng(3), np.linspace(1, 3, 12)))
    plane = jax.ShapeDtypeStruct((3, 4), jnp.float64)
    tree = {"w": jax.ShapeDtypeStruct((2, 5), jnp.float64), "b": jax.ShapeDtypeStruct((2,), float)}

    def on_tree(v):
        flat = matrix @ jnp.concatenate([v["b"], v["w"].reshape(-1)])
        return {"b": flat[:2], "w": flat[2:].reshape(2, 5)}

    expected = tr.trace(KEY, operator_for(CLASSES[name], matrix, PSD), 8, CLASSES[name])
    for operator in (
        lx.FunctionLinearOperator(lambda v: (matrix @ v.reshape(-1)).reshape(3, 4), plane, PSD),
        lx.FunctionLinearOperator(on_tree, tree, PSD),
    ):
        solution = tr.trace(KEY, operator, 8, CLASSES[name])
        value, std_err = expected.value, expected.std_err
        if name == "hutchinson" and operator.in_structure() == tree:
            blocks = tr.RademacherSampler().probes_by_leaf(KEY, [(2,), (10,)], 8, matrix.dtype)
            samples = reference.hutchinson(np.asarray(matrix), np.concatenate(blocks))
            value, std_err = samples.mean(), samples.std(ddof=1) / np.sqrt(8)
        np.testing.assert_allclose(solution.value, value, rtol=1e-10)
        np.testing.assert_allclose(solution.std_err, std_err, rtol=1e-8)


@pytest.mark.parametrize(
    ("name", "hermitian"),
    [
        ("hutchinson", False),
        variant("hutch++", False),
        ("xtrace", False),
        *(variant(name, True) for name in PROBED if name != "xnystrace"),
        ("xnystrace", True),  # needs a semidefinite operator
    ],
)
def test_complex_operators_silently_wrong(name, hermitian):
    """1.0.2 left out conjugates. The mean of 200 estimates, both parts, against its error."""
    rng = np.random.default_rng(4)
    matrix = with_spectrum(rng, np.linspace(0.1, 3, 12), np.complex128)
    if not hermitian:
        matrix = matrix + 1j * with_spectrum(rng, np.linspace(-1, 2, 12), np.complex128)
    values = np.asarray(estimates(matrix, 8, CLASSES[name], 200, PSD if hermitian else ()).value)
    error = values - np.trace(matrix)
    for part in (error.real, error.imag):
        standard = part.std(ddof=1) / np.sqrt(200)
        assert abs(part.mean()) <= 4 * standard + 1e-12
    assert np.abs(error).mean() < 0.5 * abs(np.trace(matrix))


# --- rank deficiency -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("hutch++", PSD),
        ("xtrace", PSD),
        ("xnystrace", PSD),
        ("xnystrace", NSD),
        # Which divide by nothing:
        *(variant(name, PSD) for name in ("hutchinson", "exact", "auto")),
        variant("auto", NSD),
    ],
)
def test_nan_on_the_zero_operator(name, tag):
    """Exactly zero, with error zero; and the gradient there is an estimate like any other."""

    def f(scale):
        operator = operator_for(ESTIMATORS[name], scale * jnp.ones((12, 12)), tag)
        solution = tr.trace(KEY, operator, 8, ESTIMATORS[name])
        return solution.value, solution

    slope, solution = jax.grad(f, has_aux=True)(jnp.asarray(0.0))
    assert solution.value == 0.0
    assert solution.std_err == 0.0
    assert solution.result == tr.RESULTS.successful
    # Of tr(ones) = 12, from probes that saw nothing of it.
    assert abs(slope - 12) <= 6 * 12


@pytest.mark.parametrize(
    "name", ["xtrace", "xtrace-normal", "xtrace-plain", "xnystrace", "hutch++"]
)
def test_nan_on_ones(name):
    """Rank one: exact to rounding, and so is the gradient's own value in a factor."""
    n = 12
    for key in keys(5):
        operator = lx.MatrixLinearOperator(jnp.ones((n, n)), PSD)
        solution = tr.trace(key, operator, 8, ESTIMATORS[name])
        np.testing.assert_allclose(solution.value, n, rtol=1e-12)
        assert solution.std_err < 1e-10


@pytest.mark.parametrize(("dtype", "rtol"), [variant(np.float64, 1e-12), (np.float32, 1e-4)])
def test_nan_on_zero_one_diagonals(dtype, rtol):
    """XNysTrace, rank 10, k = 30: exact for every one of 50 keys."""
    diagonal = np.zeros(60)
    diagonal[:10] = 1
    solution = estimates(np.diag(diagonal).astype(dtype), 30, tr.XNysTraceEstimator(), 50)
    np.testing.assert_allclose(solution.value, 10, rtol=rtol)
    assert np.all(solution.std_err < 10 * rtol)
    assert np.all(solution.result == tr.RESULTS.successful)


@pytest.mark.parametrize("name", [variant(n) if n != "xtrace" else n for n in PROBED])
def test_nan_in_gradients_of_rank_deficient_operators(name):
    """d tr / d scale = value / scale, and d tr / dA is an unbiased estimate of I."""
    rng = np.random.default_rng(5)
    factor = jnp.asarray(rng.standard_normal((12, 3)))

    def f(factor, key):
        operator = operator_for(CLASSES[name], factor @ factor.T, PSD)
        return tr.trace(key, operator, 9, CLASSES[name]).value

    batched = jax.jit(jax.vmap(jax.value_and_grad(f), (None, 0)))
    values, gradients = batched(factor, keys(100))
    truth = 2 * np.asarray(factor)
    # d tr(F F^T) / dF = 2 F: Euler's identity first, then the mean against its error.
    np.testing.assert_allclose(np.sum(gradients * factor, (1, 2)), 2 * values, rtol=1e-8)
    standard = np.std(gradients, axis=0, ddof=1) / 10
    assert np.all(np.abs(np.mean(gradients, 0) - truth) <= 4.5 * standard + 1e-9)


# --- scales --------------------------------------------------------------------------------------


@functools.cache
def _decaying(n=40):
    return with_spectrum(np.random.default_rng(6), 0.8 ** np.arange(n))


@pytest.mark.parametrize("name", [variant("hutchinson"), "hutch++", "xtrace", "xnystrace"])
@pytest.mark.parametrize("exponent", [66, -66])
def test_float32_scaled_by_huge_factors(name, exponent):
    """1.0.2: squares over- or underflowed. A power of two (1e20, 1e-20) changes no digit."""
    matrix = _decaying().astype(np.float32)
    plain = tr.trace(KEY, operator_for(CLASSES[name], matrix, PSD), 16, CLASSES[name])
    factor = np.float32(2.0**exponent)
    scaled = tr.trace(KEY, operator_for(CLASSES[name], matrix * factor, PSD), 16, CLASSES[name])
    np.testing.assert_allclose(scaled.value / factor, plain.value, rtol=1e-6)
    np.testing.assert_allclose(scaled.std_err / factor, plain.std_err, rtol=1e-4)


@pytest.mark.parametrize("name", [variant("hutchinson"), "hutch++", "xtrace", "xnystrace"])
def test_absolute_rank_cutoff(name):
    """1.0.2 and matfree cut at an absolute size: 1e-9 times an operator lost its tail."""
    matrix = _decaying()
    plain = tr.trace(KEY, operator_for(CLASSES[name], matrix, PSD), 16, CLASSES[name])
    for factor in (2.0**-30, 2.0**-300, 2.0**300):
        scaled = tr.trace(KEY, operator_for(CLASSES[name], matrix * factor, PSD), 16, CLASSES[name])
        np.testing.assert_allclose(scaled.value / factor, plain.value, rtol=1e-12)
        np.testing.assert_allclose(scaled.std_err / factor, plain.std_err, rtol=1e-9)


def test_truncated_nystrom_core():
    """Float32: eigenvalues of the core cut off bias the estimate. On 0.9^i the mean relative
    error over 100 keys was 3e-4 and more; rounding and sampling leave less than 3e-5.
    """
    matrix = with_spectrum(np.random.default_rng(7), spectra(300)["exp0.9"]).astype(np.float32)
    truth = np.trace(matrix.astype(np.float64))
    # Not vmapped: on two threads, batches of two factorisations can wait for each other in jaxlib.
    operator = matrix_operator(matrix)
    call = jax.jit(lambda key: tr.trace(key, operator, 120, tr.XNysTraceEstimator()).value)
    values = np.asarray([call(key) for key in keys(100)], np.float64)
    assert abs(np.mean(values / truth - 1)) < 3e-5


# --- resphering ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [tr.NormalSampler(), variant(tr.SphereSampler())])
@pytest.mark.parametrize("k", [3, variant(9)])
@pytest.mark.parametrize("estimator", [tr.XTraceEstimator, tr.XNysTraceEstimator])
def test_resphering_of_normal_probes(estimator, k, sampler):
    """1.0.2 scaled residual normal probes by n: biased up to 350 times on 10 x 10."""
    matrix = with_spectrum(np.random.default_rng(8), np.linspace(1, 3, 10))
    values = np.asarray(estimates(matrix, k, estimator(sampler, True), 1000).value)
    z = (values.mean() - np.trace(matrix)) / (values.std(ddof=1) / np.sqrt(1000))
    assert abs(z) < 4
    assert abs(values.mean() / np.trace(matrix) - 1) < 0.05


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("xnystrace", 1),
        variant("xnystrace-rademacher", 3),
        ("xtrace", 3),
        variant("xtrace-normal", 1),
        variant("xnystrace", 3),
        variant("xnystrace-rademacher", 1),
        variant("xtrace", 1),
        variant("xtrace-normal", 3),
    ],
)
def test_near_singular_probe_blocks(name, missing):
    """k close to n: 1.0.2's Gram matrices of the probes were singular to rounding."""
    n = 16
    matrix = with_spectrum(np.random.default_rng(9), np.linspace(1, 3, n))
    solution = estimates(matrix, n - missing, ESTIMATORS[name], 200)
    values = np.asarray(solution.value)
    z = (values.mean() - np.trace(matrix)) / (values.std(ddof=1) / np.sqrt(200))
    assert abs(z) < 4
    # 5 sigma of a single estimate that has seen nearly everything, for each of them.
    assert np.all(np.abs(values / np.trace(matrix) - 1) < 0.6)


# --- signs ---------------------------------------------------------------------------------------


def test_negative_semidefinite_operator():
    """1.0.2 gave NaN for it. It is the negative of the positive one, value and gradient."""
    matrix = _decaying()

    def f(scale, matrix, tag):
        operator = lx.MatrixLinearOperator(scale * jnp.asarray(matrix), tag)
        solution = tr.trace(KEY, operator, 16, tr.XNysTraceEstimator())
        return solution.value, solution

    (value, solution), slope = jax.value_and_grad(f, has_aux=True)(1.0, -matrix, NSD)
    (positive, other), positive_slope = jax.value_and_grad(f, has_aux=True)(1.0, matrix, PSD)
    assert value == -positive < 0
    assert solution.std_err == other.std_err > 0
    np.testing.assert_allclose(slope, -positive_slope, rtol=1e-12)
    assert solution.result == tr.RESULTS.successful


@pytest.mark.parametrize("lie", ["negative tagged positive", "indefinite"])
def test_wrong_tag_is_reported(lie):
    """1.0.2 returned 0 with error 0 for a negative operator that is tagged positive."""
    matrix = -_decaying()
    if lie == "indefinite":
        matrix = with_spectrum(np.random.default_rng(10), np.linspace(-1, 2, 40))
    truth = np.trace(matrix)
    call = jax.jit(lambda op, key: tr.trace(key, op, 16, tr.XNysTraceEstimator()))
    for key in keys(5):
        solution = call(matrix_operator(matrix), key)
        assert solution.result == tr.RESULTS.not_semidefinite
        assert abs(solution.value - truth) <= 6 * solution.std_err
        assert solution.std_err > 0
    honest = call(matrix_operator(matrix @ matrix), KEY)
    assert honest.result == tr.RESULTS.successful


@pytest.mark.parametrize("name", [variant(n) if n != "hutchinson" else n for n in PROBED])
def test_sign_and_scale_of_gradients_of_multiples(name):
    """1.0.2's gradient of `-A`, `c A` and `A / c` had another sign or size than the value's."""
    matrix = jnp.asarray(_decaying())

    def build(form, c, matrix):
        plain = lx.MatrixLinearOperator(c * matrix, PSD)
        unit = lx.MatrixLinearOperator(matrix, PSD)
        return {
            "plain": plain,
            "multiple": lx.TaggedLinearOperator(unit * c, PSD),
            "quotient": lx.TaggedLinearOperator(unit / (1 / c), PSD),
            "negative": -plain,
        }[form]

    def f(c, matrix, form):
        return tr.trace(KEY, build(form, c, matrix), 16, CLASSES[name]).value

    value, (slope, gradient) = jax.value_and_grad(f, (0, 1))(jnp.asarray(1.75), matrix, "plain")
    # XNysTrace differentiates with other weights than those of its value: compare its forms only.
    if name not in ("xnystrace", "auto"):
        np.testing.assert_allclose(slope, value / 1.75, rtol=1e-9)
    for form in ("multiple", "quotient", "negative"):
        sign = -1 if form == "negative" else 1
        got, (got_slope, got_gradient) = jax.value_and_grad(f, (0, 1))(
            jnp.asarray(1.75), matrix, form
        )
        np.testing.assert_allclose(got, sign * value, rtol=1e-9)
        np.testing.assert_allclose(got_slope, sign * slope, rtol=1e-9)
        np.testing.assert_allclose(got_gradient, sign * gradient, rtol=1e-8, atol=1e-9)


# --- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("xtrace", jnp.bfloat16),
        ("xnystrace", jnp.bfloat16),
        variant("hutchinson", jnp.bfloat16),
        variant("hutch++", jnp.bfloat16),
        variant("xnystrace", jnp.float16),
    ],
)
def test_half_precision(name, dtype):
    """1.0.2 crashed in the QR factorisation. 20 keys, each within its error and the rounding."""
    matrix = jnp.asarray(with_spectrum(np.random.default_rng(11), np.linspace(1, 3, 40)), dtype)
    truth = np.trace(np.asarray(matrix, np.float64))
    solution = estimates(matrix, 12, CLASSES[name], 20)
    rounding = 4 * float(jnp.finfo(dtype).eps) * truth
    assert solution.value.dtype == jnp.float32
    error = np.abs(np.asarray(solution.value, np.float64) - truth)
    assert np.all(error <= 6 * np.asarray(solution.std_err, np.float64) + rounding)
    assert np.all(solution.std_err < float(truth) / 4)
    assert np.all(solution.result == tr.RESULTS.successful)


# --- NaN and inf inside the operator -------------------------------------------------------------


@functools.cache
def _lanes(name, k):
    def one(matrix, key):
        return tr.trace(key, lx.MatrixLinearOperator(matrix, PSD), k, ESTIMATORS[name])

    return jax.jit(jax.vmap(one)), jax.jit(one)


@pytest.mark.parametrize(
    ("name", "k"),
    [*((name, 8) for name in (*PROBED, "exact")), variant("auto", 8), variant("xtrace", 12)],
)
def test_nan_in_the_operator_is_reported(name, k):
    """Value and error are NaN and the result says why; under vmap in the lane concerned only."""
    good = with_spectrum(np.random.default_rng(12), np.linspace(1, 3, 12))
    bad = {}
    for what, number in (("nan", np.nan), ("inf", np.inf), ("-inf", -np.inf)):
        for where in ((3, 3), (2, 7)):
            bad[what, where] = good.copy()
            bad[what, where][where] = bad[what, where][where[::-1]] = number
    lanes, one = _lanes(name, k)
    stack = jnp.asarray(np.stack([good, *bad.values()]))
    same = jnp.stack([KEY] * len(stack))
    batch = lanes(stack, same)
    flagged = np.asarray(batch.result == tr.RESULTS.nonfinite_operator)
    assert not flagged[0]
    # Lanes of other matrices change nothing in the first.
    sound = lanes(jnp.stack([stack[0]] * len(stack)), same)
    np.testing.assert_allclose(batch.value[0], sound.value[0], rtol=1e-10)
    assert np.all(flagged[1:])
    assert np.all(np.isnan(batch.value[1:]))
    assert np.all(np.isnan(batch.std_err[1:]))
    if name in ("hutchinson", "xtrace"):  # by itself: the same code, compiled once more
        np.testing.assert_allclose(batch.value[0], one(stack[0], KEY).value, rtol=1e-10)
        single = one(stack[1], KEY)
        assert single.result == tr.RESULTS.nonfinite_operator
        assert np.isnan(single.value)


@pytest.mark.parametrize("name", CLASSES)
def test_overflow_of_the_sum_is_reported(name):
    """All products are finite in float32, and the trace is not."""
    factor = jnp.float32(2.0**125)
    operator = lx.FunctionLinearOperator(
        lambda v: factor * v, jax.ShapeDtypeStruct((40,), jnp.float32), PSD
    )
    for k in (12, 40):
        solution = tr.trace(KEY, operator, k, CLASSES[name])
        assert solution.result == tr.RESULTS.nonfinite_operator
        assert np.isnan(solution.value)
        assert np.isnan(solution.std_err)


def test_overflow_in_half_precision_is_reported():
    matrix = jnp.full((40, 40), 3e4, jnp.float16)
    solution = tr.trace(KEY, lx.MatrixLinearOperator(matrix), 8, tr.XTraceEstimator())
    assert solution.result == tr.RESULTS.nonfinite_operator
    assert "overflow" in tr.RESULTS[solution.result]


# --- memory --------------------------------------------------------------------------------------


def _blocks(function, n, width, *arguments):
    """Temporary memory of a compiled function, in blocks of `n x width` float32 numbers."""
    analysis = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return analysis.temp_size_in_bytes / (4 * n * width)


def _diagonal_function(diagonal):
    structure = jax.ShapeDtypeStruct(diagonal.shape, diagonal.dtype)
    return lx.FunctionLinearOperator(lambda v: diagonal * v, structure, PSD)


def measure_blocks(estimator, n=20_000, k=96, width=96, gradient=True):
    def value(diagonal, key):
        return tr.trace(key, _diagonal_function(diagonal), k, estimator).value

    diagonal = jnp.ones(n, jnp.float32)
    return [
        _blocks(fn, n, width, diagonal, KEY)
        for fn in (value, jax.value_and_grad(value))[: 1 + gradient]
    ]


# Measured: 1.1 and 2.1 blocks for Hutchinson, value and gradient; 1.1 and 1.1 of the
# smaller blocks in batches; 2.3 for Hutch++, 2.5 for XTrace, 4.0 for XNysTrace.
MEMORY = {
    "hutchinson": (tr.HutchinsonEstimator(), 96, 3.0, 3.0),
    "hutchinson-batched": (tr.HutchinsonEstimator(batch_size=8), 8, 4.0, 4.0),
}


@pytest.mark.parametrize("name", MEMORY)
def test_copies_of_the_block_of_probes(name):
    """1.0.2's Hutchinson held four to six copies of its n x k block."""
    estimator, width, value_limit, gradient_limit = MEMORY[name]
    value, gradient = measure_blocks(estimator, width=width)
    assert value <= value_limit
    assert gradient <= gradient_limit


@pytest.mark.parametrize(
    ("estimator", "limit"),
    [(tr.HutchPlusPlusEstimator(), 3), (tr.XTraceEstimator(), 3), (tr.XNysTraceEstimator(), 4.5)],
)
def test_memory_of_sketches(estimator, limit):
    (value,) = measure_blocks(estimator, gradient=False)
    assert value <= limit


def test_estimators_hold_no_arrays():
    """They are static: an estimator inside a model adds no leaf to it."""
    for estimator in ESTIMATORS.values():
        assert jax.tree.leaves(eqx.filter(estimator, eqx.is_array)) == []


@pytest.mark.parametrize("n", [1000, 100_000])
def test_rounding_that_is_common_to_all_samples(n):
    """Hutchinson: with random signs and a huge entry on the diagonal, rounding is the same in all
    samples, and their scatter does not show it. XLA added up k n terms in one go.
    """
    diagonal = np.random.default_rng(0).random(n) + 0.5
    diagonal[n // 2] *= 1e6
    numbers = jnp.asarray(diagonal, jnp.complex64)
    trace = np.sum(np.asarray(numbers).real.astype(float))
    operator = lx.FunctionLinearOperator(
        lambda v: numbers * v + jnp.asarray(1e-4, v.dtype) * (jnp.roll(v, 1) + jnp.roll(v, -1)),
        jax.ShapeDtypeStruct((n,), numbers.dtype),
        PSD,
    )
    run = jax.jit(lambda key: tr.trace(key, operator, 40, tr.HutchinsonEstimator()))
    for key in keys(8):
        solution = run(key)
        assert abs(float(solution.value.real) - trace) <= 2 * float(solution.std_err)
        assert float(solution.std_err) <= 2e-6 * trace


def test_intervals_next_to_the_whole_space():
    """XNysTrace with k = n - 1: all samples share the one dimension that is left, and scatter
    together. (With k - 1 degrees of freedom, 72 % of intervals held.)
    """
    n, count = 40, 400
    matrix = with_spectrum(np.random.default_rng(0), 0.8 ** np.arange(n) + 1e-3)
    operator = matrix_operator(matrix)

    def interval(k, key):
        return tr.trace(key, operator, k, tr.XNysTraceEstimator()).interval()

    for k in (n - 1, n - 2):
        found = jax.jit(jax.vmap(functools.partial(interval, k)))(keys(count))
        low, high = map(np.asarray, found)
        held = np.mean((low <= np.trace(matrix)) & (np.trace(matrix) <= high))
        assert held >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / count)

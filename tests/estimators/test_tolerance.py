"""Say the accuracy, not the budget: `trace(key, operator, rtol=...)`, and of diagonals."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from scipy.special import chdtri, stdtrit

import traceax as tr
from traceax._estimators import calibration, tolerance

from ..helpers import PROBED, PSD, by_products, keys, random_unitary, spectra, with_spectrum

N, COUNT = 300, 100
KEY = jr.key(0)
FUNCTIONS = {"trace": tr.trace, "diagonal": tr.diagonal}
SPECTRA = {name: spectra(N)[name] for name in ("flat", "poly", "exp0.9")}


class Numbers(NamedTuple):
    """What the program returns for each key."""

    value: np.ndarray
    std_err: np.ndarray
    num_matvecs: np.ndarray
    result: np.ndarray
    dof: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    tangents: np.ndarray  # in the directions A and I


@partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="tags")
def program(what, estimator, max_k, keys, matrix, rtol, tags=PSD):
    """The numbers for each key, one after the other."""
    one = jnp.ones((), matrix.dtype)

    def solve(key, s, t):
        operator = by_products(s * matrix + t * jnp.eye(len(matrix), dtype=matrix.dtype), tags)
        options = {"estimator": estimator, "rtol": rtol, "max_k": max_k}
        solution = FUNCTIONS[what](key, operator, **options)
        return solution.value, solution

    def numbers(key):
        solve_at = partial(solve, key)
        _, push, solution = jax.linearize(solve_at, one, 0 * one, has_aux=True)
        return Numbers(
            solution.value,
            solution.std_err,
            solution.num_matvecs,
            solution.result._value,
            solution.stats["dof"],
            *solution.interval(),
            jnp.stack([push(one, 0 * one), push(0 * one, one)]),
        )

    return jax.lax.map(numbers, keys)


@cache
def matrix(spectrum, n=N):
    eigenvalues = spectra(n)[spectrum]
    return with_spectrum(np.random.default_rng(5), eigenvalues)


@cache
def numbers(what, name, spectrum, rtol, max_k=N, count=COUNT):
    """The numbers, as NumPy arrays."""
    given = keys(count), jnp.asarray(matrix(spectrum)), jnp.asarray(rtol)
    return jax.tree.map(np.asarray, program(what, PROBED[name], max_k, *given))


def truth(what, matrix):
    return np.diag(matrix) if what == "diagonal" else np.trace(matrix)


def relative_error(found, what, matrix):
    expected = truth(what, matrix)
    error = np.asarray(found.value) - expected
    return np.linalg.norm(error.reshape(len(error), -1), axis=1) / np.linalg.norm(expected)


def share_less_noise(share, count=COUNT):
    """The share, less three standard errors of the count."""
    return share - 3 * np.sqrt(share * (1 - share) / count)


SUCCESSFUL = tr.RESULTS.successful._value
KINDS = [
    ("trace", "hutchinson"),
    ("trace", "xtrace"),
    ("trace", "xnystrace"),
    ("diagonal", "xtrace"),
    ("diagonal", "xnystrace"),
]
kinds = pytest.mark.parametrize(("what", "name"), KINDS)
# What each spectrum takes by the last resort, by samples alone, and with a sketch.
RTOLS = {"trace": (0.1, 0.02), "diagonal": (0.3, 0.1)}


# --------------------------------------------------------------------- accuracy and its price


@kinds
def test_the_tolerance_is_met(what, name):
    """In 95 % of calls, with at most max_k products and n for the last resort."""
    for spectrum in SPECTRA:
        for rtol in RTOLS[what]:
            found = numbers(what, name, spectrum, rtol)
            assert np.all(found.result == SUCCESSFUL), (spectrum, rtol)
            met = relative_error(found, what, matrix(spectrum)) <= rtol
            assert met.mean() >= share_less_noise(0.95), (spectrum, rtol)
            assert found.num_matvecs.max() <= 2 * N
            assert found.num_matvecs.min() >= 8
            expected = truth(what, matrix(spectrum))
            covered = (found.lower <= expected + 1e-12) & (expected - 1e-12 <= found.upper)
            assert covered.mean() >= share_less_noise(0.92), (spectrum, rtol)


@kinds
def test_derivatives_are_the_contraction_with_the_weights(what, name):
    """In the direction A it is the value (XNysTrace's weights are those of its range); in another
    one it is unbiased.
    """
    for spectrum in SPECTRA:
        found = numbers(what, name, spectrum, RTOLS[what][1])
        along, across = found.tangents[:, 0], found.tangents[:, 1]
        if name != "xnystrace":
            np.testing.assert_allclose(along, found.value, rtol=1e-8, atol=1e-12)
        error = np.linalg.norm(along - found.value) / np.linalg.norm(found.value)
        assert error < 2 * RTOLS[what][1]
        expected = 1.0 if what == "diagonal" else N
        errors = (across - expected).reshape(COUNT, -1)
        deviation = errors.std(axis=0, ddof=1) / 10
        assert np.all(np.abs(errors.mean(axis=0)) <= 4.5 * deviation + 1e-10)
        assert np.mean(np.square(errors)) ** 0.5 < 0.5 * expected


def test_a_sketch_is_prepared_where_it_pays():
    """Not for a flat spectrum, where the numbers are Hutchinson's; for a decaying one it saves
    products, and a tighter tolerance takes a larger one.
    """
    flat, plain = (numbers("trace", name, "flat", 0.02) for name in ("xtrace", "hutchinson"))
    np.testing.assert_allclose(flat.value, plain.value, rtol=1e-12)
    np.testing.assert_array_equal(flat.num_matvecs, plain.num_matvecs)
    decaying, plain = (numbers("trace", name, "exp0.9", 0.02) for name in ("xtrace", "hutchinson"))
    assert np.median(decaying.num_matvecs) < 0.5 * np.median(plain.num_matvecs)
    assert np.all(decaying.std_err > 0)
    nystrom = numbers("trace", "xnystrace", "exp0.9", 0.02)
    assert np.median(nystrom.num_matvecs) <= np.median(decaying.num_matvecs)
    tight = numbers("trace", "xnystrace", "exp0.9", 1e-3, count=10)
    assert np.all(tight.std_err > 0)
    assert np.all(tight.result == SUCCESSFUL)
    assert np.median(tight.num_matvecs) < N  # with 64 columns
    assert relative_error(tight, "trace", matrix("exp0.9")).max() < 3e-3


@kinds
def test_the_last_resort_is_exact(what, name):
    found = numbers(what, name, "poly", 1e-13, count=3)
    assert np.all(found.result == SUCCESSFUL)
    assert np.all(found.std_err == 0)
    assert relative_error(found, what, matrix("poly")).max() < 1e-13
    assert np.all(found.num_matvecs > N)
    assert np.all(found.num_matvecs <= 2 * N)
    np.testing.assert_allclose(found.tangents[:, 0], found.value, rtol=1e-11, atol=1e-15)


def test_the_first_panel_ends_the_call_if_students_quantile_says_so():
    look = numbers("trace", "hutchinson", "flat", 5.0, count=1)
    assert look.num_matvecs == 8
    assert look.dof == 7
    enough = float(stdtrit(7, 0.975) * look.std_err[0] / look.value[0])
    for rtol, ends in ((1.001 * enough, True), (0.999 * enough, False)):
        again = numbers("trace", "hutchinson", "flat", rtol, count=1)
        assert bool(again.num_matvecs == 8) == ends


def test_samples_are_those_of_hutchinson():
    """Panels of eight, each with probes of its own; the error is no smaller than their scatter."""
    found = numbers("trace", "hutchinson", "flat", 0.005)
    _, folded = tolerance._keys(keys(COUNT)[0], 0)
    panels = int(found.num_matvecs[0]) // 8
    assert panels > 1
    omega = [tr.RademacherSampler()(jr.fold_in(folded, j), N, 8, float) for j in range(panels)]
    entries = [np.asarray(o) * (matrix("flat") @ np.asarray(o)) for o in omega]
    samples = np.concatenate([e.sum(axis=0) for e in entries])
    np.testing.assert_allclose(found.value[0], samples.mean(), rtol=1e-12)
    least = np.mean([e.var(axis=1, ddof=1).sum() for e in entries])
    variance = max(samples.var(ddof=1), least)
    np.testing.assert_allclose(found.std_err[0], np.sqrt(variance / len(samples)), rtol=1e-9)
    assert found.dof[0] == len(samples) - 1


# ----------------------------------------------------------------- budgets that are too small


@pytest.mark.parametrize(("what", "name"), [("trace", "xtrace"), ("diagonal", "xnystrace")])
def test_not_converged(what, name):
    """The best estimate, with its error bar, from at most max_k products."""
    for spectrum, rtol in (("flat", 1e-6), ("poly", 1e-9)):
        found = numbers(what, name, spectrum, rtol, max_k=61, count=5)
        assert np.all(found.result == tr.RESULTS.not_converged._value)
        assert np.all(found.num_matvecs <= 61)
        assert np.all(found.num_matvecs > 61 - 8)
        assert np.all(found.std_err > 0)
        size = np.linalg.norm(found.std_err.reshape(5, -1), axis=1)
        size /= np.linalg.norm(truth(what, matrix(spectrum)))
        assert np.all(relative_error(found, what, matrix(spectrum)) < 5 * size)
        assert np.all(size < 0.5)
    assert np.all(numbers(what, name, "flat", 0.5, max_k=61, count=5).result == SUCCESSFUL)


@pytest.mark.parametrize(("what", "max_k"), [("trace", 2), ("trace", 5), ("diagonal", 5)])
def test_max_k_smaller_than_a_panel(what, max_k):
    found = numbers(what, "xtrace", "flat", 1e-6, max_k=max_k, count=5)
    assert np.all(found.num_matvecs == max_k)
    assert np.all(found.result == tr.RESULTS.not_converged._value)
    assert np.all(np.isfinite(found.std_err))
    loose = numbers(what, "xtrace", "flat", 50.0, max_k=max_k, count=5)
    assert np.all(loose.result == SUCCESSFUL)
    np.testing.assert_array_equal(loose.value, found.value)


@pytest.mark.parametrize(("what", "name"), [("trace", "xtrace"), ("diagonal", "xnystrace")])
def test_degenerate_operators(what, name):
    """Rank 5 is captured by the first sketch, at any scale; zero ends with the first panel, NaN
    and a wrong tag as soon as they show.
    """
    basis = random_unitary(np.random.default_rng(2), N)[:, :5]
    low_rank = (basis * np.arange(1.0, 6)) @ basis.T

    def run(matrix):
        given = keys(2), jnp.asarray(matrix), jnp.asarray(1e-10)
        return jax.tree.map(np.asarray, program(what, PROBED[name], 61, *given))

    for scale in (1.0, 1e200, 1e-200):
        found = run(scale * low_rank)
        assert np.all(found.result == SUCCESSFUL)
        assert np.all(found.num_matvecs <= 8 + 32 + 8)
        usual = found._replace(value=found.value / scale, std_err=found.std_err / scale)
        assert np.all(usual.std_err > 0)  # rounding
        assert np.linalg.norm(usual.std_err) <= 1e-12 * 15
        assert relative_error(usual, what, low_rank).max() < 1e-12
    zero = run(0 * low_rank)
    assert np.all(zero.result == SUCCESSFUL)
    assert np.all(zero.num_matvecs == 8)
    assert not np.any(zero.value)
    assert not np.any(zero.std_err)
    low_rank[3, 4] = np.nan
    broken = run(low_rank)
    assert np.all(broken.result == tr.RESULTS.nonfinite_operator._value)
    assert np.all(broken.num_matvecs == 8)
    # The row that holds NaN, or the whole trace.
    assert np.all(np.isnan(broken.value) == ((np.arange(N) == 3) if what == "diagonal" else True))
    if name == "xnystrace":
        wrong = run(-matrix("exp0.9"))
        assert np.all(wrong.result == tr.RESULTS.not_semidefinite._value)


@pytest.mark.parametrize(("what", "name"), [("trace", "xtrace"), ("diagonal", "xnystrace")])
def test_scales(what, name):
    """Float32: a power of two changes neither the number of products nor a digit."""
    dense = matrix("exp0.9").astype(np.float32)

    def run(scale):
        given = keys(3), jnp.asarray(np.float32(scale) * dense), jnp.asarray(0.1)
        return jax.tree.map(np.asarray, program(what, PROBED[name], 200, *given))

    usual = run(1.0)
    assert np.all(usual.result == SUCCESSFUL)
    assert usual.num_matvecs.max() > 24
    for scale in (2.0**66, 2.0**-66):
        found = run(scale)
        np.testing.assert_array_equal(found.num_matvecs, usual.num_matvecs)
        np.testing.assert_allclose(found.value / np.float32(scale), usual.value, rtol=1e-4)
        np.testing.assert_allclose(found.std_err / np.float32(scale), usual.std_err, rtol=1e-3)


@pytest.mark.parametrize("what", FUNCTIONS)
def test_what_is_not_hermitian(what):
    """Complex, with a sketch: a diagonal takes products with the adjoint."""
    rng, n = np.random.default_rng(3), 120
    left, right = random_unitary(rng, n, np.complex128), random_unitary(rng, n, np.complex128)
    dense = (left * 0.8 ** np.arange(n)) @ (left + 0.3 * right).conj().T
    rtol = 0.02 if what == "trace" else 0.1
    given = keys(20), jnp.asarray(dense), jnp.asarray(rtol)
    found = program(what, tr.XTraceEstimator(), 110, *given, tags=())
    found = jax.tree.map(np.asarray, found)
    assert found.value.dtype == np.complex128
    assert np.all(found.result == SUCCESSFUL)
    assert found.num_matvecs.max() > 8 + 32
    met = relative_error(found, what, dense) <= rtol
    assert met.mean() >= share_less_noise(0.95, 20)
    np.testing.assert_allclose(found.tangents[:, 0], found.value, rtol=1e-8, atol=1e-12)


def test_half_precision_does_not_converge_beyond_its_rounding():
    """Also of the exact value: the error bar holds what products in bfloat16 leave open."""
    n = 150
    noise = np.random.default_rng(0).standard_normal((n, n))
    dense = jnp.asarray(np.eye(n) + 0.01 * (noise + noise.T), jnp.bfloat16)
    expected = np.trace(np.asarray(dense.astype(float)))

    @jax.jit
    def run(keys):
        operator = by_products(dense, PSD)
        options = {"rtol": 1e-6, "max_k": 50, "estimator": tr.HutchinsonEstimator()}
        return jax.lax.map(lambda key: tr.trace(key, operator, **options), keys)

    found = run(keys(20))
    assert np.all(found.result == tr.RESULTS.not_converged)
    assert found.value.dtype == jnp.float32
    # 20 errors of some 3 standard errors at most: P(|t_47| > 5) = 1e-5.
    assert np.all(np.abs(np.asarray(found.value) - expected) < 5 * np.asarray(found.std_err))


# --------------------------------------------------------------------------- transformations


@pytest.mark.parametrize("name", ["xtrace", "xnystrace"])
def test_lanes_of_a_vmap_are_the_calls(name):
    """Whatever the other lanes need; derivatives included, in reverse mode."""
    stack = jnp.asarray(np.stack([matrix(spectrum) for spectrum in SPECTRA]))

    def value(scale, key, dense):
        operator = by_products(scale * dense, PSD)
        options = {"rtol": 0.02, "estimator": PROBED[name], "max_k": N}
        solution = tr.trace(key, operator, **options)
        return solution.value, (solution.std_err, solution.num_matvecs)

    both = jax.vmap(jax.value_and_grad(value, has_aux=True), (None, None, 0))
    both = jax.jit(jax.vmap(both, (None, 0, None)))
    (values, (std_errs, spent)), slopes = both(1.0, keys(COUNT)[:2], stack)
    assert len(set(np.asarray(spent).ravel().tolist())) > 2
    for i, spectrum in enumerate(SPECTRA):
        alone = numbers("trace", name, spectrum, 0.02)
        np.testing.assert_allclose(values[:, i], alone.value[:2], rtol=1e-9)
        np.testing.assert_allclose(std_errs[:, i], alone.std_err[:2], rtol=1e-6)
        np.testing.assert_array_equal(spent[:, i], alone.num_matvecs[:2])
        np.testing.assert_allclose(slopes[:, i], alone.tangents[:2, 0], rtol=1e-8)


def test_blocks_of_a_pytree():
    """Block traces and the diagonal have the structure of the operator, and norms of the errors
    decide.
    """
    dense = jnp.asarray(matrix("exp0.9"))
    structure = {
        "a": jax.ShapeDtypeStruct((5, 20), float),
        "b": jax.ShapeDtypeStruct((200,), float),
    }

    def product(x):
        y = dense @ jnp.concatenate([x["a"].ravel(), x["b"]])
        return {"a": y[:100].reshape(5, 20), "b": y[100:]}

    operator = lx.FunctionLinearOperator(product, structure, PSD)
    entries = np.diag(dense)
    expected = np.array([entries[:100].sum(), entries[100:].sum()])
    run = jax.jit(lambda keys: jax.lax.map(lambda k: tr.block_traces(k, operator, rtol=0.05), keys))
    found = run(keys(40))
    assert np.all(found.result == tr.RESULTS.successful)
    errors = np.stack([found.value["a"], found.value["b"]], 1) - expected
    std_errs = np.stack([found.std_err["a"], found.std_err["b"]], 1)
    assert np.all(np.abs(errors) <= 6 * std_errs)
    met = np.linalg.norm(errors, axis=1) <= 0.05 * np.linalg.norm(expected)
    assert met.mean() >= share_less_noise(0.95, 40)
    shapes = jax.eval_shape(lambda: tr.diagonal(KEY, operator, rtol=0.1)).value
    assert jax.tree.map(lambda x: x.shape, shapes) == {"a": (5, 20), "b": (200,)}


def test_what_is_known_exactly_counts():
    """The tolerance is relative to the whole value, and `K + s I` spends nothing on s I."""
    kernel = by_products(matrix("exp0.9"), PSD)
    identity = lx.IdentityLinearOperator(kernel.in_structure())
    share = np.trace(matrix("exp0.9")) / (np.trace(matrix("exp0.9")) + 10 * N)
    alone = tr.trace(KEY, kernel, rtol=0.05, max_k=60)
    noisy = tr.trace(KEY, kernel + 10.0 * identity, rtol=0.05 * share, max_k=60)
    assert noisy.num_matvecs == alone.num_matvecs
    np.testing.assert_allclose(noisy.value - 10 * N, alone.value, rtol=1e-9)
    absolute = tr.trace(KEY, kernel, atol=0.05 * float(alone.value), max_k=60)
    np.testing.assert_allclose(absolute.value, alone.value, rtol=1e-12)
    assert tr.trace(KEY, identity, rtol=1e-3).num_matvecs == 0

    def value(s):
        return tr.trace(KEY, kernel + s * identity, rtol=0.05, max_k=60).value

    np.testing.assert_allclose(jax.grad(value)(0.1), N, rtol=1e-12)


def test_small_operators_are_exact_at_once():
    """With at most 64 rows, and where the budget allows it."""
    dense = matrix("poly", 40)
    found = tr.trace(KEY, by_products(dense), rtol=0.5)
    assert (int(found.num_matvecs), float(found.std_err)) == (40, 0.0)
    np.testing.assert_allclose(found.value, np.trace(dense), rtol=1e-13)
    bounded = tr.trace(KEY, by_products(dense), rtol=0.5, max_k=39)
    assert bounded.num_matvecs < 40


def test_memory_bounds_what_is_prepared():
    """The sizes that the default may prepare, and that of an estimator without a sketch."""
    operator = by_products(matrix("flat"), PSD)
    sizes = tr.AutoTraceEstimator(memory_limit=20 * N * 8).sampling(operator, None).sizes
    assert sizes == (0, 16)
    assert tr.HutchinsonEstimator().sampling(operator, None).sizes == (0,)
    assert tr.ExactTraceEstimator().sampling(operator, None) is None


# ------------------------------------------------------------------------------- the constants


def test_the_norm_of_many_errors_is_more_certain():
    """The factor against quantiles of chi^2, and one error as a number."""
    assert calibration.norm_factor(jnp.asarray(3.0)) == 1
    for entries in (2, 2000):
        nu = max(1, entries / 2)
        exact = np.sqrt(chdtri(nu, 0.05) / nu / chdtri(1, 0.05))
        equal = [1e-30 * jnp.ones(entries), jnp.zeros(7)]
        np.testing.assert_allclose(calibration.norm_factor(equal), exact, rtol=0.03)
    # No error at all counts as infinitely many.
    none = calibration.norm_factor(jnp.zeros(3))
    np.testing.assert_allclose(none, 1 / np.sqrt(chdtri(1, 0.05)), rtol=0.03)


def test_student_quantiles():
    dof = np.array([1, 2, 7, 60, 1000])
    for level in (0.5, 0.999):
        found = calibration.student_quantile(level, dof, jnp.ones(()))
        np.testing.assert_allclose(found, stdtrit(dof, (1 + level) / 2), rtol=1e-6)

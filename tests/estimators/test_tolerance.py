"""Say the accuracy, not the budget: `trace(key, operator, rtol=...)`, and of diagonals."""

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from scipy.special import chdtri, stdtrit

import traceax as tr
from traceax._estimators.solution import student_quantile
from traceax._estimators.tolerance import norm_factor

from ..helpers import PSD, by_products, keys, over_keys, random_unitary, spectra, with_spectrum

N, COUNT = 300, 100
KEY = jr.key(0)
FUNCTIONS = {"trace": tr.trace, "diagonal": tr.diagonal}
ESTIMATORS = {"hutchinson": tr.HutchinsonEstimator(), "xtrace": tr.XTraceEstimator()}
SPECTRA = {name: spectra(N)[name] for name in ("flat", "poly", "exp0.9")}


@partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="tags")
def program(what, estimator, max_k, keys, count, matrix, rtol, tags=PSD):
    """The numbers for the first `count` of the keys, one after the other; derivatives are those in
    the directions A and I.
    """
    one = jnp.ones((), matrix.dtype)

    def solve(key, s, t):
        operator = by_products(s * matrix + t * jnp.eye(len(matrix), dtype=matrix.dtype), tags)
        options = {"estimator": estimator, "rtol": rtol, "max_k": max_k}
        solution = FUNCTIONS[what](key, operator, **options)
        return solution.value, solution

    def numbers(key):
        solve_at = partial(solve, key)
        _, push, solution = jax.linearize(solve_at, one, 0 * one, has_aux=True)
        lower, upper = solution.interval()
        return {
            "value": solution.value,
            "std_err": solution.std_err,
            "num_matvecs": solution.num_matvecs,
            "result": solution.result._value,
            "dof": solution.stats["dof"],
            "lower": lower,
            "upper": upper,
            "tangents": jnp.stack([push(one, 0 * one), push(0 * one, one)]),
        }

    def step(i, found):
        return jax.tree.map(lambda all, x: all.at[i].set(x), found, numbers(keys[i]))

    empty = jax.tree.map(
        lambda x: jnp.zeros((len(keys), *x.shape), x.dtype), jax.eval_shape(numbers, keys[0])
    )
    return jax.lax.fori_loop(0, count, step, empty)


def run(what, estimator, max_k, count, matrix, rtol, **options):
    """The same, as NumPy arrays."""
    given = keys(COUNT), count, np.asarray(matrix), np.float64(rtol)
    found = program(what, estimator, max_k, *given, **options)
    return SimpleNamespace(**{name: np.asarray(x)[:count] for name, x in found.items()})


@cache
def matrix(spectrum, n=N):
    eigenvalues = spectra(n)[spectrum]
    return with_spectrum(np.random.default_rng(5), eigenvalues)


@cache
def numbers(what, name, spectrum, rtol, max_k=N, count=COUNT):
    """The numbers of many tests."""
    return run(what, ESTIMATORS[name], max_k, count, matrix(spectrum), rtol)


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
KINDS = [("trace", "hutchinson"), ("trace", "xtrace"), ("diagonal", "xtrace")]
kinds = pytest.mark.parametrize(("what", "name"), KINDS)
# What each spectrum takes by the last resort, by samples alone, and with a sketch.
RTOLS = {"trace": (0.1, 0.02), "diagonal": (0.3, 0.1)}


# --------------------------------------------------------------------- accuracy and its price


@kinds
@pytest.mark.slow
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
@pytest.mark.slow
def test_derivatives_are_the_contraction_with_the_weights(what, name):
    """In the direction A it is the value; in another one it is unbiased."""
    for spectrum in SPECTRA:
        found = numbers(what, name, spectrum, RTOLS[what][1])
        along, across = found.tangents[:, 0], found.tangents[:, 1]
        np.testing.assert_allclose(along, found.value, rtol=1e-8, atol=1e-12)
        expected = 1.0 if what == "diagonal" else N
        errors = (across - expected).reshape(COUNT, -1)
        deviation = errors.std(axis=0, ddof=1) / 10
        assert np.all(np.abs(errors.mean(axis=0)) <= 4.5 * deviation + 1e-10)
        assert np.mean(np.square(errors)) ** 0.5 < 0.5 * expected


@pytest.mark.slow(quick=True)
def test_a_sketch_is_prepared_where_it_pays():
    """Not for a flat spectrum, where the numbers are Hutchinson's; for a decaying one it saves
    products, and a tighter tolerance takes a larger one, a rank of 50 at once one of 64.
    """
    flat, plain = (numbers("trace", name, "flat", 0.02) for name in ("xtrace", "hutchinson"))
    np.testing.assert_allclose(flat.value, plain.value, rtol=1e-12)
    np.testing.assert_array_equal(flat.num_matvecs, plain.num_matvecs)
    decaying, plain = (numbers("trace", name, "exp0.9", 0.02) for name in ("xtrace", "hutchinson"))
    assert np.median(decaying.num_matvecs) < 0.5 * np.median(plain.num_matvecs)
    assert np.all(decaying.std_err > 0)
    tight = numbers("trace", "xtrace", "exp0.9", 1e-3, count=10)
    assert np.all(tight.std_err > 0)
    assert np.all(tight.result == SUCCESSFUL)
    assert np.median(tight.num_matvecs) < N  # with 64 columns
    assert relative_error(tight, "trace", matrix("exp0.9")).max() < 3e-3
    step = numbers("trace", "xtrace", "step1e-3", 0.01, count=20)
    assert np.median(step.num_matvecs) <= 8 + 2 * 64 + 8


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
    assert (look.num_matvecs, look.dof) == (8, 7)
    enough = float(stdtrit(7, 0.975) * look.std_err[0] / look.value[0])
    for rtol, ends in ((1.001 * enough, True), (0.999 * enough, False)):
        again = numbers("trace", "hutchinson", "flat", rtol, count=1)
        assert bool(again.num_matvecs == 8) == ends


def test_samples_are_those_of_hutchinson():
    """Panels of eight, each with probes of its own; the error is no smaller than their scatter."""
    found = numbers("trace", "hutchinson", "flat", 0.005)
    _, folded = jr.split(jr.fold_in(keys(COUNT)[0], 0))
    panels = int(found.num_matvecs[0]) // 8
    assert panels > 1
    draw = jax.jit(lambda j: tr.RademacherSampler()(jr.fold_in(folded, j), N, 8, float))
    omega = [np.asarray(draw(j)) for j in range(panels)]
    entries = [o * (matrix("flat") @ o) for o in omega]
    samples = np.concatenate([e.sum(axis=0) for e in entries])
    np.testing.assert_allclose(found.value[0], samples.mean(), rtol=1e-12)
    least = np.mean([np.sqrt(e.var(axis=1, ddof=1).sum()) for e in entries])
    deviation = max(samples.std(ddof=1), least)
    np.testing.assert_allclose(found.std_err[0], deviation / np.sqrt(len(samples)), rtol=1e-9)
    assert found.dof[0] == len(samples) - 1


# ----------------------------------------------------------------- budgets that are too small


def test_not_converged():
    """The best estimate, with its error bar, from at most max_k products."""
    for spectrum, rtol in (("flat", 1e-6), ("poly", 1e-9)):
        found = numbers("trace", "xtrace", spectrum, rtol, max_k=61, count=5)
        assert np.all(found.result == tr.RESULTS.not_converged._value)
        assert np.all(found.num_matvecs <= 61)
        assert np.all(found.num_matvecs > 61 - 8)
        assert np.all(found.std_err > 0)
        size = found.std_err / np.trace(matrix(spectrum))
        assert np.all(relative_error(found, "trace", matrix(spectrum)) < 5 * size)
        assert np.all(size < 0.5)
    assert np.all(numbers("trace", "xtrace", "flat", 0.5, max_k=61, count=5).result == SUCCESSFUL)


def test_max_k_smaller_than_a_panel():
    found = numbers("trace", "xtrace", "flat", 1e-6, max_k=2, count=5)
    assert np.all(found.num_matvecs == 2)
    assert np.all(found.result == tr.RESULTS.not_converged._value)
    # Two samples have one degree of freedom: P(|t_1| > 1000) = 6e-4.
    expected = np.trace(matrix("flat"))
    assert np.all(np.abs(found.value - expected) < 1000 * found.std_err)
    assert np.all(found.std_err < expected)
    loose = numbers("trace", "xtrace", "flat", 50.0, max_k=2, count=5)
    assert np.all(loose.result == SUCCESSFUL)
    np.testing.assert_array_equal(loose.value, found.value)


@pytest.mark.parametrize("what", FUNCTIONS)
def test_degenerate_operators(what):
    """Rank 5 is captured by the first sketch, at any scale; zero ends with the first panel, NaN
    as soon as it shows.
    """
    basis = random_unitary(np.random.default_rng(2), N)[:, :5]
    low_rank = (basis * np.arange(1.0, 6)) @ basis.T

    def solve(matrix):
        return run(what, ESTIMATORS["xtrace"], N, 2, matrix, 1e-10)

    for scale in (1.0, 1e200, 1e-200):
        found = solve(scale * low_rank)
        assert np.all(found.result == SUCCESSFUL)
        assert np.all(found.num_matvecs <= 8 + 32 + 8)
        assert np.all(found.std_err > 0)  # rounding
        assert np.linalg.norm(found.std_err / scale) <= 1e-12 * 15
        found.value = found.value / scale
        assert relative_error(found, what, low_rank).max() < 1e-12
    zero = solve(0 * low_rank)
    assert np.all(zero.result == SUCCESSFUL)
    assert np.all(zero.num_matvecs == 8)
    assert not np.any(zero.value)
    assert not np.any(zero.std_err)
    low_rank[3, 4] = np.nan
    broken = solve(low_rank)
    assert np.all(broken.result == tr.RESULTS.nonfinite_operator._value)
    assert np.all(broken.num_matvecs == 8)
    assert np.all(np.isnan(broken.value if what == "trace" else broken.value[:, 3]))


@pytest.mark.parametrize("what", FUNCTIONS)
def test_scales(what):
    """A power of two changes neither the number of products nor a digit, though squares overflow.
    (Nor are numbers of other dtypes made from those of float32.)
    """
    dense, count, rtol = matrix("exp0.9"), 3, 0.05 if what == "trace" else 0.4
    given = what, ESTIMATORS["xtrace"], N
    usual = run(*given, count, dense, rtol)
    assert usual.num_matvecs.max() > 24
    for scale in (2.0**600, 2.0**-600):
        found = run(*given, count, scale * dense, rtol)
        np.testing.assert_array_equal(found.result, usual.result)
        np.testing.assert_array_equal(found.num_matvecs, usual.num_matvecs)
        np.testing.assert_allclose(found.value / scale, usual.value, rtol=1e-12)
        np.testing.assert_allclose(found.std_err / scale, usual.std_err, rtol=1e-9)
    narrow = keys(3), 3, dense.astype(np.float32), 0.1
    shapes = jax.eval_shape(partial(program, *given), *narrow)
    assert all(shapes[name].dtype == np.float32 for name in ("value", "std_err", "tangents"))


def test_what_is_not_hermitian():
    """Complex, with a sketch: a diagonal takes products with the adjoint."""
    rng, n = np.random.default_rng(3), 120
    left, right = random_unitary(rng, n, np.complex128), random_unitary(rng, n, np.complex128)
    dense = (left * 0.8 ** np.arange(n)) @ (left + 0.3 * right).conj().T
    found = run("diagonal", tr.XTraceEstimator(), 110, 20, dense, 0.1, tags=())
    assert found.value.dtype == np.complex128
    assert np.all(found.result == SUCCESSFUL)
    assert found.num_matvecs.max() > 8 + 32
    met = relative_error(found, "diagonal", dense) <= 0.1
    assert met.mean() >= share_less_noise(0.95, 20)
    np.testing.assert_allclose(found.tangents[:, 0], found.value, rtol=1e-8, atol=1e-12)


def test_half_precision_does_not_converge_beyond_its_rounding():
    """Also of the exact value: the error bar holds what products in bfloat16 leave open."""
    n = 150
    noise = np.random.default_rng(0).standard_normal((n, n))
    dense = jnp.asarray(np.eye(n) + 0.01 * (noise + noise.T), jnp.bfloat16)
    expected = np.trace(np.asarray(dense.astype(float)))
    operator = by_products(dense, PSD)
    options = {"rtol": 1e-6, "max_k": 50, "estimator": tr.HutchinsonEstimator()}
    found = over_keys(20, lambda key: tr.trace(key, operator, **options))
    assert np.all(found.result == tr.RESULTS.not_converged)
    assert found.value.dtype == jnp.float32
    # 20 errors of some 3 standard errors at most: P(|t_47| > 5) = 1e-5.
    assert np.all(np.abs(found.value - expected) < 5 * found.std_err)


# --------------------------------------------------------------------------- transformations


def test_lanes_of_a_vmap_are_the_calls():
    """Whatever the other lanes need; derivatives included, in reverse mode."""
    stack = np.stack([matrix(spectrum) for spectrum in SPECTRA])

    def value(scale, key, dense):
        operator = by_products(scale * dense, PSD)
        options = {"rtol": 0.02, "estimator": ESTIMATORS["xtrace"], "max_k": N}
        solution = tr.trace(key, operator, **options)
        return solution.value, (solution.std_err, solution.num_matvecs)

    both = jax.vmap(jax.value_and_grad(value, has_aux=True), (None, None, 0))
    both = jax.jit(jax.vmap(both, (None, 0, None)))
    (values, (std_errs, spent)), slopes = both(1.0, keys(COUNT)[:2], stack)
    assert len(set(np.asarray(spent).ravel().tolist())) > 2
    for i, spectrum in enumerate(SPECTRA):
        alone = numbers("trace", "xtrace", spectrum, 0.02)
        np.testing.assert_allclose(values[:, i], alone.value[:2], rtol=1e-9)
        np.testing.assert_allclose(std_errs[:, i], alone.std_err[:2], rtol=1e-6)
        np.testing.assert_array_equal(spent[:, i], alone.num_matvecs[:2])
        np.testing.assert_allclose(slopes[:, i], alone.tangents[:2, 0], rtol=1e-8)


def test_blocks_of_a_pytree():
    """Block traces and the diagonal have the structure of the operator, and norms of the errors
    decide.
    """
    dense = jnp.asarray(matrix("exp0.9"))
    structure = jax.eval_shape(lambda: {"a": jnp.zeros((5, 20)), "b": jnp.zeros(200)})

    def product(x):
        y = dense @ jnp.concatenate([x["a"].ravel(), x["b"]])
        return {"a": y[:100].reshape(5, 20), "b": y[100:]}

    operator = lx.FunctionLinearOperator(product, structure, PSD)
    entries = np.diag(dense)
    expected = np.array([entries[:100].sum(), entries[100:].sum()])
    options = {"rtol": 0.2, "estimator": tr.HutchinsonEstimator()}
    found = over_keys(40, lambda key: tr.block_traces(key, operator, **options))
    assert np.all(found.result == tr.RESULTS.successful)
    errors = np.stack([found.value["a"], found.value["b"]], 1) - expected
    std_errs = np.stack([found.std_err["a"], found.std_err["b"]], 1)
    assert np.all(np.abs(errors) <= 6 * std_errs)
    met = np.linalg.norm(errors, axis=1) <= 0.2 * np.linalg.norm(expected)
    assert met.mean() >= share_less_noise(0.95, 40)
    shapes = jax.eval_shape(lambda: tr.diagonal(KEY, operator, rtol=0.1)).value
    assert jax.tree.map(lambda x: x.shape, shapes) == {"a": (5, 20), "b": (200,)}


def test_what_is_known_exactly_counts():
    """The tolerance is relative to the whole value, and `K + s I` spends nothing on s I."""
    kernel = by_products(matrix("exp0.9"), PSD)
    identity = lx.IdentityLinearOperator(kernel.in_structure())
    share = np.trace(matrix("exp0.9")) / (np.trace(matrix("exp0.9")) + 10 * N)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def solve(s, rtol, atol):
        options = {"estimator": tr.HutchinsonEstimator(), "max_k": 60}
        solution = tr.trace(KEY, kernel + s * identity, rtol=rtol, atol=atol, **options)
        return solution.value, solution.num_matvecs

    (alone, spent), slope = solve(0.0, 0.2, 0.0)
    assert spent < 56
    np.testing.assert_allclose(slope, N, rtol=1e-12)
    (noisy, spent_on_noisy), _ = solve(10.0, 0.2 * share, 0.0)
    assert spent == spent_on_noisy
    np.testing.assert_allclose(noisy - 10 * N, alone, rtol=1e-9)
    (absolute, _), _ = solve(0.0, 0.0, 0.2 * alone)
    np.testing.assert_allclose(absolute, alone, rtol=1e-12)
    assert tr.trace(KEY, identity, rtol=1e-3).num_matvecs == 0


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


# ------------------------------------------------------------------------------- the constants


def test_the_norm_of_many_errors_is_more_certain():
    """The factor against quantiles of chi^2, and one error as a number."""
    factor = jax.jit(norm_factor)
    assert factor(np.float64(3.0)) == 1
    for entries in (2, 2000):
        nu = max(1, entries / 2)
        exact = np.sqrt(chdtri(nu, 0.05) / nu / chdtri(1, 0.05))
        equal = np.repeat([1e-30, 0.0], [entries, 7])
        np.testing.assert_allclose(factor(equal), exact, rtol=0.03)
    # No error at all counts as infinitely many.
    none = factor(np.zeros(3))
    np.testing.assert_allclose(none, 1 / np.sqrt(chdtri(1, 0.05)), rtol=0.03)


def test_student_quantiles():
    dof = np.array([1, 2, 7, 60, 1000])
    for level in (0.5, 0.999):
        found = student_quantile(1 - level, dof, jnp.ones(()))
        np.testing.assert_allclose(found, stdtrit(dof, (1 + level) / 2), rtol=1e-6)

"""The published experiments, and error bars over many keys: n = 500 and 1000."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from benchmarks.common import eight_spectra, with_eigenvalues

from .. import reference
from ..helpers import PROBED, PSD, drawn, keys, over_keys, spectra, with_spectrum

pytestmark = pytest.mark.slow


@cache
def matrix(name, n):
    # In a random basis: a diagonal matrix would flatter every estimator.
    rng = np.random.default_rng(list(spectra(n)).index(name))
    return with_spectrum(rng, spectra(n)[name])


METHODS = {
    "xtrace": (reference.published_xtrace, 2),
    "xnystrace": (reference.published_xnystrace, 1),
}


def published(method, k, name, n, count):
    """The samples of the published algorithm for each key, on probes of the same distribution."""
    algorithm, matvecs = METHODS[method]
    sets = [drawn(tr.SphereSampler(), key, n, k // matvecs) for key in keys(count)]
    return np.stack([algorithm(matrix(name, n), omega) for omega in sets])


@pytest.mark.parametrize("k", [20, 100, 300])
@pytest.mark.parametrize("method", METHODS)
def test_published_experiment(method, k):
    """arXiv:2301.07825: the median error is that of the published algorithm within sampling noise,
    or smaller.

    The median of 50 errors |N(0, s)| is known to 1 / (2 f sqrt(50)) = 17 % (f the density of |x|
    at its median, 0.67 s), the ratio of two to 23 %: e^(3 * 0.23) = 2 is three deviations.
    """
    n, count = 1000, 50
    for name in ("exp0.7", "step1e-8") if k == 300 else spectra(n):
        truth = spectra(n)[name].sum()
        given = keys(count), jnp.asarray(matrix(name, n)), k, PROBED[method], PSD
        ours = np.abs(np.asarray(reference.solutions(*given).value) / truth - 1)
        theirs = np.abs(published(method, k, name, n, count).mean(axis=1) / truth - 1)
        # Below 1e-14 both are rounding.
        assert np.median(ours) <= max(2 * np.median(theirs), 1e-14), name
        # Captured to rounding. (At k = 100 the algorithms themselves are at 3e-9 and 3e-14.)
        if name == "exp0.7" and k >= 300:
            assert np.all(ours < 1e-14)
        # Past the step all that is left is 1e-5 of 50, and of that the estimate knows a thousandth.
        if name == "step1e-8" and method == "xnystrace" and k >= 100:
            assert np.median(ours) < 1e-8


@cache
def errors(estimator, k, name):
    """The errors of 1000 values, and their standard errors."""
    given = keys(1000), jnp.asarray(matrix(name, 500)), k, PROBED[estimator], PSD
    solution = reference.solutions(*given)
    return np.asarray(solution.value) - spectra(500)[name].sum(), np.asarray(solution.std_err)


FOUR = ("flat", "poly", "exp0.9", "step1e-3")


@pytest.mark.parametrize("estimator", PROBED)
def test_coverage(estimator):
    """1.96 standard errors cover the truth in 92 to 98 % of cases, Hutch++ in 90 % at least; and
    E[std_err^2] = Var(value), which with 1000 keys is known to 4.5 %, with heavy tails to less.

    Of 1000 keys the coverage has a standard deviation of 0.7 %. (Hutch++ has k / 3 samples only,
    whose distribution has heavier tails than the t distribution where the spectrum decays.)
    """
    least = 0.90 if estimator == "hutch++" else 0.92
    for name in FOUR:
        error, std_err = errors(estimator, 60, name)
        coverage = np.mean(np.abs(error) <= 1.96 * std_err)
        relative = np.sqrt(np.mean(error**2)) / spectra(500)[name].sum()
        ratio = np.mean(std_err**2) / np.var(error, ddof=1)
        assert relative > 1e-12, name
        assert least <= coverage <= 0.98, (name, coverage)
        if estimator in METHODS:
            assert 0.8 <= ratio <= 1.25, (name, ratio)


def uncovered(call, truth, n, count):
    """The spectra on which 95 % intervals cover less than 92 %, over other keys than the constants
    were measured with, entry by entry.
    """

    @jax.jit
    def ends(keys, matrix):
        def one(key):
            return call(key, lx.MatrixLinearOperator(matrix, PSD)).interval()

        return jax.lax.map(one, keys, batch_size=50)

    found = {}
    for name, eigenvalues in eight_spectra(n).items():
        matrix = jnp.asarray(with_eigenvalues(eigenvalues))
        lower, upper = map(np.asarray, ends(keys(count, seed=11), matrix))
        expected = np.asarray(truth(matrix))
        found[name] = np.mean((lower <= expected) & (expected <= upper))
    return {name: share for name, share in found.items() if share < 0.92}


@pytest.mark.parametrize("k", [8, 12, 24])
@pytest.mark.parametrize("name", PROBED)
def test_intervals_of_traces_from_few_products(name, k):
    call = partial(tr.trace, k=k, estimator=PROBED[name])
    assert uncovered(call, jnp.trace, 200, 1000) == {}


@pytest.mark.parametrize("k", [8, 16])
@pytest.mark.parametrize("name", [*PROBED, "frobenius_norm", "row_norms"])
def test_intervals_of_diagonals_and_norms_from_few_products(name, k):
    if name in PROBED:
        call, truth = partial(tr.diagonal, k=k, estimator=PROBED[name]), jnp.diagonal
    else:
        call = partial(getattr(tr, name), k=k)
        truth = partial(jnp.linalg.norm, axis=1 if name == "row_norms" else None)
    assert uncovered(call, truth, 100, 300) == {}


KERNEL = np.random.default_rng(0).uniform(size=(500, 2))


def test_derivative_in_the_length_scale_of_a_kernel():
    """The weights see the kernel's few large eigenvalues, which its derivative shares."""
    squares = jnp.asarray(np.sum((KERNEL[:, None] - KERNEL[None]) ** 2, axis=-1))

    def derivatives(estimator):
        def value(length, key):
            kernel = jnp.exp(-squares / (2 * length**2)) + 0.01 * jnp.eye(500)
            return tr.trace(key, lx.MatrixLinearOperator(kernel, PSD), 60, estimator).value

        return over_keys(60, partial(jax.grad(value), 0.3))

    xtrace, hutchinson = (derivatives(PROBED[name]) for name in ("xtrace", "hutchinson"))
    # The diagonal of K is constant, so the exact derivative is 0: |mean| < 4 standard errors.
    for samples in (xtrace, hutchinson):
        assert abs(samples.mean()) < 4 * samples.std(ddof=1) / np.sqrt(60)
    # Of 60 samples each, a ratio of standard deviations is known to 13 %.
    assert hutchinson.std(ddof=1) > 50 * xtrace.std(ddof=1)

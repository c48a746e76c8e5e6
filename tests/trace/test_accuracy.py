"""Exact where it can be, never broken, and as accurate as published."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tr

from .. import reference
from ..helpers import (
    CLASSES,
    ESTIMATORS,
    PROBED,
    PSD,
    by_products,
    keys,
    random_unitary,
    spectra,
    variant,
    with_spectrum,
)

# ------------------------------------------------------- the experiment of arXiv:2301.07825

N, COUNT = 1000, 50
SPECTRA = spectra(N)
METHODS = {
    "xtrace": (tr.XTraceEstimator(), reference.published_xtrace, 2),
    "xnystrace": (tr.XNysTraceEstimator(), reference.published_xnystrace, 1),
}


@cache
def matrix(name):
    # In a random basis: a diagonal matrix would flatter every estimator.
    rng = np.random.default_rng(list(SPECTRA).index(name))
    return with_spectrum(rng, SPECTRA[name])


def relative_errors(method, k, name):
    """Of the package, and of the published algorithm on the same probes, for 50 keys each."""
    estimator, published, matvecs = METHODS[method]
    truth = SPECTRA[name].sum()
    solution = reference.solutions(keys(COUNT), jnp.asarray(matrix(name)), k, estimator, PSD)
    sample = jax.jit(lambda key: tr.SphereSampler().probes(key, N, k // matvecs, np.dtype(float)))
    theirs = [published(matrix(name), np.asarray(sample(key))).mean() for key in keys(COUNT)]
    ours = np.abs(np.asarray(solution.value) - truth) / truth
    return ours, np.abs(np.array(theirs) - truth) / truth


@pytest.mark.slow
@pytest.mark.parametrize("k", [20, 100, 300])
@pytest.mark.parametrize("method", METHODS)
def test_published_experiment(method, k):
    """The median error is that of the published algorithm within sampling noise, or smaller.

    The median of 50 errors |N(0, s)| is known to 1 / (2 f sqrt(50)) = 17 % (f the density of |x|
    at its median, 0.67 s), the ratio of two to 23 %: e^(3 * 0.23) = 2 is three deviations.
    """
    for name in SPECTRA:
        ours, theirs = relative_errors(method, k, name)
        print(f"{method} k={k} {name}: {np.median(ours):.1e} (published {np.median(theirs):.1e})")
        # Below 1e-14 both are rounding.
        assert np.median(ours) <= max(2 * np.median(theirs), 1e-14), name
        # Captured to rounding. (At k = 100 the algorithms themselves are at 3e-9 and 3e-14.)
        if name == "exp0.7" and k >= 300:
            assert np.all(ours < 1e-14)
        # Past the step all that is left is 1e-5 of 50, and of that the estimate knows a thousandth.
        if name == "step1e-8" and method == "xnystrace" and k >= 100:
            assert np.median(ours) < 1e-8


# -------------------------------------------------------------------------- exact recovery


@pytest.mark.parametrize("dtype", [variant(np.float64), np.complex128])
@pytest.mark.parametrize(
    "name",
    ["hutch++", variant("hutch++-rademacher"), "xtrace", variant("xtrace-plain"), "xnystrace"],
)
def test_rank_below_the_number_of_probes(name, dtype):
    """Exact to rounding: rank 4 with 5 probes or more, Hermitian or (where it may be) not."""
    n, rank, k = 60, 4, 15
    rng = np.random.default_rng(0)
    left, right = (random_unitary(rng, n, dtype)[:, :rank] for _ in range(2))
    values = np.array([1.0, 2.0, 3.0, 4.0])
    tags = PSD if name.startswith("xnystrace") else ()
    cases = [(left * values) @ left.conj().T]
    if tags == ():
        cases.append((left * values) @ (left + 0.3 * right).conj().T)
    for dense in cases:
        solution = reference.solutions(
            keys(20), jnp.asarray(dense.astype(dtype)), k, ESTIMATORS[name], tags
        )
        # A hundred roundings of the norm.
        bound = 100 * np.finfo(dtype).eps * np.linalg.norm(dense)
        assert np.all(np.abs(np.asarray(solution.value) - np.trace(dense)) < bound)
        assert np.all(np.asarray(solution.std_err) < bound)


@pytest.mark.parametrize(
    ("name", "n", "dtype"),
    [
        ("exact", 1, np.float64),
        ("xtrace", 1, np.complex64),
        ("xnystrace", 3, np.float64),
        ("auto", 10, np.complex64),
    ],
)
def test_budget_of_n_or_more(name, n, dtype):
    dense = with_spectrum(np.random.default_rng(n), np.arange(1.0, n + 1), dtype)
    for k in (n, 10 * n):
        if k < CLASSES[name].smallest and k < n:
            continue
        operator = by_products(dense, PSD)
        solution = tr.trace(keys(1)[0], operator, k, CLASSES[name])
        np.testing.assert_allclose(solution.value, np.trace(dense), rtol=10 * np.finfo(dtype).eps)
        assert solution.std_err == 0
        assert solution.num_matvecs == n


# ------------------------------------------------------------------------------ robustness

SCALES = [1.0, 1e20, 1e-20]


def low_rank(rank, dtype):
    basis = random_unitary(np.random.default_rng(rank), 200, dtype)[:, :rank]
    return (basis * np.arange(1.0, rank + 1)) @ basis.conj().T


@pytest.mark.parametrize(
    ("name", "dtype", "k"),
    [
        *((name, np.complex64, 30) for name in PROBED if name != "xtrace"),
        ("xtrace", np.float32, 60),
        variant("xtrace", np.complex64, 30),
        *(variant(name, np.float32, 60) for name in PROBED if name != "xtrace"),
        *(variant(name, np.float64, 30) for name in PROBED),
    ],
)
def test_low_rank_at_every_scale(name, dtype, k):
    """Never NaN; right to 100 eps, or 5 standard errors for Hutchinson; 0 is exactly 0."""
    for rank in (0, 1, 5):
        for scale in SCALES:
            dense = (scale * low_rank(rank, np.result_type(dtype, np.float64))).astype(dtype)
            truth = np.trace(dense.astype(np.complex128))
            solution = reference.solutions(keys(3), jnp.asarray(dense), k, PROBED[name], PSD)
            error = np.abs(np.asarray(solution.value).astype(np.complex128) - truth)
            std_err = np.asarray(solution.std_err).astype(np.float64)
            what = (rank, scale, error, std_err)
            assert solution.value.dtype == dtype
            assert np.all(np.asarray(solution.result == tr.RESULTS.successful)), what
            if rank == 0:
                assert np.all(error == 0), what
                assert np.all(std_err == 0), what
            elif name == "hutchinson":
                assert np.all(error < 5 * std_err), what
                # The deviation of a mean of k is at most sqrt(2 / k) |A|_F.
                size = np.linalg.norm(dense.astype(np.complex128))
                assert np.all(std_err < 2 * np.sqrt(2 / k) * size), what
            else:
                bound = 100 * np.finfo(dtype).eps * abs(truth)
                assert np.all(error < bound), what
                assert np.all(std_err < bound), what


def smallest_sizes():
    for name, estimator in ESTIMATORS.items():
        for n, k in [(2, 1), (3, 1), (3, 2), (5, 4)]:
            if name != "exact" and k >= estimator.smallest:
                yield name, n, k


@pytest.mark.variant
@pytest.mark.parametrize(("name", "n", "k"), list(smallest_sizes()))
def test_the_smallest_sizes(name, n, k):
    """Unbiased with one probe, of two dimensions: a z-test over 1000 keys (|z| < 4: 6e-5)."""
    estimator = ESTIMATORS[name]
    dense = with_spectrum(np.random.default_rng(n), np.arange(1.0, n + 1))
    solution = reference.solutions(keys(1000), jnp.asarray(dense), k, estimator, PSD)
    error = np.asarray(solution.value) - np.trace(dense)
    standard = error.std(ddof=1) / np.sqrt(1000)
    assert 0 < standard < 0.03 * np.trace(dense)
    assert abs(error.mean()) < 4 * standard
    assert np.all(np.asarray(solution.num_matvecs) <= k)


# (A third of the budget, as Hutch++'s probes are, is far from spanning the space.)
@pytest.mark.parametrize(
    ("name", "k", "spectrum"),
    [
        variant("hutch++", 48, "poly"),
        variant("hutch++", 49, "flat"),
        variant("hutch++-rademacher", 48, "poly"),
        variant("hutch++-rademacher", 49, "flat"),
        variant("hutchinson", 48, "poly"),
        variant("hutchinson", 49, "flat"),
        variant("xtrace", 48, "poly"),
        ("xtrace", 49, "flat"),
        variant("xtrace-plain", 48, "poly"),
        variant("xtrace-plain", 49, "flat"),
        ("xnystrace", 48, "poly"),
        variant("xnystrace", 49, "flat"),
    ],
)
def test_budget_just_below_n(name, k, spectrum):
    """No blow-up where the probes nearly span the space (others lose a factor of 57 there).

    Hutchinson's standard deviation is at most sqrt(2 / k) |A|_F = 0.2 |A|_F: five of them.
    XNysTrace has its own test of the standard error.
    """
    eigenvalues = spectra(50)[spectrum]
    dense = with_spectrum(np.random.default_rng(0), eigenvalues)
    solution = reference.solutions(keys(50), jnp.asarray(dense), k, ESTIMATORS[name], PSD)
    error = np.abs(np.asarray(solution.value) - eigenvalues.sum())
    assert np.all(error < np.linalg.norm(dense))
    if name != "xnystrace":
        assert np.all(error < 6 * np.asarray(solution.std_err))


@pytest.mark.slow
@pytest.mark.parametrize("spectrum", ["flat", "poly"])
@pytest.mark.parametrize("k", [48, 49])
def test_error_bar_of_xnystrace_just_below_n(k, spectrum):
    """Right in the mean square; a single one is not to be relied on.

    All samples then test the same two or three dimensions that the probes leave out, so that they
    agree by accident: of 2000 errors 1 % (k = 48) and 10 % (k = 49) exceed 6 standard errors.
    A variance of 2000 numbers is known to 3 %, with these heavy tails to some 6 %.
    """
    eigenvalues = spectra(50)[spectrum]
    dense = with_spectrum(np.random.default_rng(0), eigenvalues)
    estimator = tr.XNysTraceEstimator()
    solution = reference.solutions(keys(2000), jnp.asarray(dense), k, estimator, PSD)
    ratio = np.mean(np.square(solution.std_err)) / np.var(solution.value, ddof=1)
    assert 0.8 <= ratio <= 1.25
    # A tenth of Hutchinson's error, which is sqrt(2 / k) of the norm without the diagonal.
    assert np.std(solution.value) < 0.02 * np.linalg.norm(dense)

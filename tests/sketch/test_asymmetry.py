"""Operators that are tagged symmetric or semidefinite, and are not: the products say so."""

from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from ..helpers import PSD, keys, spectra, with_spectrum

pytestmark = pytest.mark.slow(quick=True)

N, K = 60, 16
NYSTROM = tr.XNysTraceEstimator()
ESTIMATES = {
    "trace": lambda key, operator: tr.trace(key, operator, K, NYSTROM),
    "wide": lambda key, operator: tr.trace(key, operator, 2 * K, NYSTROM),
    "diagonal": lambda key, operator: tr.diagonal(key, operator, K, NYSTROM),
}


def lopsided(share, decay=0.8, dtype=np.float64):
    """A matrix whose part with X^H = -X has this share of the norm of the rest."""
    symmetric = with_spectrum(np.random.default_rng(2), decay ** np.arange(N), dtype)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((N, N))
    if dtype == np.complex128:
        x = x + 1j * rng.standard_normal((N, N))
    x = (x - x.conj().T) / 2
    return symmetric + share * np.linalg.norm(symmetric) / np.linalg.norm(x) * x


@partial(jax.jit, static_argnums=0)
def _solve(what, keys, array):
    operator = lx.MatrixLinearOperator(array, PSD)
    return jax.lax.map(lambda key: ESTIMATES[what](key, operator), keys)


def solve(what, array, count=20):
    """The solution for each key, twenty in a program."""
    chunks = np.split(keys(count), count // 20)
    found = [_solve(what, chunk, array) for chunk in chunks]
    return jax.tree.map(lambda *x: np.concatenate(x), *found)


@pytest.mark.parametrize(
    ("what", "dtype"), [("trace", float), ("trace", complex), ("diagonal", float)]
)
def test_an_asymmetric_operator_is_reported(what, dtype):
    """And NaN as such, and nothing for a symmetric one."""
    for share in (0.1, 1.0):
        found = solve(what, lopsided(share, dtype=dtype))
        assert np.all(found.result == tr.RESULTS.not_symmetric), share
    array = lopsided(0.0, dtype=dtype)
    assert not np.any(solve(what, array).result == tr.RESULTS.not_symmetric)
    array[2, 3] = np.nan
    assert np.all(solve(what, array).result == tr.RESULTS.nonfinite_operator)


@pytest.mark.parametrize("what", ["trace", "diagonal"])
@pytest.mark.parametrize("share", [1e-10, 1e-6, 1e-4])
def test_the_error_of_solves_is_the_precision_of_products(what, share):
    """Estimates are as good as without it, up to its own size, and error bars hold it."""
    array = lopsided(share)
    truth = np.trace(array) if what == "trace" else np.diag(array)
    found, plain = solve(what, array), solve(what, lopsided(0.0))
    assert np.all(found.result == tr.RESULTS.successful)
    error = np.abs(np.asarray(found.value) - truth)
    usual = np.abs(np.asarray(plain.value) - truth)
    size = np.linalg.norm(array)
    assert np.sqrt(np.mean(error**2)) <= 1.5 * np.sqrt(np.mean(usual**2)) + 20 * share * size
    assert np.mean(error <= 3 * np.asarray(found.std_err)) > 0.95


def test_the_value_does_not_rely_on_the_tag():
    """It is Hutchinson's mean of the same products: unbiased, with its standard error."""
    array = lopsided(1.0)
    found = solve("trace", array, 400)
    assert np.all(found.result == tr.RESULTS.not_symmetric)
    errors = np.asarray(found.value) - np.trace(array)
    # z-test of the mean, and a calibrated standard error: 400 keys know a deviation to 4 %.
    assert abs(errors.mean()) < 4 * errors.std(ddof=1) / 20
    assert 0.85 < np.sqrt(np.mean(np.square(found.std_err))) / errors.std(ddof=1) < 1.15


HONEST = {
    **spectra(N),
    "zero": np.zeros(N),
    "rank 3": np.where(np.arange(N) < 3, 1.0, 0.0),
    "steep": 0.3 ** np.arange(N),
}


@pytest.mark.parametrize("dtype", ["float64", "complex64", "bfloat16"])
def test_no_symmetric_operator_is(dtype):
    """With rounding of every kind: of the entries, of the products, of half precision."""
    base = np.complex128 if "complex" in dtype else np.float64
    for spectrum in HONEST.values():
        array = with_spectrum(np.random.default_rng(4), spectrum, base)
        for scale in (1.0, 1e-20, 1e20):
            given = jnp.asarray(scale * array, jnp.dtype(dtype))
            assert not np.any(solve("trace", given).result == tr.RESULTS.not_symmetric)


def test_products_that_are_rounded_more_coarsely():
    """Of a float32 function whose products have 11 bits, as TensorFloat-32 has."""
    array = with_spectrum(np.random.default_rng(5), 0.8 ** np.arange(N)).astype(np.float32)
    short = jnp.asarray(array).astype(jnp.float16)

    def mv(v):
        size = jnp.max(jnp.abs(v))
        product = short.astype(jnp.float32) @ (v / size).astype(jnp.float16).astype(jnp.float32)
        return size * product

    operator = lx.FunctionLinearOperator(mv, jax.ShapeDtypeStruct((N,), jnp.float32), PSD)
    run = jax.jit(lambda keys: jax.lax.map(lambda key: ESTIMATES["trace"](key, operator), keys))
    assert not np.any(run(keys(20)).result == tr.RESULTS.not_symmetric)


def test_what_stays_below_the_limit_does_little_harm():
    """The steepest spectrum there is, with an asymmetry just below the limit of float64."""
    array = lopsided(1e-8, decay=0.6)
    found = solve("wide", array)
    errors = np.abs(np.asarray(found.value) / np.trace(array) - 1)
    successful = np.asarray(found.result == tr.RESULTS.successful)
    assert np.any(successful)
    assert np.all(errors[successful] < 1e-5)


# --- functions of matrices ----------------------------------------------------------------------


def definite(operator):
    return lx.TaggedLinearOperator(operator, PSD)


PLAIN = {"preconditioner": None, "fallback": None}

#: One call for each algorithm. (Its number of products is that with which it takes this path.)
CALLS = {
    "sum by leaving out": lambda key, op: tr.spectral_sum(key, jnp.exp, op, 40),
    "sum, exact": lambda key, op: tr.spectral_sum(key, jnp.exp, op, N),
    "diagonal": lambda key, op: tr.spectral_diagonal(key, jnp.exp, op, 40),
    "count": lambda key, op: tr.eigenvalue_count(key, op, -0.5, 0.5, 40),
    "log-determinant": lambda key, op: tr.logdet(key, definite(op), 10, **PLAIN),
    "inverse": lambda key, op: tr.inverse_trace(key, definite(op), 10, **PLAIN),
    "eigenpairs": lambda key, op: tr.eigenpairs(key, op, 40, 2),
}
SYMMETRIC = lx.symmetric_tag


def kernel_times_diagonal():
    """Not symmetric, although its eigenvalues are real and positive."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 2))
    kernel = np.exp(-np.square(x[:, None] - x).sum(-1))
    return kernel * rng.uniform(0.5, 2, N)


def skew_part():
    """A part with X^H = -X of a hundred-thousandth of the norm, which is complex."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, N, N))
    basis = with_spectrum(rng, 0.9 ** np.arange(N), np.complex128)
    return basis + 1e-5 * (x - x.T + 1j * (y + y.T)) / N


# One for each recurrence, and the exact sum.
FEW = "sum by leaving out", "sum, exact", "count", "log-determinant"


@partial(jax.jit, static_argnums=(2, 3))
def results(keys, array, tag, names=tuple(CALLS)):
    """Of these calls, for each of the keys."""
    operator = lx.MatrixLinearOperator(array, tag)
    return jax.lax.map(
        lambda key: {name: CALLS[name](key, operator).result for name in names}, keys
    )


@pytest.mark.parametrize(
    ("array", "given"),
    # (Lineax' symmetric tag is for real operators.)
    [(kernel_times_diagonal().astype(np.float32), (SYMMETRIC,)), (skew_part(), (PSD, FEW))],
    ids=["float32", "complex128"],
)
def test_functions_of_an_asymmetric_operator_are_reported(array, given):
    """What is not an error bar's to say: the result is `not_symmetric`."""
    for name, found in results(keys(8), array, *given).items():
        assert np.all(found == tr.RESULTS.not_symmetric), name


def test_functions_of_symmetric_operators_are_not_reported():
    """With rounding of every kind, of extreme size, and invariant spaces."""
    for spectrum in HONEST.values():
        array = with_spectrum(np.random.default_rng(4), spectrum)
        for scale in (1.0, 1e-15):
            given = (scale * array).astype(np.float32)
            for name, found in results(keys(8), given, SYMMETRIC).items():
                assert not np.any(found == tr.RESULTS.not_symmetric), name

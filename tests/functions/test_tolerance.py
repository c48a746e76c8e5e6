"""Spectral sums and diagonals of functions with a tolerance: kept, differentiated, in `vmap`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tr

from ..helpers import PSD, by_products, keys, with_spectrum

N = 150
SPECTRA = {"flat": np.linspace(1, 3, N), "decaying": 1 / np.arange(1.0, N + 1) ** 2}
FUNCTIONS = {"log1p": jnp.log1p, "sqrt": lambda x: jnp.sqrt(jnp.maximum(x, 0))}
WITH_POLE = [*FUNCTIONS.values(), lambda x: jnp.log(x - 0.5)]
CALLS = {"sum": tr.spectral_sum, "diagonal": tr.spectral_diagonal}
COUNT = 30


def matrix_of(name):
    return with_spectrum(np.random.default_rng(0), SPECTRA[name])


@partial(jax.jit, static_argnums=(0, 1))
def run(call, max_k, matrix, number, rtol, keys):
    """One program serves all spectra, functions and tolerances."""

    def one(key):
        fn = lambda x: jax.lax.switch(number, WITH_POLE, x)  # noqa: E731
        return CALLS[call](key, fn, by_products(matrix, PSD), rtol=rtol, max_k=max_k)

    return jax.lax.map(one, keys)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.slow(quick=True)
def test_the_tolerance_is_kept(call):
    """By 95 % of the calls of every cell, less three standard errors of the count, and by fewer
    products where it is loose. What cannot be done is told.
    """
    allowed = 0.95 - 3 * np.sqrt(0.95 * 0.05 / COUNT)

    def solve(matrix, number, rtol):
        return jax.device_get(run(call, None, matrix, number, rtol, keys(COUNT)))

    for name in SPECTRA:
        matrix = matrix_of(name)
        values, basis = np.linalg.eigh(matrix)
        for number, fn in enumerate(FUNCTIONS.values()):
            of_values = np.asarray(fn(values))
            truth = of_values.sum() if call == "sum" else np.square(basis) @ of_values
            spent = []
            for rtol in (1e-1, 1e-2, 1e-3):
                found = solve(matrix, number, rtol)
                errors = np.linalg.norm((found.value - truth).reshape(COUNT, -1), axis=1)
                within = np.mean(errors <= rtol * np.linalg.norm(truth))
                assert within >= allowed, (name, number, rtol, within)
                assert np.all(found.result == tr.RESULTS.successful)
                quadrature = np.linalg.norm(found.quadrature_error.reshape(COUNT, -1), axis=1)
                assert np.all(quadrature <= 1.1 * rtol * np.linalg.norm(truth))
                spent.append(np.median(found.num_matvecs))
            if call == "sum" and name == "flat":
                assert spent[0] < 0.7 * spent[2]
        assert np.all(solve(matrix, 0, 1e-18).result == tr.RESULTS.not_converged)  # exact, rounded
    matrix = matrix_of("decaying")
    few = tr.spectral_sum(keys(1)[0], jnp.log1p, by_products(matrix[:40, :40], PSD), rtol=1e-18)
    assert few.result == tr.RESULTS.not_converged
    outside = solve(matrix, 2, 0.1)
    assert np.all(outside.result == tr.RESULTS.outside_domain)
    assert np.all(np.isnan(outside.value))
    matrix[0, 1] = np.nan
    assert np.all(solve(matrix, 0, 0.1).result == tr.RESULTS.nonfinite_operator)


@pytest.mark.slow(quick=True)
def test_derivatives_and_vmap():
    """A loose tolerance, whose samples converge: the derivatives by the operator and by what the
    function closes over have no bias over keys, and `vmap` gives what single calls give.
    """
    dtype = np.complex128
    matrix = with_spectrum(np.random.default_rng(0), SPECTRA["decaying"], dtype)
    change = with_spectrum(np.random.default_rng(1), np.linspace(-0.5, 1, N), dtype)

    def value(t, shift, key, rtol=0.1):
        operator = by_products(matrix + t.astype(dtype) * change, PSD)
        found = tr.spectral_sum(key, lambda x: jnp.log1p(x + shift), operator, rtol=rtol)
        return found.value, found

    zero = jnp.zeros(())
    grad = jax.grad(value, (0, 1), has_aux=True)
    (by_t, by_shift), found = jax.jit(jax.vmap(grad, (None, None, 0)))(zero, zero, keys(30))
    values, basis = np.linalg.eigh(np.asarray(matrix))
    slopes = 1 / (1 + values)
    inner = (basis.conj().T @ np.asarray(change) @ basis).diagonal().real
    for samples, truth in ((by_t, slopes @ inner), (by_shift, slopes.sum())):
        off = abs(np.mean(samples) - truth)
        assert off < 4 * np.std(samples, ddof=1) / np.sqrt(30) + 1e-6 * abs(truth)
    slope, single = jax.jit(grad)(zero, zero, keys(30)[3])
    np.testing.assert_allclose(single.value, found.value[3], rtol=1e-9)
    np.testing.assert_allclose(slope, (by_t[3], by_shift[3]), rtol=1e-6)
    assert single.num_matvecs == found.num_matvecs[3] < N


def test_budgets_that_are_too_small():
    short = run("sum", 40, matrix_of("decaying"), 0, 1e-6, keys(3))
    assert np.all(short.result == tr.RESULTS.not_converged)
    assert np.all(short.num_matvecs <= 40)

"""Operators that are tagged symmetric and are not: functions of matrices say so."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from ..helpers import PSD, keys, spectra, with_spectrum

N = 60

#: One call for each algorithm. (Its number of products is that with which it takes this path.)
CALLS = {
    "sum by leaving out": lambda key, op: tr.spectral_sum(key, jnp.exp, op, 40),
    "sum, exact": lambda key, op: tr.spectral_sum(key, jnp.exp, op, N),
    "diagonal": lambda key, op: tr.spectral_diagonal(key, jnp.exp, op, 40),
    "count": lambda key, op: tr.eigenvalue_count(key, op, -0.5, 0.5, 40),
    "eigenpairs": lambda key, op: tr.eigenpairs(key, op, 40, 2),
}
IN_ALL_RUNS = ("sum by leaving out", "sum, exact", "diagonal", "count", "eigenpairs")

TAGS = {"real": lx.symmetric_tag, "complex": PSD}  # Lineax' symmetric tag is for real operators


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


@pytest.mark.parametrize("name", IN_ALL_RUNS)
def test_an_operator_that_is_not_symmetric_is_reported(name):
    """What is not an error bar's to say: the result is `not_symmetric`."""
    for make, dtypes, tag in (
        (kernel_times_diagonal, ("float64", "float32"), TAGS["real"]),
        (skew_part, ("complex128",), TAGS["complex"]),
    ):
        for dtype in dtypes:
            array = jnp.asarray(make(), dtype)
            for key in keys(3):
                found = CALLS[name](key, lx.MatrixLinearOperator(array, tag))
                assert found.result == tr.RESULTS.not_symmetric


HONEST = {**spectra(N), "zero": np.zeros(N), "rank 3": np.where(np.arange(N) < 3, 1.0, 0.0)}


@pytest.mark.parametrize("dtype", [np.float32])
@pytest.mark.parametrize("name", IN_ALL_RUNS)
def test_no_symmetric_operator_is(name, dtype):
    """With rounding of every kind, of extreme size, and invariant spaces."""
    tag = TAGS["complex" if np.issubdtype(dtype, np.complexfloating) else "real"]
    wide = np.promote_types(dtype, np.float64)

    def call(key, array):
        return CALLS[name](key, lx.MatrixLinearOperator(array, tag)).result

    call = jax.jit(jax.vmap(call, (0, None)))
    for spectrum in HONEST.values():
        array = with_spectrum(np.random.default_rng(4), spectrum, wide)
        for scale in (1.0, 1e-15):
            results = call(keys(8), jnp.asarray(scale * array, dtype))
            assert not np.any(results == tr.RESULTS.not_symmetric)

"""Operators that are tagged symmetric and are not: functions of matrices say so."""

from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from ..helpers import PSD, keys, spectra, with_spectrum

N = 60


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


@partial(jax.jit, static_argnums=2)
def results(keys, array, tag):
    """Of all calls, for each of the keys."""
    operator = lx.MatrixLinearOperator(array, tag)
    return jax.lax.map(
        lambda key: {name: call(key, operator).result for name, call in CALLS.items()}, keys
    )


@pytest.mark.parametrize(
    ("array", "tag"),
    # (Lineax' symmetric tag is for real operators.)
    [(kernel_times_diagonal().astype(np.float32), SYMMETRIC), (skew_part(), PSD)],
    ids=["float32", "complex128"],
)
def test_an_operator_that_is_not_symmetric_is_reported(array, tag):
    """What is not an error bar's to say: the result is `not_symmetric`."""
    for name, found in results(keys(8), array, tag).items():
        assert np.all(found == tr.RESULTS.not_symmetric), name


HONEST = {**spectra(N), "zero": np.zeros(N), "rank 3": np.where(np.arange(N) < 3, 1.0, 0.0)}


def test_no_symmetric_operator_is():
    """With rounding of every kind, of extreme size, and invariant spaces."""
    for spectrum in HONEST.values():
        array = with_spectrum(np.random.default_rng(4), spectrum)
        for scale in (1.0, 1e-15):
            given = (scale * array).astype(np.float32)
            for name, found in results(keys(8), given, SYMMETRIC).items():
                assert not np.any(found == tr.RESULTS.not_symmetric), name

"""Log-determinants of operators that are indefinite, whatever their tags say; and of operators that
are barely definite, which must not be refused.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from ..helpers import PSD, keys, spectra, with_spectrum
from .test_logdet import shifted

KEY = jr.key(6)
N = 100


def matrix(array):
    return lx.MatrixLinearOperator(jnp.asarray(array), PSD)


@jax.jit
def both(key, array, shift):
    """K + s I, with the shift apart and as part of the matrix."""
    whole = matrix(array + shift * jnp.eye(N, dtype=array.dtype))
    return tr.logdet(key, shifted(array, shift), 40), tr.logdet(key, whole, 40)


@pytest.mark.parametrize(("count", "lift"), [(5, 5.0), (20, -0.1)])
def test_negative_eigenvalues_of_the_size_of_the_others(count, lift):
    """They are seen by every key, with and without a shift that takes away what was added."""
    eigenvalues = np.concatenate([np.linspace(1, 3, N - count), -np.linspace(0.5, 1, count)])
    array = with_spectrum(np.random.default_rng(2), eigenvalues)
    for key in keys(10):
        given = (array + lift * np.eye(N)).astype(np.float32), np.float32(-lift)
        for solution in both(key, *given):
            assert solution.result == tr.RESULTS.outside_domain
            assert np.isnan(solution.value)


def test_the_sketch_alone_shows_large_negative_eigenvalues():
    """The core of the preconditioner, at no product."""
    eigenvalues = np.concatenate([np.linspace(1, 3, N - 20), -np.linspace(20, 30, 20)])
    operator = shifted(with_spectrum(np.random.default_rng(3), eigenvalues), 0.1)
    built = jax.jit(lambda key: tr.NystromPreconditioner(30).build(key, operator))(KEY)
    assert built.evidence.failures.outside


DEFINITE = {
    **{name: spectrum + 1e-6 for name, spectrum in spectra(N).items()},
    "condition 1e3": np.geomspace(1, 1e-3, N),
    "condition 1e5": np.geomspace(1, 1e-5, N),
    "rank 5": np.where(np.arange(N) < 5, 1.0, 1e-5),
}


def test_no_definite_matrix_is_refused():
    """Well and ill conditioned ones, at three scales; the shift written down, part of the matrix,
    or as small as the rounding of the entries allows.
    """
    eps = np.finfo(np.float32).eps
    for name, spectrum in DEFINITE.items():
        array = with_spectrum(np.random.default_rng(4), spectrum)
        # Rounding the entries moves eigenvalues by less than this.
        shift = max(0.1 * spectrum.min(), 100 * eps * np.linalg.norm(array))
        for scale in (1.0, 1e-10, 1e10):
            entries, noise = (scale * array).astype(np.float32), np.float32(scale * shift)
            eigenvalues = np.linalg.eigvalsh(entries.astype(float) + float(noise) * np.eye(N))
            # What rounding the sum, and products with it, may change.
            rounding = 4 * eps * np.linalg.norm(entries) * np.sum(1 / eigenvalues)
            for key in keys(3):
                for solution in jax.device_get(both(key, entries, noise)):
                    converged = solution.result == tr.RESULTS.successful
                    ended = converged | (solution.result == tr.RESULTS.not_converged)
                    assert ended, (name, scale)
                    # None is off by six standard errors and the quadrature error.
                    bar = rounding + float(6 * solution.std_err + solution.quadrature_error)
                    error = abs(float(solution.value) - np.sum(np.log(eigenvalues)))
                    assert error <= bar, (name, scale, error, bar)


def test_nan_is_not_taken_for_indefinite():
    array = np.eye(N)
    array[2, 3] = np.nan
    exact = eqx.filter_jit(lambda operator: tr.logdet(KEY, operator, N))
    found = [exact(operator) for operator in (matrix(array), shifted(array, 0.1))]
    for solution in (*both(KEY, array.astype(np.float32), np.float32(0.1)), *found):
        assert solution.result == tr.RESULTS.nonfinite_operator

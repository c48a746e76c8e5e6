"""Operators that are tagged semidefinite, but are not symmetric: the products say so."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from ..helpers import NSD, PSD, by_products, keys, spectra, variant, with_spectrum

KEY = jr.key(8)
N, K = 60, 16


def matrix(array, tags=PSD):
    return lx.MatrixLinearOperator(jnp.asarray(array), tags)


def skew(dtype=np.float64, n=N):
    """A matrix with X^H = -X."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((n, n))
    if dtype == np.complex128:
        x = x + 1j * rng.standard_normal((n, n))
    return (x - x.conj().T) / 2


def lopsided(share, decay=0.8, dtype=np.float64):
    """A matrix whose part with X^H = -X has this share of the norm of the rest."""
    symmetric = with_spectrum(np.random.default_rng(2), decay ** np.arange(N), dtype)
    x = skew(dtype)
    return symmetric + share * np.linalg.norm(symmetric) / np.linalg.norm(x) * x


ESTIMATES = {
    "xnystrace": lambda key, op: tr.trace(key, op, K, tr.XNysTraceEstimator()),
    "auto": lambda key, op: tr.trace(key, by_products(op.as_matrix(), op.tags), K),
    "xnysdiag": lambda key, op: tr.diagonal(key, op, K, tr.XNysDiagEstimator()),
    "tolerance": lambda key, op: tr.trace(
        key, op, rtol=1e-3, max_k=32, estimator=tr.XNysTraceEstimator()
    ),
    "logdet": lambda key, op: tr.logdet(key, op, 30),
    "logdet nystrom": lambda key, op: tr.logdet(
        key, op, 30, preconditioner=tr.NystromPreconditioner()
    ),
    "logdet columns": lambda key, op: tr.logdet(
        key, op + 0.1 * lx.IdentityLinearOperator(op.in_structure()), 30, fallback=None
    ),
    "logdet small": lambda key, op: tr.logdet(key, op, 24),
    "density": lambda key, op: tr.gaussian_log_density(key, jnp.ones(N, op.matrix.dtype), op, 40),
}


# Real where a complex program would take seconds more to compile: the sketch is that of the others.
REPORTED = [
    ("xnystrace", np.complex128),
    variant("auto", np.complex128),  # which is XNysTrace
    ("xnysdiag", np.complex128),
    ("tolerance", np.complex128),
    ("logdet", np.float64),
    ("logdet columns", np.float64),
    variant("logdet nystrom", np.complex128),  # the sketch of "auto"
    variant("logdet small", np.complex128),  # another budget
    variant("density", np.complex128),  # whose log-determinant it is
]


@pytest.mark.parametrize(("name", "dtype"), REPORTED)
def test_an_asymmetric_operator_is_reported(name, dtype):
    """And NaN as such."""
    solve = jax.jit(lambda key, array: ESTIMATES[name](key, matrix(array)))
    for share in (1e-5, 1e-2, 1.0):
        array = jnp.asarray(lopsided(share, dtype=dtype) + np.eye(N))
        for key in keys(3):
            solution = solve(key, array)
            assert solution.result == tr.RESULTS.not_symmetric
            if "logdet" in name or name == "density":
                assert np.isnan(solution.value)
    array = lopsided(0.0, dtype=dtype)
    array[2, 3] = np.nan
    assert solve(KEY, jnp.asarray(array)).result == tr.RESULTS.nonfinite_operator


def test_it_is_raised():
    array = matrix(lopsided(1.0))
    with pytest.raises(RuntimeError, match="not even symmetric"):
        eqx.filter_jit(tr.trace)(KEY, array, K, tr.XNysTraceEstimator(), throw=True)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_value_does_not_rely_on_the_tag(sign):
    """It is Hutchinson's mean of the same products: unbiased, with its standard error."""
    array = sign * lopsided(1.0)
    operator = matrix(array, PSD if sign == 1 else NSD)

    def solve(key):
        return tr.trace(key, operator, K, tr.XNysTraceEstimator())

    solutions = jax.jit(jax.vmap(solve))(keys(400))
    assert np.all(solutions.result == tr.RESULTS.not_symmetric)
    errors = np.asarray(solutions.value) - np.trace(array)
    # z-test of the mean, and a calibrated standard error: 400 keys know a deviation to 4 %.
    assert abs(errors.mean()) < 4 * errors.std(ddof=1) / 20
    assert 0.85 < np.sqrt(np.mean(np.square(solutions.std_err))) / errors.std(ddof=1) < 1.15


HONEST = {
    **{name: spectrum for name, spectrum in spectra(N).items()},
    "zero": np.zeros(N),
    "rank 3": np.where(np.arange(N) < 3, 1.0, 0.0),
    "steep": 0.3 ** np.arange(N),
}


@pytest.mark.parametrize("dtype", ["float64", "complex64", "bfloat16"])
def test_no_symmetric_operator_is(dtype):
    """With rounding of every kind: of the entries, of the products, of half precision."""
    of = {"bfloat16": jnp.bfloat16}.get(dtype, dtype)
    base = np.complex128 if "complex" in dtype else np.float64

    @jax.jit
    def found(array):
        def solve(key):
            solution = tr.trace(key, matrix(array), K, tr.XNysTraceEstimator())
            return solution.result == tr.RESULTS.not_symmetric

        return jax.vmap(solve)(keys(20))

    for spectrum in HONEST.values():
        array = with_spectrum(np.random.default_rng(4), spectrum, base)
        for scale in (1.0, 1e-20, 1e20):
            assert not np.any(found(jnp.asarray(scale * array, of)))


def test_products_that_are_rounded_more_coarsely():
    """Of a float32 function whose products have 11 bits, as TensorFloat-32 has."""
    array = with_spectrum(np.random.default_rng(5), 0.8 ** np.arange(N)).astype(np.float32)
    short = jnp.asarray(array).astype(jnp.float16)

    def mv(v):
        size = jnp.max(jnp.abs(v))
        product = short.astype(jnp.float32) @ (v / size).astype(jnp.float16).astype(jnp.float32)
        return size * product

    structure = jax.ShapeDtypeStruct((N,), jnp.float32)
    operator = lx.FunctionLinearOperator(mv, structure, PSD)
    for key in keys(20):
        solution = tr.trace(key, operator, K, tr.XNysTraceEstimator())
        assert solution.result != tr.RESULTS.not_symmetric


def test_what_stays_below_the_limit_does_little_harm():
    """The steepest spectrum there is, with an asymmetry just below the limit of float64."""
    array = lopsided(2e-8, decay=0.6)
    truth = np.trace(array)
    values = []
    for key in keys(20):
        solution = tr.trace(key, matrix(array), 2 * K, tr.XNysTraceEstimator())
        values.append(solution.value if solution.result == tr.RESULTS.successful else truth)
    assert np.max(np.abs(np.array(values) / truth - 1)) < 1e-5


def test_under_vmap_each_lane_by_itself():
    arrays = jnp.stack([jnp.asarray(lopsided(share)) for share in (0.0, 0.1, 0.0)])

    def solve(array):
        return tr.trace(KEY, matrix(array), K, tr.XNysTraceEstimator())

    solutions = jax.jit(jax.vmap(solve))(arrays)
    expected = [False, True, False]
    np.testing.assert_array_equal(solutions.result == tr.RESULTS.not_symmetric, expected)

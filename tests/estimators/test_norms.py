"""Frobenius norms and norms of rows: unbiased squares, scales, error bars, tolerances."""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._estimators.trace import root_error

from ..helpers import by_products, keys

N, K, COUNT = 40, 25, 300
KEY = jr.key(0)
FUNCTIONS = [tr.frobenius_norm, tr.row_norms]
functions = pytest.mark.parametrize("function", FUNCTIONS)


def general(dtype):
    rng = np.random.default_rng(3)
    matrix = rng.standard_normal((N, N)) * 0.9 ** np.arange(N)
    if np.issubdtype(dtype, np.complexfloating):
        matrix = matrix + 1j * rng.standard_normal((N, N))
    return matrix.astype(dtype)


def truth(function, matrix):
    return np.linalg.norm(matrix, axis=1 if function is tr.row_norms else None)


@partial(jax.jit, static_argnums=(0, 1))
def program(function, options, keys, matrix):
    """The solution for each key, its interval, and the derivative of the sum of values in the
    direction A.
    """

    def one(key):
        def norm(c):
            operator = by_products(c.astype(matrix.dtype) * matrix)
            solution = function(key, operator, **dict(options))
            return jnp.sum(solution.value), solution

        one = jnp.ones((), jnp.finfo(matrix.dtype).dtype)
        (_, solution), slope = jax.value_and_grad(norm, has_aux=True)(one)
        return solution, solution.interval(), slope

    return jax.lax.map(one, keys)


@pytest.mark.parametrize(
    ("function", "dtype"), [(tr.frobenius_norm, np.complex128), (tr.row_norms, np.float32)]
)
@pytest.mark.slow
def test_squares_are_unbiased(function, dtype):
    matrix = general(dtype)
    found = jax.device_get(program(function, (("k", K),), keys(COUNT), matrix))
    solution, (low, high), slopes = jax.tree.map(lambda x: x.astype(float), found)
    assert np.all(solution.num_matvecs == K)
    expected = truth(function, matrix)
    squares = solution.value**2 - expected**2
    z = squares.mean(0) / (squares.std(0, ddof=1) / np.sqrt(COUNT))
    assert np.max(np.abs(z)) < 4.5
    errors = solution.value - expected
    assert 0.7 < np.mean(errors**2) / np.mean(solution.std_err**2) < 1.4
    assert np.mean((low <= expected) & (expected <= high)) >= 0.92
    # The weights see another matrix of the same sketch: unbiased, and close.
    total = np.sum(expected)
    np.testing.assert_allclose(np.mean(slopes), total, rtol=0.02)


def single(function, matrix):
    """The solution for every key, and the derivative."""
    solution, _, slope = program(function, (("k", K),), keys(COUNT), matrix)
    return solution, np.asarray(slope, float)


@functions
def test_squares_that_under_or_overflow(function):
    """Float32, from 1e-30 to 1e30: values, errors and derivatives are those of a usual scale."""
    matrix = general(np.float32)
    usual, slope = single(function, matrix)
    for exponent in (-100, -60, 60, 100):
        scale = np.float32(2.0**exponent)
        found, scaled_slope = single(function, scale * matrix)
        assert np.all(found.result == tr.RESULTS.successful)
        for x, y in ((found.value, usual.value), (found.std_err, usual.std_err)):
            np.testing.assert_allclose(np.asarray(x, float) / scale, y, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(scaled_slope / scale, slope, rtol=1e-3)


@functions
def test_degenerate_matrices(function):
    """NaN, zero, and rank 3."""
    matrix = general(np.float32)
    broken, _ = single(function, np.full_like(matrix, np.nan))
    assert np.all(broken.result == tr.RESULTS.nonfinite_operator)
    assert np.all(np.isnan(broken.value))
    assert np.all(np.isnan(broken.std_err))
    zero, slope = single(function, 0 * matrix)
    assert not np.any(zero.value)
    assert not np.any(zero.std_err)
    assert not np.any(slope)
    captured = matrix[:, :3] @ matrix[:3]
    found, _ = single(function, captured)
    np.testing.assert_allclose(found.value[0], truth(function, captured), rtol=1e-2, atol=1e-2)
    assert abs(np.sum(found.value[0]) - truth(function, captured).sum()) < 0.1


def test_exact_norms_and_their_derivatives():
    """With more than 2 n products."""
    matrix = general(np.float64)

    def norm(function, matrix):
        return function(KEY, lx.MatrixLinearOperator(matrix), 2 * N + 1)

    for function in FUNCTIONS:
        exact = jax.jit(partial(norm, function))(matrix)
        np.testing.assert_allclose(exact.value, truth(function, matrix), rtol=1e-13)
        assert np.all(exact.std_err == 0)
        assert exact.num_matvecs <= 2 * N + 1
    gradient = jax.jit(jax.grad(lambda a: norm(tr.frobenius_norm, a).value))
    expected = matrix / np.linalg.norm(matrix)
    np.testing.assert_allclose(gradient(matrix), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(gradient(np.zeros((N, N))), np.zeros((N, N)))


def test_half_precision():
    """The images are within the range of float16, and their squares are not."""
    matrix = (general(float) * 100).astype(np.float16)
    # A factor makes a product of single precision, which the second factor must not get.
    run = jax.jit(lambda matrix: tr.frobenius_norm(KEY, 2.0 * by_products(matrix), 30))
    found, expected = run(matrix), np.linalg.norm(2 * matrix.astype(np.float64))
    assert abs(float(found.value) - expected) <= 5 * float(found.std_err) + 2e-2 * expected


@functions
@pytest.mark.slow
def test_a_tolerance(function):
    """Within rtol in 95 % of calls, less three standard errors of their number."""
    n, rtol = 150, 0.05 if function is tr.frobenius_norm else 0.2
    dense = np.random.default_rng(0).standard_normal((n, n)) * 0.97 ** np.arange(n)
    options = ("rtol", rtol), ("max_k", n)
    found, _, slopes = program(function, options, keys(60), dense)
    errors = (np.asarray(found.value) - truth(function, dense)).reshape(60, -1)
    relative = np.linalg.norm(errors, axis=1) / np.linalg.norm(dense)
    met = np.asarray(found.result == tr.RESULTS.successful)
    assert met.mean() > 0.9
    assert np.mean(relative <= rtol) >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / 60)
    assert np.all(found.num_matvecs <= n)
    np.testing.assert_allclose(np.mean(slopes), truth(function, dense).sum(), rtol=0.1)


def test_a_root_of_an_estimate_that_is_not_positive():
    """The error of the root of 0 +- s is of the size of sqrt(s), whatever the unit."""
    given = np.array([0.0, 0.0, 3.0]), np.array([1e-4, 1e4, 0.6])
    found = jax.jit(root_error)(*given)
    np.testing.assert_allclose(found, [1e-2, 1e2, 0.1])

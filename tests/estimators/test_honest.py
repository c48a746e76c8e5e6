"""No number that is wrong and says `successful`; no surprise that a message could have been."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from ..core.test_closures import ESTIMATOR, KEY, traces_of
from ..helpers import PSD, variant, with_spectrum

N = 60
KERNEL = np.exp(-0.5 * np.subtract.outer(np.linspace(0, 1, N), np.linspace(0, 1, N)) ** 2 / 0.05)
GENERAL = np.random.default_rng(0).standard_normal((N, N))


def matrix(array, tags=()):
    return lx.MatrixLinearOperator(jnp.asarray(array), tags)


def identity(n=N):
    return lx.IdentityLinearOperator(jax.ShapeDtypeStruct((n,), jnp.float64))


# --- budgets, dtypes and diagonals that do not fit -----------------------------------------------


@pytest.mark.parametrize("estimator", [tr.XDiagEstimator(), tr.DiagPlusPlusEstimator()])
def test_block_traces_take_as_many_products_as_their_estimator_needs(estimator):
    with pytest.warns(UserWarning, match=type(estimator).__name__):
        solution = tr.block_traces(KEY, matrix(GENERAL), 1, estimator)
    assert solution.num_matvecs == estimator.smallest
    diagonal = tr.diagonal(KEY, matrix(GENERAL), estimator.smallest, estimator)
    np.testing.assert_allclose(solution.value, jnp.sum(diagonal.value), rtol=1e-12)
    assert jnp.isinf(solution.std_err)  # a single probe says nothing of its spread


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32, bool])
def test_random_signs_need_a_dtype_with_minus_one(dtype):
    with pytest.raises(ValueError, match="-1"):
        tr.RademacherSampler(dtype)


@pytest.mark.variant
@pytest.mark.parametrize(
    ("written", "noise"), [("sum", 1e-1), ("function", 1e-3), ("sum", 1e-3), ("function", 1e-1)]
)
def test_a_diagonal_that_is_not_that_of_the_operator_is_found_out(noise, written):
    """The columns that are multiplied out have the entries at the pivots."""
    dense = KERNEL + noise * np.eye(N)
    operator = matrix(KERNEL, PSD) + noise * identity()
    if written == "function":
        operator = lx.FunctionLinearOperator(lambda v: dense @ v, operator.in_structure(), PSD)
    exact = np.linalg.slogdet(dense)[1]
    for diagonal, expected in (
        (np.diag(dense), tr.RESULTS.successful),
        (np.diag(KERNEL), tr.RESULTS.wrong_diagonal),
        (2 * np.diag(dense), tr.RESULTS.wrong_diagonal),
    ):
        preconditioner = tr.RPCholeskyPreconditioner(diagonal=jnp.asarray(diagonal))
        solution = tr.logdet(KEY, operator, 30, preconditioner=preconditioner)
        assert solution.result == expected
        if expected == tr.RESULTS.successful:
            low, high = solution.interval(0.999)
            assert low <= exact <= high


# --- positive numbers in front of tagged operators -----------------------------------------------


def shifted(amplitude, noise):
    return amplitude * matrix(KERNEL, PSD) + noise * identity()


@jax.jit
def of_amplitude(amplitude):
    """The log-determinant of a kernel with a traced amplitude, and its derivative."""

    def value(amplitude):
        solution = tr.logdet(KEY, shifted(amplitude, 0.1), 40, fallback=None)
        return solution.value, solution

    slope, solution = jax.grad(value, has_aux=True)(amplitude)
    return solution, slope


@pytest.mark.variant
@pytest.mark.parametrize("compiled", [variant(False), True])
def test_an_amplitude_in_front_of_a_kernel(compiled):
    """A number known now keeps the tag; a traced one is checked by the products."""
    for amplitude in (4.0, 0.5):
        if compiled:
            solution, _ = of_amplitude(amplitude)
        else:
            solution = tr.logdet(KEY, shifted(amplitude, 0.1), 40, fallback=None)
        assert solution.result == tr.RESULTS.successful
        exact = np.linalg.slogdet(amplitude * KERNEL + 0.1 * np.eye(N))[1]
        assert abs(solution.value - exact) <= 6 * solution.std_err + solution.quadrature_error


@pytest.mark.variant
def test_an_amplitude_has_a_derivative():
    exact = np.trace(np.linalg.solve(4.0 * KERNEL + 0.1 * np.eye(N), KERNEL))
    np.testing.assert_allclose(of_amplitude(4.0)[1], exact, rtol=1e-2)


def test_a_negative_amplitude_is_found_out():
    with pytest.raises(ValueError, match="positive definite"):
        tr.logdet(KEY, shifted(-1.0, 0.1), 30)
    solution, _ = of_amplitude(-1.0)
    assert solution.result == tr.RESULTS.outside_domain
    assert jnp.isnan(solution.value)
    for indefinite in (matrix(KERNEL, PSD) - 2.0 * matrix(KERNEL, PSD), -matrix(KERNEL, PSD)):
        with pytest.raises(ValueError, match="positive definite"):
            tr.logdet(KEY, indefinite, 30)


@pytest.mark.variant
def test_multiples_keep_their_tags():
    rng = np.random.default_rng(1)
    operator = matrix(with_spectrum(rng, 1 / np.arange(1.0, N + 1) ** 2), PSD)
    one = tr.trace(KEY, operator, 12, tr.XNysTraceEstimator()).value
    for factor, multiple in ((4.0, 4.0 * operator), (-0.25, operator / -4.0)):
        value = tr.trace(KEY, multiple, 12, tr.XNysTraceEstimator()).value
        np.testing.assert_allclose(value, factor * one, rtol=1e-10)
    value = tr.trace(KEY, -operator, 12, tr.XNysTraceEstimator()).value
    np.testing.assert_allclose(value, -one, rtol=1e-10)


# --- empty operators, messages --------------------------------------------------------------------


@pytest.mark.parametrize("call", [tr.trace, tr.diagonal, tr.block_traces, tr.logdet])
def test_an_operator_without_columns(call):
    with pytest.raises(ValueError, match="no columns"):
        call(KEY, lx.MatrixLinearOperator(jnp.zeros((0, 0)), PSD), 3)


@pytest.mark.parametrize("max_k", [0, -3, 2.5, True])
def test_the_largest_budget_is_called_by_its_name(max_k):
    with pytest.raises((ValueError, TypeError), match="budget max_k must be"):
        tr.trace(KEY, matrix(GENERAL), rtol=0.1, max_k=max_k)


# --- exact where exact is known ------------------------------------------------------------------


def stored_sum(theta):
    amplitude, noise = theta
    return amplitude * matrix(KERNEL, PSD) / 2.0 + noise * identity() - (-0.5) * identity()


def function_sum(theta):
    amplitude, noise = theta
    dense = amplitude * KERNEL / 2 + (noise + 0.5) * jnp.eye(N)
    return lx.FunctionLinearOperator(lambda v: dense @ v, identity().in_structure(), PSD)


@pytest.mark.parametrize(("make", "products"), [(stored_sum, 0), variant(function_sum, N)])
def test_exact_log_determinants_multiply_nothing_that_is_stored(make, products):
    theta = jnp.array([3.0, 0.2])
    y = jnp.sin(jnp.arange(N))

    def dense(theta):
        return theta[0] * KERNEL / 2 + (theta[1] + 0.5) * jnp.eye(N)

    def exact(theta):
        a = dense(theta)
        return -0.5 * (y @ jnp.linalg.solve(a, y) + jnp.linalg.slogdet(2 * jnp.pi * a)[1])

    def value(theta):
        solution = tr.gaussian_log_density(KEY, y, make(theta), N)
        return solution.value, solution

    @jax.jit
    def run(theta):
        slope, solution = jax.grad(value, has_aux=True)(theta)
        orders = solution.value, slope, jax.hessian(lambda theta: value(theta)[0])(theta)
        expected = exact(theta), jax.grad(exact)(theta), jax.hessian(exact)(theta)
        return tr.logdet(KEY, make(theta), N), solution, orders, expected

    log_det, solution, orders, expected = run(theta)
    assert log_det.num_matvecs == solution.num_matvecs == products
    assert solution.std_err == 0
    for ours, theirs, rtol in zip(orders, expected, (1e-12, 1e-9, 1e-8), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol)


# --- eager loops ---------------------------------------------------------------------------------


def test_a_tracker_outside_jit_compiles_once():
    def loss(params, inputs):
        return jnp.mean(jax.nn.relu(inputs @ params["w"]) ** 2)

    inputs = jr.normal(jr.key(2), (5, 3))
    tracker = tr.Tracker("recycled", ESTIMATOR.sampler)

    def steps(scales):
        state = None
        for scale in scales:
            operator = tr.curvature.hessian(loss, {"w": scale * jnp.ones((3, 4))}, inputs)
            state = tracker.init(operator, 4) if state is None else state
            state, solution = tracker.update(KEY, operator, state)
        return solution.value

    first, _ = traces_of(lambda: steps([1.0]))
    again, _ = traces_of(lambda: steps([2.0, 3.0, 4.0]))
    assert first >= 1
    assert again == 0

"""Gaussian log densities: against Cholesky, and in the hands of optimisers and samplers."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

from traceax import RESULTS, NystromPreconditioner, gaussian_log_density, logdet
from traceax._logdet.logdet import LogdetEstimator
from traceax._logdet.run import run_of

from ..helpers import PSD, keys, over_keys, with_spectrum
from .test_logdet import N, decaying, distances, matern32, shifted

FIXED = NystromPreconditioner(rank=38)


def exact_density(y, dense, xp=np):
    """The log density of one vector, by NumPy or `jax.numpy`."""
    half = 1 if np.iscomplexobj(dense) else 0.5
    form = xp.vdot(y, xp.linalg.solve(dense, y)).real
    return -half * (form + xp.linalg.slogdet(dense)[1] + len(y) * np.log(np.pi / half))


def observations(n, dtype=np.float64):
    y = np.random.default_rng(7).standard_normal((2, n))
    return y[0] + 1j * y[1] if dtype == np.complex128 else y[0]


# --- rounding and truncation ---------------------------------------------------------------------


def rough_noise(n):
    """Where the noise is small, the solution is large, and the row of A is not: the bar was 160
    times the error before scaled rows were taken.
    """
    rng = np.random.default_rng(0)
    points, noise = rng.uniform(size=(n, 1)), 10 ** rng.uniform(-4, 0, size=n)
    return np.exp(-((points - points.T) ** 2) / 0.02), noise, rng.standard_normal((4, n))


def smooth_kernel(n):
    """The form is off by some 1e-4, or one unit of the density."""
    x = np.linspace(0, 1, n)
    noises = [np.random.default_rng(seed).standard_normal(n) for seed in range(4)]
    ys = np.sin(9 * x) + 0.3 * np.stack(noises)
    return np.exp(-np.square(x[:, None] - x) / 0.02), np.full(n, 1e-3), ys


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.slow
def test_rounding_of_the_quadratic_form_is_stated(held):
    """In float32: intervals hold the density, and the error that they state is some times the true
    one, not hundreds of times.
    """
    n = 200

    @jax.jit
    def run(keys, matrix, noise, ys):
        operator = lx.MatrixLinearOperator(matrix, PSD) + lx.DiagonalLinearOperator(noise)
        options = {"k": 60, "fallback": None}
        if held:
            built = NystromPreconditioner(rank=60).build(jr.key(9), operator)
            options = {"k": 60, "preconditioner": built}

        def solve(y, key):
            found = gaussian_log_density(key, y, operator, **options)
            return found, found.interval()

        return jax.lax.map(lambda y: jax.lax.map(partial(solve, y), keys), ys)

    for problem in (smooth_kernel, rough_noise)[: 1 if held else 2]:
        narrow = [x.astype(np.float32) for x in problem(n)]
        matrix, noise, ys = (x.astype(float) for x in narrow)
        truths = np.array([exact_density(y, matrix + np.diag(noise)) for y in ys])[:, None]
        found, (low, high) = jax.device_get(run(keys(10), *narrow))
        assert np.mean((low <= truths) & (truths <= high)) > 0.9
        errors = np.abs(found.value - truths)
        size = np.sqrt(np.mean(errors**2)) if problem is rough_noise else np.max(errors)
        assert np.median(found.quadrature_error) < 20 * size


@pytest.mark.slow
def test_what_the_solve_lacks_is_stated():
    """Too few steps of conjugate gradients: the error is within the quadrature error."""
    kernel, y = np.asarray(matern32(distances(400, 2), 0.3)), observations(400)

    @eqx.filter_jit
    def density(key, kernel, s):
        chosen = NystromPreconditioner(rank=20)
        return gaussian_log_density(key, y, shifted(kernel, s), 60, preconditioner=chosen)

    for s in (1e-2, 1e-4):
        dense = kernel + s * np.eye(400)
        form = y @ np.linalg.solve(dense, y)
        for key in keys(3):
            solution = jax.device_get(density(key, kernel, np.asarray(s)))
            lacking = form - solution.stats["quadratic_form"]
            assert lacking > 1e-6 * form
            assert 0 < lacking / 2 < solution.quadrature_error
            allowed = 3 * solution.std_err + solution.quadrature_error
            assert abs(solution.value - exact_density(y, dense)) < allowed


@pytest.mark.slow
def test_solves_of_every_size_and_scale():
    """An absolute limit of breakdowns that grows with n once made NaN of many rows and small
    scales.
    """
    n = 60_000
    spectrum = np.linspace(1, 2, n)
    y = (np.sqrt(spectrum) * np.random.default_rng(0).standard_normal(n)).astype(np.float32)

    @jax.jit
    def run(scale, root):
        def scaled(factor):
            product = lx.DiagonalLinearOperator(factor * scale * spectrum.astype(np.float32)).mv
            return lx.FunctionLinearOperator(product, jax.ShapeDtypeStruct((n,), y.dtype), PSD)

        def log_det(factor):
            return logdet(jr.key(0), scaled(factor), k=8, preconditioner=None).value

        one = jnp.ones_like(scale)
        given = jr.key(0), root * y, scaled(one)
        found = gaussian_log_density(*given, k=40, preconditioner=None)
        return found.stats["quadratic_form"], jax.grad(jax.grad(log_det))(one)

    for scale in (0.5, 1e-6):
        found, second = run(np.float32(scale), np.float32(scale**0.5))
        form = np.sum(np.square(y, dtype=np.float64) / spectrum)
        np.testing.assert_allclose(found, form, rtol=1e-5)
        np.testing.assert_allclose(second, -n, rtol=1e-4)


# --- values and derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize(("k", "dtype"), [(56, np.float64), (N, np.complex128)])
def test_value_and_derivatives(k, dtype):
    """With respect to A and to y, to second order."""
    matrix, y = decaying(N, dtype), observations(N, dtype)

    def parts(theta):
        scale = jnp.exp(theta[0]).astype(dtype)
        return scale * matrix, theta[1] ** 2, ((1 + theta[2]) ** 2).astype(dtype) * y

    def value(theta):
        kernel, s, y = parts(theta)
        solution = gaussian_log_density(jr.key(0), y, shifted(kernel, s), k, preconditioner=FIXED)
        return solution.value, solution

    def exact(theta):
        kernel, s, y = parts(theta)
        dense = kernel + s.astype(dtype) * jnp.eye(N, dtype=dtype)
        return exact_density(y, dense, jnp), (y, dense)

    def with_gradient(function):
        def both(theta):
            (found, more), gradient = jax.value_and_grad(function, has_aux=True)(theta)
            return gradient, (found, more, gradient)

        return jax.jacfwd(both, has_aux=True)

    run = jax.jit(lambda theta: (with_gradient(value)(theta), with_gradient(exact)(theta)))
    ours, theirs = jax.device_get(run(np.array([0.2, 0.5, 0.8])))
    hessian, (found, solution, gradient) = ours
    exact_hessian, (truth, (y, dense), exact_gradient) = theirs
    allowed = 3 * solution.std_err + solution.quadrature_error + 1e-10
    assert abs(found - truth) < allowed < 1e-3 * abs(found)
    np.testing.assert_allclose(gradient, exact_gradient, rtol=1e-4)
    np.testing.assert_allclose(
        hessian, exact_hessian, rtol=1e-4, atol=1e-7 * np.abs(exact_hessian).max()
    )
    x = np.linalg.solve(dense, y)
    np.testing.assert_allclose(solution.stats["solve"], x, atol=1e-6 * np.abs(x).max())
    np.testing.assert_allclose(solution.stats["quadratic_form"], np.vdot(y, x).real, rtol=1e-9)
    np.testing.assert_allclose(
        solution.stats["log_det"], np.linalg.slogdet(dense)[1], atol=2 * allowed
    )
    assert solution.num_matvecs <= k
    assert solution.value.shape == ()


@pytest.mark.parametrize(("held", "dtype"), [(False, np.float64), (True, np.complex128)])
@pytest.mark.slow
def test_several_vectors(held, dtype):
    """The sum of the log densities of three vectors of very different sizes, one of them 0, and
    its derivatives, of two operators. What is not positive definite, or holds NaN, in the other
    lanes of the `vmap` is NaN, and so are derivatives: optimisers can skip the step.
    """
    matrix, y = decaying(N, dtype), observations(N, dtype)
    y = np.stack([y, 20 * y[::-1], 0 * y], axis=1)
    broken = matrix.copy()
    broken[3, 4] = np.nan
    preconditioner = FIXED.build(jr.key(1), shifted(matrix, 0.5)) if held else FIXED

    def value(s, y, matrix):
        given = jr.key(0), y, shifted(matrix, s), 56
        solution = gaussian_log_density(*given, preconditioner=preconditioner)
        return solution.value, solution

    run = jax.jit(jax.vmap(jax.value_and_grad(value, (0, 1), has_aux=True), (0, None, 0)))
    shifts = np.array([0.5, 0.4, 0.1, 0.1])
    lanes = run(shifts, y, np.stack([matrix, matrix, -matrix, broken]))
    for i, s in enumerate(shifts[:2]):
        (found, solution), (slope, slopes) = jax.tree.map(lambda x, i=i: np.asarray(x)[i], lanes)
        dense = matrix + s * np.eye(N)
        x = np.linalg.solve(dense, y)
        half = 1 if dtype == np.complex128 else 0.5
        truth = sum(exact_density(column, dense) for column in y.T)
        allowed = 3 * solution.std_err + solution.quadrature_error
        assert abs(found - truth) < allowed < 1e-3 * abs(found)
        expected = half * (np.sum(np.abs(x) ** 2) - 3 * np.trace(np.linalg.inv(dense)).real)
        np.testing.assert_allclose(slope, expected, rtol=1e-4)
        expected = -2 * half * np.conj(x)  # df = Re sum(slopes dy)
        np.testing.assert_allclose(slopes, expected, rtol=1e-4, atol=1e-7 * np.abs(x).max())
        np.testing.assert_allclose(solution.stats["solve"], x, atol=1e-6 * np.abs(x).max())
        forms = np.sum(np.conj(y) * x, axis=0).real
        np.testing.assert_allclose(solution.stats["quadratic_form"], forms, rtol=1e-8)
        assert solution.num_matvecs <= 56
    (values, solutions), (slope, _) = lanes
    results = np.asarray(solutions.result._value)[2:]
    expected = RESULTS.outside_domain._value, RESULTS.nonfinite_operator._value
    np.testing.assert_array_equal(results, expected)
    assert np.all(np.isnan([values[2:], slope[2:]]))


@pytest.mark.slow
def test_pytrees():
    """Observations of the operator's structure, one vector or several with an axis of their own
    behind those of the leaves.
    """
    matrix, y = decaying(), observations(N)
    structure = {"a": jax.ShapeDtypeStruct((20,), float), "b": jax.ShapeDtypeStruct((8, 5), float)}

    def product(x):
        y = matrix @ jnp.concatenate([x["a"], x["b"].reshape(-1)])
        return {"a": y[:20], "b": y[20:].reshape(8, 5)}

    operator = lx.FunctionLinearOperator(product, structure, PSD)
    operator = operator + 0.3 * lx.IdentityLinearOperator(structure)

    def density(y):
        solution = gaussian_log_density(jr.key(0), y, operator, 50, preconditioner=FIXED)
        return solution.value, solution.stats["solve"]

    ys = np.stack([y, 2 * y], axis=1)
    together = {"a": ys[:20], "b": ys[20:].reshape(8, 5, 2)}
    value, solve = jax.device_get(jax.jit(density)(together))
    dense = matrix + 0.3 * np.eye(N)
    truth = sum(exact_density(y, dense) for y in ys.T)
    np.testing.assert_allclose(value, truth, rtol=1e-4)
    x = np.linalg.solve(dense, ys)
    np.testing.assert_allclose(solve["a"], x[:20], atol=1e-6 * np.abs(x).max())
    np.testing.assert_allclose(solve["b"].reshape(40, 2), x[20:], atol=1e-6 * np.abs(x).max())
    _, single = jax.eval_shape(density, jax.tree.map(lambda x: x[..., 0], together))
    assert jax.tree.map(jnp.shape, single) == {"a": (20,), "b": (8, 5)}


def test_observations_that_are_missing():
    """The products are finite, and the density is not."""
    y = np.full_like(observations(N), np.nan)
    missing = gaussian_log_density(jr.key(0), y, shifted(decaying(), 0.1), N)
    assert missing.result == RESULTS.outside_domain


def test_all_probes_take_as_many_steps():
    """Also those that follow a panel which the end of the solve has cut short."""
    matrix = with_spectrum(np.random.default_rng(0), np.linspace(1, 30, 200))
    operator = shifted(jnp.asarray(matrix), 0.1)
    solve = {"y": jnp.asarray(observations(200)[:, None]), "most_solve": 19}

    def nodes_in_use(key):
        given = LogdetEstimator(None, None, None), key, operator, 80
        probes = run_of(*given, weights=False, **solve).sums.probes
        return jnp.sum(probes.masses > 0, axis=1)

    with jax.numpy_dtype_promotion("standard"):
        for steps in over_keys(10, nodes_in_use):
            assert len(set(steps) - {0}) == 1

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

from ..helpers import PSD, keys
from .test_logdet import N, decaying, distances, hidden, matern32, shifted

FIXED = NystromPreconditioner(rank=38)


@jax.jit
def cholesky_density(y, dense):
    factor = jnp.linalg.cholesky(dense)
    z = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    half_logdet = jnp.sum(jnp.log(jnp.diagonal(factor).real))
    if jnp.iscomplexobj(y):
        return -jnp.vdot(z, z).real - 2 * half_logdet - len(y) * jnp.log(jnp.pi)
    return -z @ z / 2 - half_logdet - len(y) / 2 * jnp.log(2 * jnp.pi)


def observations(n, dtype=np.float64):
    y = np.random.default_rng(7).standard_normal((2, n))
    return y[0] + 1j * y[1] if dtype == np.complex128 else y[0]


# --- against Cholesky ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"k": 30, "fallback": None}, {"k": 60, "preconditioner": "held"}]
)
def test_rounding_of_the_quadratic_form_is_stated(options):
    """In float32 the form of a smooth kernel with noise 1e-3 is off by some 1e-4, or one unit of
    the density.
    """
    noise = 0.001
    n, options = 200, dict(options)
    x = np.linspace(0, 1, n)
    kernel = np.exp(-np.square(x[:, None] - x) / 0.02).astype(np.float32)
    noises = [np.random.default_rng(seed).standard_normal(n) for seed in range(6)]
    ys, s = (np.sin(9 * x) + 0.3 * np.stack(noises)).astype(np.float32), np.float32(noise)
    dense = kernel.astype(float) + float(s) * np.eye(n)
    truths = np.array([float(cholesky_density(y.astype(float), dense)) for y in ys])[:, None]
    operator = lx.MatrixLinearOperator(kernel, PSD)
    operator = operator + s * lx.IdentityLinearOperator(operator.in_structure())
    if options.get("preconditioner") == "held":
        options["preconditioner"] = NystromPreconditioner(rank=60).build(jr.key(9), operator)

    @jax.jit
    @partial(jax.vmap, in_axes=(0, None))
    @partial(jax.vmap, in_axes=(None, 0))
    def run(y, key):
        found = gaussian_log_density(key, y, operator, **options)
        return found, found.interval()

    found, (low, high) = jax.device_get(run(ys, keys(10)))
    assert np.mean((low <= truths) & (truths <= high)) > 0.9
    errors = np.abs(found.value - truths)
    assert np.median(found.quadrature_error) < 20 * np.max(errors)


def test_rounding_with_noise_of_many_sizes():
    """Where the noise is small, the solution is large, and the row of A is not: the bar is some
    times the error, not hundreds of times (160 before scaled rows were taken).
    """
    n, rng = 300, np.random.default_rng(0)
    points, noise = rng.uniform(size=(n, 1)), 10 ** rng.uniform(-4, 0, size=n)
    matrix, y = np.exp(-((points - points.T) ** 2) / 0.02), rng.standard_normal(n)
    narrow = [x.astype(np.float32) for x in (matrix, noise, y)]
    operator = lx.MatrixLinearOperator(narrow[0], PSD) + lx.DiagonalLinearOperator(narrow[1])
    wide = [x.astype(float) for x in narrow]
    truth = cholesky_density(wide[2], wide[0] + np.diag(wide[1]))

    def run(key):
        solution = gaussian_log_density(key, narrow[2], operator, k=60, fallback=None)
        return solution.value, solution.quadrature_error

    values, errors = jax.jit(lambda keys: jax.lax.map(run, keys))(keys(10))
    off = np.abs(np.asarray(values, float) - truth)
    assert np.all(off < np.asarray(errors) + 0.5)
    assert np.median(errors) < 20 * np.sqrt(np.mean(off**2))


def test_what_failed_has_no_derivative():
    """A value that is NaN has a derivative that is NaN, so that optimisers can skip the step."""
    matrix, y = decaying(N), observations(N)

    def value(s):
        return gaussian_log_density(jr.key(0), y, hidden(matrix, -s), 30).value

    both = jax.jit(lambda s: (jax.value_and_grad(value)(s), jax.jvp(value, (s,), (1.0,))))
    assert np.all(np.isnan(both(0.5)))


@pytest.mark.parametrize(("k", "dtype"), [(56, np.float64), (N, np.complex128)])
def test_value_and_derivatives(k, dtype):
    """With respect to A and to y, to second order."""
    matrix, y = decaying(N, dtype), observations(N, dtype)
    theta = np.array([0.2, 0.5, 0.8])

    def parts(theta):
        scale = jnp.exp(theta[0]).astype(matrix.dtype)
        return scale * matrix, theta[1] ** 2, ((1 + theta[2]) ** 2).astype(y.dtype) * y

    def value(theta):
        kernel, s, y = parts(theta)
        solution = gaussian_log_density(jr.key(0), y, shifted(kernel, s), k, preconditioner=FIXED)
        return solution.value, solution

    def exact(theta):
        kernel, s, y = parts(theta)
        return cholesky_density(y, kernel + s.astype(dtype) * jnp.eye(N, dtype=dtype))

    def everything(theta):
        (found, solution), gradient = jax.value_and_grad(value, has_aux=True)(theta)
        return gradient, (found, solution, gradient)

    def truth(theta):
        value_, gradient = jax.value_and_grad(exact)(theta)
        return gradient, (value_, gradient)

    @jax.jit
    def both(theta):
        return [jax.jacfwd(f, has_aux=True)(theta) for f in (everything, truth)], parts(theta)

    (ours, theirs), (kernel, s, y) = jax.device_get(both(theta))
    hessian, (found, solution, gradient) = ours
    exact_hessian, (exact_value, exact_gradient) = theirs
    allowed = 3 * solution.std_err + solution.quadrature_error + 1e-10
    assert abs(found - exact_value) < allowed < 1e-3 * abs(found)
    np.testing.assert_allclose(gradient, exact_gradient, rtol=1e-4)
    np.testing.assert_allclose(
        hessian, exact_hessian, rtol=1e-4, atol=1e-7 * np.abs(exact_hessian).max()
    )
    dense = kernel + s * np.eye(N)
    x = np.linalg.solve(dense, y)
    np.testing.assert_allclose(solution.stats["solve"], x, atol=1e-6 * np.abs(x).max())
    np.testing.assert_allclose(solution.stats["quadratic_form"], np.vdot(y, x).real, rtol=1e-9)
    np.testing.assert_allclose(
        solution.stats["log_det"], np.linalg.slogdet(dense)[1], atol=2 * allowed
    )
    assert solution.num_matvecs <= k
    assert solution.value.shape == ()


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
        truth = -(form + np.linalg.slogdet(dense)[1] + 400 * np.log(2 * np.pi)) / 2
        for key in keys(3):
            solution = jax.device_get(density(key, kernel, np.asarray(s)))
            lacking = form - solution.stats["quadratic_form"]
            assert lacking > 1e-6 * form
            assert 0 < lacking / 2 < solution.quadrature_error
            allowed = 3 * solution.std_err + solution.quadrature_error
            assert abs(solution.value - truth) < allowed


SEVERAL = {"budget": {"k": 56, "preconditioner": FIXED}, "held": {"k": 56}}


@pytest.mark.parametrize(("n", "scale"), [(60_000, 0.5), (300, 1e-6)])
def test_solves_of_every_size_and_scale(n, scale):
    # An absolute limit of breakdowns that grows with n once made NaN of many rows and small scales.
    spectrum = np.linspace(1, 2, n)
    y = np.sqrt(spectrum * scale) * np.random.default_rng(0).standard_normal(n)
    diagonal, y = (scale * spectrum).astype(np.float32), y.astype(np.float32)

    def scaled(factor):
        product = lx.DiagonalLinearOperator(factor * diagonal).mv
        return lx.FunctionLinearOperator(product, jax.ShapeDtypeStruct((n,), y.dtype), PSD)

    def log_det(factor):
        return logdet(jr.key(0), scaled(factor), k=8, preconditioner=None).value

    @jax.jit
    def run(one):
        found = gaussian_log_density(jr.key(0), y, scaled(one), k=40, preconditioner=None)
        return found.stats["quadratic_form"], jax.grad(jax.grad(log_det))(one)

    found, second = run(np.float32(1))
    form = np.sum(np.square(y, dtype=np.float64) / diagonal.astype(float))
    np.testing.assert_allclose(found, form, rtol=1e-5)
    np.testing.assert_allclose(second, -n, rtol=1e-4)


@pytest.mark.parametrize(("mode", "dtype"), [("budget", np.float64), ("held", np.complex128)])
def test_several_vectors(mode, dtype):
    """The sum of the log densities of three vectors of very different sizes, one of them 0, and
    its derivatives; two operators by `vmap` as each by itself.
    """
    matrix, options = decaying(N, dtype), dict(SEVERAL[mode])
    y = observations(N, dtype)
    y = np.stack([y, 20 * y[::-1], 0 * y], axis=1)
    if mode == "held":
        options["preconditioner"] = FIXED.build(jr.key(1), shifted(matrix, 0.5))

    def value(s, y):
        solution = gaussian_log_density(jr.key(0), y, shifted(matrix, s), **options)
        return solution.value, solution

    def exact(s, y):
        dense = matrix + s.astype(dtype) * jnp.eye(N, dtype=dtype)
        return sum(cholesky_density(column, dense) for column in y.T)

    both = jax.value_and_grad(value, (0, 1), has_aux=True)
    shifts = np.array([0.5, 0.4])
    run = jax.jit(lambda s, y: (both(s, y), jax.value_and_grad(exact, (0, 1))(s, y)))
    alone = []
    for s in shifts:
        ((found, solution), slopes), (truth, exact_slopes) = jax.device_get(run(s, y))
        alone.append((found, slopes[0]))
        allowed = 3 * solution.std_err + solution.quadrature_error
        assert abs(found - truth) < allowed < 1e-3 * abs(found)
        for slope, expected in zip(slopes, exact_slopes, strict=True):
            np.testing.assert_allclose(
                slope, expected, rtol=1e-4, atol=1e-7 * np.abs(expected).max()
            )
        x = np.linalg.solve(matrix + s * np.eye(N), y)
        np.testing.assert_allclose(solution.stats["solve"], x, atol=1e-6 * np.abs(x).max())
        forms = np.sum(np.conj(y) * x, axis=0).real
        np.testing.assert_allclose(solution.stats["quadratic_form"], forms, rtol=1e-8)
        assert solution.num_matvecs <= options["k"]
    lanes = jax.jit(jax.vmap(both, (0, None)))(shifts, y)
    for i, (found, slope) in enumerate(alone):
        np.testing.assert_allclose(lanes[0][0][i], found, rtol=1e-10)
        np.testing.assert_allclose(lanes[1][0][i], slope, rtol=1e-6)


def test_pytrees_vmap_and_scan():
    """Observations of the operator's structure in a scan: the same numbers as of many vectors."""
    matrix, y = decaying(), observations(N)
    structure = {
        "a": jax.ShapeDtypeStruct((20,), y.dtype),
        "b": jax.ShapeDtypeStruct((8, 5), y.dtype),
    }

    def tree(flat):
        return {"a": flat[:20], "b": flat[20:].reshape(8, 5)}

    def product(x):
        return tree(matrix @ jnp.concatenate([x["a"], x["b"].reshape(-1)]))

    operator = lx.FunctionLinearOperator(product, structure, PSD)
    operator = operator + 0.3 * lx.IdentityLinearOperator(structure)

    def density(y, covariance):
        solution = gaussian_log_density(jr.key(0), y, covariance, 50, preconditioner=FIXED)
        return solution.value, solution.stats["solve"]

    ys = np.stack([y, 2 * y])
    # Several vectors, with an axis of their own behind those of the leaves.
    together = {"a": ys[:, :20].T, "b": ys[:, 20:].T.reshape(8, 5, 2)}

    @jax.jit
    def run(ys, together):
        return (
            jax.vmap(lambda y: density(y, hidden(matrix, 0.3)))(ys),
            jax.lax.scan(lambda c, y: (c, density(tree(y), operator)), 0, ys)[1],
            density(together, operator),
        )

    plain, trees, (value, solve) = jax.device_get(run(ys, together))
    np.testing.assert_allclose(trees[0], plain[0], rtol=1e-9)
    np.testing.assert_allclose(trees[1]["b"].reshape(2, -1), plain[1][:, 20:], atol=1e-7)
    truth = sum(float(cholesky_density(y, matrix + 0.3 * np.eye(N))) for y in ys)
    np.testing.assert_allclose(value, truth, rtol=1e-4)
    assert jax.tree.map(np.shape, solve) == {"a": (20, 2), "b": (8, 5, 2)}
    np.testing.assert_allclose(solve["b"][..., 1], 2 * solve["b"][..., 0], atol=1e-7)


def test_what_is_not_positive_definite():
    """Or holds NaN, by a preconditioner of the call and by one that was built before."""
    matrix, y = decaying(), observations(N)
    broken = matrix.copy()
    broken[3, 4] = np.nan
    for preconditioner in (FIXED, FIXED.build(jr.key(1), shifted(matrix, 0.1))):
        solve = eqx.filter_jit(
            lambda m, p=preconditioner: gaussian_log_density(
                jr.key(0), y, lx.MatrixLinearOperator(m, PSD), 44, preconditioner=p
            )
        )
        outside, nonfinite = solve(-matrix), solve(broken)
        assert outside.result == RESULTS.outside_domain
        assert nonfinite.result == RESULTS.nonfinite_operator
        assert np.all(np.isnan([outside.value, nonfinite.value]))
    missing = gaussian_log_density(jr.key(0), np.full_like(y, np.nan), shifted(matrix, 0.1), N)
    assert missing.result == RESULTS.outside_domain  # the products are finite

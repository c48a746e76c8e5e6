"""Preconditioners that are held: the derivative is that of the value, to rounding."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.optimize

import traceax as tr
from traceax import NystromPreconditioner, gaussian_log_density, logdet
from traceax._logdet.factors import low_rank_plus_diagonal
from traceax._logdet.held import held_plan, held_probes

from .. import reference
from ..helpers import PSD, compilations, keys, random_unitary, with_spectrum
from .test_gaussian import exact_density, observations
from .test_logdet import dense_logdet, shifted

pytestmark = pytest.mark.slow(quick=True)

N, K = 60, 40
COMPLEX = np.complex128
Y = observations(N, COMPLEX)
# The second kernel has three eigenvalues, and takes more steps than that.
KERNELS = {
    "decaying": with_spectrum(np.random.default_rng(0), np.geomspace(10, 1e-3, N), COMPLEX),
    "levels": with_spectrum(np.random.default_rng(1), np.repeat([0.1, 1.0, 5.0], N // 3), COMPLEX),
}
OTHER = with_spectrum(np.random.default_rng(4), np.linspace(0, 1, N), COMPLEX)
THETA = {"decaying": np.array([0.5, 0.03, -3.6]), "levels": np.array([0.5, 0.0, -3.6])}
DIRECTION, STEP = np.array([1.0, -0.01, 0.7]), 1e-4


def parts(theta, kernel):
    """Observations and their covariance, with three parameters."""
    matrix = jnp.exp(theta[0]).astype(COMPLEX) * kernel + theta[1].astype(COMPLEX) * OTHER
    return (1 + theta[1]).astype(COMPLEX) * Y, shifted(matrix, jnp.exp(theta[2]))


@jax.jit
def build(theta, kernel):
    return NystromPreconditioner(rank=15).build(jr.key(1), parts(theta, kernel)[1])


@functools.cache
def held(name):
    """Built elsewhere; and a multiple of the identity, with which three eigenvalues are three."""
    if name == "levels":
        return build(np.array([0.0, 0.0, -0.1]), 0 * KERNELS[name])
    return build(np.array([0.0, 0.05, -3.9]), KERNELS[name])


@jax.jit
@jax.vmap
def program(theta, kernel, held):
    """The density and log det A, their solutions, the derivatives in the direction, those by theta
    and by what is held; the observations, and the matrix.
    """
    arrays, rest = eqx.partition(held, eqx.is_inexact_array)

    def values(theta, arrays):
        y, operator = parts(theta, kernel)
        given = operator, K
        options = {"preconditioner": eqx.combine(arrays, rest)}
        density = gaussian_log_density(jr.key(0), y, *given, **options)
        log_det = logdet(jr.key(0), *given, **options)
        return jnp.stack([density.value, log_det.value]), (density, log_det)

    found, push, solutions = jax.linearize(values, theta, arrays, has_aux=True)
    pull = jax.vmap(jax.linear_transpose(push, theta, arrays))
    forward = push(jnp.asarray(DIRECTION), jax.tree.map(jnp.zeros_like, arrays))
    y, operator = parts(theta, kernel)
    return found, solutions, forward, pull(jnp.eye(2)), y, operator.as_matrix()


@functools.cache
def numbers():
    """Of both kernels, at the parameters and at four points beside them."""
    steps = np.array([0, 1, -1, 2, -2])[:, None] * STEP * DIRECTION
    lanes = [(point, name) for name in KERNELS for point in THETA[name] + steps]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[held(name) for _, name in lanes])
    kernels = np.stack([KERNELS[name] for _, name in lanes])
    with jax.numpy_dtype_promotion("standard"):
        return jax.device_get(program(np.stack([point for point, _ in lanes]), kernels, stacked))


@pytest.mark.parametrize("name", KERNELS)
def test_finite_differences_of_the_value(name):
    """To 1e-7, for both functions, where neither the quadrature nor the solve has converged, and
    where the space is exhausted, in forward and in reverse mode. (Without the moving part of the
    basis they differ by more than 1e-3.) No derivative flows into what is held.
    """
    at = 5 * list(KERNELS).index(name)
    values, solutions, forward, (reverse, of_held), y, dense = numbers()
    found, ahead, behind, further, back = values[at : at + 5]
    difference = (8 * (ahead - behind) - (further - back)) / (12 * STEP)
    np.testing.assert_allclose(forward[at], difference, rtol=1e-7)
    np.testing.assert_allclose(reverse[at] @ DIRECTION, difference, rtol=1e-7)
    assert not any(np.any(x) for x in jax.tree.leaves(of_held))
    errors = np.abs(found - [exact_density(y[at], dense[at]), dense_logdet(dense[at])])
    for error, solution in zip(errors, solutions, strict=True):
        assert error < 3 * solution.std_err[at] + solution.quadrature_error[at]
        assert solution.num_matvecs[at] <= K
        assert (solution.quadrature_error[at] < 1e-9) == (name == "levels")
        assert error > 1e-3


def test_the_value_is_that_of_its_probes():
    """log det P and Gauss quadrature from the probes, by explicit bases of the Krylov spaces; and a
    call by itself is that of a lane.
    """
    p, q = held_plan(K)

    @jax.jit
    def run(theta, kernel, held):
        factors, operator = held.factors, parts(theta, kernel)[1]
        z = held_probes(jr.key(0), factors, p, COMPLEX)
        m = factors.inverse_root(jnp.conj(factors.inverse_root(operator.as_matrix())).T)
        return z, m, factors.log_det, logdet(jr.key(0), operator, K, preconditioner=held)

    with jax.numpy_dtype_promotion("standard"):
        given = run(THETA["decaying"], KERNELS["decaying"], held("decaying"))
    z, m, log_det, solution = jax.device_get(given)
    values = []
    for start in z.T:
        basis = reference.krylov_basis(m, start[:, None], q)
        nodes, vectors = np.linalg.eigh(basis.conj().T @ m @ basis)
        masses = np.abs(vectors.conj().T @ (basis.conj().T @ start)) ** 2
        values.append(masses @ np.log(nodes))
    assert p >= 8
    np.testing.assert_allclose(solution.value, log_det + np.mean(values), rtol=1e-10)
    np.testing.assert_allclose(solution.std_err, np.std(values, ddof=1) / np.sqrt(p), rtol=1e-8)
    np.testing.assert_allclose(numbers()[0][0, 1], solution.value, rtol=1e-10)


def test_probes():
    """E[z z^H] = I; no scatter where B is diagonal in U and a multiple of the identity outside."""
    n, rank, count = 30, 8, 20_000
    rng = np.random.default_rng(0)
    basis = random_unitary(rng, n, COMPLEX)[:, :rank]

    @jax.jit
    def draw(key):
        factors = low_rank_plus_diagonal(jnp.asarray(basis), jnp.ones(n))
        return held_probes(key, factors, count, np.dtype(COMPLEX))

    with jax.numpy_dtype_promotion("standard"):
        z = np.asarray(draw(jr.key(0)))
    inner = (basis * rng.standard_normal(rank)) @ basis.conj().T
    b = inner + 0.7 * (np.eye(n) - basis @ basis.conj().T)
    forms = np.sum(z.conj() * (b @ z), axis=0).real
    np.testing.assert_allclose(forms, np.trace(b).real, rtol=1e-10)
    # The entries of the mean scatter by 1 / sqrt(count), those on the diagonal by sqrt(2) of that.
    assert np.abs(z @ z.conj().T / count - np.eye(n)).max() < 6 / np.sqrt(count)


def test_an_eager_loop_that_builds_compiles_once(caplog):
    """With other arrays, another key, and a function that was made anew."""
    noise = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((N,), float))

    def operator(size):
        matrix = jnp.asarray(size * KERNELS["decaying"].real)
        function = lambda v: jax.nn.relu(matrix @ v) - jax.nn.relu(-matrix @ v)  # noqa: E731
        return lx.FunctionLinearOperator(function, noise.in_structure(), PSD) + size * noise

    cases = list(zip(keys(3), map(operator, (1.0, 2.0, 4.0)), strict=True))

    def built(key, operator):
        return jax.tree.leaves(NystromPreconditioner(rank=10).build(key, operator))

    assert compilations(caplog, lambda: built(*cases[0])) >= 1
    assert compilations(caplog, lambda: [built(*case) for case in cases[1:]]) == 0
    jitted = eqx.filter_jit(NystromPreconditioner(rank=10).build)(*cases[2])
    for found, expected in zip(built(*cases[2]), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)


# --- kernels and line searches --------------------------------------------------------------------


def gaussian_process(smooth, dim, n):
    """A kernel operator and noise, as a function of log (length, amplitude, noise)."""
    points = jnp.asarray(np.random.default_rng(0).uniform(size=(n, dim)))

    def operator(theta):
        length, amplitude, noise = jnp.exp(theta)

        def kernel(x, y):
            r = jnp.sqrt((1 + 2 * smooth) * jnp.sum((x - y) ** 2) + 1e-30) / length
            return amplitude * (1 + smooth * r) * jnp.exp(-r)

        kernel = tr.KernelLinearOperator(kernel, points)
        return kernel + noise * lx.IdentityLinearOperator(kernel.in_structure())

    return operator


def test_pivots_and_neighbourhoods_are_held_and_values_follow():
    """The derivative is that of the value, P's included; far from where it was built P fits the
    operator nearly as if it had been built there.
    """
    operator = gaussian_process(0.0, 2, 150)
    y = observations(150)
    theta = np.log([0.5, 1.0, 0.05])
    at, direction = theta + np.array([1.5, -1.0, 2.0]), np.array([1.0, 0.5, -0.7])
    build = jax.jit(lambda theta: tr.KernelPreconditioner(20, 8).build(jr.key(1), operator(theta)))
    held = build(theta)

    @jax.jit
    def solve(theta, held):
        def value(theta):
            found = gaussian_log_density(jr.key(0), y, operator(theta), K, preconditioner=held)
            return found.value, found

        return jax.value_and_grad(value, has_aux=True)(theta), operator(theta).as_matrix()

    def along(step):
        return float(solve(at + step * STEP * direction, held)[0][0][0])

    ((value, found), slope), dense = jax.device_get(solve(at, held))
    difference = (8 * (along(1) - along(-1)) - (along(2) - along(-2))) / (12 * STEP)
    np.testing.assert_allclose(slope @ direction, difference, rtol=1e-8)
    assert abs(value - exact_density(y, dense)) <= 3 * found.std_err + found.quadrature_error
    there = solve(at, build(at))[0][0][1]
    assert found.std_err < 2 * there.std_err
    assert found.stats["condition"] < 2 * there.stats["condition"]


@pytest.mark.parametrize(("smooth", "dim"), [(0.0, 2), (1.0, 5)])
def test_lbfgs_converges(smooth, dim):
    """Length scale, amplitude and noise, k = 100, from a noise that is eight times too large: no
    line search fails, and with one structure the exact density is within 0.1 nats of its optimum.
    """
    operator = gaussian_process(smooth, dim, 500)
    truth = np.log([0.4 if dim == 2 else 1.0, 1.0, 0.01])
    root = np.linalg.cholesky(operator(truth).as_matrix())
    y = jnp.asarray(root @ np.random.default_rng(5).standard_normal(500))

    @jax.jit
    @jax.value_and_grad
    def exact(theta):
        return -exact_density(y, operator(theta).as_matrix(), jnp)

    @jax.jit
    @jax.value_and_grad
    def estimated(theta, held):
        return -gaussian_log_density(jr.key(0), y, operator(theta), 100, preconditioner=held).value

    def minimise(function, start, *arguments):
        def loss(theta):
            value, gradient = function(jnp.asarray(theta), *arguments)
            return float(value), np.asarray(gradient)

        found = scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B")
        assert found.success, found.message
        return found

    start = truth + np.log([2, 0.5, 8])
    held = jax.jit(lambda theta: tr.KernelPreconditioner().build(jr.key(1), operator(theta)))(start)
    found = minimise(estimated, start, held).x
    assert float(exact(jnp.asarray(found))[0]) - minimise(exact, start).fun < 0.1


def test_quadrature_error_far_from_where_it_was_built():
    """The smallest eigenvalue of P^-1 A is known for the operator that P was built for alone. With
    a guess that was too large the intervals of these runs held in 41 % of cases.
    """
    n, count = 300, 40
    x = np.linspace(0.0, 1.0, n)
    y = np.sin(20 * x) + 0.3 * np.random.default_rng(5).standard_normal(n)

    def kernel(length):
        return np.exp(-0.5 * (x[:, None] - x) ** 2 / length**2)

    held = NystromPreconditioner(60).build(jr.key(1), shifted(kernel(0.1), 0.1))
    narrow = kernel(np.exp(-3.5))
    exact = exact_density(y, narrow + np.eye(n))

    @jax.jit
    @jax.vmap
    def run(key):
        operator = shifted(narrow, 1.0)
        return gaussian_log_density(key, y, operator, 100, preconditioner=held).interval()

    low, high = map(np.asarray, run(keys(count)))
    assert np.mean((low <= exact) & (exact <= high)) >= 0.92

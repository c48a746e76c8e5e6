"""Derivatives: unbiased, the same in both modes, at every order, and at no needless product."""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from traceax._trace import xtrace

import traceax as tr
from traceax._functions import funm
from traceax._logdet import estimator, log_quadrature

from ..helpers import (
    CLASSES,
    ESTIMATORS,
    PROBED,
    PSD,
    keys,
    operator_for,
    random_unitary,
    variant,
    with_spectrum,
)
from ..reference import each

N, K = 24, 12
THETA = 0.3
COUNT = 200
# |z| > 4 has probability 6e-5 under the hypothesis: about 150 of these tests together reject it
# wrongly with probability 0.01, and the seeds are fixed.
Z = 4
ROUNDING = {np.float32: 1e-4, np.float64: 1e-11, np.complex128: 1e-11}


def family(dtype=np.float64, seed=0):
    """B, C, D of A(theta) = B + theta C + theta^2 D: semidefinite, and no two of them commute."""
    rng = np.random.default_rng(seed)
    spectra = 0.7 ** np.arange(N), np.linspace(1, 2, N), 0.9 ** np.arange(N)
    return tuple(jnp.asarray(with_spectrum(rng, s, dtype)) for s in spectra)


def polynomial(theta, coefficients):
    b, c, d = coefficients
    return b + theta * c + theta**2 * d


def value(key, matrix, estimator, k=K, tags=PSD):
    return tr.trace(key, operator_for(estimator, matrix, tags), k, estimator).value


def assert_mean(samples, truth, tolerance=0.05):
    """A z-test, and a check that it could have failed: the standard error is `tolerance` of it."""
    samples = np.asarray(samples)
    standard = samples.std(ddof=1) / np.sqrt(len(samples))
    assert standard < tolerance * abs(truth)
    rounding = 1e-11 if samples.dtype == np.float64 else 1e-4
    assert abs(samples.mean(dtype=np.float64) - truth) < Z * standard + rounding * abs(truth)


def assert_complex_mean(samples, truth):
    samples = np.asarray(samples)
    for part in (np.real, np.imag):
        standard = part(samples).std(ddof=1) / np.sqrt(len(samples))
        assert standard < 0.05 * abs(truth)
        assert abs(part(samples).mean() - part(truth)) < Z * standard + 1e-11 * abs(truth)


# (Normal probes differ from those on the sphere in their lengths alone.)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, np.float64) for name in (*PROBED, "exact")),
        variant("xtrace", np.float32),
        *(
            variant(name, np.float64)
            for name in ESTIMATORS
            if name not in (*PROBED, "exact", "xtrace-normal")
        ),
    ],
)
def test_first_and_second_derivative(name, dtype):
    """Unbiased; forward and reverse mode give the same number."""
    coefficients = family(dtype)

    def derivatives(key, theta, coefficients):
        def f(theta):
            return value(key, polynomial(theta, coefficients), ESTIMATORS[name])

        primal, tangent = jax.jvp(f, (theta,), (jnp.ones_like(theta),))
        return f(theta), primal, tangent, jax.grad(f)(theta), jax.hessian(f)(theta)

    plain, primal, forward, reverse, second = each(
        derivatives, keys(COUNT), jnp.asarray(THETA, dtype), coefficients
    )
    assert forward.dtype == reverse.dtype == second.dtype == dtype
    # Beside its derivative the value is the same program's; other fusions may round otherwise.
    np.testing.assert_allclose(primal, plain, rtol=ROUNDING[dtype])
    np.testing.assert_allclose(forward, reverse, rtol=ROUNDING[dtype])
    _, c, d = [np.asarray(x, np.float64) for x in coefficients]
    assert_mean(reverse, np.trace(c + 2 * THETA * d))
    assert_mean(second, np.trace(2 * d))


# (The others are those of `test_holomorphic`.)
@pytest.mark.parametrize("name", [variant(n) if n != "xnystrace" else n for n in PROBED])
def test_complex_hermitian(name):
    """A complex matrix of a real parameter: the derivative averages to the real tr(dA)."""
    coefficients = family(np.complex128)

    def derivatives(key, theta, coefficients):
        def f(theta):
            return value(key, polynomial(theta, coefficients), CLASSES[name])

        forward = jax.jvp(f, (theta,), (jnp.ones_like(theta),))[1]
        return forward, jax.grad(lambda theta: f(theta).real)(theta)

    theta = jnp.asarray(THETA, jnp.complex128)
    forward, reverse = each(derivatives, keys(COUNT), theta, coefficients)
    _, c, d = coefficients
    np.testing.assert_allclose(forward.real, reverse.real, rtol=ROUNDING[np.complex128])
    assert_complex_mean(forward, complex(np.trace(c + 2 * THETA * d)))


@pytest.mark.parametrize("name", ["hutchinson", variant("hutch++"), "xtrace"])
def test_holomorphic(name):
    """A non-Hermitian A(z) of a complex z: grad(holomorphic=True), jvp with a complex tangent."""
    rng = np.random.default_rng(3)
    b, c, d = (
        jnp.asarray(rng.standard_normal((N, N)) + 1j * rng.standard_normal((N, N)) + shift)
        for shift in (0, 6 * np.eye(N), (3 - 4j) * np.eye(N))
    )

    def derivatives(key, z, coefficients):
        def f(z):
            return value(key, polynomial(z, coefficients), CLASSES[name], tags=())

        tangent = jnp.asarray(0.6 - 2j)
        return jax.grad(f, holomorphic=True)(z), jax.jvp(f, (z,), (tangent,))[1] / tangent

    z = 0.4 + 0.3j
    reverse, forward = each(derivatives, keys(COUNT), jnp.asarray(z), (b, c, d))
    # Absolute, in units of the trace: a part of a number may be near zero.
    truth = complex(np.trace(c + 2 * z * d))
    np.testing.assert_allclose(forward, reverse, rtol=0, atol=1e-11 * abs(truth))
    assert_complex_mean(reverse, truth)


def low_rank(rank):
    basis = random_unitary(np.random.default_rng(1), N)[:, :rank]
    return jnp.asarray(basis @ basis.T)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("name", ["hutchinson", variant("hutch++"), "xtrace", "xnystrace"])
def test_rank_deficient(name, rank):
    """Where A is singular, or zero, its factorisations have no derivative, but tr(A) has."""

    def derivatives(key, theta, base, direction):
        def f(theta):
            return value(key, base + theta * direction, ESTIMATORS[name])

        return jax.grad(f)(theta), jax.jvp(f, (theta,), (jnp.ones_like(theta),))[1]

    _, direction, _ = family()
    gradient, forward = each(derivatives, keys(COUNT), jnp.asarray(0.0), low_rank(rank), direction)
    np.testing.assert_allclose(gradient, forward, rtol=1e-11)
    assert_mean(gradient, np.trace(direction))


@pytest.mark.parametrize("kind", ["full", "rank-2", "zero"])
@pytest.mark.parametrize("name", PROBED)
def test_gradient_with_respect_to_the_matrix(name, kind):
    """It averages to the identity, entry by entry."""
    n, count = 8, 1000
    rng = np.random.default_rng(2)
    matrix = with_spectrum(rng, 0.6 ** np.arange(n))
    if kind != "full":
        matrix = with_spectrum(rng, np.arange(n) < (2 if kind == "rank-2" else 0))
    gradient = jax.grad(partial(value, estimator=CLASSES[name], k=6), argnums=1)
    samples = np.asarray(each(gradient, keys(count), jnp.asarray(matrix)))
    standard = samples.std(axis=0, ddof=1) / np.sqrt(count)
    # For 64 entries (Bonferroni) |z| > 5 has probability 64 * 6e-7 = 4e-5. Rademacher probes
    # have a diagonal without any error, hence the rounding.
    assert np.all(standard < 0.1)
    assert np.all(np.abs(samples.mean(axis=0) - np.eye(n)) < 5 * standard + 1e-12)


@pytest.mark.parametrize("name", [name if name == "auto" else variant(name) for name in CLASSES])
def test_sign_and_factor(name):
    """-A, 2 A, A / 3: value and gradient are those of A, times the factor, on the same key."""
    coefficients = family()
    key = jr.key(5)

    def derivative(wrap):
        def f(theta):
            operator = wrap(lx.MatrixLinearOperator(polynomial(theta, coefficients), PSD))
            return tr.trace(key, operator, K, CLASSES[name]).value

        return jax.value_and_grad(f)(THETA)

    def tagged(operator):
        return lx.TaggedLinearOperator(operator, PSD)

    plain = derivative(lambda operator: operator)
    for factor, wrap in [
        (-1, lambda operator: -operator),
        (2, lambda operator: tagged(2.0 * operator)),
        (1 / 3, lambda operator: tagged(operator / 3.0)),
        (-2 / 3, lambda operator: -tagged(2.0 * operator / 3.0)),
    ]:
        np.testing.assert_allclose(derivative(wrap), np.array(plain) * factor, rtol=1e-12)
    assert plain[1] != 0


@pytest.mark.parametrize("name", PROBED)
def test_hessian_in_several_parameters(name):
    """The mixed second derivative of b^2 B + b c C + c^3 D."""
    matrices = family()

    def hessian(key, parameters, matrices):
        def f(parameters):
            b, c = parameters
            matrix = b**2 * matrices[0] + b * c * matrices[1] + c**3 * matrices[2]
            return value(key, matrix, CLASSES[name])

        return jax.hessian(f)(parameters)

    samples = each(hessian, keys(COUNT), jnp.array([0.7, 0.4]), matrices)
    t_b, t_c, t_d = (np.trace(matrix) for matrix in matrices)
    np.testing.assert_allclose(samples[:, 0, 1], samples[:, 1, 0], rtol=1e-11)
    for i, j, truth in [(0, 0, 2 * t_b), (0, 1, t_c), (1, 1, 6 * 0.4 * t_d)]:
        assert_mean(samples[:, i, j], truth, tolerance=0.1)


@pytest.mark.parametrize("name", ["hutchinson", "xtrace"])
def test_only_the_value_has_a_derivative(name):
    coefficients = family()

    def others(theta):
        operator = operator_for(CLASSES[name], polynomial(theta, coefficients), PSD)
        solution = tr.trace(jr.key(0), operator, K, CLASSES[name])
        return solution.value, solution.std_err, solution.stats["std.err"]

    jacobian = jax.jacrev(others)(THETA)
    tangents = jax.jvp(others, (THETA,), (1.0,))[1]
    for value_, std_err, same in (jacobian, tangents):
        assert value_ != 0
        assert std_err == 0
        assert same == 0

    # The derivative of the value costs one product with a block, that of the standard error none.
    def products(which):
        jacobian = jax.jacrev(lambda theta: others(theta)[which])
        return str(jax.make_jaxpr(jacobian)(THETA)).count("dot_general[")

    assert products(1) == products(0) - 1


@pytest.mark.parametrize(
    "name",
    [
        variant("hutchinson"),
        variant("hutch++"),
        "xtrace",
        variant("xnystrace"),
        "exact",
        variant("auto"),
    ],
)
def test_what_is_not_differentiated_costs_nothing(name):
    """A = B + theta C with theta differentiated: no further product with B.

    B's products are counted by a callback, which has no derivative: asking for one is an error.
    """
    b, c, _ = (np.asarray(matrix) for matrix in family())
    spent = []

    def count(x):
        spent.append(int(np.prod(x.shape[:-1])))
        return np.asarray(x) @ b.T

    def product(x):
        return jax.pure_callback(
            count, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims"
        )

    structure = jax.ShapeDtypeStruct((N,), jnp.float64)
    fixed = lx.FunctionLinearOperator(product, structure, PSD)

    def f(theta):
        moving = lx.MatrixLinearOperator(theta * jnp.asarray(c), PSD)
        operator = lx.TaggedLinearOperator(fixed + moving, PSD)
        return tr.trace(jr.key(1), operator, K, CLASSES[name])

    solution = jax.block_until_ready(jax.jit(f)(THETA))
    plain, spent[:] = sum(spent), []
    both = jax.jit(jax.value_and_grad(lambda theta: f(theta).value))
    _, gradient = jax.block_until_ready(both(THETA))
    assert plain == int(solution.num_matvecs) > 0
    assert sum(spent) == plain
    # The same gradient as with B a matrix.
    expected = jax.grad(lambda t: value(jr.key(1), jnp.asarray(b) + t * c, CLASSES[name]))(THETA)
    if name == "auto":  # the trace of C is read
        expected = np.trace(c)
    np.testing.assert_allclose(gradient, expected, rtol=1e-11)


def test_constant_operator_is_not_pushed_forward():
    """A derivative in something else entirely leaves the estimate as it was."""
    b, _, _ = family()

    def f(x):
        return x * value(jr.key(0), b, tr.XTraceEstimator())

    primitives = [eqn.primitive.name for eqn in jax.make_jaxpr(jax.grad(f))(2.0).eqns]
    assert primitives.count("trace") == 1
    params = next(e for e in jax.make_jaxpr(jax.grad(f))(2.0).eqns if e.primitive.name == "trace")
    assert params.params["params"].weights is False
    np.testing.assert_array_equal(jax.grad(f)(2.0), f(1.0))


def squared_distances(n):
    points = np.random.default_rng(0).uniform(size=(n, 2))
    return jnp.asarray(np.sum((points[:, None] - points[None]) ** 2, axis=-1))


def test_shift_of_a_kernel_is_exact():
    """d/ds tr(K + s I) = n without an error, as the default estimator takes it apart."""
    kernel = jnp.exp(-squared_distances(60) / (2 * 0.3**2))

    def f(s):
        identity = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((60,), jnp.float64))
        operator = lx.MatrixLinearOperator(kernel, PSD) + s * identity
        return tr.trace(jr.key(0), operator, 20).value

    np.testing.assert_array_equal(jax.grad(f)(0.1), 60.0)
    np.testing.assert_array_equal(jax.jvp(f, (0.1,), (1.0,))[1], 60.0)


def kernel_gradients(estimator, k=60, n=500):
    """60 derivatives of tr(K_l + 0.01 I) in the length scale l, 60 tangent products each."""
    squares = squared_distances(n)

    def derivative(key, length, squares):
        def f(length):
            kernel = jnp.exp(-squares / (2 * length**2))
            return value(key, kernel + 0.01 * jnp.eye(n), estimator, k)

        return jax.jvp(f, (length,), (jnp.ones_like(length),))[1]

    return np.asarray(each(derivative, keys(60), jnp.asarray(0.3), squares))


@pytest.mark.slow
def test_kernel_length_scale():
    """The weights see the kernel's few large eigenvalues, which its derivative shares."""
    xtrace = kernel_gradients(tr.XTraceEstimator())
    hutchinson = kernel_gradients(tr.HutchinsonEstimator())
    # The diagonal of K is constant, so the exact derivative is 0: |mean| < 4 standard errors.
    for samples in (xtrace, hutchinson):
        assert abs(samples.mean()) < Z * samples.std(ddof=1) / np.sqrt(60)
    # Of 60 samples each, a ratio of standard deviations is known to 13 %.
    assert hutchinson.std(ddof=1) > 50 * xtrace.std(ddof=1)
    print(f"\nstd: Hutchinson {hutchinson.std(ddof=1):.4g}, XTrace {xtrace.std(ddof=1):.4g}")


def test_weights_are_traced_only_for_a_derivative(monkeypatch):
    """Nothing is spent on them, not even time to trace, where nobody takes one."""
    jax.clear_caches()
    made = []

    def watched(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: made.append(name) or original(*args))

    watched(xtrace, "xtrace_weights")
    watched(estimator, "weights_of")
    watched(log_quadrature, "derivative_core")
    watched(funm, "divided_differences")
    b, c, _ = family()

    def of_trace(theta):
        return value(jr.key(0), b + theta * c, tr.XTraceEstimator())

    def of_logdet(theta):
        operator = lx.MatrixLinearOperator(b + theta * c + jnp.eye(N), PSD)
        return tr.logdet(jr.key(0), operator, K, preconditioner=None).value

    def of_function(theta):
        operator = lx.MatrixLinearOperator(b + theta * c, PSD)
        return tr.spectral_sum(jr.key(0), jnp.exp, operator, K).value

    of_function_of_matrix = {"divided_differences"}
    of_logarithm = {"derivative_core", "weights_of", *of_function_of_matrix}
    names = ({"xtrace_weights"}, of_logarithm, of_function_of_matrix)
    for fn, expected in zip((of_trace, of_logdet, of_function), names, strict=True):
        jax.jit(fn).lower(THETA)
        if fn is of_trace:
            fn(THETA)
        assert made == []
        jax.jit(jax.grad(fn)).lower(THETA)
        assert set(made) == expected
        made.clear()
    jax.clear_caches()

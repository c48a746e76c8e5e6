"""tr f(A), spectral densities and eigenvalue counts, by stochastic Lanczos quadrature."""

import functools
import itertools

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._core.primitive import _forever, _implementation
from traceax._functions.nodes import divided_differences
from traceax._functions.spectral import eigenvalue_count, spectral_density, spectral_sum

from ..helpers import NSD, PSD, by_products, drawn, keys, over_keys, random_unitary, with_spectrum
from ..reference import each, function_of, krylov_basis

SYM = lx.symmetric_tag
N = 40
FUNCTIONS = {"log": (jnp.log, np.log), "exp": (jnp.exp, np.exp), "inverse": (lambda x: 1 / x,) * 2}
SLOPES = {"log": lambda x: 1 / x, "exp": np.exp, "inverse": lambda x: -1 / x**2}


def spectrum(name):
    return {
        "mild": np.linspace(0.5, 3, N),
        "hard": np.concatenate([1e-2 + 1e-3 * np.arange(N - 10), 2.0 ** np.arange(10)]),
        "indefinite": np.linspace(-2, 1.5, N),
    }[name]


def example(name, dtype=np.float64):
    return with_spectrum(np.random.default_rng(1), spectrum(name), dtype)


CASES = {  # matrix, tags, function
    "complex": (example("hard", np.complex128), PSD, "log"),
    "indefinite": (example("indefinite"), SYM, "exp"),
}


@functools.partial(jax.jit, static_argnames=("name", "k", "num_steps", "tags"))
def estimate(key, matrix, name, k, num_steps=None, tags=PSD):
    operator = lx.MatrixLinearOperator(matrix, tags)
    return spectral_sum(key, FUNCTIONS[name][0], operator, k, num_steps=num_steps)


def sphere(key, p, dtype=np.float64):
    """The probes of the estimate."""
    return drawn(tr.SphereSampler(), key, N, p, dtype)


# --- the recurrence ------------------------------------------------------------------------------


def naive_rule(matrix, z, q):
    """Nodes, weights, basis and eigenvectors from an orthonormal basis of the Krylov space."""
    v = krylov_basis(matrix, z[:, None], q)
    t = (v.conj().T @ matrix @ v).real
    theta, s = np.linalg.eigh((t + t.T) / 2)
    return theta, s[0] ** 2, v, s


def naive_hidden(matrix, rule, f):
    """What smaller eigenvalues may hide of f, where no clusters show."""
    theta, w, v, s = rule
    i, after = np.argsort(abs(theta))[:2]
    x, a = theta[i], theta[i] * abs(theta[i] / theta[after])
    r = np.linalg.norm(matrix @ v @ s[:, i] - x * (v @ s[:, i]))
    assert max(abs(theta[after]) / 100, r / 3) < abs(x)
    bend = f(a) - f(x) - 2 * (a / x - 1) * (f(x) - f(x / 2))
    change = r**2 / (r**2 + (x - a) ** 2) * abs(bend)
    return w[i] * change * (change > abs(f(x)) / 20)


def test_functions_are_divided_where_that_would_cancel():
    """Gaps from 0 to the size of the nodes, against formulas that do not cancel."""
    gaps = np.concatenate([[0], 10.0 ** np.arange(-16, 1)])
    divided = jax.jit(divided_differences, static_argnums=0)
    for theta in (1e-12, 1.0, 1e12):
        pairs = np.stack([np.full_like(gaps, theta), theta + theta * gaps], axis=1)
        delta = pairs[:, 1] - pairs[:, 0]
        ratio = np.where(delta == 0, 1, np.log1p(delta / theta) / np.where(delta == 0, 1, delta))
        exact = np.where(delta == 0, 1 / theta, ratio)
        ours = np.asarray(divided(jnp.log, pairs))[:, 0, 1]
        # log(theta) / 1e-3 theta loses five digits where the scheme changes over.
        np.testing.assert_allclose(ours, exact, rtol=2e-11)
    for theta in (0.0, 1e-9, -3.0):  # the scale of exp is 1, whatever theta
        pairs = np.stack([np.full_like(gaps, theta), theta + gaps], axis=1)
        delta = pairs[:, 1] - pairs[:, 0]
        ratio = np.expm1(delta) / np.where(delta == 0, 1, delta)
        exact = np.exp(theta) * np.where(delta == 0, 1, ratio)
        ours = np.asarray(divided(jnp.exp, pairs))[:, 0, 1]
        np.testing.assert_allclose(ours, exact, rtol=2e-12)


# --- the estimate on the same probes -------------------------------------------------------------


@pytest.mark.parametrize("name", ["complex", "indefinite"])
def test_equals_the_naive_formulas_on_the_same_probes(name):
    matrix, tags, function = CASES[name]
    f, key, p, q = FUNCTIONS[function][1], jax.random.key(5), 3, 11
    d = 3  # a quarter of the steps, rounded up
    solution = jax.device_get(estimate(key, jnp.asarray(matrix), function, p * q + 2, q, tags))

    c = N / (N + 1) if np.iscomplexobj(matrix) else 2 * N / (N + 2)
    samples, squares, errors, found = [], [], [], []
    for z in sphere(key, p, matrix.dtype).T:
        rules = [naive_rule(matrix, z, m) for m in (q, q - d, q - 2 * d)]
        a = [N * np.sum(w * f(theta)) for theta, w, _, _ in rules]
        samples.append(a[0])
        squares.append(N * np.sum(rules[0][1] * f(rules[0][0]) ** 2))
        found.append((rules[0][1], f(rules[0][0])))
        last, before = abs(a[0] - a[1]), abs(a[1] - a[2])
        rate = min(last / before, 0.95)
        hidden = 2 * N * naive_hidden(matrix, rules[0], f)
        errors.append(last * max(1, 8 * rate / (1 - rate)) + hidden)
    value = np.mean(samples)
    variance = c * (np.mean(squares) - value**2 / N) / p / (1 - c / (N * p))
    np.testing.assert_allclose(solution.value, value, rtol=1e-11)
    np.testing.assert_allclose(solution.std_err, np.sqrt(variance), rtol=1e-9)
    np.testing.assert_allclose(solution.quadrature_error, np.mean(errors), rtol=1e-7, atol=1e-12)
    assert not jnp.iscomplexobj(solution.value)
    assert int(solution.num_matvecs) == p * q
    second, fourth = (
        np.mean([np.sum(w * (x - value / N) ** power) for w, x in found]) for power in (2, 4)
    )
    np.testing.assert_allclose(solution.stats["dof"], N * p * second**2 / fourth, rtol=1e-7)
    early = np.mean(errors) > max(4 * np.sqrt(variance), abs(value) / 20)
    expected = tr.RESULTS.not_converged if early else tr.RESULTS.successful
    assert solution.result == expected
    np.testing.assert_array_equal(solution.stats["std.err"], solution.std_err)


# --- exact cases ---------------------------------------------------------------------------------


def test_exact_values_state_their_rounding():
    """In single precision 1 / x of a smooth kernel is off by some 1e-3, and an entry of the
    diagonal by a tenth. A sum may be 0.
    """
    x, noise = np.linspace(0, 1, 150), 1e-4
    matrix = (np.exp(-np.square(x[:, None] - x) / 0.08) + noise * np.eye(150)).astype(np.float32)
    values, basis = np.linalg.eigh(matrix.astype(np.float64))
    of_values = 1 / values

    @jax.jit
    def run(matrix):
        given = jax.random.key(0), jnp.reciprocal, lx.MatrixLinearOperator(matrix, SYM), 150
        zero = spectral_sum(given[0], lambda x: x - jnp.trace(matrix) / 150, *given[2:])
        return spectral_sum(*given), tr.spectral_diagonal(*given), zero

    total, diagonal, zero = jax.device_get(run(matrix))
    assert zero.result == tr.RESULTS.successful
    for found, truth in ((total, of_values.sum()), (diagonal, np.square(basis) @ of_values)):
        error = np.abs(np.asarray(found.value, np.float64) - truth)
        stated = np.asarray(found.quadrature_error, np.float64)
        assert np.all((error <= stated) & (stated <= np.abs(truth)))
        assert np.all(np.asarray(found.std_err) == 0)
        assert found.result == tr.RESULTS.successful
    assert np.max(error) > 1e-4 * np.max(np.abs(truth))  # worth stating


def test_exhausted_spaces_are_integrated_exactly():
    """log det(2 I) to rounding; for I plus rank one the form of every probe to rounding."""
    dtype = np.complex128
    u = random_unitary(np.random.default_rng(0), N, dtype)[:, :1]
    rank_one = np.eye(N) + 3 * u @ u.conj().T
    key, eps = jax.random.key(2), np.finfo(dtype).eps

    @jax.jit
    def shifted(matrix, scale):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        return spectral_sum(key, lambda x: jnp.log(x / scale), operator, 12)

    for scale in (1.0, 1e20, 1e-20):
        for matrix in (2 * np.eye(N), rank_one, np.zeros((N, N))):
            solution = jax.device_get(shifted((matrix * scale).astype(dtype), scale))
            if not matrix.any():  # the logarithm of 0 is no estimate
                assert solution.result == tr.RESULTS.outside_domain
                assert np.isnan(solution.value)
                continue
            z = sphere(key, 1, dtype)[:, 0]
            truth = np.vdot(z, function_of(matrix, np.log) @ z).real
            np.testing.assert_allclose(solution.value, truth, rtol=40 * eps, atol=40 * eps * N)
            assert (solution.result, solution.quadrature_error) == (tr.RESULTS.successful, 0)
            if matrix is not rank_one:
                np.testing.assert_allclose(solution.value, N * np.log(2), rtol=20 * eps)
                assert solution.std_err < 20 * eps * N


def test_rounding_errors_below_zero_count_as_zero_for_semidefinite_operators():
    eigenvalues = np.r_[np.zeros(N - 5), np.arange(1, 6.0)]
    matrix = with_spectrum(np.random.default_rng(0), eigenvalues)

    @jax.jit
    def run(key):
        minus = lx.MatrixLinearOperator(-matrix, NSD)
        plus = spectral_sum(key, jnp.sqrt, lx.MatrixLinearOperator(matrix, PSD), 25)
        return plus, spectral_sum(key, lambda x: jnp.sqrt(-x), minus, N)

    for solution in jax.device_get(run(jax.random.key(0))):
        assert solution.result == tr.RESULTS.successful
        error = abs(solution.value - np.sum(np.sqrt(eigenvalues)))
        assert error <= 3 * solution.std_err + 1e-6


# --- bias and errors -----------------------------------------------------------------------------


def direction(matrix):
    """A Hermitian direction, of the same field."""
    rng = np.random.default_rng(7)
    tangent = rng.standard_normal(matrix.shape)
    if np.iscomplexobj(matrix):
        tangent = tangent + 1j * rng.standard_normal(matrix.shape)
    return ((tangent + tangent.conj().T) / 2).astype(matrix.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "p"), [("complex", 1), ("indefinite", 1), ("indefinite", 3)])
def test_unbiased_with_calibrated_errors_and_derivatives(name, p):
    """With enough steps the value and its derivative are unbiased; one probe has an error."""
    matrix, tags, function = CASES[name]
    q = 20 if p == 1 else 12

    def one(key, matrix, tangent):
        def along(t):
            operator = lx.MatrixLinearOperator(matrix + t.astype(matrix.dtype) * tangent, tags)
            solution = spectral_sum(key, FUNCTIONS[function][0], operator, q * p, num_steps=q)
            return solution.value, solution

        _, slope, solution = jax.jvp(along, (jnp.zeros(()),), (jnp.ones(()),), has_aux=True)
        return slope, solution

    given = each(one, keys(500), jnp.asarray(matrix), jnp.asarray(direction(matrix)))
    slope, solution = jax.device_get(given)
    truth = np.trace(function_of(matrix, FUNCTIONS[function][1])).real
    true_slope = np.vdot(function_of(matrix, SLOPES[function]), direction(matrix)).real
    for samples, mean in ((solution.value, truth), (slope, true_slope)):
        # |z| stays below 3.9 with probability 99.99 %.
        assert abs(samples.mean() - mean) < 3.9 * samples.std(ddof=1) / np.sqrt(500)
    errors = solution.value - truth
    # The variance is unbiased: over 500 keys known to about 7 %, and its estimate to less.
    ratio = np.mean(errors**2) / np.mean(solution.std_err**2)
    assert 0.75 < ratio < 1.3
    covered = np.mean(np.abs(errors) < 2 * solution.std_err)
    assert 0.92 < covered < 0.98


@pytest.mark.parametrize(("function", "q", "least"), [("log", 6, 1e-4), ("inverse", 8, 1e-2)])
def test_the_quadrature_error_covers_the_truncation(function, q, least):
    """Against z^H f(A) z, for steps that are far too few to almost enough."""
    eigenvalues, traced = np.geomspace(least, 1, 300), FUNCTIONS[function][0]

    def one(key, eigenvalues):
        operator = lx.DiagonalLinearOperator(eigenvalues)
        solution = spectral_sum(key, traced, operator, q, num_steps=q)
        probe = tr.SphereSampler()(key, 300, 1, jnp.float64)[:, 0]
        return solution, jnp.sum(jnp.square(probe) * traced(eigenvalues))

    solutions, forms = each(one, keys(60), jnp.asarray(eigenvalues))
    errors = np.abs(np.asarray(solutions.value) - np.asarray(forms))
    ratios = np.asarray(solutions.quadrature_error) / errors
    assert np.mean(ratios > 1) > 0.93
    assert np.median(ratios) < 60
    # Here a bias, which the standard error does not tell of.
    assert np.median(errors) > 0.3 * np.median(solutions.std_err)


# --- derivatives ---------------------------------------------------------------------------------


def naive_weights(matrix, z, q, f, slope):
    """G = ||z||^2 V S (D o s_1 s_1^T) S^T V^T."""
    theta, _, v, s = naive_rule(matrix, z, q)
    gap = theta[:, None] - theta + np.eye(q)
    d = np.where(np.eye(q) > 0, np.diag(slope(theta)), (f(theta)[:, None] - f(theta)) / gap)
    return np.vdot(z, z).real * v @ s @ (d * np.outer(s[0], s[0])) @ s.T @ v.conj().T


@pytest.mark.parametrize("name", ["complex", "indefinite"])
def test_derivatives_are_those_of_the_published_weights(name):
    """Converged or not, in forward and reverse mode."""
    matrix, tags, function = CASES[name]
    p, q, key, tangent = 2, 9, jax.random.key(4), direction(matrix)
    fns = FUNCTIONS[function][1], SLOPES[function]
    probes = sphere(key, p, matrix.dtype).T
    g = np.mean([naive_weights(matrix, z, q, *fns) for z in probes], axis=0)

    @jax.jit
    def slopes(matrix, tangent):
        def along(t):
            return estimate(
                key, matrix + t.astype(matrix.dtype) * tangent, function, p * q, q, tags
            )

        zero, one = jnp.zeros(()), jnp.ones(())
        forward = jax.jvp(lambda t: along(t).value, (zero,), (one,))[1]
        others = jax.grad(lambda t: along(t).std_err + along(t).quadrature_error)(zero)
        return forward, jax.grad(lambda t: along(t).value)(zero), others

    *both, others = slopes(jnp.asarray(matrix), jnp.asarray(tangent))
    np.testing.assert_allclose(both, np.vdot(g, tangent).real, rtol=1e-8)
    assert others == 0


@pytest.mark.parametrize("k", [24, N])
def test_what_the_function_closes_over_has_a_derivative(k):
    """Alone and together with the operator, which shares the parameter."""
    matrix, key = example("mild"), jax.random.key(3)
    base, tangent = jnp.asarray(matrix), jnp.asarray(direction(matrix))

    def value(shift, t):
        operator = lx.MatrixLinearOperator(base + t * tangent, PSD)
        fn = lambda x: jnp.log(x + shift)  # noqa: E731
        return spectral_sum(key, fn, operator, k, num_steps=k).value

    @jax.jit
    def slopes(s):
        return *jax.grad(value, (0, 1))(s, jnp.zeros(())), jax.grad(lambda s: value(s, s - s))(s)

    z = sphere(key, 1)
    g = z @ z.T if k < N else np.eye(N)
    inverse = np.linalg.inv(matrix + 0.3 * np.eye(N))
    by_shift, by_operator, together = slopes(jnp.asarray(0.3))
    rtol = 1e-5 if k < N else 1e-11
    np.testing.assert_allclose(by_shift, np.vdot(g, inverse), rtol=rtol)
    np.testing.assert_allclose(together, by_shift, rtol=1e-11)
    assert abs(by_operator) > 1e-3


def test_a_second_call_is_not_compiled_again():
    operator = lx.MatrixLinearOperator(jnp.asarray(example("mild")), PSD)

    def size(shift):
        spectral_sum(jax.random.key(0), lambda x: jnp.log(x + shift), operator, 7)
        return _forever[_implementation]._cache_size()

    assert size(jnp.asarray(0.1)) == size(jnp.asarray(0.2))


# --- density and count ---------------------------------------------------------------------------


def test_density():
    matrix, grid = example("indefinite"), np.linspace(-6, 6, 121)
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), SYM)
    eigenvalues, width = np.linalg.eigvalsh(matrix), 0.5
    distance = (grid[:, None] - eigenvalues) / width
    truth = np.mean(np.exp(-(distance**2) / 2), axis=1) / (width * np.sqrt(2 * np.pi))

    @jax.jit
    def run(key):
        calls = (N, width), (36, width), (N, None)
        return [spectral_density(key, operator, k, grid, width=w) for k, w in calls]

    exact, *densities = jax.device_get(run(jax.random.key(0)))
    np.testing.assert_allclose(exact.value, truth, rtol=1e-10, atol=1e-15)
    assert np.all(exact.std_err == 0)
    for density in densities:
        assert density.value.shape == density.std_err.shape == density.quadrature_error.shape
        np.testing.assert_allclose(np.sum(density.value) * 0.1, 1, rtol=1e-6)
    bound = 4 * densities[0].std_err + densities[0].quadrature_error + 1e-12
    assert np.all(np.abs(densities[0].value - truth) < bound)


def test_counts_and_their_bound():
    matrix = example("indefinite")
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), SYM)
    eigenvalues, vectors = np.linalg.eigh(matrix)

    @functools.partial(jax.jit, static_argnames="k")
    def count(key, a, b, k):
        return eigenvalue_count(key, operator, a, b, k)

    for a, b in ((-1.0, 0.5), (-np.inf, 0.0), (-5.0, 5.0), (0.7, np.inf)):
        inside = (eigenvalues >= a) & (eigenvalues <= b)
        exact = count(jax.random.key(0), a, b, N)
        given = exact.value, exact.std_err, exact.quadrature_error
        np.testing.assert_allclose(given, (inside.sum(), 0, 0), atol=1e-12)
        covered = []
        for key in keys(20):
            solution = jax.device_get(count(key, a, b, 20))
            z = vectors.T @ sphere(key, 1)[:, 0]
            # The bound holds for every probe, not only on average.
            bound = solution.quadrature_error + 1e-9
            assert abs(solution.value - np.sum(z[inside] ** 2)) <= bound
            away = abs(float(solution.value) - inside.sum())
            covered.append(away <= 2 * solution.std_err + bound)
        assert np.mean(covered) >= 0.9
    for a, b in ((np.nan, 1.0), (1.0, 0.0)):
        assert count(keys(1)[0], a, b, N).result == tr.RESULTS.outside_domain
    slope = jax.jit(jax.grad(lambda t: count(keys(1)[0], t, 1.0, 9).value))
    assert slope(0.0) == 0


@pytest.mark.parametrize("k", [24, 90])
def test_counts_of_eigenvalues_at_the_ends(k):
    """A projector of rank 30, n = 90: rounding errors decide on which side of 0 and 1 its
    eigenvalues are computed. They are counted, and the bound contains them.
    """
    matrix = with_spectrum(np.random.default_rng(0), np.r_[np.ones(30), np.zeros(60)])
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), SYM)

    @jax.jit
    def count(key, a, b):
        return eigenvalue_count(key, operator, a, b, k)

    for a, b, truth in ((1.0, np.inf, 30), (-np.inf, 0.0, 60), (1.0, 1.0, 30)):
        for key in keys(5):
            solution = jax.device_get(count(key, a, b))
            # Of every node that is counted, rounding leaves it open whether it is inside.
            if k == 90:
                assert solution.value == truth
                np.testing.assert_allclose(solution.quadrature_error, truth, rtol=1e-9)
                assert solution.result == tr.RESULTS.not_converged  # nothing is known
            else:
                assert solution.result == tr.RESULTS.successful
                assert solution.std_err >= solution.value
                assert abs(solution.value - truth) <= solution.std_err
    # In between nothing is open.
    solution = jax.device_get(count(keys(1)[0], 0.5, np.inf))
    assert abs(solution.value - 30) <= 6 * solution.std_err + 1e-9
    assert solution.quadrature_error <= 1e-9


@pytest.mark.parametrize("k", [12, 40])
def test_recurrences_that_end_too_early_say_so(k):
    """A condition number of 1e6, of which k = 12 and 40 see nothing: the quadrature error dwarfs
    the value, or a scatter that would not reveal the bias, and the result says so. (k = 12 is
    quadrature alone.)
    """
    eigenvalues = np.logspace(0, -8, 200) + 1e-6
    matrix = with_spectrum(np.random.default_rng(0), eigenvalues)
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), PSD)

    functions = jnp.reciprocal, jnp.exp, jnp.log
    shifts = np.array([0.0, 1e-6])

    @jax.jit
    def run(key, number):
        fn = lambda x: jax.lax.switch(number, functions, x)  # noqa: E731
        return spectral_sum(key, fn, operator, k, shifts=shifts)

    for key in keys(3):
        early, exponential, log_dets = (jax.device_get(run(key, number)) for number in range(3))
        assert abs(early.value[0] - np.sum(1 / eigenvalues)) > 10 * early.std_err[0]
        assert early.result == log_dets.result == tr.RESULTS.not_converged
        assert exponential.result == tr.RESULTS.successful


def test_shifts_of_any_shape():
    """Two axes are those of the value, exact or not, by both methods."""
    operator = lx.MatrixLinearOperator(jnp.asarray(example("mild")), PSD)
    shifts = np.array([[0.0, 0.5, 1.0], [2.0, 3.0, 4.0]])
    truth = np.sum(np.log(np.linspace(0.5, 3, N) + shifts[..., None]), axis=-1)

    @functools.partial(jax.jit, static_argnums=1)
    def run(key, k):
        # (A log-determinant with shifts is this sum: see `test_krylov_aware.py`.)
        return spectral_sum(key, jnp.log, operator, k, shifts=shifts)

    for k in (12, 20, N):
        solution = jax.device_get(run(keys(1)[0], k))
        assert solution.value.shape == solution.std_err.shape == (2, 3)
        bound = 4 * solution.std_err + solution.quadrature_error + 1e-10
        assert np.all(np.abs(solution.value - truth) <= bound)
        assert solution.num_matvecs <= k
        assert solution.result == tr.RESULTS.successful
    # Of n products, with its rounding.
    np.testing.assert_allclose(solution.value, truth, rtol=1e-11)
    assert np.all(solution.std_err == 0)
    assert np.all(solution.quadrature_error < 1e-9 * truth)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [10, 24, N])
def test_failures_are_told(k):
    key, matrix = jax.random.key(0), example("indefinite")
    outside = estimate(key, matrix, "log", k, tags=SYM)
    assert outside.result == tr.RESULTS.outside_domain
    assert np.isnan(outside.value)
    assert np.isnan(outside.std_err)
    for bad in (np.nan, np.inf):
        broken = matrix.copy()
        broken[3, 3] = bad
        solution = estimate(key, broken, "log", k, tags=SYM)
        assert solution.result == tr.RESULTS.nonfinite_operator
        assert np.isnan(solution.value)
    # One bad shift leaves the others.
    mild = lx.MatrixLinearOperator(jnp.asarray(example("mild")), PSD)
    shifts = np.array([0.0, -1.0, 1.0])
    nothing = tr.logdet(key, lx.MatrixLinearOperator(jnp.asarray(broken), PSD), k, shifts=shifts)
    assert np.all(np.isnan(nothing.value))
    several = tr.logdet(key, mild, k, shifts=shifts)
    truth = np.log(np.linspace(0.5, 3, N) + np.array([[0.0], [1.0]])).sum(axis=1)
    bars = 4 * several.std_err + several.quadrature_error
    assert several.result == tr.RESULTS.outside_domain
    assert np.isnan(several.value[1])
    assert np.all((np.abs(several.value[::2] - truth) <= bars[::2]) & (bars[::2] < 20))
    # The products are finite, the sum is not.
    flat = lx.MatrixLinearOperator(88 * np.eye(N, dtype=np.float32), PSD)
    assert spectral_sum(key, jnp.exp, flat, k).result == tr.RESULTS.outside_domain
    if k == 10:
        with pytest.raises(Exception, match="Ritz value"):
            spectral_sum(key, jnp.log, lx.MatrixLinearOperator(matrix, SYM), k, throw=True)


@pytest.mark.parametrize("tag", [PSD, SYM])
def test_exact_functions_of_singular_matrices_are_not_finite(tag):
    """Second differences, integers of rank n - 1, graphs: rounding leaves of f(0) no number."""
    differences = np.diff(np.eye(40), 2, axis=0)
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 3, (200, 40, 40))
    edges = edges + edges.transpose(0, 2, 1)
    graphs = edges.sum(axis=1)[:, None] * np.eye(40) - edges
    integers = [x @ x.T for x in rng.integers(-2, 3, (4, 40, 39))]
    stack = np.concatenate([[differences.T @ differences], integers, graphs]).astype(float)

    def solve(matrix):
        given = lx.MatrixLinearOperator(matrix, tag), 40
        calls = itertools.product((spectral_sum, tr.spectral_diagonal), (jnp.log, jnp.reciprocal))
        return [call(jax.random.key(0), fn, *given).result for call, fn in calls]

    results = jax.jit(lambda stack: jax.lax.map(solve, stack))(stack)
    for result in results:
        assert not np.any(result == tr.RESULTS.successful)
    assert np.all(results[0] == tr.RESULTS.outside_domain)


def test_small_eigenvalues_that_no_recurrence_meets_are_told():
    """x^-1/2 over four decades: all orders agree on too little. Where nothing separates eigenvalues
    from 0, intervals go on until there. The logarithm is right, and mostly successful; but not of
    three or four clusters, of which the recurrence sees fewer.
    """
    spread = np.linspace(1e-4, 4, 400)

    @functools.partial(jax.jit, static_argnums=2)
    def shares(eigenvalues, number, k):
        operator = by_products(jnp.diag(eigenvalues), PSD)
        branches = [jax.lax.rsqrt, jnp.log, lambda x: x**-1.5, lambda x: x / (x + 0.01)]
        branches.append(lambda x: jnp.exp(-x))
        fn = lambda x: jax.lax.switch(number, branches, x)  # noqa: E731
        found = jax.lax.map(lambda key: spectral_sum(key, fn, operator, k), keys(20))
        covered = jax.vmap(lambda x: x.interval()[1])(found) >= jnp.sum(fn(eigenvalues))
        return jnp.mean(found.result == tr.RESULTS.successful), jnp.mean(covered)

    assert max(shares(spread, 0, k)[0] for k in (12, 48)) <= 0.1
    assert shares(spread, 2, 100)[1] >= 0.75
    assert shares(spread, 1, 100)[0] >= 0.9  # 98.6 % of 1,000 keys, less three standard errors
    few = np.sort(np.outer([0.1, 10, 1000], np.linspace(1, 1.2, 195)).ravel())[185:]
    assert max(shares(few, 4, k)[0] for k in (16, 60)) <= 0.1
    for scales in ([1e4, 1.0, 1e-4], [1e6, 1e3, 1.0, 1e-3]):
        clusters = np.outer(scales, np.linspace(1, 3, 400 // len(scales) + 1)).ravel()[:400]
        assert shares(clusters, 1, 48)[0] == shares(clusters, 3, 48)[0] == 0
        found = over_keys(20, lambda key: tr.logdet(key, by_products(np.diag(clusters), PSD), 48))  # noqa: B023
        assert not np.any(found.result == tr.RESULTS.successful)


#: Spectra with a condition below 1e4.
ORDINARY = {
    "flat": np.ones(100),
    "uniform": np.linspace(0.01, 1, 100),
    "geometric": np.geomspace(5e-2, 1, 100),
    "decaying with noise": 10 * 0.7 ** np.arange(100) + 0.01,
    "powers with noise": (1.0 + np.arange(100)) ** -2 + 1e-3,
    "two clusters": np.repeat([1.0, 100.0], 50),
    "spikes": np.concatenate([np.ones(95), np.geomspace(10, 5000, 5)]),
    "grid": 0.05 + 2 - 2 * np.cos(np.pi * np.arange(100) / 100),
    "Wishart": np.square(0.3 + 1.4 * np.sin(np.linspace(0, np.pi / 2, 100))),
    "step": np.where(np.arange(100) < 30, 1.0, 1e-2),
}


@pytest.mark.slow
def test_ordinary_matrices_are_successful():
    """A rule that doubts everything is no cure: 98 % of the keys, which are all of twenty."""
    rng = np.random.default_rng(0)
    matrices = np.stack([with_spectrum(rng, x, np.float64) for x in ORDINARY.values()])
    twenty = keys(20)

    def solve(matrix):
        def calls(key):
            operator = by_products(matrix, PSD)
            return [
                tr.logdet(key, operator, 60).result,
                spectral_sum(key, jnp.log, operator, 60).result,
            ]

        exact = tr.logdet(twenty[0], lx.MatrixLinearOperator(matrix, PSD), 100).result
        return *jax.lax.map(calls, twenty), exact

    *shares, exact = jax.jit(lambda stack: jax.lax.map(solve, stack))(matrices)
    for found in shares:
        share = np.mean(np.asarray(found == tr.RESULTS.successful), axis=1)
        assert np.all(share >= 0.98), dict(zip(ORDINARY, share, strict=True))
    assert np.all(exact == tr.RESULTS.successful)

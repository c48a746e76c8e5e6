"""Log-determinants: exact where they can be, as accurate as promised elsewhere, errors stated."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

from traceax import RESULTS, gaussian_log_density, inverse_trace, logdet, spectral_sum
from traceax._core.precision import any_promotion
from traceax._logdet.log_quadrature import Probes, mean_quotient, sum_of_logarithms
from traceax._logdet.preconditioners import KernelPreconditioner, NystromPreconditioner
from traceax._logdet.preparation import preparation_for
from traceax._sketch.low_rank import low_rank_of

from ..helpers import PSD, by_products, keys, over_keys, with_spectrum

N = 60


def identity(n, dtype=jnp.float64):
    return lx.IdentityLinearOperator(jax.ShapeDtypeStruct((n,), dtype))


def shifted(matrix, s):
    """K + s I as lineax writes it."""
    return lx.MatrixLinearOperator(matrix, PSD) + s * identity(len(matrix), matrix.dtype)


def hidden(matrix, s):
    """The same, where K is known by its products alone."""
    return by_products(matrix, PSD) + s * identity(len(matrix), matrix.dtype)


def decaying(n=N, dtype=np.float64, seed=0):
    return with_spectrum(np.random.default_rng(seed), 10 * 0.7 ** np.arange(n), dtype)


def dense_logdet(matrix):
    return np.linalg.slogdet(np.asarray(matrix))[1]


def built(kind, operator, rank):
    return jax.jit(lambda key: kind(rank=rank).build(key, operator))(jr.key(0))


# --- the preconditioner --------------------------------------------------------------------------


def test_the_inverse_is_a_preconditioner_of_lineax():
    """In a third of the steps, for vectors and for PyTrees, and without a derivative of its own."""
    b = np.cos(np.arange(N))
    structure = {
        "a": jax.ShapeDtypeStruct((N - 4,), float),
        "b": jax.ShapeDtypeStruct((2, 2), float),
    }
    tree = {"a": b[: N - 4], "b": b[N - 4 :].reshape(2, 2)}

    def preconditioner(s):
        operator = lx.TaggedLinearOperator(shifted(decaying(), s), PSD)
        return operator, NystromPreconditioner(rank=30).build(jr.key(0), operator)

    def solve(s, preconditioned):
        operator, p = preconditioner(s)
        options = {"preconditioner": p.inverse()} if preconditioned else {}
        solver = lx.CG(rtol=1e-10, atol=1e-10)
        found = lx.linear_solve(operator, jnp.asarray(b), solver, options=options)
        return found.value, found.stats["num_steps"]

    @jax.jit
    def run(s):
        p = preconditioner(s)[1]
        with pytest.raises(ValueError, match="was built for an operator with 60 rows"):
            p.inverse(jax.ShapeDtypeStruct((5,), float))
        return (
            (p.inverse().as_matrix(), p.factors.solve(jnp.eye(N))),
            (p.inverse().mv(jnp.asarray(b)), p.inverse(structure).mv(tree)),
            (solve(s, True), solve(s, False)),
            jax.grad(lambda s: solve(s, True)[0] @ b)(s),
        )

    with jax.numpy_dtype_promotion("standard"):
        (matrix, inverse), (product, products), solutions, slope = jax.device_get(run(1e-3))
    np.testing.assert_allclose(matrix, inverse, rtol=1e-9)
    np.testing.assert_allclose(products["b"].ravel(), product[N - 4 :], rtol=1e-12)
    (found, few), (_, many) = solutions
    expected = np.linalg.solve(decaying() + 1e-3 * np.eye(N), b)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert few <= many / 3
    np.testing.assert_allclose(slope, -(expected @ expected), rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(np.complex128, NystromPreconditioner), (np.float64, KernelPreconditioner)]
)
def test_low_rank_plus_diagonal_is_its_own_preconditioner(kind, dtype):
    """K of rank 5 and any positive diagonal: P = A to rounding."""
    rng = np.random.default_rng(1)
    matrix = with_spectrum(rng, 5.0 * (np.arange(N) < 5), dtype)
    diagonal = rng.uniform(0.1, 3, N).astype(dtype)
    noise = lx.DiagonalLinearOperator(jnp.asarray(diagonal))
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), PSD) + noise
    dense = matrix + np.diag(diagonal)

    @jax.jit
    def run(key):
        found = kind(rank=12).build(key, operator)
        factors, block = found.factors, jnp.asarray(dense)
        again = factors.inverse_root_adjoint(factors.inverse_root(block))
        return factors.solve(block), again, factors.log_det, found.floor

    solved, again, log_det, floor = run(jr.key(0))
    np.testing.assert_allclose(solved, np.eye(N), atol=1e-9)
    np.testing.assert_allclose(again, np.eye(N), atol=1e-9)
    np.testing.assert_allclose(log_det, dense_logdet(dense), rtol=1e-10)
    if kind is NystromPreconditioner:
        np.testing.assert_allclose(floor, 1, atol=1e-8)


@pytest.mark.slow
def test_floor_is_a_lower_bound():
    """No eigenvalue of P^{-1} A is below it."""
    matrix = jnp.asarray(with_spectrum(np.random.default_rng(0), np.arange(1.0, N + 1) ** -1))
    found = built(NystromPreconditioner, shifted(matrix, 1e-2), 20)
    factors, floor = found.factors, found.floor
    root = factors.inverse_root(matrix + 1e-2 * jnp.eye(N))
    smallest = np.linalg.eigvalsh(factors.inverse_root(root.T))[0]
    assert 0.1 * smallest < floor <= smallest * (1 + 1e-6)


def test_the_dimension_of_what_is_left_out():
    """1 / d is the mean square of the cosines between E^(1/2) omega_i and E^(1/2) omega_j, where E
    is what all other probes leave out: every E written out.
    """
    rank = 6
    omega = np.random.default_rng(0).standard_normal((N, rank)) / np.sqrt(N)
    matrix = decaying() + 0.01 * np.eye(N)
    eps = float(np.finfo(float).eps)
    products = (matrix + np.eye(N)) @ omega  # s = 1
    found = jax.jit(lambda *pair: low_rank_of(*pair, jnp.ones(()), eps).dimension)(omega, products)
    squares = []
    for i, j in itertools.combinations(range(rank), 2):
        others = np.delete(omega, [i, j], axis=1)
        image = matrix @ others
        rest = matrix - image @ np.linalg.solve(others.T @ image, image.T)
        a, b, ab = (omega[:, p] @ rest @ omega[:, q] for p, q in ((i, i), (j, j), (i, j)))
        squares.append(ab**2 / (a * b))
    np.testing.assert_allclose(found, 1 / np.mean(squares), rtol=1e-6)


@pytest.mark.slow
def test_features_and_noise_by_budgets():
    """A flat spectrum with an end within reach: all of it is captured, for all keys. (With a rank
    of 16, 40 features left errors of 10 to 40 nats.)
    """
    n, s = 400, 0.1
    x = np.random.default_rng(1).standard_normal((n, 40))
    operator = hidden(x @ x.T, s)
    values = over_keys(20, lambda key: logdet(key, operator, 70).value)
    truth = dense_logdet(x.T @ x + s * np.eye(40)) + (n - 40) * np.log(s)
    assert np.all(np.abs(values - truth) < 0.1)


def test_a_flat_spectrum_without_an_end_gets_probes():
    """A Wishart matrix: a larger rank would waste products. The sketch tells the trace of M."""
    x = np.random.default_rng(1).standard_normal((200, 200))
    matrix = x @ x.T / 200 + 0.1 * np.eye(200)

    def prepare(key):
        operator = by_products(matrix, PSD)
        built, spent, _, sketch = preparation_for(key, operator, 60, "auto", False)
        mean, s = mean_quotient((jnp.zeros(200), 1.0), *sketch)
        return spent, s, 200 * mean / jnp.trace(built.factors.solve(jnp.asarray(matrix)))

    with any_promotion():
        spent, s, ratios = over_keys(10, prepare)
    assert np.all((spent == 10) & (s == 10))
    assert abs(np.mean(ratios) - 1) < 4 * np.std(ratios) / np.sqrt(10) < 0.2


def test_an_eigenvector_over_a_flat_rest_leaves_nothing_to_chance():
    """1.1 I - 1 1^T / n: without 1, probes and sketch see a multiple of the identity."""
    operator = by_products(1.1 * np.eye(100) - 0.01, PSD)
    values = over_keys(20, lambda key: logdet(key, operator, 30).value)
    assert np.allclose(values, 99 * np.log(1.1) + np.log(0.1), rtol=1e-12)


@pytest.mark.parametrize(("s", "unit"), [(0, 1e200), (6, 1e200), (6, 1e-200)])
def test_a_control_variate(s, unit):
    """The formula on the same probes, with slopes from the nodes of all others."""
    rng = np.random.default_rng(0)
    p, n, mean = 4, 50, 1.1 * unit
    nodes, masses = np.sort(rng.uniform(0.1, 2, (p, 5))) * unit, rng.dirichlet(np.ones(5), p)
    samples = np.sum(masses * np.log(nodes), axis=1)
    probes = Probes(np.ones(p), samples, nodes, masses, np.zeros(p, bool), np.zeros(p))
    found = jax.jit(sum_of_logarithms, static_argnums=(1, 2))(probes, n, False, (mean, s))
    expected = samples.copy()
    for i in range(p):
        x, w = (np.delete(each, i, axis=0).ravel() for each in (nodes, masses))
        slope = np.polyfit(x / unit, np.log(x), 1, w=np.sqrt(w))[0] / unit
        expected[i] -= s / (s + p) * slope * (masses[i] @ nodes[i] - mean)
    np.testing.assert_allclose(found[0], n * np.mean(expected), rtol=1e-12)


# --- exact cases ---------------------------------------------------------------------------------


@pytest.mark.slow(quick=True)
def test_a_diagonal_is_read():
    """It is its own preconditioner, and its derivative is known from the entries."""

    def value(d):
        given = 2 * lx.DiagonalLinearOperator(d), 10
        density = gaussian_log_density(jr.key(0), jnp.ones(N), *given)
        return density.value + inverse_trace(jr.key(0), *given).value

    def exact(d):
        return jax.scipy.stats.norm.logpdf(1, 0, (2 * d) ** 0.5).sum() + (0.5 / d).sum()

    found, expected = (jax.value_and_grad(fn)(np.linspace(0.1, 2, N)) for fn in (value, exact))
    np.testing.assert_allclose(jnp.hstack(found), jnp.hstack(expected), rtol=1e-12, atol=1e-12)
    read = logdet(jr.key(0), 2 * identity(N, np.float64), rtol=1e-18).result
    assert read == RESULTS.not_converged


# --- Gaussian-process kernels --------------------------------------------------------------------


def distances(n, dim):
    points = np.random.default_rng(0).uniform(size=(n, dim))
    return np.sqrt(np.sum((points[:, None] - points[None]) ** 2, axis=-1))


def rbf(r, length):
    return jnp.exp(-(r**2) / (2 * length**2))


def matern32(r, length):
    r = np.sqrt(3) * r / length
    return (1 + r) * jnp.exp(-r)


KERNELS = {
    "rbf-2": (rbf, 2, 0.2, 0.1, 120, 0.02),
    "rbf-2-small-noise": (rbf, 2, 0.2, 1e-3, 120, 0.5),
    "matern32-2": (matern32, 2, 0.3, 0.1, 240, 2.5),
    "rbf-5": (rbf, 5, 0.5, 0.1, 240, 3.0),
    "rbf-5-small-noise": (rbf, 5, 0.5, 1e-3, 240, 25.0),  # 21 over 100 keys
}


@pytest.mark.slow
def test_kernels():
    """Accuracy at equal products, and the stated errors."""
    solve = eqx.filter_jit(lambda key, matrix, s, k: logdet(key, hidden(matrix, s), k))
    inside = []
    for name, (kernel, dim, length, s, k, to_reach) in KERNELS.items():
        matrix = np.asarray(kernel(distances(1000, dim), length))
        found = [jax.device_get(solve(key, matrix, np.asarray(s), k)) for key in keys(48)]
        assert all(each.result == RESULTS.successful for each in found)
        assert all(k - 10 <= each.num_matvecs <= k for each in found)
        off = np.array([each.value for each in found]) - dense_logdet(matrix + s * np.eye(1000))
        assert np.sqrt(np.mean(off**2)) < to_reach, name
        bars = [2 * each.std_err + each.quadrature_error for each in found]
        inside += list(np.abs(off) <= np.array(bars))
    assert np.mean(inside) >= 0.93


# --- derivatives and transformations -------------------------------------------------------------


def test_derivative_is_unbiased_and_the_same_in_both_modes():
    """Against the dense derivative, over keys, with a rank that leaves much to the probes."""
    dtype = np.complex128
    matrix, direction = decaying(N, dtype), decaying(N, dtype, seed=1)
    count = 200

    def value(theta, key):
        operator = shifted(matrix + theta.astype(dtype) * direction, 0.05)
        return logdet(key, operator, 44, preconditioner=NystromPreconditioner(rank=8)).value

    def both(key):
        theta, one = jnp.asarray(0.3), jnp.ones(())
        push = jax.linearize(lambda t: value(t, key), theta)[1]
        return push(one), jax.linear_transpose(push, theta)(one)[0]

    forward, reverse = over_keys(count, both)
    np.testing.assert_allclose(forward, reverse, rtol=1e-9)
    dense = matrix + 0.3 * direction + 0.05 * np.eye(N)
    truth = np.trace(np.linalg.solve(dense, direction)).real
    std = reverse.std(ddof=1)
    assert std < 0.3 * truth
    assert abs(reverse.mean() - truth) < 4 * std / np.sqrt(count) + 1e-3 * truth


def test_derivatives_of_exact_log_determinants():
    """k >= n: up to the third, and the Hessian under vmap."""

    def matrix(theta):
        return jnp.exp(theta[0]) * decaying(12) + theta[1] ** 2 * decaying(12, seed=1)

    def value(theta):
        return logdet(jr.key(0), shifted(matrix(theta), 0.05), 12).value

    def exact(theta):
        return jnp.linalg.slogdet(matrix(theta) + 0.05 * jnp.eye(12))[1]

    @jax.jit
    @jax.vmap
    def third(theta):
        return [jax.jacfwd(jax.hessian(fn))(theta) for fn in (value, exact)]

    found, expected = third(np.array([[0.2, 0.7], [-0.3, 0.4]]))
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_lanes_of_a_vmap_choose_by_themselves():
    """What a lane of a batch has is what it has in a batch of its own kind, which is as accurate as
    it says.
    """
    matrix = decaying()

    def value(key, s):
        solution = logdet(key, hidden(s * matrix, s), 30)
        return solution.value, solution.std_err, solution.quadrature_error, solution.num_matvecs

    mapped, two = jax.jit(jax.vmap(value)), keys(2)
    mixed = mapped(two, np.array([0.05, 0.2]))
    for i, s in enumerate((0.05, 0.2)):
        alike = jax.device_get(mapped(np.stack([two[i]] * 2), np.array([s, s])))
        for part, alone in zip(mixed, alike, strict=True):
            np.testing.assert_allclose(part[i], alone[0], rtol=1e-8)
            np.testing.assert_allclose(alone[1], alone[0], rtol=1e-8)
        estimate, std_err, quadrature_error, spent = (x[0] for x in alike)
        # (With a single probe 2 % of 2000 keys are beyond 3 standard errors.)
        error = estimate - dense_logdet(s * matrix + s * np.eye(N))
        assert abs(error) <= 4 * std_err + quadrature_error
        assert 20 <= spent <= 30


@pytest.mark.parametrize(("preconditioner", "k"), [(None, 40), (NystromPreconditioner(), 3)])
def test_every_preconditioner(preconditioner, k):
    """Dense matrices, where s is to be found out; tiny budgets."""
    dense = decaying() + 0.1 * np.eye(N)
    operator = lx.MatrixLinearOperator(jnp.asarray(dense), PSD)
    truth = dense_logdet(dense)
    inside = []
    solve = jax.jit(lambda key: logdet(key, operator, k, preconditioner=preconditioner))
    for solution in jax.device_get([solve(key) for key in keys(5)]):
        error, floor = solution.quadrature_error, max(abs(solution.value) / 20, 1)
        dwarfs = error > 4 * solution.std_err and error > floor
        assert not (dwarfs and k == 40)
        assert solution.result == (RESULTS.not_converged if dwarfs else RESULTS.successful)
        assert solution.num_matvecs <= k
        inside.append(abs(solution.value - truth) <= 3 * solution.std_err + error)
    assert np.mean(inside) >= 0.8


@pytest.mark.parametrize("compute", [logdet, inverse_trace])
@pytest.mark.slow
def test_tolerances(compute):
    """Met in 95 % of cases (and in 16 of 20 with a probability of 0.997), from fewer products where
    it is larger; exact by default with so few rows.
    """
    matrix = np.exp(-distances(150, 5))
    dense = matrix + 0.01 * np.eye(150)
    truth = dense_logdet(dense) if compute is logdet else np.trace(np.linalg.inv(dense))
    operator, spent = shifted(matrix, 0.01), []
    run = jax.jit(lambda key, atol: compute(key, operator, atol=atol, fallback=None))
    for share in (1e-2, 3e-3):
        found = [jax.device_get(run(key, share * abs(truth))) for key in keys(20)]
        assert sum(abs(each.value - truth) <= share * abs(truth) for each in found) >= 16
        spent.append(np.mean([each.num_matvecs for each in found]))
    assert spent[0] < spent[1]
    run = jax.jit(lambda atol: compute(jr.key(0), operator, atol=atol))
    exact = run(1.0)
    np.testing.assert_allclose(exact.value, truth, rtol=1e-8)
    assert exact.std_err == 0
    assert run(1e-18).result == RESULTS.not_converged


# --- what cannot be done -------------------------------------------------------------------------


def test_a_singular_operator_is_found_at_any_scale():
    """Ritz values that are rounding errors of a large one, whatever the unit of the operator. A
    regular one is none.
    """
    spectra = np.where(np.arange(N) < 5, 1.0, 0.0), np.linspace(0.1, 1, N)
    solve = jax.jit(lambda m: logdet(jr.key(0), by_products(m, PSD), 30, preconditioner=None))
    for x, name in zip(spectra, ("outside_domain", "successful"), strict=True):
        matrix = with_spectrum(np.random.default_rng(0), x)
        for exponent in (0, -10, -90, 90):
            result = solve((matrix * 2.0**exponent).astype(np.float32)).result
            assert result == getattr(RESULTS, name), exponent


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exact_values_of_singular_matrices(dtype):
    """Integers of rank n - 1, second differences and a cycle: rounding leaves pivots positive. Of
    nearly singular matrices, the error says how far the logarithm may be.
    """
    n = 40
    rng = np.random.default_rng(0)
    integers = [rng.integers(-3, 4, (n, n - 1)) for _ in range(60)]
    differences = np.diff(np.eye(n), 2, axis=0)
    cycle = 2 * np.eye(n) - np.roll(np.eye(n), 1, 0) - np.roll(np.eye(n), -1, 0)
    singular = [x @ x.T for x in integers] + [differences.T @ differences, cycle]
    square = rng.standard_normal((50, n, n)).astype(dtype)
    nearly = square @ np.swapaxes(square, 1, 2)

    def solve(matrix):
        given = jr.key(0), lx.MatrixLinearOperator(matrix, PSD), n
        return logdet(*given), inverse_trace(*given)

    run = jax.jit(lambda stack: jax.lax.map(solve, stack))
    for found in run(np.stack(singular).astype(dtype)):
        assert np.all(found.result == RESULTS.outside_domain)
    found, _ = jax.device_get(run(nearly))
    right = found.result == RESULTS.successful
    exact = np.linalg.slogdet(nearly.astype(np.float64))[1]
    assert np.mean(right) > 0.9
    assert np.all(np.abs(found.value - exact)[right] <= found.quadrature_error[right])


@pytest.mark.slow
def test_singular_and_nearly_singular_matrices_by_products():
    """Integers of rank n - 1: 40 products do not separate the null vector from the rest, and say
    so. At a condition of 1e8 they say so as well, and intervals hold the truth.
    """
    n = 100
    rng = np.random.default_rng(0)
    integers = [rng.integers(-3, 4, (n, n - 1)) for _ in range(20)]
    eigenvalues = np.geomspace(1e-8, 1, n)
    stack = np.stack([x @ x.T for x in integers] + [with_spectrum(rng, eigenvalues)])
    ten = keys(10)

    def solve(matrix):
        def calls(key):
            given = key, by_products(matrix, PSD)
            found = logdet(*given, 40), spectral_sum(key, jnp.log, given[1], 40)
            return [(x.result == RESULTS.successful, x.interval()) for x in found]

        return jax.lax.map(calls, ten)

    for right, (low, high) in jax.jit(lambda stack: jax.lax.map(solve, stack))(stack):
        assert np.mean(right) <= 0.01
        truth = np.log(eigenvalues).sum()
        assert np.mean((low[-1] <= truth) & (truth <= high[-1])) >= 0.9


@pytest.mark.parametrize("k", [16, 20])
@pytest.mark.slow
def test_small_budgets_have_a_preconditioner(k):
    """I and a large eigenvalue."""
    operator = by_products(np.eye(400) + 0.1, PSD)
    found = [logdet(key, operator, k) for key in keys(3)]
    assert np.all([abs(x.value - np.log(41)) <= 2 * x.std_err + x.quadrature_error for x in found])
    assert np.median([x.std_err for x in found]) < 0.8


@pytest.mark.slow
def test_noise_of_very_different_sizes():
    """Masked observations: a variance of 10^6 for some of them, in float32. D^-1/2 A D^-1/2 is as
    well-conditioned as without, and the matrix is definite.
    """
    x = np.random.default_rng(1).random((120, 2))
    kernel = np.exp(-10 * np.sum((x[:, None] - x) ** 2, axis=-1))
    noise = np.where(np.arange(120) < 60, 1e6, 1e-2)
    exact = np.linalg.slogdet(kernel + np.diag(noise))[1]
    matrix, noise = jnp.asarray(kernel, jnp.float32), jnp.asarray(noise, jnp.float32)
    operator = lx.MatrixLinearOperator(matrix, PSD) + lx.DiagonalLinearOperator(noise)
    calls = {"k": 60, "fallback": None}, {"k": 120}
    run = jax.jit(lambda key: [logdet(key, operator, **options) for options in calls])
    for solution in jax.device_get(run(jr.key(0))):
        assert solution.result == RESULTS.successful
        bar = float(4 * solution.std_err + solution.quadrature_error)
        assert abs(float(solution.value) - exact) <= bar <= 40

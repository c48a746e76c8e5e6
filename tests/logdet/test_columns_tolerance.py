"""Log-determinants and densities to a tolerance, where columns are cheap."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._logdet.tolerance import loop_budgets

from ..helpers import keys
from .test_gaussian import cholesky_density
from .test_logdet import distances, matern32, shifted

N = 1040  # more than 1000, below which the value is exact at once
S, ATOL = 0.05, 0.5
Y = jnp.asarray(np.random.default_rng(5).standard_normal(N))


def rbf(r, length):
    return np.exp(-((r / length) ** 2) / 2)


@pytest.fixture(scope="module")
def smooth():
    return jnp.asarray(rbf(distances(N, 2), 0.4))


@pytest.fixture(scope="module")
def rough():
    return jnp.asarray(matern32(distances(N, 5), 0.3))


@jax.jit
def density(key, matrix, s=S, atol=ATOL):
    return tr.gaussian_log_density(key, Y, shifted(matrix, jnp.asarray(s)), atol=atol)


@jax.jit
def truth_of(matrix, s=S):
    return cholesky_density(Y, matrix + s * jnp.eye(N))


@pytest.mark.variant
def test_smooth_kernels_take_columns_and_few_products(smooth):
    """Each of 20 keys; more than one would miss with a probability of 26 % if 95 % hit, more than
    three of 20 with 1.6 %.
    """
    truth = truth_of(smooth)
    found = [density(key, smooth) for key in keys(20)]
    for solution in found:
        assert solution.result == tr.RESULTS.successful
        assert 0 < solution.std_err <= ATOL / 2
        assert 64 <= solution.stats["columns"] < N // 4
        assert 0 < solution.num_matvecs <= N // 12
    assert sum(bool(abs(solution.value - truth) > ATOL) for solution in found) <= 3
    assert np.std([float(solution.value) for solution in found]) > 0


@pytest.mark.variant
def test_rough_kernels_are_exact_after_one_look(rough):
    """The first look says that the tolerance is out of reach: 64 columns and 4 probes."""
    solution = density(jr.key(0), rough)
    np.testing.assert_allclose(solution.value, truth_of(rough), rtol=1e-10)
    assert solution.result == tr.RESULTS.successful
    assert solution.std_err == 0 < solution.quadrature_error < 1e-9
    assert solution.num_matvecs <= 16
    assert N + 64 <= solution.stats["columns"] <= N + 128


def test_up_to_1000_rows_are_exact_at_once(smooth):
    few = 900
    solution = tr.logdet(jr.key(0), shifted(smooth[:few, :few], S), atol=ATOL)
    truth = np.linalg.slogdet(np.asarray(smooth)[:few, :few] + S * np.eye(few))[1]
    np.testing.assert_allclose(solution.value, truth, rtol=1e-10)
    assert solution.num_matvecs == 0
    assert solution.std_err == 0


@pytest.mark.variant
def test_without_the_exact_value(rough):
    """The best estimate, with a bar that covers."""
    solution = tr.logdet(jr.key(0), shifted(rough, S), atol=ATOL, max_k=200, fallback=None)
    assert solution.result == tr.RESULTS.not_converged
    assert 0 < solution.num_matvecs <= 200
    truth = np.linalg.slogdet(np.asarray(rough) + S * np.eye(N))[1]
    bar = 4 * solution.std_err + solution.quadrature_error
    assert bar > ATOL
    assert abs(solution.value - truth) < bar


def test_without_the_exact_value_the_default_budget_is_1000():
    operator = shifted(jnp.eye(N), S)
    for fallback, expected in (("exact", (N, N - 1)), (None, (1000, 1000))):
        assert loop_budgets(None, operator, "auto", fallback, "A run") == expected


@pytest.mark.variant
def test_a_relative_tolerance(smooth):
    @jax.jit
    def relative(key, rtol):
        return tr.gaussian_log_density(key, Y, shifted(smooth, S), rtol=rtol)

    truth = truth_of(smooth)
    for rtol, exact in ((1e-2, False), (1e-5, False), (1e-11, True)):
        solution = relative(jr.key(0), rtol)
        assert abs(solution.value - truth) <= max(rtol, 1e-11) * abs(truth)
        bar = 2 * solution.std_err + solution.quadrature_error
        assert bar <= rtol * abs(solution.value)
        assert (solution.std_err == 0) == exact


@pytest.mark.variant
def test_derivatives_of_either_end(smooth):
    """By one program: noise that leaves an estimate, and noise for which the value is exact."""

    def value(s):
        return density(jr.key(0), smooth, s, atol=0.02).value

    both = jax.jit(jax.value_and_grad(value))
    expected = jax.jit(jax.value_and_grad(lambda s: truth_of(smooth, s)))
    for s, exact in ((0.05, False), (1e-7, True)):
        found, reference = both(s), expected(s)
        assert (density(jr.key(0), smooth, s, atol=0.02).std_err == 0) == exact
        np.testing.assert_allclose(found[0], reference[0], atol=0.02)
        np.testing.assert_allclose(found[1], reference[1], rtol=1e-6 if exact else 0.01)


@pytest.mark.variant
def test_two_derivatives_of_lanes_that_end_differently(smooth):
    """Lanes of an estimate and of an exact value: each contracts its own weights."""

    def value(s):
        return density(jr.key(0), smooth, s, atol=0.02).value

    def derivatives(fn):
        return lambda s: jnp.stack([jax.grad(fn)(s), jax.jacfwd(jax.grad(fn))(s)])

    noises = jnp.array([0.05, 1e-7])
    lanes = jax.jit(jax.vmap(derivatives(value)))(noises)
    alone = [jax.jit(derivatives(value))(s) for s in noises]
    expected = jax.jit(jax.vmap(derivatives(lambda s: truth_of(smooth, s))))(noises)
    for lane, one, truth, rtol in zip(lanes, alone, expected, (0.02, 1e-5), strict=True):
        np.testing.assert_allclose(lane, one, rtol=1e-6)
        np.testing.assert_allclose(lane, truth, rtol=rtol)


@pytest.mark.variant
def test_lanes_of_a_vmap_stop_by_themselves(smooth):
    def run(s):
        solution = density(jr.key(3), smooth, s)
        return solution.value, solution.std_err, solution.num_matvecs, solution.stats["columns"]

    noises = jnp.array([0.05, 1.0, 1e-7])
    lanes = jax.jit(jax.vmap(run))(noises)
    alone = [jax.jit(run)(s) for s in noises]
    for i, found in enumerate(alone):
        for one, all_lanes in zip(found, lanes, strict=True):
            np.testing.assert_allclose(all_lanes[i], one, rtol=1e-6, atol=1e-9)
    assert (lanes[1] > 0).tolist() == [True, True, False]
    assert len(set(lanes[3].tolist())) == 3


@pytest.mark.variant
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_kernels_and_dtypes(dtype):
    """A kernel by its entries, in float32; a stored complex matrix."""
    x = jnp.asarray(np.random.default_rng(0).uniform(size=(N, 2)), np.finfo(dtype).dtype)
    if dtype == np.float32:
        k = tr.KernelLinearOperator(lambda a, b: jnp.exp(-5 * jnp.sum((a - b) ** 2)), x)
    else:
        r2 = jnp.sum((x[:, None] - x) ** 2, axis=-1)
        phase = jnp.exp(1j * x[:, 0].astype(complex))
        hermitian = phase[:, None] * jnp.exp(-5 * r2).astype(complex) * jnp.conj(phase)
        k = lx.MatrixLinearOperator(hermitian, lx.positive_semidefinite_tag)
    operator = k + S * lx.IdentityLinearOperator(k.in_structure())
    solution = tr.logdet(jr.key(0), operator, atol=ATOL)
    truth = np.linalg.slogdet(np.asarray(operator.as_matrix(), np.complex128))[1]
    assert solution.value.dtype == np.finfo(dtype).dtype
    assert solution.result == tr.RESULTS.successful
    assert solution.std_err > 0
    assert abs(float(solution.value) - truth) <= ATOL

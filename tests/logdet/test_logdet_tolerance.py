"""Log-determinants to a tolerance: `logdet(key, operator, atol=...)`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

from traceax import RESULTS, NystromPreconditioner, logdet
from traceax._functions.quadrature_error import with_quadrature_error
from traceax._logdet.tolerance import LogdetAim, Loop, _Sums

from .. import reference
from ..helpers import (
    PSD,
    by_products,
    keys,
    variant,
    with_spectrum,
)
from .test_logdet import (
    KERNELS,
    decaying,
    dense_logdet,
    distances,
    features_and_noise,
    hidden,
    shifted,
)

N, MAX_K = 200, 64


@eqx.filter_jit
def solve(key, matrix, s, atol, max_k=MAX_K):
    return logdet(key, hidden(matrix, s), atol=atol, max_k=max_k)


@pytest.fixture(scope="module")
def matrix():
    return decaying(N)


@pytest.mark.variant
@pytest.mark.parametrize("features", [60, 100, 300])
def test_features_and_noise_by_products(features):
    """Eigenvalues of one size do not decay before the rank exceeds their number; no number of
    probes does instead. The log-determinant is exact then.
    """
    n, s = 2000, 0.25
    x, truth = features_and_noise(n, features, s)
    structure = jax.ShapeDtypeStruct((n,), x.dtype)
    gram = lx.FunctionLinearOperator(lambda v: x @ (x.T @ v), structure, PSD)
    operator = gram + s * lx.IdentityLinearOperator(structure)
    run = eqx.filter_jit(lambda key: logdet(key, operator, atol=0.1))
    for key in keys(3):
        found = run(key)
        assert found.result == RESULTS.successful
        assert abs(float(found.value) - truth) < 0.1
        assert found.num_matvecs < 3 * features + 60


@pytest.mark.variant
def test_features_and_noise_with_the_exact_value_in_reserve():
    """The end of a flat spectrum is cheaper to reach than n products."""
    n, features, s = 1000, 40, 0.1
    x, truth = features_and_noise(n, features, s)
    operator = by_products(x @ x.T + s * jnp.eye(n), PSD)
    run = eqx.filter_jit(lambda key: logdet(key, operator, atol=1.0))
    for key in keys(3):
        found = run(key)
        assert found.result == RESULTS.successful
        assert abs(float(found.value) - truth) < 1
        assert found.num_matvecs < 200


@pytest.mark.slow
def test_kernels():
    """Within the tolerance for 95 % of keys, with fewer products the looser it is."""
    inside, n = [], 1000
    for name, (kernel, dim, length, s, *_) in KERNELS.items():
        matrix = np.asarray(kernel(distances(n, dim), length))
        truth, spent = dense_logdet(matrix + s * np.eye(n)), []
        for atol in (20.0, 2.0, 0.2):
            arguments = jnp.asarray(matrix), jnp.asarray(s), jnp.asarray(atol), 900
            found = [solve(key, *arguments) for key in keys(8)]
            errors = np.array([abs(x.value - truth) for x in found])
            stated = np.array([2 * x.std_err + x.quadrature_error for x in found])
            converged = np.array([bool(x.result == RESULTS.successful) for x in found])
            spent.append(np.median([x.num_matvecs for x in found]))
            assert max(x.num_matvecs for x in found) <= 900
            print(name, atol, errors.max(), spent[-1], converged.mean())
            assert np.all(converged | (stated > atol))
            assert np.all(converged) or (name == "rbf-5-small-noise" and atol == 0.2)
            inside += list(errors <= np.where(converged, atol, stated))
        assert spent == sorted(spent)
        assert spent[0] <= 400
    print(np.mean(inside))
    assert np.mean(inside) >= 0.95


def test_a_round_that_does_not_fit_is_not_waited_for(matrix):
    """Nine probes of the ten that are to be looked at, 24 products left: another round takes 32,
    the next rank 16 and its first look 8.
    """
    max_k = 112
    zero = jnp.zeros(())

    @eqx.filter_jit
    def decided(matrix, spent):
        aim = LogdetAim(zero, zero)
        loop = Loop(aim, jr.key(0), hidden(matrix, 1.0), max_k, falls_back_to_exact=False)
        estimate = with_quadrature_error(*jnp.array([1.0, 0.5, 0.1]), 0, 1, 0)
        state = loop.start()._replace(
            decays=jnp.array(True),
            level=jnp.array(0),
            grows=jnp.array(False),
            sums=_Sums.none(float).plus(9, estimate),
            target=jnp.array(10),
            work=spent,
        )
        state = loop._decided(state)
        return state.grows, state.sums.probes, state.done

    with jax.numpy_dtype_promotion("standard"):
        assert decided(matrix, jnp.array(80)) == (False, 9, False)
        assert decided(matrix, jnp.array(88)) == (True, 0, False)


@pytest.mark.variant
def test_what_is_simple_ends_with_the_first_look(matrix):
    """16 products for the sketch, 8 for one probe: for a multiple of the identity, for low rank
    plus one, at any scale; NaN and what is not positive definite end there, too.
    """
    rank = with_spectrum(np.random.default_rng(1), np.r_[np.arange(1.0, 6), np.zeros(N - 5)])
    for scale in (1.0, 1e20, 1e-20):
        for low_rank in (np.zeros((N, N)), rank):
            given = jnp.asarray(scale * low_rank), jnp.asarray(2.0 * scale)
            solution = solve(jr.key(0), *given, jnp.asarray(1e-6))
            truth = dense_logdet(low_rank + 2 * np.eye(N)) + N * np.log(scale)
            assert solution.num_matvecs <= 16 + 8
            assert solution.result == RESULTS.successful
            np.testing.assert_allclose(solution.value, truth, atol=1e-6)
    tenth = jnp.asarray(0.1)
    broken = solve(jr.key(0), matrix.at[3, 4].set(jnp.nan), tenth, tenth)
    assert broken.num_matvecs == 24
    assert broken.result == RESULTS.nonfinite_operator
    assert np.isnan(broken.value)
    indefinite = solve(jr.key(0), matrix - 5 * jnp.eye(N), tenth, tenth)
    assert indefinite.num_matvecs <= 48
    assert indefinite.result == RESULTS.outside_domain
    assert np.isnan(indefinite.value)


def test_not_converged():
    """The best estimate."""
    matrix = with_spectrum(np.random.default_rng(2), np.linspace(0.01, 1, N))
    given = jr.key(0), jnp.asarray(matrix), jnp.asarray(1e-3), jnp.asarray(1e-6)
    solution = solve(*given)
    assert solution.result == RESULTS.not_converged
    assert MAX_K - 32 < solution.num_matvecs <= MAX_K
    error = abs(solution.value - dense_logdet(matrix + 1e-3 * np.eye(N)))
    assert error < 3 * solution.std_err + solution.quadrature_error


@pytest.mark.variant
def test_exact_as_the_last_resort():
    """From n products more; its derivative is that of A^{-1} itself. With another tolerance the
    same program ends before, with an estimate. (Of a complex matrix.)
    """
    n, values = 260, np.linspace(0.01, 1, 260)
    matrix = jnp.asarray(with_spectrum(np.random.default_rng(2), values, np.complex128))

    def value(s, atol):
        solution = solve(jr.key(0), matrix, s, atol, None)
        return solution.value, solution

    both = eqx.filter_jit(jax.value_and_grad(value, has_aux=True))
    (found, solution), slope = both(jnp.asarray(5.0), jnp.asarray(1.0))
    assert solution.result == RESULTS.successful
    assert solution.value.dtype == np.float64
    assert solution.std_err > 0
    assert abs(found - np.sum(np.log(values + 5))) <= 1
    np.testing.assert_allclose(slope, np.sum(1 / (values + 5)), rtol=0.01)
    (found, solution), slope = both(jnp.asarray(0.1), jnp.asarray(1e-6))
    assert solution.result == RESULTS.successful
    assert n + 16 <= solution.num_matvecs <= n + n // 4
    assert solution.std_err == 0 < solution.quadrature_error < 1e-9
    np.testing.assert_allclose(found, np.sum(np.log(values + 0.1)), rtol=1e-12)
    np.testing.assert_allclose(slope, np.sum(1 / (values + 0.1)), rtol=1e-10)


@pytest.mark.variant
def test_derivatives(matrix):
    """In forward and reverse mode, to second order, by a rule that holds for early and late ends:
    the weights of a value are G, E[G] = A^{-1}, and with the exact value they are A^{-1}.
    """
    other = jnp.asarray(with_spectrum(np.random.default_rng(4), np.linspace(1, 2, N)))
    dense = np.asarray(matrix) + 0.5 * np.eye(N)
    slope = np.trace(np.linalg.solve(dense, other))
    second = -np.trace(np.linalg.solve(dense, other) @ np.linalg.solve(dense, other))

    @eqx.filter_jit
    def derivatives(atol):
        def value(c):
            return solve(jr.key(0), matrix + c * other, jnp.asarray(0.5), atol).value

        return jax.jvp(jax.value_and_grad(value), (0.0,), (1.0,))

    (_, reverse), (forward, curvature) = derivatives(jnp.asarray(1.0))
    np.testing.assert_allclose(forward, reverse, rtol=1e-10)
    np.testing.assert_allclose(forward, slope, rtol=0.03)
    np.testing.assert_allclose(curvature, second, rtol=0.1)


@pytest.mark.variant
def test_lanes_of_a_vmap_stop_by_themselves(matrix):
    def run(s):
        solution = logdet(jr.key(3), hidden(matrix, s), atol=0.3, max_k=MAX_K)
        return solution.value, solution.std_err, solution.quadrature_error, solution.num_matvecs

    shifts = jnp.array([10.0, 1.0, 0.01])
    lanes = jax.jit(jax.vmap(run))(shifts)
    alone = reference.each(run, shifts)
    assert len(set(np.asarray(lanes[3]).tolist())) > 1
    for a, b in zip(lanes, alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.variant
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_dtypes(dtype):
    matrix = decaying(N, dtype)
    truth = dense_logdet(np.asarray(matrix, np.complex128) + 0.5 * np.eye(N))
    solution = solve(jr.key(0), matrix, jnp.asarray(0.5, np.finfo(dtype).dtype), jnp.asarray(0.5))
    assert solution.value.dtype == np.finfo(dtype).dtype
    assert solution.result == RESULTS.successful
    assert abs(float(solution.value) - truth) <= 0.5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "give a tolerance instead, `logdet"),
        ({"k": 10, "atol": 0.1}, TypeError, "both a budget, k=10, and a tolerance"),
        ({"k": 10, "max_k": 20}, TypeError, "to which alone belong `max_k`"),
        ({"atol": -1.0}, ValueError, "atol must be finite and not negative"),
        ({"atol": 1.0, "max_k": 30}, ValueError, "needs max_k of at least 64, got 30"),
        (
            {"atol": 1.0, "preconditioner": NystromPreconditioner()},
            ValueError,
            "To a tolerance, the preconditioner must be 'auto'",
        ),
    ],
)
def test_arguments(matrix, options, error, message):
    with pytest.raises(error, match=message):
        logdet(jr.key(0), shifted(matrix, 0.1), **options)


def test_small_operators_are_exact_at_once(matrix):
    for operator, products in ((hidden(matrix, 0.1), N), (shifted(matrix, 0.1), 0)):
        solution = logdet(jr.key(0), operator, atol=10.0)
        assert solution.num_matvecs == products
        assert solution.std_err == 0
        truth = dense_logdet(matrix + 0.1 * np.eye(N))
        np.testing.assert_allclose(solution.value, truth, rtol=1e-10)


@pytest.mark.parametrize("n", [variant(1), 2, variant(64), variant(65)])
@pytest.mark.parametrize("by_entries", [True, variant(False)])
def test_few_rows_without_a_last_resort(n, by_entries):
    """Up to 64 rows the exact value takes no more products than a run needs at least."""
    matrix = jnp.eye(n) + 0.5 / n
    operator = lx.MatrixLinearOperator(matrix, PSD) if by_entries else by_products(matrix, PSD)
    solution = logdet(jr.key(0), operator, atol=0.1, fallback=None)
    assert solution.result == RESULTS.successful
    np.testing.assert_allclose(solution.value, np.log(1.5), atol=0.1)
    assert (solution.std_err == 0) == (n <= 64) or not by_entries

"""A-Hutch++: a guaranteed error, and the split that takes the fewest products."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from scipy.special import gammaincinv

import traceax as tr
from traceax._probes.random import numbered
from traceax._trace.adaptive import _block_width

from ..helpers import (
    PSD,
    keys,
    random_unitary,
    variant,
    with_spectrum,
)

ESTIMATOR = tr.AdaptiveHutchPlusPlusEstimator()
N, MAX_K = 300, 296  # 37 blocks of 8


@eqx.filter_jit
def _solve(keys, matrix, rtol, atol, max_k, k, estimator):
    operator = lx.MatrixLinearOperator(matrix, PSD)
    budget = {"k": k} if k else {"rtol": rtol, "atol": atol, "max_k": max_k}
    run = partial(tr.trace, operator=operator, estimator=estimator, **budget)
    return jax.lax.map(run, keys)


def solve(keys, matrix, rtol=0.0, atol=0.0, max_k=MAX_K, k=None, estimator=ESTIMATOR):
    """Solutions for several keys, one after the other. One program for all tolerances."""
    tolerances = jnp.asarray(rtol), jnp.asarray(atol)
    return _solve(keys, matrix, *tolerances, max_k, k, estimator)


def matrix_of(values, dtype=np.float64):
    return jnp.asarray(with_spectrum(np.random.default_rng(0), values, dtype))


INDEX = np.arange(1, N + 1.0)
SPECTRA = {"1": 1 / INDEX, "2": INDEX**-2, "exp": np.exp(-INDEX / 10), "flat": 1 + 2 * INDEX / N}
MATRICES = {name: matrix_of(values) for name, values in SPECTRA.items()}


# --------------------------------------------------------------------------- the algorithm


def naive(key, a, rtol, atol, most, delta):
    """The same phases with explicit matrices, column by column: value, error and products, and
    whether the tolerance was reached.
    """
    n, width = len(a), _block_width(most)
    probes = partial(tr.NormalSampler(), n=n, k=width, dtype=a.dtype)
    sketch_key, probe_key = jr.split(key)
    field = 2 if np.iscomplexobj(a) else 1
    c = 4 * np.log(2 / delta) / field
    q, columns, ends, turn = np.zeros((n, 0), a.dtype), [], False, 0

    def rest():
        left = np.eye(n) - q @ q.conj().T
        return left @ a @ left

    while not ends and 2 * width * (turn + 1) + width <= most:
        omega = np.asarray(probes(numbered(sketch_key, turn)))
        captured = q @ q.conj().T @ a
        trace = np.trace(captured) + np.mean(
            [np.vdot(column, (a - captured) @ column) for column in omega.T]
        )
        eps = atol + rtol * abs(trace)
        for column in omega.T:
            before = np.linalg.norm(rest()) ** 2
            y = a @ column
            y = y - q @ (q.conj().T @ y)
            y = y - q @ (q.conj().T @ y)
            q = np.concatenate([q, y[:, None] / np.linalg.norm(y)], axis=1)
            gain = before - np.linalg.norm(rest()) ** 2
            m = q.shape[1]
            # 2 m + C ||B||^2 has grown, or ||B||^2 / (most - 2 m) has.
            grew = c * gain < 2 * eps**2 or (most - 2 * m) * gain < 2 * np.linalg.norm(y) ** 2
            columns.append(m > 1 and grew)
            ends = ends or (m > 1 and columns[-1] and columns[-2])
        turn += 1

    m, b = q.shape[1], rest()
    samples, square, forms, norms = [], 0.0, 0.0, 0.0
    for i in range((most - 2 * m) // width):
        psi = np.asarray(probes(numbered(probe_key, i)))
        for g in (psi - q @ (q.conj().T @ psi)).T:
            form, norm = np.vdot(g, b @ g), np.vdot(g, g).real
            samples.append((n - m) * form / norm)
            square, forms = square + np.linalg.norm(b @ g) ** 2, forms + form.real
            norms += norm
        k = len(samples)
        beta = forms / norms
        f = (square - 2 * beta * forms + beta**2 * norms) / k  # mean ||(B - beta) g||^2
        value = np.trace(q.conj().T @ a @ q) + np.mean(samples)
        eps = atol + rtol * abs(value)
        alpha = gammaincinv(field * k / 2, delta) / (field * k / 2)
        met = eps > 0 and k >= c * f / eps**2 / alpha
        if met:
            break
    return value, np.std(samples, ddof=1) / np.sqrt(k), 2 * m + k, met


@pytest.mark.parametrize(
    ("dtype", "most", "delta"), [variant(np.float64, 60, 0.05), (np.complex128, 57, 0.2)]
)
def test_the_naive_algorithm_does_the_same(dtype, most, delta):
    """The same split, the same end, the same numbers, on the same probes."""
    n, spent, estimator = 64, set(), tr.AdaptiveHutchPlusPlusEstimator(delta)
    i = np.arange(1, n + 1.0)
    for values in (1 / i, np.exp(-i / 5), 1 + i / n):
        a = matrix_of(values, dtype)
        for rtol, atol in ((0.1, 0.0), (0.0, 0.1), (0.01, 0.02), (0.0, 0.0)):
            solution = solve(keys(2), a, rtol, atol, most, estimator=estimator)
            short = solution.result == tr.RESULTS.not_converged
            for j, key in enumerate(keys(2)):
                value, std_err, products, met = naive(key, np.asarray(a), rtol, atol, most, delta)
                assert solution.num_matvecs[j] == products, (rtol, atol)
                np.testing.assert_allclose(solution.value[j], value, rtol=1e-10)
                np.testing.assert_allclose(solution.std_err[j], std_err, rtol=1e-7)
                assert short[j] == (not met)
                spent.add(products)
    assert len(spent) > 3
    assert max(spent) > most - 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if i == 0 else variant(name) for i, name in enumerate(SPECTRA)]
)
def test_the_guarantee(name):
    """Errors beyond the tolerance in 2 delta of the runs at most; the bound is conservative, and
    the standard error right.
    """
    truth, delta = SPECTRA[name].sum(), ESTIMATOR.delta
    for rtol in (1e-1, 2e-2):
        for tolerances in ((rtol, 0.0), (0.0, rtol * truth)):
            solution = solve(keys(100), MATRICES[name], *tolerances)
            assert bool(jnp.all(solution.result == tr.RESULTS.successful))
            error = np.asarray(solution.value) - truth
            deviation = np.sqrt(2 * delta * (1 - 2 * delta) / 100)
            assert np.mean(abs(error) <= rtol * truth) >= 1 - 2 * delta - 3 * deviation
            # 100 samples: a relative deviation of 7 % in either root mean square.
            ratio = np.sqrt(np.mean(error**2) / np.mean(np.asarray(solution.std_err) ** 2))
            assert 0.75 < ratio < 1.35, (name, rtol)
            assert np.sqrt(np.mean(error**2)) < rtol * truth / 2


@pytest.mark.slow
def test_a_budget_is_spent_with_the_split_of_least_variance():
    """Unbiased, with the right error; all of it, but for less than a block."""
    assert [_block_width(k) for k in (3, 5, 6, 24, 30, 61, 296, 399)] == [1, 1, 2, 8, 6, 6, 8, 7]
    for name in ("exp", "flat"):
        truth = SPECTRA[name].sum()
        solution = solve(keys(100), MATRICES[name], k=120)
        thirds = solve(keys(100), MATRICES[name], k=120, estimator=tr.HutchPlusPlusEstimator())
        np.testing.assert_array_equal(solution.num_matvecs, 120)
        error, std_err = np.asarray(solution.value) - truth, np.asarray(solution.std_err)
        rms = np.sqrt(np.mean(error**2))
        assert abs(np.mean(error)) < 4 * rms / 10
        assert 0.75 < rms / np.sqrt(np.mean(std_err**2)) < 1.35
        gain = np.sqrt(np.mean((np.asarray(thirds.value) - truth) ** 2)) / rms
        print(name, gain)
        assert gain > 1.2
    assert ESTIMATOR(keys(1)[0], lx.MatrixLinearOperator(MATRICES["1"], PSD), N)[1]["std.err"] == 0


# ------------------------------------------------------------------------ where a run ends


@pytest.mark.parametrize("dtype", [variant(np.float32), np.float64])
def test_low_rank_and_zero_and_nan_end_at_once(dtype):
    basis = random_unitary(np.random.default_rng(2), N)[:, :5]
    low_rank = ((basis * np.arange(1.0, 6)) @ basis.T).astype(dtype)
    key, eps = keys(1), np.finfo(dtype).eps
    for scale in (1.0, 1e20, 1e-20, 0.0):
        matrix = jnp.asarray(low_rank * dtype(scale))
        solution = solve(key, matrix, 1e-9)
        assert solution.num_matvecs[0] == 24
        assert solution.std_err[0] <= 10 * eps * 15 * scale
        # A tolerance of 1e-9 is out of reach of products in float32, unless they are 0.
        within = dtype == np.float64 or scale == 0
        outcome = tr.RESULTS.successful if within else tr.RESULTS.not_converged
        assert bool(jnp.all(solution.result == outcome))
        np.testing.assert_allclose(solution.value[0], 15 * scale, rtol=100 * eps, atol=0)
    full = jnp.asarray(MATRICES["1"].astype(dtype))
    values = []
    for scale in (1.0, 1e20, 1e-20):  # none of them a power of 2
        solution = solve(key, full * dtype(scale), 5e-2)
        values.append((float(solution.value[0]) / scale, int(solution.num_matvecs[0])))
        assert abs(values[-1][0] - SPECTRA["1"].sum()) < 0.05 * SPECTRA["1"].sum()
    np.testing.assert_allclose(values, [values[0]] * 3, rtol=1e3 * eps)
    broken = solve(key, full.at[3, 4].set(jnp.nan), 1e-3)
    assert broken.num_matvecs[0] == 16
    assert bool(jnp.all(broken.result == tr.RESULTS.nonfinite_operator))
    assert np.isnan(broken.value[0])


@pytest.mark.variant
def test_not_converged():
    """The best estimate for the budget, with its error bar."""
    solution = solve(keys(100), MATRICES["flat"], rtol=1e-6)
    assert bool(jnp.all(solution.result == tr.RESULTS.not_converged))
    np.testing.assert_array_equal(solution.num_matvecs, MAX_K)
    error = np.asarray(solution.value) - SPECTRA["flat"].sum()
    ratio = np.sqrt(np.mean(error**2) / np.mean(np.asarray(solution.std_err) ** 2))
    assert 0.75 < ratio < 1.35


def test_products_that_are_made():
    """As many as are counted."""
    made = []

    def multiply(vector):
        jax.debug.callback(lambda _: made.append(1), vector[0])
        return MATRICES["exp"] @ vector

    structure = jax.ShapeDtypeStruct((N,), np.float64)

    @jax.jit
    def run(scale, rtol):
        operator = lx.FunctionLinearOperator(lambda x: scale * multiply(x), structure, PSD)
        solution = tr.trace(keys(1)[0], operator, estimator=ESTIMATOR, rtol=rtol, max_k=120)
        return solution.value, solution.num_matvecs

    spent = []
    for rtol in (0.3, 0.1, 0.01):
        made.clear()
        spent.append(int(run(1.0, rtol)[1]))
        jax.effects_barrier()
        assert len(made) == spent[-1]
    assert spent[0] < spent[1] < spent[2] < 120


# --------------------------------------------------------------------------- transformations


@pytest.mark.variant
def test_lanes_of_a_vmap_stop_by_themselves():
    """Each lane gets what it gets by itself, in the lanes of keys, tolerances and operators."""
    rtol = jnp.array([0.3, 0.03, 0.02, 1e-3])
    matrices = jnp.stack([MATRICES[name] for name in ("exp", "1", "flat", "2")])

    def value(c, args):
        key, matrix, rtol = args
        operator = lx.MatrixLinearOperator(c * matrix, PSD)
        s = tr.trace(key, operator, estimator=ESTIMATOR, rtol=rtol, max_k=120)
        return s.value, (s.std_err, s.num_matvecs, s.result == tr.RESULTS.successful)

    both, given = jax.value_and_grad(value, has_aux=True), (keys(4), matrices, rtol)
    lanes, slopes = jax.jit(jax.vmap(both, (None, 0)))(1.0, given)
    alone = jax.jit(partial(jax.lax.map, partial(value, 1.0)))(given)
    assert len(set(np.asarray(lanes[1][1]).tolist())) == 4
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9), lanes, alone)
    # value = <G, A>: so is the derivative in the direction A
    np.testing.assert_allclose(slopes, lanes[0], rtol=1e-10)


def test_derivatives_are_those_of_the_weights():
    """In another direction: forward as backward, linear, and unbiased."""
    other = matrix_of(np.linspace(0, 1, N)) + jnp.diag(jnp.linspace(0, 1, N))

    @jax.jit
    def slopes(keys):
        def one(key):
            def value(d):
                operator = lx.MatrixLinearOperator(MATRICES["exp"] + d * other, PSD)
                return tr.trace(
                    key, operator, estimator=ESTIMATOR, rtol=jnp.asarray(0.1), max_k=120
                ).value

            slope = jax.grad(value)
            forward = jax.jvp(value, (0.0,), (1.0,))[1]
            return slope(0.0), forward, jax.grad(lambda d: slope(2 * d))(0.0)

        return jax.lax.map(one, keys)

    backward, forward, second = map(np.asarray, slopes(keys(60)))
    np.testing.assert_allclose(forward, backward, rtol=1e-12)
    np.testing.assert_array_equal(second, 0)
    error = backward - np.trace(other)
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(60)
    assert error.std() < 0.05 * np.trace(other)


# ---------------------------------------------------------------------------------- messages


def test_messages():
    few = matrix_of(SPECTRA["flat"][:80])
    symmetric = lx.MatrixLinearOperator(few, lx.symmetric_tag)
    run = partial(tr.trace, keys(1)[0], symmetric, estimator=ESTIMATOR, rtol=1e-6)
    solution = run()
    # Never more than n products.
    assert solution.result == tr.RESULTS.not_converged
    assert solution.num_matvecs == 80
    assert abs(solution.value - np.trace(few)) < 5 * solution.std_err
    for wrong in ({"keep_state": True}, {"state": 3}):
        with pytest.raises((ValueError, TypeError), match="state"):
            run(**wrong)
    for operator in (
        lx.MatrixLinearOperator(MATRICES["exp"]),
        lx.MatrixLinearOperator(MATRICES["exp"].astype(complex), lx.symmetric_tag),
    ):
        with pytest.raises(ValueError, match=r"tagged so.*use HutchPlusPlusEstimator\(\)"):
            tr.trace(keys(1)[0], operator, 40, ESTIMATOR)
    for delta in (0.0, 1.0, 1, "x"):
        with pytest.raises(ValueError, match="delta must be a Python float"):
            tr.AdaptiveHutchPlusPlusEstimator(delta)

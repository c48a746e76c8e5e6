"""Traces of a sequence of operators: the recursions, their means and errors, and their state."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax import Tracker
from traceax._probes.random import split

from ..helpers import keys, random_unitary, with_spectrum

pytestmark = pytest.mark.slow(quick=True)

METHODS = ("recycled", "deltashift")
N, K, STEPS = 30, 8, 12
COUNT = 1000


def drifting(steps, dtype=np.float64, drift=0.1, n=N, seed=0):
    """Positive definite matrices (whose errors are skewed) with a decaying spectrum, rotating."""
    rng, matrices = np.random.default_rng(seed), []
    basis, eigenvalues = random_unitary(rng, n, dtype), 10 * 0.6 ** np.arange(n) + 0.1
    for _ in range(steps):
        basis = np.linalg.qr(basis + drift * random_unitary(rng, n, dtype))[0]
        matrices.append((basis * eigenvalues) @ basis.conj().T)
    return np.stack(matrices).astype(dtype)


MATRICES = drifting(STEPS)


def update(tracker, key, matrix, state, previous=None):
    previous = None if previous is None else lx.MatrixLinearOperator(previous)
    return tracker.update(key, lx.MatrixLinearOperator(jnp.asarray(matrix)), state, previous)


def steps(tracker, key, matrices, k=K):
    """The last state, and solutions for a sequence of matrices: the first, and then a scan."""
    own_keys = jr.split(key, len(matrices))
    state = tracker.init(lx.MatrixLinearOperator(matrices[0]), k)
    state, first = update(tracker, own_keys[0], matrices[0], state)

    def step(state, inputs):
        key, matrix, previous = inputs
        return update(tracker, key, matrix, state, previous)

    state, rest = jax.lax.scan(step, state, (own_keys[1:], matrices[1:], matrices[:-1]))
    return state, jtu.tree_map(lambda x, y: jnp.concatenate([x[None], y]), first, rest)


def run(*arguments):
    """`steps` in one program, in NumPy."""
    return jax.device_get(eqx.filter_jit(steps)(*arguments))


@eqx.filter_jit
def run_many(tracker, many_keys, matrices):
    return jax.vmap(lambda key: steps(tracker, key, matrices)[1])(many_keys)


def traces(matrices):
    return np.trace(np.asarray(matrices), axis1=-2, axis2=-1)


def rms(x, axis=0):
    return np.sqrt(np.mean(np.square(np.abs(x)), axis=axis))


# --- the recursions ------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(1, 2))
def probes(key, n, k):
    return tr.SphereSampler().probes(key, n, k, np.dtype(float))


def reference_deltashift(key, matrices):
    """DeltaShift as the derivation has it, for two halves of sphere probes: values and errors."""
    n, found, past = matrices.shape[1], [], [(0, 0, 0, 1, 0)] * 2
    for step, own_key in enumerate(jr.split(key, len(matrices))):
        new, old = matrices[step], (matrices[step - 1] if step else 0 * matrices[0])
        z = np.asarray(probes(own_key, n, K // (2 if step else 1)))
        halves = np.split(z, 2, axis=1)

        def norm(matrix, z):  # an estimate of ||A||_F^2 less a multiple of I
            y = matrix @ z
            return np.mean(np.sum(np.square(y - z * (np.sum(z * y, axis=0) / n)), axis=0))

        each = []
        for i, (own, other) in enumerate([halves, halves[::-1]]):
            count = z.shape[1]
            t, variance, design, size, drift = past[i]
            now, before = norm(new, other), norm(old, other)
            a = (1 - drift) * size / (size + count / 2 * design) if step else 0
            t = a * t + np.mean(np.sum(own * ((new - a * old) @ own), axis=0))
            variance = a**2 * variance + 2 / own.shape[1] * norm(new - a * old, own)
            # The error of the past is as large a part of the operator as it was.
            scaled = design * before / size
            design = a**2 * scaled + 2 / count * norm(new - a * old, other)
            seen = norm(new - old, other) / (now + before) if step else 0
            drift = np.sqrt(drift * seen) if drift > 0 and seen > 0 else seen
            each.append((t, variance, design, now, drift))
        past = each
        values, variances = np.mean([x[0] for x in each]), np.sum([x[1] for x in each]) / 4
        found.append((values, np.sqrt(variances)))
    return np.transpose(found)


def reference_recycled(key, matrices):
    """Hutch++ with the orthonormalised products of the step before: values and errors."""
    n, m, found, sketch = matrices.shape[1], K // 2, [], None
    for own_key, matrix in zip(jr.split(key, len(matrices)), matrices, strict=True):
        probe_key, noise_key = jax.jit(split)(own_key)
        if sketch is None:
            sketch = np.asarray(probes(noise_key, n, m))
        q = np.linalg.qr(sketch)[0]
        z = np.asarray(probes(probe_key, n, K - m))
        g = z - q @ (q.T @ z)
        g = g * np.sqrt((n - m) / np.sum(g**2, axis=0))  # on the sphere of the complement
        sketch = matrix @ q
        forms = np.sum(g * (matrix @ g), axis=0)
        left = matrix @ g - q @ (q.T @ (matrix @ g)) - g * forms / (n - m)
        variance = 2 * np.mean(np.sum(left**2, axis=0)) / (K - m)
        found.append((np.trace(q.T @ sketch) + np.mean(forms), np.sqrt(variance)))
    return np.transpose(found)


REFERENCES = {"recycled": reference_recycled, "deltashift": reference_deltashift}


@pytest.mark.parametrize("method", METHODS)
def test_the_recursion_on_the_same_probes(method):
    solution = run(Tracker(method), jr.key(2), MATRICES)[1]
    values, errors = REFERENCES[method](jr.key(2), MATRICES)
    np.testing.assert_allclose(solution.value, values, rtol=1e-9)
    np.testing.assert_allclose(solution.std_err, errors, rtol=1e-7)
    dof = np.r_[K if method == "deltashift" else K // 2, np.full(STEPS - 1, K // 2)]
    np.testing.assert_array_equal(solution.stats["dof"], dof)
    np.testing.assert_array_equal(solution.num_matvecs, K)


@pytest.mark.parametrize("method", METHODS)
def test_scan_vmap_and_a_loop_agree(method):
    tracker = Tracker(method)
    last, solution = run(tracker, jr.key(2), MATRICES)
    state, previous = tracker.init(lx.MatrixLinearOperator(MATRICES[0]), K), None
    structure = jax.eval_shape(lambda: state)
    for i, key in enumerate(jr.split(jr.key(2), STEPS)):
        state, step = update(tracker, key, MATRICES[i], state, previous)
        previous = MATRICES[i] if method == "deltashift" else None
        np.testing.assert_allclose(step.value, solution.value[i], rtol=1e-10)
        np.testing.assert_allclose(step.std_err, solution.std_err[i], rtol=1e-7)
        assert jax.eval_shape(lambda state=state: state) == structure
    for x, y in zip(jtu.tree_leaves(last), jtu.tree_leaves(state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-12)
    many = run_many(tracker, jnp.stack([jr.key(2), jr.key(3)]), MATRICES)
    np.testing.assert_allclose(many.value[0], solution.value, rtol=1e-9)
    assert np.all(many.value[1] != many.value[0])


# --- the mean and the error bar ------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_bars_of_few_steps(method):
    """At every step no bias. Independent phases have half of the variance of signs where A has
    real entries.
    """
    matrices = MATRICES[:3].astype(np.complex128)
    solution = run_many(Tracker(method, tr.SteinhausSampler()), keys(COUNT), matrices)
    error = np.asarray(solution.value) - traces(matrices)
    spread = rms(error)
    z = np.abs(np.mean(error.real, axis=0)) / (spread / np.sqrt(len(error)))
    # |z| > 4 has probability 6e-5 under the hypothesis, and the seeds are fixed.
    assert np.all(z < 4), z
    ratio = spread / rms(solution.std_err)
    # A standard deviation from 1000 samples is good to some 4 % (their kurtosis is above 3).
    assert np.all((ratio > 0.85) & (ratio < 1.15)), ratio
    assert np.all(solution.result == tr.RESULTS.successful)


@pytest.mark.parametrize("method", METHODS)
def test_a_jump_shows_in_the_error_bar(method):
    before, after = drifting(6, drift=0.01), 50 * drifting(6, drift=0.01, seed=5)
    matrices = np.concatenate([before, after])
    solution = run_many(Tracker(method), keys(COUNT), matrices)
    reported = np.asarray(solution.std_err)
    ratio = rms(np.asarray(solution.value) - traces(matrices)) / rms(reported)
    assert np.all((ratio > 0.7) & (ratio < 1.4)), ratio
    assert np.mean(reported[:, 6]) > 10 * np.mean(reported[:, 5])
    # In units of the operator the last error is hardly larger than before the jump.
    assert np.mean(reported[:, -1]) < 1.5 * 50 * np.mean(reported[:, 5])


# --- derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_derivative_is_that_of_frozen_weights(method):
    """The value is affine in A but for the factor `a`, which is held fixed; only the value and only
    the present carry derivatives.
    """
    b, c, d = (jnp.asarray(x) for x in drifting(3, drift=1.0))
    tracker, key = Tracker(method), jr.key(7)
    state, _ = run(tracker, jr.key(1), MATRICES)

    def step(matrix, state, previous):
        return update(tracker, key, matrix, state, previous)

    def value(theta, past):
        matrix = b + theta * c + theta**2 * d
        history = jtu.tree_map(lambda x: past * x, (state, MATRICES[-1]))
        new, solution = step(matrix, *history)
        leaves = jtu.tree_leaves((new, solution.std_err))
        return solution.value + sum(jnp.sum(x) for x in leaves)

    # From a past of zeros the value itself is linear in A.
    nothing = jtu.tree_map(jnp.zeros_like, state)
    nothing = eqx.tree_at(lambda s: s.sketch, nothing, state.sketch, is_leaf=lambda x: x is None)

    def linear(matrix):
        return step(matrix, nothing, jnp.zeros_like(matrix))[1].value

    @jax.jit
    def derivatives(theta):
        slopes = jax.grad(value, argnums=(0, 1))
        first, second = jax.jvp(lambda x: slopes(x, 1.0), (theta,), (jnp.ones(()),))
        return first, second[0], linear(c + 2 * theta * d), linear(d)

    (first, of_past), second, expected, curved = derivatives(jnp.asarray(0.3))
    np.testing.assert_allclose(first, expected, rtol=1e-10)
    np.testing.assert_allclose(second, 2 * curved, rtol=1e-10)
    assert of_past == 0


# --- hard cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_nan_leaves_the_state_as_it_was(method):
    tracker = Tracker(method)
    previous = MATRICES[-1] if method == "deltashift" else None
    state, _ = run(tracker, jr.key(2), MATRICES)
    nan = MATRICES[0].copy()
    nan[2, 3] = np.nan
    after, solution = update(tracker, jr.key(1), nan, state, previous)
    assert solution.result == tr.RESULTS.nonfinite_operator
    assert np.isnan(solution.value)
    assert np.isnan(solution.std_err)
    jtu.tree_map(np.testing.assert_array_equal, after, state)
    _, solution = update(tracker, jr.key(2), MATRICES[-1], after, previous)
    assert solution.result == tr.RESULTS.successful
    assert abs(float(solution.value) - np.trace(MATRICES[-1])) < 6 * float(solution.std_err)


def test_low_rank_is_exact_after_the_first_steps():
    """Also after zeros: with unit vectors, the iteration would stay where a diagonal operator maps
    them.
    """
    low_rank = with_spectrum(np.random.default_rng(1), np.r_[3.0, 2.0, 1.0, np.zeros(N - 3)])
    unit = np.zeros((STEPS, N, N))
    unit[3:, N - 1, N - 1] = 5.0
    for matrices, first in ((np.broadcast_to(low_rank, (STEPS, N, N)), 1), (unit, 5)):
        solution = run(Tracker("recycled"), jr.key(0), matrices)[1]
        np.testing.assert_allclose(solution.value[first:], traces(matrices)[first:], rtol=1e-10)
        assert np.all(solution.std_err[first:] < 1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_single_precision_at_extreme_scales_and_after_zeros(method):
    matrices = np.where(np.arange(STEPS)[:, None, None] < 3, 0, MATRICES).astype(np.float32)
    plain, large, small = (
        run(Tracker(method), jr.key(0), matrices * np.float32(scale))[1]
        for scale in (1, 1e20, 1e-20)
    )
    assert not np.any(plain.value[:3])
    assert not np.any(plain.std_err[:3])
    error = plain.value - traces(matrices)
    assert np.all(np.abs(error[3:]) < 5 * plain.std_err[3:])
    for scaled, scale in ((large, np.float32(1e20)), (small, np.float32(1e-20))):
        assert scaled.value.dtype == scaled.std_err.dtype == np.float32
        np.testing.assert_allclose(scaled.value / scale, plain.value, rtol=1e-3, atol=1e-12)
        np.testing.assert_allclose(scaled.std_err / scale, plain.std_err, rtol=1e-2, atol=1e-12)


def test_rounding_is_in_the_error():
    """Of low rank, float32: all that a step errs by is rounding, which its samples do not show."""
    factor = np.random.default_rng(0).standard_normal((N, 3))
    matrices = np.stack([factor @ factor.T] * STEPS).astype(np.float32)
    exact = np.trace(matrices[0].astype(np.float64))
    for seed in range(4):
        _, solution = run(Tracker("recycled"), jr.key(seed), matrices)
        error = abs(float(solution.value[-1]) - exact)
        assert error <= 3 * float(solution.std_err[-1]) <= 1e-4 * exact


@pytest.mark.parametrize("method", METHODS)
def test_budgets(method):
    least = {"recycled": 2, "deltashift": 4}[method]
    with pytest.warns(UserWarning, match=f"needs at least {least} matvecs, got k=1"):
        assert Tracker(method).init(lx.MatrixLinearOperator(MATRICES[0]), 1).k == least
    # An odd budget, the smallest one, and one that is exact.
    for k, spent in ((least, least), (7, 7 if method == "recycled" else 6)):
        solution = run(Tracker(method), jr.key(0), MATRICES[:2], k)[1]
        assert solution.num_matvecs[-1] == spent
        assert np.all(np.abs(solution.value - traces(MATRICES[:2])) < 8 * solution.std_err)
    small = drifting(3, n=6)
    _, solution = run(Tracker(method), jr.key(0), small, 9)
    np.testing.assert_allclose(solution.value, traces(small), rtol=1e-12)
    assert not np.any(solution.std_err)


def test_pytrees_other_samplers_and_files(tmp_path):
    """Complex, over a PyTree, with a random key inside; and a state that went through a file."""
    matrix = drifting(1, np.complex128)[0]
    shapes = {"a": (2, 5), "b": (20,)}
    structure = {name: jax.ShapeDtypeStruct(shapes[name], matrix.dtype) for name in shapes}

    def mv(given, x):
        y = given[0] @ jnp.concatenate([x["a"].reshape(-1), x["b"]])
        y = y * (1 + 0 * jr.uniform(given[1])).astype(y.dtype)
        return {"a": y[:10].reshape(2, 5), "b": y[10:]}

    operator = lx.FunctionLinearOperator(
        eqx.Partial(mv, (jnp.asarray(matrix), jr.key(5))), structure
    )
    for method, sampler in zip(METHODS, (tr.NormalSampler(), tr.RademacherSampler()), strict=True):
        tracker, previous = Tracker(method, sampler), None
        empty = state = tracker.init(operator, 12)
        for key in keys(6):
            state, solution = tracker.update(key, operator, state, previous)
            previous = operator
            assert abs(complex(solution.value) - np.trace(matrix)) < 5 * float(solution.std_err)
        eqx.tree_serialise_leaves(tmp_path / "state.eqx", state)
        loaded = eqx.tree_deserialise_leaves(tmp_path / "state.eqx", empty)
        assert eqx.tree_equal(loaded, state)

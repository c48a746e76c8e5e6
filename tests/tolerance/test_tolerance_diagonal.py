"""Diagonals and block traces to a tolerance: `diagonal(key, operator, rtol=...)`."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from scipy.special import chdtri

import traceax as tr
from benchmarks import calibrate
from traceax._estimators import calibration

from ..helpers import (
    PSD,
    keys,
    panel,
    random_unitary,
    spectra,
    variant,
    with_spectrum,
)
from .test_tolerance import PRODUCTS, Logged

ESTIMATORS = calibrate.DIAGONAL_ESTIMATORS
UNITS = {"hutchinson-diagonal": 1, "diag++": 3, "xdiag": 2, "xnysdiag": 1}
N, COUNT = 120, 40
POLY = with_spectrum(np.random.default_rng(0), spectra(N)["poly"])


@eqx.filter_jit
def solve(keys, matrix, estimator, rtol):
    """The solution for each of the keys."""
    operator = lx.MatrixLinearOperator(matrix, PSD)
    return jax.lax.map(lambda key: tr.diagonal(key, operator, estimator=estimator, rtol=rtol), keys)


def relative(values, matrix):
    truth = np.diag(matrix)
    return np.linalg.norm(np.asarray(values) - truth, axis=-1) / np.linalg.norm(truth)


# ------------------------------------------------------------------- accuracy and its price


@pytest.mark.parametrize(
    "name", [variant("hutchinson-diagonal"), variant("diag++"), "xdiag", variant("xnysdiag")]
)
def test_the_tolerance_holds_and_where_a_run_ends(name):
    """Within the tolerance in 95 % of runs (less two deviations of 40 keys, 7 %); stages double;
    never more than n products; rank 5, zero and NaN end with the first stage.
    """
    first = panel(N // 2 // UNITS[name]) * UNITS[name]
    run = partial(solve, keys(COUNT), estimator=ESTIMATORS[name])
    medians = []
    for rtol in (20.0, 0.5, 2e-2, 1e-13):
        solution = run(jnp.asarray(POLY), rtol=jnp.asarray(rtol))
        assert np.all(solution.result == tr.RESULTS.successful)
        assert np.mean(relative(solution.value, POLY) <= rtol) >= 0.88
        medians.append(int(np.median(solution.num_matvecs)))
        if name == "xdiag" and rtol == 0.5:  # entry by entry
            assert solution.inflation == pytest.approx(2 / 1.96)
            lower, upper = jax.vmap(lambda s: s.interval(0.9))(solution)
            truth = np.diag(POLY)
            covered = np.mean((np.asarray(lower) <= truth) & (truth <= np.asarray(upper)))
            assert 0.88 <= covered <= 0.96
    assert medians[0] == first
    assert medians == sorted(medians)
    # The last resort is the exact diagonal.
    assert medians[-1] == N
    assert np.all(np.asarray(solution.std_err) == 0)
    assert relative(solution.value, POLY).max() < 1e-13

    basis = random_unitary(np.random.default_rng(2), N)[:, :5]
    captured = (basis * np.arange(1.0, 6)) @ basis.T
    if name == "hutchinson-diagonal":  # what it captures are diagonal matrices
        captured = np.diag(np.diag(captured))
    for scale in (1.0, 1e20, 1e-20, 0.0):
        solution = run(jnp.asarray(scale * captured), rtol=jnp.asarray(1e-12))
        assert np.all(solution.num_matvecs == first)
        assert np.all(np.asarray(solution.std_err) <= 1e-13 * 5 * scale)
        np.testing.assert_allclose(
            solution.value, scale * np.tile(np.diag(captured), (COUNT, 1)), rtol=1e-10, atol=0
        )
    broken = run(jnp.asarray(POLY).at[3, 4].set(jnp.nan), rtol=jnp.asarray(0.0))
    assert np.all(broken.num_matvecs == first)
    assert np.all(broken.result == tr.RESULTS.nonfinite_operator)
    assert np.all(np.isnan(broken.value))
    if name == "xnysdiag":
        wrong = run(jnp.asarray(POLY - np.eye(N)), rtol=jnp.asarray(0.0))
        assert np.all(wrong.result == tr.RESULTS.not_semidefinite)
        assert np.all(wrong.num_matvecs == first)


def test_the_norm_of_many_errors_is_more_certain():
    """The factor against quantiles of chi^2, and one error as a number."""
    assert calibration.norm_factor(jnp.asarray(3.0)) == 1
    for entries in (2, 2000):
        nu = max(1, entries / 2)
        exact = np.sqrt(chdtri(nu, 0.05) / nu / chdtri(1, 0.05))
        equal = [1e-30 * jnp.ones(entries), jnp.zeros(7)]
        np.testing.assert_allclose(calibration.norm_factor(equal), exact, rtol=0.03)
    # No error at all counts as infinitely many.
    none = calibration.norm_factor(jnp.zeros(3))
    np.testing.assert_allclose(none, 1 / np.sqrt(chdtri(1, 0.05)), rtol=0.03)


@pytest.mark.parametrize(
    ("name", "dtype", "spent"),
    [
        ("xdiag", np.complex128, 112),
        variant("diag++", np.float32, 105),
        variant("hutchinson-diagonal", None, 90),
    ],
)
def test_completion_of_what_is_not_hermitian(name, dtype, spent):
    """Products with the adjoint are of no use then: n + 44 / 2, n + 45 / 3, and n."""
    rng = np.random.default_rng(3)
    dense = rng.standard_normal((90, 90))
    if dtype != np.float32:
        dense = dense + 1j * rng.standard_normal((90, 90))
    dense = dense.astype(dtype or np.complex64)
    operator = lx.MatrixLinearOperator(jnp.asarray(dense))
    solution = tr.diagonal(keys(1)[0], operator, estimator=ESTIMATORS[name], rtol=1e-9)
    assert solution.value.dtype == dense.dtype
    assert solution.num_matvecs == spent
    assert relative(solution.value, dense) < 100 * np.finfo(dense.dtype).eps * 9


# --------------------------------------------------------- derivatives, lanes, going on


@pytest.mark.parametrize(
    "name", [variant("hutchinson-diagonal"), variant("diag++"), "xdiag", variant("xnysdiag")]
)
def test_derivatives_are_those_of_the_final_block(name):
    """value = diag(G A), so that d value in the direction A is the value: for runs that end early,
    late, and with completion. In another direction it is unbiased, and fixed by the same G.
    """
    other = jnp.asarray(with_spectrum(np.random.default_rng(4), spectra(N)["flat"]))
    matrix, both_modes = jnp.asarray(POLY), name == "xdiag"

    @eqx.filter_jit
    def derivatives(key, rtol):
        def value(c, d):
            operator = lx.MatrixLinearOperator(c * matrix + d * other, PSD)
            return tr.diagonal(key, operator, estimator=ESTIMATORS[name], rtol=rtol).value

        result, push = jax.linearize(value, 1.0, 0.0)
        along, across = push(1.0, 0.0), push(0.0, 1.0)
        weights = jnp.cos(jnp.arange(1.0, N + 1))
        if both_modes:
            pulled = jax.grad(lambda c, d: jnp.sum(weights * value(c, d)), (0, 1))(1.0, 0.0)
        else:
            pulled = jnp.sum(weights * along), jnp.sum(weights * across)
        return result, along, across, pulled, weights

    for rtol, tolerance in ((20.0, 0.35), (0.5, 0.35), (1e-13, 1e-12)):
        value, along, across, pulled, weights = derivatives(keys(1)[0], jnp.asarray(rtol))
        # (XNysDiag is differentiated with the weights of XDiag, from the same sketch.)
        own = name != "xnysdiag" or rtol < 1e-9
        np.testing.assert_allclose(along, value, rtol=1e-7 if own else 0.5, atol=1e-12)
        np.testing.assert_allclose(pulled[0], np.sum(weights * along), rtol=1e-9)
        np.testing.assert_allclose(pulled[1], np.sum(weights * across), rtol=1e-9)
        # "flat" is 2 I and rows of norm 0.58: after 16 samples 0.58 / 4 is the deviation of an
        # entry (Hutchinson). With a basis Q the samples see (I - Q Q^H) 2 I as well, whose rows are
        # at most 1 long off the diagonal: sqrt(0.33 + 1) / 4 = 0.29 in the mean of 120.
        assert np.linalg.norm(across - np.diag(other)) <= tolerance * np.sqrt(N)


@pytest.mark.variant
def test_lanes_of_a_vmap_stop_by_themselves():
    """And so do their derivatives, for an operator between PyTrees: a diagonal in parts."""
    matrix = jnp.asarray(POLY)
    structure = {"a": jax.ShapeDtypeStruct((50,), float), "b": jax.ShapeDtypeStruct((70,), float)}
    one = jnp.ones(())

    def value(c, key):
        def product(x):
            y = c * (matrix @ jnp.concatenate([x["a"], x["b"]]))
            return {"a": y[:50], "b": y[50:]}

        operator = lx.FunctionLinearOperator(product, structure, PSD)
        solution = tr.diagonal(key, operator, estimator=tr.HutchinsonDiagonalEstimator(), rtol=1.15)
        return solution.value["b"], solution.std_err["a"], solution.num_matvecs

    def run(key):
        def first(c):
            values, *others = value(c, key)
            return values, others

        values, slope, others = jax.jvp(first, (one,), (one,), has_aux=True)
        return (values, *others), slope

    together, slope = jax.jit(jax.vmap(run))(keys(6))
    alone = jax.jit(lambda ks: jax.lax.map(lambda key: value(one, key), ks))(keys(6))
    assert len(set(np.asarray(together[2]).tolist())) > 1
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)
    np.testing.assert_allclose(together[0], slope, rtol=1e-9, atol=1e-13)


@pytest.mark.variant
@pytest.mark.parametrize("name", ["xdiag", variant("diag++")])
def test_going_on_from_a_state(name):
    """A run in two parts is the run at once: the same value, and no product is made twice."""
    operator = Logged(jnp.asarray(POLY))

    @eqx.filter_jit
    def run(rtol, state=None):
        return tr.diagonal(
            keys(1)[0],
            operator,
            estimator=ESTIMATORS[name],
            rtol=rtol,
            state=state,
            keep_state=True,
            max_k=20 * UNITS[name],
        )

    def counted(*args):
        PRODUCTS.clear()
        solution = jax.block_until_ready(run(*args))
        jax.effects_barrier()
        return solution, len(PRODUCTS)

    at_once, all_products = counted(jnp.asarray(1e-9))
    assert at_once.result == tr.RESULTS.not_converged
    assert all_products == at_once.num_matvecs == 20 * UNITS[name]
    early, first_products = counted(jnp.asarray(20.0))
    assert first_products == early.num_matvecs == panel(20) * UNITS[name]
    late, further = counted(jnp.asarray(1e-9), early.state)
    assert late.num_matvecs == all_products
    assert further == all_products - first_products
    np.testing.assert_allclose(late.value, at_once.value, rtol=1e-12)
    np.testing.assert_allclose(late.std_err, at_once.std_err, rtol=1e-6)


# ------------------------------------------------- what is known, groups of entries, arguments


@pytest.mark.variant
def test_what_is_known_exactly_counts():
    """The tolerance is relative to the whole diagonal, and `K + s I` spends nothing on s I; for
    block traces, to the norm of all of them.
    """
    matrix = jnp.asarray(POLY)
    structure = [jax.ShapeDtypeStruct((50,), float), jax.ShapeDtypeStruct((70,), float)]

    def product(x):
        y = matrix @ jnp.concatenate(x)
        return [y[:50], y[50:]]

    kernel = lx.FunctionLinearOperator(product, structure, PSD)
    noisy = kernel + 10.0 * lx.IdentityLinearOperator(structure)
    truth, whole = np.diag(POLY), np.linalg.norm(np.diag(POLY) + 10)
    # 5 % of the diagonal of K is 0.08 % of the whole.
    solution = tr.diagonal(keys(1)[0], noisy, rtol=5e-2 * np.linalg.norm(truth) / whole)
    assert 16 < solution.num_matvecs < 60
    value = np.concatenate(solution.value)
    assert np.linalg.norm(value - 10 - truth) <= 5e-2 * np.linalg.norm(truth)
    assert solution.inflation == pytest.approx(2 / 1.96)

    traces = eqx.filter_jit(lambda rtol: tr.block_traces(keys(1)[0], noisy, rtol=rtol))
    sums = np.array([truth[:50].sum() + 500, truth[50:].sum() + 700])
    for rtol in (1e-3, 1e-13):
        blocks = traces(jnp.asarray(rtol))
        error = np.linalg.norm(np.array(blocks.value) - sums) / np.linalg.norm(sums)
        assert (blocks.num_matvecs == N) == (rtol < 1e-9)
        assert error <= rtol
    identity = lx.IdentityLinearOperator(structure)
    assert tr.diagonal(keys(1)[0], identity, rtol=1e-3).num_matvecs == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, r"give a tolerance instead, `diagonal\("),
        ({"k": 10, "rtol": 0.1}, TypeError, "both a budget, k=10, and a tolerance"),
        ({"k": 10, "state": 3}, TypeError, "to which alone belong `state`"),
        ({"atol": -1.0}, ValueError, "atol must be finite and not negative"),
        ({"rtol": 0.1, "state": 3}, TypeError, "`state` of a Solution"),
        (
            {"rtol": 0.1, "estimator": tr.ExactDiagonalEstimator()},
            ValueError,
            r"ExactDiagonalEstimator cannot work to a tolerance: .* use XDiagEstimator\(\), .* or "
            r"HutchinsonDiagonalEstimator\(\)",
        ),
    ],
)
def test_arguments(options, error, message):
    operator = lx.MatrixLinearOperator(jnp.asarray(POLY), PSD)
    with pytest.raises(error, match=message):
        tr.diagonal(keys(1)[0], operator, **options)
    with pytest.raises(error, match=message.replace("`diagonal", "`block_traces")):
        tr.block_traces(keys(1)[0], operator, **options)


@pytest.mark.variant
@pytest.mark.parametrize("estimator", [tr.HutchinsonDiagonalEstimator(), tr.XDiagEstimator()])
def test_going_on_in_every_lane_from_where_it_ended(estimator):
    """A lane that ended early has learnt nothing from the stages of the others."""
    matrix = jnp.asarray(POLY)

    def run(scale, key, rtol, state=None):
        operator = lx.MatrixLinearOperator(scale * matrix, PSD)
        options = {"estimator": estimator, "rtol": rtol, "max_k": 64}
        return tr.diagonal(key, operator, state=state, keep_state=True, **options)

    one, both = jnp.ones(2), keys(2)
    early, late = jnp.array([20.0, 1e-9]), jnp.full(2, 1e-9)
    first = jax.jit(jax.vmap(run))(one, both, early)
    assert first.num_matvecs[0] < first.num_matvecs[1]
    again = jax.jit(jax.vmap(run))(one, both, late, first.state)
    at_once = jax.jit(jax.vmap(run))(one, both, late)
    np.testing.assert_array_equal(again.num_matvecs, at_once.num_matvecs)
    np.testing.assert_allclose(again.value, at_once.value, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(again.std_err, at_once.std_err, rtol=1e-8)


@pytest.mark.variant
def test_going_on_after_a_single_panel():
    """What was good enough takes no further product, however few probes there were."""
    operator, estimator = Logged(jnp.asarray(POLY)), tr.XDiagEstimator()

    def counted(**options):
        PRODUCTS.clear()
        given = {"estimator": estimator, "rtol": 20.0, "max_k": 20, "keep_state": True}
        solution = jax.block_until_ready(tr.diagonal(keys(1)[0], operator, **given, **options))
        jax.effects_barrier()
        return solution, len(PRODUCTS)

    first, spent = counted()
    assert spent == first.num_matvecs == 20
    again, none = counted(state=first.state)
    assert none == 0
    np.testing.assert_allclose(again.value, first.value, rtol=1e-12)

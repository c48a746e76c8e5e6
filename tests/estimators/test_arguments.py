"""Arguments: what is no operator, budget, key, estimator or tolerance is refused, and the rest
does what it says. (`test_messages` has a call for each message.)
"""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse

import traceax as tr

from ..helpers import CLASSES, PSD, by_products, compilations, keys, with_spectrum

N = 8
KEY = jax.random.key(0)
MATRIX = with_spectrum(np.random.default_rng(0), np.linspace(1, 3, N))
OPERATOR = lx.MatrixLinearOperator(jax.device_put(MATRIX), PSD)
CALLS = [tr.trace, tr.diagonal, tr.block_traces]


def refused(error, match, *arguments, calls=CALLS, **options):
    """All of these calls are."""
    for call in calls:
        with pytest.raises(error, match=match):
            call(*arguments, **options)


PLACES = np.arange(2 * N).reshape(N, 2) // 2
BCOO = sparse.BCOO(jax.device_put((np.ones(N), PLACES)), shape=(N, N))
NOT_AN_OPERATOR = [
    (jax.device_put(MATRIX), "lineax.MatrixLinearOperator"),
    (lambda v: 2.0 * v, "lineax.FunctionLinearOperator"),
    (scipy.sparse.coo_matrix(MATRIX), "traceax.SparseLinearOperator"),
    (BCOO, "traceax.SparseLinearOperator"),
]


def test_operators_that_are_refused():
    """No operator, and one without the tag that is needed."""
    for value, remedy in NOT_AN_OPERATOR:
        refused(TypeError, remedy, KEY, value, 4, calls=(*CALLS, tr.HutchinsonEstimator().estimate))
    untagged = lx.MatrixLinearOperator(OPERATOR.matrix, lx.symmetric_tag)
    for k in (4, N):  # also where no probe would be drawn
        needs = "XNysTraceEstimator needs a semidefinite"
        refused(ValueError, needs, KEY, untagged, k, tr.XNysTraceEstimator())


def test_keys_and_budgets_that_are_refused():
    several = jax.random.split(KEY, 3), jax.random.split(jax.random.PRNGKey(0), 3)
    for key in (OPERATOR, None, 0, *several, jnp.ones(2), np.ones((), np.int32)):
        refused(TypeError, "key", key, OPERATOR, 4)
    for arguments in ((OPERATOR, KEY, 4), (OPERATOR, 4)):
        refused(TypeError, "first, before the operator", *arguments, calls=[tr.trace])
    for k in (4.0, np.float64(4), True, np.True_, "4", (4,), 0, -3):
        refused((TypeError, ValueError), "budget k must be", KEY, OPERATOR, k)
        refused((TypeError, ValueError), "budget max_k must be", KEY, OPERATOR, rtol=0.1, max_k=k)


def test_budgets():
    expected = tr.trace(KEY, OPERATOR, 4, tr.HutchinsonEstimator())
    for k in (np.int64(4), np.uint8(4), jnp.asarray(4)):
        found = tr.trace(KEY, OPERATOR, k, tr.HutchinsonEstimator())
        assert found.value == expected.value


def test_budget_below_the_smallest_is_raised_with_a_warning():
    with pytest.warns(UserWarning, match="k was raised") as record:
        tr.XTraceEstimator().estimate(KEY, OPERATOR, 1)
    assert {warning.filename for warning in record} == {__file__}
    estimators = tr.XTraceEstimator(), tr.HutchPlusPlusEstimator(), tr.XTraceEstimator()
    for call, estimator, least in zip(CALLS, estimators, (2, 3, 2), strict=True):
        match = f"{type(estimator).__name__} needs at least {least} matvecs, got k=1. k was raised"
        with pytest.warns(UserWarning, match=match) as record:
            solution = call(KEY, OPERATOR, 1, estimator)
        assert {warning.filename for warning in record} == {__file__}
        assert solution.num_matvecs == least
        assert np.all(np.isinf(solution.std_err))
    one = lx.MatrixLinearOperator(jnp.full((1, 1), 2.5), PSD)
    with warnings.catch_warnings(action="error"):  # n = 1 with k = 1 is exact
        for estimator in CLASSES.values():
            solution = tr.trace(KEY, one, 1, estimator)
            assert (solution.value, solution.std_err) == (2.5, 0.0)


def test_keys_of_every_make():
    old, new = jax.random.PRNGKey(3), jax.random.key(3)
    hidden = by_products(MATRIX, PSD)
    values = [tr.trace(key, hidden, 4).value for key in (old, new, np.asarray(old))]
    assert values[0] == values[1] == values[2]


# ------------------------------------------------------------------------------------ solutions


def test_throw_raises_at_run_time():
    call = eqx.filter_jit(lambda op: tr.trace(KEY, op, 4, tr.HutchinsonEstimator(), throw=True))
    broken = lx.MatrixLinearOperator(jnp.asarray(MATRIX).at[2, 5].set(jnp.inf), PSD)
    with pytest.raises(Exception, match="holds NaN or inf"):
        jax.block_until_ready(call(broken).value)
    # The same compiled function takes a sound operator; and without `throw` nothing is raised.
    assert call(OPERATOR).value == tr.trace(KEY, OPERATOR, 4, tr.HutchinsonEstimator()).value
    assert tr.trace(KEY, broken, 4).result == tr.RESULTS.nonfinite_operator


def test_a_solution_shows_its_numbers():
    """And shapes where there are none: inside `jit`, under `vmap`, of diagonals."""
    matrix = jnp.diag(jnp.arange(1.0, 41.0))
    operator = by_products(matrix)
    solution = tr.trace(KEY, operator, 20)
    text = repr(solution)
    assert text.startswith(f"Solution(value={solution.value:.7g}, std_err={solution.std_err:.7g}, ")
    assert text.endswith("num_matvecs=20, result=successful)")
    assert "value=f64[40]" in repr(tr.diagonal(KEY, operator, 20))
    failed = repr(tr.trace(KEY, lx.MatrixLinearOperator(matrix.at[0, 0].set(jnp.nan)), 20))
    assert "value=nan" in failed
    assert "result=nonfinite_operator" in failed
    seen = []

    def solve(key):
        seen.append(repr(tr.trace(key, operator, 20)))
        return tr.trace(key, operator, 20)

    batch = jax.jit(jax.vmap(solve))(keys(3))
    assert seen == ["Solution(value=f64[], std_err=f64[], num_matvecs=i32[])"]
    shown = "value=f64[3], std_err=f64[3], num_matvecs=i32[3], result=3 of 3 successful"
    assert repr(batch) == f"Solution({shown})"


def test_intervals(caplog):
    """Of exact values, of a single sample, of diagonals; a loop of them compiles once."""
    exact = tr.trace(KEY, OPERATOR, N)
    assert exact.interval() == (exact.value, exact.value)
    single = tr.trace(KEY, OPERATOR, 1, tr.HutchinsonEstimator())
    assert single.interval() == (-np.inf, np.inf)
    solution = tr.trace(KEY, OPERATOR, 4, tr.HutchinsonEstimator())
    lower, upper = solution.interval(0.9)
    np.testing.assert_allclose((lower + upper) / 2, solution.value)
    inside = solution.interval(0.5)
    assert lower < inside[0] < inside[1] < upper
    assert compilations(caplog, lambda: (solution.interval(0.6), solution.interval(0.95))) == 0
    lower, upper = tr.diagonal(KEY, OPERATOR, 4, tr.HutchinsonEstimator()).interval(0.9)
    assert lower.shape == (N,)
    assert np.all(lower < upper)

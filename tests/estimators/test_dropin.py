"""Code written for traceax 1.0.2: `estimate(key, operator, k)` returns `(value, stats)`.

The table is that of its own test suite: estimators, budgets, tags, sizes and dtypes (thinned out
where only the compiler would be tested again). It asked for finite numbers; this asks for the
trace, to within the standard error.
"""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from ..helpers import NSD, PSD


def matrix_with(tag, size, dtype=float):
    """A random matrix that has what its tag says."""
    matrix = np.random.default_rng(size).standard_normal((size, size))
    if tag in (PSD, NSD):
        matrix = matrix @ matrix.T if tag is PSD else -matrix @ matrix.T
    return jnp.asarray(np.tril(matrix) if tag is lx.lower_triangular_tag else matrix, dtype)


@pytest.mark.parametrize(
    ("estimator", "tag", "size", "k", "dtype"),
    [
        (tr.HutchinsonEstimator(), (), 50, 5, jnp.float64),
        (tr.HutchPlusPlusEstimator(), (), 500, 50, jnp.float32),
        (tr.XTraceEstimator(), (), 5, 5, jnp.float32),
        (tr.XTraceEstimator(), lx.lower_triangular_tag, 50, 10, jnp.float32),
        (tr.XNysTraceEstimator(), PSD, 50, 10, jnp.float64),
        (tr.XNysTraceEstimator(), NSD, 500, 50, jnp.float32),
    ],
)
def test_matrices(estimator, tag, size, k, dtype):
    """Six keys: each value within 8 (pooled) standard errors of the trace, and of the dtype."""
    matrix = matrix_with(tag, size, dtype)
    operator = lx.MatrixLinearOperator(matrix, tag)
    call = jax.jit(lambda key: estimator.estimate(key, operator, k))
    truth = np.trace(np.asarray(matrix, np.float64))
    rounding = 100 * float(jnp.finfo(dtype).eps) * np.linalg.norm(matrix)
    values, errors = [], []
    for seed in range(6):
        value, stats = call(jax.random.PRNGKey(seed))
        assert value.shape == ()
        assert value.dtype == stats["std.err"].dtype == dtype
        assert stats["num_matvecs"] <= k
        values.append(float(value))
        errors.append(float(stats["std.err"]))
    pooled = np.sqrt(np.mean(np.square(errors)))
    assert (pooled == 0) if k >= size else (0 < pooled < np.inf)
    assert np.all(np.abs(np.subtract(values, truth)) <= 8 * pooled + rounding)


# (Resphered probes differ in their direction only: normal ones would be the same.)
@pytest.mark.parametrize(
    ("cls", "sampler"),
    [
        (tr.HutchinsonEstimator, tr.NormalSampler(float)),
        (tr.XNysTraceEstimator, tr.RademacherSampler(int)),
    ],
)
def test_calls_of_1_0_2(cls, sampler):
    """By keyword, by calling the estimator, with a sampler by position, and jitted."""
    estimator, matrix = cls(), matrix_with(PSD, 20)
    operator = lx.MatrixLinearOperator(matrix, PSD)
    key = jax.random.PRNGKey(3)
    value, stats = estimator.estimate(key=key, operator=operator, k=9)
    again, same = estimator(key, operator, 9)
    assert value == again
    assert stats["std.err"] == same["std.err"] > 0
    solution = tr.trace(key, operator, 9, estimator)
    assert (solution.value, solution.std_err) == (value, stats["std.err"])
    other, _ = cls(sampler).estimate(key, operator, 9)
    assert other != value
    assert abs(other - value) < jnp.trace(matrix)

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

ALL = {
    "hutchinson": tr.HutchinsonEstimator(),
    "hutch++": tr.HutchPlusPlusEstimator(),
    "xtrace": tr.XTraceEstimator(),
    "xnystrace": tr.XNysTraceEstimator(),
}
TAGS = {"none": (), "symmetric": lx.symmetric_tag, "lower": lx.lower_triangular_tag}


def matrix_with(tag, size, dtype):
    """A random matrix that has what its tag says."""
    matrix = np.random.default_rng(size).standard_normal((size, size))
    shape = {
        lx.symmetric_tag: lambda a: a + a.T,
        lx.lower_triangular_tag: np.tril,
        PSD: lambda a: a @ a.T,
        NSD: lambda a: -a @ a.T,
    }.get(tag, lambda a: a)
    return jnp.asarray(shape(matrix), dtype)


def check(estimator, operator, matrix, k):
    """Six keys: each value within 8 (pooled) standard errors of the trace, and of the dtype."""
    call = jax.jit(lambda key, operator: estimator.estimate(key, operator, k))
    truth = np.trace(np.asarray(matrix, np.float64))
    rounding = 100 * float(jnp.finfo(matrix.dtype).eps) * np.linalg.norm(matrix)
    values, errors = [], []
    for seed in range(6):
        value, stats = call(jax.random.PRNGKey(seed), operator)
        assert value.shape == ()
        assert value.dtype == matrix.dtype
        assert stats["std.err"].dtype == matrix.dtype
        assert stats["num_matvecs"] <= k
        values.append(float(value))
        errors.append(float(stats["std.err"]))
    assert not np.any(np.isnan(errors))
    pooled = np.sqrt(np.mean(np.square(errors)))
    if k >= len(matrix):
        assert pooled == 0
    if np.isfinite(pooled):
        assert np.all(np.abs(np.subtract(values, truth)) <= 8 * pooled + rounding)


@pytest.mark.parametrize(
    ("name", "tag", "size", "k", "dtype"),
    [
        ("hutchinson", "none", 50, 5, jnp.float64),
        ("hutch++", "none", 500, 50, jnp.float32),
        ("xtrace", "none", 5, 5, jnp.float32),
        *(("xtrace", tag, 50, 10, jnp.float32) for tag in TAGS if tag != "none"),
        ("xnystrace", PSD, 50, 10, jnp.float64),
        ("xnystrace", NSD, 500, 50, jnp.float32),
    ],
)
def test_matrices(name, tag, size, k, dtype):
    tag = TAGS.get(tag, tag)
    matrix = matrix_with(tag, size, dtype)
    check(ALL[name], lx.MatrixLinearOperator(matrix, tag), matrix, k)


@pytest.mark.parametrize("name", ["hutchinson", "xnystrace"])
def test_calls_of_1_0_2(name):
    """By keyword, by calling the estimator, with a sampler by position, and jitted."""
    estimator = ALL[name]
    matrix = matrix_with(PSD, 20, jnp.float64)
    operator = lx.MatrixLinearOperator(matrix, PSD)
    key = jax.random.PRNGKey(3)
    value, stats = estimator.estimate(key=key, operator=operator, k=9)
    again, same = estimator(key, operator, 9)
    assert value == again
    assert stats["std.err"] == same["std.err"] > 0
    solution = tr.trace(key, operator, 9, estimator)
    assert (solution.value, solution.std_err) == (value, stats["std.err"])
    # (Resphered probes differ in their direction only: normal ones would be the same.)
    sampler = tr.NormalSampler(float) if name == "hutchinson" else tr.RademacherSampler(int)
    other, _ = type(estimator)(sampler).estimate(key, operator, 9)
    assert other != value
    assert abs(other - value) < jnp.trace(matrix)

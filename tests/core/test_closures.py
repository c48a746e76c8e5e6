"""What operators hold in functions: found wherever it hides, and compiled once."""

import functools
import warnings
from typing import ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr

KEY = jr.key(0)
STRUCTURE = jax.ShapeDtypeStruct((6,), jnp.float64)
TRACED = []


@final
class CountingSampler(tr.AbstractSampler):
    """Rademacher, and a note of every time that it is traced."""

    dtype: None = eqx.field(default=None, static=True)
    rotation_invariant: ClassVar[bool] = False

    def _default_dtype(self):
        return float

    def _sample(self, key, shape, k, dtype):
        TRACED.append((shape, k))
        return jr.rademacher(key, (*shape, k), dtype)


ESTIMATOR = tr.HutchinsonEstimator(CountingSampler())


def traces_of(fn):
    """How often an estimate was traced in here, and what came out."""
    TRACED.clear()
    value = fn()
    return len(TRACED), value


def loss(params, inputs):
    return jnp.mean(jnp.tanh(inputs @ params["w"]) ** 2) + jnp.sum(params["b"] ** 4)


PARAMS = {"w": jr.normal(jr.key(1), (3, 2)), "b": jnp.arange(2.0)}
INPUTS = jr.normal(jr.key(2), (5, 3))


def test_an_operator_made_anew_is_not_compiled_again():
    def estimate(scale):
        params = jax.tree.map(lambda x: scale * x, PARAMS)
        operator = tr.curvature.hessian(loss, params, INPUTS)
        return tr.trace(KEY, operator, 3, ESTIMATOR).value

    first, _ = traces_of(lambda: estimate(1.0))
    again, value = traces_of(lambda: estimate(2.0))
    assert first >= 1
    assert again == 0
    doubled = {"w": 2 * PARAMS["w"], "b": 2 * PARAMS["b"]}
    operator = lx.JacobianLinearOperator(
        lambda p, _: jax.grad(loss)(p, INPUTS), doubled, tags=lx.symmetric_tag
    )
    np.testing.assert_allclose(value, tr.trace(KEY, operator, 3, ESTIMATOR).value, rtol=1e-12)

    def function(matrix):
        operator = lx.FunctionLinearOperator(lambda v: jnp.sin(matrix) @ v, STRUCTURE)
        return tr.trace(KEY, operator, 3, ESTIMATOR).value

    first, _ = traces_of(lambda: function(jnp.eye(6)))
    again, value = traces_of(lambda: function(2 * jnp.eye(6)))
    assert (first >= 1, again) == (True, 0)
    np.testing.assert_allclose(value, 6 * np.sin(2.0), rtol=1e-13)


def test_programs_that_differ_are_told_apart():
    """Constants, operations, and which variable goes where."""
    a, b = jnp.full(6, 2.0), jnp.full(6, 5.0)
    functions = {
        2.0: lambda v: 2.0 * v,
        3.0: lambda v: 3.0 * v,
        7.0: lambda v: (a + b) * v,
        10.0: lambda v: (a * b) * v,
        -3.0: lambda v: a * v - b * v,
        0.4: lambda v: a * v / b,
        2.5: lambda v: b * v / a,
        1.5: lambda v: jax.jit(lambda v: 1.5 * v)(v),
        2.25: lambda v: jax.jit(lambda v: 2.25 * v)(v),
        16.0: lambda v: jax.lax.fori_loop(0, 4, lambda _, v: 2 * v, v),
        32.0: lambda v: jax.lax.fori_loop(0, 5, lambda _, v: 2 * v, v),
    }
    for _ in range(2):
        for factor, fn in functions.items():
            operator = lx.FunctionLinearOperator(fn, STRUCTURE)
            value = tr.trace(KEY, operator, 2, ESTIMATOR).value
            np.testing.assert_allclose(value, 6 * factor, rtol=1e-13)


def test_rules_of_derivatives_are_told_apart():
    """Two functions of the same values, with rules of their own: both derivatives are right."""

    def slope(factor):
        @jax.custom_jvp
        def same(x):
            return x

        same.defjvp(lambda primals, tangents: (primals[0], factor * tangents[0]))

        def trace(s):
            operator = lx.FunctionLinearOperator(lambda v: same(s) * v, STRUCTURE)
            return tr.trace(KEY, operator, 2, ESTIMATOR).value

        return jax.grad(trace)(1.0)

    np.testing.assert_allclose([slope(2.0), slope(3.0)], [12.0, 18.0], rtol=1e-13)


class Scale:
    """An ordinary object that holds a number."""

    def __init__(self, scale):
        self.scale = scale

    def method(self, v):
        return self.scale * v

    def __call__(self, v):
        return self.scale * v


def default(s):
    def fn(v, s=s):
        return s * v

    return fn


def keyword(s):
    def fn(v, *, s=s):
        return s * v

    return fn


def nested(s):
    def inner(v):
        return s * v

    return lambda v: inner(v)


HIDING_PLACES = {
    "closure": lambda s: lambda v: s * v,
    "nested closure": nested,
    "default argument": default,
    "keyword default": keyword,
    "partial": lambda s: functools.partial(lambda s, v: s * v, s),
    "partial keyword": lambda s: functools.partial(lambda v, s: s * v, s=s),
    "method": lambda s: Scale(s).method,
    "object": Scale,
    "jit": lambda s: jax.jit(lambda v: s * v),
    "wrapped": lambda s: functools.wraps(default)(nested(s)),
    "list in a closure": lambda s: (lambda held: lambda v: held[0](v))([nested(s)]),
}


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_traced_values_are_found(place):
    """Operators made with `closure_convert=False` hide their tracers from every transformation."""

    def trace(s):
        fn = HIDING_PLACES[place](s)
        operator = lx.FunctionLinearOperator(fn, STRUCTURE, closure_convert=False)
        return tr.trace(KEY, operator, 2, tr.HutchinsonEstimator()).value

    with jax.checking_leaks():
        value, slope = jax.jit(jax.value_and_grad(trace))(jnp.asarray(2.0))
    np.testing.assert_allclose([value, slope], [12.0, 6.0], rtol=1e-13)


def test_collectives_over_an_axis_that_nothing_is_batched_in():
    def trace(shift):
        operator = lx.FunctionLinearOperator(lambda v: jax.lax.psum(v, "lane"), STRUCTURE)
        return tr.trace(KEY, operator, 2, tr.HutchinsonEstimator()).value + shift

    values = jax.vmap(trace, axis_name="lane")(jnp.arange(3.0))
    np.testing.assert_allclose(values, 18 + np.arange(3.0))


@pytest.mark.parametrize("call", ["estimate", "call", "trace", "diagonal", "track"])
def test_warnings_point_at_the_caller(call):
    operator = lx.MatrixLinearOperator(jnp.eye(6) + 1.0)
    estimator = tr.XTraceEstimator()
    tracker = tr.Tracker()
    calls = {
        "estimate": lambda: estimator.estimate(KEY, operator, 1),
        "call": lambda: estimator(KEY, operator, 1),
        "trace": lambda: tr.trace(KEY, operator, 1, estimator),
        "diagonal": lambda: tr.diagonal(KEY, operator, 1, tr.XTraceEstimator()),
        "track": lambda: tracker.init(operator, 1),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls[call]()
    assert caught
    assert all("k was raised" in str(warning.message) for warning in caught)
    assert {warning.filename for warning in caught} == {__file__}

"""What operators hold in functions: found wherever it hides, and compiled once."""

import functools
from typing import ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from ..helpers import register_tags

N = 6
KEY = jr.key(0)
STRUCTURE = jax.ShapeDtypeStruct((N,), jnp.float64)
TRACED = []


@final
class CountingSampler(tr.AbstractSampler):
    """Rademacher, and a note of every time that it is traced."""

    dtype: None = eqx.field(default=None, static=True)
    rotation_invariant: ClassVar[bool] = False

    def _default_dtype(self):
        return float

    def _sample(self, key, shape, k, dtype):
        TRACED.append((*shape, k))
        return jr.rademacher(key, (*shape, k), dtype)


ESTIMATOR = tr.HutchinsonEstimator(CountingSampler())


def traces_of(fn):
    """How often an estimate was traced in here, and what came out."""
    TRACED.clear()
    value = fn()
    return len(TRACED), value


def loss(params, inputs):
    return jnp.mean(jnp.tanh(inputs @ params["w"]) ** 2) + jnp.sum(params["b"] ** 4)


def relu_loss(params, inputs):
    return jnp.mean(jax.nn.relu(inputs @ params["w"]) ** 2) + jnp.sum(jax.nn.relu(params["b"]))


def rematerialised(params, inputs):
    @jax.checkpoint
    def layer(x, w):
        return jax.nn.relu(x @ w), None

    weights = jnp.stack([params["w"] @ params["w"].T] * 2)
    return relu_loss(params, jax.lax.scan(layer, inputs, weights)[0])


def batched(params, inputs):
    return jnp.mean(jax.vmap(lambda x: relu_loss(params, x[None]))(inputs))


def hessian_of(loss):
    def make(scale):
        params = {"w": scale * jnp.ones((3, 2)), "b": scale * jnp.arange(1.0, 3.0)}
        return tr.curvature.hessian(loss, params, jr.normal(jr.key(2), (5, 3)))

    return make


FRESH = {
    "function": lambda s: lx.FunctionLinearOperator(lambda v: s * jnp.eye(N) @ v, STRUCTURE),
    "of jit": lambda s: lx.FunctionLinearOperator(jax.jit(lambda v: s * jnp.eye(N) @ v), STRUCTURE),
    "kernel": lambda s: tr.KernelLinearOperator(
        lambda x, y: s[0] * jnp.exp(-jnp.square(x - y)), jnp.arange(6.0)
    ),
    **{fn.__name__: hessian_of(fn) for fn in (loss, relu_loss, batched, rematerialised)},
}


@pytest.mark.parametrize("name", FRESH)
def test_an_operator_made_anew_is_not_compiled_again(name):
    """Also with the rule of a `jax.custom_jvp`, an object of its own whenever it is traced."""

    def estimate(scale):
        return tr.trace(KEY, FRESH[name](scale * jnp.ones(1)), 3, ESTIMATOR).value

    estimate(1.0)
    again, values = traces_of(lambda: [estimate(scale) for scale in (2.0, 3.0)])
    assert again == 0
    if name not in ("relu_loss", "batched"):  # whose Hessians do not depend on the scale
        assert values[0] != values[1]


class Scale:
    """An ordinary object that holds a number, or weights that are trained in place."""

    def __init__(self, scale):
        self.scale = scale

    def method(self, v):
        return self.scale * v

    def __call__(self, v):
        return self.scale * v


def nested(s):
    inner = lambda v: s * v  # noqa: E731
    return lambda v: inner(v)


HIDING_PLACES = {
    "closure": lambda s: lambda v: s * v,
    "nested closure": nested,
    "default argument": lambda s: lambda v, s=s: s * v,
    "keyword default": lambda s: lambda v, *, s=s: s * v,
    "partial": lambda s: functools.partial(lambda s, v: s * v, s),
    "partial keyword": lambda s: functools.partial(lambda v, s: s * v, s=s),
    "method": lambda s: Scale(s).method,
    "object": Scale,
    "jit": lambda s: jax.jit(lambda v: s * v),
    "wrapped": lambda s: functools.wraps(nested)(nested(s)),
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


class Foreign(lx.AbstractLinearOperator):
    """A user's operator, whose function is a leaf, and hides what it likes."""

    function: object

    def mv(self, vector):
        return self.function(vector)

    def as_matrix(self):
        raise NotImplementedError

    def transpose(self):
        raise NotImplementedError

    def in_structure(self):
        return STRUCTURE

    def out_structure(self):
        return STRUCTURE


class HiddenField(Foreign):
    """One whose function is no leaf."""

    field: object = eqx.field(static=True)

    def mv(self, vector):
        return self.field(vector)


register_tags(Foreign, lambda operator: False)
register_tags(HiddenField, lambda operator: False)
FOREIGN = {"leaf": Foreign, "static": lambda fn: HiddenField(None, fn)}


@pytest.mark.parametrize("made", FOREIGN)
@pytest.mark.parametrize("in_place", [False, True])
def test_arrays_that_change_inside_of_an_operator_are_seen(made, in_place):
    """What was compiled with other numbers is not used again, and other arrays compile nothing."""
    model = Scale(np.ones(N))
    identity = lx.IdentityLinearOperator(STRUCTURE)
    for number in (1.0, 2.0, 3.0, 2.0):
        if in_place:
            model.scale[:] = number
        else:
            model.scale = jnp.full(N, number)
        operator = FOREIGN[made](model)
        again, found = traces_of(lambda op=operator: tr.trace(KEY, op, 2, ESTIMATOR).value)
        assert again == 0 or number == 1
        np.testing.assert_allclose(found, N * number, rtol=1e-13)
        found = tr.trace(KEY, operator + identity, N).value
        np.testing.assert_allclose(found, N * (number + 1), rtol=1e-13)


@pytest.mark.parametrize("made", FOREIGN)
def test_an_operator_of_a_class_that_lineax_does_not_know(made):
    """Its tracers are found, and differentiated; alone, and in a sum, which asks its parts whether
    they are diagonal or tridiagonal.
    """

    def trace(s):
        operator = FOREIGN[made](lambda v: s * v)
        whole = operator + 0.5 * lx.IdentityLinearOperator(STRUCTURE)
        return tr.trace(KEY, operator, 2, ESTIMATOR).value + tr.trace(KEY, whole, N).value

    value, slope = jax.jit(jax.value_and_grad(trace))(jnp.asarray(2.0))
    np.testing.assert_allclose([value, slope], [27.0, 12.0], rtol=1e-13)


CHANGING = None


def changing(v):
    return (lambda u: CHANGING @ u)(v)


def test_a_global_that_changes_is_seen():
    """As by a product with the operator itself, outside `jit`; also in a kernel."""
    points = jnp.arange(float(N))
    for factor in (1.0, 2.0):
        globals()["CHANGING"] = factor * jnp.eye(N) + 1
        operator = lx.FunctionLinearOperator(changing, STRUCTURE)
        np.testing.assert_allclose(tr.trace(KEY, operator, N).value, N * (factor + 1), rtol=1e-12)
        kernel = tr.KernelLinearOperator(
            lambda x, y: CHANGING[0, 0] * jnp.exp(-jnp.square(x - y)), points
        )
        products = kernel.mv(jnp.ones(N)) / (factor + 1)
        expected = np.exp(-np.square(np.subtract.outer(points, points))).sum(1)
        np.testing.assert_allclose(products, expected, rtol=1e-12)


def test_collectives_over_an_axis_that_nothing_is_batched_in():
    def trace(shift):
        operator = lx.FunctionLinearOperator(lambda v: jax.lax.psum(v, "lane"), STRUCTURE)
        return tr.trace(KEY, operator, 2, tr.HutchinsonEstimator()).value + shift

    values = jax.vmap(trace, axis_name="lane")(jnp.arange(3.0))
    np.testing.assert_allclose(values, 18 + np.arange(3.0))

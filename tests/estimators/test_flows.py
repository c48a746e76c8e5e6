"""Divergences along a trajectory cost what a loop by hand does, and are what it computes."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr

pytestmark = pytest.mark.slow  # what is counted is what XLA makes of it with all its passes

SIZE, WIDTH, STEPS, BATCH = 16, 64, 20, 32
_rng = np.random.default_rng(0)
PARAMS = {
    "w1": jax.device_put(_rng.standard_normal((SIZE + 1, WIDTH)) / 4),
    "b1": jax.device_put(np.zeros(WIDTH)),
    "w2": jax.device_put(_rng.standard_normal((WIDTH, SIZE)) / 8),
}
X = jax.device_put(_rng.standard_normal((BATCH, SIZE)))


def velocity(params, t, x):
    hidden = jnp.tanh(jnp.append(x, t) @ params["w1"] + params["b1"])
    return hidden @ params["w2"]


def ours(key, params, t, x, k):
    v, push = jax.linearize(lambda x: velocity(params, t, x), x)
    jacobian = lx.FunctionLinearOperator(push, jax.eval_shape(lambda: x))
    return v, tr.trace(key, jacobian, k, tr.HutchinsonEstimator()).value


def by_hand(key, params, t, x, k):
    z = tr.RademacherSampler().probes_by_leaf(key, [x.shape], k, x.dtype)[0]
    v, push = jax.linearize(lambda x: velocity(params, t, x), x)
    return v, jnp.mean(jnp.sum(z * jax.vmap(push, 1, 1)(z), axis=0))


def integrated(method, k):
    """The mean over a batch, as a function of keys and parameters."""

    def one(key, params, x):
        def step(carry, t):
            v, divergence = method(key, params, t, carry[0], k)
            return (carry[0] + v / STEPS, carry[1] - divergence / STEPS), None

        return jax.lax.scan(step, (x, jnp.zeros(())), jnp.arange(STEPS) / STEPS)[0][1]

    return lambda keys, params: jnp.mean(jax.vmap(one, (0, None, 0))(keys, params, X))


def test_operations():
    """Values and gradients agree, from at most 1.1 times the operations (today .98 to 1.00)."""
    keys, k = jr.split(jr.key(1), BATCH), 4
    found, counts = [], []
    for method in (ours, by_hand):
        for function in (integrated(method, k), jax.value_and_grad(integrated(method, k), 1)):
            compiled = jax.jit(function).lower(keys, PARAMS).compile()
            counts.append(compiled.cost_analysis()["flops"])
            found.append(compiled(keys, PARAMS))
    np.testing.assert_allclose(found[0], found[2], rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found[1], found[3])
    assert counts[0] < 1.1 * counts[2]
    assert counts[1] < 1.1 * counts[3]

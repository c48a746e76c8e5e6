"""With other libraries, as their users would: Flax."""

import flax.linen
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import traceax as tr

pytestmark = pytest.mark.slow

INPUTS = jr.normal(jr.key(3), (16, 6))
TARGETS = jnp.sin(jnp.sum(INPUTS, axis=1))


def square(outputs):
    return jnp.mean((outputs[:, 0] - TARGETS) ** 2)


class Tied(nnx.Module):
    """Batch norm, dropout, and one layer in two places."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(6, 6, param_dtype=jnp.float64, rngs=rngs)
        self.norm = nnx.BatchNorm(6, param_dtype=jnp.float64, rngs=rngs)
        self.norm.mean = nnx.BatchStat(jnp.zeros(6))  # flax makes them of float32
        self.norm.var = nnx.BatchStat(jnp.ones(6))
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.outer = self.inner

    def __call__(self, x):
        return self.outer(self.dropout(jnp.tanh(self.norm(self.inner(x)))))


def test_tied_module_of_nnx():
    """The weights count once, statistics and random state do not, and all products are with the
    same masks: the numbers of a module that was split by hand.
    """
    model = Tied(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    flat, unflatten = ravel_pytree(params)

    def loss(model, x):
        return square(model(x))

    def of_flat(flat):
        return loss(nnx.merge(graph, unflatten(flat), rest, copy=True), INPUTS)

    def layer(path, leaf):
        assert isinstance(leaf, nnx.Variable)
        return path.split("/")[0]

    with jax.numpy_dtype_promotion("standard"):
        dense = jax.jit(jax.hessian(of_flat))(flat)
        for wrt in (None, nnx.Param, lambda path, leaf: isinstance(leaf, nnx.Param)):
            operator = tr.curvature.hessian(loss, model, INPUTS, wrt=wrt)
            assert jax.tree.structure(operator.in_structure()) == jax.tree.structure(params)
        np.testing.assert_allclose(jax.jit(lambda: operator.as_matrix())(), dense, atol=1e-12)
        curvature = tr.curvature.of(loss, groups=layer)
        layers = tr.block_traces(jr.key(0), curvature(model, INPUTS), flat.size).value
        diagonal = unflatten(jnp.diag(dense))
        expected = {name: sum(map(jnp.sum, jax.tree.leaves(diagonal[name]))) for name in diagonal}
        assert set(layers) == {"inner", "norm"}
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10), layers, expected)
        # Another graph is another program, though all arrays are alike.
        model.dropout.rate = 0.0
        graph = nnx.split(model, nnx.Param, ...)[0]
        trace = tr.trace(jr.key(0), curvature(model, INPUTS), flat.size).value
        np.testing.assert_allclose(trace, jnp.trace(jax.jit(jax.hessian(of_flat))(flat)))
        # A state holds statistics, too; and a module may stand among other parameters.
        state = {"state": nnx.state(model), "more": [1.0, Tied(nnx.Rngs(1)), jnp.ones(3)]}
        only = tr.curvature.hessian(lambda p: jnp.sum(p["state"]["norm"]["scale"] ** 2), state)
        assert only.in_size() == 2 * flat.size + 3
    assert isinstance(model.norm.mean, nnx.BatchStat)
    np.testing.assert_array_equal(model.norm.mean, 0)


def test_statistics_of_linen():
    """Of the collections of a linen model only `params` are parameters."""
    model = flax.linen.Sequential(
        [flax.linen.BatchNorm(True, param_dtype=jnp.float64), flax.linen.Dense(1)]
    )
    with jax.numpy_dtype_promotion("standard"):
        variables = model.init(jr.key(0), INPUTS)
        operator = tr.curvature.hessian(lambda v: square(model.apply(v, INPUTS)), variables)
    assert operator.in_structure()["batch_stats"] == {"layers_0": {"mean": None, "var": None}}
    assert operator.in_size() == 6 + 6 + 6 + 1

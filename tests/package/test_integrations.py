"""With other libraries, as their users would: Flax, Equinox, tinygp.

Optax and NumPyro have notebooks; SciPy's and JAX's sparse matrices stand in `test_sparse.py`.
"""

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import tinygp
from flax import nnx
from jax.flatten_util import ravel_pytree

import traceax as tr

from ..helpers import PSD

pytestmark = pytest.mark.slow

# --- Flax, Equinox: curvature of their models ----------------------------------------------------

INPUTS = jr.normal(jr.key(3), (16, 6))
TARGETS = jax.device_put(np.sin(np.asarray(INPUTS).sum(axis=1)))


def square(outputs):
    return jnp.mean((outputs[:, 0] - TARGETS) ** 2)


def nnx_model():
    rngs = nnx.Rngs(0)
    linear = {"param_dtype": jnp.float64, "rngs": rngs}
    model = nnx.Sequential(
        nnx.Linear(6, 4, **linear), nnx.LayerNorm(4, **linear), jnp.tanh, nnx.Linear(4, 1, **linear)
    )
    graph, params = nnx.split(model, nnx.Param)
    return lambda params: square(nnx.merge(graph, params)(INPUTS)), params


def linen_model():
    dense = {"param_dtype": jnp.float64}
    layers = [flax.linen.Dense(4, **dense), jnp.tanh, flax.linen.Dense(1, **dense)]
    model = flax.linen.Sequential(layers)
    return lambda params: square(model.apply(params, INPUTS)), model.init(jr.key(0), INPUTS)


def equinox_model():
    model = eqx.nn.MLP(6, 1, 4, 1, jnp.tanh, key=jr.key(0))
    return lambda model: square(jax.vmap(model)(INPUTS)), model


@pytest.mark.parametrize("make", [nnx_model, linen_model, equinox_model])
def test_models(make):
    """Trace and diagonal of the Hessian, against the dense one, in the structure of the model."""

    @eqx.filter_jit
    def estimates(key, params):
        hessian = tr.curvature.hessian(loss, params)
        exact = tr.diagonal(key, hessian, flat.size).value
        return tr.trace(key, hessian, 20), exact

    with jax.numpy_dtype_promotion("standard"):  # Flax mixes dtypes
        loss, params = make()
        moving, rest = eqx.partition(params, eqx.is_inexact_array)
        flat, unflatten = ravel_pytree(moving)
        dense = jax.jit(jax.hessian(lambda v: loss(eqx.combine(unflatten(v), rest))))(flat)
        solution, diagonal = estimates(jr.key(1), params)
    assert jax.tree.structure(diagonal) == jax.tree.structure(moving)
    np.testing.assert_allclose(ravel_pytree(diagonal)[0], jnp.diagonal(dense), atol=1e-10)
    assert abs(solution.value - jnp.trace(dense)) < 4 * solution.std_err
    assert solution.std_err < 0.15 * jnp.trace(dense)


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


# --- tinygp: its kernels as operators ------------------------------------------------------------

_rng = np.random.default_rng(4)
POINTS = jax.device_put(np.sort(_rng.uniform(size=80)))
OBSERVED = jax.device_put(np.sin(12 * np.asarray(POINTS)) + 0.3 * _rng.standard_normal(80))
THETA = jax.device_put(np.log([0.2, 1.5, 0.1]))  # length, scale, noise


def kernel_of(theta):
    length, scale, _ = jnp.exp(theta)
    return scale * tinygp.kernels.ExpSquared(length) + 0.2 * tinygp.kernels.Cosine(0.5)


def covariance(theta):
    """K + s I, by rows: the matrix is never formed."""
    kernel = kernel_of(theta)

    def product(v):
        return jax.lax.map(lambda x: kernel(x[None], POINTS)[0] @ v, POINTS)

    rows = lx.FunctionLinearOperator(product, jax.eval_shape(lambda: POINTS), PSD)
    return rows + jnp.exp(theta[2]) * lx.IdentityLinearOperator(rows.in_structure())


def exact_density(theta):
    process = tinygp.GaussianProcess(kernel_of(theta), POINTS, diag=jnp.exp(theta[2]))
    return process.log_probability(OBSERVED)


def density(theta, k=50, **options):
    solution = tr.gaussian_log_density(jr.key(0), OBSERVED, covariance(theta), k, **options)
    return solution.value, solution


def test_kernels_of_tinygp():
    """The marginal likelihood and its gradient: those of tinygp's Cholesky factorisation."""
    (value, solution), slope = jax.jit(jax.value_and_grad(density, has_aux=True))(THETA)
    truth, expected = jax.jit(jax.value_and_grad(exact_density))(THETA)
    print(value - truth, solution.std_err, solution.quadrature_error, slope - expected)
    assert abs(value - truth) < 4 * solution.std_err + solution.quadrature_error
    np.testing.assert_allclose(slope, expected, rtol=1e-4)

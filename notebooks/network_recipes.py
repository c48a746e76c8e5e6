# %% [markdown]
# # Recipes for networks
#
# What [the guide](../docs/curvature.md) leaves out: errors over batches, the noise of the
# gradients, the density of a layer, the trace of the square, marginal variances, a preconditioner
# of another library, and one vector for a model on several devices.

# %%
import math

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import traceax as tr


def model(params, inputs):
    return jnp.tanh(inputs @ params["w1"] + params["b1"]) @ params["w2"]


def squares(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


def loss(params, batch):
    return squares(model(params, batch[0]), batch[1])


k1, k2, k3 = jax.random.split(jax.random.key(1), 3)
params = {
    "w1": jax.random.normal(k1, (4, 32)),
    "b1": jnp.zeros(32),
    "w2": 0.1 * jax.random.normal(k2, (32, 1)),
}
inputs = jax.random.normal(k3, (64, 4))
batch = (inputs, jnp.sum(inputs, axis=1, keepdims=True))

# %% [markdown]
# ## Traces of batches
#
# `std_err` is the error of the probes for one batch. Traces of batches scatter as well: for that
# of all data take several of them, and the error over them.


# %%
def of_batch(key, rows):
    part = jax.tree.map(lambda x: x[rows], batch)
    return tr.trace(key, tr.curvature.hessian(loss, params, part), k=10)


rows = jax.random.permutation(jax.random.key(3), 64).reshape(8, -1)
traces = jax.vmap(of_batch)(jax.random.split(jax.random.key(4), 8), rows)
over_batches = traces.value.std(ddof=1) / 8**0.5
print(f"{traces.value.mean():.1f} +- {over_batches:.1f}")
whole = tr.trace(jax.random.key(0), tr.curvature.hessian(loss, params, batch), k=193).value
print(f"of all data: {whole:.1f}")

# %% [markdown]
# ## The noise of the gradients
#
# How large should a batch be? The simple noise scale, the trace of the covariance of the
# gradients of single examples over the squared norm of their mean, is about the size beyond which
# larger batches help little ([arXiv:1812.06162](https://arxiv.org/abs/1812.06162)). No probes are
# drawn: the errors are those of the examples, by the jackknife.


# %%
def loss_of_example(params, example):
    return loss(params, jax.tree.map(lambda x: x[None], example))


def trace_and_square(gradients, weights):  # of the covariance; |G|^2; both without a bias
    count = jnp.sum(weights)
    square = jnp.sum((weights @ gradients / count) ** 2)
    trace = (weights @ jnp.sum(gradients**2, axis=1) / count - square) * count / (count - 1)
    return jnp.stack([trace, square - trace / count])


gradients = jax.vmap(jax.grad(loss_of_example), (None, 0))(params, batch)
gradients = jnp.concatenate([g.reshape(64, -1) for g in jax.tree.leaves(gradients)], axis=1)
found = trace_and_square(gradients, jnp.ones(64))
without_one = jax.vmap(trace_and_square, (None, 0))(gradients, 1 - jnp.eye(64))
errors = jnp.sqrt(63 * jnp.var(without_one, axis=0))
print(f"trace {found[0]:.0f} +- {errors[0]:.0f}, square {found[1]:.0f} +- {errors[1]:.0f}")
print(f"noise scale {found[0] / found[1]:.1f}")

# %% [markdown]
# ## The trace of the square, and the density of a layer
#
# $\mathrm{tr}(H^2) = \|H\|_F^2$ is the square of the Frobenius norm, whose error is twice the
# norm times that of the norm. The density of a layer is that of its block: the Hessian with
# respect to this layer alone.

# %%
hessian = tr.curvature.hessian(loss, params, batch)
norm = tr.frobenius_norm(jax.random.key(10), hessian, k=40)
print(f"tr H^2 {norm.value**2:.0f} +- {2 * norm.value * norm.std_err:.0f}")
of_first_layer = tr.curvature.of(loss, wrt=lambda path, leaf: path.endswith("1"))
first = of_first_layer(params, batch)
grid = jnp.linspace(-2, 4, 200)
density = tr.spectral_density(jax.random.key(11), first, 60, grid, width=0.1)
print(f"integral of the density {jnp.trapezoid(density.value, grid):.2f}")

# %% [markdown]
# ## Marginal variances
#
# They are the diagonal of the inverse. The precision of the prior is added as a multiple of the
# identity.

# %%
gauss_newton = tr.curvature.of(squares, predict=model)(params, (batch[0],), (batch[1],))
identity = lx.IdentityLinearOperator(gauss_newton.in_structure())
variances = tr.inverse_diagonal(jax.random.key(15), gauss_newton + 0.1 * identity, 60)
low, high = variances.interval()  # with few probes, entries scatter more than two standard errors
print(f"of the first bias between {low['b1'][0]:.1f} and {high['b1'][0]:.1f}")

# %% [markdown]
# ## A preconditioner of another library
#
# K-FAC, or a diagonal, enters as P: with $\log\det A = \log\det P + \log\det(P^{-1/2} A
# P^{-1/2})$ the other library knows the first term, and the estimate has the better conditioned
# second one. Here are the factors of K-FAC for both layers. (A diagonal P is the same with `v /
# sqrt(p)` and `sum(log(p))`.)

# %%
damping = 0.1
hidden = jnp.tanh(batch[0] @ params["w1"] + params["b1"])
slopes = (1 - hidden**2) * params["w2"][:, 0]
layers = {  # layer: E[a a^T] of its inputs, E[g g^T] of the gradients of its outputs
    "w1": (batch[0].T @ batch[0] / 64, 2 * slopes.T @ slopes / 64),
    "b1": (jnp.ones((1, 1)), 2 * slopes.T @ slopes / 64),
    "w2": (hidden.T @ hidden / 64, 2 * jnp.ones((1, 1))),
}
spectra = {name: [jnp.linalg.eigh(x) for x in pair] for name, pair in layers.items()}


def eigenvalues(name):
    (a, _), (g, _) = spectra[name]
    return jnp.maximum(a[:, None] * g, 0) + damping


def inverse_root(v):  # P^(-1/2) v, layer by layer
    def of_layer(name, x):
        (_, u), (_, w) = spectra[name]
        rotated = (u.T @ jnp.atleast_2d(x) @ w) / jnp.sqrt(eigenvalues(name))
        return (u @ rotated @ w.T).reshape(x.shape)

    return {name: of_layer(name, x) for name, x in v.items()}


def damped(v):
    return jax.tree.map(lambda x, y: x + damping * y, gauss_newton.mv(v), v)


def log_det(product):
    structure = gauss_newton.in_structure()
    operator = lx.FunctionLinearOperator(product, structure, lx.positive_semidefinite_tag)
    return tr.logdet(jax.random.key(14), operator, 20, preconditioner=None)


plain = log_det(damped)
whitened = log_det(lambda v: inverse_root(damped(inverse_root(v))))
log_det_p = sum(jnp.sum(jnp.log(eigenvalues(name))) for name in spectra)
dense = gauss_newton.as_matrix() + damping * jnp.eye(gauss_newton.in_size())
truth = jnp.linalg.slogdet(dense)[1]
print(f"plain {plain.value:.1f} +- {plain.std_err:.1f}, exactly {truth:.1f}")
print(f"with K-FAC {log_det_p + whitened.value:.1f} +- {whitened.std_err:.1f}")

# %% [markdown]
# ## One vector for a large model
#
# Sketching estimators join the leaves of the parameters to one vector, which moves them between
# devices. Here each device's part of the vector is made of its own parts of the leaves, so that
# nothing moves. Every leaf must be cut over all devices. (The order of the numbers, and with it
# the estimate for a key, then depends on how they are cut.)


# %%
def as_one_vector(operator, mesh, specs):
    leaves, treedef = jax.tree.flatten(operator.in_structure())
    cuts = tuple(treedef.flatten_up_to(specs))
    pairs = zip(cuts, leaves, strict=True)
    shapes = [NamedSharding(mesh, cut).shard_shape(x.shape) for cut, x in pairs]
    ends = [sum(map(math.prod, shapes[: i + 1])) for i in range(len(shapes))]

    def split(part):
        parts = zip(jnp.split(part, ends[:-1]), shapes, strict=True)
        return tuple(x.reshape(shape) for x, shape in parts)

    def join(*parts):
        return jnp.concatenate([x.reshape(-1) for x in parts])

    axes = P(mesh.axis_names)
    to_leaves = jax.shard_map(split, mesh=mesh, in_specs=axes, out_specs=cuts)
    to_vector = jax.shard_map(join, mesh=mesh, in_specs=cuts, out_specs=axes)

    def mv(vector):
        product = operator.mv(treedef.unflatten(to_leaves(vector)))
        return to_vector(*treedef.flatten_up_to(product))

    structure = jax.ShapeDtypeStruct((operator.in_size(),), leaves[0].dtype)
    return lx.FunctionLinearOperator(mv, structure, lx.positive_semidefinite_tag)


mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
specs = {"w1": P(None, "d"), "b1": P("d"), "w2": P("d", None)}
cut = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in params.items()}


@jax.jit
def of_model(key, params):
    matrix = tr.curvature.of(squares, predict=model)(params, (batch[0],), (batch[1],))
    return tr.trace(key, as_one_vector(matrix, mesh, specs), k=20)


solution = of_model(jax.random.key(0), cut)
exact = jnp.trace(gauss_newton.as_matrix())
print(f"{solution.value:.2f} +- {solution.std_err:.2f}, exactly {exact:.2f}")

# %% [markdown]
# ## What was claimed

# %%
assert abs(traces.value.mean() - whole) < 4 * over_batches
assert abs(norm.value**2 - np.sum(hessian.as_matrix() ** 2)) < 8 * norm.value * norm.std_err
assert abs(jnp.trapezoid(density.value, grid) - 1) < 0.05
assert low["b1"][0] < jnp.linalg.inv(dense)[0, 0] < high["b1"][0]
assert abs(log_det_p + whitened.value - truth) < 4 * whitened.std_err + whitened.quadrature_error
assert whitened.std_err < plain.std_err
assert abs(solution.value - exact) < 4 * solution.std_err
print("All of it holds.")

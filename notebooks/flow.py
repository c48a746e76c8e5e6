# %% [markdown]
# # A continuous normalising flow
#
# A flow moves a normal sample along $dx/dt = f(x, t)$ until it looks like the data. The density
# of where it arrives follows from the divergence of $f$ along the way,
#
# $$\frac{d \log p}{dt} = -\mathrm{tr} \frac{\partial f}{\partial x},$$
#
# which Hutchinson's estimator takes from one product with the Jacobian. This page trains such a
# flow in eight dimensions, with [diffrax](https://docs.kidger.site/diffrax), and looks at what
# the probes cost. A second part solves an equation with a Laplacian by a network. [The
# guide](../docs/flows.md) has the pieces.

# %%
import diffrax
import jax
import jax.numpy as jnp
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import make_moons

import traceax as tr

SIZE, WIDTH = 8, 64
rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, SIZE)))[0]


def sample(seed, count):
    """Two moons in two of the eight dimensions, normal numbers in the others, all of it rotated."""
    moons, _ = make_moons(count, noise=0.07, random_state=seed)
    noise = 0.5 * np.random.default_rng(seed).normal(size=(count, SIZE - 2))
    scaled = (moons - [0.5, 0.25]) / [0.87, 0.5]
    return jnp.asarray(np.hstack([scaled, noise]) @ rotation, jnp.float32)


train, test = sample(1, 4096), sample(2, 512)

# %% [markdown]
# ## The divergence of a velocity
#
# `jax.linearize` evaluates $f$ once for its value and all products. The key of a sample is an
# argument of the solver: it is the same at every step, so that the right side is a smooth
# function of time, as an adaptive solver needs it.


# %%
def initial(key):
    keys = jax.random.split(key, 3)
    sizes = [(SIZE + 1, WIDTH), (WIDTH, WIDTH), (WIDTH, SIZE)]
    scales = [1 / 3, 1 / 8, 1e-3]
    return [
        (scale * jax.random.normal(k, size), jnp.zeros(size[1]))
        for k, size, scale in zip(keys, sizes, scales, strict=True)
    ]


def velocity(params, t, x):
    x = jnp.append(x, t)
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def field(k):
    def of_state(t, state, arguments):
        key, params = arguments
        v, push = jax.linearize(lambda x: velocity(params, t, x), state[0])
        jacobian = lx.FunctionLinearOperator(push, jax.eval_shape(lambda: v))
        return v, tr.trace(key, jacobian, k, tr.HutchinsonEstimator()).value

    return diffrax.ODETerm(of_state)


def log_density(params, key, x, k):
    """From the data at t = 1 back to the normal sample at t = 0."""
    controller = diffrax.PIDController(rtol=1e-3, atol=1e-3)
    ends, divergence = diffrax.diffeqsolve(
        *(field(k), diffrax.Tsit5(), 1.0, 0.0, -0.1, (x, jnp.zeros(()))),
        args=(key, params),
        stepsize_controller=controller,
    ).ys
    return jnp.sum(jax.scipy.stats.norm.logpdf(ends[0])) + divergence[0]


def log_densities(params, key, x, k=1):
    keys = jax.random.split(key, len(x))
    return jax.vmap(log_density, (None, 0, 0, None))(params, keys, x, k)


# %% [markdown]
# ## Training
#
# One probe a sample, and new keys at every step: the gradient is unbiased.

# %%
STEPS, BATCH = 300, 128
optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))


@jax.jit
def step(params, state, key):
    key, rows = jax.random.split(key)
    batch = jax.random.choice(rows, train, (BATCH,))
    loss, slope = jax.value_and_grad(lambda p: -log_densities(p, key, batch).mean())(params)
    updates, state = optimiser.update(slope, state)
    return optax.apply_updates(params, updates), state, loss


params = initial(jax.random.key(0))
state, losses = optimiser.init(params), []
for i in range(STEPS):
    params, state, loss = step(params, state, jax.random.key(i))
    losses.append(float(loss))
print(f"loss {np.mean(losses[:10]):.2f}, at the end {np.mean(losses[-30:]):.2f}")

# %% [markdown]
# ## What the probes cost
#
# In eight dimensions eight products give the exact trace: `k=8`. The error of a single log
# density is that of one probe, which is held along the whole path; four products a step halve it.
# In the mean over the test data it is averaged away, and the scatter over the samples, divided by
# the root of their number, bounds it.

# %%
key = jax.random.key(1)
exact = jax.jit(lambda key: log_densities(params, key, test, SIZE))(key)
errors = {}
for k in (1, 4):
    found = jax.jit(lambda key, k=k: log_densities(params, key, test, k))(key)
    errors[k] = found - exact
    bar = errors[k].std() / 512**0.5
    print(f"k = {k}: one sample is off by {errors[k].std():.2f},", end=" ")
    print(f"the mean {exact.mean():.2f} by {errors[k].mean():+.3f} +- {bar:.3f}")

# %% [markdown]
# Samples of the flow, from normal ones, in the plane of the moons:


# %%
@jax.jit
@jax.vmap
def generated(x):
    term = diffrax.ODETerm(lambda t, x, _: velocity(params, t, x))
    controller = diffrax.PIDController(rtol=1e-3, atol=1e-3)
    solver = diffrax.Tsit5()
    return diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.1, x, stepsize_controller=controller).ys[0]


samples = generated(jax.random.normal(jax.random.key(2), (512, SIZE)))
figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharex=True, sharey=True, layout="constrained")
for ax, x, title in zip(axes, (test, samples), ("data", "flow"), strict=True):
    plane = np.asarray(x) @ rotation.T
    ax.plot(plane[:, 0], plane[:, 1], ".", markersize=3)
    ax.set_title(title)
plt.show()

# %% [markdown]
# ## A Laplacian in a loss
#
# The equation $\Delta u = g$ in the unit ball of eight dimensions, with $u = 0$ on the sphere,
# whose solution is $u = (1 - |x|^2) \sum_i \sin x_i$. The network is $(1 - |x|^2)$ times a free
# function. The square of an unbiased estimate is biased by its variance; the product of two,
# from two keys, is not.


# %%
def solution(x):
    return (1 - jnp.sum(x**2)) * jnp.sum(jnp.sin(x))


def network(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return (x @ w + b)[0]


def guess(params, x):
    return (1 - jnp.sum(x**2)) * network(params, x)


def laplacian(function, key, x, k=1):
    return tr.trace(key, tr.curvature.hessian(function, x), k, tr.HutchinsonEstimator()).value


def residual(params, key, x):
    right = jnp.trace(jax.hessian(solution)(x))
    return laplacian(lambda x: guess(params, x), key, x) - right


def squared(params, keys, x):
    return residual(params, keys[0], x) * residual(params, keys[1], x)


def in_ball(key, count):
    directions, radii = jax.random.split(key)
    x = jax.random.normal(directions, (count, SIZE))
    r = jax.random.uniform(radii, (count, 1)) ** (1 / SIZE)
    return r * x / jnp.linalg.norm(x, axis=1, keepdims=True)


@jax.jit
def descend(params, state, key):
    points, key = jax.random.split(key)
    keys, x = jax.random.split(key, (256, 2)), in_ball(points, 256)

    def loss(params):
        return jax.vmap(squared, (None, 0, 0))(params, keys, x).mean()

    updates, state = optimiser.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, updates), state


STEPS = 2000
optimiser = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))
keys, sizes = jax.random.split(jax.random.key(3), 3), [(SIZE, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
weights = [
    (jax.random.normal(k, size) / size[0] ** 0.5, jnp.zeros(size[1]))
    for k, size in zip(keys, sizes, strict=True)
]
state = optimiser.init(weights)
for i in range(STEPS):
    weights, state = descend(weights, state, jax.random.key(i))
x = in_ball(jax.random.key(4), 1000)
truth = jax.vmap(solution)(x)
error = jnp.linalg.norm(jax.vmap(lambda x: guess(weights, x))(x) - truth) / jnp.linalg.norm(truth)
print(f"relative error of the solution: {error:.3f}")

# %% [markdown]
# ## What was claimed

# %%
assert np.mean(losses[-30:]) < np.mean(losses[:10]) - 1
for k, error_of_k in errors.items():
    assert abs(error_of_k.mean()) < 4 * error_of_k.std() / 512**0.5, k
assert errors[4].std() < errors[1].std()
assert error < 0.1
print("All of it holds.")

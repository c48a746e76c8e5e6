# %% [markdown]
# # The curvature of a network while it learns
#
# How sharp is the minimum that training finds, in which layer is it sharp, and does the loss still
# curve downwards anywhere? The answers are in the Hessian of the loss, a matrix with as many rows
# as there are parameters, which nobody forms. But a product of it with a vector costs no more than
# a few gradients. This page follows the trace of the Hessian through a training run, from 20 such
# products at a time, and looks at its spectrum before and after. The network is so small (910
# parameters) that everything can be compared with the exact Hessian.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_digits

import traceax as tr

images, labels = load_digits(return_X_y=True)  # 1797 images of 8 x 8 pixels
order = np.random.default_rng(0).permutation(len(images))
inputs = jnp.asarray(images[order] / 16, jnp.float32)
targets = jnp.asarray(labels[order])
batch, held_out = (inputs[:600], targets[:600]), (inputs[600:], targets[600:])

# %% [markdown]
# ## The network and its curvature
#
# One hidden layer and a cross entropy. The Hessian of the loss is
#
# $$H = \frac{1}{N} \sum_i J_i^\top H_i J_i +
# \frac{1}{N} \sum_i \sum_c r_{ic} \nabla^2 f_{ic},$$
#
# with the Jacobian $J_i$ of the ten logits $f_i$ of an example, the Hessian $H_i$ of the cross
# entropy in the logits, and the residuals $r_i = p_i - y_i$. The first term, the
# Gauss-Newton matrix, is positive semidefinite; the second one may be anything, and fades as the
# residuals do. The Hessian and its first term are one call each.


# %%
def logits(params, batch):
    hidden = jnp.tanh(batch[0] @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def loss(params, batch):
    return cross_entropy(logits(params, batch), batch)


def hessian(params):
    return tr.curvature.hessian(loss, params, batch)


def gauss_newton(params):
    return tr.curvature.gauss_newton(logits, cross_entropy, params, batch)


k1, k2 = jax.random.split(jax.random.key(0))
start = {
    "hidden": {"w": jax.random.normal(k1, (64, 12)) / 8, "b": jnp.zeros(12)},
    "out": {"w": jax.random.normal(k2, (12, 10)) / 4, "b": jnp.zeros(10)},
}
n = hessian(start).in_size()
print(n, "parameters; loss at the start:", loss(start, batch))

# %% [markdown]
# ## Training, with a look at the curvature
#
# Adam for 300 steps. After every ten of them a *tracker* updates its estimate of each trace from 20
# products. It remembers the subspace of large eigenvalues of the look before, which moves slowly.

# %%
looks, steps, k = 30, 10, 20
optimiser = optax.adam(1e-2)
tracker = tr.Tracker("recycled")


@jax.jit
def train(params):
    def step(_, carry):
        params, moments = carry
        updates, moments = optimiser.update(jax.grad(loss)(params, batch), moments)
        return optax.apply_updates(params, updates), moments

    def look(carry, key):
        params, moments, state_h, state_g = carry
        key_h, key_g = jax.random.split(key)
        state_h, trace_h = tracker.update(key_h, hessian(params), state_h)
        state_g, trace_g = tracker.update(key_g, gauss_newton(params), state_g)
        seen = params, loss(params, batch), trace_h, trace_g
        params, moments = jax.lax.fori_loop(0, steps, step, (params, moments))
        return (params, moments, state_h, state_g), seen

    states = tracker.init(hessian(params), k), tracker.init(gauss_newton(params), k)
    keys = jax.random.split(jax.random.key(1), looks + 1)
    return jax.lax.scan(look, (params, optimiser.init(params), *states), keys)[1]


history, losses, traces_h, traces_g = train(start)


def params_at(look):
    return jax.tree.map(lambda leaf: leaf[look], history)


accuracy = float(jnp.mean(jnp.argmax(logits(params_at(-1), held_out), axis=1) == held_out[1]))
print(f"loss {losses[0]:.2f} -> {losses[-1]:.3f}; {accuracy:.1%} of the held-out images are right")

# %% [markdown]
# At three checkpoints the exact matrices, for comparison: the whole Hessian by automatic
# differentiation, and the trace of the Gauss-Newton matrix from the Jacobian of all the logits.

# %%
checkpoints = [0, 5, 30]


@jax.jit
def exact_curvature(params):
    flat, unravel = ravel_pytree(params)
    dense = jax.hessian(lambda flat: loss(unravel(flat), batch))(flat)
    jacobian = jax.jacobian(lambda flat: logits(unravel(flat), batch))(flat)
    p = jax.nn.softmax(logits(params, batch))
    inner = jax.vmap(jnp.diag)(p) - p[:, :, None] * p[:, None, :]
    return dense, jnp.vdot(jnp.einsum("icd,idp->icp", inner, jacobian), jacobian) / len(p)


exact = [exact_curvature(params_at(look)) for look in checkpoints]
exact_h = np.array([jnp.trace(dense) for dense, _ in exact])
exact_g = np.array([trace for _, trace in exact])

print("step  Hessian: estimate, exact      Gauss-Newton: estimate, exact")
for look, h, g in zip(checkpoints, exact_h, exact_g, strict=True):
    estimates = [f"{t.value[look]:5.2f} +- {t.std_err[look]:.2f}" for t in (traces_h, traces_g)]
    print(f"{steps * look:4}  {estimates[0]}  {h:5.2f}          {estimates[1]}  {g:5.2f}")

# %%
when = steps * np.arange(looks + 1)
figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for name, traces, truth, color in [
    ("Hessian", traces_h, exact_h, "C0"),
    ("Gauss-Newton", traces_g, exact_g, "C1"),
]:
    bars = 2 * traces.std_err
    axes.errorbar(when, traces.value, yerr=bars, fmt="o-", ms=3, lw=1, color=color, label=name)
    axes.plot(steps * np.array(checkpoints), truth, "kx", zorder=3)
axes.plot([], [], "kx", label="exact")
axes.set(xlabel="step of Adam", ylabel="trace, with two standard errors", ylim=(0, None))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The trace of the Hessian more than doubles within twenty steps, stays up there until step 40,
# while the loss falls from 2.3 to 0.6, and then falls to less than half of where it started: Adam
# moves into flatter regions. The Gauss-Newton matrix sees little of the first rise: at the top it
# holds not much more than half of the trace. In the end, where the residuals are small, it is four
# fifths, but by no means all.
#
# The first error bars are the widest: the tracker has no subspace yet. Here is what the same 20
# products give without a memory, at the end of training:

# %%
last = hessian(params_at(-1))
alone = tr.trace(jax.random.key(2), last, k, tr.HutchinsonEstimator())
print(f"Hutchinson {alone.value:.2f} +- {alone.std_err:.2f}")
print(f"tracker    {traces_h.value[-1]:.2f} +- {traces_h.std_err[-1]:.2f}; exact {exact_h[-1]:.2f}")

# %% [markdown]
# ## Layer by layer
#
# `tr.block_traces` gives one trace for each array of parameters, from one set of products, here 60.
# They add up to the trace of the Hessian.

# %%
few = jnp.arange(0, looks + 1, 5)


@jax.jit
def by_layer(history):
    def one(params):
        return tr.block_traces(jax.random.key(3), hessian(params), k=60)

    return jax.lax.map(one, history)


layers = by_layer(jax.tree.map(lambda leaf: leaf[few], history))
figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
names = [(layer, kind) for layer in ("hidden", "out") for kind in ("w", "b")]
for layer, kind in names:
    value, std_err = layers.value[layer][kind], layers.std_err[layer][kind]
    axes.errorbar(steps * few, value, yerr=2 * std_err, fmt="o-", ms=3, label=f"{layer} {kind}")
axes.set(xlabel="step of Adam", ylabel="trace, with two standard errors", yscale="log")
axes.legend(frameon=False, ncols=2)
plt.show()

# %%
_, unravel = ravel_pytree(start)
deviations = []  # of every estimate that has an exact counterpart, in standard errors
for look, (dense, _) in zip(checkpoints, exact, strict=True):
    truth = jax.tree.map(jnp.sum, unravel(jnp.diag(dense)))
    for layer, kind in names:
        value, std_err = (x[layer][kind][look // 5] for x in (layers.value, layers.std_err))
        deviations.append(float((value - truth[layer][kind]) / std_err))
        if look == checkpoints[-1]:
            text = f"{value:.3f} +- {std_err:.3f}, exact {truth[layer][kind]:.3f}"
            print(f"{layer:6} {kind}: {text}, {value / start[layer][kind].size:.1e} a parameter")

# %% [markdown]
# Nine tenths of the trace are in the weights of the hidden layer; for each single parameter, its
# biases are the ones that the loss depends on most.
#
# ## The spectrum before and after
#
# The density of the eigenvalues, broadened by a narrow Gaussian, from 120 products. The scale is
# logarithmic: one eigenvalue of the 910 is 0.1 % of the area.

# %%
width = 0.03
grid = jnp.linspace(-0.7, 2.6, 300)
edge = -0.15  # five widths below zero


@jax.jit
def density(params):
    return tr.spectral_density(jax.random.key(4), hessian(params), 120, grid, width=width)


def exact_density(dense):
    distance = (grid[:, None] - jnp.linalg.eigvalsh(dense)) / width
    return jnp.mean(jnp.exp(-(distance**2) / 2), axis=1) / (width * np.sqrt(2 * np.pi))


def share_below(values):
    return float(jnp.sum(jnp.where(grid < edge, values, 0)) * (grid[1] - grid[0]))


figure, panels = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
densities, truths = [], []
for axes, look in zip(panels, (0, -1), strict=True):
    densities.append(density(params_at(look)))
    truths.append(exact_density(exact[look][0]))
    tr.plot.spectral_density(grid, densities[-1], exact=truths[-1], axes=axes)
    axes.set(yscale="log", ylim=(1e-4, 30), title="before" if look == 0 else "after training")
    shares = share_below(densities[-1].value), share_below(truths[-1])
    print(f"below {edge}: {shares[0]:.1%} of the eigenvalues, exactly {shares[1]:.1%}; ", end="")
    spectrum = np.linalg.eigvalsh(exact[look][0])
    leading = np.sum(spectrum[-10:] ** 2) / np.sum(spectrum**2)
    print(
        f"exact extremes {spectrum[0]:.3f}, {spectrum[-1]:.2f}; ten hold {leading:.0%} of squares"
    )
panels[0].get_legend().remove()
panels[1].legend(frameon=False, loc="upper right", fontsize="x-small")
plt.show()

# %% [markdown]
# Before training the loss curves downwards: in about 3 % of all directions by more than 0.15, by
# 0.43 at most. Afterwards there is no negative curvature to speak of: the smallest eigenvalue is
# -0.001. Nearly all eigenvalues are in the spike at zero, and a few stand out. The ten largest hold
# 97 % of the sum of squares, which is what makes Hutchinson's error (before training: 71 %). This
# is why a subspace of ten dimensions helps the tracker so much in the end, and less at the start.
# Where a single eigenvalue stands alone, its place is right and its height is uncertain: three
# probes have seen it.
#
# ## What was claimed

# %%
points = np.array(checkpoints)
for traces, truth in [(traces_h, exact_h), (traces_g, exact_g)]:
    deviations += list((traces.value[points] - truth) / traces.std_err[points])
# 18 estimates are within four standard errors of the exact traces.
assert len(deviations) == 18
assert np.max(np.abs(deviations)) < 4
# The densities are, over the whole grid, as far from the exact ones as they say. (A normal error is
# 0.8 standard errors in the mean; neighbouring points share theirs, so twice that is allowed.)
for found, truth in zip(densities, truths, strict=True):
    stated = np.mean(found.std_err + found.quadrature_error)
    assert 0.2 * stated < np.mean(np.abs(found.value - truth)) < 1.6 * stated


def clearly(value, std_err):
    """Positive by three standard errors."""
    return float(value) > 3 * float(std_err)


h, g = ((np.asarray(t.value, float), np.asarray(t.std_err, float)) for t in (traces_h, traces_g))
# The trace more than doubles, is there at step 40, and ends below half of its start.
for look in (2, 3):
    assert clearly(h[0][look] - 2 * exact_h[0], h[1][look])
assert clearly(h[0][4] - 1.8 * exact_h[0], h[1][4])
assert clearly(exact_h[0] / 2 - h[0][-1], h[1][-1])
assert losses[0] > 2.2
assert losses[4] < 0.7
# Of it the Gauss-Newton matrix has less than 0.7 at the top, and 0.7 to 0.9 in the end.
top = int(np.argmax(h[0]))
assert clearly(0.7 * h[0][top] - g[0][top], np.hypot(0.7 * h[1][top], g[1][top]))
assert clearly(g[0][-1] - 0.7 * h[0][-1], np.hypot(g[1][-1], 0.7 * h[1][-1]))
assert clearly(0.9 * h[0][-1] - g[0][-1], np.hypot(0.9 * h[1][-1], g[1][-1]))
# The memory makes the error smaller. (From 10 and 20 samples the logarithm of the ratio is known to
# sqrt(1/18 + 1/38) = 0.29, so a factor of 2.4 is three deviations.)
assert alone.std_err > 2.4 * traces_h.std_err[-1]
# Nearly all of the trace is in the weights of the hidden layer; its biases have most for each.
at_end = jax.tree.map(lambda x: float(x[-1]), (layers.value, layers.std_err))
for layer, kind in names[1:]:
    difference = at_end[0]["hidden"]["w"] - 5 * at_end[0][layer][kind]
    assert clearly(difference, np.hypot(at_end[1]["hidden"]["w"], 5 * at_end[1][layer][kind]))
share = jax.tree.map(lambda x, leaf: x / leaf.size, at_end[0], start)
assert max(share["hidden"]["w"], share["out"]["w"], share["out"]["b"]) < share["hidden"]["b"] / 3
# Negative curvature before, none after.
assert share_below(densities[0].value) > 0.01
assert share_below(densities[1].value) < 1e-6
assert leading > 0.8
assert accuracy > 0.93
print("All of it holds.")

# %% [markdown]
# # The edge of stability
#
# Gradient descent on a quadratic function with the largest eigenvalue $\lambda$ diverges if the
# learning rate is above $2 / \lambda$. The loss of a network is no quadratic function. What happens
# there was described by Cohen et al. ([arXiv:2103.00065](https://arxiv.org/abs/2103.00065)): the
# largest eigenvalue of the Hessian, the *sharpness*, grows while the network learns, until it is
# 2 / learning rate. There it stays, and training goes on at the edge of stability. This page
# watches two small networks do so, a convolutional one and a transformer: every ten steps the
# sharpness, and every fifty steps the trace of the Hessian by layer and the noise of the gradients.

# %%
import sys

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

import traceax as tr

plt.rcParams["figure.dpi"] = 52  # small pictures

# %% [markdown]
# ## Two networks
#
# Both are plain functions of a dictionary of parameters. The convolutional network has two layers,
# each followed by tanh and a mean over squares of 2 x 2, and sees 200 of scikit-learn's digits.
# The transformer is one block of causal attention and a dense layer. It sees all 49 sequences of
# numbers modulo seven of which each is the sum of the two before it. The loss is half the squared
# distance from the right class, as in most of the paper.


# %%
def convolution(x, weights):
    dims = ("NHWC", "HWIO", "NHWC")
    return jnp.tanh(
        jax.lax.conv_general_dilated(x, weights, (1, 1), "SAME", dimension_numbers=dims)
    )


def halved(x):
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).mean((2, 4))


def convolutional(params, images):
    x = halved(convolution(images, params["first"]))
    x = halved(convolution(x, params["second"]))
    return x.reshape(len(x), -1) @ params["out"]


def normalised(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)


def transformer(params, tokens):
    length = tokens.shape[1]
    h = params["embedding"]["token"][tokens] + params["embedding"]["place"]
    q, k, v = (normalised(h) @ params["attention"][name] for name in "qkv")
    scores = jnp.einsum("btd,bsd->bts", q, k) / jnp.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    h = h + jax.nn.softmax(scores) @ v @ params["attention"]["o"]
    h = h + jnp.tanh(normalised(h) @ params["dense"]["up"]) @ params["dense"]["down"]
    return normalised(h) @ params["out"]


def half_square(outputs, labels):
    wrong = outputs - jax.nn.one_hot(labels, outputs.shape[-1])
    return 0.5 * jnp.mean(jnp.sum(wrong**2, axis=-1))


def loss_of_digits(params, batch):
    return half_square(convolutional(params, batch[0]), batch[1])


def loss_of_sequences(params, batch):
    # The first number says nothing about the second.
    return half_square(transformer(params, batch[0])[:, 1:], batch[1][:, 1:])


def random_weights(key, shapes):
    """A PyTree of these shapes: normal numbers over the root of the number of inputs."""
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    return treedef.unflatten(
        [
            jax.random.normal(k, s) / np.sqrt(np.prod(s[:-1]))
            for k, s in zip(keys, leaves, strict=True)
        ]
    )


images, labels = load_digits(return_X_y=True)  # 8 x 8 pixels
digits = jnp.asarray(images[:200].reshape(-1, 8, 8, 1) / 16, jnp.float32), jnp.asarray(labels[:200])
digits_start = random_weights(
    jax.random.key(1),
    {"first": (3, 3, 1, 8), "second": (3, 3, 8, 16), "out": (64, 10)},
)

numbers, length, d = 7, 8, 16
rows = [jnp.repeat(jnp.arange(numbers), numbers), jnp.tile(jnp.arange(numbers), numbers)]
for _ in range(length - 1):
    rows.append((rows[-1] + rows[-2]) % numbers)
sequences = jnp.stack(rows[:-1], axis=1), jnp.stack(rows[1:], axis=1)
sequences_start = random_weights(
    jax.random.key(2),
    {
        "embedding": {"token": (numbers, d), "place": (length, d)},
        "attention": {name: (d, d) for name in "qkvo"},
        "dense": {"up": (d, 4 * d), "down": (4 * d, d)},
        "out": (d, numbers),
    },
)

# %% [markdown]
# ## Training, watched
#
# `tr.curvature.of` traces a loss once, for all steps. `groups` names the layer that an array of
# parameters belongs to. A look at the sharpness takes four products with the Hessian, because it
# starts from the eigenvector of the look before (`start=`). Every fifth look is a closer one: the
# sharpness from 20 products and a start of its own, whose error says how much larger it may be;
# the trace by layer, from 20 more; and the noise scale, from the gradient of each example. The bar
# shows the last of each.

# %%
STEPS = 10  # from one look to the next


def trace_and_square(gradients, weights):
    """The trace of the covariance of single gradients, and the squared norm of the expected one."""
    count = jnp.sum(weights)
    square = jnp.sum((weights @ gradients / count) ** 2)
    trace = (weights @ jnp.sum(gradients**2, axis=1) / count - square) * count / (count - 1)
    return jnp.stack([trace, square - trace / count])


def noise_of(gradients):
    """Both numbers, and their errors by the jackknife over examples."""
    count = len(jax.tree.leaves(gradients)[0])
    rows = [g.reshape(count, -1) for g in jax.tree.leaves(gradients)]
    rows = jnp.concatenate(rows, axis=1)
    without_one = jax.vmap(trace_and_square, (None, 0))(rows, 1 - jnp.eye(count))
    errors = jnp.sqrt((count - 1) * jnp.var(without_one, axis=0))
    return trace_and_square(rows, jnp.ones(count)), errors


def train(name, loss, params, batch, learning_rate, looks):
    curvature_of = tr.curvature.of(loss, groups=lambda path, leaf: path.split("/")[0])

    def loss_of_example(params, example):
        return loss(params, jax.tree.map(lambda x: x[None], example))

    @jax.jit
    def advance(params, key, sharpness):
        def step(_, params):
            gradient = jax.grad(loss)(params, batch)
            return jax.tree.map(lambda x, g: x - learning_rate * g, params, gradient)

        params = jax.lax.fori_loop(0, STEPS, step, params)
        sharpness = tr.eigenpairs(key, curvature_of(params, batch), k=4, start=sharpness)
        return params, loss(params, batch), sharpness

    @jax.jit
    def look_closely(params, key):
        hessian = curvature_of(params, batch)
        checked = tr.eigenpairs(key, hessian, k=20)
        layers = tr.block_traces(key, hessian, k=20)
        gradients = jax.vmap(jax.grad(loss_of_example), (None, 0))(params, batch)
        return checked, layers, noise_of(gradients)

    sharpness = tr.eigenpairs(jax.random.key(0), curvature_of(params, batch), k=20)
    losses, sharp, closely = [], [], []
    bar = tqdm(range(looks), desc=name, file=sys.stdout, mininterval=5, ncols=100)
    for i in bar:
        key = jax.random.fold_in(jax.random.key(3), i)
        params, value, sharpness = advance(params, key, sharpness)
        losses.append(float(value))
        sharp.append(sharpness)
        if i % 5 == 4:
            closely.append(look_closely(params, key))
            (trace, square), _ = closely[-1][2]
            bar.set_postfix_str(
                f"loss {value:.3f}, sharpness {sharpness.values[0]:.1f}, "
                f"noise scale {trace / square if square > 0 else np.inf:.0f}",
                refresh=False,
            )
    checked, layers, noise = zip(*closely, strict=True)
    found = {
        "checked": checked,
        "layers": layers,
        "noise": noise,
        "hessian": curvature_of(params, batch),
    }
    steps = STEPS * np.arange(1, looks + 1)
    return found | {"steps": steps, "closer": steps[4::5], "losses": losses, "sharp": sharp}


rates = {"convolutional": 0.15, "transformer": 0.2}
problems = {
    "convolutional": (loss_of_digits, digits_start, digits),
    "transformer": (loss_of_sequences, sequences_start, sequences),
}
looks = {"convolutional": 70, "transformer": 200}
runs = {name: train(name, *problems[name], rates[name], looks[name]) for name in problems}
for name, run in runs.items():
    last, edge = run["checked"][-1], 2 / rates[name]
    print(
        f"{name}: loss {run['losses'][-1]:.3f}, 2 / learning rate {edge:.2f}, "
        f"sharpness {last.values[0]:.2f} to {last.values[0] + last.errors[0]:.2f}"
    )

# %% [markdown]
# ## Sharpness and loss

# %%
figure, panels = plt.subplots(2, 2, figsize=(7.5, 3.6), layout="constrained", sharex="col")
for (upper, lower), (name, run) in zip(panels.T, runs.items(), strict=True):
    tr.plot.sharpness(run["closer"], run["checked"], rates[name], axes=upper)
    followed = [float(pairs.values[0]) for pairs in run["sharp"]]
    upper.plot(run["steps"], followed, color="C1", lw=1, label="followed, four products a look")
    upper.legend(frameon=False, loc="lower right", fontsize="x-small")
    upper.set(title=name, xlabel="", xlim=(0, None), ylim=(0, 2.8 / rates[name]))
    lower.plot(run["steps"], run["losses"])
    lower.set(xlabel="step of gradient descent", ylabel="loss", yscale="log")
plt.show()

# %% [markdown]
# (The transformer starts above the edge, and its first steps lead to a flatter place.) Then both
# networks get to 2 / learning rate and stay there, a few per cent above it. On the way the loss
# falls at every look. At the edge the iterates jump from one side of the valley to the other along
# the sharpest direction: the loss rises for some steps, the sharpness falls below the edge, and the
# loss falls again. In the convolutional network this takes a hundred steps or more; in the
# transformer it happens all the time. The sharpness that is followed with four products a look is
# that from 20 products with a start of its own. (The error bounds how much larger than its value
# the sharpness can be. In the transformer there are several eigenvalues at the edge in the end,
# and 20 products cannot tell as much about the largest.)
#
# ## Layer by layer, and the noise of the gradients
#
# The gradient over all N examples has a squared norm of $|G|^2$ in expectation, and a noise of
# $\mathrm{tr}(\Sigma) / N$, because the examples are but a sample. The noise scale is N times
# the ratio of the latter to the former.


# %%
def noise_and_signal(name, run):
    count = len(problems[name][2][1])
    (trace, square), (trace_error, square_error) = np.array(run["noise"]).transpose(1, 2, 0)
    yield "noise", trace / count, trace_error / count
    yield "signal", square, square_error


figure, panels = plt.subplots(1, 3, figsize=(8, 2.7), layout="constrained")
for axes, (name, run) in zip(panels, runs.items(), strict=False):
    tr.plot.traces(run["closer"], run["layers"], axes=axes)
    axes.set(title=name, ylabel="trace", yscale="log")
    place = "center" if name == "convolutional" else "lower right"
    axes.legend(frameon=False, loc=place, fontsize="x-small", ncols=1)
for label, values, errors in noise_and_signal("transformer", run):
    panels[2].errorbar(run["closer"], values, 2 * errors, fmt="o-", ms=3, lw=1, label=label)
panels[2].axhline(0, color="black", lw=0.5)
panels[2].set(title="transformer", xlabel="step", ylabel="squared norm")
panels[2].set_yscale("symlog", linthresh=0.1)
panels[2].legend(frameon=False, loc="lower right", fontsize="small")
plt.show()

# %% [markdown]
# The sharpness of the transformer has been at the edge from the start, but the traces of its inner
# layers grow more than tenfold: further eigenvalues follow the first one. That of the last layer
# stays what it was. Before a network jumps, the signal is below the noise: 49 sequences (or 200
# digits) cannot tell the mean gradient from 0, and the noise scale is above their number. While it
# jumps, the gradient along the sharpest direction is large and the same for many examples, and the
# signal is above the noise.
#
# ## The spectrum at the edge
#
# The density of the eigenvalues at the end, from 100 products, and both ends of the spectrum with
# their errors, from 40.

# %%
figure, panels = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
ends = {}
for axes, (name, run) in zip(panels, runs.items(), strict=True):
    ends[name] = tr.eigenpairs(jax.random.key(4), run["hessian"], k=40, num=2, which="BE")
    low, high = sorted(float(x) for x in ends[name].values)
    grid = jnp.linspace(low - 1, high + 1, 300)
    density = tr.spectral_density(jax.random.key(5), run["hessian"], 100, grid, width=0.2)
    tr.plot.spectral_density(grid, density, eigenpairs=ends[name], axes=axes)
    axes.axvline(2 / rates[name], color="C3", ls="--", lw=1)
    axes.set(title=name, yscale="log", ylim=(1e-4, 10))
    print(
        f"{name}: eigenvalues from {low:.2f} to {high:.2f}, 2 / learning rate {2 / rates[name]:.2f}"
    )
for axes in panels:
    axes.get_legend().remove()
drawn = panels[1].get_legend_handles_labels()
figure.legend(*drawn, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
plt.show()

# %% [markdown]
# Nearly all eigenvalues are close to zero, those that count are positive, and the largest is at the
# edge. In the transformer others follow closely.
#
# ## What was claimed

# %%
for name, run in runs.items():
    edge, losses = 2 / rates[name], np.array(run["losses"])
    followed, checked = (
        np.array([float(pairs.values[0]) for pairs in run[kind]]) for kind in ("sharp", "checked")
    )
    # From below to the edge, and then a few per cent above it in the mean; never far above.
    flattest = int(np.argmin(followed[: len(followed) // 4]))
    first = flattest + int(np.argmax(followed[flattest:] > edge))
    assert followed[flattest] < 0.9 * edge < followed[first]
    assert 1 < np.mean(followed[-len(followed) // 3 :]) / edge < 1.08
    assert np.max(followed) < 1.2 * edge
    # The loss falls at every look before, and not afterwards; but it falls in the end.
    assert np.all(np.diff(losses[: first + 1]) < 0)
    assert np.any(np.diff(losses[first:]) > 0)
    assert losses[-1] < losses[first] / 1.3
    # Four products a look are as good as 20.
    assert np.max(np.abs(followed[4::5] / checked - 1)) < 0.08
    # Nothing is as negative as a twentieth of the sharpness.
    assert -0.05 < float(jnp.min(ends[name].values)) / edge < 0
    # The noise is above the signal at first, and below it in the end.
    (_, noise, _), (_, signal, error) = noise_and_signal(name, run)
    assert np.all(signal[:4] + 2 * error[:4] < noise[:4])
    assert signal[-1] > noise[-1]


def grown(layer):
    found = runs["transformer"]["layers"]
    return float(found[-1].value[layer] / found[0].value[layer])


assert runs["transformer"]["sharp"][0].values[0] > 2 / rates["transformer"]
assert min(grown(layer) for layer in ("attention", "dense", "embedding")) > 10
assert 1 / 1.5 < grown("out") < 1.5
print("All of it holds.")

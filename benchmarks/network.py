"""A network of dense layers, and random data for it."""

import itertools

import jax
import jax.numpy as jnp
import jax.random as jr


def parameters(sizes):
    """Those of layers of these sizes, inputs and outputs included."""
    keys = jr.split(jr.key(0), len(sizes))
    pairs = list(itertools.pairwise(sizes))
    return [
        {"w": jr.normal(key, pair) / jnp.sqrt(pair[0]), "b": jnp.zeros(pair[1])}
        for key, pair in zip(keys, pairs, strict=False)
    ]


def logits(params, batch):
    hidden = batch[0]
    for layer in params[:-1]:
        hidden = jnp.tanh(hidden @ layer["w"] + layer["b"])
    return hidden @ params[-1]["w"] + params[-1]["b"]


def cross_entropy(outputs, batch):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(outputs), batch[1][:, None], axis=1)
    return -jnp.mean(chosen)


def loss(params, batch):
    return cross_entropy(logits(params, batch), batch)


def examples(sizes, count):
    """Inputs and labels."""
    inputs = jr.uniform(jr.key(1), (count, sizes[0]))
    return inputs, jr.randint(jr.key(2), (count,), 0, sizes[-1])

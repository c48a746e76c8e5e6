"""A trace of the Hessian of a network with 1,002,570 parameters, against its bare products.

Two bases: the gradient linearised once and pushed over a block of vectors by `vmap`, and over the
same vectors one after the other by `lax.map`. The vectors are drawn beforehand.
"""

from functools import partial

import jax
import jax.random as jr
import pytest

import traceax as tr

from .common import ESTIMATORS, QUICK, compare
from .network import examples, loss, parameters

SIZES, BATCH, K, ROUNDS = ((16, 32, 10), 16, 8, 1) if QUICK else ((784, 1024, 192, 10), 128, 32, 7)


def products(mapped, params, batch, vectors):
    _, product = jax.linearize(lambda params: jax.grad(loss)(params, batch), params)
    return mapped(product, vectors)


def in_a_block(product, vectors):
    return jax.vmap(product)(vectors)


def value_and_products(name, count, k, *ways):
    """An estimate from so many examples and products, and its bare products in these ways."""
    params, batch = parameters(SIZES), examples(SIZES, count)
    vectors = jax.tree.map(lambda x: jr.normal(jr.key(3), (k, *x.shape)), params)

    @jax.jit
    def value(params, batch):
        operator = tr.curvature.hessian(loss, params, batch)
        return tr.trace(jr.key(0), operator, k, ESTIMATORS[name]).value

    return partial(value, params, batch), *(
        partial(jax.jit(partial(products, way)), params, batch, vectors) for way in ways
    )


@pytest.mark.parametrize("name", ["hutchinson", "hutch++", "xtrace"])
def test_hessian(benchmark, name):
    ours, block, sequence = value_and_products(name, BATCH, K, in_a_block, jax.lax.map)
    pairs = {"products in a block": (ours, block), "products in sequence": (ours, sequence)}
    targets = dict.fromkeys(pairs, 1.1) if name == "hutchinson" else {}
    compare(benchmark, "Hessian: time over that of the products", name, pairs, ROUNDS, targets)


@pytest.mark.parametrize("count", [BATCH, 4 * BATCH, 8 * BATCH])
@pytest.mark.parametrize("name", ["hutch++", "xtrace"])
def test_few_products(benchmark, name, count):
    """Twelve products, of more and more examples: what is not a product does not grow."""
    pairs = {"products in a block": value_and_products(name, count, 12, in_a_block)}
    row, targets = f"{name}, {count} examples", dict.fromkeys(pairs, 1.4)
    compare(benchmark, "Hessian: twelve products over theirs", row, pairs, ROUNDS, targets)

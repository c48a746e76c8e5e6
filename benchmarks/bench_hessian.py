"""A trace of the Hessian of a network with 1,002,570 parameters, against its bare products.

Two bases: the gradient linearised once and pushed over a block of 32 vectors by `vmap`, and over
the same vectors one after the other by `lax.map`. The vectors are drawn beforehand.
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


@pytest.mark.parametrize("name", ["hutchinson", "hutch++", "xtrace"])
def test_hessian(benchmark, name):
    params, batch = parameters(SIZES), examples(SIZES, BATCH)
    vectors = jax.tree.map(lambda x: jr.normal(jr.key(3), (K, *x.shape)), params)

    @jax.jit
    def value(params, batch):
        operator = tr.curvature.hessian(loss, params, batch)
        return tr.trace(jr.key(0), operator, K, ESTIMATORS[name]).value

    ours = partial(value, params, batch)
    block, sequence = (
        partial(jax.jit(partial(products, mapped)), params, batch, vectors)
        for mapped in (in_a_block, jax.lax.map)
    )
    pairs = {"products in a block": (ours, block), "products in sequence": (ours, sequence)}
    targets = dict.fromkeys(pairs, 1.1) if name == "hutchinson" else {}
    compare(benchmark, "Hessian: time over that of the products", name, pairs, ROUNDS, targets)

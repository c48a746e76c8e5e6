"""Time of value and gradient: against the bare products, and against matfree.

Dense float32, n = 4000, k = 100. The products are one jitted `A @ Omega` with k columns, in full
precision, as all products of lineax and traceax are (on a GPU the default is less).
"""

from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tr

from . import matfree_peer
from .common import ESTIMATORS, PSD, QUICK, compare, dense_psd

N, K = (400, 20) if QUICK else (4000, 100)
TARGETS = {"hutchinson": 1.05, "hutch++": 1.25, "xtrace": 1.4, "xnystrace": 1.3}
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def matrix():
    return jax.block_until_ready(dense_psd(N))


def programs(value, *args):
    """The calls of the jitted value, and of value and gradient, on these arguments."""
    return partial(jax.jit(value), *args), partial(jax.jit(jax.value_and_grad(value)), *args)


def ours(name, matrix):
    operator = lx.MatrixLinearOperator(matrix, PSD)
    return tr.trace(KEY, operator, K, ESTIMATORS[name]).value


def theirs(name, matrix):
    estimate = matfree_peer.trace(name, jnp.zeros(N), K)
    return estimate(lambda v, a: a @ v, KEY, matrix)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_products(benchmark, name, matrix):
    omega = jax.random.normal(jax.random.key(1), (N, K))
    product = partial(jax.jit(partial(jnp.matmul, precision="highest")), matrix, omega)
    value, both = programs(partial(ours, name), matrix)
    pairs = {"value": (value, product), "value and gradient": (both, product)}
    targets = {"value": TARGETS[name], "value and gradient": 3.2}
    compare(benchmark, "time over that of the products", name, pairs, 15, targets)


@pytest.mark.parametrize("name", matfree_peer.INTEGRANDS)
def test_matfree(benchmark, name, matrix):
    value, both = programs(partial(ours, name), matrix)
    their_value, their_both = programs(partial(theirs, name), matrix)
    pairs = {"value": (value, their_value), "value and gradient": (both, their_both)}
    targets = {"value": 1.0, "value and gradient": 0.5}
    compare(benchmark, "time over matfree's", name, pairs, 15, targets)

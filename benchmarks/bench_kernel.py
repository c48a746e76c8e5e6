"""The log-determinant that `peers_torch.py` asks of GPyTorch: error and time, float32.

A squared exponential kernel with noise 0.01 on a grid of 45 x 45 points. traceax with 100 products
with K, and matfree's stochastic Lanczos quadrature with as many, 20 steps for each of 5 probes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from . import matfree_peer
from .common import PSD, QUICK, medians, report

SIDE, K, STEPS, KEYS, ROUNDS = (12, 20, 10, 2, 1) if QUICK else (45, 100, 20, 20, 15)
LENGTH, NOISE = 0.1, 0.01


def kernel():
    axis = np.linspace(0, 1, SIDE)
    squares = np.square(axis[:, None] - axis) / LENGTH**2
    line = np.exp(-squares / 2)
    return np.kron(line, line)


def ours(key, matrix):
    noise = lx.DiagonalLinearOperator(jnp.full(len(matrix), NOISE, matrix.dtype))
    operator = lx.TaggedLinearOperator(lx.MatrixLinearOperator(matrix, PSD) + noise, PSD)
    return tr.logdet(key, operator, K).value


def theirs(key, matrix):
    estimate = matfree_peer.logdet(jnp.zeros(len(matrix), matrix.dtype), K, STEPS)
    return estimate(lambda v, a: a @ v + NOISE * v, key, matrix)


@pytest.mark.parametrize("method", [ours, theirs], ids=["traceax", "matfree"])
def test_kernel(benchmark, method, request):
    dense = kernel()
    truth = np.linalg.slogdet(dense + NOISE * np.eye(len(dense)))[1]
    matrix = jnp.asarray(dense, jnp.float32)
    omega = jax.random.normal(jax.random.key(1), (len(dense), K))
    product = partial(jax.jit(partial(jnp.matmul, precision="highest")), matrix, omega)
    value, keys = jax.jit(method), jax.random.split(jax.random.key(0), KEYS)
    fns = [partial(value, keys[0], matrix), product]
    seconds = benchmark.pedantic(medians, (fns, ROUNDS), rounds=1)
    error = np.sqrt(np.mean(np.square([value(key, matrix) / truth - 1 for key in keys])))
    figures = {"time over that of the products": seconds[0] / seconds[1], "error, %": 100 * error}
    row = request.node.callspec.id
    report(benchmark, "log-determinant of a kernel", row, figures, seconds={"value": seconds})

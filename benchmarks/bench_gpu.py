"""XTrace on a GPU: a dense matrix, and an operator with ten million rows. Skipped without a GPU.

Dense, float32, n = 32768, k = 256: the time over that of one jitted `A @ Omega` with k columns, in
full precision as lineax's products are, and in JAX's default (TF32).

Diagonal plus rank 8, a function of a vector, float32, n = 10^7, k = 64: the time over that of
reading and writing an n x k/2 sketch once (a pass).
"""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import pytest

import traceax as tr

from .common import PSD, QUICK, compare, dense_psd

N, K = (500, 20) if QUICK else (32768, 256)
N_TALL, K_TALL, RANK = (5000, 16, 8) if QUICK else (10_000_000, 64, 8)
GROUP = "GPU: XTrace's time over that of"

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" and not QUICK, reason="no GPU on this machine"
)


def xtrace(operator, k):
    return tr.trace(jr.key(0), operator, k, tr.XTraceEstimator()).value


def test_dense(benchmark):
    matrix = dense_psd(N)
    omega = jr.normal(jr.key(1), (N, K))
    value = jax.jit(lambda matrix: xtrace(lx.MatrixLinearOperator(matrix, PSD), K))
    ours = partial(value, matrix)
    full, default = (
        partial(jax.jit(partial(jnp.matmul, precision=precision)), matrix, omega)
        for precision in ("highest", "default")
    )
    pairs = {"products": (ours, full), "products in TF32": (ours, default)}
    compare(benchmark, GROUP, f"dense, n = {N}", pairs, 15)


# How often must XTrace read or write a block of n x k/2 numbers, if the operator takes a block from
# memory and returns one there, and nothing stays in caches?
#
#     Omega: 1 (written)      Y = A Omega: 2      Y^H Y: 1      Q = Y R^{-1}: 2      Z = A Q: 2
#     Q^H Z, Z^H Omega and Q^H Omega in one go: 3
#
# times, that is 11, or 5.5 passes that read and write. A second step of orthonormalisation takes 3
# more, and products that go through their block twice, as here (U^T x, then d x + U (U^T x)), take
# 2 more: 16, or 8 passes.
def test_tall(benchmark):
    keys = jr.split(jr.key(2))
    diagonal = jr.uniform(keys[0], (N_TALL,))
    factor = jr.normal(keys[1], (N_TALL, RANK)) / N_TALL**0.5
    block = jnp.ones((N_TALL, K_TALL // 2))

    @jax.jit
    def value(diagonal, factor):
        def product(v):
            inner = jnp.matmul(factor.T, v, precision="highest")
            return diagonal * v + jnp.matmul(factor, inner, precision="highest")

        structure = jax.ShapeDtypeStruct((N_TALL,), jnp.float32)
        return xtrace(lx.FunctionLinearOperator(product, structure, PSD), K_TALL)

    ours = partial(value, diagonal, factor)
    one_pass = partial(jax.jit(lambda block: 2 * block), block)
    pairs = {"a pass over its sketch": (ours, one_pass)}
    compare(benchmark, GROUP, f"function, n = {N_TALL}", pairs, 15)

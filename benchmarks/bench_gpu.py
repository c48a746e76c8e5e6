"""What estimates cost on a GPU, all in float32. Skipped without a GPU.

XLA tries many ways to multiply matrices there, which takes most of the time of a first call; with
`XLA_FLAGS=--xla_gpu_enable_triton_gemm=false` a few.

XTrace of a dense matrix, n = 32768, k = 256: the time over that of one jitted `A @ Omega` with k
columns, in full precision as lineax's products are, and in JAX's default (TF32).

XTrace of a diagonal plus rank 8, a function of a vector, n = 10^7, k = 64: the time over that of
reading and writing an n x k/2 sketch once (a pass).

QR factorisations of tall blocks of 64 columns: the time over that of `jnp.linalg.qr`.

Log-determinants and log densities of Gaussian processes (Matern-5/2 on uniform points of the unit
square, noise 1e-2), the matrix stored or by entries, and their gradients: the time over that of
`jnp.linalg.cholesky` of the matrix, with which the matrix is formed if it is not stored.

A training run with the trace of the Hessian every ten steps (`bench_curvature.py`): the time over
that of the run without it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import pytest

import traceax as tr
from traceax._linalg.factorisations import qr

from .bench_curvature import training_pair
from .bench_kernels import by_cholesky, covariance
from .common import PSD, QUICK, compare, dense_psd

N, K = (500, 20) if QUICK else (32768, 256)
N_TALL, K_TALL, RANK = (5000, 16, 8) if QUICK else (10_000_000, 64, 8)
GROUP = "GPU: XTrace's time over that of"
GROUP_QR = "GPU: the time of a QR factorisation over that of"
GROUP_CHOLESKY = "GPU: log-determinants, time over Cholesky's"

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
    compare(benchmark, GROUP, f"dense, n = {N}", pairs, 7)


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


@pytest.mark.parametrize("n", [5000] if QUICK else [100_000, 1_000_000])
def test_tall_qr(benchmark, n):
    block = jr.normal(jr.key(3), (n, 64))
    pairs = {"jnp.linalg.qr": (partial(jax.jit(qr), block), partial(jax.jit(jnp.linalg.qr), block))}
    compare(benchmark, GROUP_QR, f"n = {n}, m = 64", pairs, 15)


def _theta():
    return tuple(jnp.asarray(value, jnp.float32) for value in (0.3, 1.0, 1e-2))


def test_stored(benchmark):
    """A matrix that is stored: products against its factorisation."""
    n, k = (500, 50) if QUICK else (16384, 50)
    matrix = covariance(_theta(), jr.uniform(jr.key(0), (n, 2))).as_matrix()

    @jax.jit
    def estimate(matrix):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        return tr.logdet(jr.key(1), operator, k, fallback=None).value

    @jax.jit
    def exact(matrix):
        return 2 * jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(matrix))))

    pairs = {
        "value": (partial(estimate, matrix), partial(exact, matrix)),
        "value and gradient": (
            partial(jax.jit(jax.value_and_grad(estimate)), matrix),
            partial(jax.jit(jax.value_and_grad(exact)), matrix),
        ),
    }
    compare(benchmark, GROUP_CHOLESKY, f"stored, n = {n}, k = {k}", pairs, 5)


@pytest.mark.parametrize("n", [500] if QUICK else [20_000, 40_000])
def test_by_entries(benchmark, n):
    """A kernel by its entries, against forming its matrix and factorising it."""
    x = jr.uniform(jr.key(0), (n, 2))

    def estimate(theta, x):
        return tr.logdet(jr.key(1), covariance(theta, x), 120, fallback=None).value

    exact = partial(by_cholesky, None)
    pairs = {"value": tuple(partial(jax.jit(fn), _theta(), x) for fn in (estimate, exact))}
    if n <= 20_000:  # the derivative of the factorisation takes several matrices
        both = (partial(jax.jit(jax.value_and_grad(fn)), _theta(), x) for fn in (estimate, exact))
        pairs["value and gradient"] = tuple(both)
    compare(benchmark, GROUP_CHOLESKY, f"by entries, n = {n}, k = 120", pairs, 5)


@pytest.mark.parametrize("method", ["hutchinson", "recycled"])
def test_training(benchmark, method):
    pair = training_pair("hessian", method, 1797, 256)
    compare(benchmark, "GPU: a training run over one without curvature", method, {"ratio": pair}, 5)

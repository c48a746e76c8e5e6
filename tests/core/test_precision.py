"""Products in full precision on every platform, whatever the user's setting is."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._core.precision import platform
from traceax._operators.block_operator import BlockOperator

from ..helpers import CLASSES, PROBED, PSD

N, K = 64, 24
KEY = jax.random.key(0)


def _operator(weights):
    """A diagonal operator as a function: every product of matrices is the estimator's."""
    structure = jax.ShapeDtypeStruct(weights.shape, weights.dtype)
    return lx.FunctionLinearOperator(lambda v: weights * v, structure, PSD)


def _products_for_gpu(function, *structures):
    """Products of matrices in a GPU's program where TF32 is the default; and the less precise."""
    with jax.default_matmul_precision("tensorfloat32"):
        traced = jax.jit(function).trace(*structures)
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
    products = re.findall(r"stablehlo\.dot_general.*", program)
    return products, [line for line in products if "precision = [HIGHEST, HIGHEST]" not in line]


ESTIMATES = {
    **{
        f"trace-{name}": lambda w, e=e: tr.trace(KEY, _operator(w), K, e).value
        for name, e in CLASSES.items()
    },
    **{
        f"diagonal-{name}": lambda w, e=e: jnp.sum(tr.diagonal(KEY, _operator(w), K, e).value ** 2)
        for name, e in PROBED.items()
    },
    "logdet": lambda w: tr.logdet(KEY, _operator(w), K).value,
    # Products with a matrix are those of lineax: the shift and the status count on them.
    "matrix": lambda w: (
        tr.trace(KEY, lx.MatrixLinearOperator(w[:, None] * w), K, tr.HutchinsonEstimator()).value
    ),
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_every_product_is_in_full_precision(name):
    """In the program for a GPU, where TF32 would be the default, and in that of the gradient."""
    weights = jax.ShapeDtypeStruct((N,), jnp.float32)
    products, lacking = _products_for_gpu(jax.value_and_grad(ESTIMATES[name]), weights)
    assert lacking == []
    assert products or name in ("trace-hutchinson", "trace-exact", "diagonal-hutchinson")


# --- factors of single precision, which a GPU keeps as TF32 ---------------------------------------

TF32 = 2.0**-10


def _rounded(x):
    """A factor as TF32 keeps it."""
    return jax.lax.reduce_precision(x, 8, 10)


def _in_tf32(a, b):
    """As a GPU multiplies by itself."""
    if jax.default_backend() == "gpu":
        return jnp.matmul(a, b, precision="default")
    return jnp.matmul(_rounded(a), _rounded(b), precision="highest")


def _by_function(matrix, product, tags=PSD):
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: product(matrix, v), structure, tags)


@pytest.mark.parametrize(
    ("name", "bits"),  # by default, with "default", "high" and "highest"
    [("cpu", (23, 23, 23, 23)), ("gpu", (9, 9, 9, 23)), ("tpu", (6, 6, 14, 23))],
)
def test_the_precision_of_factors(monkeypatch, name, bits):
    """Read off the traced function, for the platform that it will run on."""
    monkeypatch.setattr("traceax._core.precision.platform", lambda: name)
    for precision, digits in zip((None, "default", "high", "highest"), bits, strict=True):
        with jax.default_matmul_precision(None):
            eps = _eps(lambda a, b, p=precision: jnp.matmul(a, b, precision=p))
        assert eps == 2.0**-digits


def _eps(product):
    return BlockOperator(_by_function(jnp.eye(N, dtype=jnp.float32), product)).eps


def test_the_precision_of_factors_by_name(monkeypatch):
    """Algorithms are rounded as their names say, on every platform and for every dtype; double
    precision is not rounded otherwise, and neither is what the vector does not pass through.
    """
    preset = jax.lax.DotAlgorithmPreset
    for name, eps in {
        preset.TF32_TF32_F32: 2 * TF32,
        preset.BF16_BF16_F32: 2.0**-6,
        preset.BF16_BF16_F32_X3: 2.0**-14,
        preset.BF16_BF16_F32_X6: 2.0**-23,
        preset.F32_F32_F32: 2.0**-23,
    }.items():
        assert _eps(lambda a, b, name=name: jnp.matmul(a, b, precision=name)) == eps
    bf16 = jax.lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert _eps(lambda a, b: jnp.matmul(a, b, precision=bf16)) == 2.0**-6
    monkeypatch.setattr("traceax._core.precision.platform", lambda: "gpu")
    with jax.default_matmul_precision(None):
        assert _eps(lambda a, b: jnp.sum(a @ a, axis=0) * b) == 2.0**-23
        double = jnp.eye(N, dtype=jnp.float64)
        assert BlockOperator(_by_function(double, jnp.matmul)).eps == 2.0**-52
        for name, eps in {preset.F32_F32_F32: 2.0**-22, preset.F64_F64_F64: 2.0**-52}.items():
            named = _by_function(double, partial(jnp.matmul, precision=name))
            assert BlockOperator(named).eps == eps
        network = tr.curvature.hessian(
            lambda p, x: jnp.sum(jnp.tanh(x @ p) ** 2),
            jnp.ones((3, 2), jnp.float32),
            jnp.ones((4, 3), jnp.float32),
        )
        assert BlockOperator(network).eps == 2 * TF32


def test_the_platform(monkeypatch):
    """That of the default device, if there is one."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert platform() == "gpu"
    with jax.default_device(jax.devices("cpu")[0]):
        assert platform() == "cpu"
    with jax.default_device("cpu"):
        assert platform() == "cpu"


def test_errors_contain_the_rounding_of_factors():
    """An exact trace, a log-determinant and eigenvalues by products in TF32: off by less than they
    state. (On a GPU an exact trace was off by 5e-3, with a standard error of 0.)
    """
    rng = np.random.default_rng(0)
    factor = rng.standard_normal((N, N)).astype(np.float32)
    matrix = factor @ factor.T / N + np.eye(N, dtype=np.float32)
    operator = _by_function(jnp.asarray(matrix), _in_tf32)
    eigenvalues = np.linalg.eigvalsh(matrix.astype(np.float64))
    exact = tr.trace(KEY, operator, N)
    assert abs(float(exact.value) - np.sum(eigenvalues)) < 4 * float(exact.std_err) + 1e-4
    logdet = tr.logdet(KEY, operator, 4 * N)
    error = float(logdet.std_err + logdet.quadrature_error)
    assert abs(float(logdet.value) - np.sum(np.log(eigenvalues))) < 4 * error + 1e-3
    pairs = tr.eigenpairs(KEY, operator, N, 3)
    off = np.abs(np.asarray(pairs.values) - eigenvalues[::-1][:3])
    assert np.all(off <= np.asarray(pairs.errors))
    assert exact.std_err > 1e-4

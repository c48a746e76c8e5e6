"""Products in full precision on every platform, whatever the user's setting is."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax.testing import _products_for_gpu

from ..helpers import CLASSES, PROBED, PSD, variant

N, K = 64, 24
KEY = jax.random.key(0)
DIAGONALS = {
    "hutchinson": tr.HutchinsonDiagonalEstimator(),
    "diag++": tr.DiagPlusPlusEstimator(),
    "xdiag": tr.XDiagEstimator(),
    "xnysdiag": tr.XNysDiagEstimator(),
}


def _operator(weights):
    """A diagonal operator as a function: every product of matrices is the estimator's."""
    structure = jax.ShapeDtypeStruct(weights.shape, weights.dtype)
    return lx.FunctionLinearOperator(lambda v: weights * v, structure, PSD)


ESTIMATES = {
    **{
        f"trace-{name}": lambda w, e=e: tr.trace(KEY, _operator(w), K, e).value
        for name, e in CLASSES.items()
    },
    **{
        f"diagonal-{name}": lambda w, e=e: jnp.sum(tr.diagonal(KEY, _operator(w), K, e).value ** 2)
        for name, e in DIAGONALS.items()
    },
    "logdet": lambda w: tr.logdet(KEY, _operator(w), K).value,
    "summary": lambda w: tr.summary(KEY, _operator(w), K).trace.value,
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_every_product_is_in_full_precision(name):
    """In the program for a GPU, where TF32 would be the default, and in that of the gradient."""
    weights = jax.ShapeDtypeStruct((N,), jnp.float32)
    products, lacking = _products_for_gpu(jax.value_and_grad(ESTIMATES[name]), weights)
    assert lacking == []
    assert products or name in ("trace-hutchinson", "trace-exact", "diagonal-hutchinson")


def test_products_with_a_matrix_are_those_of_lineax():
    """In full precision too, which the shift and the status count on."""

    def value(matrix):
        return tr.trace(KEY, lx.MatrixLinearOperator(matrix), K, tr.HutchinsonEstimator()).value

    matrix = jax.ShapeDtypeStruct((N, N), jnp.float32)
    products, lacking = _products_for_gpu(value, matrix)
    assert len(products) == 1
    assert lacking == []


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("xtrace", jnp.bfloat16), ("hutchinson", jnp.float16)]
    + [variant(name, jnp.bfloat16) for name in PROBED if name != "xtrace"],
)
def test_gradients_of_narrow_operators(name, dtype):
    """Products in the narrow dtype, everything else in float32, and the derivative in the dtype of
    the parameters: what float32 gives for the same probes, but for the rounding of the products.
    """

    def value(scale):
        weights = scale * jnp.linspace(1.0, 2.0, N).astype(scale.dtype)
        return tr.trace(KEY, _operator(weights), K, CLASSES[name]).value

    both = jax.jit(jax.value_and_grad(value))
    narrow, slope = both(jnp.ones((), dtype))
    wide, wide_slope = both(jnp.ones((), jnp.float32))
    assert narrow.dtype == wide.dtype == jnp.float32
    assert slope.dtype == dtype
    rounding = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(narrow, wide, rtol=rounding)
    np.testing.assert_allclose(float(slope), wide_slope, rtol=rounding)

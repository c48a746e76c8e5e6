"""Products of blocks: how many vectors at once, and how precise."""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from jax import lax

import traceax as tr
from traceax._operators.block_operator import BlockOperator
from traceax._operators.checks import as_operator

from ..helpers import CLASSES, PSD, by_products, keys, with_spectrum

KEY = jr.key(0)


def through(kind, dtype):
    """An operator with products of float32, whose vectors pass through `dtype`."""
    narrow = lambda v: v.astype(dtype).astype(jnp.float32)  # noqa: E731
    structure, one = jax.ShapeDtypeStruct((3,), jnp.float32), jnp.ones(3, jnp.float32)
    scale = jnp.arange(3.0, dtype=dtype)
    bodies = {
        "jit": jax.jit(narrow),
        "scan": lambda v: lax.scan(lambda v, _: (narrow(v), None), v, None, length=2)[0],
        "while": lambda v: lax.fori_loop(0, 2, lambda _, v: narrow(v), v),
        "cond": lambda v: lax.cond(scale[0] > 0, narrow, lambda v: v, v),
        "checkpoint": jax.checkpoint(narrow),
        "constant": lambda v: v * (scale * scale).astype(jnp.float32),
        "called with": lambda v: jax.jit(lambda v, x: v * (x + x).astype(v.dtype))(v, scale),
    }
    if kind == "jacobian":
        return lx.JacobianLinearOperator(lambda x, _: jnp.sin(narrow(x)), one)
    if kind == "sum":
        function = lx.FunctionLinearOperator(narrow, structure)
        return 2 * function + lx.DiagonalLinearOperator(one)
    return lx.FunctionLinearOperator(bodies[kind], structure)


@pytest.mark.parametrize("kind", ["jit", "scan", "while", "cond", "checkpoint", "jacobian", "sum"])
def test_the_precision_of_a_product_is_that_of_what_a_vector_passes_through(kind):
    for dtype, units in ((np.float32, 1), (np.float16, 2)):  # a function rounds more than once
        block = BlockOperator(as_operator(through(kind, dtype)))
        assert block.eps == block.linearised().eps == units * np.finfo(dtype).eps
        assert (block.eps > jnp.finfo(block.dtype).eps) == (dtype == np.float16)


@pytest.mark.parametrize("kind", ["constant", "called with"])
def test_the_precision_of_what_a_function_holds_does_not_matter(kind):
    block = BlockOperator(as_operator(through(kind, jnp.bfloat16)))
    assert block.eps == np.finfo(np.float32).eps


def test_a_function_can_be_given_its_precision():
    """Products that are symmetric to 1e-6 only, like those of a solver: what errors state, and the
    checks of symmetry, count with it. It stays through sums, tags, `jit` and derivatives.
    """
    n = 60
    rng = np.random.default_rng(0)
    matrix = with_spectrum(rng, 0.7 ** np.arange(n))
    noise = rng.standard_normal((n, n)) / np.sqrt(n)
    exact = by_products(matrix, PSD)

    def estimate(key, precision, scale=1.0):
        coarse = by_products(scale * (matrix + 1e-6 * noise), PSD)
        given = coarse if precision is None else tr.inexact(coarse, precision)
        return tr.trace(key, given, 40, tr.XNysTraceEstimator())

    given = as_operator(2.0 * tr.inexact(exact, 1e-6) + exact)
    assert BlockOperator(given).eps == BlockOperator(given).linearised().eps == 1e-6

    @jax.jit
    def run(keys):
        slope = jax.grad(lambda scale: estimate(KEY, 1e-6, scale).value)(1.0)
        both = jax.lax.map(lambda key: (estimate(key, None), estimate(key, 1e-6)), keys)
        return *both, slope

    plain, found, slope = jax.device_get(run(keys(40)))
    truth = np.trace(matrix + 1e-6 * noise)
    errors = np.abs(found.value - truth)
    assert np.all(found.result == tr.RESULTS.successful)
    assert np.mean(errors <= 2 * found.std_err) >= 0.79  # 92 % less three standard errors
    # Undeclared, the precision is that which the asymmetry of the products shows.
    assert np.max(errors) < np.max(np.abs(plain.value - truth)) < 1e-3
    np.testing.assert_allclose(slope, np.trace(matrix), rtol=1e-4)


def test_functions_are_given_64_vectors_at_most():
    size = jax.ShapeDtypeStruct((400,), jnp.float64)
    operator = lx.FunctionLinearOperator(lambda v: 2.0 * v, size)
    for wanted, expected in ((1, 1), (64, 64), (65, 33), (75, 38), (128, 64), (200, 50)):
        assert BlockOperator(operator).batch_width(wanted) == expected
    dense = lx.MatrixLinearOperator(jnp.eye(400))
    assert BlockOperator(dense + lx.IdentityLinearOperator(size)).batch_width(300) == 300
    assert BlockOperator(dense + operator).batch_width(300) == 60
    assert BlockOperator(operator, 200).batch_width(300) == 200


def widths(jaxpr, n):
    """How many columns each product with an n x n matrix has."""
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from widths(inner, n)
        shapes = [x.aval.shape for x in equation.invars]
        if equation.primitive.name == "dot_general" and (n, n) in shapes:
            yield equation.outvars[0].aval.size // n


@pytest.mark.parametrize("name", CLASSES)
def test_no_product_is_wider_than_the_batch_size(name):
    """Of the value and of the derivative, for traces, diagonals and exact values."""
    n = 37
    estimator = type(CLASSES[name])(batch_size=3)

    def value(matrix, function, k):
        structure = jax.ShapeDtypeStruct((n,), float)
        operator = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, PSD)
        return jnp.sum(function(KEY, operator, k, estimator).value)

    for function, k in ((tr.trace, 12), (tr.diagonal, 12), (tr.trace, n)):
        program = jax.make_jaxpr(jax.value_and_grad(partial(value, function=function, k=k)))
        found = set(widths(program(jnp.eye(n)).jaxpr, n))
        assert max(found) == 3

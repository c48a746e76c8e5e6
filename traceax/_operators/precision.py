"""The relative precision of products, read from the jaxpr of the function that makes them."""

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx

from .._core.precision import at_least_single, eps_of_factors
from .._core.programs import (
    ClosedFunction,
    closed_function,
    is_jaxpr,
    is_literal,
    opened,
    variables,
)
from .tags import parts_of

# Equations that hand on their operands, one by one, to the one jaxpr in them.
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
)

# Equations that have a parameter `precision`.
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


def eps_along(function: Any, *args: tuple[Any, bool]) -> float:
    """The rounding that arguments meet on their way through a function: the largest `eps` among the
    dtypes of all values that depend on them; 0 if none is floating. Factors in products of matrices
    count with their precision in the product, such as TF32 on a GPU. `args` are pairs: the value
    (or structure) of an argument, and whether it is followed.
    """
    if not isinstance(function, ClosedFunction):
        function = closed_function(function, *(value for value, _ in args))
    followed = [
        follow
        for value, follow in args
        for leaf in jtu.tree_leaves(value)
        if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    return _eps_along(function.program.value, followed)[0]


def eps_of_product(function: Any, *args: tuple[Any, bool]) -> float:
    """The relative precision of a function's product: `eps_along`, and twice that (functions round
    more than once) if it is coarser than the argument in single precision.
    """
    eps = eps_along(function, *args)
    leaves = [leaf for value, follow in args if follow for leaf in jtu.tree_leaves(value)]
    own = [at_least_single(x.dtype) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    return 2 * eps if eps > max(map(_eps_of_dtype, own), default=eps) else eps


def _eps_along(jaxpr: Any, followed: Sequence[bool]) -> tuple[float, list[bool]]:
    """The largest `eps` of values that depend on followed arguments, and which results do."""
    last = variables(jaxpr)[-len(followed) :] if followed else []
    moving = {x for x, follow in zip(last, followed, strict=True) if follow}
    worst = 0.0
    for equation in jaxpr.eqns:
        moves = [not is_literal(x) and x in moving for x in equation.invars]
        if not any(moves):
            continue
        inner, results = _eps_inside(equation, moves)
        moved = [x for x, depends in zip(equation.outvars, results, strict=True) if depends]
        moving.update(moved)
        worst = max(worst, inner, *(_eps_of_dtype(getattr(x.aval, "dtype", None)) for x in moved))
    return worst, [not is_literal(x) and x in moving for x in jaxpr.outvars]


def _eps_inside(equation: Any, moves: list[bool]) -> tuple[float, list[bool]]:
    """The rounding in an equation that the dtypes of the results hide, and which results move."""
    worst = 0.0
    results = [True] * len(equation.outvars)
    if equation.primitive.name == "reduce_precision":
        worst = 2.0 ** -equation.params["mantissa_bits"]
    if equation.primitive.name in _PRODUCTS:
        dtypes = [x.aval.dtype for x in equation.invars]
        worst = eps_of_factors(equation.params["precision"], dtypes)
    for inner in map(opened, filter(is_jaxpr, jtu.tree_leaves(list(equation.params.values())))):
        fits = len(inner.outvars) == len(results) and len(moves) <= len(inner.invars)
        if equation.primitive.name in _CALLS and fits:
            eps, results = _eps_along(inner, moves)
        else:  # what a loop carries may depend on all of its operands
            eps, _ = _eps_along(inner, [True] * len(inner.invars))
        worst = max(worst, eps)
    return worst, results


def _eps_of_dtype(dtype: Any) -> float:
    floating = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
    return float(jnp.finfo(dtype).eps) if floating else 0.0


@singledispatch
def product_precision(operator: Any) -> float:
    """The relative precision of products, a float, or 0 where dtypes show it.

    It is that of half precision inside of functions, and what a class of operators registers with
    `traceax.extend.product_precision.register(Class)(function)`. Errors contain it, and checks of
    symmetry allow for it.

    **Arguments:**

    - `operator`: the operator.
    """
    return max(map(product_precision, parts_of(operator)), default=0.0)


@product_precision.register(lx.FunctionLinearOperator)
def _(operator):
    function = operator.fn
    said = function.precision if isinstance(function, ClosedFunction) else None
    return max(said or 0.0, eps_of_product(function, (operator.in_structure(), True)))


@product_precision.register(lx.JacobianLinearOperator)
def _(operator):
    return eps_of_product(operator.fn, (operator.x, True), (operator.args, False))

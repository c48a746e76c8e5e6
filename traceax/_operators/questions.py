"""Questions, answered by functions registered for a class of operators, as `lineax.diagonal`."""

from functools import singledispatch
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Inexact, PyTree

from .._core.precision import any_promotion
from .._core.programs import ClosedFunction
from .curvature import CurvatureOperator
from .precision import eps_of_product
from .tags import parts_of


def answers(question: Any, operator: lx.AbstractLinearOperator) -> bool:
    """Whether a function is registered with a question for the class of an operator."""
    return question.dispatch(type(operator)) is not question.dispatch(object)


@singledispatch
def quadratic_form(operator: Any, vector: PyTree[Array]) -> Inexact[Array, ""]:
    r"""The number $v^* A v$.

    A class of operators that has it for less than a product registers a function for Hutchinson's
    estimator: `traceax.extend.quadratic_form.register(Class)(function)`.

    **Arguments:**

    - `operator`: the operator A.
    - `vector`: the vector v, of the operator's input structure.
    """
    with any_promotion():
        products = jtu.tree_map(lambda v, p: jnp.vdot(v, p), vector, operator.mv(vector))
        return jnp.asarray(sum(jtu.tree_leaves(products)))


@quadratic_form.register(CurvatureOperator)
def _(operator, vector):
    if operator.form is None:
        return quadratic_form.dispatch(object)(operator, vector)
    return operator.mean(operator.form, vector)


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


@product_precision.register(CurvatureOperator)
def _(operator):
    return operator.precision or 0.0

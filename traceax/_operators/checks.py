"""What the tags of an operator say, and the checks of an operator that a user passes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx

from .hoisting import hoist_closures
from .known_parts import sign_of
from .tags import leaf_dtypes, semidefinite_sign


def check_semidefinite(operator: lx.AbstractLinearOperator, name: str, instead: str) -> None:
    """Raise a `ValueError` unless the operator, or every term of it, is tagged semidefinite."""
    if semidefinite_sign(operator) == 0 and sign_of(operator) is None:
        raise ValueError(
            f"{name} needs a semidefinite operator, and this {type(operator).__name__} is not "
            "tagged so. If it is, say so with `lineax.TaggedLinearOperator(operator, "
            "lineax.positive_semidefinite_tag)` (or `negative_semidefinite_tag`); otherwise use "
            f"{instead}."
        )


def as_operator(operator: Any, square: bool = True) -> lx.AbstractLinearOperator:
    """The operator with every array as a leaf, see `hoist_closures`; an error if it is no lineax
    operator over one field, of dtypes that JAX computes with here, or not `square`.
    """
    if not isinstance(operator, lx.AbstractLinearOperator):
        raise TypeError(
            "The operator must be a lineax.AbstractLinearOperator, got "
            f"{type(operator).__name__}: {_wrapper(operator)}."
        )
    _check_dtypes(operator)
    operator = hoist_closures(operator)
    rows = operator.out_size()
    columns = operator.in_size()
    if columns == 0:
        raise ValueError(
            f"The operator has no columns, its input structure is {operator.in_structure()}: there "
            "is nothing to estimate. Check what the operator was made from."
        )
    if square and rows != columns:
        raise ValueError(
            f"The operator must be square, got {rows} x {columns} (outputs x inputs). "
            "For A with more rows than columns, tr(A^H A) is the trace of `A.T @ A` (real A); and "
            "`spectral_sum` of x^(p/2) for `A.T @ A`, tagged positive semidefinite, is the p-th "
            "power of its Schatten norm."
        )
    fields = {jnp.issubdtype(dtype, jnp.complexfloating) for dtype in leaf_dtypes(operator)}
    if len(fields) > 1:
        raise ValueError(
            "The operator mixes real and complex arrays "
            f"(inputs {operator.in_structure()}, outputs {operator.out_structure()}), so it is "
            "not linear over one field. Declare its whole input structure complex."
        )
    return operator


def _wrapper(value: Any) -> str:
    """How to make an operator of something else."""
    if eqx.is_array_like(value) or isinstance(value, list):
        return "wrap a matrix in `lineax.MatrixLinearOperator(matrix)`"
    if hasattr(value, "tocsr") or hasattr(value, "todense"):
        return "wrap a sparse matrix in `traceax.SparseLinearOperator(matrix)`"
    if callable(value):
        return (
            "wrap a function in `lineax.FunctionLinearOperator(fn, input_structure)`, where "
            "`input_structure` is a `jax.ShapeDtypeStruct` (or a PyTree of them)"
        )
    return "pass one of lineax's operators, e.g. `lineax.MatrixLinearOperator(matrix)`"


def _check_dtypes(operator: lx.AbstractLinearOperator) -> None:
    leaves = [x for x in jtu.tree_leaves(operator) if isinstance(x, jax.Array)]
    for leaf in [*leaves, *jtu.tree_leaves(operator.in_structure())]:
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        if inexact and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise ValueError(
                f"The operator has numbers of {leaf.dtype}, which JAX does not compute with here: "
                "64-bit numbers are switched off. Call this where the operator was made, in "
                "`jax.enable_x64(True)`."
            )

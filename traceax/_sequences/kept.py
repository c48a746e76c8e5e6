"""What a state keeps of an operator, for products with it at the next step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array

from .._operators.curvature import CurvatureOperator


def _is_curvature(x: Any) -> bool:
    return isinstance(x, CurvatureOperator)


def all_but_data(operator: Any) -> Any:
    """The parts of an operator that are kept by default: of curvature whose data are a sample, the
    parameters; of all else, everything.
    """
    parts = jtu.tree_leaves(operator, is_leaf=_is_curvature)
    return [
        (part.params, part.constant) if _is_curvature(part) and part.sampled else part
        for part in parts
    ]


class Kept(NamedTuple):
    """What is kept of an operator: its arrays (random keys as raw data), and Python numbers."""

    arrays: tuple[Array, ...]
    numbers: tuple[Any, ...]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _flatten(
    operator: lx.AbstractLinearOperator, keep: Callable[[Any], Any]
) -> tuple[list[Any], Any, list[int]]:
    """The leaves of an operator, its structure, and the places of the leaves that are kept."""
    leaves, treedef = jtu.tree_flatten(operator)
    # `keep` sees an operator with the number of its place for each leaf.
    named = set(jtu.tree_leaves(keep(jtu.tree_unflatten(treedef, range(len(leaves))))))
    return leaves, treedef, [i for i in range(len(leaves)) if i in named]


def kept_of(operator: lx.AbstractLinearOperator, keep: Callable[[Any], Any]) -> Kept:
    """What is kept of an operator.

    **Arguments:**

    - `operator`: the operator.
    - `keep`: called with an operator of this structure; returns the parts of it that are kept.
    """
    leaves, _, places = _flatten(operator, keep)
    arrays = [leaves[i] for i in places if isinstance(leaves[i], jax.Array)]
    numbers = [leaves[i] for i in places if isinstance(leaves[i], int | float | complex)]
    return Kept(tuple(jr.key_data(x) if _is_key(x) else x for x in arrays), tuple(numbers))


def with_arrays(
    operator: lx.AbstractLinearOperator, keep: Callable[[Any], Any], arrays: tuple[Array, ...]
) -> lx.AbstractLinearOperator:
    """The operator with these arrays in place of those that `kept_of` returns; all else stays."""
    leaves, treedef, places = _flatten(operator, keep)
    remaining = iter(arrays)
    for i in places:
        leaf = leaves[i]
        if isinstance(leaf, jax.Array):
            new = next(remaining)
            leaves[i] = jr.wrap_key_data(new, impl=jr.key_impl(leaf)) if _is_key(leaf) else new
    return jtu.tree_unflatten(treedef, leaves)

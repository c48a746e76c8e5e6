"""What a state keeps of an operator, for products with it at the next step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array

from .._operators.curvature import CurvatureOperator


def _is_curvature(x: Any) -> bool:
    return isinstance(x, CurvatureOperator)


def all_but_data(operator: Any) -> Any:
    """The parts of an operator that are kept by default: of curvature whose data are a sample, the
    parameters and scalars, such as a weight of the loss that is annealed; of all else, everything.
    """

    def of_sample(part):
        return part.params, part.constant, [x for x in jtu.tree_leaves(part.args) if not x.shape]

    parts = jtu.tree_leaves(operator, is_leaf=_is_curvature)
    return [of_sample(x) if _is_curvature(x) and x.sampled else x for x in parts]


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
    # `keep` sees an operator with the structures of its leaves, which are told apart by identity.
    arrays = [x if isinstance(x, jax.Array) else np.zeros(()) for x in leaves]
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    places = {id(struct): i for i, struct in enumerate(structs)}
    named = jtu.tree_leaves(keep(jtu.tree_unflatten(treedef, structs)))
    unknown = [part for part in named if id(part) not in places]
    if unknown:
        raise TypeError(
            f"`keep` must return parts of the operator as they are, got {unknown[0]!r}: name "
            "attributes, such as `keep=lambda operator: operator.params`."
        )
    return leaves, treedef, sorted({places[id(part)] for part in named})


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

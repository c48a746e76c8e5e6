"""Which arrays of a PyTree are parameters, and what they are called.

The PyTrees may be modules of Flax's nnx. Their graphs, and not the PyTrees, know shared variables
(tied weights) and shared random states. So modules are split as by `nnx.split`. Flax is not
imported: without an import by the user no parameter can be of nnx.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from .._core.counts import check_function

# See `wrt` and `groups` of `traceax.curvature.hessian`.
Choice = Callable[[str, Any], bool] | type | None
Groups = Callable[[str, Any], str | list[str]]


def structure_of(tree: Any, axes: int = 0) -> Any:
    """The shapes and dtypes of arrays, less leading axes, without a trace by `jax.eval_shape`."""
    return jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape[axes:], x.dtype), tree)


def as_jax(tree: Any) -> Any:
    """The PyTree with JAX arrays in place of NumPy's."""
    kinds = np.ndarray | np.generic
    return jtu.tree_map(lambda x: jnp.asarray(x) if isinstance(x, kinds) else x, tree)


# The graph of modules of nnx (or None), the other parameters, and how groups are undone (or None):
# all that the program of a function of the parameters depends on.
Constant = tuple[Any, Any, Any]


def join(moving: Any, constant: Constant) -> Any:
    """All parameters."""
    graph, others, grouping = constant
    moving = moving if grouping is None else _ungrouped(grouping, moving)
    if graph is None:
        return eqx.combine(moving, others)
    # A copy may be written to inside of any trace.
    return _nnx().merge(graph, moving, others, copy=True)


def split_params(
    params: Any, wrt: Choice = None, groups: Groups | None = None
) -> tuple[Any, Constant]:
    """The parameters to differentiate, and what `join` needs to make all parameters of them."""
    choice = _default_choice(params) if wrt is None else wrt
    check_function(choice, "wrt", "lambda path, leaf: path.startswith('layer1')")

    def is_chosen(name, leaf):
        arrays = jtu.tree_leaves(leaf)  # of a variable
        if not arrays or not all(map(eqx.is_inexact_array, arrays)):
            return False
        return isinstance(leaf, choice) if isinstance(choice, type) else bool(choice(name, leaf))

    graph = None
    if any(map(_is_module, jtu.tree_leaves(params, is_leaf=_is_module))):
        by_keys = (lambda keys, leaf: is_chosen("/".join(map(str, keys)), leaf), ...)
        graph, moving, others = _nnx().split(params, *by_keys)
    else:
        chosen = jtu.tree_map_with_path(
            lambda path, leaf: is_chosen(name_of(path), leaf), params, is_leaf=_is_variable
        )
        moving, others = eqx.partition(params, chosen)
    moving = as_jax(moving)
    leaves = jtu.tree_leaves(moving)
    if not leaves:
        raise ValueError(
            "`wrt` chose none of the floating-point arrays among the parameters, got leaves "
            f"{[name for name, _ in named_leaves(params)[:4]]} of types "
            f"{sorted({type(x).__name__ for x in jtu.tree_leaves(params)})}. "
            "Return True for those to differentiate, and pass arrays (`jnp.asarray(1.0)`)."
        )
    if any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in leaves):
        raise ValueError(
            f"Curvature needs real parameters, got dtypes {sorted({str(x.dtype) for x in leaves})}."
            " Split complex parameters into their real and imaginary parts."
        )
    grouping = None
    if groups is not None:
        grouping = _names_in_groups(moving, groups), structure_of(moving)
        moving = _grouped(grouping[0], moving)
    return moving, (graph, as_jax(others), grouping)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves (of a state of nnx the variables that hold an array) with their names."""
    leaves = jtu.tree_leaves_with_path(tree, is_leaf=_is_variable)
    return [(name_of(path), leaf) for path, leaf in leaves if jtu.tree_leaves(leaf)]


def name_of(path: tuple[Any, ...]) -> str:
    """The path of a leaf as `"layers/0/weight"`."""
    return jtu.keystr(path, simple=True, separator="/")


def _default_choice(params: Any) -> Callable[[str, Any], bool]:
    """Statistics and random states of Flax are no parameters; everything else is one."""
    if isinstance(params, Mapping) and {"params", "batch_stats"} <= params.keys():  # of linen
        return lambda name, leaf: name.startswith("params/")
    return lambda name, leaf: not _is_variable(leaf) or isinstance(leaf, _nnx().Param)


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _is_variable(leaf: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(leaf, nnx.Variable)


def _is_module(node: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(node, nnx.Pytree)


# --- groups ---------------------------------------------------------------------------------------


def _names_in_groups(moving: Any, groups: Groups) -> list[Any]:
    """Of each leaf a list: the name of its group, or those of the entries along its leading axis.
    A leaf has so many pieces of equal size.
    """
    found = []
    for path, leaf in named_leaves(moving):
        name = groups(path, leaf)
        several = isinstance(name, tuple | list)
        if not (leaf.shape[:1] == (len(name),) != (0,) if several else isinstance(name, str)):
            raise ValueError(
                "groups must return a name (a str), or a list of names, one for each entry along "
                f"the leading axis, got {name!r} for {path!r} of shape {leaf.shape}. Return the "
                "path for a group of its own."
            )
        found.append(name if several else [name])
    return found


def _grouped(names: list[Any], moving: Any) -> dict[str, Array]:
    """The parameters as a dictionary with one array of shape `(size,)` for each group."""
    parts: dict[str, list[Array]] = {}
    for own, leaf in zip(names, jtu.tree_leaves(moving), strict=True):
        for name, piece in zip(own, jnp.split(leaf.reshape(-1), len(own)), strict=True):
            parts.setdefault(name, []).append(piece)
    for name, pieces in parts.items():
        dtypes = sorted({str(x.dtype) for x in pieces})
        if len(dtypes) > 1:
            raise ValueError(
                f"The parameters of a group need one dtype, got {dtypes} in {name!r}. Make a group "
                "of each dtype."
            )
    return {name: jnp.concatenate(pieces) for name, pieces in parts.items()}


def _ungrouped(grouping: tuple[list[Any], Any], vector: dict[str, Array]) -> Any:
    """The inverse of `_grouped`, for any vector with the structure of the parameters: take the
    pieces off the front of each group, in the order of `_grouped`.
    """
    names, structure = grouping
    rest = dict(vector)

    def take(name, size):
        piece, rest[name] = jnp.split(rest[name], [size])
        return piece

    def leaf_of(own, struct):
        size = math.prod(struct.shape) // len(own)
        return jnp.concatenate([take(name, size) for name in own]).reshape(struct.shape)

    structs, treedef = jtu.tree_flatten(structure)
    leaves = [leaf_of(*pair) for pair in zip(names, structs, strict=True)]
    return jtu.tree_unflatten(treedef, leaves)


def ungroup(vector: dict[str, Array], params: PyTree, groups: Groups, wrt: Choice = None) -> PyTree:
    """A vector by groups, such as one of `Eigenpairs.vectors`, in the structure of the parameters.

    **Arguments:**

    - `vector`: a dictionary of arrays, by names of groups.
    - `params`, `groups`, `wrt`: as for [`traceax.curvature.hessian`][].

    **Returns:** a PyTree with the structure of the parameters.
    """
    _, (_, _, grouping) = split_params(params, wrt, groups)
    return _ungrouped(grouping, vector)

"""Which arrays of a PyTree are parameters, and what they are called.

The PyTrees may be modules of Flax's nnx. Their graphs know which variables stand in several places
(tied weights) and which layers share a random state; as PyTrees they do not. So such modules are
split, as `nnx.split` does. Flax is not imported: where nobody has, no parameter can be its own.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

Choice = Callable[[str, Any], bool] | type | None  # see `wrt` of `traceax.curvature.hessian`


def structure_of(tree: Any, axes: int = 0) -> Any:
    """The shapes and dtypes of arrays, without so many leading axes. (`jax.eval_shape` would trace
    a function for them.)
    """
    return jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape[axes:], x.dtype), tree)


def as_jax(tree: Any) -> Any:
    """The PyTree with JAX arrays in place of NumPy's."""
    kinds = np.ndarray | np.generic
    return jtu.tree_map(lambda x: jnp.asarray(x) if isinstance(x, kinds) else x, tree)


class Split(NamedTuple):
    """The parameters to differentiate, and what `join` needs to make all parameters of them."""

    moving: Any
    constant: Any  # the graph of modules of nnx (or None), and the other parameters


def join(moving: Any, constant: Any) -> Any:
    """All parameters."""
    graph, others = constant
    if graph is None:
        return eqx.combine(moving, others)
    return _nnx().merge(
        graph, moving, others, copy=True
    )  # a copy may be written to inside of traces


def split(params: Any, wrt: Choice = None) -> Split:
    """The parameters to differentiate, and the others; see `traceax.curvature.hessian`."""
    choice = _default_choice(params) if wrt is None else wrt

    def is_chosen(name, leaf):
        arrays = jtu.tree_leaves(leaf)  # of a variable
        if not arrays or not all(map(eqx.is_inexact_array, arrays)):
            return False
        return isinstance(leaf, choice) if isinstance(choice, type) else bool(choice(name, leaf))

    graph = None
    if _holds_modules(params):
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
    return Split(moving, (graph, as_jax(others)))


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


def _holds_modules(params: Any) -> bool:
    nnx = _nnx()
    if nnx is None:
        return False
    nodes = jtu.tree_leaves(params, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    return any(isinstance(x, nnx.Pytree) for x in nodes)

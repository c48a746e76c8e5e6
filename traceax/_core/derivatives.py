"""Constants, and changes to first order."""

from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array


def constant(tree: Any) -> Any:
    """The PyTree, whose arrays have no derivative."""
    return jtu.tree_map(lambda x: lax.stop_gradient(x) if eqx.is_inexact_array(x) else x, tree)


def change_of(x: Array) -> Array:
    """0, with the derivative of x."""
    return x - lax.stop_gradient(x)

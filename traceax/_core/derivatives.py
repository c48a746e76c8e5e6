"""Constants, and changes to first order."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array


def constant(tree: Any) -> Any:
    """The PyTree, whose arrays have no derivative."""
    return jtu.tree_map(lambda x: lax.stop_gradient(x) if eqx.is_inexact_array(x) else x, tree)


@jax.custom_jvp
def change_of(x: Array) -> Array:
    """`x - stop_gradient(x)`: 0, with the derivative of x. A value alone does not compute x."""
    return jnp.zeros_like(x)


@change_of.defjvp
def _(primals, tangents):
    return change_of(*primals), tangents[0]

"""A loop that ends when the last of the lanes of a `vmap` is done.

`lax.cond` with a batched predicate computes both branches. Here the predicate of all lanes is one,
"any of them goes on", and the lanes that are done keep what they have.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool


@custom_vmap
def any_lane(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether the flag is set in any lane: not batched, whatever the flag is."""
    return flag


@any_lane.def_vmap
def _any_lane(axis_size, in_batched, flag):
    del axis_size, in_batched
    return any_lane(jnp.any(flag)), False


@custom_vmap
def keep(done: Bool[Array, ""], old: Any, new: Any) -> Any:
    """`new`; in the lanes that are done, `old`. (A call by itself gets here only if it is not.)"""
    del done, old
    return new


@keep.def_vmap
def _keep(axis_size, in_batched, done, old, new):
    del axis_size

    def select(done, old, new):
        return jtu.tree_map(lambda o, n: jnp.where(done, o, n), old, new)

    axes = jtu.tree_map(lambda batched: 0 if batched else None, tuple(in_batched))
    return jax.vmap(select, axes)(done, old, new), jtu.tree_map(lambda _: True, new)


@custom_vmap
def alone(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether this is no lane of a `vmap` (over anything that the flag depends on)."""
    return jnp.ones_like(flag)


@alone.def_vmap
def _alone(axis_size, in_batched, flag):
    del axis_size, in_batched
    return jnp.zeros((), bool), False

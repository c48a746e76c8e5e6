"""What a loop needs in order to end when the last lane of a `vmap` is done.

`lax.cond` with a batched predicate computes both branches. Here all lanes share one predicate,
"some lane goes on", and the lanes that are done keep their values.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool


@custom_vmap
def any_lane(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether the flag is set in any lane. The result is not batched, even if the flag is."""
    return flag


@any_lane.def_vmap
def _any_lane(axis_size, in_batched, flag):
    del axis_size, in_batched
    return any_lane(jnp.any(flag)), False


@custom_vmap
def keep(done: Bool[Array, ""], old: Any, new: Any) -> Any:
    """`old` in the lanes that are done, `new` in the others. (Outside of `vmap` it is `new`:
    callers get here only where something is left to do.)
    """
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
    """True, unless a `vmap` maps over something that the flag depends on."""
    return jnp.ones_like(flag)


@alone.def_vmap
def _alone(axis_size, in_batched, flag):
    del axis_size, in_batched
    return jnp.zeros((), bool), False

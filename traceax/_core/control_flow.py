"""What a loop needs in order to end when the last lane of a `vmap` is done.

`lax.cond` with a batched predicate computes both branches. Here all lanes share one predicate,
"some lane goes on", and the lanes that are done keep their values.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
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


def if_any(wanted: Bool[Array, ""], new: Callable[[], Any], old: Any) -> Any:
    """`new()` if it is wanted, else `old`. It is computed only if any lane of a `vmap` wants it."""

    def chosen():
        return jtu.tree_map(lambda x, y: jnp.where(wanted, x, y), new(), old)

    return lax.cond(any_lane(wanted), chosen, lambda: old)


def nothing_like(fn: Callable[..., Any], *args: Any) -> Any:
    """Zeros like the result of `fn`, which is not computed: the first state of a loop."""
    return jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn, *args))

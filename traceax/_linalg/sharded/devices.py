"""Which devices have which rows of an array."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, Int


def axis_names(entry: Any) -> tuple[str, ...]:
    """The axes of the mesh in one entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def device_index(axes: tuple[str, ...]) -> Int[Array, ""]:
    """The number of this device, for an array that is cut along these axes, the first outermost.

    (`lax.axis_index` takes several axes, too, but versions of JAX differ: some use the order of the
    mesh, some that of the argument.)
    """
    index: Any = 0
    for axis in axes:
        index = index * lax.axis_size(axis) + lax.axis_index(axis)
    return index


def rows_inside(axes: tuple[str, ...], n: int, local: Inexact[Array, "rows m"]) -> Array:
    """The rows that a device has, with 0 in those beyond the n-th. If n is not a multiple of the
    number of devices, the last devices have such rows, with arbitrary contents.
    """
    rows, index = local.shape[0], device_index(axes)
    if rows * math.prod(lax.axis_size(axis) for axis in axes) == n:
        return local
    # (Rows are counted on each device, as n need not fit into an int32.)
    whole, rest = divmod(n, rows)
    count = jnp.where(index < whole, rows, jnp.where(index == whole, rest, 0))
    return jnp.where((jnp.arange(rows) < count)[:, None], local, jnp.zeros((), local.dtype))

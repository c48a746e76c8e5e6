"""Operators whose arrays live on several devices.

XLA partitions products and reductions by itself, from the shardings of the operator's arrays: an
inner product over the rows becomes a local one and a sum of m x m numbers over the devices. Where
it would gather the n x m block instead, there are rules for what each device does with its rows:
for LAPACK calls in `_tall`, for products with matrices in `_matrix_product`. They are asked when
the program is compiled, by when it is known where the rows are: `jit` need not be told.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes
from jaxtyping import Array, Inexact, Int


@cache
def needs_devices() -> Any:
    """A program with a rule in it. A primitive that has it among its parameters is lowered knowing
    its devices: JAX looks into the programs that it finds there, but not into implementations.
    """
    anything = custom_partitioning(lambda x: x)
    anything.def_partition(None, sharding_rule="n -> n")
    return jax.make_jaxpr(anything)(jax.ShapeDtypeStruct((1,), jnp.float32))


def with_auto_axes(fn: Callable[..., Any], operands: Sequence[Array], n: int) -> Any:
    """`fn(*operands)`, where the shardings of what is in between follow by propagation.

    In a mesh with explicit axes (what `jax.make_mesh` returns) shardings are parts of types, and
    every inner product of columns would have to be told that of its result.

    **Arguments:**

    - `fn`: the function.
    - `operands`: its arguments.
    - `n`: the number of rows: results with as many are cut along them.

    **Returns:**

    The result.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in operands]
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None:
        return fn(*operands)
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in pairs if kind == AxisType.Explicit)
    parts = math.prod(mesh.shape[name] for name in axes)

    def sharding(x):
        cut = x.ndim > 0 and x.shape[0] == n and n % parts == 0
        return NamedSharding(mesh, PartitionSpec(axes) if cut else PartitionSpec())

    shardings = jtu.tree_map(sharding, jax.eval_shape(fn, *operands))
    return auto_axes(fn, axes=axes, out_sharding=shardings)(*operands)


def axis_names(entry: Any) -> tuple[str, ...]:
    """The axes of the mesh in one entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def device_index(axes: tuple[str, ...]) -> Int[Array, ""]:
    """The number of this device, where an array is cut along these axes, the first outermost.

    (`lax.axis_index` of several axes has had the order of the mesh and the order that it is given.)
    """
    index: Any = 0
    for axis in axes:
        index = index * lax.axis_size(axis) + lax.axis_index(axis)
    return index


def send_to_next(x: Array, axes: tuple[str, ...], mesh: Any) -> Array:
    """What the device before this one has, in a ring of the devices in the order of `device_index`.

    `lax.ppermute` numbers devices in the order of the mesh, whatever the order of the axes.
    """
    in_order = tuple(name for name in mesh.axis_names if name in axes)
    numbers = np.arange(math.prod(mesh.shape[name] for name in axes))
    numbers = numbers.reshape([mesh.shape[name] for name in in_order])
    ring = np.transpose(numbers, [in_order.index(name) for name in axes]).reshape(-1).tolist()
    return lax.ppermute(x, in_order, list(zip(ring, [*ring[1:], ring[0]], strict=True)))


def rows_inside(axes: tuple[str, ...], n: int, local: Inexact[Array, "rows m"]) -> Array:
    """The rows that a device has, with 0 in those beyond the n-th: where they do not come out
    even, the last device has some, with anything in them.
    """
    rows, index = local.shape[0], device_index(axes)
    if rows * math.prod(lax.axis_size(axis) for axis in axes) == n:
        return local
    # (Counted without the number of a row, which need not fit into an int32.)
    whole, rest = divmod(n, rows)
    count = jnp.where(index < whole, rows, jnp.where(index == whole, rest, 0))
    return jnp.where((jnp.arange(rows) < count)[:, None], local, jnp.zeros((), local.dtype))

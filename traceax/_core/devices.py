"""Operators whose arrays live on several devices.

XLA partitions products and reductions by itself, from the shardings of the operator's arrays: an
inner product over the rows becomes a local one and a sum of m x m numbers over the devices. For
LAPACK calls XLA would gather the n x m block on every device: `_linalg.sharded.tsqr` has rules that
say what each device does with its rows. XLA calls the rules when it compiles the program. By then
it knows where the rows are, so that a user need not tell `jit`.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes
from jaxtyping import Array


@cache
def needs_devices() -> Any:
    """A program with a partitioning rule in it, for the parameters of a primitive.

    JAX tells a lowering its devices only where it finds such a rule. It looks for rules in the
    programs among the parameters of a primitive, but not in the primitive's implementation.
    """
    anything = custom_partitioning(lambda x: x)
    anything.def_partition(None, sharding_rule="n -> n")
    return jax.make_jaxpr(anything)(jax.ShapeDtypeStruct((1,), jnp.float32))


def with_auto_axes(fn: Callable[..., Any], operands: Sequence[Array], n: int) -> Any:
    """`fn(*operands)`, where XLA propagates the shardings of intermediate arrays.

    In a mesh with explicit axes (what `jax.make_mesh` returns) a sharding is a part of the type of
    an array, and every inner product of columns would have to name the sharding of its result.

    **Arguments:**

    - `fn`: the function.
    - `operands`: its arguments.
    - `n`: the number of rows. Results with n rows are cut along them.

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

"""Operators whose arrays live on several devices.

XLA partitions products and reductions by itself, from the shardings of the operator's arrays: an
inner product over the rows becomes a local one and a sum of m x m numbers over the devices. For
LAPACK calls XLA would gather the n x m block on every device: `_linalg.sharded.tsqr` has rules that
say what each device does with its rows. XLA calls the rules when it compiles the program. By then
it knows where the rows are, so that a user need not tell `jit`.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import (
    AxisType,
    NamedSharding,
    PartitionSpec,
    auto_axes,
    explicit_axes,
    get_abstract_mesh,
    use_abstract_mesh,
)
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


def explicit_axes_of(mesh: Any) -> tuple[str, ...]:
    """The names of the explicit axes of a mesh."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == AxisType.Explicit)


def explicit_mesh_of(operands: Sequence[Array]) -> Any:
    """The mesh with explicit axes that one of these arrays is in, or None."""
    meshes = [jax.typeof(x).sharding.mesh for x in operands]
    return next((mesh for mesh in meshes if explicit_axes_of(mesh)), None)


def automatic_mesh() -> AbstractContextManager:
    """The mesh of `jax.set_mesh` with automatic axes in the place of explicit ones."""
    mesh = get_abstract_mesh()
    axes = explicit_axes_of(mesh)
    if not axes:
        return nullcontext()
    return use_abstract_mesh(mesh.update_axis_types(dict.fromkeys(axes, AxisType.Auto)))


def replicated(tree: Any) -> Any:
    """The structures of these arrays, whole on every device of the mesh of `jax.set_mesh`."""
    sharding = NamedSharding(get_abstract_mesh(), PartitionSpec())
    return jtu.tree_map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if hasattr(x, "shape") else x
        ),
        tree,
    )


def with_auto_axes(fn: Callable[..., Any], operands: Sequence[Array], n: int | None = None) -> Any:
    """`fn(*operands)`, where XLA propagates the shardings of intermediate arrays.

    In a mesh with explicit axes (what `jax.make_mesh` returns) a sharding is a part of the type of
    an array, and every inner product of columns would have to name the sharding of its result.

    **Arguments:**

    - `fn`: the function.
    - `operands`: its arguments.
    - `n`: a number of rows: results with n rows are cut along them. Without it, results are cut as
        the first operand of the same shape is.

    **Returns:**

    The result.
    """
    mesh = explicit_mesh_of(operands)
    if mesh is None:
        return fn(*operands)
    types = [jax.typeof(x) for x in operands]
    axes = explicit_axes_of(mesh)
    parts = math.prod(mesh.shape[name] for name in axes)
    specs = {x.shape: x.sharding.spec for x in reversed(types)}

    def sharding(x):
        if n is None:
            return NamedSharding(mesh, specs.get(x.shape, PartitionSpec()))
        cut = x.ndim > 0 and x.shape[0] == n and n % parts == 0
        return NamedSharding(mesh, PartitionSpec(axes) if cut else PartitionSpec())

    with automatic_mesh():
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in types]
        shardings = jtu.tree_map(sharding, jax.eval_shape(fn, *structs))
    return auto_axes(fn, axes=axes, out_sharding=shardings)(*operands)


def with_explicit_axes(
    fn: Callable[..., Any], operands: Sequence[Array], specs: Sequence[PartitionSpec], mesh: Any
) -> Any:
    """`fn(*operands)`, where it was traced in a mesh with explicit axes, along these axes.

    **Arguments:**

    - `fn`: the function.
    - `operands`: its arguments.
    - `specs`: how it expects each of them to be cut.
    - `mesh`: the mesh, or None for one without explicit axes.

    **Returns:**

    The result.
    """
    if mesh is None or explicit_axes_of(get_abstract_mesh()):
        return fn(*operands)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    axes = explicit_axes_of(mesh)
    return explicit_axes(fn, axes=axes, in_sharding=shardings)(*operands)


def along_auto_axes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose arguments and results are PyTrees, by `with_auto_axes`."""

    @wraps(fn)
    def call(*args):
        arrays, static = eqx.partition(args, eqx.is_array)
        leaves, treedef = jtu.tree_flatten(arrays)

        def run(*leaves):
            return fn(*eqx.combine(jtu.tree_unflatten(treedef, leaves), static))

        return with_auto_axes(run, leaves)

    return call

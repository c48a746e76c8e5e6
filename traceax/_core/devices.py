"""Meshes with explicit axes, the default of `jax.make_mesh`: a sharding is part of the type of an
array, and every inner product of columns must name that of its result. Within an estimate the axes
are automatic, and XLA partitions the program.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AxisType, NamedSharding, PartitionSpec, explicit_axes, get_abstract_mesh
from jaxtyping import Array


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
    axes = dict.fromkeys(explicit_axes_of(mesh), AxisType.Auto)
    return jax.sharding.use_abstract_mesh(mesh.update_axis_types(axes)) if axes else nullcontext()


def replicated(tree: Any) -> Any:
    """The structures of these arrays, whole on every device of the mesh of `jax.set_mesh`."""
    whole = NamedSharding(get_abstract_mesh(), PartitionSpec())

    def structure_of(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) if hasattr(x, "shape") else x

    return jtu.tree_map(structure_of, tree)


def with_auto_axes(fn: Callable[..., Any], operands: Sequence[Array]) -> Any:
    """`fn(*operands)`, where XLA propagates shardings. A result is cut as the first operand of its
    shape; without such an operand it is whole on every device.
    """
    mesh = explicit_mesh_of(operands)
    if mesh is None:
        return fn(*operands)
    types = [jax.typeof(x) for x in operands]
    specs = {x.shape: x.sharding.spec for x in reversed(types)}
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in types]

    def sharding(x):
        return NamedSharding(mesh, specs.get(x.shape, PartitionSpec()))

    with automatic_mesh():
        shardings = jtu.tree_map(sharding, jax.eval_shape(fn, *structs))
    axes = explicit_axes_of(mesh)
    return jax.sharding.auto_axes(fn, axes=axes, out_sharding=shardings)(*operands)


def with_explicit_axes(
    fn: Callable[..., Any], operands: Sequence[Array], specs: Sequence[PartitionSpec], mesh: Any
) -> Any:
    """`fn(*operands)` of a jaxpr that was traced along the explicit axes of `mesh` (if any), where
    axes are automatic: `specs` cut the operands. Where axes are explicit, the operands are cut.
    """
    if mesh is None or explicit_axes_of(get_abstract_mesh()):
        return fn(*operands)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    axes = explicit_axes_of(mesh)
    return explicit_axes(fn, axes=axes, in_sharding=shardings)(*operands)

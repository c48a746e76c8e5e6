"""Row-wise algebra on blocks whose rows live on several devices.

XLA partitions products and reductions by itself, from the shardings of the operator's arrays: an
inner product over the rows becomes a local one and a sum of m x m numbers over the devices. Calls
into LAPACK (cuSOLVER, ...) it cannot partition: it gathers the n x m block on every device first.
There are two such calls on tall blocks, and both are given a rule here: the QR factorisation, and
the division by a triangular factor.

The rules are asked when the program is compiled, by when it is known where the rows are: `jit`
need not be told. On one device, and inside `jax.shard_map`, the call is what it is without a rule.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes
from jaxtyping import Array, Inexact


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


def rows_inside(axes: tuple[str, ...], n: int, local: Inexact[Array, "rows m"]) -> Array:
    """The rows that a device has, with 0 in those beyond the n-th: where they do not come out
    even, the last device has some, with anything in them.
    """
    rows = local.shape[0]
    inside = lax.axis_index(axes) * rows + jnp.arange(rows) < n
    return jnp.where(inside[:, None], local, jnp.zeros((), local.dtype))


def partitioned(
    fn: Callable[..., Any],
    over_rows: Callable[..., Any],
    rule: str,
    whole: tuple[str, ...],
) -> Callable[..., Any]:
    """`fn` with a rule for rows on several devices, and for `vmap`.

    **Arguments:**

    - `fn`: a function of arrays with a leading batch axis, the first of shape `(b, n, m)`. It
        returns a tuple whose first array has these axes too.
    - `over_rows`: the same on the rows that one device has, `over_rows(axes, n, *local)`: the axes
        of the mesh along which the rows are cut, and the number of all rows.
    - `rule`: where the axes of the results come from, in the notation of `custom_partitioning`:
        `b` and `n` are the axes that may be cut.
    - `whole`: the other letters in it.

    **Returns:**

    A function of the same arrays without the batch axis.
    """
    operands, results = ([term.split() for term in side.split(",")] for side in rule.split("->"))

    def partition(mesh, arguments, _):
        batch, rows, *_ = (*arguments[0].sharding.spec, None, None)
        cut = {"b": batch, "n": rows}

        def shardings(terms):
            specs = [PartitionSpec(*[cut.get(letter) for letter in term]) for term in terms]
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        n = arguments[0].shape[1]
        axes = axis_names(rows)

        def lowered(*local):
            return over_rows(axes, n, *local) if axes else fn(*local)

        return mesh, lowered, shardings(results), shardings(operands)

    on_devices = custom_partitioning(fn)
    on_devices.def_partition(partition, sharding_rule=rule, need_replication_factors=whole)

    @custom_vmap
    def stacked(*arrays):
        return on_devices(*arrays)

    @stacked.def_vmap
    def _stacked(size, batched, *arrays):
        # Two batch axes make one.
        full = [
            x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_batched in zip(arrays, batched, strict=True)
        ]
        flat = stacked(*[x.reshape(-1, *x.shape[2:]) for x in full])
        inner = full[0].shape[1]
        out = [x.reshape(size, inner, *x.shape[1:]) for x in flat]
        return tuple(out), (True,) * len(out)

    def single(*arrays):
        return tuple(x[0] for x in stacked(*[x[None] for x in arrays]))

    return single


def tall_qr_rule(local_qr: Callable[[Array], tuple[Array, Array]]) -> Callable[..., Any]:
    """The QR factorisation of a block by factorisations of what the devices have (TSQR).

    With Y_d = Q_d R_d on device d, and [R_1; R_2; ...] = [T_1; T_2; ...] R, the factorisation is
    Y = [Q_1 T_1; Q_2 T_2; ...] R. It is as stable as that of the whole block. The factors R_d are
    gathered along one axis of the mesh after the other: with p = p_1 p_2 ... devices, each gets
    (p_1 + p_2 + ...) m^2 numbers, whatever n is.
    """

    def over_rows(axes, n, block):
        q, r = local_qr(jax.vmap(partial(rows_inside, axes, n))(block))
        small = None
        for axis in reversed(axes):
            height = r.shape[1]
            stacked = lax.all_gather(r, axis, axis=1, tiled=True)
            basis, r = local_qr(stacked)
            start = lax.axis_index(axis) * height
            own = lax.dynamic_slice_in_dim(basis, start, height, axis=1)
            small = own if small is None else _matmul(small, own)
        return _matmul(q, small), r

    return over_rows


def _matmul(a, b):
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)

"""Rules for calls into LAPACK (cuSOLVER, ...) on tall blocks whose rows live on several devices.

XLA cannot partition QR factorisations and triangular solves: it would gather the n x m block on
every device first. The rules say what each device does with its rows instead. On one device, and
inside `jax.shard_map`, they change nothing.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh
from jaxtyping import Array

from ..._core.precision import matmul
from ..._core.primitive import with_rule
from .devices import axis_names, rows_inside


def _sharding_rule(rule: str, whole: tuple[str, ...], mesh: Any, operands: Any, results: Any):
    """The rule in Shardy's terms, where sizes have 31 bits: a larger n becomes a product of two."""
    del mesh, results
    n = operands[0].shape[1]
    kinds: dict[str, Any] = {"need_replication_factors": whole}
    if n < 2**31:
        return rule, kinds
    outer = min(n & -n, 2**20)  # a power of two, as is the usual number of devices
    return rule.replace(" n ", " (outer inner) "), {**kinds, "outer": outer, "inner": n // outer}


def partitioned(
    name: str,
    fn: Callable[..., Any],
    over_rows: Callable[..., Any],
    rule: str,
    whole: tuple[str, ...],
) -> Callable[..., Any]:
    """`fn` with a rule for rows on several devices, and for `vmap`.

    **Arguments:**

    - `name`: a name for the call.
    - `fn`: a function of arrays with a leading batch axis, the first of shape `(b, n, m)`. It
        returns a tuple whose first array has these axes too.
    - `over_rows`: what a device does with its rows, `over_rows(axes, n, *local)`, with the axes of
        the mesh along which the rows are cut, and the number of all rows.
    - `rule`: where the axes of the results come from, in the notation of `custom_partitioning`:
        `b` and `n` are the axes that may be cut.
    - `whole`: the other letters of the rule, in their order there.

    **Returns:**

    A function of the same arrays without the batch axis.
    """
    operands, results = ([term.split() for term in side.split(",")] for side in rule.split("->"))

    def shardings(mesh, arguments, terms):
        batch, rows, *_ = (*arguments[0].sharding.spec, None, None)
        cut = {"b": batch, "n": rows}
        specs = [PartitionSpec(*[cut.get(letter) for letter in term]) for term in terms]
        return tuple(NamedSharding(mesh, spec) for spec in specs)

    def infer(mesh, arguments, _):
        return shardings(mesh, arguments, results)

    def partition(mesh, arguments, _):
        out, into = (shardings(mesh, arguments, terms) for terms in (results, operands))
        n = arguments[0].shape[1]
        axes = axis_names(out[0].spec[1])

        def lowered(*local):
            # The axes of `jax.set_mesh` are not those of one device's rows.
            with use_abstract_mesh(AbstractMesh((), ())):
                return over_rows(axes, n, *local) if axes else fn(*local)

        return mesh, lowered, out, into

    on_devices = custom_partitioning(fn)
    # `infer` is for GSPMD, if Shardy is switched off.
    on_devices.def_partition(partition, infer, sharding_rule=partial(_sharding_rule, rule, whole))

    def batch(call, size, batched, *arrays):
        # The two batch axes are merged into one.
        full = [
            x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_batched in zip(arrays, batched, strict=True)
        ]
        inner = full[0].shape[1]
        flat = call(*[x.reshape(-1, *x.shape[2:]) for x in full])
        return [x.reshape(size, inner, *x.shape[1:]) for x in flat]

    call = with_rule(name, fn, on_devices, batch)

    def single(*arrays):
        return tuple(x[0] for x in call(*[x[None] for x in arrays]))

    return single


def tall_qr_rule(local_qr: Callable[[Array], tuple[Array, Array]]) -> Callable[..., Any]:
    """The QR factorisation of a block from factorisations of the rows of each device (TSQR).

    With Y_d = Q_d R_d on device d, and [R_1; R_2; ...] = [T_1; T_2; ...] R, the factorisation is
    Y = [Q_1 T_1; Q_2 T_2; ...] R. This is as stable as factorising the whole block. The factors R_d
    are gathered along one axis of the mesh after the other: with p = p_1 p_2 ... devices, each gets
    (p_1 + p_2 + ...) m^2 numbers, whatever n is.

    J. Demmel, L. Grigori, M. Hoemmen, J. Langou, *Communication-optimal parallel and sequential QR
    and LU factorizations*, 2012, doi:10.1137/080731992.
    """

    def over_rows(axes, n, block):
        q, r = local_qr(jax.vmap(partial(rows_inside, axes, n))(block))
        shares = []
        for axis in reversed(axes):
            height = r.shape[1]
            stacked = lax.all_gather(r, axis, axis=1, tiled=True)
            basis, r = local_qr(stacked)
            start = lax.axis_index(axis) * height
            shares.append(lax.dynamic_slice_in_dim(basis, start, height, axis=1))
        return matmul(q, reduce(matmul, shares)), r

    return over_rows

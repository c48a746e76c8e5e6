"""The product of a matrix and a block of vectors, where the matrix lives on several devices.

Cut by rows, each device needs all of the vectors, and XLA gathers them on every device first: n m
numbers, where the block itself takes n m / p. Here the parts of the block go around instead, and
each device multiplies the part that is with it: as many numbers sent, 2 n m / p of them in memory.
Cut by columns, the sums go around in the same way. Cut both ways, it is the usual product: parts
of the block are gathered along one axis of the mesh, and sums are made along the other.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Inexact

from ..._core.precision import matmul
from ..._core.primitive import with_rule
from .devices import axis_names, device_index, rows_inside, send_to_next


def _by_rows(mesh, axes, n, matrix, block):
    """Rows of A, and of X: the part of X that comes by in step i is that of device d - i."""
    parts, width = math.prod(mesh.shape[name] for name in axes), block.shape[0]
    block = rows_inside(axes, n, block)
    matrix = jnp.pad(matrix, ((0, 0), (0, width * parts - n)))
    device = device_index(axes)

    def share(i, block):
        start = (device - i) % parts * width
        return matmul(lax.dynamic_slice_in_dim(matrix, start, width, axis=1), block)

    def step(i, carry):
        total, block = carry
        block = send_to_next(block, axes, mesh)
        return total + share(i, block), block

    return (lax.fori_loop(1, parts, step, (share(0, block), block))[0],)


def _by_columns(mesh, axes, n, matrix, block):
    """Columns of A, and rows of X: the sum that comes by in step i is that for d - i - 1."""
    parts, width = math.prod(mesh.shape[name] for name in axes), block.shape[0]
    block = rows_inside(axes, n, block)
    matrix = rows_inside(axes, n, matrix.T).T
    matrix = jnp.pad(matrix, ((0, width * parts - n), (0, 0)))
    device = device_index(axes)

    def share(i):
        start = (device - i - 1) % parts * width
        return matmul(lax.dynamic_slice_in_dim(matrix, start, width), block)

    def step(i, total):
        return send_to_next(total, axes, mesh) + share(i)

    return (lax.fori_loop(1, parts, step, share(0)),)


def _partition(mesh, arguments, _):
    rows, columns, *_ = (*arguments[0].sharding.spec, None, None)
    axes, across = axis_names(rows), axis_names(columns)
    n = arguments[0].shape[0]

    def cut(*entries):
        return NamedSharding(mesh, PartitionSpec(*entries))

    if axes and not across:
        return mesh, partial(_by_rows, mesh, axes, n), (cut(rows),), (cut(rows), cut(rows))
    if across and not axes:
        matrix = cut(None, columns)
        shardings = (cut(columns),), (matrix, cut(columns))
        return mesh, partial(_by_columns, mesh, across, n), *shardings

    def product(matrix, block):
        if not across:
            return _product(matrix, block)
        matrix, block = rows_inside(across, n, matrix.T).T, rows_inside(across, n, block)
        return (lax.psum(matmul(matrix, block), across),)

    return mesh, product, (cut(rows),), (cut(rows, columns), cut(columns))


@jax.custom_jvp
def _transposed(matrix, block):
    """(X^T A^T)^T. Without the barriers, XLA makes the usual product of it."""
    product = matmul(lax.optimization_barrier(block.T), matrix.T)
    return lax.optimization_barrier(product).T


_transposed.defjvps(
    lambda change, _, matrix, block: matmul(change, block),
    lambda change, _, matrix, block: matmul(matrix, change),
)


def _product(matrix, block):
    # XLA's product on CPUs is made for widths that are multiples of 32; for others it takes a third
    # less time with the long side last (float32, n = 4000: 14.5 and 10.1 ms for 100 columns, 8.3
    # and 6.2 for 50, 5.5 and 7.5 for 64; 5.2 and 5.3 for 33). For few rows that is not worth the
    # transposes that come with it, and are to be compiled (n = 1000: 0.2 and 50 ms).
    n, m = block.shape
    is_real = not jnp.iscomplexobj(block) and not jnp.iscomplexobj(matrix)
    if not is_real or n < 2000 or m <= 48 or m % 32 == 0:
        return (matmul(matrix, block),)
    return (lax.platform_dependent(matrix, block, cpu=_transposed, default=matmul),)


def _infer(mesh, arguments, _):
    rows, *_ = (*arguments[0].sharding.spec, None)
    return (NamedSharding(mesh, PartitionSpec(rows)),)


_on_devices = custom_partitioning(_product)
# The rows of A, of X and of A X are cut alike. How the columns of A are cut is known to the rule
# above, and is nobody else's business.
_on_devices.def_partition(
    _partition, _infer, sharding_rule="n k, n m -> n m", need_replication_factors=("m",)
)


def _batch(call, size, batched, matrix, block):
    if batched[0]:
        return (matmul(matrix, block),)
    # One matrix, many blocks: they stand side by side.
    _, n, m = block.shape
    (product,) = call(matrix, jnp.moveaxis(block, 0, 1).reshape(n, size * m))
    return (jnp.moveaxis(product.reshape(n, size, m), 1, 0),)


_call = with_rule("matrix_product", _product, _on_devices, _batch)


def matrix_product(
    matrix: Inexact[Array, "n n"], block: Inexact[Array, "n m"]
) -> Inexact[Array, "n m"]:
    """`matrix @ block` in full precision. No device gets the whole block."""
    return _call(matrix, block)[0]

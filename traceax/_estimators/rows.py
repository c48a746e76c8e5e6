"""Entries of a diagonal, one by one or added up."""

from collections.abc import Sequence
from itertools import accumulate
from typing import final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._core.estimate import scale_of
from .._core.precision import square_of


@final
class Rows(eqx.Module):
    """Which entries of a diagonal to add up: none (`sizes=None`), or consecutive groups.

    With the sizes of the leaves of a PyTree, the sums are the traces of the diagonal blocks. A call
    takes samples of a diagonal as columns, and returns samples of the entries or sums.

    **Arguments:**

    - `sizes`: the lengths of the groups, in order; None for the entries themselves.
    """

    sizes: tuple[int, ...] | None = eqx.field(default=None, static=True)

    def __call__(self, block: Inexact[Array, "n m"]) -> Inexact[Array, "g m"]:
        """Add up rows, column by column."""
        if self.sizes is None:
            return block
        groups = jnp.split(block, list(accumulate(self.sizes))[:-1])
        return jnp.stack([jnp.sum(group, axis=0) for group in groups])

    def by_leaf(self, blocks: Sequence[Inexact[Array, "*leaf m"]]) -> list[Inexact[Array, "... m"]]:
        """Add up one array for each leaf: a block with a row of sums for each leaf if `sizes` are
        those of the leaves, the arrays themselves if `sizes` is None.
        """
        if self.sizes is None:
            return list(blocks)
        return [jnp.stack([jnp.sum(x, axis=tuple(range(x.ndim - 1))) for x in blocks])]

    def norms(self, block: Inexact[Array, "n m"]) -> Real[Array, " g"]:
        """The norms of the rows, or of the groups of rows."""
        scale = scale_of(block)  # squares may over- or underflow
        return scale * jnp.sqrt(self.of_vector(jnp.sum(square_of(block / scale), axis=1)))

    def of_vector(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " g"]:
        """Add up entries of one vector."""
        return self(vector[:, None])[:, 0]


def added(rows: Rows | None, diagonal: Inexact[Array, " n"]) -> Inexact[Array, "..."]:
    """The trace of what has this diagonal, or sums of its entries."""
    return jnp.sum(diagonal) if rows is None else rows.of_vector(diagonal)


def without_nonfinite(
    products: Inexact[Array, "n m"],
) -> tuple[Inexact[Array, "n m"], Real[Array, " n"]]:
    """Products with 0 for NaN and inf; and a vector, NaN for rows that held them, 0 for others."""
    finite = jnp.isfinite(products)
    nan_rows = jnp.where(jnp.all(finite, axis=1), 0, jnp.nan)
    return jnp.where(finite, products, 0), nan_rows.astype(products.real.dtype)

"""Exact traces and diagonals: known parts read off, the rest from products with unit vectors."""

import dataclasses
from collections.abc import Callable
from typing import final

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._core.estimate import Estimate, evidence_of, rounding_of, safe_norm, worse
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import split_known_parts
from .._sketch.weights import AbstractWeights
from .rows import Rows, added


def _entries(block: BlockOperator) -> tuple[Inexact[Array, " n"], Real[Array, " n"]]:
    """The entries A_jj = e_j^T A e_j, and the norms of the columns of A (NaN and inf included)."""
    n = block.n
    num_blocks = max(-(-n // block.batch_width(n)), 1)
    width = -(-n // num_blocks)
    rows = jnp.arange(n)[:, None]

    @jax.checkpoint  # in reverse mode, compute each block again rather than keep n x n numbers
    def one_block(start):
        unit = rows == start + jnp.arange(width)[None, :]  # columns past the n-th are all False
        products = block.mm(unit.astype(block.dtype))
        diagonal = jnp.sum(jnp.where(unit, products, jnp.zeros((), block.dtype)), axis=0)
        return diagonal, safe_norm(lax.stop_gradient(products).T)

    entries, norms = lax.map(one_block, width * jnp.arange(num_blocks))
    return entries.reshape(-1)[:n], norms.reshape(-1)[:n]


@final
class KnownPartsWeights(AbstractWeights):
    """The weights of the estimated part. The exact part is differentiated itself, and so is the
    rest, from `n` matvecs, if it was not estimated.
    """

    inner: AbstractWeights | None  # None if the rest was computed exactly
    rows: Rows | None  # None for traces

    def contract(self, block):
        """See `AbstractWeights`."""
        parts = split_known_parts(block.operator)
        exact = added(self.rows, parts.exact)
        if parts.rest is None:
            return exact
        rest = BlockOperator(parts.rest, block.batch_size)
        if self.inner is None:
            estimated = added(self.rows, _entries(rest)[0])
        else:
            estimated = self.inner.contract(rest)
        return _whole(block, exact, parts.scale, estimated)


def _whole(block: BlockOperator, exact: Array, scale: Array, estimated: Array | list[Array]):
    """`exact + scale * estimated`, leaf by leaf if the estimate is a list of leaves."""

    def add(exact, estimated):
        return exact + scale * estimated.astype(scale.dtype)

    if isinstance(estimated, list):
        return [add(*pair) for pair in zip(block.leaves(exact), estimated, strict=True)]
    return add(exact, estimated)


def with_known_parts(
    operator: lx.AbstractLinearOperator,
    rows: Rows | None,
    estimate_rest: Callable[..., tuple[Estimate, AbstractWeights | None]],
) -> tuple[Estimate, KnownPartsWeights]:
    """The estimate of the whole of an operator, and its weights: what is known exactly, and an
    estimate of the rest by `estimate_rest(rest, known value, factor of the rest)`. Without `rows`
    the trace.
    """
    parts = split_known_parts(operator)
    exact = added(rows, parts.exact)
    if parts.rest is None:
        zero = jnp.zeros_like(exact.real)
        known = Estimate(exact, zero, 0, 0, parts.evidence, separate=rows is not None)
        return known, KnownPartsWeights(None, rows)
    inner, made = estimate_rest(parts.rest, exact, parts.scale)
    size = jnp.abs(parts.scale)
    # `unconverged` is relative to the error that the whole may have: it needs no factor.
    whole = dataclasses.replace(
        inner,
        value=_whole(BlockOperator(operator), exact, parts.scale, inner.value),
        std_err=jtu.tree_map(lambda x: size * x.astype(size.dtype), inner.std_err),
        evidence=worse(inner.evidence, parts.evidence, evidence_of(exact, parts.scale)),
    )
    return whole, KnownPartsWeights(made, rows)


def exact(block: BlockOperator, rows: Rows | None = None) -> tuple[Estimate, AbstractWeights]:
    """The trace (`rows=None`) or entries of the diagonal, by products with all unit vectors; known
    parts take none. The standard error is 0, or the rounding of products coarser than the dtype.
    """

    def of_rest(rest, known, scale):
        del known, scale
        other = BlockOperator(rest, block.batch_size)
        diagonal, norms = _entries(other.linearised())
        is_inexact = other.eps > float(jnp.finfo(other.dtype).eps)
        size = safe_norm(norms) if rows is None else rows.norms(norms[:, None])
        value = added(rows, diagonal)
        std_err = rounding_of(size, other.eps) if is_inexact else jnp.zeros_like(size)
        dof = other.n if is_inexact else 0
        given = value, std_err, other.n, dof, evidence_of(norms)
        return Estimate(*given, separate=rows is not None), None

    return with_known_parts(block.operator, rows, of_rest)

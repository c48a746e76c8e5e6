"""Exact traces and diagonals: known parts read off, the rest from products with unit vectors."""

from typing import NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._core.estimate import Estimate, evidence_of, make_estimate, rounding_of, safe_norm, worse
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import split_known_parts
from .._sketch.weights import AbstractWeights
from .rows import Rows, RowWeights


class _Entries(NamedTuple):
    diagonal: Inexact[Array, " n"]
    seen: Real[Array, ""]  # the largest |entry| of A (NaN and inf included)
    norms: Real[Array, " n"]  # of the columns of A; 0 where products are exact to rounding


def _entries(block: BlockOperator) -> _Entries:
    """The entries A_jj = e_j^T A e_j, and how large the products are."""
    n = block.n
    num_blocks = -(-n // block.batch_width(n))
    width = -(-n // max(num_blocks, 1))
    rows = jnp.arange(n)[:, None]

    @jax.checkpoint  # in reverse mode, compute each block again rather than keep n x n numbers
    def one_block(start):
        unit = rows == start + jnp.arange(width)[None, :]  # columns past the n-th are all False
        products = block.mm(unit.astype(block.dtype))
        fixed = lax.stop_gradient(products)
        seen = jnp.max(jnp.abs(fixed), initial=0.0)
        norms = safe_norm(fixed.T) if block.is_inexact else jnp.zeros(width, seen.dtype)
        return jnp.sum(jnp.where(unit, products, jnp.zeros((), block.dtype)), axis=0), seen, norms

    if num_blocks <= 1:
        return _Entries(*one_block(jnp.asarray(0)))
    entries, seen, norms = lax.map(one_block, width * jnp.arange(num_blocks))
    return _Entries(entries.reshape(-1)[:n], jnp.max(seen), norms.reshape(-1)[:n])


def _exact(whole: BlockOperator, rows: Rows | None, linearise: bool) -> Estimate:
    n = whole.n
    parts = split_known_parts(whole.operator, diagonal=rows is not None)
    value = parts.exact
    evidence = parts.evidence
    spent = 0
    std_err = jnp.zeros_like(value.real)
    dof = 0
    if parts.rest is not None:
        block = BlockOperator(parts.rest, whole.batch_size)
        entries = _entries(block.linearised() if linearise else block)
        rest = jnp.sum(entries.diagonal) if rows is None else entries.diagonal
        value = value + parts.scale * rest.astype(value.dtype)
        spent = block.n
        evidence = worse(evidence, evidence_of(entries.seen))
        if block.is_inexact:
            size = safe_norm(entries.norms) if rows is None else entries.norms
            rounding = jnp.abs(parts.scale) * rounding_of(size, block.eps)
            std_err = rounding.astype(std_err.dtype)
            dof = n
    if rows is not None:
        value = rows.of_vector(value)
        std_err = rows.norms(std_err[:, None])
    return make_estimate(value, std_err, spent, dof, evidence, separate=rows is not None)


@final
class ExactWeights(AbstractWeights):
    """`G = I`: the derivative is that of the exact value. A contraction costs `n` matvecs."""

    diagonal: bool = eqx.field(static=True)

    def contract(self, block):
        """See `AbstractWeights`."""
        return _exact(block, Rows() if self.diagonal else None, linearise=False).value


def exact(block: BlockOperator, rows: Rows | None = None) -> tuple[Estimate, AbstractWeights]:
    """The trace or the diagonal from products with all unit vectors; known parts take no products.

    **Arguments:**

    - `block`: a square operator of any kind.
    - `rows`: the entries of the diagonal that are wanted; None for the trace.

    **Returns:**

    The estimate, and its weights. The standard error is 0, or that of rounding if products are less
    precise than the dtype.
    """
    weights = ExactWeights(rows is not None)
    estimate = _exact(block, rows, linearise=True)
    return estimate, weights if rows is None else RowWeights(weights, rows)

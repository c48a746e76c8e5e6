"""Exact traces and diagonals: known parts read off, the rest from products with unit vectors."""

from typing import NoReturn, final

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact

from .._core.estimate import Estimate, make_estimate, status_of
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import split_known_parts
from .._operators.width import batch_width
from .._sketch.weights import AbstractWeights
from .rows import Rows


def _unit_vector_diagonal(block: BlockOperator) -> tuple[Inexact[Array, " n"], Array]:
    """The entries A_jj = e_j^T A e_j, and the largest |entry| of A (NaN and inf included)."""
    n = block.n
    num_blocks = -(-n // batch_width(block.operator, n))
    width = -(-n // max(num_blocks, 1))
    rows = jnp.arange(n)[:, None]

    @jax.checkpoint  # in reverse mode, compute each block again rather than keep n x n numbers
    def one_block(start):
        unit = rows == start + jnp.arange(width)[None, :]  # columns past the n-th are all False
        products = block.mm(unit.astype(block.dtype))
        seen = lax.stop_gradient(jnp.max(jnp.abs(products), initial=0.0))
        return jnp.sum(jnp.where(unit, products, jnp.zeros((), block.dtype)), axis=0), seen

    if num_blocks <= 1:
        return one_block(jnp.asarray(0))
    entries, seen = lax.map(one_block, width * jnp.arange(num_blocks))
    return entries.reshape(-1)[:n], jnp.max(seen)


def _exact(operator: lx.AbstractLinearOperator, rows: Rows | None, linearise: bool):
    n = operator.in_size()
    parts = split_known_parts(operator, n, n, diagonal=rows is not None)
    value, status, spent = parts.exact, parts.status, parts.num_matvecs
    if parts.rest is not None:
        block = BlockOperator(parts.rest)
        entries, seen = _unit_vector_diagonal(block.linearised() if linearise else block)
        rest = jnp.sum(entries) if rows is None else entries
        value = value + parts.scale * rest.astype(value.dtype)
        spent += block.n
        status = jnp.maximum(status, status_of(seen))
    value = value if rows is None else rows.of_vector(value)
    return value, spent, jnp.maximum(status, status_of(value))


@final
class ExactWeights(AbstractWeights):
    """`G = I`: the derivative is that of the exact value. A contraction costs `n` matvecs."""

    diagonal: bool = eqx.field(static=True)

    def contract(self, operator):
        """See `AbstractWeights`."""
        return _exact(operator, Rows() if self.diagonal else None, linearise=False)[0]


def exact(
    operator: lx.AbstractLinearOperator, rows: Rows | None = None
) -> tuple[Estimate, ExactWeights]:
    """The trace or the diagonal from products with all unit vectors; known parts take no products.

    **Arguments:**

    - `operator`: a square operator of any kind.
    - `rows`: the entries of the diagonal that are wanted; None for the trace.

    **Returns:**

    The estimate, whose standard error is 0, and its weights.
    """
    value, spent, status = _exact(operator, rows, linearise=True)
    estimate = make_estimate(value, jnp.zeros_like(value.real), spent, 0, status)
    return estimate, ExactWeights(rows is not None)


def refuse_tolerance(name: str, instead: str) -> NoReturn:
    """Raise a `ValueError`: the computation of an exact value cannot end early.

    **Arguments:**

    - `name`: the name of the estimator.
    - `instead`: the estimators to be used instead.
    """
    raise ValueError(f"{name} cannot work to a tolerance: give it a budget k, or use {instead}.")

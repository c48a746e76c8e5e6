"""Randomly pivoted partial Cholesky factorisation, F F^H ~ K, from columns of K alone.

Pivots are drawn with probabilities proportional to the diagonal d of the residual K - F F^H. Pivots
drawn one by one make products of a matrix and a vector; so b pivots are proposed at once, from the
d at the start of a round. Rejection sampling corrects for that: one after the other, proposal i is
accepted with the probability h / d_i, with h what the accepted pivots have left of its diagonal
entry. The accepted pivots have the distribution of pivots drawn one by one. With H the b x b block
of K - F F^H at the proposals, these are the steps of a Cholesky factorisation of H, which also
gives the L with H = L L^H on the accepted ones: the new columns of F are those of
(K - F F^H) L^{-H}.

E. N. Epperly, J. A. Tropp, R. J. Webber, *Embrace rejection: kernel matrix approximation by
accelerated randomly pivoted Cholesky*, 2024, arXiv:2410.03969.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.precision import adjoint, matmul
from .._linalg.factorisations import divide_by_upper


class PivotedCholesky(NamedTuple):
    """A partial factorisation F F^H of K, to which further pivots may be added."""

    rows: Inexact[Array, "r n"]  # F^T; rows that are not in use come last, and are 0
    pivots: Int[Array, " r"]  # the indices of the pivots; n where a row is not in use
    left: Real[Array, " n"]  # d, the diagonal of K - F F^H
    largest: Real[Array, ""]  # the largest entry of the diagonal of K, or what it was computed from
    rank: Int[Array, ""]  # the number of rows in use
    columns: Int[Array, ""]  # of K that were evaluated
    mismatch: Real[Array, ""]  # see `pivoted_cholesky`
    skew: Real[Array, ""]  # the same of entries on both sides of the diagonal of K


def no_pivots(diagonal: Real[Array, " n"], rank: int, block: int, dtype: Any) -> PivotedCholesky:
    """The factorisation F = 0."""
    n = diagonal.shape[0]
    largest = jnp.max(jnp.abs(diagonal), initial=0.0)
    none = jnp.zeros_like(largest)
    zero = jnp.zeros((), jnp.int32)
    # A round writes as many rows as there are proposals.
    rows = jnp.zeros((rank + block, n), dtype)
    pivots = jnp.full(rank + block, n, jnp.int32)
    return PivotedCholesky(rows, pivots, diagonal, largest, zero, zero, none, none)


def rows_of(indices: Int[Array, " b"], n: int) -> Bool[Array, "n b"]:
    """Where the unit vectors of these indices are 1. (XLA fuses a `where`, and no scatter.)"""
    return jnp.arange(n, dtype=indices.dtype)[:, None] == indices


class _Accepted(NamedTuple):
    """What rejection sampling makes of the proposals of a round."""

    block: Inexact[Array, "b b"]  # what is left of H
    factor: Inexact[Array, "b b"]  # L, with unit vectors for proposals that are rejected
    which: Bool[Array, " b"]


def _accept(
    uniforms: Real[Array, " b"], block: Inexact[Array, "b b"], least: Array, room: Int[Array, ""]
) -> _Accepted:
    """Accept or reject proposals from uniform numbers and their block H, `room` at most (see
    above). Pivots up to `least` are rounding errors, and rejected.
    """
    b = block.shape[0]
    threshold = uniforms * jnp.diagonal(block).real
    place = jnp.arange(b)

    def step(i, state):
        size = state.block[i, i].real  # h
        number = jnp.sum(state.which, dtype=room.dtype)
        taken = (size > jnp.maximum(threshold[i], least)) & (number < room)
        column = state.block[:, i] / jnp.sqrt(jnp.where(taken, size, 1)).astype(block.dtype)
        column = jnp.where(taken & (place >= i), column, 0)
        unit = (place == i).astype(block.dtype)
        return _Accepted(
            state.block - column[:, None] * jnp.conj(column),
            state.factor.at[:, i].set(jnp.where(taken, column, unit)),
            state.which.at[i].set(taken),
        )

    done = lax.fori_loop(0, b, step, _Accepted(block, jnp.zeros_like(block), jnp.zeros(b, bool)))
    both = done.which[:, None] & done.which | jnp.eye(b, dtype=bool)
    return done._replace(factor=jnp.where(both, done.factor, 0))


def pivoted_cholesky(
    key: PRNGKeyArray,
    columns: Callable[[Int[Array, " b"]], Inexact[Array, "n b"]],
    start: PivotedCholesky,
    rank: int | Int[Array, ""],
    *,
    block: int = 1,
    enough: float | Real[Array, ""] = 0.0,
) -> PivotedCholesky:
    """Randomly pivoted partial Cholesky factorisation: add pivots to those of `start`.

    One `key` serves all pivots. `columns` maps indices, some of which may be equal, to columns of
    K. A round proposes `block` (b) pivots; with 1, as many columns are evaluated as are used. The
    factorisation ends with `rank` pivots, or where the trace of K - F F^H is `enough`.

    In the result, `mismatch` is the largest difference at a pivot between the given diagonal and
    the entry of the column; `skew` that between entries of columns of one round that should be
    equal. Cost: `2 n rank^2` operations.
    """
    n = start.left.size
    real = start.left.dtype
    uniforms = jr.uniform(key, (len(start.rows), 2, block), real)  # for every round

    def least_of(state: PivotedCholesky) -> Array:
        """The largest pivot that is mostly rounding errors, which its column would amplify."""
        return jnp.maximum(16 * float(jnp.finfo(real).eps) * state.largest, 8 * state.mismatch)

    def step(state: PivotedCholesky) -> PivotedCholesky:
        least = least_of(state)
        to_draw, to_accept = uniforms[state.columns // block]
        sums = jnp.cumsum(jnp.where(state.left > least, state.left, 0))
        # Comparisons with all of them compile in less time than a bisection.
        found = jnp.searchsorted(sums, to_draw * sums[-1], side="right", method="compare_all")
        pivots = jnp.minimum(found, n - 1)
        known = matmul(adjoint(state.rows[:, pivots]), state.rows).T
        residual = columns(pivots).astype(state.rows.dtype) - known  # of K - F F^H
        h = residual[pivots]
        mismatch = jnp.max(jnp.abs(jnp.diagonal(h).real - state.left[pivots]))
        mismatch = jnp.maximum(state.mismatch, mismatch)
        skew = jnp.maximum(state.skew, jnp.max(jnp.abs(h - adjoint(h))))
        accepted = _accept(to_accept, h, least, rank - state.rank)
        new = divide_by_upper(jnp.where(accepted.which, residual, 0), adjoint(accepted.factor))
        left = jnp.maximum(state.left - jnp.sum(jnp.square(jnp.abs(new)), axis=1), 0)
        # Nothing is left at a pivot, nor at a proposal of which rounding errors are left.
        spent = accepted.which | (jnp.diagonal(accepted.block).real <= least)
        left = jnp.where(jnp.any(rows_of(pivots, n) & spent, axis=1), 0, left)
        # Accepted columns first: the others, which are 0, are overwritten in the next round.
        first = jnp.argsort(~accepted.which, stable=True)
        taken = jnp.where(accepted.which, pivots, n).astype(jnp.int32)[first]
        return state._replace(
            rows=lax.dynamic_update_slice_in_dim(state.rows, new[:, first].T, state.rank, 0),
            pivots=lax.dynamic_update_slice_in_dim(state.pivots, taken, state.rank, 0),
            left=left,
            rank=state.rank + jnp.sum(accepted.which, dtype=state.rank.dtype),
            columns=state.columns + block,
            mismatch=mismatch,
            skew=skew,
        )

    def goes_on(state: PivotedCholesky) -> Array:
        some = (jnp.sum(state.left) > enough) & (jnp.max(state.left, initial=0.0) > least_of(state))
        return some & (state.rank < rank) & (state.columns < block * rank)

    return lax.while_loop(goes_on, step, start)

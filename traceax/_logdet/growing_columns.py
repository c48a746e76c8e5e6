"""A partial Cholesky factorisation of a positive definite operator that grows, and the
preconditioner from its columns.
"""

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.estimate import NOT_SYMMETRIC, SUCCESSFUL, WRONG_DIAGONAL
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import columns, has_entries, scaling_of, stored_diagonal, terms_of
from .._sketch.leave_one_out import square_norms
from .._sketch.low_rank import PADDING, BuiltPreconditioner, LowRank
from .._sketch.nystrom import asymmetry_limit
from .._sketch.pivoted_cholesky import PivotedCholesky, no_pivots, pivoted_cholesky


class GrowingColumns:
    """Columns of the scaled operator (see `_sketch.low_rank`) at random pivots, for a number of
    ranks of which one is in use. Arrays have the size of the largest rank; columns that are not
    there yet are 0. (It is not a PyTree, as it exists only during a trace.)
    """

    def __init__(
        self,
        key: PRNGKeyArray,
        operator: lx.AbstractLinearOperator,
        ranks: tuple[int, ...],
        diagonal: Real[Array, " n"] | None = None,
        enough: float = 0.0,
    ):
        """**Arguments:**

        - `key`: the random key of the pivots.
        - `operator`: the operator.
        - `ranks`: the ranks, in ascending order.
        - `diagonal`: the diagonal of the operator, or None if it is known.
        - `enough`: picking ends when the mean eigenvalue of what is left is this small beside the
            noise s.
        """
        self._key, self._operator, self._ranks = key, operator, ranks
        self._block, self._scaling = BlockOperator(operator), scaling_of(operator)
        n, most = self._block.n, ranks[-1]
        diagonal = stored_diagonal(operator) if diagonal is None else diagonal
        diagonal = jnp.asarray(diagonal).real / jnp.square(self._scaling.relative)
        self._unit, self._known = self._scaling.fixed(diagonal, self._block.eps)
        self._floor_known = self._known & terms_of(operator).positive
        self._shift = jnp.where(self._known, 1, jnp.zeros_like(self._unit))
        self._diagonal = diagonal / self._unit - self._shift
        self._enough = enough * n * self._shift
        # Blocks of proposals cost nothing where columns are read.
        self._together = min(128, max(1, most // 8)) if has_entries(operator) else 1
        self.first = no_pivots(self._diagonal, most, self._together, self._block.dtype)
        # A single rank may not be reached. Of several ranks, a run may end with any.
        sizes = [most, 2 * most // 3, 4 * most // 9, most // 4] if len(ranks) == 1 else ranks[::-1]
        self._sizes = [most] if n * most**2 < PADDING else sizes

    def _read(self, pivots: Int[Array, " b"]) -> Inexact[Array, "n b"]:
        """Columns of K'."""
        root = self._scaling.relative.astype(self._block.dtype)
        unit, shift = self._unit.astype(root.dtype), self._shift.astype(root.dtype)
        found = columns(self._operator, pivots) / (root[:, None] * root[pivots] * unit)
        return found.at[pivots, jnp.arange(pivots.shape[0])].add(-shift)

    def grown(self, pivoted: PivotedCholesky, level: Int[Array, ""] | int) -> PivotedCholesky:
        """The factorisation so far, and the pivots that the rank of this level takes in addition.
        (Fewer, if nothing is left.)
        """
        rank = self._ranks[0] if len(self._ranks) == 1 else jnp.array(self._ranks)[level]
        return pivoted_cholesky(
            self._key, self._read, pivoted, rank, block=self._together, enough=self._enough
        )

    def low_rank(self, pivoted: PivotedCholesky, level: Int[Array, ""] | int) -> LowRank:
        """The approximation from the pivots so far. (The `level` is that of `GrowingSketch`.)"""
        del level
        n, eps = self._block.n, self._block.eps
        f = pivoted.rows[: self._ranks[-1]].T
        # Here the trace of the part that is left out is known. If s is not, mu becomes the mean
        # eigenvalue of this part.
        whole, captured = jnp.sum(self._diagonal), square_norms(f)

        def beyond(rank):
            left = whole - jnp.sum(jnp.where(jnp.arange(f.shape[1]) < rank, captured, 0))
            return jnp.maximum(left, 0) / jnp.maximum(n - rank, 1)

        left_out, by_half = beyond(pivoted.rank), beyond(pivoted.rank // 2)
        shift = jnp.where(self._known, self._shift, 0.9 * left_out)
        size = jnp.where(pivoted.largest > 0, pivoted.largest, 1)
        fits = ~(pivoted.apart / size > 64 * eps)  # NaN is reported elsewhere
        symmetric = ~(pivoted.skew / size > asymmetry_limit(n, eps))
        status = jnp.where(fits, SUCCESSFUL, WRONG_DIAGONAL)
        status = jnp.where(symmetric, status, NOT_SYMMETRIC)
        nu = jnp.zeros_like(left_out)
        return LowRank(f, nu, shift, left_out, by_half, status, pivoted.rank)

    def built(self, low_rank: LowRank) -> BuiltPreconditioner:
        """The preconditioner from an approximation."""
        root = jnp.sqrt(self._unit) * self._scaling.relative
        return low_rank.built_of_size(self._sizes, root, self._floor_known, graded=True)

    def read(self, pivoted: PivotedCholesky) -> Int[Array, ""] | None:
        """The number of columns that were read, or None if they were computed by products."""
        return pivoted.columns if has_entries(self._operator) else None

"""A partial Cholesky factorisation of a positive definite operator that grows, and the
preconditioner from its columns.

The matrix that a user stores may contain the noise: A' = K' + (s + theta) I, where only s is known
from the way the operator is written, or nothing. A factorisation of K' + theta I would spend its
columns on the flat part, on which they are of no use. So theta is estimated first, from m columns C
at indices P, one in each of m equal parts of all indices. With lambda and w the smallest eigenpair
of C[P], a Ritz pair of A' on the span of these unit vectors, and r = |C w - lambda w_P| its
residual,

    theta = lambda - r  if  r <= lambda / 2,  otherwise 0.

(n = 1200, noise 1e-3 to 0.1 inside of the matrix, 128 columns: for kernels that decay fast theta is
within 5 % of the noise, and one probe scatters as little as with a known s. Where K' decays slowly,
r is large: theta = lambda / 2 would be up to 10 times too large, and the factorisation of what is
then an indefinite matrix may have large columns.)
"""

import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.estimate import OUTSIDE_DOMAIN, SUCCESSFUL, WRONG_DIAGONAL, status_with_symmetry
from .._core.precision import matmul
from .._linalg.factorisations import eigh
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import columns, has_entries, scaling_of, stored_diagonal, terms_of
from .._probes.random import numbered, uniform
from .._sketch.leave_one_out import adjoint, square_norms
from .._sketch.low_rank import PADDING, BuiltPreconditioner, LowRank
from .._sketch.pivoted_cholesky import PivotedCholesky, no_pivots, pivoted_cholesky, rows_of

#: So many columns, at least and at most, are read to estimate theta: as many as there may be if
#: nothing is known of s. Otherwise n / 24 in between, which take little time beside a product.
FOR_FLAT_PART = 32, 128


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
        self._tried, self._status = 0, SUCCESSFUL
        self.below = 1.0  # how many times smaller than the shift an eigenvalue was seen to be
        self.certain = self._known  # whether no eigenvalue is likely to be far below the shift
        if has_entries(operator):
            theta, apart, seen = self._flat_part()
            seen += self._shift
            # A known shift bounds the eigenvalues from below: only a far larger theta replaces it.
            counts = theta > 10 * self._shift
            self.certain = jnp.where(counts, apart <= 1 / 4, self._known)
            self._floor_known &= ~counts
            further = jnp.where(counts, theta, 0)
            self._shift, self._diagonal = self._shift + further, self._diagonal - further
            self.below = jnp.where(seen > 0, jnp.maximum(self._shift / seen, 1), 1)
        self._enough = enough * n * self._shift
        # Blocks of proposals cost nothing where columns are read.
        self._together = min(128, max(1, most // 8)) if has_entries(operator) else 1
        self.first = no_pivots(self._diagonal, most, self._together, self._block.dtype)
        # Entries were rounded before the shift was subtracted.
        self.first = self.first._replace(largest=self.first.largest + jnp.abs(self._shift))
        # A single rank may not be reached. Of several ranks, a run may end with any.
        sizes = [most, 2 * most // 3, 4 * most // 9, most // 4] if len(ranks) == 1 else ranks[::-1]
        self._sizes = [most] if n * most**2 < PADDING else sizes

    def _flat_part(self) -> tuple[Real[Array, ""], Real[Array, ""], Real[Array, ""]]:
        """The estimate theta; r / lambda (see above), if theta is not 0; and the smallest
        eigenvalue of a part of K' that was seen.
        """
        n, eps = self._block.n, self._block.eps
        least, most = FOR_FLAT_PART
        wanted = n if terms_of(self._operator).shift is None else n // 24
        m = self._tried = max(1, min(n // 4, max(least, min(wanted, most))))
        ends = jnp.arange(m + 1) * n // m
        # There are fewer rounds of pivots than rows, so that no other key has this number.
        places = uniform(numbered(self._key, n), (m,), 1, jnp.result_type(float))[0]
        steps = (places * (ends[1:] - ends[:-1]).astype(places.dtype)).astype(ends.dtype)
        # Without a barrier each use would compute them anew, even once for every entry.
        chosen = lax.optimization_barrier(jnp.minimum(ends[:-1] + steps, ends[1:] - 1))
        found = self._read(chosen)
        core = found[chosen]
        values, vectors = eigh((core + adjoint(core)) / 2)
        smallest, vector = values[0], vectors[:, :1]
        inside = jnp.where(rows_of(chosen, n), smallest.astype(core.dtype) * vector[:, 0], 0)
        residual = matmul(found, vector) - jnp.sum(inside, axis=1, keepdims=True)
        size = jnp.sqrt(square_norms(residual))[0]
        rounding = 16 * eps * jnp.maximum(values[-1], 0)
        outside = smallest + self._shift < -rounding
        self._status = jnp.where(outside & jnp.all(jnp.isfinite(core)), OUTSIDE_DOMAIN, SUCCESSFUL)
        # No eigenvalue of two rows and columns is below the smallest of all. They find what the
        # core does not see: points so close that their rows are alike, of which one was chosen.
        rows, own = self._diagonal[:, None], self._diagonal[chosen]
        off = jnp.sqrt(jnp.square((rows - own) / 2) + jnp.square(jnp.abs(found)))
        pairs = jnp.where(rows_of(chosen, n), jnp.inf, (rows + own) / 2 - off)
        counts = (smallest > rounding) & (size <= smallest / 2)
        theta, apart = jnp.where(counts, smallest - size, 0), size / jnp.where(counts, smallest, 1)
        return theta, apart, jnp.minimum(smallest, jnp.min(pairs))

    def _read(self, pivots: Int[Array, " b"]) -> Inexact[Array, "n b"]:
        """Columns of K'."""
        root = self._scaling.relative.astype(self._block.dtype)
        unit, shift = self._unit.astype(root.dtype), self._shift.astype(root.dtype)
        found = columns(self._operator, pivots) / (root[:, None] * root[pivots] * unit)
        return found - jnp.where(rows_of(pivots, self._block.n), shift, 0)

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
        f = pivoted.rows.T
        # Here the trace of the part that is left out is known. If nothing is known of s, mu becomes
        # the mean eigenvalue of this part.
        whole, captured = jnp.sum(self._diagonal), square_norms(f)

        def beyond(rank):
            left = whole - jnp.sum(jnp.where(jnp.arange(f.shape[1]) < rank, captured, 0))
            return jnp.maximum(left, 0) / jnp.maximum(n - rank, 1)

        left_out, by_half = beyond(pivoted.rank), beyond(pivoted.rank // 2)
        shift = jnp.where(self._shift > 0, self._shift, 0.9 * left_out)
        size = jnp.where(pivoted.largest > 0, pivoted.largest, 1)
        fits = ~(pivoted.apart / size > 64 * eps)  # NaN is reported elsewhere
        status = jnp.where(fits, SUCCESSFUL, WRONG_DIAGONAL)
        status = jnp.maximum(status, self._status)
        status = status_with_symmetry(status, pivoted.skew / size, jnp.ones_like(size), n, eps)
        nu = jnp.zeros_like(left_out)
        return LowRank(f, nu, shift, left_out, by_half, status, pivoted.rank)

    def built(self, low_rank: LowRank) -> BuiltPreconditioner:
        """The preconditioner from an approximation."""
        root = jnp.sqrt(self._unit) * self._scaling.relative
        return low_rank.built_of_size(self._sizes, root, self._floor_known, graded=True)

    def read(self, pivoted: PivotedCholesky) -> Int[Array, ""] | None:
        """The number of columns that were read, or None if they were computed by products."""
        return pivoted.columns + self._tried if has_entries(self._operator) else None

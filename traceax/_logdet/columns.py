"""The preconditioner from columns of a positive definite operator.

The matrix that a user stores may contain the noise: A' = K' + (s + theta) I, where only s is known
from the way the operator is written, or nothing. A factorisation of K' + theta I would spend its
columns on the flat part, on which they are of no use. So theta is estimated first, from m columns C
at indices P, one in each of m equal parts of all indices. With lambda and w the smallest eigenpair
of C[P], a Ritz pair of A' on the span of these unit vectors, and r = |C w - lambda w_P| its
residual,

    theta = lambda - r  if  r <= lambda / 2,  otherwise 0.

(Where K' decays slowly, r is large: theta = lambda / 2 would be up to 10 times too large, and the
factorisation of what is then an indefinite matrix may have large columns.)
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.estimate import evidence_of, skew_of
from .._core.precision import matmul
from .._linalg.factorisations import eigh
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import columns, has_entries, scaling_of, split_shift, stored_diagonal
from .._probes.random import numbered, uniform
from .._sketch.leave_one_out import adjoint, square_norms
from .._sketch.low_rank import BuiltPreconditioner, LowRank
from .._sketch.pivoted_cholesky import PivotedCholesky, no_pivots, pivoted_cholesky, rows_of

#: So many columns, at least and at most, are read to estimate theta: as many as there may be if
#: nothing is known of s. Otherwise n / 24 in between, which take little time beside a product.
FOR_FLAT_PART = 32, 128


class Kernel(NamedTuple):
    """K' = D^{-1/2} A D^{-1/2} - s I, known by its diagonal and its columns."""

    operator: lx.AbstractLinearOperator
    root: Real[Array, " n"]  # of D, relative to its unit
    unit: Real[Array, ""]
    shift: Real[Array, ""]  # s
    diagonal: Real[Array, " n"]

    def columns(self, pivots: Int[Array, " b"]) -> Inexact[Array, "n b"]:
        """Columns of K'."""
        found = columns(self.operator, pivots)
        root = self.root.astype(found.dtype)
        found = found / (root[:, None] * root[pivots] * self.unit.astype(found.dtype))
        shift = self.shift.astype(found.dtype)
        return found - jnp.where(rows_of(pivots, root.size), shift, 0)

    def shifted(self, theta: Real[Array, ""]) -> "Kernel":
        """K' - theta I."""
        return self._replace(shift=self.shift + theta, diagonal=self.diagonal - theta)


class FlatPart(NamedTuple):
    """What a few columns say of the smallest eigenvalues."""

    theta: Real[Array, ""]
    apart: Real[Array, ""]  # r / lambda (see above), if theta is not 0
    seen: Real[Array, ""]  # the smallest eigenvalue of a part of K' that was seen
    outside: Bool[Array, ""]  # whether the operator cannot be positive definite


class FromColumns(NamedTuple):
    """A preconditioner from columns."""

    built: BuiltPreconditioner
    spread: Real[Array, ""]  # an estimate of the condition number of P^{-1} A, less 1
    read: Int[Array, ""] | None  # columns that were read, or None if products computed them


def columns_for_flat_part(operator: lx.AbstractLinearOperator) -> int:
    """The number of columns that are read to estimate theta."""
    n = operator.in_size()
    least, most = FOR_FLAT_PART
    wanted = n if split_shift(operator).exact is None else n // 24
    return max(1, min(n // 4, max(least, min(wanted, most))))


def flat_part(key: PRNGKeyArray, kernel: Kernel, eps: float) -> FlatPart:
    """The estimate of theta, from columns of K'."""
    n, m = kernel.diagonal.size, columns_for_flat_part(kernel.operator)
    ends = jnp.arange(m + 1) * n // m
    # There are fewer rounds of pivots than rows, so that no other key has this number.
    places = uniform(numbered(key, n), (m,), 1, jnp.result_type(float))[0]
    steps = (places * (ends[1:] - ends[:-1]).astype(places.dtype)).astype(ends.dtype)
    # Without a barrier each use would compute them anew, even once for every entry.
    chosen = lax.optimization_barrier(jnp.minimum(ends[:-1] + steps, ends[1:] - 1))
    found = kernel.columns(chosen)
    core = found[chosen]
    values, vectors = eigh((core + adjoint(core)) / 2)
    smallest, vector = values[0], vectors[:, :1]
    inside = jnp.where(rows_of(chosen, n), smallest.astype(core.dtype) * vector[:, 0], 0)
    residual = matmul(found, vector) - jnp.sum(inside, axis=1, keepdims=True)
    size = jnp.sqrt(square_norms(residual))[0]
    rounding = 16 * eps * jnp.maximum(values[-1], 0)
    # No eigenvalue of two rows and columns is below the smallest of all. They find what the
    # core does not see: points so close that their rows are alike, of which one was chosen.
    rows, own = kernel.diagonal[:, None], kernel.diagonal[chosen]
    off = jnp.sqrt(jnp.square((rows - own) / 2) + jnp.square(jnp.abs(found)))
    pairs = jnp.where(rows_of(chosen, n), jnp.inf, (rows + own) / 2 - off)
    counts = (smallest > rounding) & (size <= smallest / 2)
    return FlatPart(
        theta=jnp.where(counts, smallest - size, 0),
        apart=size / jnp.where(counts, smallest, 1),
        seen=jnp.minimum(smallest, jnp.min(pairs)),
        outside=smallest + kernel.shift < -rounding,
    )


def low_rank_of(kernel: Kernel, pivoted: PivotedCholesky, outside: Any, eps: float) -> LowRank:
    """The approximation from the pivots of a factorisation."""
    n, f = kernel.diagonal.size, pivoted.rows.T
    # Here the trace of the part that is left out is known. If nothing is known of s, mu becomes
    # the mean eigenvalue of this part.
    left = jnp.maximum(jnp.sum(kernel.diagonal) - jnp.sum(square_norms(f)), 0)
    left_out = left / jnp.maximum(n - pivoted.rank, 1)
    size = jnp.where(pivoted.largest > 0, pivoted.largest, 1)
    seen = (left_out, pivoted.apart, pivoted.skew)
    skew, wrong = skew_of(pivoted.skew, size, n, eps), pivoted.apart / size / (64 * eps)
    evidence = evidence_of(*seen, skew=skew, outside=outside, wrong_diagonal=wrong)
    return LowRank(
        f=f,
        nu=jnp.zeros_like(left_out),
        shift=jnp.where(kernel.shift > 0, kernel.shift, 0.9 * left_out),
        left_out=left_out,
        evidence=evidence,
    )


def preconditioner_from_columns(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    rank: int,
    diagonal: Real[Array, " n"] | None = None,
    enough: float = 0.0,
) -> FromColumns:
    """The preconditioner from columns at random pivots.

    **Arguments:**

    - `key`: the random key of the pivots.
    - `operator`: the operator.
    - `rank`: the number of columns. (Fewer, if nothing is left.)
    - `diagonal`: the diagonal of the operator, or None if it is known.
    - `enough`: picking ends when the mean eigenvalue of what is left is this small beside the
        noise s.
    """
    block, scaling = BlockOperator(operator), scaling_of(operator)
    n, eps = block.n, block.eps
    diagonal = stored_diagonal(operator) if diagonal is None else diagonal
    diagonal = jnp.asarray(diagonal).real / jnp.square(scaling.relative)
    unit, known = scaling.fixed(diagonal, eps)
    nothing = jnp.zeros_like(unit)
    kernel = Kernel(operator, scaling.relative, unit, nothing, diagonal / unit)
    kernel = kernel.shifted(jnp.where(known, 1, nothing))
    floor_known, certain = known & split_shift(operator).is_positive, known
    outside = False
    below = 1.0
    tried = None
    if has_entries(operator):
        flat = flat_part(key, kernel, eps)
        tried = columns_for_flat_part(operator)
        outside = flat.outside
        # A known shift bounds the eigenvalues from below: only a far larger theta replaces it.
        counts = flat.theta > 10 * kernel.shift
        # Whether no eigenvalue is likely to be far below the shift, and how far one was seen.
        certain = jnp.where(counts, flat.apart <= 1 / 4, known)
        floor_known &= ~counts
        seen = flat.seen + kernel.shift
        kernel = kernel.shifted(jnp.where(counts, flat.theta, 0))
        below = jnp.where(seen > 0, jnp.maximum(kernel.shift / seen, 1), 1)
    # Blocks of proposals cost nothing where columns are read.
    together = 1 if tried is None else min(128, max(1, rank // 8))
    none = no_pivots(kernel.diagonal, rank, together, block.dtype)
    # Entries were rounded before the shift was subtracted.
    none = none._replace(largest=none.largest + jnp.abs(kernel.shift))
    left = enough * n * kernel.shift
    pivoted = pivoted_cholesky(key, kernel.columns, none, rank, block=together, enough=left)
    low_rank = low_rank_of(kernel, pivoted, outside, eps)
    spread = n * (low_rank.left_out / low_rank.shift) / jnp.maximum(pivoted.rank, 1)
    spread = jnp.where(certain, (1 + spread) * below - 1, jnp.inf)
    built = low_rank.built_from(pivoted.rank, rank, jnp.sqrt(unit) * scaling.relative, floor_known)
    return FromColumns(built, spread, None if tried is None else pivoted.columns + tried)

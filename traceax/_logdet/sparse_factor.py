r"""Low rank plus a sparse inverse factor: the preconditioner of operators that know their entries.

*The low-rank part.* With the diagonal part D that is written down (`K + s I`, `K + D`), or a
multiple of the identity that a few columns show (`flat_part`), pivoted Cholesky factorisation of
K = A - D gives F, n x r, and F F^H <= K.

*The sparse factor.* For R = A - F F^H a factor L with R^{-1} ~ L L^H. The points come in a random
order, and s_i are the m points before i whose correlation |R_ij| / sqrt(R_ii R_jj) with i is
largest, and i itself, which is last. With R[s_i, s_i] = C C^H, column i of L has the entries

    l_i = C^{-H} e_last     at s_i.

L is nearest to R^{-1} in Kullback-Leibler divergence (F. Schaefer, M. Katzfuss, H. Owhadi, 2020,
arXiv:2004.14455): Vecchia's approximation.

*Both.* With G = L^H F, N = I + G^H G = C C^H (C lower triangular), J = C^{-H} (C + I)^{-1},

    P = L^{-H} L^{-1} + F F^H = L^{-H} (I + G G^H) L^{-1},
    W = L (I - G J G^H),      W W^H = P^{-1},      log det P = -2 sum log L_ii + 2 sum log C_ii.

(With X = (C + I)^{-1}, X C = I - X, and J + J^H - J (N - I) J^H = C^{-H} [X C + C^H X^H
- X (C C^H - I) X^H] C^{-1} = C^{-H} [2 I - X - X^H - (I - X) (I - X)^H + X X^H] C^{-1} = N^{-1}.)
Products with W and W^H need no triangular solve with n rows.

*Rounding.* R is a difference. Its diagonal is raised by some eps times that of A, and, where D is
not known, by a hundredth of its mean, as R is 0 at the pivots. A neighbourhood whose factorisation
still fails counts as uncorrelated. P is then a little different, and still what its factors say.
"""

import dataclasses
from functools import partial
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.control_flow import if_any
from .._core.estimate import evidence_of, scale_of, skew_of
from .._core.precision import einsum, matmul
from .._linalg.factorisations import eigh, lower_cholesky, one_by_one
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import (
    columns,
    has_entries,
    scaling_of,
    split_shift,
    stored_diagonal,
    submatrices,
)
from .._probes.random import numbered
from .._sketch.leave_one_out import adjoint, square_norms, square_of
from .._sketch.low_rank import AbstractFactors, BuiltPreconditioner
from .._sketch.pivoted_cholesky import no_pivots, pivoted_cholesky, rows_of

#: The numbers in a block of rows.
BLOCK = 2**21

#: Unless the mean of what is left of the diagonal is below this share of D, neighbours matter.
SMALL = 3e-3


@final
class SparseFactors(AbstractFactors):
    """`P = W^{-H} W^{-1}`: see above. Products with W cost `2 n (m + 2 r)` operations for each
    column. `row` and `top` are those of `AbstractFactors`.
    """

    sets: Int[Array, "n s"]  # s_i, with i last
    values: Inexact[Array, "n s"]  # l_i, at the places of s_i; 0 where a place is not in use
    basis: Inexact[Array, "n r"]  # G
    core: Inexact[Array, "r r"]  # J
    log_determinant: Real[Array, ""]  # log det P
    row: Real[Array, ""]
    top: Real[Array, ""]

    def log_det(self):
        """See `AbstractFactors`."""
        return self.log_determinant

    def unit(self):
        """See `AbstractFactors`: P^{-1} ~ L L^H."""
        squares = square_of(self.values)
        return 1 / jnp.sqrt(jnp.zeros(len(squares), squares.dtype).at[self.sets].add(squares))

    def inverse_root(self, block):
        """See `AbstractFactors`: W^H times a block."""
        gathered = gathered_by(self.sets, self.values, block)
        inside = matmul(adjoint(self.core), matmul(adjoint(self.basis), gathered))
        return gathered - matmul(self.basis, inside)

    def inverse_root_adjoint(self, block):
        """See `AbstractFactors`: W times a block."""
        inside = matmul(self.core, matmul(adjoint(self.basis), block))
        return self._scattered(block - matmul(self.basis, inside))

    def _scattered(self, block: Inexact[Array, "n p"]) -> Inexact[Array, "n p"]:
        """L times a block."""
        terms = self.values[:, :, None] * block[:, None, :]
        return jnp.zeros_like(block).at[self.sets].add(terms)

    def captured(self) -> Inexact[Array, "n r"]:
        """E = L G C^{-H}, with P^{-1} = L L^H - E E^H."""
        g = self.basis
        factor = lower_cholesky(matmul(adjoint(g), g) + jnp.eye(g.shape[1], dtype=g.dtype))
        solve = partial(lax.linalg.triangular_solve, factor, left_side=False, lower=True)
        return self._scattered(solve(g, transpose_a=True, conjugate_a=True))

    def inverse_diagonal(self):
        """See `AbstractFactors`."""
        return 1 / jnp.square(self.unit()) - jnp.sum(square_of(self.captured()), axis=1)

    def known_part(self, operator):
        """`Re <L L^H, A>`, from the entries of the neighbourhoods: see `AbstractFactors`."""
        n, s = self.sets.shape

        def of_block(rows):
            values = self.values[rows]
            blocks = submatrices(operator, self.sets[rows])
            return einsum("ba,bac,bc->b", jnp.conj(values), blocks, values).real

        return jnp.sum(by_rows(jax.checkpoint(of_block), n, s * s))


def gathered_by(
    sets: Int[Array, "n s"], values: Inexact[Array, "n s"], block: Inexact[Array, "n p"]
) -> Inexact[Array, "n p"]:
    """L^H times a block, place by place: all places at once would take m times the memory."""

    def add(place, total):
        return total + jnp.conj(values[:, place, None]) * block[sets[:, place]]

    zeros = jnp.zeros((len(sets), block.shape[1]), block.dtype)
    return lax.fori_loop(0, sets.shape[1], add, zeros)


def by_rows(fn, n: int, size: int):
    """`fn(rows)` for all rows, stacked; blocks of rows, of `size` numbers a row, go in turn."""
    width = max(1, min(n, BLOCK // size))
    count = -(-n // width)
    rows = jnp.minimum(jnp.arange(count * width), n - 1).reshape(count, width)
    found = lax.map(fn, rows)
    return jax.tree.map(lambda x: x.reshape(count * width, *x.shape[2:])[:n], found)


def neighbours(
    operator: lx.AbstractLinearOperator,
    f: Inexact[Array, "n r"],
    diagonal: Real[Array, " n"],
    order: Real[Array, " n"],
    m: int,
) -> Int[Array, "n m"]:
    """The m points before each that correlate most with it under R; n where there are fewer."""
    n = len(order)
    scale = 1 / diagonal.astype(np.float32)

    def of_block(rows):
        entries = columns(operator, rows) - matmul(f, adjoint(f[rows]))
        score = jnp.square(jnp.abs(entries).astype(np.float32)) * scale[:, None]
        # In units of R_ii a score is the square of a correlation: no inf, and no denormal number.
        score = jnp.clip(score * scale[rows], 1e-30, 1.0)
        score = jnp.where(order[:, None] < order[rows], score, 0)
        values, at = lax.top_k(score.T, m)
        return jnp.where(values > 0, at, n).astype(jnp.int32)

    return by_rows(of_block, n, n)


@one_by_one
def _last_column(r: Inexact[Array, "s s"]) -> Inexact[Array, " s"]:
    """C^{-H} e_last for R = C C^H; NaN if R is not positive definite."""
    factor = jnp.linalg.cholesky(r)
    unit = jnp.zeros((len(r), 1), r.dtype).at[-1].set(1)
    solve = partial(lax.linalg.triangular_solve, factor, unit, left_side=True, lower=True)
    return solve(transpose_a=True, conjugate_a=True)[:, 0]


def columns_of_factor(
    operator: lx.AbstractLinearOperator,
    f: Inexact[Array, "n r"],
    sets: Int[Array, "n s"],
    jitter: Real[Array, " n"],
) -> Inexact[Array, "n s"]:
    """The columns l_i of L, at the places `sets` (n: not in use); diag R gets the `jitter`."""
    n, s = sets.shape

    def of_block(rows):
        used = sets[rows] < n
        at = jnp.minimum(sets[rows], n - 1)
        parts = jnp.where(used[:, :, None], f[at], 0)
        r = submatrices(operator, at) - einsum("bar,bcr->bac", parts, jnp.conj(parts))
        r = jnp.where(used[:, :, None] & used[:, None, :], r, 0)
        eye = jnp.eye(s, dtype=bool)
        own = jnp.where(used, jnp.diagonal(r, axis1=1, axis2=2).real + jitter[at], 1)
        own = jnp.maximum(own, jnp.where(used, jitter[at], 1))
        r = jnp.where(eye, own[:, :, None].astype(r.dtype), r)
        found = jax.vmap(_last_column)(r)
        alone = jnp.where(eye[-1], 1 / jnp.sqrt(own[:, -1:]), 0).astype(r.dtype)
        fails = ~jnp.all(jnp.isfinite(found), axis=1, keepdims=True)
        return jnp.where(used, jnp.where(fails, alone, found), 0)

    return by_rows(of_block, n, s * (s + f.shape[1]))


def sparse_factors(
    operator: lx.AbstractLinearOperator,
    f: Inexact[Array, "n r"],
    sets: Int[Array, "n s"],
    diagonal: Real[Array, " n"],
    jitter: Real[Array, " n"],
) -> SparseFactors:
    """P from F and the neighbourhoods s_i: see above."""
    if sets.shape[1] == 1:  # no entry is needed but the diagonal
        left = diagonal - jnp.sum(square_of(f), axis=1)
        values = (1 / jnp.sqrt(jnp.maximum(left, 0) + jitter))[:, None].astype(f.dtype)
    else:
        values = columns_of_factor(operator, f, sets, jitter)
    sets = jnp.minimum(sets, len(f) - 1)
    g = gathered_by(sets, values, f)  # G
    eye = jnp.eye(f.shape[1], dtype=f.dtype)
    c = lower_cholesky(matmul(adjoint(g), g) + eye)
    solve = partial(lax.linalg.triangular_solve, c, left_side=True, lower=True)
    inner = lax.linalg.triangular_solve(c + eye, eye, left_side=True, lower=True)  # X
    core = solve(inner, transpose_a=True, conjugate_a=True)  # J
    logs = jnp.sum(jnp.log(values[:, -1].real))
    log_det = 2 * (jnp.sum(jnp.log(jnp.diagonal(c).real)) - logs)
    one = jnp.ones_like(log_det)
    factors = SparseFactors(sets, values, g, core, log_det, one, one)
    row, top = _sizes(f, factors.unit(), diagonal)
    return dataclasses.replace(factors, row=row, top=top)


def _sizes(f: Array, root: Array, diagonal: Array) -> tuple[Array, Array]:
    """Returns (largest row, largest eigenvalue) of A in units of `root` (see `AbstractFactors`),
    from products of F F^H with a few vectors.
    """
    scaled = f / root[:, None].astype(f.dtype)
    # Vectors whose entries look random: the sizes of rows need not be unbiased.
    number = jnp.arange(len(f), dtype=root.dtype)[:, None] + 1
    probes = jnp.sqrt(2.0) * jnp.cos(
        jnp.square(number) * jnp.arange(1, 9, dtype=root.dtype)
    ).astype(f.dtype)
    products = matmul(scaled, matmul(adjoint(scaled), probes))
    own = jnp.max(diagonal / jnp.square(root))
    row = jnp.sqrt(jnp.max(jnp.mean(square_of(products), axis=1)))
    unit = scale_of(products)
    again = matmul(scaled, matmul(adjoint(scaled), products / unit))
    top = jnp.sqrt(jnp.max(square_norms(again) / jnp.maximum(square_norms(products / unit), 1e-30)))
    return jnp.maximum(row, own), jnp.maximum(top, own)


class _Kernel(NamedTuple):
    """K' = (A - D) / (root root^T), known by its diagonal and its columns."""

    operator: lx.AbstractLinearOperator
    root: Real[Array, " n"]
    shift: Real[Array, ""]  # of K'
    diagonal: Real[Array, " n"]  # of K'

    def columns(self, pivots: Int[Array, " b"]) -> Inexact[Array, "n b"]:
        """Columns of K'."""
        found = columns(self.operator, pivots)
        root = self.root.astype(found.dtype)
        found = found / (root[:, None] * root[pivots])
        return found - jnp.where(rows_of(pivots, root.size), self.shift.astype(found.dtype), 0)


def kernel_of(
    key: PRNGKeyArray, operator: lx.AbstractLinearOperator, diagonal: Array
) -> tuple[_Kernel, Bool[Array, ""]]:
    """Returns (K', whether D is known)."""
    scaling = scaling_of(operator)
    eps = BlockOperator(operator).eps
    relative = diagonal / jnp.square(scaling.relative)
    unit, known = scaling.fixed(relative, eps)
    root = jnp.sqrt(unit) * scaling.relative
    kernel = _Kernel(operator, root, jnp.zeros_like(unit), relative / unit)
    shift = jnp.where(known, jnp.ones_like(unit), 0)
    theta = flat_part(key, kernel, eps)
    # Next to a known shift only a far larger one matters.
    known &= theta <= 10 * shift
    shift = jnp.where(known, shift, theta)
    return kernel._replace(shift=shift, diagonal=kernel.diagonal - shift), known


def flat_part(key: PRNGKeyArray, kernel: _Kernel, eps: float) -> Real[Array, ""]:
    """The noise inside of a matrix, 0 if none is seen: lambda - r, if r <= lambda / 2. lambda and w
    are the smallest eigenpair of a principal submatrix C[P] of columns C, a Ritz pair of K' on unit
    vectors, and r = ||C w - lambda w_P|| its residual.
    """
    n = kernel.root.size
    m = max(1, min(n // 4, 96))  # one in each of m equal parts of all indices
    places = jax.random.uniform(numbered(key, n + 1), (m,)) * (n // m)
    chosen = lax.optimization_barrier(jnp.arange(m) * (n // m) + places.astype(np.int32))
    found = kernel.columns(chosen)
    core = found[chosen]  # C[P]
    values, vectors = eigh((core + adjoint(core)) / 2)
    smallest = values[0]  # lambda
    vector = vectors[:, :1]  # w
    inside = jnp.zeros((n, 1), found.dtype).at[chosen].set(smallest.astype(found.dtype) * vector)
    size = jnp.sqrt(square_norms(matmul(found, vector) - inside))[0]  # r
    counts = (smallest > 16 * eps * jnp.maximum(values[-1], 0)) & (size <= smallest / 2)
    return jnp.where(counts, smallest - size, 0)


def prepare(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    rank: int,
    m: int,
    diagonal: Real[Array, " n"] | None = None,
) -> tuple[BuiltPreconditioner, Int[Array, ""]]:
    """Returns (P with F of at most this rank and with m neighbours, the number of columns that were
    read). `diagonal` is that of A, or None if it is known.
    """
    block = BlockOperator(operator)
    n = block.n
    eps = block.eps
    diagonal = stored_diagonal(operator) if diagonal is None else diagonal
    assert diagonal is not None
    diagonal = jnp.asarray(diagonal).real
    # Columns that are products are read one after the other.
    kernel, known = kernel_of(key, operator, diagonal)
    together = min(128, max(1, rank // 8)) if m or has_entries(operator) else 1
    none = no_pivots(kernel.diagonal, rank, together, block.dtype)
    # Entries were rounded before the shift was subtracted.
    none = none._replace(largest=none.largest + kernel.shift)
    enough = jnp.where(known, float(np.sqrt(eps)) * n, 0)
    pivoted = pivoted_cholesky(key, kernel.columns, none, rank, block=together, enough=enough)
    f = pivoted.rows[:rank].T * kernel.root[:, None].astype(block.dtype)  # F
    left = jnp.maximum(diagonal - jnp.sum(square_of(f), axis=1), 0)  # diag R
    jitter = 16 * eps * jnp.maximum(diagonal, jnp.finfo(diagonal.dtype).tiny)
    jitter = jitter + jnp.where(known, 0, jnp.mean(left) / 100)
    left = left + jitter
    near = ((jnp.mean(pivoted.left) > SMALL) | ~known) & (m > 0)
    own = jnp.arange(n, dtype=jnp.int32)[:, None]
    chosen = jnp.full((n, m), n, jnp.int32)
    if m:
        order = jax.random.bits(numbered(key, n), (n,))
        chosen = if_any(near, lambda: neighbours(operator, f, left, order, m), chosen)
    # Where L is diagonal, P = F F^H + D + E with 0 <= E, and A >= F F^H + D.
    bounded = known & split_shift(operator).is_positive & ~near
    noise = kernel.shift * jnp.square(kernel.root)
    sets = jnp.concatenate([chosen, own], axis=1)
    factors = sparse_factors(operator, f, sets, diagonal, jitter)
    floor = jnp.where(bounded, jnp.min(noise / left), jnp.nan)
    size = jnp.where(pivoted.largest > 0, pivoted.largest, 1)
    skew = skew_of(pivoted.skew, size, n, eps)
    wrong = pivoted.apart / size / (64 * eps)
    seen = jnp.sum(pivoted.left), pivoted.apart, pivoted.skew
    evidence = evidence_of(*seen, skew=skew, wrong_diagonal=wrong)
    return BuiltPreconditioner(factors, floor, jnp.ones_like(floor), evidence), pivoted.columns

r"""Low rank plus a sparse inverse factor: the preconditioner of operators that know their entries.

*The low-rank part.* With the diagonal part D that is written down (`K + s I`, `K + D`), or a
multiple of the identity that a few columns show (`flat_part`), pivoted Cholesky factorisation of
K = A - D gives F, n x r, and F F^H <= K.

*The sparse factor.* For R = A - F F^H a factor L with R^{-1} ~ L L^H. The points come in an
order that looks random. s_i are the m points before i whose correlation |R_ij| / sqrt(R_ii R_jj)
with i is largest, and i itself, which is last. With R[s_i, s_i] = C C^H, column i of L has entries

    l_i = C^{-H} e_last     at s_i.

L is nearest to R^{-1} in Kullback-Leibler divergence (F. Schaefer, M. Katzfuss, H. Owhadi, 2020,
arXiv:2004.14455): Vecchia's approximation.

*Sparse matrices* of whose diagonal, in its own unit, F leaves more than half do without F: what
matters of them are small eigenvalues. Their inverses are not sparse: neighbours are the points that
|A| + |A D^{-1} A| / 2 + ... couples most, with D the diagonal of A.

`factors` has the algebra of both.

*Rounding.* R is a difference. Its diagonal is raised by some eps times that of A, and, where D is
not known, by a hundredth of its mean, as R is 0 at the pivots. A neighbourhood whose factorisation
still fails counts as uncorrelated. P is then a little different, and still what its factors say.
"""

from collections.abc import Callable
from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.control_flow import if_any
from .._core.derivatives import change_of, constant
from .._core.estimate import evidence_of, skew_of
from .._core.precision import adjoint, einsum, matmul, square_norms, square_of
from .._linalg.factorisations import (
    cholesky_solve,
    eigh,
    generic,
    lower_cholesky,
    lower_solve,
    one_by_one,
)
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import (
    columns,
    has_entries,
    scaling_of,
    split_shift,
    stored_diagonal,
    submatrices,
)
from .._sketch.pivoted_cholesky import no_pivots, pivoted_cholesky, rows_of
from .factors import BuiltPreconditioner, Factors, by_rows, factors_of, gathered_by

#: Unless the mean of what is left of the diagonal is below this share of D, neighbours matter.
SMALL = 3e-3

#: The steps from a point to its neighbours in a sparse matrix without F.
STEPS = 3


def neighbours(
    operator: lx.AbstractLinearOperator,
    f: Inexact[Array, "n r"],
    left: Real[Array, " n"],
    order: Real[Array, " n"],
    m: int,
    steps: Int[Array, ""] | None = None,
) -> Int[Array, "n m"]:
    """The m points before each that correlate most with it under R, whose diagonal is `left`, or,
    if `steps` are given, are coupled most in so many steps; n where there are fewer.
    """
    n = len(order)
    unit = 1 / jnp.sqrt(left)
    half = 0.5 / left[:, None]

    def step(_, state):
        power, total = state
        power = BlockOperator(operator).mm(half.astype(power.dtype) * power)
        return power, total + jnp.abs(power)

    def of_block(rows):
        # Row by row, as a sum of products is faster to transpose than scores are.
        entries = columns(operator, rows).T - matmul(jnp.conj(f[rows]), f.T)
        if steps is not None:  # |A| + |A D^{-1} A| / 2 + ...
            start = entries.T, jnp.abs(entries.T)
            entries = lax.fori_loop(1, steps, step, start)[1].T
        correlations = jnp.abs(entries) * unit * unit[rows, None]
        # No inf, and no denormal number, which are slow.
        score = jnp.clip(correlations.astype(np.float32), 1e-30, 1e30)
        score = jnp.where(order < order[rows, None], score, 0)
        values, places = lax.top_k(score, m)
        return jnp.where(values > 0, places, n).astype(jnp.int32)

    return by_rows(of_block, n, n)


@one_by_one
def _of_neighbourhood(r: Inexact[Array, "s s"]) -> tuple[Array, Array]:
    """Returns (C^{-H} e_last, R^{-1}) for R = C C^H; NaN if R is not positive definite."""
    factor = lower_cholesky(r)
    eye = jnp.eye(len(r), dtype=r.dtype)
    return lower_solve(factor, eye[:, -1:], adjoint=True)[:, 0], cholesky_solve(factor, eye)


def columns_of_factor(
    operator: lx.AbstractLinearOperator,
    f: Inexact[Array, "n r"],
    sets: Int[Array, "n s"],
    left: Real[Array, " n"],
) -> tuple[Inexact[Array, "n s"], Inexact[Array, "n s s"]]:
    """Returns (the columns l_i of L, at the places `sets` (n: not in use); R[s_i, s_i]^{-1}).
    `left` is the diagonal of R. If R[s_i, s_i] is not positive definite, or i has no neighbours,
    l_i has its last entry alone, R_ii^{-1/2}, and the inverse its last one, 1 / R_ii.
    """
    n, s = sets.shape
    alone = jnp.zeros((n, s), f.dtype).at[:, -1].set((1 / jnp.sqrt(left)).astype(f.dtype))

    def of_block(rows):
        used = sets[rows] < n
        places = jnp.minimum(sets[rows], n - 1)
        parts = jnp.where(used[:, :, None], f[places], 0)
        r = submatrices(operator, places) - einsum("bar,bcr->bac", parts, jnp.conj(parts))
        r = jnp.where(used[:, :, None] & used[:, None, :], r, 0)
        own = jnp.where(used, left[places], 1).astype(r.dtype)
        r = jnp.where(jnp.eye(s, dtype=bool), own[:, :, None], r)
        found, inverse = jax.vmap(_of_neighbourhood)(r)
        fails = ~jnp.all(jnp.isfinite(found), axis=1)
        found = jnp.where(fails[:, None], alone[rows], jnp.where(used, found, 0))
        return found, jnp.where(fails[:, None, None], _squares(found), inverse)

    def all_blocks():
        return by_rows(of_block, n, s * (s + f.shape[1]))

    return if_any(jnp.any(sets[:, :-1] < n), all_blocks, (alone, _squares(alone)))


def _squares(values: Inexact[Array, "b s"]) -> Inexact[Array, "b s s"]:
    return values[:, :, None] * values[:, None, :]


def following_columns(
    operator: lx.AbstractLinearOperator,
    f: Inexact[Array, "n r"],
    sets: Int[Array, "n s"],
    jitter: Real[Array, " n"],
    values: Inexact[Array, "n s"],
    inverse: Inexact[Array, "n s s"],
) -> Inexact[Array, "n s"]:
    """The columns l_i (`columns_of_factor`), as functions of A, F and the jitter, with the first
    derivative

        dl = (l^H dR l) l / 2 - R^{-1} dR l,

    from dC^{-1} = -Phi(X) C^{-1}, X = C^{-1} dR C^{-H}, where Phi takes the lower triangle and half
    of the diagonal: the last column of Phi(X)^H is that of X less half of its last entry. At s_i,
    R l_i = A l_i + jitter l_i - F conj(g_i), with g_i row i of G = L^H F: nothing of size n s r is
    kept.
    """
    n, s = sets.shape
    places = jnp.minimum(sets, n - 1)

    def of_block(rows):
        return einsum("bac,bc->ba", submatrices(operator, places[rows]), values[rows])

    g = gathered_by(places, values, f)
    known = lax.map(jax.checkpoint(lambda place: jnp.sum(f[place] * jnp.conj(g), axis=1)), places.T)
    images = by_rows(jax.checkpoint(of_block), n, s * s) + jitter[places] * values - known.T
    change = jnp.where(sets < n, change_of(images), 0)
    forms = jnp.sum(jnp.conj(values) * change, axis=1, keepdims=True).real
    return values + forms * values / 2 - einsum("bij,bj->bi", inverse, change)


def jitter_of(
    left: Real[Array, " n"], diagonal: Real[Array, " n"], known: Bool[Array, ""], eps: float
) -> Real[Array, " n"]:
    """What is added to diag R: see above. `left` is that of R, `diagonal` that of A."""
    jitter = 16 * eps * jnp.maximum(diagonal, jnp.finfo(diagonal.dtype).tiny)
    return jitter + jnp.where(known, 0, jnp.mean(left) / 100)


def left_of(f: Inexact[Array, "n r"], diagonal: Real[Array, " n"]) -> Real[Array, " n"]:
    """The diagonal of R."""
    return jnp.maximum(diagonal - jnp.sum(square_of(f), axis=1), 0)


def sparse_factors(
    operator: lx.AbstractLinearOperator,
    f: Inexact[Array, "n r"],
    sets: Int[Array, "n s"],
    diagonal: Real[Array, " n"],
    jitter: Real[Array, " n"],
    moving: bool = False,
) -> Factors:
    """P from F and the neighbourhoods s_i: see above; with a first derivative if `moving`."""
    left = left_of(f, diagonal) + jitter
    values, inverse = columns_of_factor(*constant((operator, f, sets, left)))
    if moving:
        values = following_columns(operator, f, sets, jitter, values, inverse)
    used = jnp.minimum(sets, len(f) - 1)
    return factors_of(f, used, values, diagonal, from_entries=True)


@final
class Structure(eqx.Module):
    """What is held of P while the operator changes: pivots and neighbourhoods."""

    pivots: Int[Array, " r"]  # n where not in use
    sets: Int[Array, "n s"]
    known: Bool[Array, ""]  # whether D is more than rounding; if not, F has all of A at the pivots

    def factors(self, operator: lx.AbstractLinearOperator, moving: bool) -> Factors:
        """P of this operator (see `sparse_factors`), a smooth function of its entries: F F^H is K
        at the pivots but for a multiple of the identity that keeps rounding errors out of its
        Cholesky factor.
        """
        eps = BlockOperator(operator).eps
        n = len(self.sets)
        used = self.pivots < n
        pivots = jnp.minimum(self.pivots, n - 1)
        diagonal = _diagonal_of(operator)
        noise = jnp.where(self.known, split_shift(operator).exact.real, 0)
        found = columns(operator, pivots)
        found = found - jnp.where(rows_of(pivots, n), noise[pivots].astype(found.dtype), 0)
        found = jnp.where(used, found, 0)
        least = 4 * eps * len(pivots) * jnp.max(diagonal)
        core = jnp.where(used[:, None], found[pivots], 0)
        root = lower_cholesky(core + jnp.diag(jnp.where(used, least, 1)).astype(core.dtype))
        f = adjoint(lower_solve(root, adjoint(found)))
        jitter = jitter_of(left_of(f, diagonal), diagonal, self.known, eps)
        return sparse_factors(operator, f, self.sets, diagonal, jitter, moving)


def _diagonal_of(operator: lx.AbstractLinearOperator) -> Real[Array, " n"]:
    """The diagonal, with positive numbers for all others: products with M will tell of them."""
    diagonal = stored_diagonal(operator)
    assert diagonal is not None  # `check` of a preconditioner has seen it
    return jnp.where(diagonal.real == 0, 1, jnp.abs(diagonal.real))


def flat_part(
    order: Real[Array, " n"], columns_of: Callable[[Array], Array], eps: float
) -> Real[Array, ""]:
    """The noise inside of a matrix, 0 if none is seen: lambda - 2 r, where positive. lambda and
    w are the smallest eigenpair of a principal submatrix C[P] of columns C, a Ritz pair on unit
    vectors, and r = ||C w - lambda w_P|| its residual. (An eigenvalue is within r of lambda, and
    the smallest may be below.)
    """
    n = len(order)
    m = max(1, min(n // 4, 96))  # the first in each of m equal parts of all indices
    firsts = jnp.argmin(order[: m * (n // m)].reshape(m, -1), axis=1)
    chosen = lax.optimization_barrier(jnp.arange(m) * (n // m) + firsts)
    found = columns_of(chosen)
    core = found[chosen]  # C[P]
    values, vectors = eigh((core + adjoint(core)) / 2)
    smallest = values[0]  # lambda
    vector = vectors[:, :1]  # w
    multiple = jnp.zeros((n, 1), found.dtype).at[chosen].set(smallest.astype(found.dtype) * vector)
    size = jnp.sqrt(square_norms(matmul(found, vector) - multiple))[0]  # r
    counts = (smallest > 16 * eps * jnp.maximum(values[-1], 0)) & (size <= smallest / 2)
    return jnp.where(counts, smallest - 2 * size, 0)


def prepare(
    key: PRNGKeyArray, operator: lx.AbstractLinearOperator, rank: int, m: int
) -> tuple[BuiltPreconditioner, Int[Array, ""]]:
    """Returns (P with F of at most this rank and with m neighbours, if there are so many, the
    number of columns that were read).
    """
    block = BlockOperator(operator)
    n = block.n
    m = max(1, min(m, n - 1))
    eps = block.eps
    diagonal = _diagonal_of(operator)
    # A' = A / (root root^T), in the unit of D, and K' = A' - shift I.
    scaling = scaling_of(operator)
    relative = diagonal / jnp.square(scaling.relative)
    unit, known = scaling.fixed(relative, eps)
    root = jnp.sqrt(unit) * scaling.relative

    def scaled_columns(pivots):
        found = columns(operator, pivots)
        return found / (root[:, None] * root[pivots]).astype(found.dtype)

    order = generic(n, 1, jnp.float32)[:, 0]
    theta = flat_part(order, scaled_columns, eps)
    known &= theta <= 10  # next to a known shift only a far larger one matters
    shift = jnp.where(known, 1, theta)

    def kernel_columns(pivots):
        found = scaled_columns(pivots)
        return found - jnp.where(rows_of(pivots, n), shift.astype(found.dtype), 0)

    together = min(128, max(1, rank // 8))
    none = no_pivots(relative / unit - shift, rank, together, block.dtype)
    # Entries were rounded before the shift was subtracted.
    none = none._replace(largest=none.largest + shift)
    enough = jnp.where(known, float(np.sqrt(eps)) * n, 0)
    pivoted = pivoted_cholesky(key, kernel_columns, none, rank, block=together, enough=enough)
    f = pivoted.rows[:rank].T * root[:, None].astype(block.dtype)  # F
    sparse = not has_entries(operator)
    alone = sparse & (jnp.mean(left_of(f, diagonal) / diagonal) > 0.5)  # without F
    is_coupled = (jnp.mean(pivoted.left) > SMALL) | ~known | alone
    known |= alone
    f = jnp.where(alone, 0, f)
    pivots = jnp.where(alone, n, pivoted.pivots[:rank])
    steps = jnp.where(alone, STEPS, 1) if sparse else None
    left = left_of(f, diagonal)
    jitter = jitter_of(left, diagonal, known, eps)
    left = left + jitter
    none_near = jnp.full((n, m), n, jnp.int32)
    chosen = if_any(is_coupled, lambda: neighbours(operator, f, left, order, m, steps), none_near)
    sets = jnp.concatenate([chosen, jnp.arange(n, dtype=jnp.int32)[:, None]], axis=1)
    factors = sparse_factors(operator, f, sets, diagonal, jitter)
    skew = skew_of(pivoted.skew, pivoted.largest, n, eps)
    evidence = evidence_of(jnp.sum(pivoted.left), pivoted.mismatch, pivoted.skew, skew=skew)
    structure = Structure(pivots, sets, known)
    return BuiltPreconditioner(factors, jnp.ones_like(unit), evidence, structure), pivoted.columns

"""The LAPACK calls, all in one place.

jaxlib runs a *batched* LAPACK call in parallel on XLA's own thread pool, and blocks one of the
threads meanwhile. Two such calls that do not depend on each other then deadlock a pool of two
threads (seen with jaxlib 0.10.2 on two cores: `dtrsm` beside `dorgqr`, both vmapped). Under
`vmap` on a CPU the calls are therefore made one after the other, by a loop over the batch. Other
platforms batch them as usual.

The threads of OpenBLAS, which is behind these calls, keep a core busy for some 25 ms after a call
that used several: on two cores, the products with the operator that follow take 1.6 times as long
(n = 4000). Cholesky factors of a few hundred columns never do this; triangular solves with 32
columns or more and QR factorisations of tall blocks always do. On CPUs these are therefore written
here in terms of matrix products and Cholesky factors, where that is as accurate.
"""

import math
from collections.abc import Callable
from functools import cache, partial, wraps
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Inexact, Real

from .._core.precision import matmul
from .._probes.random import numbered
from .._probes.samplers import RademacherSampler
from .sharded.tsqr import partitioned, tall_qr_rule


def _gram(block: Inexact[Array, "n m"]) -> Inexact[Array, "m m"]:
    return matmul(jnp.conj(block.T), block)


def diagonal_of(h: Inexact[Array, "m m"]) -> Inexact[Array, " m"]:
    """The diagonal, as a slice: unlike a gather, it costs no kernel of its own."""
    return h.reshape(-1)[:: h.shape[0] + 1]


@cache
def _in_turn(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` on each entry of a batch, one after the other."""

    def looped(*args):
        if args[0].shape[0] > 1:
            return lax.map(lambda entry: fn(*entry), args)
        return jtu.tree_map(lambda x: x[None], fn(*[x[0] for x in args]))

    return looped


def _one_by_one(
    fn: Callable[..., Any], elsewhere: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """`fn`, looped over a batch, on CPUs; `elsewhere` (by default `fn`) on other platforms."""
    looped = sequential_vmap(fn)

    @wraps(fn)
    def dispatch(*args):
        return lax.platform_dependent(*args, cpu=looped, default=elsewhere or fn)

    return dispatch


#: From these sizes on OpenBLAS uses threads.
_MANY_COLUMNS, _LARGE_BLOCK = 32, 2**17

#: From this size on 25 ms do not matter any more.
_HUGE_BLOCK = 2**19


def _substitute(f: Inexact[Array, "n m"], r: Inexact[Array, "m m"]) -> Inexact[Array, "n m"]:
    """F R^{-1} by substitution, some columns at a time: with the diagonal D of R,

        X_j = F_j D_j^{-1} - X_{<j} (R D^{-1})_{<j,j} - X_j (R_jj D_j^{-1} - I).

    No inverse of a block is formed, so that the residual F - X R is that of a LAPACK solve.
    """
    n, m = f.shape
    # One at a time is compiled in two thirds of the time; four are faster where F is large.
    width = 4 if n * m >= _LARGE_BLOCK else 1
    padding = -m % width
    diagonal = diagonal_of(r)
    f, r = (jnp.pad(x / diagonal, ((0, 0), (0, padding))) for x in (f, r))
    r = jnp.pad(r, ((0, padding), (0, 0)))
    # What lies above the diagonal blocks: with it, X can take the place of F, column by column.
    place = jnp.arange(m + padding)
    above = jnp.where(place[:, None] < place[None, :] // width * width, r, jnp.zeros_like(r))

    def next_columns(j, x):
        start, first = j * width, jnp.zeros((), j.dtype)
        columns = lax.dynamic_slice(above, (first, start), (m + padding, width))
        block = lax.dynamic_slice(r, (start, start), (width, width))
        rest = lax.dynamic_slice(x, (first, start), (n, width)) - matmul(x, columns)
        solved = []
        for c in range(width):
            column = rest[:, c]
            for b in range(c):
                column = column - solved[b] * block[b, c]
            solved.append(column)
        return lax.dynamic_update_slice(x, jnp.stack(solved, axis=1), (first, start))

    # Unsigned: an index that may be negative is one more thing to compile.
    steps = jnp.uint32(0), jnp.uint32((m + padding) // width)
    return lax.fori_loop(*steps, next_columns, f)[:, :m]


def _divide(f: Inexact[Array, "n m"], r: Inexact[Array, "m m"]) -> Inexact[Array, "n m"]:
    from jax.scipy.linalg import solve_triangular  # imported only here: it takes time

    return solve_triangular(r, f.T, trans="T", lower=False).T


def _householder(block):
    q, r = jnp.linalg.qr(block)
    return q, r


def _cholesky_qr(block: Inexact[Array, "n m"]) -> tuple[Array, Array]:
    """The reduced QR factorisation of a block Y from Cholesky factors of Gram matrices, or by
    Householder's method where Y is too ill-conditioned for that.

    With C^H C = Y^H Y, Q = Y C^{-1} is orthonormal up to eps cond(Y)^2. Where that is a few eps
    (random probes), C may be inverted; the same once more takes what is below 1 to eps. An upper
    bound of cond(Y)^2 decides: ||X||_2^2 <= ||X||_1 ||X||_inf for both C and C^{-1}.
    """
    n, m = block.shape
    divide = _divide if n * m >= _HUGE_BLOCK else _substitute

    def factorise(y):
        factor = jnp.linalg.cholesky(_gram(y), upper=True)
        return factor, divide(jnp.eye(m, dtype=y.dtype), factor)

    def square_bound(x):
        size = jnp.abs(x)
        return jnp.max(jnp.sum(size, axis=0)) * jnp.max(jnp.sum(size, axis=1))

    def twice():
        q = divide(block, factor)
        second, inverse_second = factorise(q)
        return matmul(q, inverse_second), matmul(second, factor)

    factor, inverse = factorise(block)
    square = square_bound(factor) * square_bound(inverse)
    # Not in the first two where there is NaN.
    low, high = square <= 100, square <= 0.1 / jnp.finfo(block.dtype).eps
    branch = jnp.where(low, 0, jnp.where(high, 1, 2))
    return lax.switch(
        branch, [lambda: (matmul(block, inverse), factor), twice, lambda: _householder(block)]
    )


def _whitened_qr(
    block: Inexact[Array, "n m"], before: Inexact[Array, "m m"]
) -> tuple[Array, Array]:
    """The factorisation of `block = Y before`, with a triangular `before` that leaves Y in a better
    condition, in the same way. Both passes are checked, and nothing is assumed.
    """
    m = block.shape[1]
    eps = jnp.finfo(block.dtype).eps

    def step(y):
        factor = jnp.linalg.cholesky(_gram(y), upper=True)
        return _divide(y, factor), factor

    def defect(q):
        gram = _gram(q)
        largest = jnp.max(jnp.abs(gram - jnp.eye(m, dtype=q.dtype)))
        # A maximum may pass over NaN; a sum does not.
        return jnp.where(jnp.isfinite(jnp.sum(gram)), largest, jnp.inf)

    def again(q, r):
        second, factor = step(q)
        good = defect(second) <= 20 * eps
        return lax.cond(good, lambda: (second, matmul(factor, r)), lambda: _householder(block))

    q, r = step(_divide(block, before))
    r = matmul(r, before)
    first = defect(q)
    return lax.cond(
        first <= 20 * eps,
        lambda: (q, r),
        lambda: lax.cond(first <= 0.5, lambda: again(q, r), lambda: _householder(block)),
    )


#: Rows of random signs that are drawn at once.
_SIGNS = 2**15


def _sketched_qr(block: Inexact[Array, "n m"]) -> tuple[Array, Array]:
    """The same for a block of any condition that its dtype can tell from singular.

    With S of 2 m rows of random signs and S Y = Q_0 R_0, the condition of Y R_0^{-1} is at most
    (1 + sqrt(1/2)) / (1 - sqrt(1/2)) = 6 for Gaussian S, and about that for signs, whatever that of
    Y is. All that touches n rows are products and triangular solves, which GPUs are made for.

    J. E. Garrison, I. C. F. Ipsen, *A randomized preconditioned Cholesky-QR algorithm*, 2024,
    arXiv:2406.11751.
    """
    n, m = block.shape
    signs, key = RademacherSampler(), jr.key(0)

    def part(i, rows):
        omega = signs(numbered(key, i), rows.shape[0], 2 * m, block.real.dtype)
        return matmul(omega.T.astype(block.dtype), rows)

    def add(i, total):
        return total + part(i, lax.dynamic_slice_in_dim(block, i * _SIGNS, _SIGNS))

    whole = n // _SIGNS
    sketch = part(whole, block[whole * _SIGNS :])
    if whole:
        sketch = lax.fori_loop(0, whole, add, sketch)
    r = jnp.linalg.qr(sketch / math.sqrt(2 * m), mode="r")
    return _whitened_qr(block, r)


@jax.jit
def _qr_of_stack(blocks: Inexact[Array, "b n m"]) -> tuple[Array, Array]:
    _, n, m = blocks.shape
    large = n >= 4 * m and n * m >= _LARGE_BLOCK
    on_cpu = _cholesky_qr if large else _householder
    elsewhere = _in_turn(_sketched_qr) if large else _householder
    return lax.platform_dependent(blocks, cpu=_in_turn(on_cpu), default=elsewhere)


_qr = partitioned(
    "tall_qr",
    _qr_of_stack,
    tall_qr_rule(_qr_of_stack),
    "b n m -> b n m, b k l",
    whole=("m", "k", "l"),
)


def qr(block: Inexact[Array, "n m"]) -> tuple[Inexact[Array, "n m"], Inexact[Array, "m m"]]:
    """The reduced QR factorisation. Rows that live on several devices stay there."""
    return _qr(block)


@_one_by_one
def complement(q: Inexact[Array, "n m"]) -> Inexact[Array, "n n-m"]:
    """An orthonormal basis of what is orthogonal to the (orthonormal) columns of q."""
    return jnp.linalg.qr(q, mode="complete")[0][:, q.shape[1] :]


@_one_by_one
def cholesky(h: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The upper factor C of a Hermitian H = C^H C; NaN where it has none."""
    return jnp.linalg.cholesky(h, upper=True)


def lower_cholesky(a: Inexact[Array, "n n"]) -> Inexact[Array, "n n"]:
    """The lower factor L of the Hermitian part of a large matrix, L L^H; NaN where it has none."""
    return lax.linalg.cholesky(a)


def cholesky_solve(
    factor: Inexact[Array, "n n"], rhs: Inexact[Array, "n c"]
) -> Inexact[Array, "n c"]:
    """A^{-1} times a block, from the lower factor L of A = L L^H."""
    solve = partial(lax.linalg.triangular_solve, factor, left_side=True, lower=True)
    return solve(solve(rhs), transpose_a=True, conjugate_a=True)


#: Larger triangular matrices are inverted by blocks: as many to a side as the second number.
_SMALL_TRIANGLE, _NUM_BLOCKS = 1024, 5


def cholesky_inverse(
    factor: Inexact[Array, "n n"], scale: Real[Array, ""]
) -> Inexact[Array, "n n"]:
    """(scale A)^{-1}, from the lower factor L of A = L L^H.

    With X = L^{-1}, by blocks, X_ij = -X_ii sum_{j <= k < i} L_ik X_kj, and (X^H X)_ij =
    sum_{k >= i} X_ki^H X_kj for j <= i: products that leave out the blocks of zeros, and that the
    machine does faster than the solves with L (whose results would have to be laid out again).
    """
    n, num_blocks = len(factor), _NUM_BLOCKS if len(factor) > _SMALL_TRIANGLE else 1
    ends = [n * i // num_blocks for i in range(num_blocks + 1)]
    blocks = [slice(*pair) for pair in pairwise(ends)]

    rows: list[Array] = []  # block i of the rows of X, up to the diagonal
    for i, block in enumerate(blocks):
        eye = jnp.eye(block.stop - block.start, dtype=factor.dtype)
        row = [lax.linalg.triangular_solve(factor[block, block], eye, left_side=True, lower=True)]
        if i:
            terms = (
                [matmul(factor[block, blocks[k]], rows[k][:, blocks[j]]) for k in range(j, i)]
                for j in range(i)
            )
            row.insert(0, -matmul(row[0], jnp.concatenate([sum(each) for each in terms], axis=1)))
        rows.append(jnp.concatenate(row, axis=1))

    lower = [
        sum(matmul(jnp.conj(row[:, block].T), row[:, : block.stop]) for row in rows[i:])
        / scale.astype(factor.dtype)
        for i, block in enumerate(blocks)
    ]
    full = [
        jnp.concatenate([lower[i], *(jnp.conj(row[:, block].T) for row in lower[i + 1 :])], axis=1)
        for i, block in enumerate(blocks)
    ]
    return jnp.concatenate(full)


@_one_by_one
def eigh(h: Inexact[Array, "m m"]) -> tuple[Real[Array, " m"], Inexact[Array, "m m"]]:
    """Eigenvalues and eigenvectors of a matrix that is Hermitian to the last bit; those of another
    one where it holds NaN or inf, which never get to LAPACK.
    """
    finite = jnp.where(jnp.isfinite(h), h, 0)
    values, vectors = jnp.linalg.eigh(finite, symmetrize_input=False)
    return values, vectors


@_one_by_one
def svd(a: Inexact[Array, "m m"]) -> tuple[Array, Array, Array]:
    """U, sigma and V^H of a square matrix; those of another one where it holds NaN or inf."""
    u, sigma, v_h = jnp.linalg.svd(jnp.where(jnp.isfinite(a), a, 0))
    return u, sigma, v_h


def _divide_each(*arrays: Array) -> tuple[Array, ...]:
    """The quotients of all blocks but the last, R, by R."""
    *blocks, r = arrays
    return tuple(_divide(block, r) for block in blocks)


def _divide_on_cpu(*arrays: Array) -> tuple[Array, ...]:
    """The same, of small blocks all at once: it is one loop to compile."""
    *blocks, r = arrays
    n, m = blocks[0].shape
    if n * m >= _HUGE_BLOCK:
        return _divide_each(*arrays)
    rows = jnp.concatenate(blocks)
    quotient = _divide(rows, r) if m < _MANY_COLUMNS else _substitute(rows, r)
    ends = accumulate(block.shape[0] for block in blocks)
    return tuple(jnp.split(quotient, list(ends)[:-1]))


@jax.jit
def _divide_stacks(*arrays: Array) -> tuple[Array, ...]:
    on_cpu, default = _in_turn(_divide_on_cpu), jax.vmap(_divide_each)
    return lax.platform_dependent(*arrays, cpu=on_cpu, default=default)


def _divide_rows_of(axes, n, *local):
    return _divide_stacks(*local)


_divide_rows = partitioned(
    "tall_divide", _divide_stacks, _divide_rows_of, "b n m, b m k -> b n k", whole=("m", "k")
)
_divide_rows_and_more = partitioned(
    "tall_divide_two",
    _divide_stacks,
    _divide_rows_of,
    "b n m, b p m, b m k -> b n k, b p k",
    whole=("m", "p", "k"),
)


def divide_by_upper(f: Inexact[Array, "n m"], r: Inexact[Array, "m m"]) -> Inexact[Array, "n m"]:
    """F R^{-1} for an upper triangular R."""
    return _divide_rows(f, r)[0]


def divide_two_by_upper(
    f: Inexact[Array, "n m"], g: Inexact[Array, "p m"], r: Inexact[Array, "m m"]
) -> tuple[Inexact[Array, "n m"], Inexact[Array, "p m"]]:
    """F R^{-1} and G R^{-1} for an upper triangular R. The rows of G are few."""
    return _divide_rows_and_more(f, g, r)

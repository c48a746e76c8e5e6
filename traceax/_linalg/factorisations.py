"""The LAPACK calls, all in one place.

jaxlib runs a *batched* LAPACK call in parallel on XLA's own thread pool, and blocks one thread of
this pool meanwhile. Two such calls that do not depend on each other can then deadlock a pool of two
threads (seen with jaxlib 0.10.2 on two cores: `dtrsm` beside `dorgqr`, both vmapped). Under
`vmap` on a CPU the calls are therefore made one after the other, by a loop over the lanes. Other
platforms batch them as usual.

These calls use OpenBLAS. After a call that used several threads, its threads keep a core busy for
some 25 ms: on two cores, the products with the operator that follow take 1.6 times as long
(n = 4000). Cholesky factorisations of a few hundred columns never cause this; triangular solves
with 32 columns or more and QR factorisations of tall blocks always do. On CPUs the latter two are
therefore made of matrix products and Cholesky factors here, wherever that is as accurate.
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
    """The diagonal, as a slice: unlike a gather, a slice takes no kernel of its own."""
    return h.reshape(-1)[:: h.shape[0] + 1]


@cache
def _in_turn(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` on each entry of the leading axis, one after the other."""

    def looped(*args):
        count = args[0].shape[0]
        if not isinstance(count, int) or count > 1:  # in `jax.export` it may be a symbol
            return lax.map(lambda entry: fn(*entry), args)
        return jtu.tree_map(lambda x: x[None], fn(*[x[0] for x in args]))

    return looped


def one_by_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    """On CPUs `fn` in a loop over lanes; on other platforms `fn` as it is."""
    looped = sequential_vmap(fn)

    @wraps(fn)
    def dispatch(*args):
        return lax.platform_dependent(*args, cpu=looped, default=fn)

    return dispatch


#: OpenBLAS uses several threads from these sizes on.
_MANY_COLUMNS, _LARGE_BLOCK = 32, 2**17

#: From this size on, the 25 ms (see above) do not matter any more.
_HUGE_BLOCK = 2**19


def _substitute(f: Inexact[Array, "n m"], r: Inexact[Array, "m m"]) -> Inexact[Array, "n m"]:
    """X = F R^{-1} by substitution, a few columns X_j at a time: with the diagonal D of R,

        X_j = F_j D_j^{-1} - X_{<j} (R D^{-1})_{<j,j} - X_j (R_jj D_j^{-1} - I).

    No block of R is inverted, so that the residual F - X R is as small as for a LAPACK solve.
    """
    n, m = f.shape
    # One column at a time compiles in two thirds of the time; four are faster if F is large.
    width = 4 if n * m >= _LARGE_BLOCK else 1
    padding = -m % width
    diagonal = diagonal_of(r)
    f, r = (jnp.pad(x / diagonal, ((0, 0), (0, padding))) for x in (f, r))
    r = jnp.pad(r, ((0, padding), (0, 0)))
    # R above its diagonal blocks, and 0 elsewhere: in products with it, columns of F that X has not
    # replaced yet do not count.
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

    # Unsigned, because code for negative indices would have to be compiled, too.
    steps = jnp.uint32(0), jnp.uint32((m + padding) // width)
    return lax.fori_loop(*steps, next_columns, f)[:, :m]


def _divide(f: Inexact[Array, "n m"], r: Inexact[Array, "m m"]) -> Inexact[Array, "n m"]:
    from jax.scipy.linalg import solve_triangular  # imported only here, because it takes time

    return solve_triangular(r, f.T, trans="T", lower=False).T


def _householder(block):
    q, r = jnp.linalg.qr(block)
    return q, r


def _cholesky_qr(block: Inexact[Array, "n m"]) -> tuple[Array, Array]:
    """The reduced QR factorisation of a block Y from Cholesky factors of Gram matrices, or by
    Householder's method if Y is too ill-conditioned for that.

    With C^H C = Y^H Y, Q = Y C^{-1} is orthonormal up to eps cond(Y)^2. If that is a few eps
    (random probes), C may be inverted. If it is more, but below 1, a second pass over Q reduces it
    to eps. The decision is by an upper bound of cond(Y)^2: ||X||_2^2 <= ||X||_1 ||X||_inf for
    X = C and X = C^{-1}.
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
    # NaN makes both comparisons false, and leads to the last branch.
    low, high = square <= 100, square <= 0.1 / jnp.finfo(block.dtype).eps
    branch = jnp.where(low, 0, jnp.where(high, 1, 2))
    return lax.switch(
        branch, [lambda: (matmul(block, inverse), factor), twice, lambda: _householder(block)]
    )


def _whitened_qr(
    block: Inexact[Array, "n m"], before: Inexact[Array, "m m"]
) -> tuple[Array, Array]:
    """The reduced QR factorisation of `block = Y before`, from Cholesky factors of Gram matrices of
    Y. The triangular `before` is meant to leave Y well-conditioned. This is not assumed: the
    orthogonality of the result is checked after each of the two passes.
    """
    m = block.shape[1]
    eps = jnp.finfo(block.dtype).eps

    def step(y):
        # This factor is that of a well-conditioned matrix, and may be inverted: on a GPU a product
        # takes an eighth of the time of a triangular solve. `before` may not.
        factor = jnp.linalg.cholesky(_gram(y), upper=True)
        return matmul(y, _divide(jnp.eye(m, dtype=y.dtype), factor)), factor

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


#: The least number of columns of S (see `_sketched_qr`) that are drawn at once.
_SIGNS = 2**15


def _sketched_qr(block: Inexact[Array, "n m"]) -> tuple[Array, Array]:
    """The reduced QR factorisation of any block Y that is not singular to the precision of its
    dtype.

    Let S have 2 m rows of random signs, and S Y = Q_0 R_0. Whatever the condition number of Y, that
    of Y R_0^{-1} is at most (1 + sqrt(1/2)) / (1 - sqrt(1/2)) = 5.8 for Gaussian S, and about the
    same for signs. All operations on n rows are products and triangular solves, which GPUs are made
    for.

    J. E. Garrison, I. C. F. Ipsen, *A randomized preconditioned Cholesky-QR algorithm*, 2024,
    arXiv:2406.11751.
    """
    n, m = block.shape
    signs, key = RademacherSampler(), jr.key(0)
    # At most a quarter of the memory of Y. (For 10^7 rows in 305 parts a GPU took 10 ms longer.)
    size = max(_SIGNS, n // 8)

    def part(i, rows):
        omega = signs(numbered(key, i), rows.shape[0], 2 * m, block.real.dtype)
        return matmul(omega.T.astype(block.dtype), rows)

    def add(i, total):
        return total + part(i, lax.dynamic_slice_in_dim(block, i * size, size))

    whole = n // size
    sketch = part(whole, block[whole * size :])
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


def panel_qr(rows: Inexact[Array, "b n"]) -> tuple[Inexact[Array, "b n"], Inexact[Array, "b b"]]:
    """`Y = R^T Q` for the few rows of Y, with an upper triangular R: the QR factorisation of a tall
    block, transposed, in one loop over Cholesky factors of Gram matrices.

    The Gram matrix is that of rows of unit length. While it is far from the identity, it gets a
    shift, without which rounding errors could make it indefinite: a pass reduces the condition
    number by sqrt(eps) at least. (T. Fukaya et al., *Shifted Cholesky QR*, 2020,
    doi:10.1137/18M1218212.) A row that is 0 stays 0, and so does its column of R.
    """
    count, dtype = rows.shape[0], rows.dtype
    eye, eps = jnp.eye(count, dtype=dtype), float(jnp.finfo(dtype).eps)

    def again(state):
        y, r, _, passes = state
        gram = matmul(jnp.conj(y), y.T)
        norms = jnp.sqrt(diagonal_of(gram).real)
        length = jnp.where(norms > 0, norms, 1).astype(dtype)
        gram = gram / (length[:, None] * length[None, :])
        defect = jnp.max(jnp.sum(jnp.abs(jnp.where(eye == 1, 0, gram)), axis=1))
        shift = jnp.where(defect < 0.5, 0, 11 * count * eps).astype(dtype)
        gram = jnp.where(eye == 1, 1 + shift, gram)
        factor = cholesky(gram)
        y = matmul(divide_by_upper(eye, factor).T / length[None, :], y)
        r = matmul(factor * norms.astype(dtype), r)
        return y, r, defect, passes + 1

    # NaN ends the loop, as a comparison with it is false.
    state = rows, eye, jnp.ones((), jnp.finfo(dtype).dtype), 0
    y, r, _, _ = lax.while_loop(lambda s: (s[2] > 0.1) & (s[3] < 8), again, state)
    return y, r


@one_by_one
def complete_qr(block: Inexact[Array, "n m"]) -> tuple[Array, Array, Array]:
    """The reduced QR factorisation of a block by Householder's method, and an orthonormal basis of
    the orthogonal complement of its columns.
    """
    m = block.shape[1]
    q, r = jnp.linalg.qr(block, mode="complete")
    return q[:, :m], r[:m], q[:, m:]


@one_by_one
def cholesky(h: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The upper triangular factor C of H = C^H C; NaN if H is not positive definite."""
    return jnp.linalg.cholesky(h, upper=True)


def lower_cholesky(a: Inexact[Array, "n n"]) -> Inexact[Array, "n n"]:
    """The lower triangular factor L of a large Hermitian matrix L L^H; NaN if that is not positive
    definite. Only one of its triangles is read.
    """
    # LAPACK stores matrices by columns: it gets A^H, which is A stored by rows.
    return lax.linalg.cholesky(jnp.conj(a).T, symmetrize_input=False)


def cholesky_solve(
    factor: Inexact[Array, "n n"], rhs: Inexact[Array, "n c"]
) -> Inexact[Array, "n c"]:
    """A^{-1} times a block, from the lower triangular factor L of A = L L^H."""
    solve = partial(lax.linalg.triangular_solve, factor, left_side=True, lower=True)
    return solve(solve(rhs), transpose_a=True, conjugate_a=True)


#: A triangular matrix with more rows than the first number is inverted by blocks; the second is the
#: number of blocks along a side.
_SMALL_TRIANGLE, _NUM_BLOCKS = 1024, 5


def cholesky_inverse(
    factor: Inexact[Array, "n n"], scale: Real[Array, ""]
) -> Inexact[Array, "n n"]:
    """(scale A)^{-1}, from the lower triangular factor L of A = L L^H.

    In blocks, X = L^{-1} has X_ij = -X_ii sum_{j <= k < i} L_ik X_kj for j < i, and
    (X^H X)_ij = sum_{k >= i} X_ki^H X_kj for j <= i. These products leave out the blocks of zeros.
    They are faster than solves with L, whose results would also have to be copied into another
    layout.
    """
    n, num_blocks = len(factor), _NUM_BLOCKS if len(factor) > _SMALL_TRIANGLE else 1
    ends = [n * i // num_blocks for i in range(num_blocks + 1)]
    blocks = [slice(*pair) for pair in pairwise(ends)]

    rows: list[Array] = []  # the i-th block of rows of X, up to the diagonal
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


@one_by_one
def eigh(h: Inexact[Array, "m m"]) -> tuple[Real[Array, " m"], Inexact[Array, "m m"]]:
    """Eigenvalues and eigenvectors of a matrix that is Hermitian to the last bit. NaN and inf in it
    are replaced by 0: they must not get to LAPACK.
    """
    finite = jnp.where(jnp.isfinite(h), h, 0)
    values, vectors = jnp.linalg.eigh(finite, symmetrize_input=False)
    return values, vectors


@one_by_one
def eigenvalues(a: Inexact[Array, "m m"]) -> Inexact[Array, " m"]:
    """The complex eigenvalues of any square matrix, in which NaN and inf are replaced by 0."""
    return jnp.linalg.eigvals(jnp.where(jnp.isfinite(a), a, 0))


def eigenpairs(a: Inexact[Array, "m m"]) -> tuple[Array, Array, Array]:
    """Eigenvalues and eigenvectors of norm 1 of any square matrix, and the inverse of the latter:
    inf or NaN if there is none. (To be called within `one_by_one`.)
    """
    values, vectors = jnp.linalg.eig(a)
    return values, vectors, jnp.linalg.inv(vectors)


@one_by_one
def svd(a: Inexact[Array, "m m"]) -> tuple[Array, Array, Array]:
    """U, sigma and V^H of a square matrix, in which NaN and inf are replaced by 0."""
    u, sigma, v_h = jnp.linalg.svd(jnp.where(jnp.isfinite(a), a, 0))
    return u, sigma, v_h


def _divide_each(*arrays: Array) -> tuple[Array, ...]:
    """X R^{-1} for every block X but the last, which is R."""
    *blocks, r = arrays
    return tuple(_divide(block, r) for block in blocks)


def _divide_on_cpu(*arrays: Array) -> tuple[Array, ...]:
    """As `_divide_each`, but with small blocks stacked, so that only one loop is compiled."""
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
    """F R^{-1} and G R^{-1} for an upper triangular R. G has few rows."""
    return _divide_rows_and_more(f, g, r)

"""Factorisations of tall blocks and small matrices, by LAPACK."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax.numpy as jnp
import jaxlib.version
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Inexact, Real

from .._core.estimate import scale_of
from .._core.precision import matmul


def diagonal_of(h: Inexact[Array, "m m"]) -> Inexact[Array, " m"]:
    """The diagonal, as a slice: unlike a gather, a slice takes no kernel of its own."""
    return h.reshape(-1)[:: h.shape[0] + 1]


def one_by_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`; before jaxlib 0.11.1 in a loop over lanes on CPUs: two batched LAPACK calls at once can
    wait for each other forever, as each blocks a thread of the pool that both need.
    """
    if jaxlib.version.__version_info__ >= (0, 11, 1):
        return fn
    looped = sequential_vmap(fn)

    @wraps(fn)
    def dispatch(*args):
        return lax.platform_dependent(*args, cpu=looped, default=fn)

    return dispatch


# --- tall blocks ----------------------------------------------------------------------------------

#: Blocks of fewer numbers take LAPACK's QR factorisation and triangular solve, which compile in a
#: quarter of the time. XLA would gather a larger block whose rows are on several devices.
_LARGE_BLOCK = 2**17


@one_by_one
def _householder_qr(block: Inexact[Array, "n m"]) -> tuple[Array, Array]:
    q, r = jnp.linalg.qr(block)
    return q, r


@one_by_one
def _solve_upper(f: Inexact[Array, "n m"], r: Inexact[Array, "m m"]) -> Inexact[Array, "n m"]:
    return lax.linalg.triangular_solve(r, f)


def _divide_by_products(
    f: Inexact[Array, "n m"], r: Inexact[Array, "m m"]
) -> Inexact[Array, "n m"]:
    """F R^{-1} from the inverse, with one step of refinement, without which the residual F - X R
    has the size of cond(R) rounding errors.
    """
    inverse = _solve_upper(jnp.eye(r.shape[0], dtype=r.dtype), r)
    x = matmul(f, inverse)
    return x + matmul(f - matmul(x, r), inverse)


def divide_by_upper(f: Inexact[Array, "n m"], r: Inexact[Array, "m m"]) -> Inexact[Array, "n m"]:
    """F R^{-1} for an upper triangular R. Rows of F that live on several devices stay there."""
    return _divide_by_products(f, r) if f.size >= _LARGE_BLOCK else _solve_upper(f, r)


def qr(block: Inexact[Array, "n m"]) -> tuple[Inexact[Array, "n m"], Inexact[Array, "m m"]]:
    """The reduced QR factorisation, Q orthonormal to rounding; cut rows stay on their devices."""
    return _shifted_cholesky_qr(block) if block.size >= _LARGE_BLOCK else _householder_qr(block)


#: A shift makes the factor of every Gram matrix exist: each pass divides the condition number by
#: 1 / sqrt(m eps). From float32 and a singular block five passes are enough, so that a sixth says
#: that columns coincide, or are 0.
_PASSES, _MOST_PASSES = 5, 12


def _shifted_cholesky_qr(block: Inexact[Array, "n m"]) -> tuple[Array, Array]:
    """The QR factorisation from products and Cholesky factors C^H C = Y^H Y + s I of Gram matrices
    (of columns of norm 1): Y <- Y C^{-1} and R <- C R, until Y is orthonormal but for rounding in a
    last pass without a shift.

    T. Fukaya, R. Kannan, Y. Nakatsukasa, Y. Yamamoto, Y. Yanagisawa, *Shifted Cholesky QR for
    computing the QR factorization of ill-conditioned matrices*, 2020, doi:10.1137/18M1218212.
    """
    m = block.shape[1]
    eps = float(jnp.finfo(block.dtype).eps)
    eye = jnp.eye(m, dtype=block.dtype)

    def improve(state):
        y, r, shift, _, count = state
        # Columns that coincide differ from here on, by rounding errors of their own.
        y = lax.cond(count == _PASSES, lambda: y + 4 * eps * generic(*y.shape, y.dtype), lambda: y)
        gram = matmul(jnp.conj(y.T), y)
        length = jnp.sqrt(diagonal_of(gram).real)
        length = jnp.where(length > 0, length, 1).astype(y.dtype)
        gram = gram / (length[:, None] * length[None, :])
        defect = jnp.linalg.norm(gram - eye)
        is_last = defect < 0.5
        factor = cholesky(gram + jnp.where(is_last, 0, shift).astype(y.dtype) * eye)
        # The Gram matrix of many rows may have larger rounding errors than the shift.
        failed = jnp.isfinite(defect) & ~jnp.isfinite(jnp.sum(jnp.abs(factor)))
        factor = jnp.where(failed, eye, factor) * length
        inverse = partial(_solve_upper, eye, factor)
        # The last factor is well conditioned, and needs no refinement.
        y = lax.cond(is_last, lambda: matmul(y, inverse()), lambda: _divide_by_products(y, factor))
        shift = jnp.where(failed, 100 * shift, shift)
        return y, matmul(factor, r), shift, is_last | ~jnp.isfinite(defect), count + 1

    size = jnp.max(jnp.abs(block), axis=0).astype(block.dtype)
    y = block / jnp.where(size == 0, 1, size)
    state = y, size * eye, jnp.asarray(m * eps, block.real.dtype), jnp.array(False), 0
    state = lax.while_loop(lambda s: ~s[3] & (s[4] < _MOST_PASSES), improve, state)
    return state[0], state[1]


def generic(n: int, m: int, dtype: Any) -> Inexact[Array, "n m"]:
    """Fixed numbers in general position, which look random: columns of norm about 1, independent of
    each other and of any others.
    """
    real = jnp.finfo(dtype).dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)
    number = jnp.arange(1, n + 1, dtype=real)[:, None]
    angles = jnp.square(number) * jnp.arange(1, m + 1, dtype=real)
    return ((2 / n) ** 0.5 * jnp.cos(angles)).astype(dtype)


# --- small matrices -------------------------------------------------------------------------------


@one_by_one
def cholesky(h: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The upper triangular factor C of H = C^H C; NaN if H is not positive definite."""
    return jnp.linalg.cholesky(h, upper=True)


def lower_cholesky(a: Inexact[Array, "n n"]) -> Inexact[Array, "n n"]:
    """The lower Cholesky factor of a large Hermitian A, from one triangle; NaN if there is none."""
    # LAPACK stores matrices by columns: it gets A^H, which is A stored by rows.
    return lax.linalg.cholesky(jnp.conj(a).T, symmetrize_input=False)


def lower_solve(
    factor: Inexact[Array, "n n"], rhs: Inexact[Array, "n c"], *, adjoint: bool = False
) -> Inexact[Array, "n c"]:
    """L^{-1} (or L^{-H}) times a block, with a lower triangular L."""
    flags = {"left_side": True, "lower": True, "transpose_a": adjoint, "conjugate_a": adjoint}
    return lax.linalg.triangular_solve(factor, rhs, **flags)


def cholesky_solve(
    factor: Inexact[Array, "n n"], rhs: Inexact[Array, "n c"]
) -> Inexact[Array, "n c"]:
    """A^{-1} times a block, from the lower triangular factor L of A = L L^H."""
    return lower_solve(factor, lower_solve(factor, rhs), adjoint=True)


@one_by_one
def eigh(h: Inexact[Array, "m m"]) -> tuple[Real[Array, " m"], Inexact[Array, "m m"]]:
    """Eigenpairs of an exactly Hermitian matrix. LAPACK gets 0 in place of NaN and inf."""
    finite = jnp.where(jnp.isfinite(h), h, 0)
    values, vectors = jnp.linalg.eigh(finite, symmetrize_input=False)
    return values, vectors


def ritz_values(
    t: Inexact[Array, "m m"], in_use: Bool[Array, " m"]
) -> tuple[Real[Array, " m"], Inexact[Array, "m m"]]:
    """The eigenvalues and eigenvectors of the rows and columns of T that are in use.

    The others give eigenvectors that are 0, and eigenvalues that repeat the first one: a function
    and its derivative are defined there if they are anywhere.
    """
    unit = scale_of(jnp.sum(jnp.abs(t), axis=1))
    mask = in_use[:, None] & in_use
    # No eigenvalue exceeds 1 in this unit. A 4 stands for what is not in use: it comes last.
    four = jnp.diag(jnp.where(in_use, jnp.zeros_like(unit), 4)).astype(t.dtype)
    values, vectors = eigh(jnp.where(mask, t / unit.astype(t.dtype), 0) + four)
    counts = values < 2
    return jnp.where(counts, values, values[0]) * unit, jnp.where(counts, vectors, 0)


@one_by_one
def eigenvalues(a: Inexact[Array, "m m"]) -> Inexact[Array, " m"]:
    """The complex eigenvalues of any square matrix, in which NaN and inf are replaced by 0."""
    return jnp.linalg.eigvals(jnp.where(jnp.isfinite(a), a, 0))


def eigenpairs(a: Inexact[Array, "m m"]) -> tuple[Array, Array, Array]:
    """Eigenvalues and unit eigenvectors of a square matrix, and the inverse of the eigenvectors
    (inf or NaN if there is none). Call it within `one_by_one`.
    """
    values, vectors = jnp.linalg.eig(a)
    return values, vectors, jnp.linalg.inv(vectors)


@one_by_one
def svd(a: Inexact[Array, "m m"]) -> tuple[Array, Array, Array]:
    """U, sigma and V^H of a square matrix, in which NaN and inf are replaced by 0."""
    u, sigma, v_h = jnp.linalg.svd(jnp.where(jnp.isfinite(a), a, 0))
    return u, sigma, v_h

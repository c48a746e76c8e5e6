"""Pivoted Cholesky factorisation in blocks, against the definition of its steps."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from traceax._core.precision import any_promotion
from traceax._sketch.pivoted_cholesky import no_pivots, pivoted_cholesky

from ..helpers import keys, with_spectrum

N = 40


def positive(dtype, decay=0.6):
    rng = np.random.default_rng(0)
    return with_spectrum(rng, decay ** np.arange(N), dtype)


@functools.partial(jax.jit, static_argnames=("rank", "block", "ranks", "enough"))
def _factorise(key, matrix, diagonal, rank, block, ranks, enough):
    found = no_pivots(diagonal, rank, block, matrix.dtype)
    for end in (*ranks, rank):
        found = pivoted_cholesky(
            key, lambda pivots: matrix[:, pivots], found, end, block=block, enough=enough
        )
    return found


def factorise(matrix, rank, key=None, block=1, diagonal=None, ranks=(), enough=0.0):
    """The factors of a rank, by way of those of other ranks."""
    key = jr.key(0) if key is None else key
    diagonal = matrix.diagonal().real if diagonal is None else diagonal
    with any_promotion():
        return _factorise(key, matrix, diagonal, rank, block, ranks, enough)


def factor(found, rank):
    """F."""
    return np.asarray(found.rows[:rank]).T


@pytest.mark.parametrize(("dtype", "block"), [(np.complex128, 1), (np.float32, 8)])
def test_an_interpolation_at_the_pivots(dtype, block):
    """F F^H is the Nystrom approximation from the columns of the pivots, which it reproduces."""
    matrix = positive(dtype)
    found = factorise(matrix, 10, block=block)
    assert found.rank == 10
    dense, f = np.asarray(matrix, np.complex128), factor(found, 10).astype(np.complex128)
    tolerance = 2e-5 if dtype == np.float32 else 1e-12
    residual = dense - f @ f.conj().T
    np.testing.assert_allclose(residual.diagonal().real, found.left, atol=tolerance)
    pivots = np.flatnonzero(np.asarray(found.left) == 0)
    assert len(pivots) == 10
    core = dense[np.ix_(pivots, pivots)]
    expected = dense[:, pivots] @ np.linalg.solve(core, dense[pivots])
    np.testing.assert_allclose(f @ f.conj().T, expected, atol=1e3 * tolerance)


def test_pivots_have_the_distribution_of_those_drawn_one_by_one():
    """The second of two pivots, whose distribution rejection must correct: a chi-squared test."""
    matrix, count = positive(np.float64, 0.3)[:5, :5], 4000

    def pivots(key):
        found = factorise(matrix, 2, key, block=4)
        return jnp.sum(jnp.where(found.left == 0, 2 ** jnp.arange(5), 0))

    drawn = np.bincount(np.asarray(jax.jit(jax.vmap(pivots))(keys(count))), minlength=32)
    dense, expected = np.asarray(matrix), np.zeros(32)
    for i in range(5):
        left = dense - np.outer(dense[i], dense[i]) / dense[i, i]
        weights = np.maximum(np.diag(left), 0)
        weights[i] = 0
        for j in set(range(5)) - {i}:
            chance = dense[i, i] / np.trace(dense) * weights[j] / weights.sum()
            expected[2**i + 2**j] += count * chance
    used = expected > 0
    assert not np.any(drawn[~used])
    chi2 = np.sum((drawn[used] - expected[used]) ** 2 / expected[used])
    assert chi2 < 27.9  # 10 pairs, 9 degrees of freedom: exceeded with probability 1e-3


def test_it_ends_when_enough_is_captured():
    matrix = positive(np.float64)
    found = factorise(matrix, 30, block=5, enough=1e-3)
    assert found.rank < 30
    assert jnp.sum(found.left) <= 1e-3
    assert not np.any(factor(found, 30)[:, int(found.rank) :])
    assert found.columns >= found.rank
    # Rounding errors are no pivots.
    low_rank = positive(np.float32, 1e-2)
    assert factorise(low_rank, 30, block=4).rank <= 6
    none = factorise(0 * matrix, 30, block=5, enough=1e-3)
    assert none.rank == 0
    assert not np.any(factor(none, 30))


def test_further_pivots_go_on_from_those_before():
    """One by one they are the same as without a stop; in blocks the rank ends a round early."""
    matrix = positive(np.complex128)
    at_once, later = factorise(matrix, 10), factorise(matrix, 10, ranks=(6,))
    for one, other in zip(at_once, later, strict=True):
        np.testing.assert_array_equal(one, other)
    blocks = factorise(matrix, 10, block=4, ranks=(6,))
    residual = matrix - factor(blocks, 10) @ factor(blocks, 10).conj().T
    assert blocks.rank == 10
    np.testing.assert_allclose(np.diagonal(residual), blocks.left, atol=1e-12)
    assert np.sum(np.asarray(blocks.left) == 0) == 10


def test_a_wrong_diagonal_is_seen():
    matrix = positive(np.float64)
    found = factorise(matrix, 5, block=2, diagonal=2 * jnp.diagonal(matrix))
    assert found.mismatch > 0.1


@pytest.mark.slow
def test_rounding_errors_are_no_pivots():
    """float32, 50,000 rows, rank 768: what is left of the diagonal is of the size of the rounding
    errors of products with F. (One of these keys once picked among them: the diagonal of F F^T was
    24 too large, a quarter of K's.)
    """
    n, rank, block = 50_000, 768, 96
    x = jnp.asarray(np.random.default_rng(0).uniform(size=(n, 2)), jnp.float32)

    def columns(pivots):  # Matern-5/2, over a noise of 0.01
        squares = jnp.sum(jnp.square(x[:, None] - x[pivots]), axis=-1)
        r = jnp.sqrt(5 * jnp.maximum(squares, 1e-12)) / 0.3
        return 100 * (1 + r + r**2 / 3) * jnp.exp(-r)

    @jax.jit
    def diagonal(key):
        start = no_pivots(jnp.full(n, 100, jnp.float32), rank, block, jnp.float32)
        with any_promotion():
            found = pivoted_cholesky(key, columns, start, rank, block=block)
        return jnp.sum(jnp.square(found.rows[:rank]), axis=0)

    for key in keys(8):
        assert np.max(diagonal(key)) < 100.02

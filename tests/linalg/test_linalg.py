"""QR factorisations and triangular solves: as accurate as LAPACK's, by products too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from traceax._core.estimate import safe_norm
from traceax._core.precision import any_promotion
from traceax._linalg import factorisations

from ..helpers import random_unitary

DTYPES = [np.float32, np.float64, np.complex128]
N, M = 3000, 50  # a large block: see `_LARGE_BLOCK`
qr = jax.jit(factorisations.qr)
divide_by_upper = jax.jit(factorisations.divide_by_upper)


def block_of(condition, dtype, n=N, m=M):
    """Singular values from 1 down to 1 / condition."""
    rng = np.random.default_rng(0)
    left = np.linalg.qr(rng.standard_normal((n, m)))[0]
    return ((left * np.geomspace(1, 1 / condition, m)) @ random_unitary(rng, m, dtype)).astype(
        dtype
    )


def decaying(decay, shift):
    """A sketch of diag(decay^i), with the shift of an estimator or without."""
    omega = np.random.default_rng(0).standard_normal((N, M))
    block = decay ** np.arange(N)[:, None] * omega
    return block + shift * np.finfo(float).eps * np.linalg.norm(block) / np.sqrt(N) * omega


HOLES = block_of(2.0, np.float64)
HOLES[:, 3] = 0
HOLES[:, 7] = HOLES[:, 8]
SIGNS = np.sign(np.random.default_rng(0).standard_normal((N, 5)))
BLOCKS = {
    **{f"condition {c:.0e}": block_of(c, np.complex128) for c in (1.0, 1e5, 1e9, 1e20)},
    "decay": decaying(0.7, 0.0),
    "decay, shifted": decaying(0.5, 1.0),
    "columns of many sizes": block_of(1e3, np.float64) * 10.0 ** (-np.arange(M) / 2),
    "zero": np.zeros((N, M)),
    "rank one": np.ones((N, M)),
    "repeated columns": np.repeat(block_of(2.0, np.float64)[:, : M // 2], 2, axis=1),
    "a zero and a repeated column": HOLES,
    "low rank, of signs": SIGNS @ np.ones((5, M)),
}


def check_factors(q, r, block):
    """Q orthonormal, R upper triangular, and every column of Q R that of Y, to rounding."""
    eps, m = np.finfo(block.dtype).eps, block.shape[1]
    q, r = np.asarray(q), np.asarray(r)
    assert q.dtype == r.dtype == block.dtype
    np.testing.assert_array_equal(np.tril(r, -1), 0)
    assert np.max(np.abs(q.conj().T @ q - np.eye(m))) < 40 * eps
    size = np.max(np.abs(block), axis=0)
    unit = np.where(size > 0, size, 1)
    errors = np.linalg.norm((q @ r - block) / unit, axis=0)
    assert np.all(errors <= 20 * eps * np.linalg.norm(block / unit, axis=0))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_qr(name, dtype):
    block = BLOCKS[name] if dtype == np.complex128 else BLOCKS[name].real
    block = block.astype(dtype)
    q, r = qr(block)
    check_factors(q, r, block)
    if name.startswith("con") or name.startswith("dec"):
        assert np.all(np.abs(np.diagonal(r)) > np.finfo(dtype).eps * 1e-10 * np.max(np.abs(r)))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_qr_at_any_scale(scale):
    block = block_of(1e4, np.float32) * np.float32(scale)
    check_factors(*qr(block), block)


def test_qr_of_a_gram_matrix_with_larger_errors(monkeypatch):
    """A shift below the errors of the Gram matrix, which has no Cholesky factor then, grows."""
    block = block_of(1e9, np.float32)
    failures = []

    def cholesky(h):
        factor = jnp.linalg.cholesky(h, upper=True)
        jax.debug.callback(failures.append, ~jnp.isfinite(factor[-1, -1]))
        return factor

    monkeypatch.setattr(factorisations, "cholesky", cholesky)
    monkeypatch.setattr(jnp, "finfo", lambda _: np.finfo(np.float64))
    q, r = jax.jit(factorisations._shifted_cholesky_qr)(block)
    monkeypatch.undo()
    check_factors(q, r, block)
    assert any(failures)


def test_qr_of_what_is_not_finite():
    for bad in (np.nan, np.inf):
        block = block_of(2.0, np.float32)
        block[5, 7] = bad
        for factor in qr(block):
            assert np.any(np.isnan(np.asarray(factor)))


def test_qr_under_vmap():
    """Each block takes as many passes as it needs."""
    blocks = np.stack([block_of(1.0, np.float64), block_of(1e12, np.float64), np.zeros((N, M))])
    for q, r, block in zip(*jax.jit(jax.vmap(factorisations.qr))(blocks), blocks, strict=True):
        check_factors(q, r, block)


def triangular(condition, m, dtype):
    return np.linalg.qr(block_of(condition, dtype, n=m, m=m))[1]


@pytest.mark.parametrize(("n", "m"), [(120, 45), (N, M)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triangular_solves_are_backward_stable(n, m, dtype):
    """|X R - F| <= c eps |X| |R|, entry by entry, up to the condition of Cholesky factors."""
    eps = np.finfo(dtype).eps
    f = block_of(1.0, dtype, n=n, m=m)
    for condition in (1.0, 1e2, 0.1 / np.sqrt(eps)):
        r = triangular(condition, m, dtype)
        x = np.asarray(divide_by_upper(f, r)).astype(np.complex128)
        exact = r.astype(np.complex128)
        bound = 4 * m * eps * (np.abs(x) @ np.abs(exact) + np.abs(f))
        assert np.all(np.abs(x @ exact - f) <= bound)


def test_triangular_solves_under_vmap():
    f = np.random.default_rng(1).standard_normal((3, 20, 40))
    r = np.stack([triangular(condition, 40, np.float64) for condition in (1.0, 10.0, 100.0)])

    @jax.jit
    def run(f, r):
        divide = factorisations.divide_by_upper
        return jax.vmap(divide, (0, None))(f, r[0]), jax.vmap(divide)(f, r)

    shared, both = run(f, r)
    np.testing.assert_allclose(both @ r, f, atol=1e-12)
    np.testing.assert_allclose(shared @ r[0], f, atol=1e-12)


@pytest.mark.parametrize(("n", "m"), [(120, 45), (N, M)])
def test_a_zero_on_the_diagonal_is_not_hidden(n, m):
    r = np.triu(np.ones((m, m)))
    r[7, 7] = 0
    assert not np.all(np.isfinite(divide_by_upper(np.ones((n, m)), r)))


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_norms_of_rows(dtype):
    """Of all lengths from the root of the smallest number to the largest number."""
    largest = float(np.finfo(dtype).max)
    rows = np.array([[3.0, 0, 4], [0, 2, 0], [1, 1, 1]]).astype(dtype)
    if np.iscomplexobj(rows):
        rows = rows * dtype(1j)
    norms = np.array([5, 2, 3**0.5])
    sizes = [2 * np.finfo(dtype).tiny ** 0.5, 1.0, largest**0.5, largest**0.9, largest / 10]
    scaled = np.concatenate([rows * np.array(size, rows.real.dtype) for size in sizes])
    with any_promotion():
        computed = np.asarray(jax.jit(safe_norm)(scaled), np.float64).reshape(5, 3)
        with_nan = safe_norm(jnp.asarray(rows).at[1, 1].set(np.nan))
    expected = np.outer(sizes, norms)
    np.testing.assert_allclose(computed, expected, rtol=10 * np.finfo(dtype).eps)
    assert np.isnan(with_nan).tolist() == [False, True, False]

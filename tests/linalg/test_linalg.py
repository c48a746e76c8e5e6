"""Triangular solves and QR factorisations: as accurate as LAPACK's, on every path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from traceax._core.estimate import safe_norm
from traceax._core.precision import any_promotion
from traceax._linalg import factorisations
from traceax._linalg.matrix_product import matrix_product

from ..helpers import random_unitary, variant

DTYPES = [np.float32, np.float64, np.complex64, np.complex128]
N, M = 3000, 50  # large enough for the Cholesky path

qr = jax.jit(factorisations.qr)


def block_of(condition, dtype, n=N, m=M):
    """Singular values from 1 down to 1 / condition."""
    rng = np.random.default_rng(0)
    left = random_unitary(rng, n, np.float64)[:, :m] if n < 500 else None
    if left is None:
        left = np.linalg.qr(rng.standard_normal((n, m)))[0]
    right = random_unitary(rng, m, dtype)
    return ((left * np.geomspace(1, 1 / condition, m)) @ right).astype(dtype)


def check_factors(q, r, block, slack=30):
    eps = np.finfo(block.dtype).eps
    q, r = np.asarray(q), np.asarray(r)
    m = block.shape[1]
    assert q.dtype == r.dtype == block.dtype
    np.testing.assert_array_equal(np.tril(r, -1), 0)
    assert np.max(np.abs(q.conj().T @ q - np.eye(m))) < slack * eps
    assert np.linalg.norm(q @ r - block) <= slack * eps * np.linalg.norm(block)


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e5, 1e9, 1e20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tall_qr(condition, dtype):
    """One Cholesky factor, two, and Householder's method: the same accuracy."""
    assert N * M >= factorisations._LARGE_BLOCK
    block = block_of(condition, dtype)
    check_factors(*qr(block), block)


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_tall_qr_of_large_blocks(dtype):
    """From some size on the triangular solves are LAPACK's."""
    n = 11_000
    assert n * M >= factorisations._HUGE_BLOCK
    for condition in (1.0, 20.0, 1e12):
        block = block_of(condition, dtype, n=n)
        check_factors(*qr(block), block)


def test_paths_of_the_tall_qr():
    """An upper bound of the condition decides: each of the three is taken, and is as accurate."""
    names = []
    for condition in (1.0, 20.0, 1e12):
        block = jnp.asarray(block_of(condition, np.float64))
        text = str(jax.make_jaxpr(factorisations._cholesky_qr)(block))
        assert text.count("cond[") == 1
        factor = jnp.linalg.cholesky(block.T @ block, upper=True)
        inverse = jnp.linalg.inv(factor)
        sizes = [jnp.linalg.norm(x, order) for x in (factor, inverse) for order in (1, jnp.inf)]
        bound = float(np.prod(sizes))
        assert bound >= 0.99 * condition**2 or not np.isfinite(bound)
        names.append("once" if bound <= 100 else "twice" if bound <= 0.1 / 2.2e-16 else "never")
    assert names == ["once", "twice", "never"]


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_tall_qr_at_any_scale(scale):
    block = (scale * block_of(3.0, np.float64)).astype(np.float32)
    check_factors(*qr(block), block)


def test_tall_qr_of_degenerate_blocks():
    """Zero, rank one, and repeated columns: orthonormal all the same. NaN stays NaN.

    These take Householder's method, whose own error on 3000 equal float32 numbers is 110 eps.
    """
    one = np.ones((N, M), np.float32)
    repeated = np.repeat(block_of(2.0, np.float32)[:, : M // 2], 2, axis=1)
    for block in (np.zeros((N, M), np.float32), one, repeated):
        check_factors(*qr(block), block, slack=300)
    assert np.all(np.isnan(qr(np.full((N, M), np.nan, np.float32))[1][0]))


def test_tall_qr_of_a_decaying_sketch():
    """Columns that agree to rounding: no Cholesky factor, and on a CPU NaN may escape a maximum."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((N, 100)))[0]
    block = (basis * 0.5 ** np.arange(100)) @ rng.standard_normal((100, M))
    block += 1e-16 * rng.standard_normal((N, M))
    for dtype in (np.float32, np.float64):
        check_factors(*qr(block.astype(dtype)), block.astype(dtype))


def test_tall_qr_under_vmap():
    """Each block of a batch takes its own path."""
    blocks = np.stack([block_of(c, np.float64) for c in (1.0, 1e5, 1e12)])
    q, r = jax.jit(jax.vmap(factorisations.qr))(blocks)
    for i, block in enumerate(blocks):
        check_factors(q[i], r[i], block)


def triangular(condition, m, dtype):
    return np.linalg.qr(block_of(condition, dtype, n=m, m=m))[1]


@pytest.mark.parametrize(
    ("n", "m", "dtype"),
    [
        *((120, m, np.float64) for m in (3, 32, 45, 101)),
        *((N, m, np.float64) for m in (45, 50)),
        *((n, m, dtype) for n, m in ((120, 45), (N, 50)) for dtype in DTYPES[::2]),
        (120, 101, np.complex128),
        (N, 45, np.complex128),
    ],
)
def test_triangular_solves_are_backward_stable(n, m, dtype):
    """|X R - F| <= c eps |X| |R|, entry by entry, however ill-conditioned R is."""
    eps = np.finfo(dtype).eps
    f = block_of(1.0, dtype, n=n, m=m)
    for condition in (1.0, 1e4, 1e12):
        r = triangular(condition, m, dtype)
        x = np.asarray(jax.jit(factorisations.divide_by_upper)(f, r)).astype(np.complex128)
        exact = r.astype(np.complex128)
        bound = 4 * m * eps * (np.abs(x) @ np.abs(exact) + np.abs(f))
        assert np.all(np.abs(x @ exact - f) <= bound)


@pytest.mark.parametrize(("n", "m"), [(120, 3), (120, 45), (N, 45), (11_000, M)])
def test_two_triangular_solves_at_once(n, m):
    """What either of them is alone, on every path, under `vmap` too."""
    r = triangular(10.0, m, np.float64)
    f, g = block_of(1.0, np.float64, n=n, m=m), np.eye(m)
    two = jax.jit(factorisations.divide_two_by_upper)
    batch = jax.vmap(two, (None, 0, None))(f, np.stack([g, 2 * g]), r)
    for x, y in (two(f, g, r), [part[0] for part in batch]):
        np.testing.assert_allclose(x @ r, f, rtol=0, atol=1e-13)
        np.testing.assert_allclose(y @ r, g, rtol=0, atol=1e-13)
    np.testing.assert_allclose(batch[1][1], 2 * batch[1][0], rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_rows(dtype):
    """Of all lengths from the root of the smallest number to the largest number."""
    largest = float(np.finfo(dtype).max)
    rows = np.array([[3.0, 0, 4], [0, 2, 0], [1, 1, 1]]).astype(dtype)
    if np.iscomplexobj(rows):
        rows = rows * dtype(1j)
    norms = np.array([5, 2, 3**0.5])
    for size in (2 * np.finfo(dtype).tiny ** 0.5, 1.0, largest**0.5, largest**0.9, largest / 10):
        scaled = rows * np.array(size, rows.real.dtype)
        with any_promotion():
            computed = np.asarray(jax.jit(safe_norm)(scaled), np.float64) / size
        np.testing.assert_allclose(computed, norms, rtol=10 * np.finfo(dtype).eps)
    with any_promotion():
        norms = safe_norm(jnp.asarray(rows).at[1, 1].set(np.nan))
    assert np.isnan(norms).tolist() == [False, True, False]


def test_triangular_solves_under_vmap():
    rng = np.random.default_rng(1)
    f = rng.standard_normal((3, 20, 40))
    r = np.stack([triangular(10.0, 40, np.float64) for _ in range(3)])
    both = jax.jit(jax.vmap(factorisations.divide_by_upper))(f, r)
    shared = jax.jit(jax.vmap(factorisations.divide_by_upper, (0, None)))(f, r[0])
    for i in range(3):
        np.testing.assert_allclose(both[i] @ r[i], f[i], atol=1e-12)
        np.testing.assert_allclose(shared[i] @ r[0], f[i], atol=1e-12)


def test_a_zero_on_the_diagonal_is_not_hidden():
    r = np.triu(np.ones((40, 40)))
    r[7, 7] = 0
    assert not np.all(np.isfinite(factorisations.divide_by_upper(jnp.ones((5, 40)), r)))


# ---------------------------------------------------------------------- products with a matrix


@pytest.mark.parametrize(
    ("m", "dtype"),
    [
        *((m, np.float64) for m in (1, 32, 49, 64, 101)),
        *((m, dtype) for m in (49, 64) for dtype in (np.float32, np.complex128)),
        (101, np.complex64),
    ],
)
def test_products_with_a_matrix(m, dtype):
    """Widths that suit XLA's product and others: the same numbers, derivatives and batches."""
    n = 80
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    matrix, block, change, weights = draw(n, n), draw(n, m), draw(n, n), draw(n, m)
    if np.issubdtype(dtype, np.complexfloating):
        matrix, block = matrix * (1 + 2j), block * (1 - 1j)

    @jax.jit
    def everything(matrix, block):
        product = matrix_product(matrix, block)
        tangent = jax.jvp(lambda a: matrix_product(a, block), (matrix,), (change,))[1]
        of_block = jax.jvp(lambda x: matrix_product(matrix, x), (block,), (weights,))[1]
        pulled = jax.vjp(matrix_product, matrix, block)[1](weights)
        batched = jax.vmap(matrix_product, (None, 0))(matrix, jnp.stack([block, 2 * block]))
        both = jax.vmap(matrix_product)(jnp.stack([matrix, change]), jnp.stack([block, block]))
        return product, tangent, of_block, pulled, batched, both

    product, tangent, of_block, pulled, batched, both = everything(matrix, block)
    tolerance = {"rtol": 0, "atol": 200 * np.sqrt(n) * np.finfo(dtype).eps}
    assert product.dtype == dtype
    np.testing.assert_allclose(product, matrix @ block, **tolerance)
    np.testing.assert_allclose(tangent, change @ block, **tolerance)
    np.testing.assert_allclose(of_block, matrix @ weights, **tolerance)
    np.testing.assert_allclose(pulled[0], weights @ block.T, **tolerance)
    np.testing.assert_allclose(pulled[1], matrix.T @ weights, **tolerance)
    np.testing.assert_allclose(batched[1], 2 * (matrix @ block), **tolerance)
    np.testing.assert_allclose(both[1], change @ block, **tolerance)


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(1, np.float64), (2, np.complex128), (1024, np.float32), variant(1027, np.complex128)],
)
def test_inverse_from_a_cholesky_factor(n, dtype):
    """Also by blocks that do not divide n; relative to the condition, which is about 6."""
    rng = np.random.default_rng(n)
    half = rng.standard_normal((n, n))
    if dtype == np.complex128:
        half = half + 1j * rng.standard_normal((n, n))
    matrix = half @ half.conj().T / n + np.eye(n)
    factor = jnp.asarray(np.linalg.cholesky(matrix), dtype)
    scale = jnp.asarray(2.0, np.finfo(dtype).dtype)
    inverse = jax.jit(factorisations.cholesky_inverse)(factor, scale)
    assert inverse.dtype == dtype
    error = np.linalg.norm(2 * np.asarray(inverse) @ matrix - np.eye(n), 2)
    assert error < 100 * np.finfo(dtype).eps

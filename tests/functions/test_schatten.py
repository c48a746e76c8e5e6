"""Schatten norms: exact, estimated, differentiated, refused."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from ..helpers import by_products, keys, random_unitary, with_spectrum

pytestmark = pytest.mark.slow(quick=True)

N = 40
INDEFINITE = 0.8 ** np.arange(N) * np.where(np.arange(N) % 2, -1, 1)


def general(dtype=np.float64, seed=0, singular=0.8 ** np.arange(N)):
    rng = np.random.default_rng(seed)
    u, v = (random_unitary(rng, N, dtype) for _ in range(2))
    return ((u * singular) @ v.conj().T).astype(dtype)


def symmetric(eigenvalues=INDEFINITE):
    return with_spectrum(np.random.default_rng(0), eigenvalues)


def norm_of(matrix, p):
    return np.sum(np.linalg.svd(np.asarray(matrix), compute_uv=False) ** p) ** (1 / p)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def solve(key, matrix, k, p, tags=()):
    return tr.schatten_norm(key, by_products(matrix, tags), k, p)


@pytest.mark.parametrize(("dtype", "p"), [(np.float32, 1), (np.complex128, 3.5)])
def test_exact(dtype, p):
    eps = float(jnp.finfo(dtype).eps)
    matrix = general(dtype)
    found = solve(jr.key(0), matrix, 3 * N, p)
    # Squares lose half of the digits of small singular values.
    small = 10 * N * np.sqrt(eps) ** min(p, 1)
    np.testing.assert_allclose(found.value, norm_of(matrix, p), rtol=100 * eps + small * eps**0.5)
    assert int(found.num_matvecs) == 2 * N + 1
    hermitian = symmetric()
    found = solve(jr.key(0), hermitian, 2 * N, p, lx.symmetric_tag)
    np.testing.assert_allclose(found.value, norm_of(hermitian, p), rtol=1e-10)
    assert int(found.num_matvecs) == N + 1


@pytest.mark.parametrize("p", [0.5, 1, 2, 4])
@pytest.mark.parametrize("hermitian", [True, False])
def test_bars_cover(hermitian, p):
    """200 keys: 92 % of the intervals cover, less three standard errors of the count."""
    matrix, tags, k = general(), (), 60
    if hermitian:
        matrix, tags, k = symmetric(), lx.symmetric_tag, 30

    def run(key):
        found = solve(key, matrix, k, p, tags)
        return found.interval(), found.num_matvecs

    (low, high), spent = jax.device_get(jax.jit(jax.vmap(run))(keys(200)))
    truth = norm_of(matrix, p)
    assert np.mean((low - 1e-10 <= truth) & (truth <= high + 1e-10)) > 0.862
    assert np.all(spent <= k)


@pytest.mark.parametrize("hermitian", [True, False])
def test_the_derivative_of_the_nuclear_norm(hermitian):
    """That is <U V^H, dA>, exactly with enough products, and in forward and reverse mode."""
    singular = np.linspace(0.5, 2, N)
    if hermitian:
        matrix, tags, k = symmetric(singular * np.sign(INDEFINITE)), lx.symmetric_tag, N + 1
        tangent = matrix @ matrix + np.eye(N)
    else:
        matrix, tags, k = general(singular=singular), (), 2 * N + 1
        tangent = general(seed=1)
    u, _, v = np.linalg.svd(np.asarray(matrix))
    fn = lambda t: solve(jr.key(0), matrix + t * tangent, k, 1, tags).value  # noqa: E731
    slopes = jax.jit(lambda t: [derivative(fn)(t) for derivative in (jax.grad, jax.jacfwd)])(0.0)
    np.testing.assert_allclose(slopes, np.sum((u @ v) * tangent), rtol=1e-7)


@pytest.mark.parametrize("k", [24, 2 * N + 1])
def test_singular_operators(k):
    """Neither the value nor the derivative is NaN, and both are small for 0."""

    def value_of(t, matrix):
        found = solve(jr.key(0), t * matrix, k, 1)
        return found.value, found

    both = jax.jit(jax.value_and_grad(value_of, has_aux=True))
    for rank in (0, 3):
        matrix = general(singular=np.where(np.arange(N) < rank, 2.0, 0.0))
        (value, found), slope = jax.device_get(both(1.0, matrix))
        assert abs(value - 2 * rank) <= 4 * found.std_err + found.quadrature_error + 1e-5
        np.testing.assert_allclose(slope, value, atol=1e-5)  # a norm is homogeneous
        if rank == 0 or k > 2 * N:
            np.testing.assert_allclose(value, 2 * rank, atol=1e-5)


@pytest.mark.parametrize("shape", [(2 * N, N), (N, 2 * N)])
def test_rectangular_operators_of_any_scale(shape):
    """From 1e-30 to 1e30 in single precision, exact and estimated, with the derivative."""
    entries = np.random.default_rng(0).standard_normal(shape)
    u, singular, v = np.linalg.svd(entries, full_matrices=False)

    @functools.partial(jax.jit, static_argnames="k")
    def norm(matrix, k):
        def value(matrix):
            found = tr.schatten_norm(jr.key(0), lx.MatrixLinearOperator(matrix), k, 3)
            return found.value, found

        return jax.value_and_grad(value, has_aux=True)(matrix)

    truth = np.sum(singular**3) ** (1 / 3)
    expected = (u * (singular / truth) ** 2) @ v
    for scale in (1.0, 1e-30, 1e30):
        matrix = (scale * entries).astype(np.float32)
        (_, exact), slope = norm(matrix, 3 * N)
        np.testing.assert_allclose(np.float64(exact.value) / scale, truth, rtol=1e-5)
        np.testing.assert_allclose(slope, expected, atol=1e-4)
        if shape[0] < shape[1]:  # estimated in one of the shapes
            continue
        (_, found), _ = norm(matrix, N)
        bar = 4 * np.float64(found.std_err) + np.float64(found.quadrature_error)
        assert abs(np.float64(found.value) - scale * truth) <= bar < 0.5 * scale * truth
        assert found.num_matvecs <= N
        assert found.result == tr.RESULTS.successful


def test_a_root_that_overflows_is_told():
    """The 100th power of the sum of 40 roots is no number of single precision."""
    found = solve(jr.key(0), general(np.float32), 3 * N, 0.01)
    assert found.result == tr.RESULTS.outside_domain
    assert np.isnan(found.value)
    operator = lx.MatrixLinearOperator(jnp.asarray(general(np.float32)))
    with pytest.raises(Exception, match="the value overflows"):
        tr.schatten_norm(jr.key(0), operator, 3 * N, 0.01, throw=True)

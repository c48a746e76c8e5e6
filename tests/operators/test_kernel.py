"""Kernels that are never formed, and the entries of operators, against dense matrices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tr
from traceax._core.precision import any_promotion
from traceax._operators.block_operator import BlockOperator
from traceax._operators.known_parts import has_entries, stored_diagonal, stored_entries
from traceax.extend import columns

from ..helpers import PSD, by_products
from .test_stored import STORED

N = 23
X = np.random.default_rng(0).standard_normal((N, 2))
V = np.random.default_rng(1).standard_normal((N, 3))
PHASES = np.random.default_rng(2).standard_normal(N)
POINTS = {"x": X, "phase": PHASES}


class RBF(eqx.Module):
    length: jax.Array

    def __call__(self, x, y):
        return jnp.exp(-0.5 * jnp.sum(((x - y) / self.length) ** 2))


def dense(length, x=X):
    return jnp.exp(-0.5 * (((x[:, None] - x[None]) / length) ** 2).sum(-1))


def kernel(length, x=X, block_size=None):
    return tr.KernelLinearOperator(RBF(jnp.asarray(length)), x, block_size=block_size)


def turning(length):
    """A complex kernel, of trees of points."""

    def k(a, b):
        near = jnp.exp(-0.5 * jnp.sum((a["x"] - b["x"]) ** 2) / length**2)
        turn = a["phase"] - b["phase"]
        return jax.lax.complex(near * jnp.cos(turn), near * jnp.sin(turn))

    return k


def multiplied(operator, block):
    return jax.vmap(operator.mv, -1, -1)(block)


@eqx.filter_jit
def views(operator, block, indices):
    """Products, the matrix in two ways, its diagonal, and columns."""
    matrices = operator.as_matrix(), lx.materialise(operator).matrix
    return multiplied(operator, block), *matrices, lx.diagonal(operator), columns(operator, indices)


@pytest.mark.parametrize("block_size", [None, 1, 7])
def test_products_and_entries(block_size):
    """Also for blocks that do not divide n."""
    operator, expected = kernel(0.7, X, block_size), np.asarray(dense(0.7))
    indices = np.array([5, 0, 5])
    product, *matrices, diagonal, some = views(operator, V, indices)
    np.testing.assert_allclose(product, expected @ V, rtol=1e-12, atol=1e-12)
    for matrix in matrices:
        np.testing.assert_allclose(matrix, expected, rtol=1e-12)
    np.testing.assert_allclose(diagonal, np.diag(expected), rtol=1e-12)
    np.testing.assert_allclose(some, expected[:, indices], rtol=1e-12)
    assert operator.T is operator
    assert lx.is_positive_semidefinite(operator)
    assert lx.is_symmetric(operator)


def test_derivatives():
    """With respect to parameters and points; forward, reverse, and both; under `vmap`; of a
    function that closes over its length scale.
    """

    def ours(length, x):
        closing = tr.KernelLinearOperator(lambda x, y: RBF(length)(x, y), x, block_size=4)
        return multiplied(closing, V)

    def theirs(length, x):
        return dense(length, x) @ V

    @jax.jit
    def run(lengths, x):
        def all_of(fn):
            def loss(*args):
                return jnp.sum(jnp.sin(fn(*args)))

            second = jax.jacfwd(jax.grad(loss))(lengths[0], x)
            first = jax.grad(loss, (0, 1))(lengths[0], x)
            return first, second, jax.vmap(fn, (0, None))(lengths, x)

        return all_of(ours), all_of(theirs)

    ours_of, theirs_of = run(np.array([0.7, 1.0]), X)
    for found, expected in zip(*map(jax.tree.leaves, (ours_of, theirs_of)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(ours_of[-1], theirs_of[-1], rtol=1e-12, atol=1e-12)


def test_complex_kernels_and_trees_of_points():
    @eqx.filter_jit
    def run(operator, block):
        shifted = operator + 0.5 * lx.IdentityLinearOperator(operator.in_structure())
        products = multiplied(operator, block), multiplied(operator.T, block)
        log_det = tr.logdet(jr.key(0), shifted, N).value
        return operator.as_matrix(), *products, lx.conj(operator).as_matrix(), log_det

    operator = tr.KernelLinearOperator(turning(1.0), POINTS, block_size=6)
    assert not lx.is_symmetric(operator)
    block = V + 1j * V[::-1]
    matrix, product, transposed, conjugate, log_det = run(operator, block)
    expected = np.asarray(dense(1.0)) * np.exp(1j * (PHASES[:, None] - PHASES))
    np.testing.assert_allclose(matrix, expected, rtol=1e-12)
    np.testing.assert_allclose(product, expected @ block, atol=1e-12)
    np.testing.assert_allclose(transposed, expected.T @ block, atol=1e-12)
    np.testing.assert_allclose(conjugate, expected.conj(), rtol=1e-12)
    truth = np.linalg.slogdet(expected + 0.5 * np.eye(N))[1]
    np.testing.assert_allclose(log_det, truth, rtol=1e-10)


def composite(length, noise, x=X):
    """A sum of all that is read as what it is."""
    K, D = kernel(length, x), lx.DiagonalLinearOperator(jnp.linspace(1.0, 2.0, N))
    other = lx.MatrixLinearOperator(dense(0.3, x), PSD)
    identity = lx.IdentityLinearOperator(K.in_structure())
    tagged = lx.TaggedLinearOperator(D @ (K @ D), PSD)
    return jnp.asarray(2.0) * K + tagged / 3.0 + other + D + noise * identity


def test_sums_and_scalings_are_read():
    operator, indices = composite(0.7, 0.1), np.array([3, 3, 22])
    assert has_entries(operator)

    @eqx.filter_jit
    def run(operator):
        entries = stored_entries(operator, slice(None), slice(None)), stored_diagonal(operator)
        solution = tr.trace(jr.key(0), operator, 2)
        return operator.as_matrix(), *entries, columns(operator, indices), solution

    expected, whole, diagonal, some, solution = jax.device_get(run(operator))
    np.testing.assert_allclose(whole, expected, rtol=1e-12)
    np.testing.assert_allclose(diagonal, np.diag(expected), rtol=1e-12)
    np.testing.assert_allclose(some, expected[:, indices])
    np.testing.assert_allclose(solution.value, np.trace(expected), rtol=1e-12)
    assert solution.num_matvecs == 0


@pytest.mark.parametrize("block_size", [None, 3])
def test_contractions(block_size):
    """Products with weights: against the entries, with derivatives in everything."""
    rng = np.random.default_rng(3)
    vectors, core = (rng.standard_normal((m, 3)) + 1j * rng.standard_normal((m, 3)) for m in (N, 3))
    core = core + core.conj().T

    def of(length, s, points, vectors):
        K = tr.KernelLinearOperator(turning(length), points, block_size=block_size)
        other = lx.MatrixLinearOperator(dense(s, points["x"]) + 0j, PSD)
        other = other / 3.0 + 1j * lx.MatrixLinearOperator(1j * dense(length))
        return s * K + other + s * lx.IdentityLinearOperator(K.in_structure())

    def ours(*args):
        return jnp.sum(BlockOperator(of(*args)).forms([args[-1] @ core], [args[-1]])).real

    def theirs(*args):
        weights = args[-1] @ core @ args[-1].conj().T
        return jnp.sum(weights.conj() * of(*args).as_matrix()).real

    args, pair = (jnp.asarray(0.7), jnp.asarray(0.4), POINTS, vectors), (ours, theirs)
    with any_promotion():
        both = jax.jit(lambda *args: [jax.value_and_grad(f, (0, 1, 2, 3))(*args) for f in pair])
        found, expected = both(*args)
    for a, b in zip(*map(jax.tree_util.tree_leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10 * np.abs(b).max())


def test_which_columns_are_cheap():
    """Low rank pays for dense operators alone."""
    operator = by_products(dense(0.7), PSD)
    assert not has_entries(operator)
    assert not has_entries(kernel(0.7) + operator)
    for name in ("sparse", "diagonal", "tridiagonal", "identity"):
        assert not has_entries(STORED[name][0]())
    assert has_entries(STORED["sparse"][0](), sparse=True)
    for name in ("scaled", "complex"):
        assert has_entries(STORED[name][0]())


def test_memory_is_that_of_blocks():
    """Neither value nor derivative has an array of n^2 numbers."""
    n = 1500
    x = np.random.default_rng(0).standard_normal((n, 2))
    v = np.ones((n, 4))

    def product(length, x):
        return jnp.sum(multiplied(kernel(length, x, 16), v) ** 2)

    workspace = 0 if jax.default_backend() == "cpu" else 2**25  # of cuBLAS, whatever is multiplied
    compiled = jax.jit(jax.value_and_grad(product, (0, 1))).lower(0.7, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes - workspace < n * n * 8 / 4

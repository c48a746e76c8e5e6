"""The plans of a log-determinant are numbers: padded arrays with traced numbers give what arrays of
the right size give.
"""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from traceax._core.control_flow import of_size
from traceax._core.precision import any_promotion
from traceax._functions.funm import truncations
from traceax._linalg.lanczos import lanczos, padded_lanczos, quadrature
from traceax._logdet.log_quadrature import log_quadrature
from traceax._sketch.low_rank import nystrom_of

from ..helpers import variant, with_spectrum

N, SHAPES = 30, ((5, 4), (3, 7), (1, 11))


def definite(dtype=np.float64):
    return jnp.asarray(with_spectrum(np.random.default_rng(0), np.geomspace(1, 50, N), dtype))


@pytest.fixture(autouse=True)
def _promotion():
    """As all calls of the algebra are made."""
    with any_promotion():
        yield


@pytest.fixture(params=[variant(np.float64), np.complex128])
def matrix(request):
    return definite(request.param)


@pytest.mark.parametrize("known", [True, variant(False)])
def test_recurrences_and_their_quadrature(matrix, known):
    """The same numbers from one program for all shapes, whose recurrences also may end early."""
    floor = jnp.asarray(0.5 if known else jnp.nan)
    is_complex = jnp.iscomplexobj(matrix)
    z = jr.normal(jr.key(1), (N, 5), matrix.dtype)
    z = z.at[:, 0].set(matrix[:, :3].sum(1) if known else jnp.eye(N)[:, 0])

    @jax.jit
    def padded(matrix, floor, start, p, q):
        krylov = padded_lanczos(lambda v: matrix @ v, start, SHAPES, p, q, 1e-16)
        found = log_quadrature(krylov, floor, N, is_complex, p, [q for _, q in SHAPES])
        return krylov, found, quadrature(krylov), krylov.residual

    @partial(jax.jit, static_argnames="q")
    def by_itself(matrix, floor, start, q):
        krylov = lanczos(lambda v: matrix @ v, start, q, 1e-16)
        found = log_quadrature(krylov, floor, N, is_complex, start.shape[1])
        return krylov, found, quadrature(krylov)

    for p, q in SHAPES:
        start = jnp.where(jnp.arange(5) < p, z, 0)
        krylov, found, (nodes, weights, _), residual = padded(matrix, floor, start, p, q)
        plain, alone, expected = by_itself(matrix, floor, z[:, :p], q)
        basis = krylov.basis[: p * q].reshape(q, p, N).transpose(0, 2, 1)
        np.testing.assert_allclose(basis, plain.basis, atol=1e-10)
        np.testing.assert_allclose(krylov.alpha[:q, :p], plain.alpha, atol=1e-10)
        np.testing.assert_allclose(krylov.beta[:q, :p], plain.beta, atol=1e-10)
        assert not np.any(krylov.basis[p * q :])
        assert not np.any(krylov.alpha[q:])
        np.testing.assert_allclose(residual[:p], plain.beta[-1], atol=1e-10)
        np.testing.assert_allclose(nodes[:p, :q], expected[0], rtol=1e-10)
        np.testing.assert_allclose(weights[:p, :q], expected[1], atol=1e-10)
        assert not np.any(weights[:p, q:])
        for name in ("value", "error", "std_err", "dof", "smallest", "gap"):
            np.testing.assert_allclose(
                getattr(found, name), getattr(alone, name), rtol=1e-6, atol=1e-9, err_msg=name
            )
        np.testing.assert_allclose(found.core[:p, :q, :q], alone.core, atol=1e-8)
    assert padded._cache_size() == 1


@pytest.mark.variant
def test_shorter_recurrences_of_a_traced_number_of_steps(matrix):
    z = jr.normal(jr.key(1), (N, 1), matrix.dtype)
    for q in range(3, 12):
        krylov = padded_lanczos(lambda v: matrix @ v, z, [(1, 11)], 1, jnp.array(q), 1e-16)
        plain = lanczos(lambda v: matrix @ v, z, q, 1e-16)
        (padded, orders), (shorter, same) = truncations(krylov), truncations(plain)
        assert orders == same == 3
        np.testing.assert_allclose(padded.beta[:q], shorter.beta, atol=1e-12)
        assert not np.any(padded.beta[q:])


@pytest.mark.variant
@pytest.mark.parametrize("known", [True, False])
def test_low_rank(matrix, known):
    """Columns that are 0 change neither the approximation nor the preconditioner."""
    omega = jr.normal(jr.key(2), (N, 12), matrix.dtype) / np.sqrt(N)
    products, flag = matrix @ omega, jnp.array(known)

    @jax.jit
    def of(omega, products, flag, count):
        low_rank = nystrom_of(omega, products, flag, 1e-16, count)
        return low_rank, low_rank.built(jnp.ones(N), flag)

    for count in (1, 2, 7, 12):
        low_rank, built = of(omega, jnp.where(jnp.arange(12) < count, products, 0), flag, count)
        alone, expected = of(omega[:, :count], products[:, :count], flag, None)
        np.testing.assert_allclose(low_rank.f[:, :count], alone.f, atol=1e-9)
        assert not np.any(low_rank.f[:, count:])
        for name in ("nu", "shift", "left_out", "left_out_by_half", "status"):
            np.testing.assert_allclose(
                getattr(low_rank, name), getattr(alone, name), rtol=1e-9, err_msg=name
            )
        assert not np.any(built.factors.basis[:, count:])
        np.testing.assert_allclose(built.factors.log_det(), expected.factors.log_det(), rtol=1e-10)
        identity = jnp.eye(N, dtype=matrix.dtype)
        roots = (each.factors.inverse_root(identity) for each in (built, expected))
        np.testing.assert_allclose(*roots, atol=1e-9)
    assert of._cache_size() == 1 + 4  # one for all counts, and those of the right size


def test_sizes_under_vmap():
    """The smallest size that is large enough for all lanes."""

    def used(count):
        return of_size((8, 2, 4), count, lambda size: jnp.array(size))

    assert [int(jax.jit(used)(count)) for count in (1, 2, 3, 4, 5, 8)] == [2, 2, 4, 4, 8, 8]
    assert int(used(3)) == 4
    lanes = jax.vmap(used, out_axes=None)
    assert int(lanes(jnp.array([1, 3]))) == 4
    assert int(lanes(jnp.array([1, 2]))) == 2

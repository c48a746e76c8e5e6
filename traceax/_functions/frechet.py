r"""Derivatives of f(A) x for a Hermitian A and fixed vectors x, by Krylov spaces.

With the resolvent R(t) = (t - A)^{-1} and a contour around the spectrum,

    f(A) x = 1/(2 pi i) \oint f(t) R(t) x dt,      d(f(A) x) = 1/(2 pi i) \oint f(t) R dA R x dt.

In a Krylov space of x with the Ritz pairs (theta_j, x_j), R(t) x ~ sum_j a_j x_j / (t - theta_j)
with a_j = x_j^H x. What is left of the integral is a function of A alone, the divided difference

    d(f(A) x) ~ sum_j h_j(A) dA x_j a_j,      h_j(t) = f[t, theta_j].

The vectors dA x_j are not in the space, and so every one of them, or every cotangent of the left
side, gets a Krylov space of its own. The map from the dA x_j to the left side is linear, and its
transpose needs one Krylov space for each left side, whereas the map itself needs one for each x_j.
`divided_sums` gives both to JAX.
"""

import math

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, PyTree, Real

from .._core.estimate import scale_of
from .._core.precision import einsum
from .._linalg.lanczos import lanczos, quadrature
from .._operators.block_operator import BlockOperator
from .nodes import Function, differences_between, within_tag

#: The number of vectors whose Krylov spaces are made at once.
TOGETHER = 8


def constant(tree: PyTree) -> PyTree:
    """A tree whose arrays have no derivative."""
    return jtu.tree_map(lambda x: lax.stop_gradient(x) if eqx.is_inexact_array(x) else x, tree)


def steps_of(count: int, n: int) -> int:
    """The number of steps for a derivative by `count` Ritz vectors of an operator with n rows.

    Quadrature with s steps is exact for polynomials of degree 2s, and what q steps make of one
    vector for degree q. Kernels with little noise need 4 sqrt(k): with k / 4 alone their
    derivatives were wrong.
    """
    count = min(count, n)
    return min(n, max(8, count // 4, math.ceil(4 * math.sqrt(count))))


def divided_sums(
    block: BlockOperator,
    fn: Function,
    vectors: Inexact[Array, "n c"],
    nodes: Real[Array, " c"],
    shares: Inexact[Array, "c p"],
) -> Inexact[Array, "n p"]:
    """sum_j f[A, theta_j] u_j a_j, for every column of shares a_j. As a function of the vectors u_j
    alone it has a derivative, itself, and a transpose: they agree as far as both have converged.

    Cost: a Krylov space for each vector, or for each column of a cotangent; `8 n` numbers for each
    step of one beside the result.
    """
    c, p = shares.shape
    still = BlockOperator(constant(block.operator)).linearised()
    given = still, constant(fn), steps_of(c, block.n)

    # A linear solve is the function of JAX that takes a transpose of its own. The matrix of this
    # one is the identity as far as JAX knows, and works on both blocks side by side.
    def solve(_, both):
        image = _sums(*given, both[:, :c], jnp.tile(nodes[:, None], (1, p)), shares)
        return jnp.concatenate([jnp.zeros_like(vectors), image], axis=1)

    def transpose_solve(_, both):
        w = jnp.conj(both[:, c:])
        image = jnp.conj(_sums(*given, w, jnp.tile(nodes, (p, 1)), jnp.conj(shares.T)))
        return jnp.concatenate([image, jnp.zeros_like(w)], axis=1)

    both = jnp.pad(vectors, ((0, 0), (0, p)))
    return lax.custom_linear_solve(lambda x: x, both, solve, transpose_solve)[:, c:]


def _sums(
    block: BlockOperator,
    fn: Function,
    num_steps: int,
    vectors: Inexact[Array, "n c"],
    nodes: Real[Array, "c o"],
    shares: Inexact[Array, "c o"],
) -> Inexact[Array, "n o"]:
    """sum_i f[A, theta_io] u_i a_io, from a few Krylov spaces at once."""

    def of_block(rows, theta, share):
        unit = scale_of(rows, axis=1)
        rows = rows / unit.astype(rows.dtype)
        krylov = lanczos(block.mm, rows.T, num_steps, block.eps)
        ritz, weights, s = quadrature(krylov)
        ritz = within_tag(block.operator, ritz, block.eps)
        norms = jnp.linalg.norm(rows, axis=1)[:, None]
        counts = (weights > 0) & (norms > 0)
        values = differences_between(fn, ritz, theta) * share[:, None, :]
        values = jnp.where(counts[:, :, None], values, 0)
        values = (s[:, 0] * norms * unit)[:, :, None] * values
        return einsum("anw,wao->no", krylov.basis, einsum("waq,wqo->wao", s, values))

    def in_blocks(x):
        width = min(len(x), TOGETHER)
        return jnp.pad(x, ((0, -len(x) % width), (0, 0))).reshape(-1, width, x.shape[1])

    def add(total, given):  # recurrences that were not made leave blocks of zeros
        nothing = jnp.zeros_like(total)
        wanted = jnp.any(given[0] != 0)
        return total + lax.cond(wanted, of_block, lambda *_: nothing, *given), None

    zero = jnp.zeros((block.n, nodes.shape[1]), vectors.dtype)
    blocks = in_blocks(vectors.T), in_blocks(nodes), in_blocks(shares)
    return lax.scan(add, zero, blocks)[0]

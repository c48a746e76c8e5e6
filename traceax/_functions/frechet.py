r"""Derivatives of f(A) x for a Hermitian A and fixed vectors x, by Krylov spaces.

With the resolvent R(t) = (t - A)^{-1} and a contour around the spectrum,

    f(A) x = 1/(2 pi i) \oint f(t) R(t) x dt,      d(f(A) x) = 1/(2 pi i) \oint f(t) R dA R x dt.

In a Krylov space of x with the Ritz pairs (theta_j, x_j), R(t) x ~ sum_j a_j x_j / (t - theta_j)
with a_j = x_j^H x. What is left of the integral is a function of A alone, the divided difference

    d(f(A) x) ~ sum_j h_j(A) dA x_j a_j,      h_j(t) = f[t, theta_j].

The vectors dA x_j are not in the space, and so every one of them, or every cotangent of the left
side, gets a Krylov space of its own. The map from the dA x_j to the left side is linear, and its
transpose needs one Krylov space for each left side, whereas the map itself needs one for each x_j.
`linear_map` gives both to JAX.
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.estimate import scale_of
from .._core.precision import einsum
from .._linalg.lanczos import lanczos, quadrature

#: The number of vectors whose Krylov spaces are made at once.
TOGETHER = 8


def constant(tree: PyTree) -> PyTree:
    """A tree whose arrays have no derivative."""
    return jtu.tree_map(lambda x: lax.stop_gradient(x) if eqx.is_inexact_array(x) else x, tree)


def combined(
    mm: Callable[[Inexact[Array, "n c"]], Inexact[Array, "n c"]],
    vectors: Inexact[Array, "n c"],
    values: Callable[[Int[Array, " w"], Real[Array, "w q"]], Inexact[Array, "w q o"]],
    num_steps: int,
    eps: float,
) -> Inexact[Array, "n o"]:
    """The sums over i of h_io(A) u_i, for several families o of functions h_io.

    Cost: `c num_steps` products, `8 n num_steps` numbers beside the result.

    **Arguments:**

    - `mm`: a Hermitian operator, as a function that multiplies blocks.
    - `vectors`: the vectors u_i.
    - `values`: gives h_io at nodes of the vectors i, called with several i and their nodes.
    - `num_steps`: the number of steps for each vector.
    - `eps`: the relative precision of a product.
    """

    def of_block(block, index):
        unit = scale_of(block, axis=0)
        block = block / unit.astype(block.dtype)
        krylov = lanczos(mm, block, num_steps, eps)
        nodes, weights, s = quadrature(krylov)
        norms = jnp.linalg.norm(block, axis=0)
        counts = (weights > 0) & (norms > 0)[:, None]
        at_nodes = jnp.where(counts[:, :, None], values(index, nodes), 0)
        coefficients = s[:, 0, :, None] * at_nodes * (norms * unit[0])[:, None, None]
        return einsum("anw,wao->no", krylov.basis, einsum("waq,wqo->wao", s, coefficients))

    return _block_by_block(of_block, vectors)


def _block_by_block(
    of_block: Callable[[Inexact[Array, "n w"], Int[Array, " w"]], Inexact[Array, "n o"]],
    vectors: Inexact[Array, "n c"],
) -> Inexact[Array, "n o"]:
    """The sum of a function of a few vectors, and of their numbers, over all vectors."""
    n, c = vectors.shape
    width = min(c, TOGETHER)
    count = -(-c // width)
    padded = jnp.pad(vectors, ((0, 0), (0, count * width - c)))
    blocks = jnp.moveaxis(padded.reshape(n, count, width), 1, 0)
    indices = jnp.minimum(jnp.arange(count * width), c - 1).reshape(count, width)

    def add(total, pair):  # recurrences that were not made leave blocks of zeros
        block, index = pair
        nothing = jnp.zeros_like(total)
        return total + lax.cond(
            jnp.any(block != 0), of_block, lambda *_: nothing, block, index
        ), None

    shape = jax.eval_shape(of_block, blocks[0], indices[0])
    zero = jnp.zeros(shape.shape, shape.dtype)
    return lax.scan(add, zero, (blocks, indices))[0]


def steps_of(count: int, n: int) -> int:
    """The number of steps for a derivative by `count` Ritz vectors of an operator with n rows.

    Quadrature with s steps is exact for polynomials of degree 2s, and what q steps make of one
    vector for degree q. Kernels with little noise need 4 sqrt(k): with k / 4 alone their
    derivatives were wrong.
    """
    return min(n, max(8, count // 4, math.ceil(4 * math.sqrt(count))))


def linear_map(
    forward: Callable[[Array], Array],
    transposed: Callable[[Array], Array],
    u: Inexact[Array, "n c"],
    count: int,
) -> Inexact[Array, "n o"]:
    """`forward(u)`, whose derivative is itself, and whose transpose is `transposed`: the two agree
    as far as both have converged. Neither is differentiated by what it closes over.

    **Arguments:**

    - `forward`: a linear function of such blocks, to blocks of `count` columns.
    - `transposed`: its transpose (without a conjugate).
    - `u`: the argument.
    - `count`: the number of columns of the result.
    """
    c = u.shape[1]

    # A linear solve is the function of JAX that takes a transpose of its own. The matrix of this
    # one is the identity as far as JAX knows, and works on both blocks side by side.
    def solve(_, both):
        return jnp.concatenate([jnp.zeros_like(u), forward(both[:, :c])], axis=1)

    def transpose_solve(_, both):
        other = jnp.zeros((len(both), count), both.dtype)
        return jnp.concatenate([transposed(both[:, c:]), other], axis=1)

    both = jnp.pad(u, ((0, 0), (0, count)))
    return lax.custom_linear_solve(lambda x: x, both, solve, transpose_solve)[:, c:]

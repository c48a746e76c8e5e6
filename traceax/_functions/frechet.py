r"""Derivatives of f(A) x for a Hermitian A and fixed vectors x, by Krylov spaces.

With the resolvent R(t) = (t - A)^{-1} and a contour around the spectrum,

    f(A) x = 1/(2 pi i) \oint f(t) R(t) x dt,      d(f(A) x) = 1/(2 pi i) \oint f(t) R dA R x dt.

In a Krylov space of x with the Ritz pairs (theta_j, x_j), R(t) x ~ sum_j a_j x_j / (t - theta_j)
with a_j = x_j^H x. What is left of the integral is a function of A alone, the divided difference

    d(f(A) x) ~ sum_j h_j(A) dA x_j a_j,      h_j(t) = f[t, theta_j].

The vectors dA x_j are not in the space, and so every one of them, or every cotangent of the left
side, gets a Krylov space of its own, of which the eigenvectors on the left are taken. (A fixed
polynomial in A, such as Newton's form at the Ritz values, would be linear in A's products at every
order. But its values at eigenvalues away from the others grow as the products of their distances to
the nodes, by which the rounding errors of A's products are multiplied.)

The map from the dA x_j to the left side is linear, and its transpose needs one Krylov space for
each left side, whereas the map itself needs one for each x_j. `linear_map` gives both to JAX.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .._core.estimate import scale_of
from .._core.precision import einsum, matmul
from .._linalg.lanczos import lanczos, quadrature
from .._operators.block_operator import BlockOperator
from .nodes import (
    Function,
    divided_differences,
    second_differences,
    within_tag,
)

#: The number of vectors whose Krylov spaces are made at once.
TOGETHER = 8


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
        along = s[:, 0, :, None] * at_nodes * (norms * unit[0])[:, None, None]
        return einsum("anw,wao->no", krylov.basis, einsum("waq,wqo->wao", s, along))

    return _block_by_block(of_block, vectors)


def combined_exactly(
    eigenvectors: Inexact[Array, "n n"],
    eigenvalues: Real[Array, " n"],
    vectors: Inexact[Array, "n c"],
    values: Callable[[Int[Array, " w"], Real[Array, "w q"]], Inexact[Array, "w q o"]],
) -> Inexact[Array, "n o"]:
    """As `combined`, from all eigenvectors of A: by no product, with `n^2 (c + o)` operations for
    each vector.

    **Arguments:**

    - `eigenvectors`, `eigenvalues`: those of A.
    - `vectors`, `values`: as for `combined`.
    """

    def of_block(block, index):
        along = matmul(jnp.conj(eigenvectors.T), block).T[:, :, None]
        nodes = jnp.broadcast_to(eigenvalues, (len(index), eigenvalues.size))
        return matmul(eigenvectors, jnp.sum(along * values(index, nodes), axis=0))

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

    def add(total, pair):
        return total + of_block(*pair), None

    shape = jax.eval_shape(of_block, blocks[0], indices[0])
    zero = jnp.zeros(shape.shape, shape.dtype)
    return lax.scan(add, zero, (blocks, indices))[0]


def steps_of(count: int, n: int) -> int:
    """The number of steps for a derivative by `count` Ritz vectors of an operator with n rows.

    Quadrature with s steps is exact for polynomials of degree 2s, and what q steps make of one
    vector for degree q. A budget k has at most 2 sqrt(k) steps, in blocks whose space knows more
    than that of one vector. With k / 4 steps second derivatives of kernels with little noise were
    up to three times too large for k = 60; with 4 sqrt(k) they were those of k steps, but for a
    tenth of the errors of the values.
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


@jax.custom_jvp
def _constant(x: Array) -> Array:
    return x


@_constant.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError(
        "Spectral sums have two derivatives: the third is not known. Use `lax.stop_gradient` on "
        "whatever need not be differentiated three times, or finite differences with the same key."
    )


@jax.custom_jvp
def _held(x: Array) -> Array:
    return x


@_held.defjvp
def _held_jvp(primals, tangents):
    # The derivative of the result at the level above is 0 by intent, that at any other is unknown.
    (x,) = primals
    return _constant(x), jnp.zeros_like(x)


def held(tree: PyTree) -> PyTree:
    """The arrays of a tree, whose derivative is 0, and which must not be differentiated again."""

    def one(x):
        return lax.stop_gradient(_held(x)) if eqx.is_inexact_array(x) else x

    return jtu.tree_map(one, tree)


@final
class Bend(eqx.Module):
    r"""The second derivative of tr W f(A), W = X M X^H with the Ritz vectors X of some spaces.

    With the contour integral of above, and Ritz values theta of the spaces that W is from,

        d^2 tr W f(A) = 2 Re sum_i <e_i, dA x_i>,    e_i = sum_k M_ki f[theta_i, A, theta_k] EA x_k,

    for two directions dA and EA. The first derivative <X (D o M) X^H, dA> is as far as W's own
    spaces go, whereas EA x_k gets a Krylov space of its own. The derivative of G in the direction
    EA is hence that of its numbers, which f decides, and sum_i e_i x_i^H with its adjoint. The
    vectors `bent` are 0, and have the derivative e_i.

    The value itself, as a function of what f depends on, is sum_i M_ii f(theta_i). Its derivative
    in the direction EA is the sum of D o M o X^H EA X; `moved` is 0 and has the derivative
    M o X^H EA X.
    """

    nodes: Real[Array, " c"]
    rotation: Inexact[Array, "c c"]  # S: X are a basis, times S
    masses: Inexact[Array, "c c"]  # M
    bent: Inexact[Array, "n c"]
    moved: Real[Array, "c c"]
    # How many steps the spaces of EA x_k take; None if X are all eigenvectors.
    num_steps: int | None = eqx.field(static=True)

    @staticmethod
    def of(nodes, rotation, masses, n: int, num_steps: int | None) -> "Bend":
        """Where no derivative has been taken."""
        bent = jnp.zeros((n, len(nodes)), rotation.dtype)
        moved = jnp.zeros(masses.shape, nodes.dtype)
        return Bend(nodes, rotation, masses, bent, moved, num_steps)

    def _differences(self, fn: Function) -> Real[Array, "c c"]:
        found = divided_differences(fn, self.nodes[None])[0]
        return jnp.where(self.masses != 0, found, 0)

    def own(self, fn: Function) -> Real[Array, ""]:
        """What is 0, and makes the derivative of a value by what f depends on one of A."""
        return jnp.sum(self.moved * self._differences(fn))

    def contract(self, images: Inexact[Array, "n c"]) -> Real[Array, ""]:
        """What is 0, and makes the derivative of <G, A> by A one of G. `images` are the products of
        A with the basis.
        """
        return 2 * jnp.sum((jnp.conj(self.bent) * matmul(images, self.rotation)).real)

    def at(
        self, fn: Function, operator: lx.AbstractLinearOperator, basis: Inexact[Array, "n c"]
    ) -> tuple["Bend", Inexact[Array, "c c"]]:
        """This as a function of the operator, and so the core C of G = V C V^H with the basis V."""
        block = BlockOperator(operator)
        fixed_fn, fixed = held((fn, operator))
        constant = BlockOperator(fixed).linearised()
        ritz = matmul(basis, self.rotation)
        images = block.mm(ritz)
        moved = images - lax.stop_gradient(images)

        def values(index, theta):
            first, theta = self.nodes[index], within_tag(operator, theta, block.eps)
            found = second_differences(
                fixed_fn, first[:, None, None], theta[:, :, None], self.nodes[None, None]
            )
            masses = self.masses[index][:, None]
            return jnp.where(masses != 0, found, 0) * masses

        def forward(u):
            if self.num_steps is None:
                return combined_exactly(ritz, self.nodes, u, values)
            return combined(constant.mm, u, values, self.num_steps, block.eps)

        def transposed(w):
            return jnp.conj(forward(jnp.conj(w)))

        bent = linear_map(forward, transposed, moved, len(self.nodes))
        inner = matmul(jnp.conj(ritz.T), moved)
        core = self.masses * self._differences(fn)
        core = matmul(matmul(self.rotation, core), jnp.conj(self.rotation.T))
        change = (self.masses * inner.T).real
        return dataclasses.replace(self, bent=bent, moved=change), core

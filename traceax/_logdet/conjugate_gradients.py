r"""Solving with a positive definite A: preconditioned conjugate gradients.

With P = R R^H (see `low_rank`) and M = R^{-1} A R^{-H}, A x = b becomes M z = R^{-1} b,
x = R^{-H} z. From z = 0 and p = r = R^{-1} b, every step takes the best z along p,

    z += alpha p,    r -= alpha M p,    alpha = r^H r / p^H M p,

and the next direction r' + (r'^H r' / r^H r) p, with r' the new residual. Steps update r and never
compute r anew: r goes to 0 in spite of rounding errors, and callers compute b - A x. The columns of
a block share products. A column ends by itself, or where p^H M p <= 0: then M is not definite.
(`lineax.CG` has a breakdown test that depends on the scale of M, and no complex numbers.)
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.estimate import safe_norm
from .._operators.block_operator import BlockOperator
from .._sketch.leave_one_out import square_norms
from .factors import Factors


class Solve(NamedTuple):
    """Conjugate gradients for M z = R^{-1} b; column j belongs to right-hand side j."""

    z: Inexact[Array, "n t"]  # solutions and residuals in units of `unit`
    r: Inexact[Array, "n t"]
    p: Inexact[Array, "n t"]
    square: Real[Array, " t"]  # r^H r
    steps: Int[Array, " t"]
    broken: Bool[Array, " t"]  # whether a p^H M p was not positive
    unit: Inexact[Array, " t"]
    goal: Real[Array, ""]  # the square that ends a column
    most: Int[Array, ""]  # steps


def start_of_solve(target: Inexact[Array, "n t"], tolerance: float, most: int) -> Solve:
    """The state before the first of at most `most` steps, for M z = target = R^{-1} b."""
    norm = safe_norm(target.T)
    unit = jnp.where(norm > 0, norm, 1).astype(target.dtype)
    r = target / unit
    goal = jnp.full((), tolerance**2, target.real.dtype)
    none = jnp.zeros_like(norm, jnp.int32), jnp.zeros_like(norm, bool)
    return Solve(0 * r, r, r, square_norms(r), *none, unit, goal, jnp.asarray(most, jnp.int32))


def goes_on(state: Solve) -> Bool[Array, " t"]:
    """Which columns go on."""
    return (state.square > state.goal) & (state.steps < state.most) & ~state.broken


def cg_step(state: Solve, product: Inexact[Array, "n t"]) -> Solve:
    """One step, from the product M p."""
    goes = goes_on(state)
    curvature = jnp.sum((jnp.conj(state.p) * product).real, axis=0)  # p^H M p
    breaks = curvature <= 0  # NaN goes into the result
    alpha = jnp.where(goes & ~breaks, state.square / jnp.where(breaks, 1, curvature), 0)
    alpha = alpha.astype(product.dtype)
    r = state.r - alpha * jnp.where(goes, product, 0)
    square = square_norms(r)
    ratio = jnp.where(goes, square / jnp.where(goes, state.square, 1), 0)  # r'^H r' / r^H r
    p = jnp.where(goes, r + ratio.astype(product.dtype) * state.p, state.p)
    return state._replace(
        z=state.z + alpha * state.p,
        r=r,
        p=p,
        square=square,
        steps=state.steps + goes,
        broken=state.broken | (goes & breaks),
    )


def rounding_of_form(
    factors: Factors, largest: Real[Array, ""], x: Inexact[Array, "n t"], eps: float
) -> Real[Array, " t"]:
    """The rounding error of every x_j^H A x_j: a share of eps ||a|| ||D^{1/2} x||^2, with a the
    largest row of D^{-1/2} A D^{-1/2}, and P's scaling D. `largest` is the largest Ritz value of M,
    `eps` the relative precision of products with A.
    """
    row = jnp.maximum(largest, jnp.maximum(largest, 1) * factors.row)
    share = min(1 / 6, 6 / math.sqrt(len(x)))
    # Not the square of the norm, which overflows for operators of tiny scale.
    scaled = factors.unit[:, None].astype(x.dtype) * x
    return share * eps * jnp.square(jnp.sqrt(row) * safe_norm(scaled.T))


def _to_real(x: Inexact[Array, "n m"]) -> Real[Array, "..."]:
    return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x


def _from_real(x: Real[Array, "..."], dtype) -> Inexact[Array, "n m"]:
    return lax.complex(x[0], x[1]) if jnp.issubdtype(dtype, jnp.complexfloating) else x


def definite_solve(
    block: BlockOperator, factors: Factors, rhs: Inexact[Array, "n m"]
) -> Inexact[Array, "n m"]:
    """`A^{-1} rhs`, differentiable (any number of times) in A and in the right-hand sides `rhs`.

    Conjugate gradients with the preconditioner `factors` end at a relative residual of `eps^(3/4)`;
    the slowest column sets the number of block products. Columns that miss the residual are NaN: A
    is not positive definite, or close to singular.
    """
    tolerance = float(jnp.finfo(block.dtype).eps) ** 0.75
    factors = lax.stop_gradient(factors)

    def product(x):
        return _to_real(block.mm(_from_real(x, block.dtype)))

    def solve(_, rhs):
        target = factors.inverse_root(_from_real(rhs, block.dtype))
        end = lax.while_loop(
            lambda state: jnp.any(goes_on(state)),
            lambda state: cg_step(state, factors.preconditioned(block.mm, state.p)),
            start_of_solve(target, tolerance, 10 * block.n),
        )
        found = factors.inverse_root_adjoint(end.z * end.unit)
        return _to_real(jnp.where(end.square <= end.goal, found, jnp.nan))

    found = lax.custom_linear_solve(product, _to_real(rhs), solve, symmetric=True)
    return _from_real(found, block.dtype)

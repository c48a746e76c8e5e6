r"""Conjugate gradients: solving M z = b with a positive definite M.

From z = 0 and p = r = b, every step takes the best z along p,

    z += alpha p,    r -= alpha M p,    alpha = r^H r / p^H M p,

and the next direction r' + (r'^H r' / r^H r) p, with r' the new residual. Steps update r and never
compute r anew: r goes to 0 in spite of rounding errors, and callers compute b - M z. The columns of
a block share products. A column ends by itself, or where p^H M p <= 0: then M is not definite.
(`lineax.CG` has a breakdown test that depends on the scale of M, and no complex numbers.)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.estimate import safe_norm
from .._core.precision import column_dots, square_norms


class Solve(NamedTuple):
    """The state after some steps; column j belongs to right-hand side j."""

    z: Inexact[Array, "n t"]  # solutions and residuals in units of `unit`
    r: Inexact[Array, "n t"]
    p: Inexact[Array, "n t"]
    square: Real[Array, " t"]  # r^H r
    steps: Int[Array, " t"]
    broken: Bool[Array, " t"]  # whether a p^H M p was not positive
    unit: Inexact[Array, " t"]
    goal: Real[Array, ""]  # the square that ends a column
    most: Int[Array, ""]  # steps


def start_of_solve(b: Inexact[Array, "n t"], tolerance: float, most: int) -> Solve:
    """The state before the first of at most `most` steps, for M z = b."""
    norm = safe_norm(b.T)
    unit = jnp.where(norm > 0, norm, 1).astype(b.dtype)
    r = b / unit
    goal = jnp.full((), tolerance**2, b.real.dtype)
    none = jnp.zeros_like(norm, jnp.int32), jnp.zeros_like(norm, bool)
    return Solve(0 * r, r, r, square_norms(r), *none, unit, goal, jnp.asarray(most, jnp.int32))


def goes_on(state: Solve) -> Bool[Array, " t"]:
    """Which columns go on."""
    return (state.square > state.goal) & (state.steps < state.most) & ~state.broken


def cg_step(state: Solve, product: Inexact[Array, "n t"]) -> Solve:
    """One step, from the product M p."""
    goes = goes_on(state)
    curvature = column_dots(state.p, product).real  # p^H M p
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

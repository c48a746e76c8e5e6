r"""Solving with a positive definite A: preconditioned conjugate gradients.

With P = R R^H (see `_sketch.low_rank`) and M = R^{-1} A R^{-H}, A x = b becomes M z = R^{-1} b,
x = R^{-H} z. From z = 0 and p = r = R^{-1} b, every step takes the best z along p,

    z += alpha p,    r -= alpha M p,    alpha = r^H r / p^H M p,

and goes on along p = r' + (r'^H r' / r^H r) p for the new residual r'. A residual that is only
updated, never computed anew, goes to 0 in spite of rounding errors; what is left is for the caller
to compute. The columns of a block share the products of a step, and each of them ends by itself.

(`lineax.CG` takes p^H M p <= 200 eps n r^H r for a breakdown, whatever the size of M. In float32
this is so for every positive definite M of norm 1 with more than 42,000 rows, and with fewer rows
for small multiples of such matrices. It has no complex numbers either.)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.estimate import safe_norm
from .._operators.block_operator import BlockOperator
from .._sketch.leave_one_out import square_norms
from .._sketch.low_rank import LowRankPlusIdentity


class _State(NamedTuple):
    """One column for each right-hand side."""

    z: Inexact[Array, "n t"]
    r: Inexact[Array, "n t"]
    p: Inexact[Array, "n t"]
    square: Real[Array, " t"]  # r^H r
    steps: Int[Array, " t"]
    broken: Bool[Array, " t"]  # whether a p^H M p was not positive


def _to_real(x: Inexact[Array, "n m"]) -> Real[Array, "..."]:
    return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x


def _from_real(x: Real[Array, "..."], dtype) -> Inexact[Array, "n m"]:
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return x
    return lax.complex(x[0], x[1])


def conjugate_gradients(
    block: BlockOperator,
    factors: LowRankPlusIdentity,
    rhs: Inexact[Array, "n t"],
    tolerance: float | Real[Array, ""] | Real[Array, " t"],
    max_steps: int | Int[Array, ""] | None = None,
) -> tuple[Inexact[Array, "n t"], Int[Array, ""]]:
    """Solve `A X = rhs`.

    A column ends where p^H M p is not positive: then M is not definite.

    **Arguments:**

    - `block`: the operator A.
    - `factors`: the preconditioner.
    - `rhs`: the right-hand sides.
    - `tolerance`: the norm of the residual R^{-1} (b - A x) to reach, relative to that of R^{-1} b;
        for each right-hand side, or the same for all.
    - `max_steps`: the largest number of steps. By default it is 10 n, and a solution that has not
        reached its tolerance by then is NaN.

    **Returns:**

    The solutions, and the number of matvecs for all of them.
    """
    target = factors.inverse_root(rhs)
    n, t = target.shape
    unit = safe_norm(target.T)
    unit = jnp.where(unit > 0, unit, 1).astype(target.dtype)
    most = 10 * n if max_steps is None else max_steps
    goal = jnp.square(jnp.asarray(tolerance, target.real.dtype))

    def goes_on(state):
        return (state.square > goal) & (state.steps < most) & ~state.broken

    def step(state):
        goes = goes_on(state)
        product = factors.preconditioned(block.mm, state.p)
        curvature = jnp.sum((jnp.conj(state.p) * product).real, axis=0)
        breaks = curvature <= 0  # NaN goes into the result
        alpha = jnp.where(goes & ~breaks, state.square / jnp.where(breaks, 1, curvature), 0)
        z = state.z + alpha.astype(target.dtype) * state.p
        r = state.r - alpha.astype(target.dtype) * product
        square = square_norms(r)
        ratio = jnp.where(goes, square / jnp.where(goes, state.square, 1), 0)
        p = r + ratio.astype(target.dtype) * state.p
        return _State(z, r, p, square, state.steps + goes, state.broken | (goes & breaks))

    r = target / unit
    start = _State(0 * r, r, r, square_norms(r), jnp.zeros(t, jnp.int32), jnp.zeros(t, bool))
    end = lax.while_loop(lambda state: jnp.any(goes_on(state)), step, start)
    solutions = factors.inverse_root_adjoint(end.z * unit)
    if max_steps is None:
        solutions = jnp.where(end.square <= goal, solutions, jnp.nan)
    return solutions, jnp.sum(end.steps)


def definite_solve(
    block: BlockOperator, factors: LowRankPlusIdentity, rhs: Inexact[Array, "n m"]
) -> Inexact[Array, "n m"]:
    """`A^{-1} rhs`, differentiable (any number of times) in A and in the right-hand side.

    **Arguments:**

    - `block`: the operator A.
    - `factors`: the preconditioner.
    - `rhs`: a block of right-hand sides.

    **Returns:**

    The solutions, by conjugate gradients to a relative residual of `eps^(3/4)`. They take as many
    block products as the slowest of them takes steps. A solution is NaN where that residual was not
    reached: the operator is not positive definite, or too close to a singular one.
    """
    tolerance = float(jnp.finfo(block.dtype).eps) ** 0.75
    factors = lax.stop_gradient(factors)

    def product(x):
        return _to_real(block.mm(_from_real(x, block.dtype)))

    def solve(_, rhs):
        rhs = _from_real(rhs, block.dtype)
        return _to_real(conjugate_gradients(block, factors, rhs, tolerance)[0])

    solution = lax.custom_linear_solve(product, _to_real(rhs), solve, symmetric=True)
    return _from_real(solution, block.dtype)

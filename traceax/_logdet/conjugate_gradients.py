r"""Solving with a positive definite A: preconditioned conjugate gradients.

With P = R R^H (see `_sketch.low_rank`) and M = R^{-1} A R^{-H}, A x = b becomes
M (R^H x) = R^{-1} b. This right-hand side is scaled to entries of mean square 1, so that the
tolerance is for the norm of the residual relative to that of R^{-1} b. A complex system is solved
as a real one of twice the size (lineax's CG has no complex numbers).
"""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, Int, Real

from .._core.estimate import scale_of
from .._operators.block_operator import BlockOperator
from .._sketch.low_rank import LowRankPlusIdentity


def _to_real(x: Inexact[Array, "n ..."]) -> Real[Array, "..."]:
    return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x


def _from_real(x: Real[Array, "..."], dtype) -> Inexact[Array, "n ..."]:
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return x
    return lax.complex(x[0], x[1])


def _root_mean_square(x: Array) -> Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def conjugate_gradients(
    block: BlockOperator,
    factors: LowRankPlusIdentity,
    rhs: Inexact[Array, " n"],
    tolerance: float | Real[Array, ""],
    max_steps: int | Int[Array, ""] | None = None,
) -> tuple[Inexact[Array, " n"], Int[Array, ""]]:
    """Solve `A x = rhs`, with `lineax.CG`.

    **Arguments:**

    - `block`: the operator A.
    - `factors`: the preconditioner.
    - `rhs`: the right-hand side.
    - `tolerance`: the residual to reach, relative to the right-hand side.
    - `max_steps`: the largest number of steps. By default there is none, and an error is raised,
        at run time, if the tolerance cannot be reached.

    **Returns:**

    The solution and the number of steps, each with one matvec.
    """
    dtype = block.dtype

    def product(x):
        column = _from_real(x, dtype)[:, None]
        column = factors.preconditioned(block.mm, column)
        return _to_real(column[:, 0])

    target = _to_real(factors.inverse_root(rhs[:, None])[:, 0])
    unit = scale_of(target)
    unit = unit * _root_mean_square(target / unit)
    unit = jnp.where(unit > 0, unit, 1)
    structure = jax.ShapeDtypeStruct(target.shape, target.dtype)
    operator = lx.FunctionLinearOperator(product, structure, lx.positive_semidefinite_tag)
    # A residual that is only updated, never computed anew, goes to 0 in spite of rounding errors.
    # (Both limits may be arrays, which lineax' annotations do not say.)
    limits: Any = {"atol": tolerance, "max_steps": max_steps}
    solver = lx.CG(0.0, norm=_root_mean_square, stabilise_every=None, **limits)
    solution = lx.linear_solve(operator, target / unit, solver, throw=max_steps is None)
    x = _from_real(unit * solution.value, dtype)
    return factors.inverse_root_adjoint(x[:, None])[:, 0], solution.stats["num_steps"]


def columns_by_conjugate_gradients(
    block: BlockOperator,
    factors: LowRankPlusIdentity,
    rhs: Inexact[Array, "n t"],
    tolerance: float | Real[Array, ""] | Real[Array, " t"],
    max_steps: int | Int[Array, ""] | None = None,
) -> tuple[Inexact[Array, "n t"], Int[Array, ""]]:
    """`conjugate_gradients` for every column of a block. The columns share the products of a step,
    and each of them ends by itself.

    **Arguments:** those of `conjugate_gradients`; the tolerance may have one entry for each column.

    **Returns:**

    The solutions, and the number of matvecs for all of them.
    """
    if rhs.shape[1] == 1:  # a loop of one lane would take longer to compile
        x, steps = conjugate_gradients(
            block, factors, rhs[:, 0], jnp.reshape(tolerance, ()), max_steps
        )
        return x[:, None], steps

    def one(column, tolerance):
        return conjugate_gradients(block, factors, column, tolerance, max_steps)

    tolerances = jnp.broadcast_to(tolerance, rhs.shape[1:])
    x, steps = jax.vmap(one, (1, 0), (1, 0))(rhs, tolerances)
    return x, jnp.sum(steps)


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
    block products as the slowest of them takes steps.
    """
    tolerance = float(jnp.finfo(block.dtype).eps) ** 0.75
    factors = lax.stop_gradient(factors)

    def product(x):
        return _to_real(block.mm(_from_real(x, block.dtype)))

    def solve(_, rhs):
        rhs = _from_real(rhs, block.dtype)
        return _to_real(columns_by_conjugate_gradients(block, factors, rhs, tolerance)[0])

    solution = lax.custom_linear_solve(product, _to_real(rhs), solve, symmetric=True)
    return _from_real(solution, block.dtype)

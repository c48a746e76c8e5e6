"""The Nystrom approximation of a semidefinite operator, and what leaving out a probe does to it.

With Omega = P R, H = P^H A P = C^H C and F = A P C^{-1}, the approximation is F F^H. Without probe
i it is F (I - q_i q_i^H) F^H, where q_i = cn(C^{-H} s_i), s_i = cn(R^{-H})_i. The difference
between A and that, applied to omega_i, is z_i rho_i / sqrt(d_i), where z_i = F q_i,
d_i = ||C^{-H} s_i||^2 and rho_i = s_i^H r_i.

A multiplies an orthonormal basis P of the probes rather than the probes themselves. In exact
arithmetic this is the same. In floating point it is better, because it does not matter that the
probes are nearly dependent if k is close to n.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.estimate import (
    NOT_SEMIDEFINITE,
    NOT_SYMMETRIC,
    SUCCESSFUL,
    rounding_of,
    safe_norm,
)
from .._linalg.factorisations import cholesky, divide_two_by_upper
from .._operators.block_operator import BlockOperator
from .._probes.samplers import AbstractSampler
from .columns import Columns
from .leave_one_out import (
    Scaled,
    adjoint,
    column_dots,
    leave_one_out_directions,
    matmul,
    rescale_error,
    scaled,
    shift_of,
    without_zero_pivots,
)


class Nystrom(NamedTuple):
    """The factors for A / scale + nu I (of a positive semidefinite A)."""

    products: Scaled  # A P, as multiplied
    nu: Real[Array, ""]
    sketch: Inexact[Array, "n m"]  # (A / scale + nu I) P
    core: Inexact[Array, "m m"]  # P^H A P / scale, without the shift
    r: Inexact[Array, "m m"]
    s: Inexact[Array, "m m"]
    f: Inexact[Array, "n m"]
    q: Inexact[Array, "m m"]
    inverse: Real[Array, " m"]  # 1 / d_i
    rho: Real[Array, " m"]
    columns: Columns
    tag: Int[Array, ""]  # SUCCESSFUL, or the status that says why the tag is wrong

    def rounding(self, eps: float) -> Real[Array, ""]:
        """The standard error that rounding adds to the trace, for products of precision `eps`."""
        # The orthonormal columns of P are shorter than probes.
        longer = jnp.sqrt(self.sketch.shape[0] / self.columns.used)
        return rounding_of(longer.astype(self.nu.dtype) * self.products.norm, eps)

    def unless_wrong(self, *pairs: tuple[Array, Array | int]) -> list[Array]:
        """The first of each pair or, if the tag is wrong, the second, which needs no tag."""
        wrong = self.tag != SUCCESSFUL
        return [jnp.where(wrong, plain, estimated) for estimated, plain in pairs]


def is_asymmetric(
    core: Inexact[Array, "m m"], norm: Real[Array, ""], n: int, eps: float
) -> Bool[Array, ""]:
    """Whether a core shows that A^H != A.

    Let A = S + X with a Hermitian S and X^H = -X. The core of A differs from its adjoint by
    2 Omega^H X Omega. The core of a Hermitian A differs from its adjoint by rounding alone: by at
    most 2 eps ||Y||_F, if the entries of Y = A Omega are rounded once and Omega has norm 1. The
    limit is larger. sqrt(eps) ||Y||_F leaves room for sums of many terms, for products in
    TensorFloat-32, and for solves. 100 sqrt(n) eps ||Y||_F, which is also the limit for negative
    eigenvalues, leaves room for half precision, where nothing can be decided. An X below the limit
    does little harm: the error of the approximation is ||X P C^{-1}||_F^2 <= ||X P||_F^2 / nu, with
    nu >= eps ||Y||_F.

    **Arguments:**

    - `core`: Omega^H A Omega.
    - `norm`: ||A Omega||_F.
    - `n`: the size of A.
    - `eps`: the relative precision of a product.
    """
    apart = jnp.linalg.norm(core - adjoint(core))
    return apart > asymmetry_limit(n, eps) * norm


def asymmetry_limit(n: int, eps: float) -> float:
    """How far, relative to their norm, what should be equal if A^H = A may be apart: see
    `is_asymmetric`.
    """
    return max(math.sqrt(eps), 100 * math.sqrt(n) * eps)


def shifted_cholesky(h, nu):
    """The upper Cholesky factor of H + nu' I, with the least nu' in nu, 10 nu, ... for which there
    is one, and that nu'.

    H is symmetrised. No eigenvalue is ever truncated: that would bias the estimate.
    """
    eye = jnp.eye(h.shape[0], dtype=h.dtype)

    def factorise(state):
        _, _, nu, _ = state
        factor = cholesky(h + nu * eye)
        # The operator has size 1. If a shift of 1000 is not enough, it holds NaN.
        goes_on = ~jnp.isfinite(factor[-1, -1]) & (nu < 1e3)
        return goes_on, nu, 10 * nu, factor

    # The loop makes the first factorisation, too, so that only one has to be compiled.
    start = jnp.array(True), jnp.zeros_like(nu), nu, h
    _, nu, _, factor = lax.while_loop(lambda state: state[0], factorise, start)
    return nu, factor


class NystromState(NamedTuple):
    """The products with the basis of the probes, Omega = P R. Probes are rows, see
    `AbstractExtendable`.
    """

    p: Inexact[Array, "m n"]
    r: Inexact[Array, "m m"]
    products: Inexact[Array, "m n"]  # of +A or -A, whichever is positive

    def omega(self) -> Inexact[Array, "n m"]:
        """The probes."""
        return matmul(self.p.T, self.r)

    def factors(self, columns: Columns, eps: float) -> Nystrom:
        """The approximation."""
        return nystrom(self.p.T, self.r, self.products.T, columns, eps)


def empty_nystrom(growth: Any, block: BlockOperator) -> NystromState:
    """The state without probes."""
    vectors = growth.empty(block)
    return NystromState(vectors, growth.empty_factor(block), vectors)


def extend_nystrom(
    state: NystromState, sampler: AbstractSampler, growth: Any, block: BlockOperator, sign: int
) -> NystromState:
    """Append probes: orthonormalise them against the others, and multiply the result.

    **Arguments:**

    - `state`: the probes so far.
    - `sampler`: the distribution of the probes.
    - `growth`: the new probes, a `Growth`.
    - `block`: the operator.
    - `sign`: 1 or -1, so that `sign * A` is positive semidefinite.

    **Returns:**

    The new state. Cost: m matvecs for m new probes.
    """
    omega = growth.probes_of(sampler, block, growth.empty(block))
    p, r = growth.orthonormalise(state.p, state.r, lambda rows: rows(omega))
    return NystromState(
        p, r, growth.multiply(block, lambda x: sign * block.mm(x), p, state.products)
    )


def signed_estimate(
    factors: Nystrom, sign: int, value: Inexact[Array, "..."], std_err: Real[Array, "..."]
) -> tuple[Array, Array, Array]:
    """The estimate for A.

    **Arguments:**

    - `factors`: the factors.
    - `sign`: 1 or -1: the factors are those of `sign * A / scale`.
    - `value`: the value of the estimate from the factors. If the tag is wrong, the value from
        Hutchinson's samples, which need no tag.
    - `std_err`: the standard error of the value.

    **Returns:**

    The value, its standard error, and the status.
    """
    size = factors.products.size
    status = factors.products.status
    status = jnp.where(status == SUCCESSFUL, factors.tag, status)
    value = sign * size * value.astype(factors.f.dtype)
    return value, rescale_error(size, std_err), status


def nystrom(p: Array, r: Array, products: Array, columns: Columns, eps: float) -> Nystrom:
    """The Nystrom approximation from products with the basis of the probes Omega = P R, in
    `3 n m^2` operations.

    **Arguments:**

    - `p`: the basis.
    - `r`: the triangular factor.
    - `products`: those of the basis, with +A or -A, whichever is positive.
    - `columns`: which columns are in use.
    - `eps`: the relative precision of a product.

    **Returns:**

    A `Nystrom`.
    """
    n = p.shape[0]
    r = without_zero_pivots(columns.triangle(r))
    s = leave_one_out_directions(r)
    multiplied = scaled(products)
    # shift_of expects probes of norm sqrt(n); the columns of P have norm 1.
    least = shift_of(math.sqrt(n) * multiplied.norm, n, eps)
    core = matmul(adjoint(p), multiplied.numbers)
    nu, factor = shifted_cholesky(core, least)
    # An eigenvalue of the core is a Rayleigh quotient of the operator. If one is below zero by more
    # than the rounding of the products, the operator is not semidefinite.
    wrong = ~(nu <= 100 * math.sqrt(n) * least)
    tag = jnp.where(wrong, NOT_SEMIDEFINITE, SUCCESSFUL)
    tag = jnp.where(is_asymmetric(core, multiplied.norm, n, eps), NOT_SYMMETRIC, tag)

    sketch = multiplied.numbers + nu * p
    f, q_h = divide_two_by_upper(sketch, adjoint(s), factor)
    # d_i may be larger than any float: keep its root until it is inverted.
    length = safe_norm(q_h)
    q, inverse = adjoint(q_h / length[:, None]), jnp.square(1 / length)
    rho = jnp.abs(column_dots(s, r))
    return Nystrom(multiplied, nu, sketch, core, r, s, f, q, inverse, rho, columns, tag)

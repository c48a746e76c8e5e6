"""The Nystrom approximation of a semidefinite operator, and what leaving out a probe does to it.

With Omega = P R, H = P^H A P = C^H C and F = A P C^{-1}, the approximation is F F^H. Without
probe i it is F (I - q_i q_i^H) F^H with q_i = cn(C^{-H} s_i), s_i = cn(R^{-H})_i,
d_i = ||C^{-H} s_i||^2, and A less that, applied to omega_i, is z_i rho_i / sqrt(d_i) with
z_i = F q_i, rho_i = s_i^H r_i.

Multiplying an orthonormal basis P of the probes rather than the probes themselves is the same in
exact arithmetic, and better in floating point: their near-dependence (k close to n) drops out.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.estimate import (
    NOT_SEMIDEFINITE,
    NOT_SYMMETRIC,
    SUCCESSFUL,
    Estimate,
    make_estimate,
    rounding_of,
    safe_norm,
)
from .._linalg.factorisations import cholesky, divide_two_by_upper
from .._operators.block_operator import BlockOperator
from .leave_one_out import (
    Scaled,
    adjoint,
    append_basis,
    column_dots,
    extend_factor,
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
    tag: Int[Array, ""]  # the status that the tag deserves: SUCCESSFUL where it may be right

    def rounding(self, eps: float) -> Real[Array, ""]:
        """The standard error that rounding adds to the trace, products being good to `eps`."""
        # The orthonormal columns of P are shorter than probes.
        n, m = self.sketch.shape
        return rounding_of(math.sqrt(n / m) * self.products.norm, eps)

    def unless_wrong(self, *pairs: tuple[Array, Array | int]) -> list[Array]:
        """What was estimated; with a wrong tag, what stands beside it and needs none."""
        wrong = self.tag != SUCCESSFUL
        return [jnp.where(wrong, plain, estimated) for estimated, plain in pairs]


def is_asymmetric(
    core: Inexact[Array, "m m"], norm: Real[Array, ""], n: int, eps: float
) -> Bool[Array, ""]:
    """Whether a core says that A^H != A.

    The core of A = S + X with X^H = -X differs from its adjoint by 2 Omega^H X Omega, that of a
    Hermitian A by rounding alone: by no more than 2 eps ||Y||_F of products Y = A Omega that are
    rounded once, entry by entry, for Omega of norm 1. sqrt(eps) ||Y||_F leaves room for sums of
    many terms, for products in TensorFloat-32 and for solves; and 100 sqrt(n) eps ||Y||_F, the
    limit for negative eigenvalues as well, for half precision, where nothing can be told. What
    stays below does little harm: the approximation errs by ||X P C^{-1}||_F^2 <= ||X P||_F^2 / nu,
    and nu >= eps ||Y||_F.

    **Arguments:**

    - `core`: Omega^H A Omega.
    - `norm`: ||A Omega||_F.
    - `n`: the size of A.
    - `eps`: the relative precision of a product.
    """
    apart = jnp.linalg.norm(core - adjoint(core))
    return apart > max(math.sqrt(eps), 100 * math.sqrt(n) * eps) * norm


def shifted_cholesky(h, nu):
    """The upper Cholesky factor of H + nu' I with the least nu' in nu, 10 nu, ... that has one.

    H is symmetrised. No eigenvalue is ever truncated: that would bias the estimate.
    """
    eye = jnp.eye(h.shape[0], dtype=h.dtype)

    def factorise(state):
        _, _, nu, _ = state
        factor = cholesky(h + nu * eye)
        # Beyond 1000 the shift exceeds the operator (scaled to size 1): NaN, and no way out.
        goes_on = ~jnp.isfinite(factor[-1, -1]) & (nu < 1e3)
        return goes_on, nu, 10 * nu, factor

    # One factorisation to compile: the loop makes the first as well.
    start = jnp.array(True), jnp.zeros_like(nu), nu, h
    _, nu, _, factor = lax.while_loop(lambda state: state[0], factorise, start)
    return nu, factor


class NystromState(NamedTuple):
    """The products with the basis of the probes Omega = P R."""

    p: Inexact[Array, "n m"]
    r: Inexact[Array, "m m"]
    products: Inexact[Array, "n m"]  # of +A or -A, whichever is positive


def append_probes(
    state: NystromState | None, omega: Inexact[Array, "n m"], block: BlockOperator, sign: int
) -> NystromState:
    """Multiply the part of new probes that is orthogonal to the others.

    **Arguments:**

    - `state`: the probes so far, or None.
    - `omega`: the new probes.
    - `block`: the operator.
    - `sign`: 1 or -1, so that `sign * A` is positive semidefinite.

    **Returns:**

    The new state. Cost: m matvecs for m new probes, and what `append_basis` takes.
    """
    if state is None:
        square = jnp.zeros((0, 0), omega.dtype)
        state = NystromState(omega[:, :0], square, omega[:, :0])
    p, c, r = append_basis(state.p, omega)
    return NystromState(
        jnp.concatenate([state.p, p], axis=1),
        extend_factor(state.r, c, r),
        jnp.concatenate([state.products, sign * block.mm(p)], axis=1),
    )


def signed_estimate(
    factors: Nystrom, sign: int, value: Inexact[Array, "..."], std_err: Real[Array, "..."]
) -> Estimate:
    """The estimate for A.

    **Arguments:**

    - `factors`: the factors.
    - `sign`: 1 or -1, as they belong to `sign * A / scale`.
    - `value`: the value of the estimate from them. With a wrong tag, that of Hutchinson's samples
        from the products, which need none.
    - `std_err`: its standard error.

    **Returns:**

    An `Estimate`.
    """
    k, size = factors.q.shape[0], factors.products.size
    status = factors.products.status
    status = jnp.where(status == SUCCESSFUL, factors.tag, status)
    value = sign * size * value.astype(factors.f.dtype)
    return make_estimate(value, rescale_error(size, std_err), k, k - 1, status)


def nystrom(state: NystromState, eps: float) -> Nystrom:
    """Approximate `sign * A` from these products: `3 n m^2` operations."""
    p, r, products = state
    n = p.shape[0]
    r = without_zero_pivots(r)
    s = leave_one_out_directions(r)
    products = scaled(products)
    # shift_of is for probes of norm sqrt(n); those of P have norm 1.
    least = shift_of(math.sqrt(n) * products.norm, n, eps)
    core = matmul(adjoint(p), products.numbers)
    nu, factor = shifted_cholesky(core, least)
    # Eigenvalues of the core are Rayleigh quotients: one below zero by more than the rounding of
    # the products says that the operator is not semidefinite.
    wrong = ~(nu <= 100 * math.sqrt(n) * least)
    tag = jnp.where(wrong, NOT_SEMIDEFINITE, SUCCESSFUL)
    tag = jnp.where(is_asymmetric(core, products.norm, n, eps), NOT_SYMMETRIC, tag)

    sketch = products.numbers + nu * p
    f, q_h = divide_two_by_upper(sketch, adjoint(s), factor)
    # d_i may be beyond the square of the largest float: keep it as a length until it is inverted.
    length = safe_norm(q_h)
    q, inverse = adjoint(q_h / length[:, None]), jnp.square(1 / length)
    rho = jnp.abs(column_dots(s, r))
    return Nystrom(products, nu, sketch, core, r, s, f, q, inverse, rho, tag)

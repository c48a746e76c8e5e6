"""How many standard errors make an error bar: constants, measured by `benchmarks/calibrate.py`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Real

from .._core.estimate import norm_of, power_of, safe_norm


def norm_factor(std_err: Real[Array, "..."]) -> Array | float:
    """The 95 % quantile of ||error|| / ||std_err|| for a vector of errors, over that of
    |error| / std_err for a single error: 1 for one error, 0.52 for infinitely many of equal size.

    For normal errors e with covariance C, ||e||^2 is about tr(C) times chi^2 / nu with
    nu = tr(C)^2 / tr(C^2) degrees of freedom. The std_err show the diagonal of C alone. But for
    samples conj(omega_i) (B omega)_i with independent real omega_i of modulus 1,
    C_ij = B_ij B_ji for i != j, and C_ii = sum_{j != i} B_ij^2, so that
    sum_{i != j} C_ij^2 <= sum_{i != j} B_ij^4 <= sum_i C_ii^2. Hence nu is at least half of its
    value for uncorrelated errors. (The same holds for sums over groups of entries, B symmetric.)
    """
    if std_err.ndim == 0:
        return 1.0
    norm = norm_of(std_err)
    shares = jnp.square(std_err / jnp.where(norm > 0, norm, 1))
    # tr(C)^2 / tr(C^2) >= 1 / (2 sum_i shares_i^2); a single number has nu = 1.
    nu = jnp.maximum(1, 1 / (2 * norm_of(shares) ** 2))
    return _chi_square_root(nu) / _chi_square_root(1.0)


def _chi_square_root(nu: Array | float) -> Any:
    """The root of the 95 % quantile of chi^2 / nu, after Wilson and Hilferty (to 2 %)."""
    deviation = 2 / (9 * nu)
    return (1 - deviation + 1.645 * deviation**0.5) ** 1.5


#: By the number p of probes: 1.25 sqrt(p) over the 95 % quantile of Student's distribution with
#: p - 1 degrees of freedom. From five probes on ties are rare.
_REACH = {2: 0.14, 3: 0.5, 4: 0.79}


def with_ties(std_err: Real[Array, " n"], probes: int | Real[Array, ""]) -> Real[Array, " n"]:
    """The standard errors of entries, from `probes` (p) independent probes, with a least value.

    If a row has one large number a off the diagonal, each sample of its entry errs by plus or minus
    a. With probability 2^(1 - p) all p samples are equal, and their mean errs by a. Similar rows
    have the standard error a / sqrt(p). The least value is the one whose interval reaches a quarter
    further than sqrt(p) times the typical standard error.
    """
    reach = sum(jnp.where(probes == p, share, 0) for p, share in _REACH.items())
    typical = jnp.where(reach > 0, safe_norm(std_err) / std_err.size**0.5, 0)
    return jnp.maximum(std_err, reach * typical)


def root(square: Array) -> Array:
    """The root of an estimated square, 0 where that is negative."""
    return power_of(square.real, 0.5)


def root_error(value: Array, std_err: Array) -> Array:
    """The standard error of a root, from the root and the standard error of the square."""
    # d sqrt(t) = dt / (2 sqrt(t)), but at most sqrt(dt), which it is where t vanishes.
    value = lax.stop_gradient(value)
    slope = 1 / jnp.where(value == 0, 1, 2 * value)
    largest = jnp.sqrt(std_err)
    return jnp.where(value == 0, largest, jnp.minimum(largest, slope * std_err))


def student_quantile(level: float, dof: Real[Array, "..."], like: Array) -> Real[Array, "..."]:
    """Student's quantile t, P(|T| <= t) = `level`, in the precision of `like`; inf for `dof=0`."""
    real = jnp.finfo(like.dtype).dtype
    # The difference is that of Python numbers: in float32 a level next to 1 would be rounded to 1.
    return _student_quantile(jnp.asarray(1 - level, real), jnp.asarray(dof, real))


@jax.jit  # an eager loop would otherwise compile a bisection for each of its calls
def _student_quantile(beyond: Real[Array, ""], dof: Real[Array, "..."]) -> Real[Array, "..."]:
    """The number t with P(|T| > t) = `beyond`."""
    # P(|T| > t) = I_x(dof / 2, 1 / 2), x = dof / (dof + t^2), by bisection of log t.
    ends = jnp.full_like(dof, -10.0), jnp.full_like(dof, 30.0)
    safe = jnp.where(dof > 0, dof, 1)
    half = jnp.full_like(dof, 0.5)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        outside = lax.betainc(safe / 2, half, safe / (safe + jnp.exp(2 * middle)))
        below = outside > beyond
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    _, high = lax.fori_loop(0, 60, halve, ends)
    return jnp.where(dof > 0, jnp.exp(high), jnp.inf)

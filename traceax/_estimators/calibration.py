"""How many standard errors make an error bar: constants, measured by `benchmarks/calibrate.py`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, PyTree, Real

from .._core.estimate import Estimate, is_scalar, norm_of, safe_norm


class Calibration(NamedTuple):
    """The measured constants of the error bars of an estimator.

    **Attributes:**

    - `stop`: the number of standard errors that must be below a tolerance for a run to end.
    - `interval`: the factor of Student's intervals; 1 for independent normal samples.
    - `tail`: the number of samples that tell as much of their spread as one normal sample.
    """

    #: A run ends when this number of standard errors, times Student's quantile over the normal one,
    #: is below the tolerance. It was calibrated with a check after every stage: at least 95 % of
    #: runs end within the tolerance, on each of six spectra. As other spectra exist, it is at least
    #: 2, whatever was measured. (Diagonals multiply it by `norm_factor`.)
    stop: float

    #: The factor by which Student's intervals from many samples are too short, on the worst of the
    #: six spectra: leave-one-out samples are not independent.
    interval: float

    #: The number of samples that tell as much of their spread as one normal sample does, on the
    #: worst of eight spectra with 8 to 60 products: 1 for normal samples, more if a few eigenvalues
    #: dominate, so that samples have heavy tails. An interval has as many degrees of freedom as its
    #: estimate, divided by this number.
    tail: float = 1.0

    @property
    def interval_of_run(self) -> float:
        """`interval`, for runs that a tolerance ended."""
        return max(self.interval, self.stop / 1.96)

    def applied(self, estimate: Estimate) -> Estimate:
        """The estimate from a fixed budget, with the constants that its intervals need."""
        return dataclasses.replace(estimate, inflation=self.interval, tail=self.tail)


CALIBRATION = {
    "hutchinson": Calibration(stop=2.15, interval=1.02, tail=5.0),
    "hutch++": Calibration(stop=2.0, interval=1.09, tail=4.5),
    "xtrace": Calibration(stop=2.0, interval=1.15, tail=3.0),
    "xnystrace": Calibration(stop=2.0, interval=1.11, tail=3.0),
    # For the Frobenius norm: the trace of a Gram matrix, whose eigenvalues decay twice as fast.
    "xnystrace, squares": Calibration(stop=2.0, interval=1.11, tail=9.0),
    "hutchinson-diagonal": Calibration(stop=2.0, interval=1.0),
    "diag++": Calibration(stop=2.0, interval=1.0),
    "xdiag": Calibration(stop=2.0, interval=1.0),
    "xnysdiag": Calibration(stop=2.0, interval=1.0),
}


def stopping_factor(stop: float, dof: int) -> float:
    """The number of standard errors to compare with a tolerance, from the constant `stop` of a
    `Calibration` and the degrees of freedom.
    """
    from scipy.special import stdtrit  # imported only here, because it takes time

    return stop / 1.96 * float(stdtrit(dof, 0.975)) if dof > 0 else float("inf")


def norm_factor(std_err: PyTree[Real[Array, "..."]]) -> Array | float:
    r"""The 95 % quantile of ||error|| / ||std_err|| for a vector of errors, divided by that of
    |error| / std_err for a single one.

    For normal errors e with covariance C, ||e||^2 is to good accuracy tr(C) times chi^2 / nu with
    nu = tr(C)^2 / tr(C^2) degrees of freedom. The std_err show only the diagonal of C. But for
    samples conj(omega_i) (B omega)_i with independent omega_i of modulus 1, in the real case
    C_ij = B_ij B_ji for i != j, and C_ii = sum_{j != i} B_ij^2, so that
    sum_{i != j} C_ij^2 <= sum_{i != j} B_ij^4 <= sum_i C_ii^2. Hence nu is at least half of its
    value for uncorrelated errors. (The same holds for sums over groups of entries of a symmetric
    B.)

    **Arguments:**

    - `std_err`: the standard errors.

    **Returns:**

    The factor: 1 for a single error, 0.52 for infinitely many of the same size.
    """
    if is_scalar(std_err):
        return 1.0
    norm = norm_of(std_err)
    shares = jtu.tree_map(lambda s: (s / jnp.where(norm > 0, norm, 1)) ** 2, std_err)
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
    """The standard errors of entries, none of which is close to 0 by chance.

    If a row has one large number a off the diagonal, a sample of its entry is off by plus or minus
    a, a product of two random signs. With probability 2^(1 - p) all p products are equal: then the
    samples do not scatter, and their mean is off by a. As such an entry should have the standard
    error a / sqrt(p), and others like it have, no standard error is smaller than that with which an
    interval reaches a quarter further than sqrt(p) times the typical one.

    **Arguments:**

    - `std_err`: the standard errors of the entries.
    - `probes`: the number p of independent probes.
    """
    reach = sum(jnp.where(probes == p, share, 0) for p, share in _REACH.items())
    typical = jnp.where(reach > 0, safe_norm(std_err) / std_err.size**0.5, 0)
    return jnp.maximum(std_err, reach * typical)


def student_quantile(level: float, dof: Real[Array, "..."], like: Array) -> Real[Array, "..."]:
    """Student's quantile t, with P(|T| <= t) = `level`; inf for `dof=0`.

    **Arguments:**

    - `level`: the probability.
    - `dof`: the degrees of freedom, which need not be whole.
    - `like`: an array of the wanted precision.

    **Returns:**

    A real array.
    """
    real = jnp.finfo(like.dtype).dtype
    # The difference is that of Python numbers: in float32 a level next to 1 would be rounded to 1.
    return _student_quantile(jnp.asarray(1 - level, real), jnp.asarray(dof, real))


@jax.jit  # an eager loop would otherwise compile a bisection for each of its calls
def _student_quantile(beyond: Real[Array, ""], dof: Real[Array, "..."]) -> Real[Array, "..."]:
    """The number t with P(|T| > t) = `beyond`."""
    # P(|T| > t) = I_x(dof / 2, 1 / 2), x = dof / (dof + t^2), by bisection of log t.
    low, high = jnp.full_like(dof, -10.0), jnp.full_like(dof, 30.0)
    safe = jnp.where(dof > 0, dof, 1)
    half = jnp.full_like(dof, 0.5)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        outside = lax.betainc(safe / 2, half, safe / (safe + jnp.exp(2 * middle)))
        below = outside > beyond
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    _, high = lax.fori_loop(0, 60, halve, (low, high))
    return jnp.where(dof > 0, jnp.exp(high), jnp.inf)

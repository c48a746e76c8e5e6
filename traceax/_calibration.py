"""How many standard errors an error bar is worth: measured, by `benchmarks/calibrate.py`."""

import jax.numpy as jnp
from jax import lax
from jax.scipy.special import betainc
from jaxtyping import Array, Int, Real

#: With so many standard errors (times Student's quantile over the normal one) below the tolerance,
#: runs that look after every block end within it in 95 % of cases at least, on six spectra. None is
#: smaller than 2, whatever was measured: these are not all there are.
STOP = {"hutchinson": 2.15, "hutch++": 2.0, "xtrace": 2.0, "xnystrace": 2.0}

#: By how much Student's intervals are too short where leave-one-out samples are not independent.
INTERVAL = {"xtrace": 1.0, "xnystrace": 1.0}


def stopping_factor(stop: float, dof: int) -> float:
    """The number of standard errors to compare with a tolerance, from the constant and the degrees
    of freedom.
    """
    from scipy.special import stdtrit  # imported only here: it takes time

    return stop / 1.96 * float(stdtrit(dof, 0.975)) if dof > 0 else float("inf")


def student_quantile(level: float, dof: Int[Array, ""], like: Array) -> Real[Array, ""]:
    """The t that covers `level` of Student's distribution on both sides; inf for `dof=0`.

    **Arguments:**

    - `level`: the probability.
    - `dof`: the degrees of freedom.
    - `like`: an array of the wanted precision.

    **Returns:**

    A real array.
    """
    real = jnp.finfo(like.dtype).dtype
    dof = jnp.asarray(dof, real)
    # P(|T| > t) = I_x(dof / 2, 1 / 2), x = dof / (dof + t^2), by bisection of log t.
    low, high = jnp.full_like(dof, -10.0), jnp.full_like(dof, 30.0)
    safe = jnp.maximum(dof, 1)
    half = jnp.full_like(dof, 0.5)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        outside = betainc(safe / 2, half, safe / (safe + jnp.exp(2 * middle)))
        below = outside > 1 - level
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    _, high = lax.fori_loop(0, 60, halve, (low, high))
    return jnp.where(dof > 0, jnp.exp(high), jnp.inf)

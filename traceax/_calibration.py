"""How many standard errors an error bar is worth: measured, by `benchmarks/calibrate.py`."""

import jax.numpy as jnp
from jax.scipy.special import betainc
from jaxtyping import Array, Int, Real
from scipy.special import stdtrit

#: With so many standard errors (times Student's quantile over the normal one) below the tolerance,
#: runs that look after every block end within it in 95 % of cases at least. Measured were 2.0
#: (Hutchinson), 1.75 (Hutch++), 1.8 (XTrace) and 1.95 (XNysTrace) on six spectra, but these are not
#: all there are: below 1.96 even a single look would not cover 95 %.
STOP = 2.0

#: The same for intervals, where the leave-one-out samples are not independent.
INTERVAL = {"xtrace": 1.0, "xnystrace": 1.0}


def stopping_factor(dof: int) -> float:
    """The number of standard errors to compare with a tolerance."""
    if dof < 1:
        return float("inf")
    return STOP / 1.96 * float(stdtrit(dof, 0.975))


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
    for _ in range(40):
        middle = (low + high) / 2
        outside = betainc(safe / 2, half, safe / (safe + jnp.exp(2 * middle)))
        low = jnp.where(outside > 1 - level, middle, low)
        high = jnp.where(outside > 1 - level, high, middle)
    return jnp.where(dof > 0, jnp.exp(high), jnp.inf)

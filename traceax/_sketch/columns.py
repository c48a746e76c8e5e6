"""Which columns of padded arrays are in use."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .._core.estimate import mean_and_std_err, safe_norm


class Columns(NamedTuple):
    """The columns of arrays that belong to probes. The others are 0, as the arrays have room for
    the most probes that a run may draw.

    **Attributes:**

    - `used`: the number of columns in use: a Python int, or a real array if it is not static.
    - `inside`: which columns are in use; None if all are.
    """

    used: int | Real[Array, ""]
    inside: Bool[Array, " m"] | None = None

    def only(self, x: Inexact[Array, "... m"], other: float = 0) -> Inexact[Array, "... m"]:
        """The entries (along the last axis) that are in use, and `other` in place of the rest."""
        return x if self.inside is None else jnp.where(self.inside, x, jnp.asarray(other, x.dtype))

    def triangle(self, r: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
        """A triangular factor, with those of the identity in place of columns not in use."""
        if self.inside is None:
            return r
        used = self.inside[:, None] & self.inside
        return jnp.where(used, r, jnp.eye(r.shape[0], dtype=r.dtype))

    def pairs(self, dtype: Any) -> Real[Array, ""]:
        """M (m - 1) for the m columns in use: what a sum of squared deviations is divided by, for
        the variance of their mean; 1 for a single one.
        """
        count = jnp.asarray(self.used, dtype)
        return count * jnp.maximum(count - 1, 1)

    def mean(self, x: Inexact[Array, "... m"]) -> Inexact[Array, "..."]:
        """The mean over the columns in use."""
        if self.inside is None:
            return jnp.mean(x, axis=-1)
        return jnp.sum(self.only(x), axis=-1) / jnp.asarray(self.used, x.dtype)

    def mean_and_std_err(self, samples: Inexact[Array, "... m"]) -> tuple[Array, Array]:
        """The mean of independent samples and its standard error, as `mean_and_std_err`."""
        if self.inside is None:
            return mean_and_std_err(samples)
        mean = self.mean(samples)
        pairs = jnp.sqrt(self.pairs(mean.real.dtype))
        std_err = safe_norm(self.only(samples - mean[..., None])) / pairs
        return mean, jnp.where(self.used > 1, std_err, jnp.inf)


def all_columns(m: int) -> Columns:
    """All of m columns."""
    return Columns(m)

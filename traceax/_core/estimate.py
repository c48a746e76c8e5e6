"""From samples to an estimate: mean, standard error, evidence; `verdict` makes the result."""

import math
from functools import partial, reduce
from typing import Any, final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real


def _number(x: Any) -> Array:
    x = jnp.asarray(x)
    if x.dtype == bool:
        x = jnp.where(x, jnp.inf, 0)
    return x.astype(jnp.float32)  # one dtype, so that `lax.cond` may choose between estimates


@final
class Evidence(eqx.Module):
    """What an estimate knows against itself.

    Each number is relative to the largest that is harmless: above 1, or where it is NaN, the
    estimate fails. In place of a number, a bool says whether it fails.

    **Attributes:**

    - `nonfinite`: whether a product holds NaN or inf, see `evidence_of`.
    - `skew`: how far products are from those of an operator with $A^* = A$.
    - `negative`: how far products contradict the tag semidefinite. The value does not rely on it.
    - `outside`: whether the quantity is not defined. The value and its errors are then NaN.
    - `unconverged`: the error over the one that is allowed.
    """

    nonfinite: Real[Array, ""] = eqx.field(default=0.0, converter=_number)
    skew: Real[Array, ""] = eqx.field(default=0.0, converter=_number)
    negative: Real[Array, ""] = eqx.field(default=0.0, converter=_number)
    outside: Real[Array, ""] = eqx.field(default=0.0, converter=_number)
    unconverged: Real[Array, ""] = eqx.field(default=0.0, converter=_number)

    @property
    def failures(self) -> "Evidence":
        """Which of the numbers fail."""
        return jtu.tree_map(lambda x: ~(x <= 1), self)  # NaN fails

    @property
    def fails(self) -> Bool[Array, ""]:
        """Whether any of the numbers fails."""
        return jnp.any(jnp.stack(jtu.tree_leaves(self.failures)), axis=0)


def evidence_of(*products: Array, **numbers: Any) -> Evidence:
    """The evidence of products with an operator: whether they are finite.

    **Arguments:**

    - `*products`: arrays, such as all products with the operator.
    - `**numbers`: further fields of the evidence.
    """
    return Evidence(nonfinite=~all_finite(*products), **numbers)


def worse(*evidence: Evidence) -> Evidence:
    """All of the evidence: of each number the largest."""
    return reduce(partial(jtu.tree_map, jnp.maximum), evidence)


def all_finite(*arrays: Array) -> Bool[Array, ""]:
    """Whether none of these arrays holds NaN or inf."""
    return reduce(jnp.logical_and, [jnp.all(jnp.isfinite(x)) for x in arrays], jnp.array(True))


def relative(number: Real[Array, ""], limit: Real[Array, ""]) -> Real[Array, ""]:
    """A number relative to its limit, which may be 0."""
    return number / jnp.maximum(limit, jnp.finfo(limit.dtype).tiny)


def skew_of(gap: Real[Array, ""], size: Real[Array, ""], n: int, eps: float) -> Real[Array, ""]:
    """How far numbers that are equal if A^H = A are apart, relative to the limit.

    `gap` is the norm of the differences, and `size` that of the numbers, or less. Rounding makes
    differences of at most 2 eps relative to the norm, if each product is rounded once. The limit is
    larger: sqrt(eps) leaves room for sums, TensorFloat-32 and solves, and 100 sqrt(n) eps, the
    limit for negative eigenvalues, for half precision (and in float32 for more than 840 rows).
    """
    return relative(gap, size) / max(math.sqrt(eps), 100 * math.sqrt(n) * eps)


@final
class Estimate(eqx.Module):
    """What the algorithm of an estimator returns: a value, its errors, and counts.

    **Attributes:**

    - `value`: a scalar (for a trace), a vector (for a diagonal), or a list of the parts of a
        vector, leaf by leaf. It alone has a derivative.
    - `std_err`: the standard error of the value, real and of the same structure, rounding included
        (see `rounding_of`); inf for a single sample.
    - `num_matvecs`: the number of products that were made.
    - `dof`: the degrees of freedom of the standard error, m - 1 for the mean of m independent
        samples. They need not be whole.
    - `evidence`: what the estimate knows against itself, such as `evidence_of(products)`. That the
        value itself is finite is seen without it.
    - `quadrature_error`: the error from ending a recurrence early, real and of the structure of the
        value; None if there is no recurrence.
    - `stats`: further statistics, by their names in `Solution.stats`.
    - `aux`: arrays that belong to the estimate of a particular quantity, or None.
    - `bounds`: two arrays like the value, between which it lies for sure; None if none are known.
    - `separate`: whether each number of the value follows from its own rows of the products alone,
        and stands where others are not finite.
    - `inflation`, `tail`: corrections of Student's intervals for samples that are neither
        independent nor normal, measured by `benchmarks/calibrate.py`; else 1. The factor by which
        intervals from many samples are too short, and the number of samples that tell as much of
        their spread as one normal sample does. (Entries of diagonals need neither.)
    - `result`: a member of `RESULTS`, from `verdict`; None before.
    """

    value: PyTree[Inexact[Array, "..."]]
    std_err: PyTree[Real[Array, "..."]]
    num_matvecs: Int[Array, ""] = eqx.field(converter=partial(jnp.asarray, dtype=jnp.int32))
    dof: Real[Array, "..."] = eqx.field(converter=jnp.asarray)
    evidence: Evidence = eqx.field(default_factory=Evidence)
    quadrature_error: Any = None
    stats: dict[str, Array] = eqx.field(default_factory=dict)
    aux: Any = None
    bounds: Any = None
    separate: bool = eqx.field(static=True, default=False)
    inflation: float = eqx.field(static=True, default=1.0)
    tail: float = eqx.field(static=True, default=1.0)
    result: Any = None


def as_value(parts: list[Array]) -> Any:
    """The value of an estimate from its parts, leaf by leaf: the list of them, or the only one."""
    return parts[0] if len(parts) == 1 else parts


def scale_of(products: Array, axis: int | None = None) -> Array:
    """The largest absolute value of these products, of all or along an axis (which is kept), or 1
    where that is 0 or not finite: squares of quotients neither over- nor underflow.
    """
    size = jnp.max(jnp.abs(products), initial=0.0, axis=axis, keepdims=axis is not None)
    usable = (size > 0) & jnp.isfinite(size)
    # XLA multiplies with the inverse, which must not be subnormal.
    largest = 0.5 / float(jnp.finfo(size.dtype).tiny)
    return jnp.where(usable, jnp.minimum(size, largest), jnp.ones_like(size))


def safe_norm(x: Inexact[Array, "... m"]) -> Real[Array, "..."]:
    """The Euclidean norm along the last axis, without over- or underflow of the squares."""
    scale = scale_of(x, axis=-1)
    return scale[..., 0] * jnp.linalg.norm(x / scale, axis=-1)


def power_of(x: Real[Array, "..."], exponent: float) -> Real[Array, "..."]:
    """A power of a number that only its error makes negative: 0, with the slope 0, where x is not
    positive. (Powers below 1 have an infinite slope at 0.)
    """
    positive = ~(x <= 0)  # NaN stays NaN
    x = jnp.where(positive, x, 1)
    return jnp.where(positive, jnp.sqrt(x) if exponent == 0.5 else x**exponent, 0)


def rounding_of(size: Array, eps: Array | float) -> Array:
    r"""The standard error that rounding adds to an estimate of an operator of this size.

    Rounding errors add up like random numbers: half the `eps` of a product, and 7.75 times that of
    the working precision for the algebra, whatever n and k are.

    **Arguments:**

    - `size`: $\|A\|_F$ for a trace; for the entries of a diagonal the norms of the rows of A.
    - `eps`: the relative precision of a product.
    """
    return (eps / 2 + 7.75 * float(jnp.finfo(size.dtype).eps)) * size


def rounding_unit(eps: float, dtype: Any) -> float:
    """The relative rounding of an eigenvalue or of a step: a unit of products, 15 of the dtype."""
    return eps + 15 * float(jnp.finfo(dtype).eps)


def norm_of(value: PyTree[Inexact[Array, "..."]]) -> Real[Array, ""]:
    """The Euclidean norm of all numbers in a value or its error; squares neither over- nor
    underflow.

    **Arguments:**

    - `value`: an array, or a PyTree of arrays.
    """
    return safe_norm(jnp.stack([safe_norm(x.reshape(-1)) for x in jtu.tree_leaves(value)]))


def mean_and_std_err(samples: Inexact[Array, "... m"]) -> tuple[Array, Array]:
    r"""The mean of independent samples (along the last axis) and its standard error $s / \sqrt m$,
    where $s^2$ is the unbiased sample variance; inf for one sample.

    **Arguments:**

    - `samples`: an array of shape `(..., m)`, real or complex.
    """
    m = samples.shape[-1]
    mean = jnp.mean(samples, axis=-1)
    if m == 1:
        return mean, jnp.full_like(mean.real, jnp.inf)
    return mean, safe_norm(samples - mean[..., None]) / math.sqrt(m * (m - 1))

"""From samples to an estimate: the mean, its standard error, and a status that says whether to
trust them.
"""

import math
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact, Int, PyTree, Real

# The statuses of an estimate inside the primitive, where they are plain integers.
# `_estimators.solution.RESULTS` has the message for each.
SUCCESSFUL, NONFINITE, NOT_SEMIDEFINITE, OUTSIDE_DOMAIN, NOT_CONVERGED = range(5)
WRONG_DIAGONAL, NOT_SYMMETRIC = 5, 6


@final
class Estimate(eqx.Module):
    """What an estimator's algebra returns: a value, its error, and counts. See `make_estimate`.

    **Attributes:**

    - `value`: a scalar (for a trace), a vector (for a diagonal), or a list of the parts of a
        vector, leaf by leaf.
    - `std_err`: the standard error of the value, real and of the same structure.
    - `num_matvecs`: the number of products that were made.
    - `dof`: the degrees of freedom of the standard error.
    - `status`: 0 for success, see `status_of`.
    - `aux`: what belongs to the estimate of a particular quantity, or None.
    - `inflation`, `tail`: corrections of Student's intervals for samples that are neither
        independent nor normal, see `Calibration`; 1 for samples that are both.
    - `columns`: the number of columns that were read without a product; None where none can be.
    """

    value: PyTree[Inexact[Array, "..."]]
    std_err: PyTree[Real[Array, "..."]]
    num_matvecs: Int[Array, ""]
    dof: Real[Array, "..."]
    status: Int[Array, ""]
    aux: Any = None
    inflation: float = eqx.field(static=True, default=1.0)
    tail: float = eqx.field(static=True, default=1.0)
    columns: Int[Array, ""] | None = None


def make_estimate(
    value: PyTree[Array],
    std_err: PyTree[Array],
    num_matvecs: Array | int,
    dof: Array | float,
    status: Array | int = SUCCESSFUL,
) -> Estimate:
    """An `Estimate` with the counts as arrays.

    **Arguments:**

    - `value`: the value: a scalar, or for diagonals a vector (or a list of its parts).
    - `std_err`: the standard error, real and of the same structure; inf for a single sample, which
        says nothing about it. Rounding is part of the standard error, see `rounding_of`.
    - `num_matvecs`: the number of products that were made.
    - `dof`: the degrees of freedom of the standard error, m - 1 for the mean of m independent
        samples. They need not be whole.
    - `status`: 0 for success, see `status_of`.

    **Returns:**

    An `Estimate`.
    """

    def integer(x):
        return jnp.asarray(x, jnp.int32)

    dof = jnp.asarray(dof)
    whole = jnp.issubdtype(dof.dtype, jnp.integer)
    return Estimate(
        value, std_err, integer(num_matvecs), integer(dof) if whole else dof, integer(status)
    )


def as_value(parts: list[Array]) -> Any:
    """The value of an estimate from its parts, leaf by leaf: the list of them, or the only one."""
    return parts[0] if len(parts) == 1 else parts


def has_no_logarithm(status: Array) -> Array:
    """Whether an operator with this status has no log-determinant. (Its estimate is NaN.)"""
    return (status == OUTSIDE_DOMAIN) | (status == NOT_SYMMETRIC)


def status_of(*products: Array) -> Array:
    """The status of an estimate: `NONFINITE` if any of these arrays holds NaN or inf, `SUCCESSFUL`
    otherwise.

    **Arguments:**

    - `*products`: arrays, such as all products with the operator.

    **Returns:**

    A scalar array of integers.
    """
    finite = jnp.array(True)
    for product in products:
        finite &= jnp.all(jnp.isfinite(product))
    return jnp.where(finite, SUCCESSFUL, NONFINITE)


def status_with_symmetry(
    status: Array, apart: Real[Array, ""], size: Real[Array, ""], n: int, eps: float
) -> Array:
    """The status, or NOT_SYMMETRIC if numbers that are equal if A^H = A are too far apart. (NaN is
    reported by the status.)

    They differ by rounding alone, by at most 2 eps relative to their norm, if each product is
    rounded once. The limit is larger: sqrt(eps) leaves room for sums of many terms, for products in
    TensorFloat-32, and for solves; 100 sqrt(n) eps, which is also the limit for negative
    eigenvalues, leaves room for half precision, where nothing can be decided.

    **Arguments:**

    - `status`: the status so far.
    - `apart`: the norm of the differences of these numbers.
    - `size`: the norm of these numbers, or less.
    - `n`: the size of A.
    - `eps`: the relative precision of a product.
    """
    limit = max(math.sqrt(eps), 100 * math.sqrt(n) * eps)
    return jnp.where((apart > limit * size) & (status != NONFINITE), NOT_SYMMETRIC, status)


def scale_of(products: Array, axis: int | None = None) -> Array:
    """The largest absolute value of these products, of all or along an axis (which is kept), or the
    largest number whose inverse is a normal one. Divided by it, their squares neither over- nor
    underflow.

    It is 1, a safe divisor, where the products are all zero or hold NaN or inf.
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
    """A power of what is not negative but for its error: 0, with the slope 0, where x is not
    positive. (Powers below 1 have an infinite slope at 0.)
    """
    positive = ~(x <= 0)  # NaN stays NaN
    x = jnp.where(positive, x, 1)
    return jnp.where(positive, jnp.sqrt(x) if exponent == 0.5 else x**exponent, 0)


def rounding_of(size: Array, eps: float) -> Array:
    r"""The standard error that rounding adds to an estimate of an operator of this size.

    Rounding errors add up like random numbers. Products are exact to `eps`, which is coarser than
    the working precision for operators of half precision. In traces of operators that a low-rank
    part captures, the rounding of products with stored matrices was measured as 0.05 to 0.25
    eps ||A||_F, and that of the algebra as 1 to 9 times ||A||_F times the eps of the working
    precision. Neither grew with n (100 and 1000) or k (16 and 64). Traces of Hessians of networks
    that compute in half precision (15 to 230 parameters, bfloat16 and float16) were off by 0.25 to
    0.55 units of that, and with JAX 0.10 by 0.55 to 0.85 (root of the mean square), as all products
    share what rounding does to the activations: `eps` of a function is two units.

    **Arguments:**

    - `size`: ||A||_F for a trace; for the entries of a diagonal the norms of the rows of A.
    - `eps`: the relative precision of a product.

    **Returns:**

    A real array of the same shape.
    """
    return (eps / 2 + 7.75 * float(jnp.finfo(size.dtype).eps)) * size


def rounding_unit(eps: float, dtype: Any) -> float:
    """The relative rounding error of an eigenvalue, or of a step of a recurrence: at most one unit
    of the products and 15 of the working precision. (Products of networks that compute in half
    precision are off by 0.8 to 0.9 units in the Frobenius norm.)

    **Arguments:**

    - `eps`: the relative precision of a product.
    - `dtype`: the dtype of what is computed from products.
    """
    return eps + 15 * float(jnp.finfo(dtype).eps)


def is_scalar(value: PyTree[Array]) -> bool:
    """Whether the value of an estimate is one number."""
    return isinstance(value, jax.Array) and value.ndim == 0


def norm_of(value: PyTree[Inexact[Array, "..."]]) -> Real[Array, ""]:
    """The Euclidean norm of all numbers in a value (or in its error), without over- or underflow of
    the squares.

    **Arguments:**

    - `value`: an array, or a PyTree of arrays.

    **Returns:**

    A scalar array.
    """
    return safe_norm(jnp.stack([safe_norm(x.reshape(-1)) for x in jtu.tree_leaves(value)]))


def mean_and_std_err(samples: Inexact[Array, "... m"]) -> tuple[Array, Array]:
    """The mean of independent samples (along the last axis) and its standard error, s / sqrt(m),
    where s^2 is the unbiased sample variance.

    One sample says nothing about the spread: its standard error is inf.

    **Arguments:**

    - `samples`: an array of shape `(..., m)`, real or complex.

    **Returns:**

    Two arrays of shape `(...)`; the standard error is real.
    """
    m = samples.shape[-1]
    mean = jnp.mean(samples, axis=-1)
    if m == 1:
        return mean, jnp.full_like(mean.real, jnp.inf)
    return mean, safe_norm(samples - mean[..., None]) / math.sqrt(m * (m - 1))

"""Schatten norms: roots of spectral sums."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax import lax
from jaxtyping import Array, PRNGKeyArray

from .._core.estimate import power_of
from .._estimators.estimator import check_budget
from .._estimators.solution import Solution
from .._operators.checks import as_operator
from .._operators.gram import gram
from .._operators.tags import is_hermitian
from .spectral import spectral_sum


def schatten_norm(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int,
    p: float = 1.0,
    *,
    num_steps: int | None = None,
    throw: bool = False,
) -> Solution:
    r"""Estimate the Schatten norm $\|A\|_p = (\sum_i \sigma_i^p)^{1/p}$ with the singular values
    $\sigma_i$: the nuclear norm for p = 1.

    The p-th power is the spectral sum of $|x|^p$ if A is tagged Hermitian, and otherwise that of
    $x^{p/2}$ for $A^* A$, which takes two products for one; see [`traceax.spectral_sum`][] for
    errors, derivatives and cost. (For p = 2, [`traceax.frobenius_norm`][] is closer. The
    largest singular value, for p = inf, comes from [`traceax.eigenpairs`][].)

    !!! Example

        ```python
        nuclear = tr.schatten_norm(jax.random.key(0), operator, k=120)
        nuclear.value, nuclear.std_err, nuclear.quadrature_error
        ```

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` (`2 n` for an operator that is
        not tagged Hermitian) the norm is exact.
    - `p`: the exponent, a positive Python number. Below 1 it is a quasi-norm. Powers of singular
        values must not overflow (the result is then not successful); those that underflow are 0.
    - `num_steps`: the number of steps for each probe, as for [`traceax.spectral_sum`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] with a real value and with a `quadrature_error`. As the root of an
    unbiased estimate the value is biased, by about the square of its relative error. At 0, and
    where a singular value is 0, the derivative is a subgradient (p = 1), or 0.

    **Raises:**

    - `TypeError`: for a key, operator, `k`, `p` or `num_steps` of the wrong type.
    - `ValueError`: for an operator that is not square, `k < 1`, a `p` that is not positive and
        finite, or a `num_steps` that is too large.
    - `NotImplementedError`: for a third derivative.
    """
    p = _exponent(p)
    operator = as_operator(operator)
    hermitian = is_hermitian(operator)
    of, power, products = (operator, p, 1) if hermitian else (gram(operator), p / 2, 2)
    budget = check_budget(k, products, products * operator.in_size(), "A Schatten norm")

    def fn(x):
        return power_of(jnp.abs(x), power)

    found = spectral_sum(key, fn, of, budget // products, num_steps=num_steps, throw=throw)
    value, errors = power_of(found.value, 1 / p), (found.std_err, found.quadrature_error)
    std_err, quadrature_error = jtu.tree_map(lambda x: _root_error(found.value, x, p), errors)
    return dataclasses.replace(
        found,
        value=value,
        std_err=std_err,
        quadrature_error=quadrature_error,
        num_matvecs=products * found.num_matvecs,
        stats={**found.stats, "std.err": std_err},
    )


def _exponent(p: Any) -> float:
    if isinstance(p, bool | np.bool_) or not isinstance(p, int | float | np.integer | np.floating):
        raise TypeError(
            f"The exponent p of a Schatten norm must be a Python number, got {type(p).__name__}. "
            "Give 1 for the nuclear norm."
        )
    if not 0 < p < math.inf:
        raise ValueError(
            f"The exponent p of a Schatten norm must be positive and finite, got {p}. For the "
            "largest singular value use `traceax.eigenpairs` of A^H A."
        )
    return float(p)


def _root_error(power: Array, error: Array, p: float) -> Array:
    """How far the root is from that of a power that is larger or smaller by an error."""
    power = lax.stop_gradient(power)  # only the value of a solution has a derivative
    value, larger, smaller = (power_of(x, 1 / p) for x in (power, power + error, power - error))
    return jnp.maximum(larger - value, value - smaller)

"""Estimates with two errors: that of the random probes, and that of ending Lanczos' recurrence
early.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Real

from .._core.estimate import (
    NOT_CONVERGED,
    OUTSIDE_DOMAIN,
    SUCCESSFUL,
    Estimate,
    has_no_logarithm,
    make_estimate,
    safe_norm,
    scale_of,
)
from .._core.primitive import Primitive
from .._estimators.calibration import with_ties
from .._estimators.estimator import AbstractEstimator, solve
from .._estimators.solution import Solution


def with_quadrature_error(
    value,
    error,
    std_err,
    num_matvecs: Array | int,
    dof: Array | float,
    status,
    columns: Any = None,
    *,
    needs_symmetry: bool = True,
) -> Estimate:
    """An estimate whose value is a pair: the value proper, and its quadrature error. Both are NaN
    if f is not finite where it is needed, or the operator is not Hermitian, unless not
    `needs_symmetry`: products in half precision inside of an operator in single precision look so,
    too. The degrees of freedom are those of all entries of the standard error, or of each.
    `columns` are those that were read, see `Estimate`.
    """
    failed = has_no_logarithm(status) if needs_symmetry else status == OUTSIDE_DOMAIN

    def masked(x):
        return jnp.where(failed, jnp.nan, x)

    parts = (masked(value), masked(error))
    errors = (masked(std_err), jnp.zeros_like(error))
    dof = jnp.asarray(dof, std_err.dtype)
    estimate = make_estimate(parts, errors, num_matvecs, dof, status)
    columns = None if columns is None else jnp.asarray(columns, jnp.int32)
    return dataclasses.replace(estimate, columns=columns)


def fixed_budget_status(value: Array, error: Array, std_err: Array, status: Array) -> Array:
    """NOT_CONVERGED where the recurrences ended too early to trust the value of a fixed budget:
    where the quadrature error exceeds four standard errors (an average over keys would not reveal
    such a bias), a twentieth of the value, and 1.

    **Arguments:**

    - `value`: a log-determinant, or a log density.
    - `error`: the quadrature error of the value.
    - `std_err`: the standard error of the value.
    - `status`: the status so far, which is returned unless it is SUCCESSFUL.
    """
    dwarfs = (error > 4 * std_err) & (error > jnp.abs(value) / 20) & (error > 1)
    return jnp.where((status == SUCCESSFUL) & dwarfs, NOT_CONVERGED, status)


def entries_status(value: Array, error: Array, std_err: Array, status: Array) -> Array:
    """NOT_CONVERGED where the quadrature errors of all entries together exceed four standard errors
    and a twentieth of the value.

    **Arguments:**

    - `value`, `error`, `std_err`: of all entries, or of one number.
    - `status`: the status so far, which is returned unless it is SUCCESSFUL.
    """
    of_value, of_error, of_std_err = (
        safe_norm(jnp.ravel(each)) for each in (value, error, std_err)
    )
    early = (of_error > 4 * of_std_err) & (of_error > of_value / 20)
    return jnp.where((status == SUCCESSFUL) & early, NOT_CONVERGED, status)


def entries_std_err(
    samples: Real[Array, "p n"], count: Real[Array, ""]
) -> tuple[Real[Array, " n"], Real[Array, ""]]:
    """The standard errors of the entries of a mean, and of their sum.

    Entry i of a sample is y_i = omega_i (B omega)_i, with omega of random signs: it has the mean
    B_ii and the variance sum_{j != i} B_ij^2 = E y_i^2 - B_ii^2 (over the complex numbers with the
    real part of B). The sum of the entries has twice the sum of these variances.

    **Arguments:**

    - `samples`: the samples; 0 for those that are not in use.
    - `count`: the number of samples in use. From a single one nothing is known.
    """
    unit = scale_of(samples)
    samples = samples / unit
    mean = jnp.sum(samples, axis=0) / count
    in_use = (jnp.arange(len(samples)) < count)[:, None]
    away = jnp.where(in_use, jnp.square(samples - mean), 0)
    pairs = count * (count - 1)
    variance = jnp.where(pairs > 0, jnp.sum(away, axis=0) / jnp.maximum(pairs, 1), jnp.inf)
    std_err = unit * with_ties(jnp.sqrt(variance), count)
    return std_err, unit * jnp.sqrt(2 * jnp.sum(variance))


def entries_truncation_error(values: Real[Array, "o n"], exhausted: Bool[Array, ""]) -> Array:
    """The error of every entry, from its values after up to three numbers of steps: `funm` derives
    it for one number. The rate r is that of all entries together, as the ratio of two differences
    of one entry may be anything. So may one of these differences, of which half is the mean.
    """
    if len(values) == 1:
        return jnp.where(exhausted, 0, jnp.full_like(values[0], jnp.inf))
    last = values[0] - values[1]
    rate = jnp.full((), 0.95, last.dtype)
    if len(values) == 3:
        before = safe_norm(values[1] - values[2])
        found = jnp.minimum(safe_norm(last) / jnp.where(before > 0, before, 1), rate)
        rate = jnp.where(before > 0, found, rate)
    typical = safe_norm(last) / math.sqrt(last.size)
    error = jnp.hypot(last, typical) / math.sqrt(2) * jnp.maximum(1, 8 * rate / (1 - rate))
    error = jnp.where(jnp.isfinite(error), error, jnp.inf)
    return jnp.where(exhausted, 0, error)  # in an invariant Krylov space nothing is missing


def solve_pair(
    primitive: Primitive, key, operator, k: Any, estimator: AbstractEstimator, throw: bool
) -> Solution:
    """Solve, and split the pair of the value and its quadrature error in the solution."""
    solution = solve(primitive, key, operator, k, estimator, throw=throw)
    (value, quadrature_error), (std_err, _) = solution.value, solution.std_err
    stats = {**solution.stats, "std.err": std_err}
    return Solution(value, std_err, solution.num_matvecs, stats, solution.result, quadrature_error)

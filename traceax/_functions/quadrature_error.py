"""Estimates with two errors: of the random probes, and of ending Lanczos' recurrence early."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Real

from .._core.estimate import Estimate, Evidence, all_finite, relative, safe_norm, scale_of, worse
from .._estimators.diagonal_error import with_ties


def quadrature_estimate(
    value: Array,
    error: Array,
    std_err: Array,
    num_matvecs: Array | int,
    dof: Array | float,
    evidence: Evidence,
    least: Array | float = 0.0,
    hidden: Array | float = 0.0,
    **more: Any,
) -> Estimate:
    """An estimate with a quadrature error. It is `not_converged` where that error exceeds four
    standard errors (an average over keys would not reveal such a bias), a twentieth of the value,
    and `least`; or `hidden`, a part of the error that the probes did not see, a twentieth of the
    value. (For several entries the norms of all are compared.) A value from finite products that is
    not finite is outside of the domain; of products that are not finite no entry is an estimate.
    """
    given = value, error, std_err, jnp.asarray(hidden, error.dtype)
    size, bias, scatter, unseen = (safe_norm(jnp.ravel(x)) for x in given)
    scatter = jnp.where(jnp.isinf(scatter), 0, scatter)  # of a single probe nothing is known
    allowed = jnp.maximum(size / 20, least)
    seen = relative(bias, jnp.maximum(4 * scatter, allowed))
    ratio = jnp.maximum(seen, relative(unseen, allowed))
    evidence = worse(evidence, Evidence(unconverged=ratio, outside=~all_finite(value)))
    value = jnp.where(evidence.failures.nonfinite, jnp.nan, value)
    return Estimate(value, std_err, num_matvecs, dof, evidence, quadrature_error=error, **more)


def exact_estimate(
    value: Array, error: Array, num_matvecs: Any, evidence: Evidence, least: Any = 0.0, **more: Any
) -> Estimate:
    """An estimate whose error is a bound on rounding; `not_converged` above half of the value and
    `least`.
    """
    zero = jnp.zeros_like(error)
    least = jnp.maximum(safe_norm(jnp.ravel(value)) / 2, least)
    return quadrature_estimate(value, error, zero, num_matvecs, 0, evidence, least, **more)


def entries_std_err(
    samples: Real[Array, "p n"], count: Real[Array, ""]
) -> tuple[Real[Array, " n"], Real[Array, ""]]:
    """Returns (standard errors of the entries of a mean of `count` samples, standard error of their
    sum); inf for a single sample. Samples from `count` on are 0.

    Entry i of a sample is y_i = omega_i (B omega)_i, with omega of random signs: it has the mean
    B_ii and the variance sum_{j != i} B_ij^2 = E y_i^2 - B_ii^2 (over the complex numbers with the
    real part of B). The sum of the entries has twice the sum of these variances.
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


def orders_of(q: Any) -> list[Any]:
    """[q, q - d, q - 2d] (see `funm`), without numbers below 1. A traced q is at least 4."""
    d = (q + 3) // 4
    return [m for m in (q, q - d, q - 2 * d) if not isinstance(m, int) or m >= 1]


def truncation_error(samples: Real[Array, "o p ..."], exhausted: Bool[Array, " p"]) -> Array:
    """The quadrature error of the mean over all probes."""
    return jnp.mean(truncation_errors(samples, exhausted), axis=0)


def truncation_errors(samples: Real[Array, "o p ..."], exhausted: Bool[Array, " p"]) -> Array:
    """The quadrature error of every probe (see `funm`), from the samples after up to three numbers
    of steps (axis 0, `orders_of`). `exhausted` marks probes with invariant Krylov spaces, where
    quadrature is exact.
    """
    changes = jnp.abs(_changes(samples))  # D_1, D_2
    shape = (-1, *[1] * (samples.ndim - 2))
    return jnp.where(exhausted.reshape(shape), 0, _missed(changes[0], changes))


def entries_truncation_error(values: Real[Array, "o n"], exhausted: Bool[Array, ""]) -> Array:
    """The quadrature error of every entry, from its values after up to three numbers of steps (axis
    0). As D_1 and D_1 / D_2 of one entry may be anything, r is that of the norms of all entries,
    and D_1 the root mean square of those of the entry and of all entries.
    """
    changes = _changes(values)
    norms = safe_norm(changes)
    typical = jnp.hypot(changes[0], norms[0] / math.sqrt(values.shape[1])) / math.sqrt(2)
    return jnp.where(exhausted, 0, _missed(typical, norms))


def _changes(values: Real[Array, "o ..."]) -> Real[Array, "d ..."]:
    """One or two differences; inf for a single value."""
    if len(values) == 1:
        return jnp.full_like(values, jnp.inf)
    return jnp.diff(values, axis=0)


def _missed(last: Real[Array, "..."], changes: Real[Array, "d ..."]) -> Real[Array, "..."]:
    """D_1 max(1, 8 r / (1 - r)): `last` is D_1, `changes` are D_1 and D_2, or D_1 alone, for r."""
    rate = jnp.full_like(changes[0], 0.95)
    if len(changes) == 2:
        previous = changes[1]
        known = jnp.minimum(changes[0] / jnp.where(previous > 0, previous, 1), 0.95)
        rate = jnp.where(previous > 0, known, rate)
    error = last * jnp.maximum(1, 8 * rate / (1 - rate))
    return jnp.where(jnp.isfinite(error), error, jnp.inf)

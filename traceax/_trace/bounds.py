"""Bounds for the number of products that are enough, before any is made."""

import math

from .._estimators.estimator import AbstractTraceEstimator
from .._probes.samplers import NormalSampler, RademacherSampler
from .hutchinson import HutchinsonEstimator


def matvecs_needed(
    eps: float,
    delta: float = 0.05,
    estimator: AbstractTraceEstimator = HutchinsonEstimator(),
    *,
    frobenius_norm: float | None = None,
    spectral_norm: float | None = None,
    semidefinite: bool = False,
) -> int:
    r"""A number of products that is enough for an error below `eps` with probability `1 - delta`,
    from what is known of a real symmetric A beforehand.

    Let B be A for normal probes, and A without its diagonal for Rademacher probes. The absolute
    error is below `eps` with

    $$k \ge c \, (\|B\|_F^2 + \varepsilon \|B\|_2) \, \varepsilon^{-2} \ln(2 / \delta), \qquad
    c = 4 \text{ (normal)}, \; 8 \text{ (Rademacher)}.$$

    For a semidefinite A no norm need be known: the *relative* error is below `eps` with

    $$k \ge c \, \varepsilon^{-2} \ln(2 / \delta), \qquad
    c = 8 \text{ (normal)}, \; 6 \text{ (Rademacher)}.$$

    These are bounds for the worst operator: `traceax.trace(key, operator, rtol=...)` usually takes
    far fewer. The exact trace never takes more than n.

    !!! Example

        ```python
        tr.matvecs_needed(0.1, semidefinite=True)  # 2214
        ```

    **Arguments:**

    - `eps`: the error: absolute, if norms are given; relative, if `semidefinite=True`.
    - `delta`: the probability with which the error may be larger.
    - `estimator`: a [`traceax.HutchinsonEstimator`][] with [`traceax.RademacherSampler`][] or
        [`traceax.NormalSampler`][] probes. For others no such constants are known.
    - `frobenius_norm`: the Frobenius norm of B, or an upper bound, such as that of A.
    - `spectral_norm`: the spectral norm of B, or an upper bound. By default the Frobenius norm.
    - `semidefinite`: whether A is positive or negative semidefinite, and `eps` relative.

    **Returns:**

    A Python int, to be passed as `k`.

    **Raises:**

    - `TypeError`: unless either `semidefinite=True` or norms are given.
    - `ValueError`: for numbers out of range, or an estimator without such a bound.

    ??? cite "References"

        A. Cortinovis, D. Kressner, *On randomized trace estimates for indefinite matrices with an
        application to determinants*, 2021, arXiv:2005.10009, doi:10.1007/s10208-021-09525-9.
        F. Roosta-Khorasani, U. Ascher, *Improved bounds on sample size for implicit matrix trace
        estimators*, 2015, arXiv:1308.2475, doi:10.1007/s10208-014-9220-1.
    """
    if not (eps > 0 and math.isfinite(eps)):
        raise ValueError(f"eps, the wanted error, must be positive and finite, got {eps!r}.")
    if not 0 < delta < 1:
        raise ValueError(
            f"delta, the probability of a larger error, must lie between 0 and 1, got {delta!r}."
        )
    if semidefinite == (frobenius_norm is not None):
        raise TypeError(
            "Say either semidefinite=True (eps is then relative) or the frobenius_norm (and "
            "spectral_norm) of the operator (eps is then absolute), got "
            f"semidefinite={semidefinite!r}, frobenius_norm={frobenius_norm!r}."
        )
    sampler = estimator.sampler if isinstance(estimator, HutchinsonEstimator) else None
    if not isinstance(sampler, RademacherSampler | NormalSampler):
        raise ValueError(
            f"No bound with explicit constants is known for {estimator}. Use `trace(key, operator, "
            "rtol=...)`, which measures its error, or HutchinsonEstimator() with Rademacher or "
            "normal probes."
        )
    normal = isinstance(sampler, NormalSampler)
    logarithm = math.log(2 / delta)
    if frobenius_norm is None:
        return math.ceil((8 if normal else 6) * logarithm / eps**2)
    largest = frobenius_norm if spectral_norm is None else min(spectral_norm, frobenius_norm)
    if not (frobenius_norm >= 0 and largest >= 0 and math.isfinite(frobenius_norm)):
        raise ValueError(
            "The norms must be finite and not negative, got "
            f"frobenius_norm={frobenius_norm!r}, spectral_norm={spectral_norm!r}."
        )
    size = frobenius_norm**2 + eps * largest
    return max(1, math.ceil((4 if normal else 8) * size * logarithm / eps**2))

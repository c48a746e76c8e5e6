r"""Gauss and Gauss-Radau quadrature of a logarithm, with bounds and a standard error.

*The value.* Every derivative of the logarithm has a constant sign. Hence Gauss quadrature of
z^H log(M) z is never too small, and Gauss-Radau quadrature with a node at a <= lambda_min(M) is
never too large: the truth lies in between. For K + s I, a is known (lambda_min(M) >= s / mu).
Radau's rule of q nodes is Gauss' rule for T', which is T with its last entry reduced by 1 / r,
r = e_q^T (T - a)^{-1} e_q. If a is close to lambda_min(M), the two errors are of about the same
size, also for 1/x, so that a mean of the two rules is far better than either (on a kernel, q = 6 to
12: 5 to 30 times). Radau's rule has the weight min(0.6, a / theta_1), with theta_1 the smallest
Ritz value: nearly nothing if a is far too small. The quadrature error is the largest that the two
bounds leave possible. If a is a guess, they are no bounds, and the error that `_functions.funm`
estimates from shorter recurrences is added.

*The derivative* of Gauss quadrature is <L(T)[e_1 e_1^T], dT>, with L the derivative of the
logarithm and dT = V^H dM V (see `_functions.funm`). In the direction dM = M it is 1. For Radau's
rule, with T', this would be lost; it is restored by
d(last entry) = v_q^H dM v_q - h^H dM h / (r h^H M h), with the largest Ritz vector h. (In the
direction of the small eigenvalues, where quadrature errs, this leaves Radau's rule for 1/x as it
is.) If a is a guess, which does not follow the operator, the derivative is that of Gauss' rule
alone. (Six kernels, 8 products, without a preconditioner: the bias of the derivative by the length
scale is 0.02 to 2 times the derivative, and with Radau's rule 0.2 to 14 times.)

*The standard error.* As for spectral sums, Var(z^H f z) = c (tr f^2 - (tr f)^2 / n), f = log M. It
is estimated from the nodes and weights, which also give the fourth moment of f. If few eigenvalues
dominate, the error of the estimated variance matters. Its relative variance is 2 / nu, with the
degrees of freedom nu of `_functions.funm`, and half of that is added to the variance.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Real

from .._core.estimate import scale_of
from .._functions.funm import degrees_of_freedom, derivative_core, truncation_error, truncations
from .._linalg.lanczos import Lanczos, quadrature


class LogQuadrature(NamedTuple):
    """Quadrature of tr log M: means over the probes, and `core` for each probe."""

    value: Real[Array, ""]
    error: Real[Array, ""]
    std_err: Real[Array, ""]
    dof: Real[Array, ""]  # of the standard error
    smallest: Real[Array, ""]
    gap: Real[Array, ""]  # between the two rules: a bound of the error of Gauss quadrature
    core: Real[Array, "p q q"]  # the derivative of z^H log(M) z / n by V^H M V, if wanted


def log_quadrature(krylov: Lanczos, floor: Array, n: int, is_complex: bool) -> LogQuadrature:
    """Both quadratures, their combination, its errors, and what the derivative needs.

    **Arguments:**

    - `krylov`: the recurrences for M, of p probes.
    - `floor`: a lower bound of the eigenvalues of M; NaN if none is known.
    - `n`: the size of M.
    - `is_complex`: whether the probes are complex.

    **Returns:**

    A `LogQuadrature`.
    """
    p = krylov.alpha.shape[1]
    shorter, orders = truncations(krylov)
    nodes, weights, vectors = quadrature(shorter)
    smallest = jnp.min(nodes[:p, 0])
    # `smallest` reports Ritz values that are not positive; tiny numbers replace them to avoid NaN.
    eps = float(jnp.finfo(nodes.dtype).eps)
    tiny = eps**2 * krylov.unit
    nodes = jnp.maximum(nodes, jnp.tile(tiny, (orders, 1)))
    logs = jnp.log(nodes)
    samples = jnp.sum(weights * logs, axis=1).reshape(orders, p)
    nodes, weights, vectors, logs = (x[:p] for x in (nodes, weights, vectors, logs))

    # Without a known bound, the residual of the smallest Ritz pair tells how far below it the
    # smallest eigenvalue may lie.
    last = vectors[:, -1]
    reach = nodes[:, 0] - krylov.residual * jnp.abs(last[:, 0])
    guess = jnp.clip(reach, nodes[:, 0] / 4, nodes[:, 0])
    a = jnp.minimum(jnp.where(jnp.isnan(floor), guess, floor), nodes[:, 0] * (1 - math.sqrt(eps)))
    a = jnp.maximum(a, tiny[:, 0] / 2)
    reduction = 1 / jnp.sum(jnp.square(last) / (nodes - a[:, None]), axis=1)
    # On an exhausted space Gauss' rule is exact.
    exhausted = krylov.exhausted
    reduction = jnp.where(exhausted, 0, reduction)
    changed = krylov._replace(alpha=krylov.alpha.at[-1].add(-reduction))
    radau_nodes, radau_weights, radau_vectors = quadrature(changed)
    radau_nodes = jnp.maximum(radau_nodes, tiny)
    gauss = jnp.sum(weights * logs, axis=1)
    radau = jnp.sum(radau_weights * jnp.log(radau_nodes), axis=1)
    gap = jnp.where(exhausted, 0, jnp.maximum(gauss - radau, 0))
    share = jnp.minimum(0.6, a / nodes[:, 0])
    error = jnp.mean(jnp.maximum(share, 1 - share) * gap)
    guessed = error + truncation_error(samples, exhausted)
    std_err, dof = _standard_error(weights, logs - jnp.mean(gauss), n, is_complex)

    def derivative():
        core = derivative_core(jnp.log, nodes, vectors)
        changed = derivative_core(jnp.log, radau_nodes, radau_vectors)
        largest, corner = vectors[:, :, -1], changed[:, -1, -1]
        last = (corner * reduction / nodes[:, -1])[:, None, None]
        changed = changed - last * largest[:, :, None] * largest[:, None, :]
        return core + jnp.where(jnp.isnan(floor), 0, share)[:, None, None] * (changed - core)

    return LogQuadrature(
        value=n * jnp.mean(gauss - share * gap),
        error=n * jnp.where(jnp.isnan(floor), guessed, error),
        std_err=std_err,
        dof=dof,
        smallest=smallest,
        gap=n * jnp.mean(gap),
        core=derivative(),
    )


def _standard_error(
    weights: Real[Array, "p q"], away: Real[Array, "p q"], n: int, is_complex: bool
) -> tuple[Real[Array, ""], Real[Array, ""]]:
    """The standard error of tr log M, and its degrees of freedom, from the logarithms of the nodes
    less their mean.
    """
    p = len(weights)
    c = n / (n + 1) if is_complex else 2 * n / (n + 2)
    # In this unit, because squares of rounding errors may underflow to 0, and 0 / 0 is NaN.
    unit = scale_of(away)
    square = jnp.square(away / unit)
    second = jnp.sum(weights * square) / p
    fourth = jnp.sum(weights * jnp.square(square)) / p
    dof = degrees_of_freedom(second, fourth, n * p)
    variance = n * c * second / p / (1 - c / (n * p)) * (1 + 1 / dof)
    return unit * jnp.sqrt(variance), dof

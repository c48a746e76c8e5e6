r"""Gauss and Gauss-Radau quadrature of a logarithm, or of 1/x, with the errors of both.

*The value.* Every derivative of the logarithm has a constant sign. Hence Gauss quadrature of
z^H log(M) z is never too small, and Gauss-Radau quadrature with a node at a <= lambda_min(M) is
never too large. For K + s I and P of low rank, a is known (lambda_min(M) >= s / mu). Radau's rule
of q nodes is Gauss' rule for T', which is T with its last entry reduced by 1 / r,
r = e_q^T (T - a)^{-1} e_q. If a is close to lambda_min(M), the two errors are of about the same
size: Radau's rule has the weight min(0.6, a / theta_1), with theta_1 the smallest Ritz value (0.6
was the best of some weights on many spectra). The
quadrature error is the largest that the two bounds leave possible. If no a is known, Gauss' rule
stands alone, with the error that `_functions.funm` estimates from shorter recurrences. Where the
residual of theta_1 is `UNRESOLVED` times as large, nothing separates the eigenvalues that it stands
for from 0, and the error is as if they were next to it (see `positive`).

*The derivative* of Gauss quadrature is <L(T)[e_1 e_1^T], dT>, with L the derivative of the
logarithm and dT = V^H dM V (see `_functions.funm`). In the direction dM = M it is 1. For Radau's
rule, with T', this would be lost; d(last entry) = v_q^H dM v_q - h^H dM h / (r h^H M h), with the
largest Ritz vector h, restores it.

*1/x.* Gauss quadrature of z^H M^{-1} z errs by r^H M^{-1} r <= |r|^2 / lambda_min(M), with the
residual r of M x = z; theta_1 stands for lambda_min(M) where no a is known. (A probe that hardly
sees the smallest eigenvalue ends no earlier than others.)
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Real

from .._core.precision import einsum
from .._functions.funm import derivative_core, ended_after
from .._functions.quadrature_error import missed
from .._linalg.lanczos import (
    Lanczos,
    largest_ritz_value,
    positive,
    positive_quadrature,
    quadrature,
)

#: Of matrices with a condition below 1e4 residuals are smaller from some 40 products on, of Gram
#: matrices of rank n - 1 they are larger.
UNRESOLVED = 1.9


class Quadrature(NamedTuple):
    """Quadrature for the p probes of a panel, with q nodes for each."""

    samples: Real[Array, " p"]  # z^H log(M) z / n, or z^H (M^{-1} - I) z / n
    masses: Real[Array, "p q"]
    values: Real[Array, "p q"]  # of f at the nodes
    mean: Real[Array, ""]
    error: Real[Array, ""]  # the mean over the probes
    smallest: Real[Array, ""]  # node; if it is not positive, tiny numbers replace it elsewhere
    largest: Real[Array, ""]  # Ritz value, to within a factor of two
    exhausted: Bool[Array, ""]  # whether all spaces are
    core: Real[Array, "p q q"]  # the derivative of the samples by V^H M V, if wanted


def quadrature_after(
    krylov: Lanczos,
    j: Int[Array, ""],
    history: Real[Array, "q p"],
    floor: Real[Array, ""] | None,
    lengths: Real[Array, " p"],
    inverse: bool,
    weights: bool = False,
) -> tuple[Quadrature, Real[Array, "q p"]]:
    """Returns (quadrature after j >= 1 steps, `history` with the value of Gauss' rule after j).

    Row i - 1 of `history` is for i steps. `floor` is a, None or NaN if none is known. `lengths` are
    |z|^2 / n: 1 on the sphere, 0 for probes that are not in use. f is 1/x if `inverse`, else the
    logarithm. `weights` fills the field `core`.
    """
    active = lengths > 0
    residual = krylov.beta[j - 1]
    exhausted = residual == 0
    ended = ended_after(krylov, [j])  # pyright: ignore[reportArgumentType]
    nodes, masses, vectors = quadrature(ended)
    smallest = jnp.min(jnp.where(active, nodes[:, 0], jnp.inf))
    nodes = positive(nodes, krylov)
    values = 1 / nodes if inverse else jnp.log(nodes)
    gauss = jnp.sum(masses * values, axis=1)
    history = history.at[j - 1].set(gauss)
    core = jnp.zeros_like(vectors)
    if inverse:
        # T^{-1} e_1 ends with `last`: the solve of M x = z leaves a residual of norm
        # beta_j |z| |last|. (Probes of the logarithm have length 1, those of 1/x have not.)
        last = jnp.sum(vectors[:, j - 1, :] * vectors[:, 0, :] / nodes, axis=1)
        samples = lengths * (gauss - 1)
        lowest = nodes[:, 0] if floor is None else jnp.fmin(floor, nodes[:, 0])
        error = lengths * jnp.square(residual * last) / lowest
    else:
        samples = gauss
        error = jnp.where(exhausted, 0, truncation_error_at(history, j))
        low = nodes[:, 0]
        hides = residual * jnp.abs(vectors[:, j - 1, 0]) > UNRESOLVED * low
        lowest = float(jnp.finfo(low.dtype).eps) ** 2 * jnp.max(nodes, axis=1)
        error = error + jnp.where(hides, masses[:, 0] * jnp.log(low / lowest), 0)
        if weights:
            core = derivative_core(jnp.log, nodes, vectors)
    if floor is not None and not inverse:
        share = jnp.where(jnp.isnan(floor), 0, jnp.minimum(0.6, floor / nodes[:, 0]))
        given = gauss, nodes, vectors[:, j - 1, :], floor
        gap, radau_rule, reduction = radau_gap(ended, j, exhausted, *given)
        samples = gauss - share * gap
        error = jnp.where(jnp.isnan(floor), error, jnp.maximum(share, 1 - share) * gap)
        if weights:
            of_radau = core_of_radau(radau_rule, j, reduction, (nodes, masses, vectors))
            core = core + share[:, None, None] * (of_radau - core)
    count = jnp.maximum(jnp.sum(active), 1)
    found = Quadrature(
        samples=samples,
        masses=masses,
        values=values,
        mean=jnp.sum(jnp.where(active, samples, 0)) / count,
        error=jnp.sum(jnp.where(active, error, 0)) / count,
        smallest=smallest,
        largest=largest_ritz_value(krylov),
        exhausted=jnp.all(exhausted | ~active),
        core=core,
    )
    return found, history


def radau_gap(
    ended: Lanczos,
    j: Any,
    exhausted: Array,
    gauss: Array,
    nodes: Array,
    last: Array,
    floor: Array,
) -> tuple[Array, tuple, Array]:
    """Returns (by how much Radau's rule with a node at a = `floor` is below Gauss' after j steps,
    Radau's rule, 1 / r). `last` is the last row of S. (Without a floor the result is not used.)
    """
    eps = float(jnp.finfo(nodes.dtype).eps)
    # A positive number below the smallest Ritz value.
    a = jnp.where(jnp.isnan(floor), 0, jnp.minimum(floor, nodes[:, 0] * (1 - math.sqrt(eps))))
    a = jnp.maximum(a, eps**2 * nodes[:, -1])
    reduction = 1 / jnp.sum(jnp.square(last) / (nodes - a[:, None]), axis=1)
    reduction = jnp.where(exhausted, 0, reduction)  # Gauss' rule is exact
    rule = positive_quadrature(ended._replace(alpha=ended.alpha.at[j - 1].add(-reduction)))
    radau = jnp.sum(rule[1] * jnp.log(rule[0]), axis=1)
    gap = jnp.where(exhausted, 0, jnp.maximum(gauss - radau, 0))
    return gap, rule, reduction


def core_of_radau(radau_rule, j, reduction, gauss_rule) -> Real[Array, "p q q"]:
    """The derivative of Radau's rule by V^H M V. Both rules are (nodes, masses, vectors)."""
    nodes, masses, vectors = gauss_rule
    core = derivative_core(jnp.log, radau_rule[0], radau_rule[2])
    largest = jnp.max(jnp.where(masses > 0, nodes, 0), axis=1)
    at = jnp.argmax(nodes, axis=1)[:, None, None]
    top = jnp.take_along_axis(vectors, at, axis=2)  # h = V top
    lost = core[:, j - 1, j - 1] * reduction / largest
    return core - lost[:, None, None] * top * jnp.swapaxes(top, 1, 2)


def truncation_error_at(history: Real[Array, "q p"], j: Int[Array, ""]) -> Real[Array, " p"]:
    """The error after j steps, from the values after j, j - d and j - 2d: see `_functions.funm`."""
    d = (j + 3) // 4
    now, before, first = (history[jnp.maximum(at - 1, 0)] for at in (j, j - d, j - 2 * d))
    changes = jnp.abs(jnp.stack([now - before, jnp.where(j > 2 * d, before - first, 0)]))
    return jnp.where(j > d, missed(changes[0], changes), jnp.inf)


def solutions_after(krylov: Lanczos, j: Int[Array, ""], orders: int) -> Real[Array, "o p q"]:
    """M^{-1} z / |z| in the basis of each probe; [i] is after j - i d steps (at least 1)."""
    d = (j + 3) // 4
    ends = [jnp.maximum(j - order * d, 1) for order in range(orders)]
    nodes, _, vectors = positive_quadrature(ended_after(krylov, ends))  # pyright: ignore[reportArgumentType]
    found = einsum("paj,pj->pa", vectors, vectors[:, 0, :] / nodes)
    p = krylov.alpha.shape[1]
    return found.reshape(orders, p, -1)

r"""Gauss quadrature of tr log M or tr M^{-1}, from the recurrences of probes (`panels`).

*The logarithm.* Gauss quadrature of z^H log(M) z after q steps has the error that `_functions.funm`
estimates from shorter recurrences. Where the residual of the smallest Ritz value theta_1 is
`UNRESOLVED` times as large, nothing separates the eigenvalues that it stands for from 0, and the
error is as if they were next to it. What else they may hide (`_functions.nodes.unresolved`) is part
of the stated error, but does not decide on the number of steps. Where a lower bound a of the
eigenvalues of M is known (for K + s I and P of low rank), there is a second rule: every derivative
of the logarithm has a constant sign, so Gauss' rule is never too small, and Gauss-Radau quadrature
with a node at a never too large. Radau's rule is Gauss' rule for T', which is T with its last entry
reduced by 1 / r, r = e_q^T (T - a)^{-1} e_q. If a is close to lambda_min(M), the two errors are of
about the same size: Radau's rule has the weight min(0.6, a / theta_1), with theta_1 the smallest
Ritz value (0.6 was the best of some weights on many spectra). The error is the largest that the two
bounds leave possible.

*The derivative* of Gauss' rule is <L(T)[e_1 e_1^T], dT>, with L the derivative of the logarithm and
dT = V^H dM V. In the direction dM = M it is 1. For Radau's rule, with T', this would be lost;
d(last entry) = v_q^H dM v_q - h^H dM h / (r h^H M h), with the largest Ritz vector h, restores it.

*A control variate.* Where no rank pays (`preparation`), the s vectors of the sketch show tr M.
With m_i = z_i^H M z_i / |z_i|^2 of p probes, and m_0 the mean of these quotients of the s vectors,

    tr log M ~ n / p sum_i [z_i^H log(M) z_i / |z_i|^2 - g c_i (m_i - m_0)],      g = s / (s + p),

has the mean that it has without m_0, as c_i, the slope of the least squares line through log on the
nodes of the other probes, does not depend on z_i. The variance is that of log - g c x by p probes,
and of g c x by s.

*1/x.* Gauss quadrature of z^H M^{-1} z errs by r^H M^{-1} r <= |r|^2 / lambda_min(M), with the
residual r of M x = z; theta_1 stands for lambda_min(M) where no a is known, eps theta_1 if theta_1
is not resolved. (A probe that hardly sees the smallest eigenvalue ends no earlier than others.)

*A missed eigenvalue.* r = p(M) z with p(t) = prod_j (1 - t / theta_j): a part c of z in an
eigenvector of the eigenvalue a is a part p(a) c of r, so that |c| <= |r| / p(a). c has the standard
deviation |z| / sqrt(n), and the scatter of probes that all miss the eigenvector does not show it.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Real

from .._core.estimate import norm_of, relative, scale_of
from .._core.precision import einsum, matmul, square_norms, square_of
from .._functions.funm import degrees_of_freedom, derivative_core, ended_after, mean_and_error
from .._functions.nodes import UNRESOLVED, unresolved
from .._functions.quadrature_error import orders_of, truncation_errors
from .._linalg.lanczos import Lanczos, positive, quadrature

#: The chance that all probes miss an eigenvalue, if it is harmless.
MISSED = 0.01


class Probes(NamedTuple):
    """Gauss quadrature for N probes z, with q nodes for each; 0 for probes that are not in use."""

    lengths: Real[Array, " N"]  # |z|^2 / n: 1 on the sphere
    samples: Real[Array, " N"]  # z^H log(M) z / n, or z^H (M^{-1} - I) z / n (`apart`)
    nodes: Real[Array, "N q"]
    masses: Real[Array, "N q"]
    exhausted: Bool[Array, " N"]  # whether the space is, or the probe is not in use
    chances: Real[Array, " N"]  # of 1/x: that the probe misses an eigenvalue at the floor

    @property
    def number(self) -> Real[Array, ""]:
        """The number of probes in use, at least 1."""
        return jnp.maximum(jnp.sum(self.lengths > 0), 1).astype(self.lengths.dtype)

    @property
    def smallest(self) -> Real[Array, ""]:
        """The smallest node."""
        return jnp.min(jnp.where(self.lengths > 0, self.nodes[:, 0], jnp.inf))

    @property
    def largest(self) -> Real[Array, ""]:
        """The largest node."""
        return jnp.max(self.nodes)


def mean_quotient(eigenpair: Any, omega: Array, forms: Array, s: Array) -> tuple[Array, Array]:
    """Returns (the mean of w^H M w / |w|^2 over the vectors of a sketch, without the known
    eigenvector; how many of them count, 0 where little but the eigenvector is left of the forms).
    """
    vector, mu = eigenpair
    of_vector = square_of(matmul(jnp.conj(vector).astype(omega.dtype), omega))
    rest = forms - mu * of_vector
    s = jnp.where(jnp.sum(rest) > jnp.sum(forms) / 100, s, 0)
    return jnp.mean(rest / (square_norms(omega) - of_vector)), s


def control_variate(
    probes: Probes, logs: Real[Array, "N q"], n: int, quotients: tuple[Array, Array]
) -> tuple[Array, Real[Array, "N q 2"]]:
    """Returns (g c_i (m_i - m_0) for every probe; log - g c x and g c x at the nodes, with the mean
    c of the c_i, and the second as large as if p probes and not s vectors had shown it).
    """
    mean, s = quotients
    number = probes.number
    unit = scale_of(probes.nodes)
    x = positive(probes.nodes / unit)
    moments = jnp.sum(probes.masses * jnp.stack([x, x * x, logs, x * logs]), axis=2)
    others = (jnp.sum(moments, axis=1, keepdims=True) - moments) / jnp.maximum(number - 1, 1)
    m, square, log, product = others
    # The share of the largest eigenvalue is 1 / n on average, even if the other probes miss it.
    least = jnp.square(jnp.max(x) - m) / n + float(jnp.finfo(x.dtype).eps) * square
    slopes = s / (s + number) * (product - m * log) / jnp.maximum(square - m * m, least)
    slopes = jnp.where(probes.lengths > 0, slopes, 0)  # g c_i
    line = jnp.sum(slopes) / number * x
    of_sketch = line * jnp.sqrt(number / jnp.maximum(s, 1))
    return slopes * (moments[0] - mean / unit), jnp.stack([logs - line, of_sketch], axis=-1)


def sum_of_logarithms(
    probes: Probes, n: int, is_complex: bool, quotients: tuple[Array, Array] | None
) -> tuple[Array, Array, Array]:
    """Returns (tr log M, standard error, degrees of freedom): see `_functions.funm`, and with the
    `quotients` (m_0, s) *A control variate* above.
    """
    number = probes.number
    samples = probes.samples
    values = jnp.where(probes.masses > 0, jnp.log(positive(probes.nodes)), 0)
    if quotients is not None:
        corrections, values = control_variate(probes, values, n, quotients)
        samples = samples - corrections
    _, errors, dofs = mean_and_error(probes.masses, values, n, is_complex, number)
    dof = jnp.min(dofs)
    # The standard error is itself one of few degrees of freedom.
    std_err = norm_of(errors) * jnp.sqrt(1 + 1 / dof)
    return n * jnp.sum(samples) / number, std_err, dof


def sum_of_inverses(probes: Probes, n: int) -> tuple[Array, Array, Array]:
    """Returns (mean of z^H (M^{-1} - I) z, its standard error from the scatter of the probes,
    degrees of freedom). How many eigenvalues dominate, the nodes tell, of what no multiple of the
    identity explains.
    """
    values = jnp.where(probes.masses > 0, 1 / positive(probes.nodes), 0)
    values = values / scale_of(values)
    number = probes.number
    centre = jnp.sum(probes.masses * values) / number
    mean = n * jnp.sum(probes.samples) / number
    away = jnp.where(probes.lengths > 0, n * probes.samples - mean, 0)
    unit = scale_of(away)
    variance = jnp.sum(jnp.square(away / unit)) / (number * jnp.maximum(number - 1, 1))
    second, fourth = (jnp.sum(probes.masses * (values - centre) ** i) / number for i in (2, 4))
    return mean, unit * jnp.sqrt(variance), degrees_of_freedom(second, fourth, n * number)


def missed_inverse(probes: Probes, floor: Real[Array, ""]) -> Real[Array, ""]:
    """What an eigenvalue at the floor a would add to the sum of inverses if all probes missed it; 0
    if that has a chance of at most `MISSED`.
    """
    chance = jnp.prod(jnp.where(probes.lengths > 0, probes.chances, 1))
    one = 1 / jnp.where(floor > 0, floor, jnp.inf) - 1 / probes.smallest
    return jnp.where(chance > MISSED, jnp.sum(probes.lengths) / probes.number * one, 0)


def quadrature_after(
    krylov: Lanczos,
    j: Int[Array, ""],
    lengths: Real[Array, " p"],
    floor: Real[Array, ""] | None,
    *,
    inverse: bool,
    weights: bool,
    apart: float,
) -> tuple[Probes, Real[Array, "2"], Array | None]:
    """Returns (quadrature after j >= 1 steps, the mean error of z^H f(M) z / n without and with
    what smaller eigenvalues may hide, the derivative of the logarithms by V^H M V if `weights`, or
    of the `inverse` M^{-1} z / |z| in the basis of each probe, after q, q - d and q - 2d steps).

    `lengths` are those of `Probes`; `floor` is a, None or 0 if it is not known; 1/x - `apart` is
    what is summed of the inverse, 1 or 0.
    """
    orders = [jnp.maximum(m, 1) for m in orders_of(j)]
    rules = quadrature(ended_after(krylov, orders))  # pyright: ignore[reportArgumentType]
    nodes, masses, vectors = (x[: len(lengths)] for x in rules)
    residual = krylov.beta[j - 1]
    masses = jnp.where(lengths[:, None] > 0, masses, 0)
    exhausted = residual == 0
    probes = Probes(lengths, jnp.zeros_like(lengths), nodes, masses, exhausted, 0 * lengths)
    nodes = positive(nodes)
    eps = float(jnp.finfo(nodes.dtype).eps)
    low = nodes[:, 0]
    residuals = residual[:, None] * jnp.abs(vectors[:, j - 1])
    hides = residuals[:, 0] > UNRESOLVED * low
    hidden = jnp.zeros_like(low)
    if inverse:
        solved = einsum("paj,pj->pa", rules[2], rules[2][:, 0, :] / positive(rules[0]))
        kept = solved.reshape(3, *nodes.shape)
        # T^{-1} e_1 ends with this number: the solve of M x = z leaves a residual of norm
        # beta_j |z| |last|. (Probes of the logarithm have length 1, those of 1/x have not.)
        left = jnp.abs(residual * kept[0, :, j - 1])
        least = jnp.where(hides, eps * low, low)
        if floor is not None:
            least = jnp.where((floor > 0) & (floor < 2 * low), jnp.minimum(floor, low), least)
            p_of_a = jnp.prod(jnp.maximum(1 - floor / nodes, 0), axis=1)
            chances = relative(math.sqrt(2 / math.pi * krylov.basis.shape[1]) * left, p_of_a)
            probes = probes._replace(chances=jnp.minimum(chances, 1))
        errors = lengths * jnp.square(left) / least
        samples = lengths * jnp.sum(masses * (1 / nodes - apart), axis=1)
    else:
        kept = derivative_core(jnp.log, nodes, vectors) if weights else None
        logs = jnp.sum(rules[1] * jnp.log(positive(rules[0])), axis=1).reshape(3, -1)
        samples = logs[0]
        errors = jnp.where((j > 1) | exhausted, truncation_errors(logs, exhausted), jnp.inf)
        lowest = eps**2 * jnp.max(nodes, axis=1)
        errors = errors + jnp.where(hides, masses[:, 0] * jnp.log(low / lowest), 0)
        changes = unresolved(jnp.log, nodes, jnp.log(nodes), residuals, masses > 0)
        hidden = jnp.sum(masses * changes, axis=1)
    if floor is not None and not inverse:
        known = ~exhausted & (floor > 0)
        rule, reduction = radau_rule(krylov, j, nodes, vectors[:, j - 1, :], floor, known)
        gap = samples - jnp.sum(rule[1] * jnp.log(rule[0]), axis=1)
        gap = jnp.where(known, jnp.maximum(gap, 0), 0)
        share = jnp.minimum(0.6, floor / nodes[:, 0])
        samples = samples - share * gap
        errors = jnp.where(floor > 0, jnp.maximum(share, 1 - share) * gap, errors)
        hidden = jnp.where(floor > 0, 0, hidden)
        if kept is not None:
            of_radau = core_of_radau(rule, j, reduction, nodes, vectors)
            kept = kept + share[:, None, None] * (of_radau - kept)
    in_use = lengths > 0
    probes = probes._replace(samples=jnp.where(in_use, samples, 0))
    errors = jnp.where(in_use, jnp.stack([errors, errors + hidden]), 0)
    return probes, jnp.sum(errors, axis=1) / probes.number, kept


def radau_rule(
    krylov: Lanczos, j: Any, nodes: Array, last: Array, floor: Array, known: Array
) -> tuple[tuple[Array, Array, Array], Array]:
    """Returns (nodes, masses, vectors of Radau's rule after j steps, 1 / r): see above. `last` is
    the last row of S. It is Gauss' rule for probes whose `floor` is not `known`.
    """
    eps = float(jnp.finfo(nodes.dtype).eps)
    # A positive number below the smallest Ritz value.
    a = jnp.minimum(floor, nodes[:, 0] * (1 - math.sqrt(eps)))
    a = jnp.maximum(a, eps**2 * nodes[:, -1])
    reduction = jnp.where(known, 1 / jnp.sum(jnp.square(last) / (nodes - a[:, None]), axis=1), 0)
    reduced = krylov._replace(alpha=krylov.alpha.at[j - 1].add(-reduction))
    nodes, masses, vectors = quadrature(ended_after(reduced, [j]))
    return (positive(nodes), masses, vectors), reduction


def core_of_radau(rule, j, reduction, nodes, vectors) -> Real[Array, "p q q"]:
    """The derivative of Radau's `rule` by V^H M V; `nodes` and `vectors` are of Gauss' rule."""
    core = derivative_core(jnp.log, rule[0], rule[2])
    index = jnp.argmax(nodes, axis=1)[:, None, None]
    top = jnp.take_along_axis(vectors, index, axis=2)  # h = V top
    lost = core[:, j - 1, j - 1] * reduction / jnp.max(nodes, axis=1)
    return core - lost[:, None, None] * top * jnp.swapaxes(top, 1, 2)

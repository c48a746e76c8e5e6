r"""Gauss and Gauss-Radau quadrature of a logarithm, or of 1/x, with the errors of both.

*The value.* Every derivative of the logarithm has a constant sign. Hence Gauss quadrature of
z^H log(M) z is never too small, and Gauss-Radau quadrature with a node at a <= lambda_min(M) is
never too large: the truth lies in between. For K + s I and P of low rank, a is known
(lambda_min(M) >= s / mu). Radau's rule of q nodes is Gauss' rule for T', which is T with its last
entry reduced by 1 / r, r = e_q^T (T - a)^{-1} e_q. If a is close to lambda_min(M), the two errors
are of about the same size, so that a mean of the two rules is far better than either. Radau's rule
has the weight min(0.6, a / theta_1), with theta_1 the smallest Ritz value: nearly nothing if a is
far too small. The quadrature error is the largest that the two bounds leave possible. If a is a
guess, they are no bounds, and the error that `_functions.funm` estimates from shorter recurrences
is added.

*The derivative* of Gauss quadrature is <L(T)[e_1 e_1^T], dT>, with L the derivative of the
logarithm and dT = V^H dM V (see `_functions.funm`): it converges as the value does. In the
direction dM = M it is 1. For Radau's rule, with T', this would be lost; it is restored by
d(last entry) = v_q^H dM v_q - h^H dM h / (r h^H M h), with the largest Ritz vector h. If a is a
guess, which does not follow the operator, the derivative is that of Gauss' rule alone.

*1/x.* Gauss quadrature of z^H M^{-1} z errs by r^H M^{-1} r, with the residual r of M x = z: at
most |r|^2 / theta_1, where theta_1 stands for the smallest eigenvalue.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Real

from .._core.precision import einsum
from .._functions.funm import derivative_core, ended_after
from .._linalg.lanczos import Lanczos, positive_quadrature, quadrature


class Quadrature(NamedTuple):
    """Quadrature for the probes of a panel."""

    samples: Real[Array, " p"]  # z^H log(M) z / n, or z^H (M^{-1} - I) z / n
    nodes: Real[Array, "p q"]
    masses: Real[Array, "p q"]
    vectors: Real[Array, "p q q"]
    values: Real[Array, "p q"]  # of f at the nodes
    mean: Real[Array, ""]
    error: Real[Array, ""]  # the mean over the probes
    smallest: Real[Array, ""]  # node; if it is not positive, tiny numbers replace it elsewhere
    largest: Real[Array, ""]
    exhausted: Bool[Array, ""]  # whether all spaces are
    core: Real[Array, "p q q"]  # the derivative of the samples by V^H M V, if wanted

    @staticmethod
    def nothing(p: int, q: int, dtype) -> "Quadrature":
        """Zeros."""
        one, two = jnp.zeros(p, dtype), jnp.zeros((p, q), dtype)
        zero = jnp.zeros((), dtype)
        three = jnp.zeros((p, q, q), dtype)
        numbers = zero, zero, zero, zero
        return Quadrature(one, two, two, three, two, *numbers, jnp.array(False), three)


def quadrature_after(
    krylov: Lanczos,
    j: Int[Array, ""],
    history: Real[Array, "q p"],
    floor: Real[Array, ""],
    lengths: Real[Array, " p"],
    inverse: bool,
    weights: bool = False,
) -> tuple[Quadrature, Real[Array, "q p"]]:
    """Quadrature after j steps.

    **Arguments:**

    - `krylov`: the recurrences for M.
    - `j`: the number of steps, at least 1.
    - `history`: Gauss quadrature after fewer steps.
    - `floor`: a lower bound of the eigenvalues of M; NaN if none is known.
    - `lengths`: |z|^2 / n, 1 for probes on the sphere, and 0 for those that are not in use.
    - `inverse`: whether f is 1/x.
    - `weights`: whether the derivative is wanted.

    **Returns:**

    The quadrature, and the history with that of Gauss.
    """
    fn = jnp.reciprocal if inverse else jnp.log
    active = lengths > 0
    residual = krylov.beta[j - 1]
    exhausted = residual == 0
    ended = ended_after(krylov, [j])  # pyright: ignore[reportArgumentType]
    nodes, masses, vectors = quadrature(ended)
    smallest = jnp.min(jnp.where(active, nodes[:, 0], jnp.inf))
    eps = float(jnp.finfo(nodes.dtype).eps)
    tiny = eps**2 * krylov.unit
    nodes = jnp.maximum(nodes, tiny)
    values = fn(nodes)
    gauss = jnp.sum(masses * values, axis=1)
    history = history.at[j - 1].set(gauss)
    last = vectors[:, j - 1, :]

    def by_radau():
        # Without a known bound, the residual of the smallest Ritz pair tells how far below it the
        # smallest eigenvalue may lie.
        reach = nodes[:, 0] - residual * jnp.abs(last[:, 0])
        guess = jnp.clip(reach, nodes[:, 0] / 4, nodes[:, 0])
        a = jnp.where(jnp.isnan(floor), guess, floor)
        a = jnp.minimum(a, nodes[:, 0] * (1 - math.sqrt(eps)))
        a = jnp.maximum(a, tiny[:, 0] / 2)
        reduction = 1 / jnp.sum(jnp.square(last) / (nodes - a[:, None]), axis=1)
        # On an exhausted space Gauss' rule is exact.
        reduction = jnp.where(exhausted, 0, reduction)
        changed = ended._replace(alpha=ended.alpha.at[j - 1].add(-reduction))
        radau_nodes, radau_masses, radau_vectors = quadrature(changed)
        radau_nodes = jnp.maximum(radau_nodes, tiny)
        radau = jnp.sum(radau_masses * jnp.log(radau_nodes), axis=1)
        gap = jnp.where(exhausted, 0, jnp.maximum(gauss - radau, 0))
        share = jnp.minimum(0.6, a / nodes[:, 0])
        error = jnp.maximum(share, 1 - share) * gap
        guessed = error + jnp.where(exhausted, 0, truncation_error_at(history, j))
        core = jnp.zeros_like(vectors)
        if weights:
            core = derivative_core(jnp.log, nodes, vectors)
            of_radau = derivative_core(jnp.log, radau_nodes, radau_vectors)
            largest = jnp.max(jnp.where(masses > 0, nodes, 0), axis=1)
            top = jnp.take_along_axis(vectors, jnp.argmax(nodes, axis=1)[:, None, None], axis=2)[
                :, :, 0
            ]
            lost = (of_radau[:, j - 1, j - 1] * reduction / largest)[:, None, None]
            of_radau = of_radau - lost * top[:, :, None] * top[:, None, :]
            known = jnp.where(jnp.isnan(floor), 0, share)[:, None, None]
            core = core + known * (of_radau - core)
        return gauss - share * gap, jnp.where(jnp.isnan(floor), guessed, error), core

    if inverse:
        coefficient = jnp.sum(last * vectors[:, 0, :] / nodes, axis=1)
        samples = lengths * (gauss - 1)
        error = lengths * jnp.square(residual * coefficient) / nodes[:, 0]
        core = jnp.zeros_like(vectors)
    else:
        samples, error, core = by_radau()
    count = jnp.maximum(jnp.sum(active), 1)
    found = Quadrature(
        samples=samples,
        nodes=nodes,
        masses=masses,
        vectors=vectors,
        values=values,
        mean=jnp.sum(jnp.where(active, samples, 0)) / count,
        error=jnp.sum(jnp.where(active, error, 0)) / count,
        smallest=smallest,
        largest=jnp.max(krylov.alpha + krylov.beta),
        exhausted=jnp.all(exhausted | ~active),
        core=core,
    )
    return found, history


def truncation_error_at(history: Real[Array, "q p"], j: Int[Array, ""]) -> Real[Array, " p"]:
    """The error after j steps, from the values after j, j - d and j - 2d: see `_functions.funm`."""
    d = (j + 3) // 4
    now, before, first = (history[jnp.maximum(at - 1, 0)] for at in (j, j - d, j - 2 * d))
    last = jnp.abs(now - before)
    fall = jnp.abs(before - first)
    rate = jnp.minimum(last / jnp.where(fall > 0, fall, 1), 0.95)
    rate = jnp.where((j > 2 * d) & (fall > 0), rate, 0.95)
    error = last * jnp.maximum(1, 8 * rate / (1 - rate))
    return jnp.where(j > d, error, jnp.inf)


def solutions_after(krylov: Lanczos, j: Int[Array, ""], orders: int) -> Real[Array, "o p q"]:
    """M^{-1} z / |z| in the basis of each probe, after j, j - d and j - 2d steps (so many of these;
    at least one step).
    """
    d = (j + 3) // 4
    ends = [jnp.maximum(j - order * d, 1) for order in range(orders)]
    nodes, _, vectors = positive_quadrature(ended_after(krylov, ends))  # pyright: ignore[reportArgumentType]
    found = einsum("paj,pj->pa", vectors, vectors[:, 0, :] / nodes)
    p = krylov.alpha.shape[1]
    return found.reshape(orders, p, -1)

r"""Spectral sums by leaving out: each vector of a Krylov space is a probe of what the others leave.

*The value.* b vectors omega_i on the sphere of radius sqrt(n) and s steps of block Lanczos give an
orthonormal basis V, and T = V^H A V (see `_linalg.block_lanczos`). Let P_i project on the Krylov
space of depth j < s of all vectors but omega_i, of dimension d. This space is independent of
omega_i, and the direction of g_i = (I - P_i) omega_i is uniform in its complement; hence each of

    t_i = tr(P_i f(A)) + (n - d) g_i^H f(A) g_i / ||g_i||^2

has the mean tr f(A), and so has their mean, which is the value. All of P_i and g_i lies within V:
no further product is made. In the coordinates of V, with T for A,

    value = tr(W f(T)),   W = mean_i [P_i + (n - d) g_i g_i^H / ||g_i||^2],   E[W] = I,

which is exact for polynomials f of degree 2 (s - j) + 1. Several vectors, a group, share a P_i.
(XTrace's exchange, doi:10.1137/23M1548323, on Krylov spaces, arXiv:2205.01736, arXiv:2502.01888. We
know of no paper on the combination.)

*The standard error* is that of the scatter of the t_i, a quarter larger: they are correlated, as
each of omega_i and omega_l is in the space of the other.

*The quadrature error* compares f(T) after s, s - m and s - 2m steps, with m = s / 8, for the same
W, as in `funm`. W must lie in the first s - 2m steps, and j = s - 2m takes out as much as can be.

*The derivative.* With W held fixed,

    d tr(W f(T)) = <S (D o (S^H W S)) S^H, V^H dA V>,      T = S Theta S^H,

with the divided differences D of f. As E[W] = I whatever A is, this has the mean tr(f'(A) dA).
"""

import math
from functools import partial
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, Real

from .._core.estimate import Evidence, all_finite, mean_and_std_err, rounding_of, scale_of, worse
from .._core.precision import einsum, matmul, square_of
from .._linalg.arnoldi import orthogonal_part
from .._linalg.block_lanczos import BlockLanczos, block_lanczos
from .._linalg.factorisations import ritz_values
from .._operators.block_operator import BlockOperator
from .._probes.samplers import SphereSampler
from .funm import AbstractSpectralEstimator, SpectralWeights
from .nodes import (
    Function,
    changes_by_rounding,
    divided_differences,
    on_nodes,
    unresolved,
    within_tag,
)
from .quadrature_error import quadrature_estimate, truncation_error

#: The smallest budget that is worth a block.
LEAST = 16

#: The number of groups of vectors that are left out in turn.
GROUPS = 4

#: Values that leave out one group are not independent: errors on clustered spectra are larger.
INFLATION = 1.1

#: By how much the scatter of these values is too small.
CORRELATION = 1.25


def sizes_of(k: int) -> tuple[int, int, int]:
    """Returns (vectors of a group, number s of steps, depth j); all groups have sqrt(k) vectors."""
    size = max(1, round(math.sqrt(k) / GROUPS))
    s = k // (GROUPS * size)
    return size, s, s - 2 * max(1, s // 8)


class Projected(NamedTuple):
    """f(T) after s, s - m and s - 2m steps, and what is known of its errors at the nodes."""

    nodes: Real[Array, "3 m"]
    vectors: Inexact[Array, "3 m m"]
    values: Real[Array, "3 m ..."]
    hidden: Real[Array, "m ..."]  # after s - m steps, of which T has the residuals
    changes: Real[Array, "m ..."]  # by rounding
    evidence: Evidence


def projected(
    fn: Function, operator: lx.AbstractLinearOperator, krylov: BlockLanczos, b: int, eps: float
) -> Projected:
    """f(T) from a space of b vectors."""
    t = krylov.t
    steps = len(t) // b
    ends = np.linspace(steps, steps - 2 * max(1, steps // 8), 3, dtype=int)
    in_use = jnp.any(krylov.rows != 0, axis=1) & (jnp.arange(b * steps) // b < ends[:, None])
    nodes, vectors = jax.vmap(ritz_values, (None, 0))(t, in_use)
    nodes = within_tag(operator, nodes, eps)
    counts = jnp.any(vectors != 0, axis=1)
    values = on_nodes(fn, nodes, counts)
    residuals = jnp.linalg.norm(matmul(t, vectors[1]) - vectors[1] * nodes[1], axis=0)
    hidden = unresolved(fn, nodes[1], values[1], residuals, counts[1], b)
    changes = changes_by_rounding(fn, operator, nodes[0], values[0], eps, counts[0])
    evidence = worse(krylov.evidence, Evidence(outside=~all_finite(changes)))
    return Projected(nodes, vectors, values, hidden, changes, evidence)


@final
class KrylovAwareEstimator(AbstractSpectralEstimator):
    """tr(W f(T)), see above."""

    fn: Function

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        n = block.n
        eps = block.eps
        size, s, depth = sizes_of(k)
        b = GROUPS * size
        omega = SphereSampler().probes(key, n, b, block.dtype)
        krylov = block_lanczos(block.mm, omega, s, eps)
        found = projected(self.fn, operator, krylov, b, eps)

        # The spaces that leave out a group, in the coordinates of V.
        t = krylov.t[: b * depth, : b * depth]
        coordinates = matmul(jnp.conj(krylov.rows[: b * depth]), omega).T.reshape(GROUPS, size, -1)
        rows = spaces_without_group(t, coordinates, depth, eps)
        g, _ = jax.vmap(orthogonal_part, (None, 1), 1)(rows, coordinates)
        norms = jnp.linalg.norm(g, axis=2, keepdims=True)
        g = g / jnp.where(norms > 0, norms, 1).astype(g.dtype)
        room = n - jnp.sum(jnp.any(rows != 0, axis=2, keepdims=True), axis=1, keepdims=True)
        turned = jnp.conj(found.vectors[:, : b * depth])  # from coordinates to the basis of nodes
        known = jnp.sum(square_of(einsum("lra,iam->ilrm", rows, turned)), axis=2, keepdims=True)
        masses = known + room * square_of(einsum("lga,iam->ilgm", g, turned))
        samples = einsum("ilgm,im...->i...lg", masses, found.values)
        samples = samples.reshape(*samples.shape[:-2], b)  # t_i
        masses = jnp.mean(masses, axis=(1, 2))
        error = truncation_error(jnp.mean(samples, axis=-1)[:, None], krylov.exhausted[None])
        error = error + einsum("m,m...->...", masses[1], found.hidden)
        value, std_err = mean_and_std_err(samples[0])
        nodes, s, values, masses = (x[0] for x in (*found[:3], masses))
        rounding = rounding_of(jnp.abs(values), eps) + found.changes
        std_err = jnp.hypot(CORRELATION * std_err, einsum("m,m...->...", masses, rounding))
        given = value, error, std_err, len(krylov.t), b - 1, found.evidence
        estimate = quadrature_estimate(*given, inflation=INFLATION, separate=value.ndim > 0)
        if not weights:
            return estimate, None
        z = jnp.concatenate([rows, jnp.sqrt(room / size).astype(g.dtype) * g], axis=1)
        w = einsum("lra,lrb->ab", z, jnp.conj(z)) / GROUPS
        overlap = matmul(turned[0].T, matmul(w, jnp.conj(turned[0])))  # S^H W S
        differences = divided_differences(self.fn, nodes[None])[0].astype(w.dtype)
        core = einsum("ai,ij,ij...,bj->ab...", s, overlap, differences, jnp.conj(s))
        basis = krylov.rows[..., None]
        return estimate, SpectralWeights(basis, core[None], nodes[None], masses[None])


def spaces_without_group(
    t: Inexact[Array, "m m"], coordinates: Inexact[Array, "l g m"], depth: int, eps: float
) -> Inexact[Array, "l r m"]:
    """Bases of the P_i: block Krylov spaces of T without the vectors of one group in turn."""
    groups, _, m = coordinates.shape
    unit = scale_of(jnp.abs(t)).astype(t.dtype)
    others = np.stack([np.delete(np.arange(groups), i) for i in range(groups)])
    start = coordinates[others].reshape(groups, -1, m)

    # Rounding errors of T lie within V. A vector that is made of them knows the group, and
    # would tilt the space towards it: a new vector must be much longer than they are.
    least = math.sqrt(eps)
    basis = lambda x: block_lanczos(partial(matmul, t / unit), x.T, depth, eps, least).rows  # noqa: E731
    return jax.vmap(basis)(start)

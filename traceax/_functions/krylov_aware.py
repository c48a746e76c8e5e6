r"""Spectral sums by leaving out: each vector of a Krylov space is a probe of what the others leave.

*The value.* b vectors omega_i on the sphere of radius sqrt(n) and s steps of block Lanczos give an
orthonormal basis V, and T = V^H A V (see `_linalg.block_lanczos`). Let P_i project on the Krylov
space of depth j < s of all vectors but omega_i, of dimension d. This space is independent of
omega_i, and the direction of g_i = (I - P_i) omega_i is uniform in its complement; hence each of

    t_i = tr(P_i f(A)) + (n - d) g_i^H f(A) g_i / ||g_i||^2

has the mean tr f(A), and so has their mean, which is the value. All of P_i and g_i lies within V:
no further product is made. In the coordinates of V, with T for A, P_i is the basis of b further
Krylov spaces, of small matrices, and

    value = tr(W f(T)),   W = mean_i [P_i + (n - d) g_i g_i^H / ||g_i||^2],   E[W] = I,

which is exact for polynomials f of degree 2 (s - j) + 1. (XTrace's exchange, E. N. Epperly, J. A.
Tropp, R. J. Webber, doi:10.1137/23M1548323, on the Krylov spaces of T. Chen, E. Hallman,
*Krylov-aware stochastic trace estimation*, arXiv:2205.01736, who draw further probes; D. Persson,
T. Chen, C. Musco, *Randomized block-Krylov subspace methods for low-rank approximation of matrix
functions*, arXiv:2502.01888. We know of no paper on the combination.) Several vectors, a group,
share a P_i.

*The standard error* of one t_i is that of a quadratic form of a probe on a sphere (see `funm`): c X
with X = ||B||_F^2 - tr(B)^2 / (n - d) of B = (I - P_i) f(A) (I - P_i), which is the mean over all
g_i of (n - d) ||(B - a) g_i||^2 / ||g_i||^2, where a is the mean of g_i^H f(A) g_i / ||g_i||^2; and
c = 2(n - d) / (n - d + 2), with the correction for a^2 of `funm`. Errors of different t_i are
correlated, because each of omega_i and omega_l is in the space of the other. By the identity of
`_sketch.leave_one_out`, Cov(t_i, t_l) = E[D_il D_li], where D_il is what t_i changes by when
omega_l is held out, too. Its variance is that of t_i from b - 2 vectors less that from b - 1; where
X falls like d^-alpha, this is alpha X / (b - 1), and the variance of the mean is at most 1 + alpha
times X / b, with alpha from the X of two depths. This bound is stated; half of alpha is typical.

*The quadrature error* compares f(T) after s, s - m and s - 2m steps, with m = s / 8, for the same
W, as in `funm`. W must lie in the first s - 2m steps, and j = s - 2m takes out as much as can be.

*Rounding.* A bound on what rounding errors of products do to f is part of the standard error.

*The derivative.* With W held fixed,

    d tr(W f(T)) = <S (D o (S^H W S)) S^H, V^H dA V>,      T = S Theta S^H,

with the divided differences D of f. As E[W] = I whatever A is, this has the mean tr(f'(A) dA), as
far as the recurrences have converged.
"""

import math
from typing import ClassVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Real

from .._core.estimate import rounding_of, scale_of, worse
from .._core.precision import einsum, matmul
from .._linalg.block_lanczos import block_lanczos
from .._linalg.factorisations import ritz_values
from .._operators.block_operator import BlockOperator
from .._probes.samplers import SphereSampler
from .._sketch.leave_one_out import square_of
from .funm import (
    AbstractSpectralEstimator,
    SpectralWeights,
    check_hermitian,
    degrees_of_freedom,
    domain_evidence,
    truncation_error,
)
from .nodes import Function, changes_by_rounding, divided_differences, on_nodes, unresolved
from .quadrature_error import quadrature_estimate

#: The smallest budget that is worth a block.
LEAST = 16

#: The number of groups of vectors that are left out in turn.
GROUPS = 4

#: Values that leave out one group are not independent: on clustered spectra the errors are so many
#: times as large as their scatter says. (Without it, bars of the test of bars cover too little.)
INFLATION = 1.1


def sizes_of(k: int) -> tuple[int, int, int]:
    """The number of vectors of a group, the number s of steps of k products, and the depth j. (With
    sqrt(k) vectors in all, an operator of low rank is captured, and errors are within 1.4 times
    those of the best number on the spectra of `benchmarks/spectra.py`.)
    """
    size = max(1, round(math.sqrt(k) / GROUPS))
    s = k // (GROUPS * size)
    return size, s, s - 2 * max(1, s // 8)


def orthogonal_probes(
    rows: Inexact[Array, "l r m"], vectors: Inexact[Array, "l g m"]
) -> Inexact[Array, "l g m"]:
    """The part g_i of each vector outside of the space of its group, of length 1."""
    for _ in range(2):
        inside = einsum("lrm,lgm->lgr", jnp.conj(rows), vectors)
        vectors = vectors - einsum("lgr,lrm->lgm", inside, rows)
    norms = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.where(norms > 0, norms, 1).astype(vectors.dtype)


def room_outside(rows: Inexact[Array, "l r m"], n: int) -> Real[Array, " l"]:
    """The dimension n - d of the complement of each space. Rows that are 0 do not count."""
    dimensions = jnp.sum(jnp.any(rows != 0, axis=2), axis=1)
    return n - dimensions.astype(jnp.finfo(rows.dtype).dtype)


def independent_error(
    rows: Inexact[Array, "l r m"],
    probes: Inexact[Array, "l g m"],
    values: Real[Array, "m f"],
    room: Real[Array, ""],
) -> tuple[Real[Array, " f"], Real[Array, " f"]]:
    """The standard error of the mean of the t_i, as if they were independent, and its degrees of
    freedom.

    **Arguments:**

    - `rows`, `probes`: the bases of the spaces, and the g_i, in the basis of eigenvectors of T.
    - `values`: f at the nodes.
    - `room`: the mean of n - d.
    """
    count = probes.shape[0] * probes.shape[1]
    unit = scale_of(values, axis=0)
    weights = jnp.sum(square_of(probes), axis=(0, 1)) / count
    away = values / unit
    away = away - matmul(weights, away)
    images = probes[..., None] * away.astype(probes.dtype)
    inside = einsum("lrm,lgmf->lgrf", jnp.conj(rows), images)
    images = images - einsum("lrm,lgrf->lgmf", rows, inside)
    x = room * jnp.sum(square_of(images), axis=(0, 1, 2)) / count
    c = room / (room + 1) if jnp.iscomplexobj(probes) else 2 * room / (room + 2)
    std_err = unit * jnp.sqrt(c * x / count / (1 - c / (room * count)))
    moments = matmul(weights, away**2), matmul(weights, away**4)
    return std_err, degrees_of_freedom(*moments, room * count)


def standard_error(
    part: Inexact[Array, "l q m"],
    rows: Inexact[Array, "l r m"],
    vectors: Inexact[Array, "l g m"],
    turned: Inexact[Array, "m k"],
    values: Real[Array, "k f"],
    n: int,
) -> tuple[Real[Array, " f"], Real[Array, " f"]]:
    """The standard error, with alpha from spaces of fewer steps, and its degrees of freedom.

    **Arguments:**

    - `part`, `rows`: the bases of both spaces for each group, in the coordinates of V.
    - `vectors`: the vectors of the groups.
    - `turned`: the map from the coordinates to the basis of eigenvectors of T.
    - `values`: f at the nodes.
    - `n`: the number of rows of A.
    """
    found = []
    for basis in (part, rows):
        room = jnp.mean(room_outside(basis, n))
        g = orthogonal_probes(basis, vectors)
        found.append(
            (n - room, *independent_error(matmul(basis, turned), matmul(g, turned), values, room))
        )
    (fewer, larger, _), (dimension, std_err, dof) = found
    fall = jnp.log(jnp.maximum(larger / jnp.where(std_err > 0, std_err, 1), 1))
    growth = jnp.maximum(jnp.log(dimension / fewer), jnp.finfo(fall.dtype).eps)
    return std_err * jnp.sqrt(1 + jnp.minimum(2 * fall / growth, 4)), dof


@final
class KrylovAwareEstimator(AbstractSpectralEstimator):
    """The estimator of above."""

    fn: Function
    smallest: ClassVar[int] = LEAST

    def check(self, operator):
        """See `AbstractEstimator`."""
        check_hermitian(operator, "A spectral sum with `shifts`")

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        n, eps = block.n, block.eps
        size, s, depth = sizes_of(k)
        b, apart = GROUPS * size, (s - depth) // 2
        omega = SphereSampler().probes(key, n, b, block.dtype)
        krylov = block_lanczos(block.mm, omega, s, eps)

        # f(T) after s, s - m and s - 2m steps.
        step = jnp.arange(b * s) // b
        in_use = jnp.stack([krylov.in_use & (step < s - i * apart) for i in range(3)])
        nodes, vectors = jax.vmap(lambda used: ritz_values(krylov.t, used))(in_use)
        nodes = self.nodes_of(operator, nodes, eps)
        values = on_nodes(self.fn, nodes)
        shape = values.shape[2:]
        counts = jnp.any(vectors != 0, axis=1)
        values = jnp.where(counts[..., None], values.reshape(*nodes.shape, -1), 0)

        # The spaces that leave out a group, in the coordinates of the first s - 2m steps.
        t = krylov.t[: b * depth, : b * depth]
        coordinates = matmul(jnp.conj(krylov.rows[: b * depth]), omega).T.reshape(GROUPS, size, -1)
        rows = spaces_without_group(t, coordinates, depth, eps)
        g = orthogonal_probes(rows, coordinates)
        room = room_outside(rows, n)
        turned = jnp.conj(vectors[:, : b * depth])  # from coordinates to the basis of nodes
        captured = jnp.sum(square_of(einsum("lra,iam->ilrm", rows, turned)), axis=(1, 2)) / GROUPS
        outside = square_of(einsum("lga,iam->ilgm", g, turned))
        masses = captured + einsum("l,ilgm->im", room / b, outside)
        traces = einsum("im,imf->if", masses, values)
        error = truncation_error(traces[:, None], krylov.exhausted[None])
        # What is hidden after s - m steps, of which T has the residuals.
        of_t = matmul(krylov.t, vectors[1]) - vectors[1] * nodes[1]
        residuals = jnp.linalg.norm(of_t, axis=0)
        hidden = unresolved(self.fn, nodes[1], values[1].reshape(-1, *shape), residuals, b)
        error = error + matmul(masses[1], hidden.reshape(len(residuals), -1))

        part = rows[:, : (b - size) * max(1, 3 * depth // 4)]
        std_err, dof = standard_error(part, rows, coordinates, turned[0], values[0], n)
        nodes, vectors, counts, values, masses = (
            x[0] for x in (nodes, vectors, counts, values, masses)
        )
        changes = changes_by_rounding(self.fn, operator, nodes, values, eps)
        rounding = rounding_of(matmul(masses, jnp.abs(values)), eps)
        rounding = rounding + matmul(masses, jnp.where(counts[:, None], changes, 0))
        std_err = jnp.hypot(std_err, rounding)

        def fixed():
            w = einsum("lra,lrb->ab", rows, jnp.conj(rows)) / GROUPS
            w = w + einsum("l,lga,lgb->ab", (room / b).astype(g.dtype), g, jnp.conj(g))
            overlap = matmul(turned[0].T, matmul(w, jnp.conj(turned[0])))
            differences = divided_differences(self.fn, nodes[None])[0].astype(w.dtype)
            core = einsum("ai,ij,ij...,bj->ab...", vectors, overlap, differences, jnp.conj(vectors))
            basis = krylov.rows[..., None]
            return SpectralWeights(basis, core[None], nodes[None], masses[None])

        value, error, std_err, dof = (x.reshape(shape) for x in (traces[0], error, std_err, dof))
        evidence = worse(
            krylov.evidence, domain_evidence(counts.astype(nodes.dtype), values + changes)
        )
        estimate = quadrature_estimate(
            value, error, std_err, b * s, dof, evidence, inflation=INFLATION
        )
        return estimate, fixed() if weights else None


def spaces_without_group(
    t: Inexact[Array, "m m"], coordinates: Inexact[Array, "l g m"], depth: int, eps: float
) -> Inexact[Array, "l r m"]:
    """Bases of the block Krylov spaces of T of all vectors but a group, step after step."""
    groups, size, m = coordinates.shape
    unit = scale_of(jnp.abs(t)).astype(t.dtype)
    others = np.stack([np.delete(np.arange(groups), i) for i in range(groups)])
    start = coordinates[others].reshape(groups, (groups - 1) * size, m)

    def basis(start):
        # Rounding errors of T lie within V. A vector that is made of them knows the group, and
        # would tilt the space towards it: a new vector must be much longer than they are.
        negligible = math.sqrt(eps)
        krylov = block_lanczos(
            lambda x: matmul(t / unit, x), start.T, depth, eps, negligible=negligible
        )
        return krylov.rows

    return jax.vmap(basis)(start)

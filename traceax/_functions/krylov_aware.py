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
functions*, arXiv:2502.01888. We know of no paper on the combination.) Of many vectors,
several share a P_i: what is left out is a group.

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
W, which lies in the first s - 2m steps, as in `funm`.

*Rounding.* A bound on what rounding errors of products do to f is part of the standard error.

*The choice of j.* j = 0 is quadrature with a block of probes; s - 2m takes out as much as can be,
and leaves the fewest steps to the quadrature. X falls with j. A standard error that is smaller at a
smaller depth is so by chance, where the probes hardly see an eigenvalue that f(A) is large at; the
value is then too small as well. (On one outlier, the depth of the smallest standard error had a
bias of 1 % for k = 24, a third of the standard deviation.) So only the quadrature speaks against
depth: j is the deepest for which the square of the quadrature error is at most the smallest sum, of
all depths, of the squares of both errors. Its own sum is then at most twice as large, as X falls.
Where the quadrature has converged, j = s - 2m whatever the probes are: no bias.

*The choice of b and s.* A probe goes ahead, and takes a twelfth to an eighth of the budget. (It is
independent of all others, so that this choice causes no bias.) Its quadrature after three numbers
of steps says at which rate it converges; and its nodes, what the variance 2 R, R = ||f(A)||_F^2 -
tr(f(A))^2 / n, of a single probe would be. Of three numbers b, with as many steps s as the budget
allows, the one with the smallest 2 R / b + (what s steps leave out)^2 wins: many vectors where
quadrature converges, and depth where it does not. (A vector that joins the space of others late
spoils it: what is left of it outside of their space is no start of a Krylov space.)

*The derivative.* With W held fixed,

    d tr(W f(T)) = <S (D o (S^H W S)) S^H, V^H dA V>,      T = S Theta S^H,

with the divided differences D of f. As E[W] = I whatever A is, this has the mean tr(f'(A) dA), as
far as the recurrences have converged.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.estimate import if_wanted, rounding_of, scale_of
from .._core.precision import einsum, matmul
from .._linalg.block_lanczos import BlockLanczos, block_lanczos, ritz_values
from .._linalg.lanczos import lanczos, narrowed, quadrature
from .._operators.block_operator import BlockOperator
from .._probes.samplers import SphereSampler
from .._sketch.leave_one_out import square_of
from .._sketch.weights import AbstractWeights
from .frechet import Bend, steps_of
from .funm import (
    AbstractSpectralEstimator,
    check_hermitian,
    ended_after,
    mean_and_error,
    status_with_domain,
    truncation_error,
    weighted,
)
from .nodes import Function, changes_by_rounding, divided_differences, on_nodes, within_tag
from .quadrature_error import entries_status, with_quadrature_error

#: The smallest budget that is worth a block.
LEAST = 24

#: The fewest groups of vectors that are left out in turn, if there are as many vectors; and, where
#: this allows for more, the largest product of their number and the dimension of the space. (The
#: spaces of four groups cost as much as that of all vectors if n is twice the dimension. On five
#: functions 12 groups were no more accurate than 4 for k = 240, by 5 % at most for k = 120.)
FEWEST_GROUPS, ROWS_OF_GROUPS = 4, 1200

#: The number of depths j to choose from, beside 0.
DEPTHS = 4


class Sizes(NamedTuple):
    """How a budget may be divided."""

    pilot: int  # the number of steps of the probe that goes ahead
    vectors: tuple[int, ...]  # ascending
    steps: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The largest dimension of the Krylov space."""
        return max(b * s for b, s in zip(self.vectors, self.steps, strict=True))

    @property
    def groups(self) -> int:
        """The number of groups of vectors that are left out in turn."""
        return min(self.vectors[-1], max(FEWEST_GROUPS, ROWS_OF_GROUPS // self.rows))

    @property
    def rows_left_out(self) -> int:
        """The largest dimension of a space that leaves out a group."""
        pairs = zip(self.vectors, self.steps, strict=True)
        return max(b * (s - 2 * _apart(s)) for b, s in pairs)


def _apart(steps: Any) -> Any:
    """The number m of steps by which recurrences that are compared differ: s / 8, at least 1."""
    return (steps + 8 * (steps < 8)) // 8


def sizes_of(k: int) -> Sizes:
    """How a budget of k products may be divided."""
    most = max(4, round(0.9 * math.sqrt(k)))
    pilot = max(3, round(0.9 * k / most))
    vectors = tuple(sorted({-(-most // 2), -(-3 * most // 4), most}))
    return Sizes(pilot, vectors, tuple((k - pilot) // b for b in vectors))


class _Nodes(NamedTuple):
    """Functions of T, restricted to the first steps."""

    nodes: Real[Array, " m"]
    vectors: Inexact[Array, "m m"]
    values: Real[Array, "m f"]  # 0 where a node does not count
    counts: Bool[Array, " m"]


def _nodes_of(krylov: BlockLanczos, kept: Bool[Array, " m"], fn: Function, tagged: Any) -> _Nodes:
    nodes, vectors = ritz_values(krylov.t, krylov.in_use & kept)
    nodes = tagged(nodes)
    values = on_nodes(fn, nodes).reshape(nodes.size, -1)
    counts = jnp.sum(square_of(vectors), axis=0) > 0
    return _Nodes(nodes, vectors, jnp.where(counts[:, None], values, 0), counts)


def _division(
    mm: Any, probe: Inexact[Array, "n 1"], sizes: Sizes, fn: Function, tagged: Any, eps: float
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """The numbers of vectors and of steps, from a probe that goes ahead, and its status."""
    n, most, apart = len(probe), sizes.pilot, max(1, sizes.pilot // 4)
    krylov = lanczos(mm, probe, most, eps)
    nodes, weights, _ = quadrature(ended_after(krylov, [most, most - apart, most - 2 * apart]))
    values = on_nodes(fn, tagged(nodes)).reshape(*nodes.shape, -1)
    values = jnp.where(weights[..., None] > 0, values, 0)
    values = values / scale_of(values.reshape(-1, values.shape[-1]), axis=0)
    traces = weighted(weights, values)
    square = weighted(weights, jnp.square(values))[0]
    left = jnp.maximum(square - jnp.square(traces[0]), 0)
    last, before = jnp.abs(traces[0] - traces[1]), jnp.abs(traces[1] - traces[2])
    rate = jnp.clip(last / jnp.where(before > 0, before, 1), 0, 0.95)
    vectors, steps = (jnp.asarray(x, rate.dtype)[:, None] for x in (sizes.vectors, sizes.steps))
    missed = last * rate / (1 - rate) * jnp.where(rate > 0, rate, 1) ** ((steps - most) / apart)
    cost = 2 * left / (n * vectors) + jnp.square(missed)
    cost = jnp.sum(cost / jnp.where(square > 0, square, 1), axis=1)
    best = jnp.argmin(jnp.where(jnp.isnan(cost), jnp.inf, cost))
    status = krylov.hermitian_status(eps)
    return jnp.asarray(sizes.vectors)[best], jnp.asarray(sizes.steps)[best], status


class _Space(NamedTuple):
    """The Krylov space of all vectors in use."""

    krylov: BlockLanczos
    coordinates: Inexact[Array, "m b"]  # of the vectors
    steps: Int[Array, ""]  # s
    vectors: Int[Array, ""]  # b
    status: Int[Array, ""]

    @property
    def depth(self) -> Int[Array, " m"]:
        """The step of each row."""
        return jnp.arange(len(self.krylov.rows)) // self.vectors


def _space_of(
    mm: Any, probes: Inexact[Array, "n b+1"], sizes: Sizes, fn: Function, tagged: Any, eps: float
) -> _Space:
    vectors, steps, status = _division(mm, probes[:, :1], sizes, fn, tagged, eps)
    start = probes[:, 1:]
    start = jnp.where(jnp.arange(start.shape[1]) < vectors, start, 0)
    product = narrowed(mm, sizes.vectors, vectors)
    krylov = block_lanczos(product, start, steps, eps, vectors, sizes.rows)
    status = jnp.maximum(status, krylov.status)
    return _Space(krylov, matmul(jnp.conj(krylov.rows), start), steps, vectors, status)


class _LeftOut(NamedTuple):
    """The spaces that leave out each group of vectors, the lanes l, in the coordinates of V. The
    last vectors g of a lane do not count if its group is small. The depths j are the first axis.
    """

    rows: Inexact[Array, "l r m"]  # bases, step after step
    within: Bool[Array, "j r"]  # which rows the depth takes
    shares: Real[Array, " l"]  # the part of all vectors that is in the group
    dimensions: Real[Array, "j l"]
    probes: Inexact[Array, "j l g m"]  # g_i, of length 1
    used: Bool[Array, "l g"]


def _leave_out(space: _Space, sizes: Sizes, eps: float) -> _LeftOut:
    krylov, b, most = space.krylov, space.coordinates.shape[1], sizes.rows_left_out
    lanes = sizes.groups
    real = jnp.finfo(krylov.t.dtype).dtype
    t = krylov.t / scale_of(jnp.abs(krylov.t)).astype(krylov.t.dtype)
    index = jnp.arange(b)
    last = space.steps - 2 * _apart(space.steps)
    depths = jnp.arange(DEPTHS + 1) * last // DEPTHS

    # Rounding errors of T lie within V. A vector that is made of them knows the group: it would
    # tilt the space towards g_i. So a new vector must be much longer than they are.
    negligible = math.sqrt(eps)

    def basis(lane):
        others = jnp.where(index % lanes != lane, space.coordinates, 0)
        krylov = block_lanczos(
            lambda x: matmul(t, x), others, last, eps, space.vectors, most, negligible
        )
        return krylov.rows

    rows = jax.vmap(basis)(jnp.arange(lanes))
    within = space.depth[:most] < depths[:, None]
    per_lane = -(-b // lanes)
    place = jnp.arange(lanes)[:, None] + lanes * jnp.arange(per_lane)
    used = place < space.vectors
    own = jnp.where(used[..., None], space.coordinates.T[jnp.minimum(place, b - 1)], 0)
    probes = jnp.broadcast_to(own, (DEPTHS + 1, *own.shape))
    for _ in range(2):
        along = einsum("lrm,jlgm->jlgr", jnp.conj(rows), probes)
        along = jnp.where(within[:, None, None], along, 0)
        probes = probes - einsum("jlgr,lrm->jlgm", along, rows)
    norms = jnp.linalg.norm(probes, axis=-1, keepdims=True)
    probes = probes / jnp.where(norms > 0, norms, 1).astype(probes.dtype)
    there = jnp.any(rows != 0, axis=2)
    dimensions = jnp.sum(there & within[:, None], axis=2).astype(real)
    shares = jnp.sum(used, axis=1) / space.vectors.astype(real)
    return _LeftOut(rows, within, shares, dimensions, probes, used)


class _Measures(NamedTuple):
    """What W and the probes weigh the nodes of f(T) with, for every depth."""

    captured: Real[Array, "j m"]  # tr(P_i f(T)), in the mean over i
    probes: Real[Array, "j p m"]  # g_i^H f(T) g_i
    traces: Real[Array, "j f"]  # tr(W f(T))


def _measures(out: _LeftOut, room: Real[Array, "j p"], count: Array, found: _Nodes) -> _Measures:
    vectors = jnp.conj(found.vectors)
    along = einsum("lrm,l->rm", square_of(matmul(out.rows, vectors)), out.shares)
    captured = einsum("jr,rm->jm", out.within.astype(along.dtype), along)
    probes = square_of(matmul(out.probes, vectors))
    probes = probes.reshape(probes.shape[0], -1, probes.shape[-1])
    unit = scale_of(found.values, axis=0)
    values = found.values / unit
    rest = einsum("jp,jpm,mf->jf", room / count, probes, values)
    return _Measures(captured, probes, unit * (matmul(captured, values) + rest))


def _errors(
    out: _LeftOut,
    room: Real[Array, "j p"],
    count: Array,
    found: _Nodes,
    weights: Real[Array, "j p m"],
    eps: float,
    is_complex: bool,
) -> tuple[Real[Array, "j f"], Real[Array, "j f"]]:
    """The standard error of each depth, as if its samples were independent, and its degrees of
    freedom. `weights` are those of the nodes for each of the probes.
    """
    unit = scale_of(found.values, axis=0)
    values = found.values / unit
    vectors = jnp.conj(found.vectors)
    rows, probes = matmul(out.rows, vectors), matmul(out.probes, vectors)  # in the basis of nodes

    def of_depth(depth):
        within, room, probes, weights = depth
        room = jnp.sum(room) / count
        images = probes[..., None] * values.astype(probes.dtype)
        mean = einsum("lgm,lgmf->f", jnp.conj(probes), images).real / count
        images = images - probes[..., None] * mean.astype(probes.dtype)
        along = einsum("lrm,lgmf->lgrf", jnp.conj(rows), images)
        images = images - einsum("lrm,lgrf->lgmf", rows, jnp.where(within[:, None], along, 0))
        x = room * jnp.sum(square_of(images), axis=(0, 1, 2)) / count
        c = room / (room + 1) if is_complex else 2 * room / (room + 2)
        std_err = jnp.sqrt(c * x / count / (1 - c / (room * count)))
        each = jnp.broadcast_to(values, (len(weights), *values.shape))
        return std_err, mean_and_error(weights, each, room, eps, is_complex, count)[2]

    std_errs, dof = lax.map(of_depth, (out.within, room, probes, weights))
    return unit * std_errs, dof


def _decay(
    std_errs: Real[Array, "j f"], taken: Real[Array, " j"], eps: float
) -> Real[Array, "j f"]:
    """The exponent alpha of each depth, from its error and that of the depth before it. `taken` are
    the dimensions of the spaces.
    """
    ratio = std_errs[:-1] / jnp.where(std_errs[1:] > 0, std_errs[1:], 1)
    taken = jnp.maximum(taken, 1)
    decay = jnp.log(jnp.maximum(taken[1:] / taken[:-1], 1 + eps))[:, None]
    alpha = 2 * jnp.log(jnp.maximum(ratio, 1)) / decay
    # The first depth beside 0 has that of the next; one where the space has not grown, because
    # it is exhausted, that of the one before. (Samples of j = 0 are independent.)
    grown = jnp.where(taken[1:] > taken[:-1], jnp.arange(DEPTHS), 0)
    alpha = jnp.pad(alpha[jnp.maximum(lax.cummax(grown), 1)], ((1, 0), (0, 0)))
    return jnp.minimum(alpha, 4)


def _deepest(std_errs: Real[Array, "j f"], missed: Real[Array, "j f"]) -> Int[Array, ""]:
    """The choice of j, see above."""
    unit = scale_of(std_errs + jnp.where(jnp.isfinite(missed), missed, 0), axis=0)
    noise, left = (jnp.sum(jnp.square(x / unit), axis=1) for x in (std_errs, missed))
    total = jnp.where(jnp.isnan(noise + left), jnp.inf, noise + left)
    return jnp.max(jnp.where(left <= jnp.min(total), jnp.arange(DEPTHS + 1), 0))


@final
class KrylovWeights(AbstractWeights):
    """`G = V C V^H`. A contraction costs as many matvecs as V has columns."""

    rows: Inexact[Array, "m n"]  # the columns of V
    core: Inexact[Array, "m m ..."]
    nodes: Real[Array, "1 m"]
    weights: Real[Array, "1 m"]
    bend: Bend | None  # for a function with scalar values

    def contract(self, operator):
        """See `AbstractWeights`."""
        images = BlockOperator(operator).mm(self.rows.T)
        inner = matmul(jnp.conj(self.rows), images)
        value = einsum("ab...,ab->...", jnp.conj(self.core), inner).real
        return value if self.bend is None else value + self.bend.contract(images)

    def bent_at(self, bend, fn, operator):
        """See `AbstractSpectralEstimator.weights_at`."""
        bend, core = bend.at(fn, operator, self.rows.T)
        return dataclasses.replace(self, core=core, bend=bend)


@final
class KrylovAwareEstimator(AbstractSpectralEstimator):
    """The estimator of above."""

    fn: Function
    smallest: ClassVar[int] = LEAST

    def check(self, operator):
        """See `AbstractEstimator`."""
        check_hermitian(operator, "A spectral sum with `shifts`")

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        n, eps, sizes = block.n, block.eps, sizes_of(k)
        real = jnp.finfo(block.dtype).dtype
        shape = jax.eval_shape(self.fn, jax.ShapeDtypeStruct((), real)).shape

        def tagged(nodes):
            return within_tag(operator, nodes, eps)

        probes = SphereSampler().probes(key, n, sizes.vectors[-1] + 1, block.dtype)
        space = _space_of(block.mm, probes, sizes, self.fn, tagged, eps)
        krylov, count = space.krylov, space.vectors.astype(real)
        out = _leave_out(space, sizes, eps)
        room = n - jnp.repeat(out.dimensions, out.used.shape[1], axis=1)
        room = jnp.where(out.used.reshape(-1), room, 0)  # (n - d) of each probe

        def after(steps):
            found = _nodes_of(krylov, space.depth < steps, self.fn, tagged)
            return found, _measures(out, room, count, found)

        apart = _apart(space.steps)
        found, measures = lax.map(after, space.steps - apart * jnp.arange(3))
        missed = jax.vmap(lambda x: truncation_error(x[:, None], krylov.exhausted[None]), 1)(
            measures.traces
        )
        missed = jnp.where(jnp.isfinite(missed), missed, jnp.inf)
        found, measures = jax.tree.map(lambda x: x[0], (found, measures))

        is_complex, taken = jnp.iscomplexobj(probes), n - jnp.sum(room, axis=1) / count
        std_errs, dof = _errors(out, room, count, found, measures.probes, eps, is_complex)
        std_errs = std_errs * jnp.sqrt(1 + _decay(std_errs, taken, eps))
        j = _deepest(std_errs, missed)
        captured, probes = measures.captured[j], measures.probes[j]
        weights = captured + einsum("p,pm->m", room[j] / count, probes)
        counts = found.counts.astype(real)
        status = status_with_domain(space.status, counts[None], found.values[None])
        size = matmul(weights, jnp.abs(found.values))
        changes = changes_by_rounding(self.fn, operator, found.nodes, found.values, eps)
        changes = jnp.where(found.counts[:, None], changes, 0)
        rounding = rounding_of(size, eps) + matmul(weights, changes)
        std_err = jnp.hypot(std_errs[j], rounding)

        def fixed():
            w = einsum("lra,lrb,l->ab", *_kept(out, j))
            g = out.probes[j].reshape(-1, w.shape[0])
            w = w + matmul(g.T * (room[j] / count).astype(g.dtype), jnp.conj(g))
            s = found.vectors
            overlap = matmul(jnp.conj(s.T), matmul(w, s))
            differences = divided_differences(self.fn, found.nodes[None])[0].astype(s.dtype)
            core = einsum("ai,ij,ij...,bj->ab...", s, overlap, differences, jnp.conj(s))
            num_steps = steps_of(sizes.rows, n)
            bend = None if shape else Bend.of(found.nodes, s, overlap, n, num_steps)
            return KrylovWeights(krylov.rows, core, found.nodes[None], weights[None], bend)

        pair = measures.traces[j], missed[j], std_err, dof[j]
        value, error, std_err, dof = (x.reshape(shape) for x in pair)
        status = entries_status(value, error, std_err, status)
        spent = sizes.pilot + space.vectors * space.steps
        estimate = with_quadrature_error(
            value, error, std_err, spent, dof, status, needs_symmetry=False
        )
        return estimate, if_wanted(fixed)


def _kept(out: _LeftOut, j: Array) -> tuple[Array, Array, Array]:
    """What the mean of the projections P_i is made of: `sum_l shares_l rows_l^T conj(rows_l)`."""
    rows = jnp.where(out.within[j][:, None], out.rows, 0)
    return rows, jnp.conj(rows), out.shares.astype(rows.dtype)

r"""Spectral sums with a Krylov space that is taken out of the matrix before probes are drawn.

*The value.* b random vectors and s steps of block Lanczos give an orthonormal basis V, and
T = V^H A V (see `_linalg.block_lanczos`). With the d vectors Q of the first j steps, and probes g
from the sphere of radius sqrt(n - d) in the complement of Q,

    tr f(A) = tr(Q^H f(A) Q) + E[g^H f(A) g],

whatever Q is. The first term is the trace of the first b j rows and columns of f(T), for which
s - j further steps have been made. The second is estimated by stochastic Lanczos quadrature (see
`funm`). Half of the budget is for V. Where f(A) is nearly of low rank beside a multiple of the
identity, little is left for the probes. (T. Chen, E. Hallman, *Krylov-aware stochastic trace
estimation*, arXiv:2205.01736; D. Persson, T. Chen, C. Musco, *Randomized block-Krylov subspace
methods for low-rank approximation of matrix functions*, arXiv:2502.01888. The choices below are
ours.)

*The choice of j, and of p probes with q steps.* T says what these would be off by. The smallest of

    2 R_j / p + (truncation of the first term)^2 + (truncation of the quadrature)^2

wins. R_j is the squared Frobenius norm of what is left, without its multiple of the identity:

    R_j = ||f(A)||_F^2 - 2 ||f(A) Q||_F^2 + ||Q^H f(A) Q||_F^2
          - (tr f(A) - tr Q^H f(A) Q)^2 / (n - d),

where quadrature from the b start vectors stands for ||f(A)||_F^2 and tr f(A). As these are random,
R_j may come out too small; what is left within V is a lower bound of it. The truncation of the
first term is estimated from shorter recurrences, as in `funm`, with a step of s / 8. For the
second, Lanczos' recurrence for T of each start vector, whose first s steps are those for A, is
compared with f(T) itself, and goes on beyond s at the rate of its last steps. Probes are drawn
after the choice, so that it causes no bias.

*Measured.* n = 1000, k = 120, 40 keys, rms relative error, beside stochastic Lanczos quadrature
alone: sqrt(A) with eigenvalues i^-2 0.017 (0.13); log(1 + 10^4 x) 0.029 (0.073); 1/(x + 1e-3)
0.0012 (0.0041); exp(20 x) of a random symmetric matrix with spectrum [-1, 1] 0.076 (0.14);
exp(-10 x) of the Laplacian of a path 0.042 (0.067); log x for 1 + 10 / i 0.010 (0.067). Where no
recurrence has converged, half of the budget is lost: the logarithm of a power network (1138_bus,
condition number 9e6) has an error of 280 (166) at k = 60, 118 (85) at 200, and 51 (58) at 400. The
bars say so: for 1/x and log of this matrix they covered 90 to 100 % of 60 keys at k = 120 to 400.

*The derivative.* With Q and the probes held fixed,

    d tr(W f(T)) = <S (D o (S^H W S)) S^H, V^H dA V>,      T = S Theta S^H,

with W = I for the first b j indices and 0 otherwise, and the divided differences D of f. As the
value is unbiased for any Q, this has the mean tr(f'(A) dA), as far as the recurrences have
converged.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Real

from .._core.estimate import if_wanted, rounding_of, scale_of
from .._core.precision import einsum, matmul
from .._linalg.block_lanczos import BlockLanczos, block_lanczos, ritz_values
from .._linalg.lanczos import joined, lanczos, narrowed, padded_lanczos, quadrature
from .._operators.block_operator import BlockOperator
from .._probes.random import split
from .._probes.samplers import NormalSampler, SphereSampler
from .._sketch.weights import AbstractWeights
from .frechet import Bend
from .funm import (
    AbstractSpectralEstimator,
    Function,
    check_hermitian,
    derivative_core,
    divided_differences,
    ended_after,
    mean_and_error,
    on_nodes,
    status_with_domain,
    truncation_error,
    truncations,
    weighted,
    within_tag,
)
from .quadrature_error import with_quadrature_error

#: The smallest budget that is worth dividing.
LEAST = 24

#: The largest budget that is left for the probes of which a single probe may take all.
FEW = 64

#: The largest number of vectors in the Krylov space.
MOST_VECTORS = 512


class Sizes(NamedTuple):
    """How a budget is divided."""

    block: int
    steps: int  # of the block
    plans: tuple[tuple[int, int], ...]  # numbers of probes and their steps, one of which is chosen

    @property
    def behind(self) -> int:
        """The number of steps by which recurrences that are compared differ."""
        return max(1, self.steps // 8)


def sizes_of(k: int, n: int) -> Sizes:
    """How a budget of k products is divided."""
    half = min(k // 2, MOST_VECTORS)
    block = min(max(2, round(math.sqrt(k) / 2.75)), half // 4)
    steps = half // block
    left = k - block * steps
    # Bars from a single probe cover too little where Lanczos' recurrence has yet to meet an
    # eigenvalue that dominates; below this budget there is no room for two. Arrays have the size of
    # the most probes times the square of the most steps: large budgets have a narrower choice.
    root = math.isqrt(left)
    probes, most = max(1 if left <= FEW else 2, min(root // 5, 32)), min(2 * root, 64)
    found = []
    while probes <= most and left // probes >= 3:
        found.append((probes, min(left // probes, n)))
        probes = max(probes + 1, 3 * probes // 2)
    return Sizes(block, steps, tuple(found))


class _Space(NamedTuple):
    """Functions of T, after s, s - d and s - 2d steps, of which the last two are compared with the
    first. The last axis of `values` is that of several functions.
    """

    krylov: BlockLanczos
    nodes: Real[Array, "3 m"]
    vectors: Inexact[Array, "3 m m"]
    values: Real[Array, "3 m f"]
    captured: Real[Array, "3 j m"]  # the squared norms of the eigenvectors in the first j blocks
    traces: Real[Array, "3 j f"]  # tr(Q^H f(A) Q) for all j
    truncation: Real[Array, "j f"]  # the errors of these traces
    sizes: Sizes

    @property
    def dimensions(self) -> Real[Array, " j"]:
        """The number of vectors of the first j blocks."""
        used = self.krylov.in_use.reshape(self.sizes.steps, -1)
        found = jnp.cumsum(jnp.sum(used, axis=1)).astype(self.nodes.dtype)
        return jnp.pad(found, (1, 0))[: self.captured.shape[1]]

    def core(self, taken: Bool[Array, "m 1"], fn: Function) -> Inexact[Array, "m m ..."]:
        """S (D o (S^H W S)) S^H of above, with W = 1 for the indices that are taken."""
        s = self.vectors[0]
        first = jnp.where(taken, s, 0)
        overlap = matmul(jnp.conj(first.T), first)
        differences = divided_differences(fn, self.nodes[:1])[0].astype(s.dtype)
        return einsum("ai,ij,ij...,bj->ab...", s, overlap, differences, jnp.conj(s))

    def bend(self, taken, nodes, vectors, share, sizes, n: int) -> Bend:
        """What the second derivative needs, of this space and of the probes, whose Ritz vectors are
        in the layout of `joined` with these sizes.
        """
        p, q, size = sizes
        s = self.vectors[0]
        first = jnp.where(taken, s, 0)
        along = vectors[:, 0]
        masses = share * along[:, :, None] * along[:, None, :]
        of_probes = (joined(x, p, q, size).astype(s.dtype) for x in (vectors, masses))
        of_space = s, matmul(jnp.conj(first.T), first)
        pairs = zip(of_space, of_probes, strict=True)
        rotation, all_masses = (jax.scipy.linalg.block_diag(*pair) for pair in pairs)
        place = jnp.arange(size)
        theirs = jnp.where(place < p * q, nodes[place % p, place // p], nodes[0, 0])
        return Bend.of(jnp.concatenate([self.nodes[0], theirs]), rotation, all_masses, n)


def _space_of(krylov: BlockLanczos, sizes: Sizes, fn: Function, tagged: Any) -> _Space:
    b, s, d = sizes.block, sizes.steps, sizes.behind
    step = jnp.arange(b * s) // b
    in_use = jnp.stack([krylov.in_use & (step < s - i * d) for i in range(3)])
    nodes, vectors = jax.vmap(lambda used: ritz_values(krylov.t, used))(in_use)
    nodes = tagged(nodes)
    values = on_nodes(fn, nodes)
    values = values.reshape(*nodes.shape, -1)
    squares = jnp.square(jnp.abs(vectors))
    counts = jnp.sum(squares, axis=1) > 0
    values = jnp.where(counts[:, :, None], values, 0)
    captured = jnp.cumsum(jnp.sum(squares.reshape(3, s, b, b * s), axis=2), axis=1)
    captured = jnp.pad(captured, ((0, 0), (1, 0), (0, 0)))[:, : s - 2 * d + 1]
    traces = einsum("ojm,omf->ojf", captured, values)
    exhausted = krylov.exhausted[None]
    error = jax.vmap(lambda x: truncation_error(x[:, None], exhausted), 1)(traces)
    error = jnp.where(jnp.isfinite(error), error, jnp.inf)
    error = error.at[0].set(0)  # nothing is taken out
    return _Space(krylov, nodes, vectors, values, captured, traces, error, sizes)


class _Expected(NamedTuple):
    """What T expects of a choice, for each function, in units of the largest |f| at a Ritz value
    (squares of f itself would over- or underflow).
    """

    left: Real[Array, "j f"]  # R_j of above
    truncation: Real[Array, "j f"]
    quadrature: Real[Array, "plans f"]
    square: Real[Array, " f"]  # ||f(A)||_F^2

    def best(self, plans: tuple[tuple[int, int], ...]) -> tuple[Array, Array]:
        """The number j, and the index of the plan."""
        probes = jnp.asarray([p for p, _ in plans], self.left.dtype)
        unit = jnp.where(self.square > 0, self.square, 1)
        left = jnp.sum(self.left / unit, axis=1)
        truncated = jnp.sum(jnp.square(self.truncation) / unit, axis=1)[:, None]
        missed = jnp.sum(jnp.square(self.quadrature) / unit, axis=1)
        cost = 2 * left[:, None] / probes + truncated + missed
        cost = jnp.where(jnp.isnan(cost), jnp.inf, cost)
        best = jnp.argmin(cost.reshape(-1))
        return best // len(plans), best % len(plans)


def _expected(
    space: _Space, start: Inexact[Array, "n b"], fn: Function, tagged: Any, eps: float
) -> _Expected:
    """What T expects, see above."""
    (b, s, plans), krylov = space.sizes, space.krylov
    n = start.shape[0]
    vectors, unit = space.vectors[0], scale_of(space.values[0], axis=0)
    values = space.values[0] / unit
    coordinates = matmul(jnp.conj(krylov.rows), start)
    along = jnp.square(jnp.abs(matmul(jnp.conj(vectors.T), coordinates))).T
    whole = matmul(along, values)  # of each start vector
    trace = jnp.mean(whole, axis=0)
    square = jnp.mean(matmul(along, jnp.square(values)), axis=0)
    room = n - space.dimensions
    in_use = jnp.sum(krylov.in_use).astype(values.dtype)

    def left_of(pair):
        """R_j of one function."""
        value, trace, square = pair
        entries = jnp.square(
            jnp.abs(matmul(vectors * value.astype(vectors.dtype), jnp.conj(vectors.T)))
        )
        blocks = jnp.sum(entries.reshape(s, b, s, b), axis=(1, 3))
        counts = space.captured.shape[1]
        corner = jnp.diagonal(jnp.cumsum(jnp.cumsum(blocks, axis=0), axis=1))
        corner = jnp.pad(corner, (1, 0))[:counts]
        columns = jnp.pad(jnp.cumsum(jnp.sum(blocks, axis=0)), (1, 0))[:counts]
        taken = 2 * columns - corner
        first = matmul(space.captured[0], value)
        mean = (trace - first) / room
        left = square - taken - mean**2 * room
        # ||f(A) - mean I||_F^2 of the part within V.
        inside = jnp.sum(blocks) - taken - 2 * mean * (jnp.sum(value) - first)
        inside = inside + mean**2 * (in_use - space.dimensions)
        return jnp.maximum(jnp.maximum(left, inside), 0)

    # Eigenvectors that do not count are 0, and so are the values that belong to them.
    left = lax.map(left_of, (values.T, trace, square)).T

    single = lanczos(lambda x: matmul(krylov.t, x), coordinates, s, eps)
    d = s // 4
    orders = sorted({min(q, s) for _, q in plans} | {s, s - d, s - 2 * d})
    nodes, weights, _ = quadrature(ended_after(single, orders))
    nodes = tagged(nodes)
    samples = n * weighted(weights, on_nodes(fn, nodes).reshape(*nodes.shape, -1) / unit)
    after = dict(zip(orders, samples.reshape(len(orders), b, -1), strict=True))

    def apart(x, y):
        return jnp.mean(jnp.abs(x - y), axis=0)

    last, before = apart(after[s], after[s - d]), apart(after[s - d], after[s - 2 * d])
    rate = jnp.clip(last / jnp.where(before > 0, before, 1), 0, 0.95)
    beyond = jnp.maximum(last * rate / (1 - rate), apart(after[s], whole))

    def at(q):
        return apart(after[q], whole) + beyond if q <= s else beyond * rate ** ((q - s) / d)

    at_plans = jnp.stack([at(q) for _, q in plans])
    return _Expected(left, space.truncation / unit, at_plans, square)


@final
class KrylovWeights(AbstractWeights):
    """`G = V C V^H` of the Krylov space, and of the probes. A contraction costs as many matvecs as
    both V have columns.
    """

    rows: tuple[Inexact[Array, "c n"], Inexact[Array, "d n"]]  # the columns of V
    cores: tuple[Inexact[Array, "c c ..."], Inexact[Array, "d d ..."]]
    nodes: Real[Array, "1 q"]
    weights: Real[Array, "1 q"]
    bend: Bend | None  # for a function with scalar values

    def bent_at(self, bend, fn, operator):
        """See `AbstractSpectralEstimator.weights_at`."""
        bend, core = bend.at(fn, operator, jnp.concatenate(self.rows).T)
        c = len(self.rows[0])
        return dataclasses.replace(self, cores=(core[:c, :c], core[c:, c:]), bend=bend)

    def contract(self, operator):
        """See `AbstractWeights`."""
        whole = BlockOperator(operator).mm(jnp.concatenate(self.rows).T)
        images = whole.T

        def term(rows, core, image):
            inner = matmul(jnp.conj(rows), image.T)
            return einsum("ab...,ab->...", jnp.conj(core), inner).real

        (first, second), (core, other) = self.rows, self.cores
        images = jnp.split(images, [len(first)])
        value = term(first, core, images[0]) + term(second, other, images[1])
        return value if self.bend is None else value + self.bend.contract(whole)


@final
class KrylovAwareEstimator(AbstractSpectralEstimator):
    """The estimator of above."""

    fn: Function
    smallest: ClassVar[int] = LEAST

    def check(self, operator):
        """See `AbstractEstimator`."""
        check_hermitian(operator, "A spectral sum")

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        n, eps, sizes = block.n, block.eps, sizes_of(k, block.n)
        shape = jax.eval_shape(
            self.fn, jax.ShapeDtypeStruct((), jnp.finfo(block.dtype).dtype)
        ).shape
        start_key, probe_key = split(key)

        def tagged(nodes):
            return within_tag(operator, nodes, eps)

        start = SphereSampler().probes(start_key, n, sizes.block, block.dtype)
        krylov = block_lanczos(block.mm, start, sizes.steps, eps)
        space = _space_of(krylov, sizes, self.fn, tagged)
        expected = _expected(space, start, self.fn, tagged, eps)
        j, which = expected.best(sizes.plans)
        p, q = (jnp.asarray(x, jnp.int32)[which] for x in zip(*sizes.plans, strict=True))
        most = max(each for each, _ in sizes.plans)

        taken = (jnp.arange(len(krylov.rows)) < sizes.block * j)[:, None]
        rows = jnp.where(taken, krylov.rows, 0)
        dimension = n - space.dimensions[j]
        probes = NormalSampler().probes(probe_key, n, most, block.dtype)
        for _ in range(2):
            probes = probes - matmul(rows.T, matmul(jnp.conj(rows), probes))
        norms = jnp.linalg.norm(probes.T, axis=1)
        probes = probes * (jnp.sqrt(dimension) / norms).astype(probes.dtype)
        used = jnp.arange(most) < p
        probes = jnp.where(used, probes, 0)
        # (Every further size is one more copy of the code to compile.)
        most_steps = sizes.plans[0][1]
        mm = narrowed(block.mm, [sizes.plans[0][0], most], p)
        inner = padded_lanczos(mm, probes, sizes.plans, p, q, eps)
        shorter, orders = truncations(inner)
        nodes, weights, vectors = quadrature(shorter, [most_steps // 4, most_steps // 2])
        nodes = tagged(nodes)
        values = on_nodes(self.fn, nodes).reshape(*nodes.shape, -1)
        weights = jnp.where(jnp.tile(used, orders)[:, None], weights, 0)
        samples = (dimension * weighted(weights, values)).reshape(orders, most, -1)
        count = p.astype(nodes.dtype)
        error = truncation_error(samples, inner.exhausted | ~used) * (most / count)

        nodes, weights, values, vectors = (x[:most] for x in (nodes, weights, values, vectors))
        is_complex = jnp.iscomplexobj(probes)
        rest, std_err, dof = mean_and_error(weights, values, dimension, eps, is_complex, count)
        captured, own = space.captured[0, j], space.values[0]
        size = matmul(captured, jnp.abs(own))
        value = space.traces[0, j] + rest
        std_err = jnp.hypot(std_err, rounding_of(size, eps))
        error = error + space.truncation[j]
        status = jnp.maximum(krylov.status, inner.status)
        counts = (jnp.sum(jnp.abs(space.vectors[0]), axis=0) > 0).astype(nodes.dtype)
        status = status_with_domain(status, counts[None], own[None])
        status = status_with_domain(status, weights, values)

        def fixed():
            share = dimension / count
            core = space.core(taken, self.fn)
            of_probe = share * derivative_core(self.fn, nodes, vectors)
            size = max(p * q for p, q in sizes.plans)
            probe_core = joined(of_probe, p, q, size).astype(core.dtype)
            bend = None
            if not shape:
                bend = space.bend(taken, nodes, vectors, share, (p, q, size), n)
            both = [x.reshape(1, -1) for x in (space.nodes[0], nodes)]
            their = [x.reshape(1, -1) for x in (captured, weights * share)]
            return KrylovWeights(
                (krylov.rows, inner.basis[:size]),
                (core, probe_core),
                jnp.concatenate(both, axis=1),
                jnp.concatenate(their, axis=1),
                bend,
            )

        value, error, std_err, dof = (x.reshape(shape) for x in (value, error, std_err, dof))
        spent = sizes.block * sizes.steps + p * q
        estimate = with_quadrature_error(value, error, std_err, spent, dof, status)
        return estimate, if_wanted(fixed)

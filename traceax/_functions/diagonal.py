r"""Diagonals of functions of a Hermitian matrix.

*The value.* Half of the budget is for an orthonormal basis V of a block Krylov space, from b random
vectors and s steps, with T = V^H A V (see `_linalg.block_lanczos`). Q are the vectors of the first
j steps, and P = I - Q Q^H. As f(A) Q ~ V f(T) V^H Q, for which s - j further steps were made, and
with vectors omega of random signs and z = P omega,

    diag f(A) = diag V f(T) V^H + E[omega o (f(A) z - V f(T) V^H z)],

whatever Q and V are: the mean of the second term is diag(f(A) P) - diag(V f(T) V^H P). Every probe
takes q steps of Lanczos' recurrence from z. What is known on V is taken out of the probes, with all
of T, as it has the mean that is known.

f may be changed by a constant c: diag(f(A) - c) is c less. What is left outside of V is often near
a multiple of the identity, which is free of variance only before Q is taken out. The sample of a
probe is therefore

    omega o (y - c R z) + c (1 - diag V V^H),     y = f(A) z - V f(T) V^H z,  R = I - V V^H,

whose mean does not depend on c. The best c is about z^H R y / z^H R z. So that c has nothing to do
with the probe, it comes from the other probes.

*The choice of j.* With D = f(T) - f(T'), T' after s/8 steps less, the error of f(A) Q Q^H omega has
about the norm e(j) = ||D V^H Q||_F, which grows with j. That of f(A) omega after q steps is known
from Lanczos' recurrence for T from the start vectors, in comparison with f(T). The largest j with
an e(j) below a tenth of this is taken, which costs no accuracy where V has not converged.
The choice is made before probes are drawn.

*Errors.* Entry i of a sample has the variance sum_{m != i} |Re B_im|^2, with the matrix B that the
probes are multiplied with. The scatter of the samples gives it, with as many degrees of freedom as
there are probes, less one. Quadrature errors come from shorter recurrences, as in `funm`.

*The derivative.* With V, Q, c and the probes held fixed, and with T(A) = V^H A V,

    diag V f(T(A)) V^H + E[omega o (f(A) - V f(T(A)) V^H) omega]

is diag f(A) for every A, and so the derivative of the mean of samples is unbiased. That of
f(T) is S (D o S^H dT S) S^H, T = S Theta S^H, with the divided differences D of f; that of
f(A) omega = f(A) z + f(A) Q Q^H omega is `frechet`'s sum, with the Ritz vectors of the recurrence
of z for the first term, and of V for the second.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, Bool, Inexact, PRNGKeyArray, Real

from .._core.estimate import make_estimate, rounding_of, safe_norm, scale_of, worse
from .._core.precision import einsum, matmul
from .._core.primitive import spectral_diagonal_p
from .._estimators.estimator import solve
from .._estimators.solution import Solution, restructure
from .._linalg.block_lanczos import BlockLanczos, block_lanczos, ritz_values
from .._linalg.lanczos import lanczos, quadrature
from .._operators.block_operator import BlockOperator, unflatten
from .._operators.checks import as_operator
from .._probes.random import split
from .._probes.samplers import RademacherSampler, SphereSampler
from .frechet import combined, constant, linear_map, steps_of
from .funm import (
    AbstractFunctionEstimator,
    check_function,
    check_hermitian,
    domain_evidence,
    hoist_function,
    spectrum,
    truncations,
    weighted,
)
from .nodes import (
    Function,
    changes_by_rounding,
    differences_between,
    divided_differences,
    on_nodes,
    within_tag,
)
from .quadrature_error import (
    entries_std_err,
    entries_truncation_error,
    quadrature_estimate,
)

#: The largest number of vectors in the Krylov space.
MOST_VECTORS = 512


class Sizes(NamedTuple):
    """How a budget is divided."""

    block: int
    steps: int  # of the block
    probes: int
    probe_steps: int

    @property
    def spent(self) -> int:
        """The number of products."""
        return self.block * self.steps + self.probes * self.probe_steps

    @property
    def behind(self) -> int:
        """The number of steps by which recurrences that are compared differ."""
        return max(1, self.steps // 8)


def sizes_of(k: int) -> Sizes:
    """How a budget of k products is divided. Entries converge half as fast as quadratic forms, and
    too few steps are a bias: there are more steps than for spectral sums, and as few probes as
    errors can be told from.
    """
    half = min(k // 2, MOST_VECTORS)
    block = max(1, min(round(math.sqrt(k) / 2.75), half // 4))
    steps = half // block
    left = k - block * steps
    probes = max(3 if left >= 12 else 2, round(math.sqrt(left) / 2))
    return Sizes(block, steps, probes, left // probes)


class _Space(NamedTuple):
    """f(T) after s, s - d and s - 2d steps, of which the last two are compared with the first."""

    krylov: BlockLanczos
    nodes: Real[Array, " m"]
    vectors: Inexact[Array, "m m"]  # S; 0 where an eigenvector does not count
    values: Real[Array, " m"]  # f at the nodes; 0 where they do not count
    functions: Inexact[Array, "3 m m"]
    taken: Bool[Array, " m"]  # the vectors Q

    @property
    def counts(self) -> Bool[Array, " m"]:
        """Which of the nodes count."""
        return jnp.any(self.vectors != 0, axis=0)


def _space_of(
    krylov: BlockLanczos, start: Inexact[Array, "n b"], sizes: Sizes, fn: Function, tagged, eps
) -> _Space:
    """See above."""
    b, s, _, q = sizes
    d, m = sizes.behind, b * s
    step = jnp.arange(m) // b
    in_use = jnp.stack([krylov.in_use & (step < s - i * d) for i in range(3)])
    nodes, vectors = jax.vmap(lambda used: ritz_values(krylov.t, used))(in_use)
    nodes = tagged(nodes)
    counts = jnp.any(vectors != 0, axis=1)
    values = jnp.where(counts, on_nodes(fn, nodes), 0)
    functions = einsum("oam,om,obm->oab", vectors, values.astype(vectors.dtype), jnp.conj(vectors))

    unit = scale_of(values[0])
    first, second = functions[0] / unit, functions[1] / unit
    columns = jnp.sum(jnp.square(jnp.abs(first - second)), axis=0)
    away = jnp.cumsum(jnp.sum(columns.reshape(s, b), axis=1))  # e(1)^2, e(2)^2, ...
    coordinates = matmul(jnp.conj(krylov.rows), start)
    single = lanczos(lambda x: matmul(krylov.t, x), coordinates, min(q, m), eps)
    theta, _, along = quadrature(single)
    at_nodes = jnp.where(along[:, 0] != 0, on_nodes(fn, tagged(theta)) / unit, 0) * along[:, 0]
    short = einsum("anb,bam,bm->nb", single.basis, along, at_nodes) * safe_norm(coordinates.T)
    missed = jnp.sum(jnp.square(jnp.abs(short - matmul(first, coordinates)))) / b
    # (Where f is not finite, no e(j) is below, and nothing is taken out.)
    j = jnp.sum((away <= missed / 100) & (jnp.arange(1, s + 1) <= s - 2 * d))
    return _Space(krylov, nodes[0], vectors[0], values[0], functions, step < j)


@final
class DiagonalWeights(eqx.Module):
    """The derivative of above. A contraction costs a product with every Ritz vector, those of V and
    those of the probes, and in reverse mode one recurrence for every probe. In forward mode there
    is a recurrence for every Ritz vector.
    """

    space: Inexact[Array, "n m"]  # the Ritz vectors of V
    of_space: Real[Array, " m"]  # their nodes
    differences: Real[Array, "m m"]  # the divided differences D
    probes: Inexact[Array, "n p*q"]  # the Ritz vectors x_j a_j of the probes, probe by probe
    of_probes: Real[Array, "p q"]
    omega: Real[Array, "n p"]
    shares: Inexact[Array, "m p"]  # X^H Q Q^H omega, X the Ritz vectors of V

    def samples(self, values: Real[Array, " m"], of_probes: Real[Array, "p q"]) -> Array:
        """The samples without c and with what is known of V, as a function of the values of f."""
        n, p = self.omega.shape
        y = einsum("npq,pq->np", self.probes.reshape(n, p, -1), of_probes)
        outside = self.omega - matmul(self.space, self.shares)
        inside = matmul(jnp.conj(self.space.T), outside)
        known = jnp.sum(jnp.square(jnp.abs(self.space)) * values, axis=1)
        return known[:, None] + (
            self.omega * (y - matmul(self.space, values[:, None] * inside)).real
        )

    def contract_with(self, fn: Function, num_steps: int, operator: lx.AbstractLinearOperator):
        """The mean of the samples as a function of A, with the right derivative."""
        block, m = BlockOperator(operator), self.space.shape[1]
        fixed_fn, fixed = constant((fn, operator))
        mm = BlockOperator(fixed).linearised().mm
        p, q = self.of_probes.shape
        images = block.mm(jnp.concatenate([self.space, self.probes], axis=1))
        moved = images - lax.stop_gradient(images)

        space = self.space
        core = self.differences * matmul(jnp.conj(space.T), moved[:, :m])
        left = matmul(space, core)
        known = jnp.sum(left * jnp.conj(space), axis=1).real
        away = self.omega * matmul(left, matmul(jnp.conj(space.T), self.omega)).real

        nodes = jnp.concatenate([self.of_space, self.of_probes.reshape(-1)])
        own = jnp.repeat(jnp.eye(p, dtype=self.shares.dtype), q, axis=0)
        shares = jnp.concatenate([self.shares, own])

        def tagged(x):
            return within_tag(operator, x, block.eps)

        def forward(u):
            def values(index, theta):
                at = differences_between(fixed_fn, tagged(theta), nodes[index][:, None])
                return at * shares[index][:, None, :]

            return combined(mm, u, values, num_steps, block.eps)

        def transposed(w):
            def values(index, theta):
                both = jnp.broadcast_to(nodes, (len(index), nodes.size))
                at = differences_between(fixed_fn, tagged(theta), both)
                return at * jnp.conj(shares.T)[index][:, None, :]

            return jnp.conj(combined(mm, jnp.conj(w), values, num_steps, block.eps))

        change = linear_map(forward, transposed, moved, p)
        return known + jnp.mean(self.omega * change.real - away, axis=1)


@final
class ExactDiagonalWeights(eqx.Module):
    """By eigenvectors. A contraction costs n matvecs."""

    basis: Inexact[Array, "n n"]
    nodes: Real[Array, " n"]
    differences: Real[Array, "n n"]

    def contract(self, block):
        """See `AbstractWeights`."""
        images = block.mm(self.basis)
        core = self.differences * matmul(jnp.conj(self.basis.T), images)
        return jnp.sum(matmul(self.basis, core) * jnp.conj(self.basis), axis=1).real


def _without(
    rows: Inexact[Array, "m n"], taken: Bool[Array, " m"], omega: Real[Array, "n p"]
) -> tuple[Inexact[Array, "n p"], Inexact[Array, "m p"]]:
    """The part z = P omega of the probes, and Q^H omega in the coordinates of V."""
    z = omega
    inside = jnp.zeros((), omega.dtype)
    for _ in range(2):
        step = jnp.where(taken[:, None], matmul(jnp.conj(rows), z), 0)
        z, inside = z - matmul(rows.T, step), inside + step
    return z, inside


class _Samples(NamedTuple):
    """The samples of all probes, after q, q - d and q - 2d steps."""

    values: Real[Array, "o n p"]
    rest: Inexact[Array, "o n p"]  # y
    inside: Inexact[Array, "m p"]  # V^H z
    room: Real[Array, " n"]  # 1 - diag V V^H


def _samples_of(
    rows: Inexact[Array, "m n"], space: _Space, omega: Array, z: Array, images: Array
) -> _Samples:
    """See above. `images` are f(A) z."""
    inside = matmul(jnp.conj(rows), z)
    y = images - matmul(rows.T, matmul(space.functions[0], inside))
    outside = z - matmul(rows.T, inside)
    # c of each probe, from the other probes.
    unit = scale_of(y[0])
    products = jnp.sum((jnp.conj(outside) * y[0]).real / unit, axis=0)
    squares = jnp.sum(jnp.square(jnp.abs(outside)), axis=0)
    products, squares = (jnp.sum(x) - x for x in (products, squares))
    c = unit * products / jnp.where(squares > 0, squares, 1)
    room = 1 - jnp.sum(jnp.square(jnp.abs(rows)), axis=0)
    values = omega * (y - c * outside).real + c * room[:, None]
    return _Samples(values=values, rest=y, inside=inside, room=room)


@final
class SpectralDiagonalEstimator(AbstractFunctionEstimator):
    """The estimator of above."""

    fn: Function
    smallest: ClassVar[int] = 8

    @property
    def label(self):
        """See `AbstractEstimator`."""
        return "The diagonal of a function"

    def check(self, operator):
        """See `AbstractEstimator`."""
        check_hermitian(operator, self.label)

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        block, sizes = BlockOperator(operator).linearised(), sizes_of(k)
        n, eps, p = block.n, block.eps, sizes.probes
        start_key, probe_key = split(key)
        real = jnp.finfo(block.dtype).dtype
        tagged = partial(within_tag, operator, eps=eps)

        start = SphereSampler().probes(start_key, n, sizes.block, block.dtype)
        krylov = block_lanczos(block.mm, start, sizes.steps, eps)
        space = _space_of(krylov, start, sizes, self.fn, tagged, eps)
        rows = krylov.rows
        omega = RademacherSampler().probes(probe_key, n, p, real)
        z, inside = _without(rows, space.taken, omega)

        inner = lanczos(block.mm, z, sizes.probe_steps, eps)
        shorter, orders = truncations(inner)
        nodes, masses, s = quadrature(shorter)
        nodes = tagged(nodes)
        values = on_nodes(self.fn, nodes)
        first = einsum("paq,pq->ap", s, jnp.where(masses > 0, values, 0) * s[:, 0])  # f(T) e_1
        images = einsum("anp,aop->onp", inner.basis, first.reshape(-1, orders, p))
        samples = _samples_of(rows, space, omega, z, images * safe_norm(z.T))
        nodes, masses, values, s = (x[:p] for x in (nodes, masses, values, s))

        functions = jnp.where(space.taken, space.functions, 0)
        known = einsum("an,oab,bn->on", rows, functions, jnp.conj(rows)).real
        whole = einsum("an,ab,bn->n", rows, space.functions[0], jnp.conj(rows)).real
        value = whole + jnp.mean(samples.values[0], axis=1)
        means = jnp.mean(samples.values, axis=2)
        error = entries_truncation_error(known, krylov.exhausted)
        error = error + entries_truncation_error(means, jnp.all(inner.exhausted))
        std_err, _ = entries_std_err(samples.values[0].T, jnp.asarray(p, real))

        # Rounding of V f(T) V^H, and of what is left outside of V, as far as the probes tell.
        vectors = matmul(rows.T, space.vectors)
        total = matmul(rows.T, matmul(space.functions[0], inside + samples.inside))
        rounding = rounding_of(safe_norm(samples.rest[0] + total) / math.sqrt(p), eps)
        changes = changes_by_rounding(self.fn, operator, space.nodes, space.values, eps)
        rounding += matmul(jnp.square(jnp.abs(vectors)), jnp.where(space.counts, changes, 0))
        changes = weighted(masses, changes_by_rounding(self.fn, operator, nodes, values, eps))
        rounding += jnp.maximum(samples.room, 0) * jnp.mean(changes)
        std_err = jnp.hypot(std_err, rounding)

        def fixed():
            ritz = einsum("anp,paq->npq", inner.basis, s * s[:, :1]) * safe_norm(z.T)[:, None]
            shares = matmul(jnp.conj(space.vectors.T), inside)
            differences = divided_differences(self.fn, space.nodes[None])[0]
            of_space = vectors, space.nodes, differences
            return DiagonalWeights(*of_space, ritz.reshape(n, -1), nodes, omega, shares)

        evidence = worse(
            krylov.evidence,
            inner.hermitian_evidence(eps),
            domain_evidence(space.counts.astype(real), on_nodes(self.fn, space.nodes)),
            domain_evidence(masses, values),
        )
        counts = sizes.spent, max(p - 1, 1)
        estimate = quadrature_estimate(value, error, std_err, *counts, evidence)
        return estimate, fixed() if weights else None

    def exact(self, operator):
        """See `AbstractEstimator`."""
        nodes, basis, evidence = spectrum(operator)
        values = on_nodes(self.fn, nodes)
        evidence = worse(evidence, domain_evidence(jnp.ones_like(nodes), values))
        zero = jnp.zeros(nodes.shape, values.dtype)
        eps, squares = BlockOperator(operator).eps, jnp.square(jnp.abs(basis))
        changes = changes_by_rounding(self.fn, operator, nodes, values, eps)
        rows = safe_norm(jnp.abs(basis) * values)
        error = matmul(squares, changes) + rounding_of(rows, eps)
        differences = divided_differences(self.fn, nodes[None])[0]
        fixed: Any = ExactDiagonalWeights(basis, nodes, differences)
        value = self._exact_value(fixed)
        estimate = make_estimate(value, zero, nodes.size, 0, evidence, quadrature_error=error)
        return estimate, fixed

    def _exact_value(self, weights: ExactDiagonalWeights) -> Array:
        squares = jnp.square(jnp.abs(weights.basis))
        return jnp.sum(squares * on_nodes(self.fn, weights.nodes), axis=1)

    def contract(self, weights, operator):
        """See `AbstractEstimator`. The contraction depends on the leaves of `fn`, too."""
        if isinstance(weights, ExactDiagonalWeights):
            return weights.contract(BlockOperator(operator)) + self._exact_value(weights)
        values = (on_nodes(self.fn, nodes) for nodes in (weights.of_space, weights.of_probes))
        own = jnp.mean(weights.samples(*values), axis=1)
        count = weights.space.shape[1] + weights.probes.shape[1]
        num_steps = steps_of(count, operator.in_size())
        return weights.contract_with(self.fn, num_steps, operator) + own


def spectral_diagonal(
    key: PRNGKeyArray,
    fn: Callable[[Array], Array],
    operator: lx.AbstractLinearOperator,
    k: int,
    *,
    throw: bool = False,
) -> Solution:
    r"""Estimate the diagonal of $f(A)$ of a Hermitian operator: subgraph centralities
    ($e^A$ of an adjacency matrix), leverage scores ($x / (x + s)$ of a kernel), and other numbers
    that every row has. For the inverse of a positive definite operator,
    [`traceax.inverse_diagonal`][] has a preconditioner, and is better.

    Half of the budget goes to a block Krylov space V, on which f(A) is known, and the other half to
    probes $\omega$ of random signs, each with Lanczos' recurrence of its own, for what V does not
    know. Every entry has two errors: that of the probes, `std_err`, and that of ending the
    recurrences early, `quadrature_error`.

    First derivatives are unbiased, and converge as the value does. With respect to what the
    operator depends on they cost `k` tangent products and, with q = max(k / 4, 4 sqrt(k)), in
    reverse mode q products for every probe, and in forward mode `q k` products, as every Ritz
    vector needs a Krylov space. As these are recurrences of their own, which end early, both modes
    agree for a given key only as far as they have converged. Derivatives are also taken with
    respect to the arrays that `fn` closes over. Second derivatives are refused.

    !!! Example

        ```python
        centralities = tr.spectral_diagonal(jax.random.key(0), jnp.exp, adjacency, k=120)
        centralities.value, centralities.std_err, centralities.quadrature_error
        low, high = centralities.interval()  # 95 % for every entry
        ```

    Cost: at most `k` matvecs, in blocks; `k n` numbers for the Krylov bases; about `5 n k^2`
    operations. With `k >= n`, n matvecs and an eigendecomposition.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `fn`: a JAX function of one real number with real values, as for [`traceax.spectral_sum`][].
    - `operator`: a Hermitian lineax operator with `n` rows, between any PyTrees: tagged symmetric
        (if real) or positive or negative semidefinite.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] whose `value`, `std_err` and `quadrature_error` have the structure of
    the operator's input PyTree, real. If f is not finite at a Ritz value, the result is
    `outside_domain` and the value NaN. It is `not_converged`, with the best estimate, if the
    quadrature errors of all entries together exceed four standard errors and 5 % of the value. With
    three to five probes, two standard errors cover about 81 %; `interval()` covers 95 %. Below
    some 24 products the recurrences have two to five steps, which do not always show that they end
    too early: where f or the spectrum varies over many orders of magnitude, as $e^x$ does over 100,
    take more. (Eigenvalues between 1 and 2, and three above 10,000: 5 to 8 products found nothing
    of the 97 that $e^{-x}$ sees, and said so in one of twenty runs.) The quadrature error of an
    exact value is that of rounding.

    **Raises:**

    - `TypeError`: for a key, function, operator or `k` of the wrong type.
    - `ValueError`: for an operator that is not square or not tagged Hermitian, `k < 1`, or a
        function that does not return a scalar.
    - `NotImplementedError`: for a second derivative.

    ??? cite "References"

        T. Chen, E. Hallman, *Krylov-aware stochastic trace estimation*, 2023, arXiv:2205.01736, is
        for traces: `traceax/_functions/diagonal.py` derives the diagonal and its derivative.
    """
    check_function(fn)
    operator = as_operator(operator)
    function = hoist_function(fn, jnp.finfo(BlockOperator(operator).dtype).dtype)
    estimator = SpectralDiagonalEstimator(function)
    solution = solve(spectral_diagonal_p, key, operator, k, estimator, throw=throw)
    structure = operator.in_structure()
    return restructure(solution, lambda vector: unflatten(structure, vector))

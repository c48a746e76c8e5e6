r"""Sums and diagonals of f(A), of a Hermitian A, by samples of what a Krylov space leaves.

*The samples.* With an orthonormal basis V of a block Krylov space, T = V^H A V, R = I - V V^H, and
probes omega of random signs,

    diag f(A) = diag V f(T) V^H + E[omega o y],      y = f(A) omega - V f(T) V^H omega,

whatever V is. As diag(f(A) - c) is c less for any constant c, a sample is

    omega o (y - c R omega) + c (1 - diag V V^H),

with a c near omega^H R y / omega^H R omega, from the other probes. A sum of f over the spectrum is
the sum of these entries.

*The quadrature error* is that of f(A) omega alone, by Lanczos' recurrence: values after q, q - d
and q - 2d steps are compared (see `quadrature_error`). With a tolerance, q is the first of few
numbers of steps with which this error is a third of what is allowed.

*The derivative.* With V, c and the probes held fixed, and with T(A) = V^H A V,

    diag V f(T(A)) V^H + E[omega o (f(A) - V f(T(A)) V^H) omega]

is diag f(A) for every A: the derivative of the mean of samples is unbiased. The derivative of f(T)
is S (D o S^H dT S) S^H, T = S Theta S^H, with the divided differences D of f; `nodes` has that of
f(A) omega, `funm` that of omega^H f(A) omega.
"""

import math
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.estimate import Evidence, norm_of, rounding_of, safe_norm, scale_of, worse
from .._core.precision import einsum, matmul
from .._estimators.estimator import largest_budget, tolerance_of
from .._estimators.rows import Rows, added
from .._estimators.tolerance import (
    SIZES,
    AbstractSampling,
    Panel,
    SampledWeights,
    Target,
    norms_of,
    sample_to_tolerance,
)
from .._linalg.block_lanczos import block_lanczos
from .._linalg.factorisations import ritz_values
from .._linalg.lanczos import Lanczos, lanczos, lanczos_until, quadrature
from .._operators.block_operator import BlockOperator
from .._probes.samplers import RademacherSampler
from .._sketch.leave_one_out import adjoint, square_of
from .funm import (
    AbstractFunctionEstimator,
    domain_evidence,
    ended_after,
    spectrum,
    weighted,
)
from .nodes import (
    Function,
    changes_by_rounding,
    constant,
    divided_differences,
    divided_sums,
    on_nodes,
    unresolved,
    within_tag,
)
from .quadrature_error import (
    entries_truncation_error,
    exact_estimate,
    orders_of,
    truncation_error,
)


class Space(NamedTuple):
    """f on a block Krylov space, as a function of A to first order: what is prepared."""

    left: Inexact[Array, "n m"]  # V f(T) S
    right: Inexact[Array, "n m"]  # the Ritz vectors V S
    nodes: Real[Array, " m"]
    images: Inexact[Array, "n m"] | None  # A V S; not known where T comes from the recurrence
    value: Real[Array, "..."]
    size: Real[Array, "..."]
    bias: Real[Array, "..."]
    basis: Inexact[Array, "n m"]  # V
    removed: Inexact[Array, "n j"]  # Q: see `removed_from`
    evidence: Evidence


class Recurrences(NamedTuple):
    """f(A) z from q Lanczos steps, for p probes, as a function of A; z = omega - Q Q^H omega."""

    omega: Real[Array, "n p"]
    z: Inexact[Array, "n p"]
    basis: Inexact[Array, "q n p"]
    along: Real[Array, "p q q"]  # column j: the coordinates of x_j a_j, with a Ritz vector x_j
    nodes: Real[Array, "p q"]
    steps: Int[Array, ""] | int  # those that were made: later vectors are 0


def removed_from(basis: Inexact[Array, "n m"], width: int) -> Inexact[Array, "n j"]:
    """Q, the vectors of all steps but the last quarter: f(A) Q is known."""
    steps = basis.shape[1] // width
    return basis[:, : width * (steps - 2 * max(1, steps // 8))]


@final
class FunctionSampling(AbstractSampling):
    """The samples of above: of the diagonal of f(A), or (`rows=None`) of its trace."""

    rows: Rows | None
    fn: Function
    rtol: Real[Array, ""] | float
    atol: Real[Array, ""] | float
    max_steps: int = eqx.field(static=True)
    sampler: RademacherSampler = RademacherSampler()
    sizes: tuple[int, ...] = eqx.field(default=SIZES, static=True)

    panel = 4
    has_bias = True

    def products(self, size):
        """See `AbstractSampling`."""
        return size

    def prepare(self, key, block, size):
        """See `AbstractSampling`: as many vectors as steps."""
        width = math.isqrt(size)
        return self.prepared_space(key, block, width, size // width)

    def prepared_space(
        self, key: PRNGKeyArray, block: BlockOperator, width: int, steps: int
    ) -> Space:
        """V f(T) V^H on the Krylov space of `width` random vectors after `steps` steps."""
        start = self.sampler.probes(key, block.n, width, block.dtype)
        krylov = block_lanczos(block.mm, start, steps, block.eps)
        basis = krylov.rows.T
        space = self.space(block, basis, krylov.t)
        removed = removed_from(basis, width)
        j = removed.shape[1]
        step = jnp.arange(krylov.t.shape[0]) // width
        behind = max(1, steps // 8)

        def on_removed(after):  # the entries of V f(T) V^H Q Q^H after fewer steps
            nodes, s = ritz_values(krylov.t, krylov.in_use & (step < after))
            nodes = within_tag(block.operator, nodes, block.eps)
            values = on_nodes(self.fn, nodes, jnp.any(s != 0, axis=0))
            columns = matmul(s * values, adjoint(s)[:, :j])
            return jnp.sum(matmul(basis, columns) * jnp.conj(removed), axis=1).real

        known = jnp.stack([on_removed(steps - i * behind) for i in range(3)])
        bias = self._error(known[:, :, None], krylov.exhausted[None])
        evidence = worse(krylov.evidence, space.evidence)
        return space._replace(bias=bias, removed=removed, evidence=evidence)

    def captured(self, block, basis):
        """See `AbstractSampling`."""
        size = basis.shape[1]
        if size == 0:
            zero = added(self.rows, jnp.zeros(block.n, jnp.finfo(block.dtype).dtype))
            none = zero.reshape(-1)[:0]
            return Space(basis, basis, none, basis, zero, zero, zero, basis, basis, Evidence())
        space = self.captured_space(block, basis)
        return space._replace(removed=removed_from(basis, math.isqrt(size)))

    def captured_space(self, block: BlockOperator, basis: Array) -> Space:
        """V f(T(A)) V^H as a function of A, with V = `basis` held fixed."""
        images = block.mm(basis)
        space = self.space(block, basis, matmul(adjoint(basis), images))
        s = matmul(adjoint(basis), space.right)
        return space._replace(images=matmul(images, s))

    def space(
        self, block: BlockOperator, basis: Inexact[Array, "n m"], t: Inexact[Array, "m m"]
    ) -> Space:
        """V f(T) V^H, as a function of T to first order."""
        in_use = jnp.any(basis != 0, axis=0)
        nodes, s = ritz_values(lax.stop_gradient((t + adjoint(t)) / 2), in_use)
        nodes = within_tag(block.operator, nodes, block.eps)
        counts = jnp.any(s != 0, axis=0)
        values = on_nodes(self.fn, nodes, counts)
        moved = matmul(adjoint(s), matmul(t - lax.stop_gradient(t), s))
        differences = divided_differences(constant(self.fn), nodes[None])[0]
        core = jnp.diag(values).astype(t.dtype) + differences * moved
        right = matmul(basis, s)
        left = matmul(right, core)
        value = added(self.rows, jnp.sum(left * jnp.conj(right), axis=1).real)
        changes = changes_by_rounding(self.fn, block.operator, nodes, values, block.eps, counts)
        return Space(
            left=left,
            right=right,
            nodes=nodes,
            images=None,
            value=value,
            size=self._size(left, matmul(square_of(right), changes), block.eps),
            bias=jnp.zeros_like(value),
            basis=basis,
            removed=basis[:, :0],
            evidence=domain_evidence(values, changes),
        )

    def _rows_of(self, entries: Real[Array, "... n p"]) -> Real[Array, "... p"]:
        if self.rows is None:
            return jnp.sum(entries, axis=-2)
        return self.rows(entries) if entries.ndim == 2 else jax.vmap(self.rows)(entries)

    def _size(self, block: Inexact[Array, "n m"], changes: Real[Array, " n"], eps: float) -> Array:
        """The norms that rounding is relative to, of V f(T) S or y, plus the `changes` of f."""
        changes = changes / rounding_of(jnp.ones_like(changes), eps)
        return norms_of(self.rows, block) + added(self.rows, changes)

    def _error(self, entries: Real[Array, "o n p"], exhausted: Bool[Array, " p"]) -> Array:
        """The quadrature error of the mean, from entries after o numbers of steps."""
        samples = self._rows_of(entries)
        if self.rows is None:
            return truncation_error(samples, exhausted)
        return entries_truncation_error(jnp.mean(samples, axis=2), jnp.all(exhausted))

    def _deviation(self, entries: Real[Array, "n p"]) -> Array:
        """The standard deviation of a sample, from the scatter of its independent entries. (The
        matrix is Hermitian: the variance of a sum is twice that of its terms.)
        """
        scatter = safe_norm(entries - jnp.mean(entries, axis=1, keepdims=True))
        deviation = scatter / math.sqrt(max(entries.shape[1] - 1, 1))
        return math.sqrt(2 if self.rows is None else 1) * norms_of(self.rows, deviation[:, None])

    def draw(self, key, block, prepared, count, steps=0):
        """See `AbstractSampling`."""
        return self.panel_and_recurrences(key, block, prepared, count, steps)[0]

    def panel_and_recurrences(
        self, key: PRNGKeyArray, block: BlockOperator, space: Space, count: int, steps: Array | int
    ) -> tuple[Panel, Recurrences]:
        """Returns (panel of `count` samples, `Recurrences` that the derivative holds fixed)."""
        eps = block.eps
        omega = self.sampler.probes(key, block.n, count, jnp.finfo(block.dtype).dtype)
        z = without(space.removed, omega).astype(block.dtype)
        known = matmul(space.left, matmul(adjoint(space.right), z))  # V f(T) V^H z
        room = jnp.maximum(1 - jnp.sum(square_of(space.right), axis=1), 0)  # 1 - diag V V^H

        def rest(krylov, made):
            """Returns (y after q = `made` steps, quadrature error of the mean of samples; nodes,
            weights and values of f after q steps).
            """
            orders = orders_of(made)
            nodes, masses, s = quadrature(ended_after(krylov, orders))
            nodes = within_tag(block.operator, nodes, eps)
            values = on_nodes(self.fn, nodes, masses > 0)
            first = einsum("paq,pq->ap", s, values * s[:, 0]).reshape(-1, len(orders), count)
            images = safe_norm(z.T) * einsum("anp,aop->onp", krylov.basis, first)
            y = images - known
            if self.rows is None:  # the trace of P (f(A) - V f(T) V^H) P
                y = jax.vmap(without, (None, 0))(space.removed, y)
            error = self._error(omega[None] * y.real, krylov.exhausted)
            nodes, masses, values, s = (x[:count] for x in (nodes, masses, values, s))
            residuals = krylov.residual[:, None] * jnp.abs(s[:, made - 1])
            hidden = jnp.mean(weighted(masses, unresolved(self.fn, nodes, values, residuals)))
            error = space.bias + error + added(self.rows, room * hidden)
            return y[0], error, nodes, masses, values

        def enough(krylov, made):
            y, error, *_ = rest(krylov, made)
            value = space.value + jnp.mean(self._rows_of(omega * y.real), axis=-1)
            converged = norm_of(error) <= (self.atol + self.rtol * norm_of(value)) / 3
            return jnp.where(jnp.asarray(steps) > 0, made >= steps, converged)

        if isinstance(steps, int) and steps > 0:
            krylov, made = lanczos(block.mm, z, steps, eps), steps
        else:
            most = self._most_steps(space.basis.shape[1])
            krylov, made = lanczos_until(block.mm, z, most, eps, enough)
        y, bias, nodes, masses, values = rest(krylov, made)
        outside = without(space.right, omega)  # R omega
        c = level_of_others(outside, y)
        entries = omega * (y - c * outside).real + c * room[:, None]
        counts = masses > 0
        changes = changes_by_rounding(self.fn, block.operator, nodes, values, eps, counts)
        domain = domain_evidence(values, changes)
        changes = room * jnp.mean(weighted(masses, changes))
        panel = Panel(
            samples=self._rows_of(entries),
            least_deviation=self._deviation(entries),
            size=self._size((y + known) / math.sqrt(count), changes, eps),
            evidence=worse(krylov.hermitian_evidence(eps), domain),
            steps=made,
            bias=bias,
        )
        return panel, self.fixed(block, omega, z, krylov, made)

    def _most_steps(self, size: int) -> int:
        """Where a space makes recurrences shorter, it costs less than long ones."""
        return max(4, self.max_steps // {0: 4, 16: 2}.get(size, 1))

    def fixed(
        self, block: BlockOperator, omega: Array, z: Array, krylov: Lanczos, steps: Array | int
    ) -> Recurrences:
        """What the derivative holds fixed."""
        nodes, _, s = quadrature(ended_after(krylov, [steps]))
        along = s * s[:, :1] * safe_norm(z.T)[:, None, None]
        nodes = within_tag(block.operator, nodes, block.eps)
        return Recurrences(omega, z, krylov.basis, along, nodes, steps)

    def contracted(self, key, block, prepared, count, steps=0):
        """See `AbstractSampling`. The recurrences are made again."""
        still = BlockOperator(constant(block.operator)).linearised()
        omega = self.sampler.probes(key, block.n, count, jnp.finfo(block.dtype).dtype)
        z = without(prepared.removed, omega).astype(block.dtype)
        most = self._most_steps(prepared.basis.shape[1])
        krylov, _ = lanczos_until(still.mm, z, most, block.eps, lambda _, made: made >= steps)
        return self.mean_of(block, prepared, self.fixed(still, omega, z, krylov, steps))

    def mean_of(self, block: BlockOperator, space: Space, fixed: Recurrences) -> Array:
        """The mean of the samples as a function of A, without the terms in c."""
        omega, z, basis, along, nodes, steps = fixed
        q, n, p = basis.shape
        ritz = einsum("anp,paq->npq", basis, along)
        values = on_nodes(self.fn, nodes, jnp.any(along != 0, axis=1))
        of_z = einsum("npq,pq->np", ritz, values)

        def product(pair):
            v, j = pair
            return lax.cond(j < steps, block.mm, jnp.zeros_like, v)

        images = lax.map(product, (basis, jnp.arange(q)))
        moved = images - lax.stop_gradient(images)
        if self.rows is None:
            known = matmul(space.left, matmul(adjoint(space.right), z))  # V f(T) V^H z
            inner = einsum("anp,bnp->pab", jnp.conj(basis), moved)
            differences = divided_differences(constant(self.fn), nodes)
            core = einsum("paj,pjk,pbk->pab", along, differences, along)
            own = jnp.sum((jnp.conj(z) * (of_z - known)).real, axis=0)
            return jnp.mean(own + jnp.sum((core * inner).real, axis=(1, 2)))
        assert space.images is not None
        # f(A) omega = f(A) z + f(A) Q Q^H omega, with the Ritz vectors of V for the second term
        inside = matmul(adjoint(space.right), omega - z)
        moved = einsum("anp,paq->npq", moved, along).reshape(n, p * q)
        moved_space = space.images - lax.stop_gradient(space.images)
        changes = divided_sums(
            block,
            self.fn,
            jnp.concatenate([moved_space, moved], axis=1),
            jnp.concatenate([space.nodes, nodes.reshape(-1)]),
            jnp.concatenate([inside, jnp.repeat(jnp.eye(p, dtype=inside.dtype), q, axis=0)]),
        )
        known = matmul(space.left, matmul(adjoint(space.right), omega))  # V f(T) V^H omega
        values = on_nodes(self.fn, space.nodes, jnp.any(space.right != 0, axis=0))
        of_omega = of_z + matmul(space.right, values[:, None] * inside)
        return jnp.mean(self.rows(omega * (of_omega - known + changes).real), axis=-1)

    def exact(self, block):
        """See `AbstractSampling`: by an eigendecomposition."""
        nodes, basis, evidence = spectrum(block.operator)
        values = on_nodes(self.fn, nodes)
        changes = changes_by_rounding(self.fn, block.operator, nodes, values, block.eps)
        evidence = worse(evidence, domain_evidence(values, changes))
        rounding = rounding_of(safe_norm(jnp.abs(basis) * values), block.eps)
        error = added(self.rows, matmul(square_of(basis), changes) + rounding)
        value = added(self.rows, matmul(square_of(basis), values))
        return exact_estimate(value, error, nodes.size, evidence), (basis, nodes)

    def contract_exact(self, weights: Any, operator: lx.AbstractLinearOperator) -> Array:
        """The exact value as a function of A; `weights` is (eigenvectors, eigenvalues)."""
        basis, nodes = weights
        inner = matmul(adjoint(basis), BlockOperator(operator).mm(basis))
        core = divided_differences(constant(self.fn), nodes[None])[0] * inner
        moved = jnp.sum(matmul(basis, core) * jnp.conj(basis), axis=1).real
        return added(self.rows, moved + matmul(square_of(basis), on_nodes(self.fn, nodes)))

    def exactly_contracted(self, block):
        """See `AbstractSampling`."""
        _, weights = self.exact(BlockOperator(constant(block.operator)))
        return self.contract_exact(weights, block.operator)


def level_of_others(outside: Inexact[Array, "n p"], y: Inexact[Array, "n p"]) -> Real[Array, " p"]:
    """The c of each probe, from the other probes; `outside` is R omega."""
    unit = scale_of(y)
    products = jnp.sum((jnp.conj(outside) * y).real / unit, axis=0)
    squares = jnp.sum(square_of(outside), axis=0)
    others = jnp.sum(squares) - squares
    return unit * (jnp.sum(products) - products) / jnp.where(others > 0, others, 1)


def without(q: Inexact[Array, "n m"], vectors: Array) -> Inexact[Array, "n p"]:
    """The part of `vectors` outside of the span of the orthonormal (or zero) columns of q."""
    for _ in range(2):
        vectors = vectors - matmul(q, matmul(adjoint(q), vectors))
    return vectors


def _with_sampling(weights: SampledWeights, sampling: FunctionSampling | None) -> SampledWeights:
    return eqx.tree_at(lambda w: w.sampling, weights, sampling, is_leaf=lambda x: x is None)


@final
class SampledFunctionEstimator(AbstractFunctionEstimator):
    """A sum or diagonal of f(A), with a tolerance in the place of a budget."""

    sampling: FunctionSampling
    max_k: int = eqx.field(static=True)

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        del k
        real = jnp.finfo(BlockOperator(operator).dtype).dtype
        rtol = jnp.asarray(self.sampling.rtol, real)
        atol = jnp.asarray(self.sampling.atol, real)
        given = key, BlockOperator(operator), self.sampling, Target(rtol, atol), self.max_k, weights
        estimate, made = sample_to_tolerance(*given)
        # The function itself is no weight.
        return estimate, None if made is None else _with_sampling(made, None)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        return self.sampling.exact(BlockOperator(operator))

    def contract(self, weights, operator):
        """See `AbstractEstimator`. The leaves of `fn` have derivatives, too."""
        if isinstance(weights, SampledWeights):
            return _with_sampling(weights, self.sampling).contract(BlockOperator(operator))
        return self.sampling.contract_exact(weights, operator)


def sampled_function(
    name: str,
    rows: Rows | None,
    fn: Function,
    operator: lx.AbstractLinearOperator,
    rtol: Any,
    atol: Any,
    max_k: int | None,
) -> tuple[int, SampledFunctionEstimator]:
    """Returns (budget, estimator) of a call with a tolerance."""
    least = 4 * FunctionSampling.panel
    max_k, budget = largest_budget(max_k, operator.in_size(), name, least)
    sampling = FunctionSampling(
        rows=rows,
        fn=fn,
        rtol=tolerance_of(rtol, "rtol"),
        atol=tolerance_of(atol, "atol"),
        max_steps=max(4, max_k // (2 * FunctionSampling.panel)),
    )
    return budget, SampledFunctionEstimator(sampling, max_k)

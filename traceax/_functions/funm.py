r"""Functions of a Hermitian matrix by stochastic Lanczos quadrature: what all of them share.

A probe z on the sphere of radius sqrt(n) and q steps of Lanczos' recurrence give nodes theta_j and
weights w_j (see `_linalg.lanczos`). The estimate is the mean over p probes of

    a = n sum_j w_j f(theta_j)  ~  z^H f(A) z,      E[z^H B z] = tr(B).

*The standard error.* For such probes Var(z^H B z) = c (||B||_F^2 - tr(B)^2 / n), with c = 2n/(n+2)
over the reals and n/(n+1) over the complex numbers. As ||f(A)||_F^2 = E[z^H f(A)^2 z], the same
nodes give the variance, with the mean a over all probes (the last factor corrects for a^2):

    X = mean over probes of n sum_j w_j (f(theta_j) - a/n)^2,
    std_err^2 = (c X / p) / (1 - c / (n p)).

*The degrees of freedom.* X is a sum of squares of normal numbers, one for each eigenvalue and
probe, with the coefficients (f(lambda_i) - tr(f(A)) / n)^2. Its relative variance is that of chi^2
with nu ~ n p m_2^2 / m_4 degrees of freedom (Satterthwaite's rule), where m_2 and m_4 are the means
of the second and fourth power of f - a/n over the nodes; nu >= 1.

*The quadrature error* compares the values of each probe after q, q - d and q - 2d steps, with
d = q/4 rounded up: D_1 = |a_q - a_(q-d)|, D_2 = |a_(q-d) - a_(q-2d)|. Convergence at the rate
r = D_1 / D_2 leaves an error of r / (1 - r) D_1; the reported error is D_1 max(1, 8 r / (1 - r))
with r <= 0.95: a margin of 8, as Ritz values meet eigenvalues unevenly. Where f jumps, by 1 at
most, there is a bound (Chebyshev, Markov and Stieltjes): the spectral measure below a number is at
least the sum of the weights of the nodes below it without the last one, and at most their sum with
the next one.

*The derivative* needs the forward pass only (arXiv:2605.12801). With the probe, V and S held fixed,

    d (z^H f(A) z) ~ <G, dA>,   G = ||z||^2 V S (D o s_1 s_1^T) S^T V^T,   s_1 = S^T e_1,

with D_ij = (f(theta_i) - f(theta_j)) / (theta_i - theta_j), D_ii = f'(theta_i), the divided
differences. As G depends on A to first order, a second derivative with G held fixed would be wrong,
and is refused. Leaves of f are differentiated through sum_j w_j f(theta_j).
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, final

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from equinox import AbstractVar
from jaxtyping import Array, Inexact, Real

from .._core.counts import check_function, checked_count
from .._core.estimate import (
    Evidence,
    all_finite,
    evidence_of,
    rounding_of,
    safe_norm,
    scale_of,
    worse,
)
from .._core.precision import adjoint, any_promotion, einsum
from .._core.programs import closed_function
from .._estimators.estimator import AbstractEstimator, check_budget
from .._linalg.factorisations import eigh
from .._linalg.lanczos import Lanczos, lanczos, quadrature
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._operators.known_parts import matrix_of
from .._operators.tags import is_hermitian
from .._probes.samplers import SphereSampler
from .._sketch.nystrom import skew_of_core
from .nodes import (
    OF_EIGENVALUES,
    Function,
    changes_by_rounding,
    divided_differences,
    on_nodes,
    rounding_of_nodes,
    unresolved,
    within_tag,
)
from .quadrature_error import exact_estimate, orders_of, quadrature_estimate, truncation_error


def hermitian_operator(operator: Any, name: str) -> lx.AbstractLinearOperator:
    """The operator, see `as_operator`; a `ValueError` unless its tags say that A^H = A."""
    operator = as_operator(operator)
    if not is_hermitian(operator):
        raise ValueError(
            f"{name} needs a Hermitian operator, and this {type(operator).__name__} has no tag. "
            "If it is, tag it: `lineax.TaggedLinearOperator(operator, tag)`, where the tag is "
            "`lineax.symmetric_tag` (if real) or a semidefinite one."
        )
    return operator


def checked_plan(k: Any, num_steps: Any, n: int, name: str) -> tuple[int, int | None]:
    """Returns (budget, at most n; the number of steps, from 1 to k, or None); or an error."""
    budget = check_budget(k, 1, n, name)
    steps = checked_count(num_steps, "num_steps", none="it is chosen from the budget")
    if steps is not None and steps > k:
        raise ValueError(f"num_steps={steps} exceeds the budget k={k}. Give num_steps <= {k}.")
    return budget, steps


def plan(k: int, num_steps: int | None) -> tuple[int, int]:
    """Returns (number p of probes, number q of steps for each), with `p q <= k`."""
    if num_steps is not None:
        return k // num_steps, num_steps
    p = max(1, math.isqrt(k) // 3)
    return p, k // p


def hoist_function(fn: Function, dtype: Any, scalar: bool = True) -> Function:
    """A function of one number as a PyTree, whose leaves are all arrays that the function depends
    on. Argument and values have the `dtype`: real, or complex for holomorphic functions.
    """
    check_function(fn, "fn", "jax.numpy.exp")
    holomorphic = jnp.issubdtype(dtype, jnp.complexfloating)
    # A holomorphic function may mix its complex argument with real parameters.
    promotion = any_promotion if holomorphic else contextlib.nullcontext

    def checked(x):
        try:
            with promotion():
                value = jnp.asarray(fn(x))
        except TypeError as error:
            if not holomorphic:
                raise
            raise TypeError(f"{_HOLOMORPHIC} With one, it fails: {error}") from error
        if holomorphic != jnp.issubdtype(value.dtype, jnp.complexfloating):
            remedy = "cast it." if holomorphic else "leave the tag off, or take the real part."
            rule = _HOLOMORPHIC if holomorphic else "With a tag, fn must have real values."
            raise TypeError(f"{rule} Got the dtype {value.dtype}: {remedy}")
        if scalar and value.shape != ():
            raise ValueError(
                f"fn must return one number, got shape {value.shape}. For several functions, make "
                "one call for each, with the same key."
            )
        return value.astype(dtype)

    return closed_function(checked, jax.ShapeDtypeStruct((), dtype))


_HOLOMORPHIC = (
    "For an operator without a tag, such as `lineax.symmetric_tag`, fn must be a holomorphic "
    "function with complex values for complex numbers, as eigenvalues may be."
)


def spectrum(operator: lx.AbstractLinearOperator) -> tuple[Array, Array, Evidence]:
    """Returns (all n eigenvalues, eigenvectors as columns, evidence), from n products."""
    block = BlockOperator(operator).linearised()
    matrix, _ = matrix_of(block)
    scale = scale_of(matrix)
    scaled = matrix / scale
    values, vectors = eigh((scaled + adjoint(scaled)) / 2)
    skew = skew_of_core(scaled, jnp.linalg.norm(scaled), block.n, block.eps)
    evidence = evidence_of(matrix, skew=skew)
    return within_tag(operator, values * scale, block.eps), vectors, evidence


def values_at_eigenvalues(fn, operator, nodes, evidence) -> tuple[Array, Array, Evidence]:
    """Returns (f at the eigenvalues, its errors by rounding, the evidence with the domain of f)."""
    values = on_nodes(fn, nodes)
    given = fn, operator, nodes, values, BlockOperator(operator).eps
    changes = changes_by_rounding(*given, moves=OF_EIGENVALUES)
    return values, changes, worse(evidence, Evidence(outside=~all_finite(changes)))


def derivative_core(
    fn: Function, nodes: Real[Array, "p q"], vectors: Real[Array, "p q q"]
) -> Real[Array, "p q q ..."]:
    """S (D o s_1 s_1^T) S^T, for every probe: see above."""
    components = vectors * vectors[:, :1, :]  # S o s_1^T, row by row
    return einsum("pai,pij...,pbj->pab...", components, divided_differences(fn, nodes), components)


class SpectralWeights(NamedTuple):
    """`G = sum_p V_p C_p V_p^H`, for several functions at once if cores have more axes, and the
    nodes and weights of the quadrature. A contraction costs a matvec for each vector, in one block.
    """

    basis: Inexact[Array, "q n p"]  # V_p
    core: Inexact[Array, "p q q ..."]  # C_p
    nodes: Real[Array, "l m"]  # theta_j
    weights: Real[Array, "l m"]  # w_j


def weighted(weights: Real[Array, "p q"], values: Real[Array, "p q ..."]) -> Real[Array, "p ..."]:
    """sum_j w_j f_j for every probe."""
    return einsum("pq,pq...->p...", weights, values)


def degrees_of_freedom(second: Array, fourth: Array, samples: Array | int) -> Array:
    """The number nu of above, from the moments m_2 and m_4 and `samples = n p`."""
    known = fourth > 0
    nu = samples * jnp.square(second) / jnp.where(known, fourth, 1)
    return jnp.where(known, jnp.maximum(nu, 1), samples)


def mean_and_error(
    weights: Real[Array, "p q"],
    values: Real[Array, "p q ..."],
    n: int | Real[Array, ""],
    is_complex: bool,
    number: Real[Array, ""] | None = None,
) -> tuple[Array, Array, Array]:
    """Returns (mean a over probes of n sum_j w_j f_j, standard error without rounding, degrees of
    freedom nu). f_j is 0 where w_j is. `n` is the dimension of the space of the probes. Unless all
    p are in use, `number` is how many; weights of the others are 0.
    """
    p = weights.shape[0] if number is None else number

    def mean_of(x):
        return jnp.sum(weighted(weights, x), axis=0) / p

    unit = scale_of(values)
    mean = mean_of(values / unit)
    squares = jnp.square(values / unit - mean)  # (f - a/n)^2
    spread = mean_of(squares)  # m_2 = X / n
    dof = degrees_of_freedom(spread, mean_of(squares**2), n * p)
    # The a of above is n times this mean, and X is n times this spread.
    c = n / (n + 1) if is_complex else 2 * n / (n + 2)
    std_err = jnp.sqrt(c * n * spread / p / (1 - c / (n * p)))
    return n * unit * mean, unit * std_err, dof


def ended_after(krylov: Lanczos, orders: Sequence[Array | int]) -> Lanczos:
    """The recurrences after each number of steps in `orders`, in turn along the axis of probes."""
    most = krylov.alpha.shape[0]
    ended = [jnp.where(jnp.arange(most)[:, None] < m - 1, krylov.beta, 0) for m in orders]
    alpha = jnp.tile(krylov.alpha, (1, len(orders)))
    return krylov._replace(alpha=alpha, beta=jnp.concatenate(ended, axis=1))


class AbstractFunctionEstimator(AbstractEstimator):
    """An estimator that is not linear in A: its fixed weights give a first derivative only."""

    weights_depend_on_operator: ClassVar[bool] = True

    def weights_at(self, weights, operator) -> NoReturn:
        """See `AbstractEstimator`: the derivative of the weights is not known."""
        raise NotImplementedError(
            "Functions of a matrix and eigenvalues have a first derivative only. Use "
            "`lax.stop_gradient` on whatever need not be differentiated twice, or finite "
            "differences of the gradient with the same key."
        )


class AbstractSpectralEstimator(AbstractFunctionEstimator):
    """An estimator of tr f(A); its weights have the `nodes` and `weights` of the quadrature."""

    fn: AbstractVar[Function]

    #: The numbers at which f jumps, by 1 at most. (An annotation would make this a field.)
    jumps = ()

    def nodes_of(self, operator: lx.AbstractLinearOperator, nodes: Array, eps: float) -> Array:
        """The nodes; a node that is 0 or a jump of f but for rounding errors is moved there."""
        nodes = within_tag(operator, nodes, eps)
        rounding = rounding_of_nodes(operator, nodes, eps)
        for jump in self.jumps:
            nodes = jnp.where(jnp.abs(nodes - jump) <= rounding, jump, nodes)
        return nodes

    def exact(self, operator):
        """See `AbstractEstimator`."""
        eps = BlockOperator(operator).eps
        nodes, basis, evidence = spectrum(operator)
        nodes = self.nodes_of(operator, nodes, eps)
        values, changes, evidence = values_at_eigenvalues(self.fn, operator, nodes, evidence)
        error = jnp.sum(changes, axis=0)
        error = error + rounding_of(safe_norm(jnp.moveaxis(values, 0, -1)), eps)
        # Of a sum that cancels, half of the value is no measure.
        least = math.sqrt(eps) * safe_norm(jnp.ravel(values))
        given = jnp.sum(values, axis=0), error, nodes.size, evidence, least
        estimate = exact_estimate(*given, separate=error.ndim > 0)
        slopes = divided_differences(self.fn, nodes[:, None])
        rule = nodes[None], jnp.ones_like(nodes)[None]
        return estimate, SpectralWeights(basis[None], slopes, *rule)

    def contract(self, weights, operator):
        """See `AbstractEstimator`. Linear in A; the leaves of `fn` have derivatives, too."""
        basis, core, nodes, masses = weights
        q, n, p = basis.shape
        vectors = jnp.moveaxis(basis, 1, 0).reshape(n, q * p)
        images = BlockOperator(operator).mm(vectors).reshape(n, q, p)
        inner = einsum("anp,nbp->pab", jnp.conj(basis), images)
        own = jnp.sum(weighted(masses, on_nodes(self.fn, nodes, masses > 0)), axis=0)
        return einsum("pab...,pab->...", jnp.conj(core), inner).real + own


def jump_error(weights: Real[Array, "p q"], is_below: Array) -> Real[Array, " p"]:
    """For every probe, the bound of above at a jump; `is_below` marks the nodes below the jump."""
    padded = jnp.pad(weights, ((0, 0), (1, 1)))
    last = jnp.sum(is_below, axis=1, keepdims=True)
    neighbours = [jnp.take_along_axis(padded, last + i, axis=1)[:, 0] for i in (0, 1)]
    return jnp.maximum(*neighbours)


@final
class QuadratureEstimator(AbstractSpectralEstimator):
    """Stochastic Lanczos quadrature of tr f(A)."""

    fn: Function
    num_steps: int | None = eqx.field(static=True)
    jumps: tuple[Real[Array, ""], ...] = ()

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        n = block.n
        eps = block.eps
        p, q = plan(k, self.num_steps)
        probes = SphereSampler().probes(key, n, p, block.dtype)
        krylov = lanczos(block.mm, probes, q, eps)
        nodes, masses, vectors = quadrature(ended_after(krylov, orders_of(q)))
        nodes = self.nodes_of(operator, nodes, eps)
        values = on_nodes(self.fn, nodes, masses > 0)
        samples = n * weighted(masses, values)
        samples = samples.reshape(-1, p, *samples.shape[1:])

        nodes, masses, values, s = (x[:p] for x in (nodes, masses, values, vectors))
        value, std_err, dof = mean_and_error(masses, values, n, jnp.iscomplexobj(probes))
        changes = changes_by_rounding(self.fn, operator, nodes, values, eps, masses > 0)
        rounding = weighted(masses, rounding_of(jnp.abs(values), eps) + changes)
        std_err = jnp.hypot(std_err, n * jnp.mean(rounding, axis=0))
        evidence = worse(krylov.evidence(eps), Evidence(outside=~all_finite(changes)))
        least = 0.0
        missing = jnp.zeros_like(value)
        if self.jumps:  # as far as n is a measure of a count
            least = n / 20
            bounds = sum(jump_error(masses, nodes < jump) for jump in self.jumps)
            error = n * jnp.mean(jnp.where(krylov.exhausted, 0, bounds))
        else:
            residuals = krylov.residual[:, None] * jnp.abs(s[:, -1])
            # Twice: a single vector sees less than a block.
            hidden = 2 * unresolved(self.fn, nodes, values, residuals, masses > 0)
            error = truncation_error(samples, krylov.exhausted)
            missing = n * jnp.mean(weighted(masses, hidden), axis=0)
            error = error + missing

        given = value, error, std_err, p * q, dof, evidence, least, missing
        estimate = quadrature_estimate(*given, separate=value.ndim > 0)
        if not weights:
            return estimate, None
        made = SpectralWeights(
            basis=krylov.basis,
            core=derivative_core(self.fn, nodes, s) * (n / p),
            nodes=nodes,
            weights=masses * (n / p),
        )
        return estimate, made

r"""Log-determinants and log densities with a preconditioner that was built before: smooth functions
of the operator, with exactly their own derivatives.

The probes z are fixed, and so is P = R R^H, or its pivots and neighbourhoods (`sparse_factor`),
from which its values follow the operator. With M = R^{-1} A R^{-H} the value is

    log det P + mean over z of F(M, z),      F Gauss quadrature of z^H log(M) z in q steps.

`own_derivative` differentiates F exactly by M, converged or not; JAX differentiates P and R. The
form y^H A^{-1} y is Gauss quadrature of 1/x from b = R^{-1} y, one more column of the recurrences:
q steps give the result of q steps of conjugate gradients. The quadrature leaves out at most
||R^{-1} r||^2 / lambda_min(M), with r = y - A x. The number q is fixed, so that no decision breaks
the smoothness.

*The probes.* With a fixed P, from products, no rank removes the variance of z^H B z, B the
derivative of log M, and an optimum is off by about (number of hyperparameters) / (2 p) nats on
average. In the directions U that P has captured, B is often nearly diagonal (roughly, a stationary
kernel keeps its eigenvectors when its hyperparameters change); outside of U, B is nearly a multiple
of the identity. Hence

    z = U e + w,    e independent signs (phases over C),   w uniform on the sphere of radius
                                                           sqrt(n - l) of the complement of U:

E[z z^H] = I, and neither a diagonal U^H B U nor a multiple of the identity outside causes any
variance. The standard error comes from the scatter of the probes, which shows this gain. For fewer
than 8 probes it is that of probes on the sphere, which is larger.
"""

import math
from typing import NoReturn, final

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, PRNGKeyArray

from .._core.estimate import Estimate, mean_and_std_err, scale_of
from .._core.precision import adjoint, einsum, matmul, square_norms
from .._functions.funm import ended_after, mean_and_error
from .._functions.nodes import divided_differences
from .._functions.quadrature_error import orders_of, truncation_error
from .._linalg.factorisations import qr
from .._linalg.lanczos import lanczos, positive, quadrature
from .._operators.block_operator import BlockOperator
from .._probes.samplers import SphereSampler
from .._sketch.weights import AbstractWeights
from .estimator import estimate_of, rounding_of, rounding_of_form
from .factors import BuiltPreconditioner, Factors, outside_of
from .own_derivative import own_derivative

#: From this number of probes on, their scatter gives the standard error.
SCATTER = 8


def held_plan(k: int, t: int = 0) -> tuple[int, int]:
    """Returns (p probes, q steps for each and for t observations). M ~ I needs few steps, fewer for
    a logarithm than for a solve; an optimum gains from probes.
    """
    steps = min(k // (t + 1), max(4, math.isqrt(k) // (1 if t else 2)))
    return k // steps - t, steps


def held_probes(key: PRNGKeyArray, factors: Factors, p: int, dtype) -> Inexact[Array, "n p"]:
    """The probes z = U e + w from vectors g on the sphere. As e are the signs (phases) of U^H g, z
    stays where a factorisation flips a column of U. If P follows the operator, z is g: M is as
    close to I in U as outside.
    """
    sphere = SphereSampler().probes(key, factors.basis.shape[0], p, dtype)
    if factors.from_entries:
        return sphere
    u = qr(factors.basis)[0]
    return matmul(u, lax.sign(matmul(adjoint(u), sphere))) + outside_of(u, sphere)


@final
class HeldWeights(AbstractWeights):
    """The derivative of this one value, times log det P + Re sum_j l_j^H M r_j + 2 Re x^H R^{-1} y,
    as a function of M, R and P.
    """

    left: Inexact[Array, "n c"]
    right: Inexact[Array, "n c"]
    built: BuiltPreconditioner
    times: int = eqx.field(static=True)
    x: Inexact[Array, "n t"]  # for the observations

    def contract(self, block, y=None):
        """See `AbstractWeights`."""
        factors = self.built.factors_at(block.operator, moving=True)
        left = block.leaves(factors.inverse_root_adjoint(self.left))
        right = block.leaves(factors.inverse_root_adjoint(self.right))
        value = jnp.sum(block.forms(left, right)).real + self.times * factors.log_det
        if y is None:
            return value
        return value + 2 * jnp.sum(jnp.conj(self.x) * factors.inverse_root(y)).real

    def weights_at(self, operator, *_) -> NoReturn:
        """There is no second derivative."""
        raise NotImplementedError(
            "With a preconditioner that was built before, log-determinants and log densities have "
            "first derivatives only. For second derivatives give "
            "`preconditioner='auto'` or `traceax.NystromPreconditioner(rank=...)`."
        )


def held_estimate(
    key: PRNGKeyArray,
    built: BuiltPreconditioner,
    operator: lx.AbstractLinearOperator,
    k: int,
    weights: bool,
    y: Inexact[Array, "n t"] | None = None,
) -> tuple[Estimate, tuple[Array, Array, Array], HeldWeights | None]:
    """Returns (estimate of log det A, the forms of the columns of y, the weights of the sum of t
    times log det A, or once if t = 0, and the forms).
    """
    factors = built.factors_at(operator)
    block = BlockOperator(operator).linearised()
    y = jnp.zeros((block.n, 0), block.dtype) if y is None else y
    n, t = y.shape
    p, q = held_plan(k, t)
    target = factors.inverse_root(y)
    unit = scale_of(target, axis=0)[0]
    probes = held_probes(key, factors, p, block.dtype)
    starts = jnp.concatenate([probes, target / unit.astype(block.dtype)], axis=1)
    sizes = square_norms(starts)

    def mm(x):
        return factors.preconditioned(block.mm, x)

    krylov = lanczos(mm, starts, q, block.eps)
    nodes, masses, vectors = quadrature(ended_after(krylov, orders_of(q)))
    # Nodes from a right-hand side that is 0 are no Ritz values.
    smallest = jnp.min(jnp.where(sizes > 0, nodes[: p + t, 0], jnp.inf))
    nodes = positive(nodes)
    logs = jnp.sum(masses * jnp.log(nodes), axis=1).reshape(-1, p + t)[:, :p]
    error = truncation_error(n * logs, krylov.exhausted[:p])
    nodes, masses, vectors = (x[: p + t] for x in (nodes, masses, vectors))
    values = jnp.concatenate([jnp.log(nodes[:p]), 1 / nodes[p:]])
    gauss = sizes * jnp.sum(masses * values, axis=1)  # F

    mean, std_err = mean_and_std_err(gauss[:p])
    dof = jnp.full((), p - 1, nodes.dtype)
    if p < SCATTER:
        parts = masses[:p], values[:p], n, jnp.iscomplexobj(y)
        _, std_err, dof = mean_and_error(*parts)
    largest = jnp.max(nodes)
    seen = built.evidence, krylov.evidence(block.eps, factors.top)
    rounding, evidence = rounding_of(factors, smallest, largest, block.eps, *seen)
    stats = {"condition": largest / smallest}
    error = error + math.sqrt(n) * rounding
    given = n, (factors.log_det, mean), error, std_err, k - k % q, dof, evidence
    log_det = estimate_of(*given, stats=stats)

    solved = einsum("paj,pj->pa", vectors[p:], vectors[p:, 0, :] * values[p:])
    solved = jnp.sqrt(sizes[p:, None]) * solved
    solution = einsum("qnp,pq->np", krylov.basis[:, :, p:], solved.astype(block.dtype))
    x = unit.astype(block.dtype) * factors.inverse_root_adjoint(solution)
    left = jnp.square(unit * krylov.residual[p:] * solved[:, -1]) / smallest
    left = left + rounding_of_form(factors, largest, x, block.eps)
    form = jnp.square(unit) * gauss[p:], left, x
    if not weights:
        return log_det, form, None
    # The divided differences of 1/x are -1 / (x y).
    slopes = [divided_differences(jnp.log, nodes[:p]), -values[p:, :, None] * values[p:, None, :]]
    left, start = own_derivative(mm, starts, krylov, vectors, values, jnp.concatenate(slopes))
    share = jnp.full(p, max(t, 1) / p, unit.dtype)
    coefficients = jnp.concatenate([share, jnp.square(unit)]).astype(starts.dtype)
    blocks = left * coefficients, krylov.basis
    left, right = (x.transpose(1, 0, 2).reshape(len(starts), -1) for x in blocks)
    x = unit.astype(starts.dtype) * start[:, p:]
    return log_det, form, HeldWeights(left, right, built, max(t, 1), x)

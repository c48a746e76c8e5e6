r"""Log-determinants and log densities with a preconditioner that was built before: smooth functions
of the operator, with exactly their own derivatives.

The probes z are fixed, and so is P = R R^H, or its pivots and neighbourhoods (`sparse_factor`),
from which its values follow the operator. With M = R^{-1} A R^{-H} the value is

    log det P + mean over z of F(M, z),      F Gauss quadrature of z^H log(M) z in q steps.

`own_derivative` differentiates F exactly by M, converged or not; JAX differentiates P and R. The
form y^H A^{-1} y is Gauss quadrature of 1/x from b = R^{-1} y: m steps give the result of m steps
of conjugate gradients, and the number m is fixed, so that no decision breaks the smoothness. The
quadrature leaves out at most ||R^{-1} r||^2 / lambda_min(M), with r = y - A x.

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
from collections.abc import Callable
from functools import partial
from typing import NoReturn, final

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, ArrayLike, Inexact, PRNGKeyArray, Real

from .._core.estimate import Estimate, mean_and_std_err
from .._core.precision import einsum
from .._functions.funm import mean_and_error
from .._linalg.factorisations import qr
from .._linalg.lanczos import Lanczos, lanczos, largest_ritz_value, positive_quadrature
from .._operators.block_operator import BlockOperator
from .._probes.samplers import SphereSampler
from .._sketch.leave_one_out import adjoint, matmul, square_norms
from .._sketch.weights import AbstractWeights
from .estimator import estimate_of, evidence_with, rounding_of
from .factors import BuiltPreconditioner, Factors, outside_of
from .log_quadrature import quadrature_after
from .own_derivative import gauss, own_derivative

#: From this number of probes on, their scatter gives the standard error.
SCATTER = 8


def held_plan(k: int) -> tuple[int, int]:
    """Returns (p probes, q steps for each). M ~ I needs few steps; an optimum gains from probes."""
    steps = min(k, max(4, math.isqrt(k) // 2))
    return k // steps, steps


def held_probes(key: PRNGKeyArray, factors: Factors, p: int, dtype) -> Inexact[Array, "n p"]:
    """The probes z = U e + w from vectors g on the sphere. Entries of e = U^H g, divided by their
    absolute values, make z independent of the signs (phases) of the columns of U.
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
    times: int = eqx.field(static=True, default=1)
    x: Inexact[Array, "n t"] | None = None  # for the observations

    def contract(self, block, y=None):
        """See `AbstractWeights`."""
        factors = self.built.factors_at(block.operator)
        left = block.leaves(factors.inverse_root_adjoint(self.left))
        right = block.leaves(factors.inverse_root_adjoint(self.right))
        value = jnp.sum(block.forms(left, right)).real + self.times * factors.log_det
        if self.x is None or y is None:
            return value
        return value + 2 * jnp.sum(jnp.conj(self.x) * factors.inverse_root(y)).real

    def weights_at(self, operator, *_) -> NoReturn:
        """There is no second derivative."""
        raise NotImplementedError(
            "With a preconditioner that was built before, log-determinants and log densities have "
            "first derivatives only. Second derivatives are those of the default mode: "
            "`preconditioner='auto'` or `traceax.NystromPreconditioner(rank=...)`."
        )


class Held:
    """M for an operator and a preconditioner. (No PyTree: a `Held` exists only during a trace.)"""

    def __init__(self, preconditioner: BuiltPreconditioner, operator: lx.AbstractLinearOperator):
        self.built = preconditioner
        self.factors = preconditioner.factors_at(operator)
        self.block = BlockOperator(operator).linearised()

    def lanczos(self, start: Inexact[Array, "n p"], steps: int) -> Lanczos:
        """The recurrences of M from the columns of `start`."""
        mm = partial(self.factors.preconditioned, self.block.mm)
        return lanczos(mm, start, steps, self.block.eps)

    def log_det(
        self, key: PRNGKeyArray, k: int, smallest: ArrayLike = math.inf
    ) -> tuple[Estimate, Callable[..., HeldWeights], Real[Array, ""]]:
        """Returns (estimate of log det A from a budget k, a function of `times` that returns
        `times` the weights, the smallest of all Ritz values and `smallest`).
        """
        p, q = held_plan(k)
        probes = held_probes(key, self.factors, p, self.block.dtype)
        krylov = self.lanczos(probes, q)
        # P was built for another operator: no bound of the eigenvalues of M is known here, and the
        # smallest Ritz value after a few steps may be several times too large.
        nodes, masses, _ = positive_quadrature(krylov)
        far_below = jnp.min(nodes[:, 0]) / 8
        given = krylov, jnp.asarray(q), jnp.zeros_like(krylov.alpha), far_below
        found, _ = quadrature_after(*given, jnp.ones(p, nodes.dtype), False)
        value, std_err = mean_and_std_err(gauss(probes, krylov, jnp.log))
        dof = jnp.full((), p - 1, nodes.dtype)
        if p < SCATTER:
            complex_ = jnp.iscomplexobj(probes)
            parts = masses, jnp.log(nodes), self.block.n, self.block.eps, complex_
            _, std_err, dof = mean_and_error(*parts)
        smallest = jnp.minimum(found.smallest, smallest)
        largest = largest_ritz_value(krylov)
        rounding, outside = rounding_of(self.factors, smallest, largest, self.block.eps)
        evidence = evidence_with(outside, self.built.evidence, krylov.evidence)
        errors = self.block.n * found.error, rounding, std_err
        estimate = estimate_of(self.factors, value, *errors, p * q, dof, evidence)

        def weights(times: int = 1) -> HeldWeights:
            derivative = self.derivative(
                probes, krylov, jnp.log, jnp.full(p, times / p, value.dtype)
            )
            return HeldWeights(*derivative[:2], self.built, times)

        return estimate, weights, smallest

    def derivative(
        self, probes: Array, krylov: Lanczos, fn: Callable, coefficients: Array
    ) -> tuple[Array, Array, Array]:
        """Returns (l_j, r_j, x of every z_i) for sum_i c_i F(M, z_i), c_i the real `coefficients`:
        see `HeldWeights`.
        """
        n = probes.shape[0]
        mm = partial(self.factors.preconditioned, self.block.mm)
        left, start = own_derivative(mm, probes, krylov, fn)
        left = left * coefficients.astype(probes.dtype)
        left, right = (x.transpose(1, 0, 2).reshape(n, -1) for x in (left, krylov.basis))
        return left, right, start

    def quadratic_forms(
        self, target: Inexact[Array, "n t"], krylov: Lanczos, smallest: Real[Array, ""]
    ) -> tuple[Array, Array, Array]:
        """Returns (b^H M^{-1} b, a bound of the part that quadrature leaves out, R^{-H} M^{-1} b)
        for every column b of `target`; `smallest` stands for lambda_min(M).
        """
        nodes, _, vectors = positive_quadrature(krylov)
        length = jnp.sqrt(square_norms(target))[:, None]
        solved = length * einsum("paj,pj->pa", vectors, vectors[:, 0, :] / nodes)
        solution = einsum("qnp,pq->np", krylov.basis, solved.astype(target.dtype))
        left = jnp.square(krylov.beta[-1] * solved[:, -1]) / smallest
        value = gauss(target, krylov, jnp.reciprocal)
        return value, left, self.factors.inverse_root_adjoint(solution)

r"""A directional derivative of a log-determinant, with its standard error.

The derivative is <G, dA> (see `weights`). For each probe z this is a constant plus z^H C z, with

    C = L(M)[N] - beta R^{-1} dA R^{-H} + (beta / mu) (I - U U^H) dA (I - U U^H),

where N = R^{-1} dA R^{-H}, and the last term is in scaled coordinates. Its variance (see
`_functions.funm`) is c (||C||_F^2 - tr(C)^2 / n), with ||C||_F^2 = E ||C z||^2. The products that
the derivative takes, dA R^{-H} V and dA w_2, are enough for C z. With
M ~ V T V^H + t (I - V V^H), t = T_11, T = S Theta S^T and W = N V,

    L(M)[N] z = ||z|| (V S (D o H) s_1 + (I - V V^H) W S (d o s_1)),     H = S^T V^H W S,

where D are the divided differences of the logarithm at Theta, and d_j is that of t and theta_j.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, final

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from .._core.estimate import make_estimate, scale_of, status_of, weights_wanted
from .._core.precision import einsum
from .._core.primitive import logdet_derivative_p
from .._estimators.estimator import AbstractEstimator, solve
from .._estimators.solution import Solution
from .._functions.funm import divided_differences
from .._linalg.lanczos import quadrature
from .._operators.block_operator import BlockOperator, as_operator
from .._sketch.leave_one_out import adjoint, matmul, square_norms
from .._sketch.weights import AbstractWeights
from .budget_policy import BudgetPolicy, PreconditionedQuadrature, for_derivative, policy_of
from .estimator import estimate_from, exact_logdet
from .preconditioners import AbstractPreconditioner
from .weights import LogdetWeights, weights_of


def _on_probes(
    run: PreconditionedQuadrature, of_lanczos: Array, outside: Array, of_outside: Array
) -> Inexact[Array, "n p"]:
    """C z, from dA times Lanczos' vectors (probe by probe), from w_2, and from dA w_2."""
    factors, control_variate_weight, krylov = (
        run.built.factors,
        run.built.control_variate_weight,
        run.krylov,
    )
    n, p = run.probes.shape
    q, dtype = krylov.alpha.shape[0], run.probes.dtype
    nodes, _, s = quadrature(krylov)
    tiny = float(jnp.finfo(nodes.dtype).eps) ** 2 * krylov.unit
    nodes = jnp.maximum(jnp.concatenate([nodes, krylov.alpha[:1].T], axis=1), tiny)
    differences = divided_differences(jnp.log, nodes)

    basis = krylov.basis.transpose(1, 2, 0)
    images = factors.inverse_root(of_lanczos).reshape(n, p, q)
    inner = einsum("npa,npb->pab", jnp.conj(basis), images)
    s = s.astype(dtype)
    h = einsum("pai,pab,pbj->pij", s, inner, s)
    first = s[:, 0, :]
    inside = einsum("pai,pij,pj->pa", s, differences[:, :q, :q].astype(dtype) * h, first)
    outward = einsum("paj,pj->pa", s, differences[:, q, :q].astype(dtype) * first)
    inside = inside - einsum("pab,pb->pa", inner, outward)
    outward = outward.at[:, 0].add(-control_variate_weight.astype(dtype))
    along = einsum("npa,pa->np", basis, inside) + einsum("npa,pa->np", images, outward)
    length = jnp.sqrt(square_norms(run.probes)).astype(dtype)

    # As w_2 is normalised, its form contributes only the difference from its mean.
    root = factors.root.astype(dtype)[:, None]
    mean = jnp.sum(jnp.conj(outside) * of_outside, axis=0) / square_norms(root * outside)
    beyond = factors.outside(of_outside / root - mean * root * outside)
    return along * length + (control_variate_weight / jnp.sqrt(factors.mu)).astype(dtype) * beyond


def _std_err(
    run: PreconditionedQuadrature, weights: LogdetWeights, images: Inexact[Array, "n c"]
) -> Array:
    """The standard error, from dA times all vectors of the weights."""
    n, p = run.probes.shape
    rank, q = run.built.factors.basis.shape[1], run.krylov.alpha.shape[0]
    lanczos = slice(rank, rank + p * q)
    outside = slice(rank + p * q, rank + p * (q + 1))
    cz = _on_probes(run, images[:, lanczos], weights.vectors[:, outside], images[:, outside])
    unit = scale_of(cz)
    cz = cz / unit.astype(cz.dtype)
    mean = jnp.mean(jnp.sum(jnp.conj(run.probes) * cz, axis=0).real)
    spread = jnp.mean(square_norms(cz - (mean / n).astype(cz.dtype) * run.probes))
    c = n / (n + 1) if jnp.iscomplexobj(cz) else 2 * n / (n + 2)
    return unit * jnp.sqrt(c * spread / p / (1 - c / (n * p)))


@final
class _NoDerivative(AbstractWeights):
    """In the place of weights: only `logdet` has second derivatives."""

    def contract(self, operator):
        """See `AbstractWeights`."""
        raise NotImplementedError(
            "`logdet_directional_derivative` has no derivative. Second derivatives of a "
            "log-determinant are those of `logdet` itself: `jax.hessian`."
        )


@final
class DerivativeEstimator(AbstractEstimator):
    """The derivative of log det A in one direction."""

    direction: lx.TangentLinearOperator
    policy: BudgetPolicy
    smallest: ClassVar[int] = 2

    def check(self, operator):
        """See `AbstractEstimator`."""
        self.policy.check(operator, "A log-determinant")

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""

        def derivative(run):
            weights = weights_of(run)
            images = BlockOperator(self.direction).mm(weights.vectors)
            inner = matmul(adjoint(weights.vectors), images)
            value = jnp.sum(jnp.conj(weights.core) * inner).real
            return value, _std_err(run, weights, images)

        def finish(run):
            return *for_derivative(run, derivative), estimate_from(run).status

        with weights_wanted(True):  # the value is computed from them
            value, std_err, status = self.policy.apply(key, operator, k, finish)
        status = jnp.maximum(status, status_of(value))
        return make_estimate(value, std_err, k, 1, status), _NoDerivative()

    def exact(self, operator):
        """See `AbstractEstimator`."""
        exact = exact_logdet(operator)
        value = exact.weights().contract(self.direction)
        status = jnp.maximum(exact.estimate.status, status_of(value))
        spent = exact.estimate.num_matvecs
        return make_estimate(value, jnp.zeros_like(value), spent, 0, status), _NoDerivative()


def logdet_directional_derivative(
    key: PRNGKeyArray,
    make: Callable[..., lx.AbstractLinearOperator],
    primals: Sequence[PyTree],
    tangents: Sequence[PyTree],
    k: int,
    *,
    preconditioner: AbstractPreconditioner | Literal["auto"] | None = "auto",
) -> Solution:
    r"""A directional derivative of $\log\det A(\theta)$, with its standard error.

    The value is what `jax.jvp` of [`traceax.logdet`][] gives with the same key, budget and
    preconditioner: $\langle G, dA \rangle$, with $E[\langle G, dA \rangle] =
    \mathrm{tr}(A^{-1} dA)$ as far as the quadrature has converged. The standard error comes from
    the same products; a single probe is enough for it.

    !!! Example

        ```python
        def make(length_scale, noise):
            kernel = lx.MatrixLinearOperator(rbf(length_scale), lx.positive_semidefinite_tag)
            return kernel + noise * lx.IdentityLinearOperator(kernel.in_structure())

        primals, tangents = (0.2, 0.1), (1.0, 0.0)
        slope = tr.logdet_directional_derivative(jax.random.key(0), make, primals, tangents, k=120)
        slope.value, slope.std_err
        ```

    Cost: that of [`traceax.logdet`][] and about `k` tangent products.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `make`: a function from the parameters to the operator A, as for [`traceax.logdet`][].
    - `primals`: the parameters, a tuple with one entry for each argument of `make`.
    - `tangents`: the direction, with the structure of `primals`.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `preconditioner`: as for [`traceax.logdet`][].

    **Returns:**

    A [`traceax.Solution`][] whose value is the derivative.

    **Raises:**

    - `TypeError`: for a key, operator, `k` or preconditioner of the wrong type.
    - `ValueError`: for an operator that is not square or not tagged positive semidefinite,
        `k < 1`, or a preconditioner that cannot be built for it.
    - `NotImplementedError`: for a derivative of the derivative.
    """

    def hoisted(*primals: Any):
        return as_operator(make(*primals))

    operator, direction = eqx.filter_jvp(hoisted, tuple(primals), tuple(tangents))
    direction = lx.TangentLinearOperator(operator, direction)
    estimator = DerivativeEstimator(direction, policy_of(preconditioner))
    return solve(logdet_derivative_p, key, operator, k, estimator)

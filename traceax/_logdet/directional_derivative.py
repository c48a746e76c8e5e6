r"""A directional derivative of a log-determinant, with its standard error.

The derivative is <G, dA> (see `weights`). For each probe z this is a constant plus z^H C z, with

    C = L(M)[N] - beta R^{-1} dA R^{-H} + (beta / mu) (I - U U^H) dA (I - U U^H),

where N = R^{-1} dA R^{-H}, and the last term is in scaled coordinates. Its variance (see
`_functions.funm`) is c (||C||_F^2 - tr(C)^2 / n), with ||C||_F^2 = E ||C z||^2. The products that
the derivative takes, dA R^{-H} V and dA w_2, are enough for C z, as far as M is known: on the
Krylov space, where M = V T V^H, T = S Theta S^T. Outside of V, the weights of the nodes say which
eigenvalues M has: a node theta_i with weight w_i stands for n w_i of them, one of which is in V.
So let an eigenvalue outside of V be theta_i with probability o_i ~ max(n w_i - 1, 0), at random.
With W = N V and the divided differences D of the logarithm at Theta,

    L(M)[N] z = ||z|| (V S (D o H) s_1 + sum_i P_i W S (D_i o s_1)),     H = S^T V^H W S,

where P_i projects on the eigenvectors outside of V whose eigenvalue is theta_i. The mean of the
squared norm of this sum is sum_i o_i ||(I - V V^H) W S (D_i o s_1)||^2: that of the mean vector,
and the scatter of the others about it. (With one eigenvalue T_11, the mean of all, in the place of
theta_i, the standard error was up to twice too small: most eigenvalues of a kernel are below it.)

The quadrature error is that of ||z||^2 s_1^H (D o H) s_1, the form of L(M)[N], after fewer steps:
see `_functions.funm`.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree, Real

from .._core.estimate import scale_of, status_of, weights_wanted
from .._core.precision import einsum
from .._core.primitive import logdet_derivative_p
from .._estimators.estimator import AbstractEstimator
from .._estimators.solution import Solution
from .._functions.funm import truncation_error, truncations
from .._functions.nodes import divided_differences
from .._functions.quadrature_error import entries_status, solve_pair, with_quadrature_error
from .._linalg.lanczos import positive_quadrature
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._sketch.leave_one_out import adjoint, matmul, square_norms
from .._sketch.weights import AbstractWeights
from .budget_policy import BudgetPolicy, PreconditionedQuadrature, policy_of
from .estimator import estimate_from, exact_logdet
from .fallback import budget_or_all, check_fallback
from .preconditioners import AbstractPreconditioner
from .weights import LogdetWeights, weights_of


def _taken(x: Array, places: Array, used: Array, axis: int) -> Array:
    """Entries along an axis; 0 for those that are not used."""
    places = jnp.where(used, places, x.shape[axis])
    return jnp.take(x, places, axis=axis, mode="fill", fill_value=0)


def _on_probes(
    run: PreconditionedQuadrature, vectors: Inexact[Array, "n c"], images: Inexact[Array, "n c"]
) -> tuple[Inexact[Array, "n p"], Real[Array, " p"], Real[Array, ""]]:
    """C z, from the vectors of the weights, and from dA times them: its mean, and the mean squared
    distance from it; and the quadrature error of the derivative (see above).
    """
    factors, control_variate_weight, krylov = (
        run.built.factors,
        run.built.control_variate_weight,
        run.krylov,
    )
    n, dtype = vectors.shape[0], vectors.dtype
    q, most = krylov.alpha.shape
    rank, probes, steps = run.numbers
    shorter, orders = truncations(krylov)
    nodes, node_weights, s = positive_quadrature(shorter, [each.steps for each in run.plans])
    differences, s = divided_differences(jnp.log, nodes).astype(dtype), s.astype(dtype)
    node_weights = node_weights[:most]
    shares = jnp.maximum(n * node_weights - 1, 0)
    total = jnp.sum(shares, axis=1, keepdims=True)
    shares = (shares / jnp.where(total > 0, total, 1)).astype(dtype)  # the o_i

    probe, step = jnp.arange(most), jnp.arange(q)
    places, used = step * probes + probe[:, None], (step < steps) & run.in_use[:, None]
    basis = jnp.moveaxis(_taken(krylov.basis, places, used, 0), 2, 0)
    of_lanczos = _taken(images, rank + places, used, 1).reshape(n, most * q)
    images_of_basis = factors.inverse_root(of_lanczos).reshape(n, most, q)
    first = rank + probes * steps
    outside, of_outside = (_taken(x, first + probe, run.in_use, 1) for x in (vectors, images))
    inner = einsum("npa,npb->pab", jnp.conj(basis), images_of_basis)
    h = differences * einsum("pai,pab,pbj->pij", s, jnp.tile(inner, (orders, 1, 1)), s)
    forms = einsum("pi,pij,pj->p", s[:, 0, :], h, s[:, 0, :]).real.reshape(orders, most)
    error = truncation_error(forms, krylov.exhausted | ~run.in_use)
    error = n * error * jnp.asarray(most / probes, error.dtype)

    # The other orders were for the quadrature error alone.
    s, h, differences = s[:most], h[:most], differences[:most]
    first = s[:, 0, :]
    inside = einsum("pai,pij,pj->pa", s, h, first)
    each = einsum("paj,pij,pj->pia", s, differences, first)
    outward = einsum("pi,pia->pa", shares, each)
    inside = inside - einsum("pab,pb->pa", inner, outward)
    beyond_basis = images_of_basis - einsum("npa,pab->npb", basis, inner)
    gram = einsum("npa,npb->pab", jnp.conj(beyond_basis), beyond_basis)
    each = each - outward[:, None]
    scatter = einsum("pi,pia,pab,pib->p", shares, jnp.conj(each), gram, each).real
    outward = outward.at[:, 0].add(-control_variate_weight.astype(dtype))
    along = einsum("npa,pa->np", basis, inside) + einsum("npa,pa->np", images_of_basis, outward)
    length = jnp.sqrt(square_norms(run.probes)).astype(dtype)

    # As w_2 is normalised, its form contributes only the difference from its mean.
    root = factors.root.astype(dtype)[:, None]
    size = jnp.where(run.in_use, square_norms(root * outside), 1)
    mean = jnp.sum(jnp.conj(outside) * of_outside, axis=0) / size
    beyond = factors.outside(of_outside / root - mean * root * outside)
    known = (control_variate_weight / jnp.sqrt(factors.mu)).astype(dtype) * beyond
    return along * length + known, scatter * jnp.square(length.real), error


def _errors(
    run: PreconditionedQuadrature, weights: LogdetWeights, images: Inexact[Array, "n c"]
) -> tuple[Array, Array]:
    """The standard error and the quadrature error, from dA times all vectors of the weights."""
    n, p = run.probes.shape[0], run.numbers.probes
    cz, scatter, error = _on_probes(run, weights.vectors, images)
    unit = scale_of(cz)
    cz = cz / unit.astype(cz.dtype)
    count = jnp.asarray(p, unit.dtype)
    mean = jnp.sum(jnp.conj(run.probes) * cz).real / count
    deviations = square_norms(cz - (mean / n).astype(cz.dtype) * run.probes)
    spread = jnp.sum(deviations + scatter / unit / unit) / count
    c = n / (n + 1) if jnp.iscomplexobj(cz) else 2 * n / (n + 2)
    return unit * jnp.sqrt(c * spread / count / (1 - c / (n * count))), error


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
    """The derivative of log det A in one direction, and its quadrature error."""

    direction: lx.TangentLinearOperator
    policy: BudgetPolicy
    smallest: ClassVar[int] = 2

    def check(self, operator):
        """See `AbstractEstimator`."""
        self.policy.check(operator, "A log-determinant")

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        with weights_wanted(True):  # the value is computed from them
            run = self.policy.apply(key, operator, k)
        weights = weights_of(run.for_derivative)
        images = BlockOperator(self.direction).mm(weights.vectors)
        inner = matmul(adjoint(weights.vectors), images)
        value = jnp.sum(jnp.conj(weights.core) * inner).real
        std_err, error = _errors(run.for_derivative, weights, images)
        status = jnp.maximum(estimate_from(run).status, status_of(value))
        status = entries_status(value, error, std_err, status)
        # The mean of p squared norms ||C z||^2 scatters at most as that of p squares (rank one).
        dof = jnp.asarray(run.for_derivative.numbers.probes, value.dtype)
        return with_quadrature_error(value, error, std_err, k, dof, status), _NoDerivative()

    def exact(self, operator):
        """See `AbstractEstimator`."""
        exact = exact_logdet(operator)
        value = exact.weights().contract(self.direction)
        status = jnp.maximum(exact.estimate.status, status_of(value))
        spent = exact.estimate.num_matvecs
        zero = jnp.zeros_like(value)
        return with_quadrature_error(value, zero, zero, spent, 0, status), _NoDerivative()


def logdet_directional_derivative(
    key: PRNGKeyArray,
    make: Callable[..., lx.AbstractLinearOperator],
    primals: Sequence[PyTree],
    tangents: Sequence[PyTree],
    k: int,
    *,
    preconditioner: AbstractPreconditioner | Literal["auto"] | None = "auto",
    fallback: Literal["exact"] | None = "exact",
) -> Solution:
    r"""A directional derivative of $\log\det A(\theta)$, with its standard error.

    The value is what `jax.jvp` of [`traceax.logdet`][] gives with the same key, budget and
    preconditioner: $\langle G, dA \rangle$, with $E[\langle G, dA \rangle] =
    \mathrm{tr}(A^{-1} dA)$ as far as the quadrature has converged. The standard error comes from
    the same products; a single probe is enough for it. Where the recurrences have not converged it
    is too large, by up to five times as measured. What ending them early does to the value is the
    `quadrature_error`, and the result is not `successful` where that dwarfs everything else.

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
    - `preconditioner`: as for [`traceax.logdet`][], but not one that was built before.
    - `fallback`: as for [`traceax.logdet`][].

    **Returns:**

    A [`traceax.Solution`][] whose value is the derivative.

    **Raises:**

    - `TypeError`: for a key, operator, `k` or preconditioner of the wrong type.
    - `ValueError`: for an operator that is not square or not tagged positive semidefinite,
        `k < 1`, another `fallback`, or a preconditioner that cannot be built for it.
    - `NotImplementedError`: for a derivative of the derivative.
    """
    check_fallback(fallback)
    for name, values in (("primals", primals), ("tangents", tangents)):
        if not isinstance(values, tuple | list):
            raise TypeError(
                f"{name} must be a tuple with an entry for each argument of `make`, got a "
                f"{type(values).__name__}: write `({name},)` for one argument."
            )
        for leaf in jtu.tree_leaves(values):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                raise TypeError(
                    f"{name} must be floating-point numbers, got {leaf!r}: a derivative along "
                    "integers does not exist. Write 1.0 rather than 1."
                )

    def hoisted(*primals: Any):
        return as_operator(make(*primals))

    operator, direction = eqx.filter_jvp(hoisted, tuple(primals), tuple(tangents))
    direction = lx.TangentLinearOperator(operator, direction)
    policy = policy_of(preconditioner, operator)
    k = budget_or_all(operator, k, fallback if policy.auto else None)
    estimator = DerivativeEstimator(direction, policy)
    return solve_pair(logdet_derivative_p, key, operator, k, estimator, throw=False)

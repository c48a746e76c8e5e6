"""The log-determinant of a positive definite operator: the function that users call."""

from typing import ClassVar, Literal, final

import jax.numpy as jnp
import lineax as lx
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from .._core.primitive import logdet_p
from .._estimators.estimator import AbstractEstimator, check_key, solve
from .._estimators.solution import Solution
from .._functions.spectral import spectral_sum
from .._operators.known_parts import split_shift
from .._sketch.low_rank import BuiltPreconditioner
from .estimator import estimate_from, exact_logdet, logdet_of_diagonal
from .held import Held
from .preconditioners import AbstractPreconditioner
from .run import Policy, check_budget_alone, check_fallback, policy_of, run_of
from .weights import weights_of


@final
class LogdetEstimator(AbstractEstimator):
    """The log-determinant."""

    policy: Policy
    smallest: ClassVar[int] = 2
    weights_depend_on_operator: ClassVar[bool] = True
    label = "logdet"  # pyright: ignore

    def size(self, operator):
        """See `AbstractEstimator`."""
        return 0 if split_shift(operator).rest is None else operator.in_size()

    def check(self, operator):
        """See `AbstractEstimator`."""
        self.policy.check(operator, "A log-determinant")

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        built = self.policy.preconditioner
        if isinstance(built, BuiltPreconditioner):
            estimate, held_weights, _ = Held(built, operator).log_det(key, k)
            return estimate, held_weights() if weights else None
        run = run_of(key, operator, k, self.policy, weights=weights)
        made = weights_of(run.preparation.built, run.sums) if weights else None
        return self.policy.judged(estimate_from(run)), made

    def exact(self, operator):
        """See `AbstractEstimator`."""
        parts = split_shift(operator)
        if parts.rest is None:
            return logdet_of_diagonal(parts.exact)
        exact = exact_logdet(operator)
        return exact.estimate, exact.weights()


def logdet(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    max_k: int | None = None,
    shifts: ArrayLike | None = None,
    preconditioner: AbstractPreconditioner | BuiltPreconditioner | Literal["auto"] | None = "auto",
    fallback: Literal["exact"] | None = "exact",
    throw: bool = False,
) -> Solution:
    r"""Estimate $\log\det A$ of a positive definite operator, such as $K + s I$.

    $\log\det A = \log\det P + \mathrm{tr} \log(P^{-1/2} A P^{-1/2})$ with a preconditioner P, by
    stochastic Lanczos quadrature. A diagonal part (`K + s I`, `K + D`) is read off. With a
    [`traceax.BuiltPreconditioner`][] the value, for a fixed key, is a smooth function of the
    operator, and the first derivative is exactly that of this function; else derivatives of every
    order are unbiased as far as the quadrature has converged.

    Cost: at most `k` matvecs (first derivatives: as many tangent products); some six blocks of
    `n x k` numbers; about `30 n k^2` operations. With `k >= n` the value is exact: n matvecs (none
    if the entries are stored) and a Cholesky factorisation.

    !!! Example

        ```python
        kernel = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        identity = lx.IdentityLinearOperator(kernel.in_structure())
        solution = tr.logdet(jax.random.key(0), kernel + noise * identity, k=120)
        solution.value, solution.std_err, solution.quadrature_error
        ```

    **Arguments:**

    - `key`: a random key.
    - `operator`: a lineax operator with `n` rows, between any PyTrees, real or complex, tagged
        positive semidefinite; or a sum of such an operator and diagonal ones.
    - `k`: the budget of matvecs, a static Python int.
    - `rtol`, `atol`, `max_k`: a tolerance in the place of a budget, as for [`traceax.trace`][].
    - `shifts`: numbers s: values are those of A + s I for all of them, from one set of products,
        without a preconditioner ([`traceax.spectral_sum`][]).
    - `preconditioner`: `"auto"`, a [`traceax.NystromPreconditioner`][], a
        [`traceax.KernelPreconditioner`][], a [`traceax.RPCholeskyPreconditioner`][], a
        [`traceax.BuiltPreconditioner`][], or None.
    - `fallback`: `"exact"`: with `preconditioner="auto"` and a budget of at least n/6 the value is
        exact, without products, if the operator knows its entries. None: it is not.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] with two errors: `std_err` of the probes, and `quadrature_error` of
    ending the recurrence early and of rounding. The value is NaN if the operator is found not to be
    positive definite (`outside_domain`) or Hermitian (`not_symmetric`). The result is
    `not_converged` if the quadrature error exceeds four standard errors, 5 % of the value, and 1.
    `stats["columns"]` is the number of columns that were read.

    **Raises:**

    - `TypeError`, `ValueError`: for arguments that do not fit.
    - `NotImplementedError`: for second derivatives with a preconditioner that was built before.

    ??? cite "References"

        A. Cortinovis, P. Toni, 2026, arXiv:2601.05778; Z. Frangella, J. A. Tropp, M. Udell, 2023,
        arXiv:2110.02820; the derivative of the logarithm: arXiv:2605.12801.
    """
    tolerance = {"rtol": rtol, "atol": atol, "max_k": max_k}
    if shifts is not None:
        check_fallback(fallback)
        if preconditioner is not None and preconditioner != "auto":
            raise ValueError(
                "Log-determinants for several shifts share a Krylov space of A, which a "
                f"preconditioner would change, got {type(preconditioner).__name__}: leave "
                "`preconditioner` out, or make one call for each shift."
            )
        check_budget_alone("`logdet` with several shifts", tolerance)
        return spectral_sum(key, jnp.log, operator, k, shifts=shifts, throw=throw)  # pyright: ignore[reportArgumentType]
    check_key(key)  # of a call without one, k is missing, too
    given = "logdet", operator, k, preconditioner, fallback
    policy, budget = policy_of(*given, **tolerance)
    return solve(logdet_p, key, operator, budget, LogdetEstimator(policy), throw=throw)

"""The log-determinant of a positive definite operator: the estimator, and the function that users
call. `_spending` says how it is estimated, `_logdet_weights` how it is differentiated.
"""

import math
from typing import ClassVar, Literal, final

import jax.numpy as jnp
import lineax as lx
from jaxtyping import PRNGKeyArray

from ._estimate import NONFINITE, OUTSIDE_DOMAIN, Estimate, scale_of, status_of
from ._estimator import AbstractEstimator
from ._linalg import cholesky, solve_upper_adjoint
from ._logdet_weights import ExactLogdetWeights, weights_of
from ._operator import BlockOperator
from ._precondition import AbstractPreconditioner
from ._quadrature_error import solve_pair, with_quadrature_error
from ._sketch import adjoint, matmul, square_norms
from ._solution import Solution
from ._spending import Run, Spending, for_derivative, spending_of


def estimate_from(run: Run) -> Estimate:
    """The value and its errors."""
    factors, bounds, krylov = run.built.factors, run.bounds, run.krylov
    n, eps = run.block.n, run.block.eps
    # Products are good to eps times the largest eigenvalue, which the root of P divides by mu.
    # Such errors are as good as random, and mostly cancel in the trace.
    top = jnp.max(factors.eigenvalues, initial=0.0) / factors.mu
    largest = jnp.maximum(top, jnp.max(krylov.alpha + krylov.beta))
    rounding = eps * largest / jnp.maximum(bounds.smallest, eps)
    lost = ~((bounds.smallest > 0) & (rounding < 0.5))
    status = jnp.where((run.status != NONFINITE) & lost, OUTSIDE_DOMAIN, run.status)
    value = factors.log_det() + bounds.value
    error = bounds.error + math.sqrt(n) * rounding
    return with_quadrature_error(
        value, error, bounds.std_err, run.spent, run.probes.shape[1], status
    )


@final
class LogdetEstimator(AbstractEstimator):
    """The log-determinant. Its value is the pair of the value, which alone has a derivative, and
    the quadrature error.
    """

    spending: Spending
    smallest: ClassVar[int] = 2
    weights_move: ClassVar[bool] = True

    def check(self, operator):
        """See `AbstractEstimator`."""
        self.spending.check(operator, "A log-determinant")

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""

        def finish(run):
            return estimate_from(run), for_derivative(run, weights_of)

        return self.spending.spend(key, operator, k, finish)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        n = block.n
        eye = jnp.eye(n, dtype=block.dtype)
        matrix = block.mm(eye)
        scale = scale_of(matrix)
        scaled = (matrix + adjoint(matrix)) / (2 * scale)
        factor = cholesky(scaled)
        diagonal = jnp.square(jnp.diagonal(factor).real)
        rounding = block.eps * jnp.sqrt(jnp.max(square_norms(scaled)))
        lost = ~(jnp.min(diagonal) > 2 * rounding)  # also where the factor is NaN
        status = status_of(matrix)
        status = jnp.where((status != NONFINITE) & lost, OUTSIDE_DOMAIN, status)
        value = jnp.sum(jnp.log(diagonal)) + n * jnp.log(scale)
        zero = jnp.zeros_like(value)
        half = solve_upper_adjoint(factor, eye)
        weights = ExactLogdetWeights(matmul(adjoint(half), half) / scale)
        return with_quadrature_error(value, zero, zero, n, 0, status), weights


def logdet(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int,
    *,
    preconditioner: AbstractPreconditioner | Literal["auto"] | None = "auto",
    throw: bool = False,
) -> Solution:
    r"""Estimate $\log\det A$ of a positive definite operator, such as $K + s I$.

    $\log\det A = \log\det P + \mathrm{tr} \log(P^{-1/2} A P^{-1/2})$ with a preconditioner P of low
    rank plus a multiple of the identity, and stochastic Lanczos quadrature for the second term,
    which is small where P is good. A diagonal part that the operator is written with (`K + s I`,
    `K + D`) is read off; otherwise the smallest eigenvalue is estimated.

    The budget is divided by what the products themselves reveal (also under `jit`; under `vmap`
    all plans are computed, and the right ones picked). With t(l) the mean eigenvalue of what a
    Nystrom approximation of rank l leaves out of K:

    1. k/6 products (at least 16, if that is less than k/3). If t has hardly fallen from half of
        this rank to all of it (by less than 16 %), low rank does not pay, and the rest goes to
        $\lfloor\sqrt{k} / 2\rfloor$ probes with as many steps as there are.
    2. Otherwise the rank grows to 2k/3. If t is not yet small relative to s, the rest goes to k/24
        probes with 8 steps each.
    3. If t(l) / s, extrapolated to the full budget, is below 1/3 and that promises the smaller
        error, the rank grows to 11k/12, and k/60 probes (at least one) take 5 steps.

    There are two errors: `std_err`, of the random probes, and `quadrature_error`, of ending
    Lanczos' recurrence early, which is a bound where K is tagged semidefinite and s is written
    down.

    First derivatives, in forward and reverse mode, are unbiased as far as the quadrature has
    converged (where `quadrature_error` exceeds `std_err`, theirs is likely biased as well), and
    their variance goes to 0 with the rank of P. They cost about `k` tangent products. Second (and
    higher) derivatives are as good; for every direction they take another `k` tangent products,
    and a solve with A for each by conjugate gradients, with P as its preconditioner.

    !!! Example

        ```python
        kernel = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        identity = lx.IdentityLinearOperator(kernel.in_structure())
        solution = tr.logdet(jax.random.key(0), kernel + noise * identity, k=120)
        solution.value, solution.std_err, solution.quadrature_error
        ```

    Cost: at most `k` matvecs; some six blocks of `n x k` numbers; about `30 n k^2` operations. With
    `k >= n`, n matvecs and a Cholesky factorisation: the value is exact.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a lineax operator with `n` rows, between any PyTrees, real or complex, tagged
        positive semidefinite; or a sum of such an operator and diagonal ones.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `preconditioner`: `"auto"`, a [`traceax.NystromPreconditioner`][], a
        [`traceax.RPCholeskyPreconditioner`][] (whose remaining budget goes to probes with 10 steps
        each), or None for plain stochastic Lanczos quadrature.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] with a real value and with a `quadrature_error`. Its result is
    `outside_domain`, and the value NaN, if the operator is not positive definite to rounding: if it
    is indefinite in fact, or so nearly singular that the precision does not suffice.

    **Raises:**

    - `TypeError`: for a key, operator, `k` or preconditioner of the wrong type.
    - `ValueError`: for an operator that is not square or not tagged positive semidefinite,
        `k < 1`, or a preconditioner that cannot be built for this operator.

    ??? cite "References"

        A. Cortinovis, P. Toni, 2026, arXiv:2601.05778; Z. Frangella, J. A. Tropp, M. Udell,
        *Randomized Nystrom preconditioning*, 2023, arXiv:2110.02820; Y. Chen, E. N. Epperly,
        J. A. Tropp, R. J. Webber, *Randomly pivoted Cholesky*, 2024, arXiv:2207.06503. The
        derivative of the logarithm: arXiv:2605.12801. `traceax/_logdet.py` derives the rest.
    """
    estimator = LogdetEstimator(spending_of(preconditioner))
    return solve_pair(key, operator, k, estimator, throw)

"""The log-determinant of a positive definite operator: the function that users call."""

from typing import Any, Literal

import jax.numpy as jnp
import lineax as lx
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from .._core.primitive import logdet_p
from .._estimators.solution import Solution
from .._functions.quadrature_error import solve_pair
from .._functions.spectral import spectral_sum
from .._sketch.low_rank import BuiltPreconditioner
from .budget_policy import policy_of
from .estimator import LogdetEstimator
from .fallback import budget_or_all, check_fallback, check_no_tolerance
from .held import HeldLogdetEstimator
from .preconditioners import AbstractPreconditioner


def logdet(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    atol: None = None,
    shifts: ArrayLike | None = None,
    preconditioner: AbstractPreconditioner | BuiltPreconditioner | Literal["auto"] | None = "auto",
    fallback: Literal["exact"] | None = "exact",
    throw: bool = False,
) -> Solution:
    r"""Estimate $\log\det A$ of a positive definite operator, such as $K + s I$.

    $\log\det A = \log\det P + \mathrm{tr} \log(P^{-1/2} A P^{-1/2})$ with a preconditioner P of low
    rank plus a multiple of the identity, and stochastic Lanczos quadrature for the second term,
    which is small if P is good. If the operator is written with a diagonal part (`K + s I`,
    `K + D`), that is read off; otherwise the smallest eigenvalue is estimated.

    The products themselves decide how the budget is divided (also under `jit`; under `vmap` each
    lane divides its own, and products are made until the slowest lane is done). Let t(l) be the
    mean eigenvalue of the part of K that a Nystrom approximation of rank l leaves out.

    1. A sketch takes k/6 products (at least 16, or k/3 if that is less). If t has hardly fallen
        from half of this rank to all of it (by less than 16 %), low rank does not pay, and the rest
        goes to $\lfloor\sqrt{k} / 2\rfloor$ probes with as many steps as that allows. The exception
        is a flat spectrum with an end that the budget reaches (features and noise), which the
        angles between what is left out of the probes tell.
    2. Otherwise the rank grows to 2k/3. If t is not yet small relative to s, the rest goes to k/24
        probes with 8 steps each.
    3. If t(l) / s, extrapolated to the full budget, is below 1/3 and promises a smaller error than
        at 2k/3, or if that rank reaches the end, the rank grows to 11k/12, and k/60 probes (at
        least one) take 5 steps.

    *Where columns cost no product* (dense matrices and kernels, see [`traceax.extend.columns`][]) P
    comes from columns, by randomly pivoted Cholesky factorisation, until the mean of what is left
    of the diagonal is rounding beside s (below $\sqrt{\epsilon}\, s$), or the rank is
    $\sqrt{n k / 5}$ (from 128 to 768: it then takes about as long as the products). If the matrix
    itself contains the noise, s is estimated from up to 128 columns of it; written as `K + s I` it
    is known, and the error smaller. All products are left for probes, with 3 to 30 steps each, as
    the condition number of $P^{-1} A$ asks for. `stats["columns"]` is the number of columns that
    were read.

    *With a preconditioner that was built before* (a [`traceax.BuiltPreconditioner`][]) all of the
    budget goes to probes with about $\sqrt{k} / 2$ steps each, and the value is Gauss quadrature
    alone. For a fixed key it is a smooth function of the operator, and the first derivative is
    exactly that of this function, as line searches (L-BFGS) need it. There are no second
    derivatives. The other modes are for Adam and expectations: see below, and "Two derivatives" in
    the documentation.

    There are two errors: `std_err` comes from the random probes, and `quadrature_error` from ending
    Lanczos' recurrence early. The latter is a bound if K is tagged semidefinite and the operator is
    written with its diagonal part (unless K itself contains far more noise). The quadrature error
    of an exact value is that of rounding, $4 \epsilon \sum_i A_{ii} / L_{ii}^2$ with the Cholesky
    factor L, and $\epsilon (4 n + |\log\det A|)$: in float32 with little noise it is about a nat
    for n = 1000.

    First derivatives, in forward and reverse mode, are unbiased as far as the quadrature has
    converged (if `quadrature_error` exceeds `std_err`, they are likely biased as well), and their
    variance goes to 0 with growing rank of P. They cost about `k` tangent products,
    and no further ones. Second (and
    higher) derivatives are as good; for every direction they take another `k` tangent products,
    and for each of these a solve with A by conjugate gradients, with the preconditioner P.

    !!! Example

        ```python
        kernel = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        identity = lx.IdentityLinearOperator(kernel.in_structure())
        solution = tr.logdet(jax.random.key(0), kernel + noise * identity, k=120)
        solution.value, solution.std_err, solution.quadrature_error
        ```

    *With shifts* the values are log det(A + s I) for all of them, from one set of products, by
    Krylov-aware quadrature without a preconditioner ([`traceax.spectral_sum`][] with `jnp.log`,
    whose errors and first derivatives, also by the shifts, these are): for the noise of a Gaussian
    process, or the prior precision of a Laplace approximation, as a curve. A single value, and its
    second derivatives, are better without. The operator need only be Hermitian, and A + s I
    positive definite.

    !!! Example

        ```python
        noise = jnp.logspace(-3, 0, 20)
        curve = tr.logdet(jax.random.key(0), kernel, k=120, shifts=noise)
        curve.value, curve.std_err, curve.quadrature_error  # arrays of the shape of the shifts
        ```

    Cost with a budget: at most `k` matvecs; some six blocks of `n x k` numbers; about `30 n k^2`
    operations. With `k >= n`, n matvecs (none if the entries are stored) and a Cholesky
    factorisation: the value is exact.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a lineax operator with `n` rows, between any PyTrees, real or complex, tagged
        positive semidefinite; or a sum of such an operator and diagonal ones.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `atol`: None. (A tolerance is not available yet.)
    - `shifts`: numbers s, a real array of any shape: the value is then log det(A + s I) for each of
        them. They need not be static. Without a preconditioner only.
    - `preconditioner`: `"auto"`, a [`traceax.NystromPreconditioner`][], a
        [`traceax.RPCholeskyPreconditioner`][] (whose remaining budget goes to probes with 10 steps
        each), a [`traceax.BuiltPreconditioner`][], or None for plain stochastic Lanczos quadrature.
        With shifts `"auto"` or None, which mean the same.
    - `fallback`: `"exact"` (the default) or None. With `preconditioner="auto"` and a budget of at
        least n/6, the exact value takes no more operations than the products, if the operator
        knows its entries (a dense matrix, or a kernel of at most 16,384 points): it is then
        returned, with a standard error of 0 and without products.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] with a real value and with a `quadrature_error` (of the shape of the
    shifts, if there are any). Its result is `outside_domain`, and the value NaN, if the operator is
    found not to be positive definite to rounding: indefinite in fact, or so nearly singular that
    the precision does not suffice. With `k >= n` this is certain to be found. Smaller budgets find
    it by a Ritz value of the probes, or of the preconditioner's sketch, that is not positive.
    Negative eigenvalues that are few, or tiny beside the largest, may remain unseen. The result is
    `not_symmetric`, and the value NaN, if the sketch shows that A is not Hermitian. It is
    `not_converged`, with the best estimate, if the quadrature error exceeds four standard errors,
    5 % of the value, and 1.

    **Raises:**

    - `TypeError`: for a key, operator, `k` or preconditioner of the wrong type.
    - `ValueError`: for an operator that is not square or not tagged positive semidefinite,
        `k < 1`, a preconditioner that cannot be built for this operator, or was built for one of
        another size or dtype, another `fallback`, a tolerance, or shifts with a preconditioner.
    - `NotImplementedError`: for second derivatives with a preconditioner that was built before.

    ??? cite "References"

        A. Cortinovis, P. Toni, 2026, arXiv:2601.05778; Z. Frangella, J. A. Tropp, M. Udell,
        *Randomized Nystrom preconditioning*, 2023, arXiv:2110.02820; Y. Chen, E. N. Epperly,
        J. A. Tropp, R. J. Webber, *Randomly pivoted Cholesky*, 2024, arXiv:2207.06503. The
        derivative of the logarithm: arXiv:2605.12801. `traceax/_logdet/weights.py` derives the
        rest.
    """
    check_fallback(fallback)
    check_no_tolerance(atol)
    if shifts is not None:
        _check_no_preconditioner(preconditioner)
        return spectral_sum(key, jnp.log, operator, k, shifts=shifts, throw=throw)  # pyright: ignore[reportArgumentType]
    if isinstance(preconditioner, BuiltPreconditioner):
        held = HeldLogdetEstimator(lax.stop_gradient(preconditioner))
        return solve_pair(logdet_p, key, operator, k, held, throw)
    policy = policy_of(preconditioner)
    k = budget_or_all(operator, k, fallback if policy.auto else None)
    return solve_pair(logdet_p, key, operator, k, LogdetEstimator(policy), throw)


def _check_no_preconditioner(preconditioner: Any) -> None:
    """Raise a `ValueError` if shifts cannot share their products."""
    if preconditioner is not None and preconditioner != "auto":
        raise ValueError(
            "Log-determinants for several shifts share a Krylov space of A, which a preconditioner "
            f"would change, got {type(preconditioner).__name__}: leave `preconditioner` out, or "
            "make one call for each shift."
        )

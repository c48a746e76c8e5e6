"""Spectral sums, spectral densities and eigenvalue counts: the functions that users call."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, PRNGKeyArray

from .._core.precision import any_promotion
from .._core.primitive import spectral_density_p, spectral_sum_p
from .._estimators.estimator import AbstractEstimator, check_budget, solve
from .._estimators.solution import Solution
from .._estimators.tolerance import check_either
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._operators.tags import is_complex, is_hermitian
from .frechet import constant
from .funm import QuadratureEstimator, check_function, checked_num_steps, hoist_function, plan
from .krylov_aware import LEAST, KrylovAwareEstimator
from .nodes import Function, on_nodes
from .non_hermitian import ArnoldiEstimator
from .sampling import sampled_function


def _real_dtype(operator: lx.AbstractLinearOperator) -> Any:
    return jnp.finfo(BlockOperator(operator).dtype).dtype


def spectral_sum(
    key: PRNGKeyArray,
    fn: Callable[[Array], Array],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    rtol: float | Array | None = None,
    atol: float | Array | None = None,
    max_k: int | None = None,
    shifts: ArrayLike | None = None,
    num_steps: int | None = None,
    throw: bool = False,
) -> Solution:
    r"""Estimate $\mathrm{tr}\, f(A) = \sum_i f(\lambda_i)$ of an operator, or of a Hermitian one
    $\mathrm{tr}\, f(A + s I)$ for many shifts s at once.

    For operators that are tagged Hermitian, a block of random vectors builds a Krylov space, on
    which f(A) is known. A quarter of the vectors in turn is left out, and tests what the space of
    the others leaves of f(A), by no further product. The value has two errors:

    - that of the random probes, with the standard error `std_err`, which is known even from a
        single probe.
    - the bias of ending Lanczos' recurrence. The field `quadrature_error` is an estimate of it,
        usually several times too large. The number of steps that are needed grows with the
        condition number: for functions that are singular at 0 it is about
        $\sqrt{\kappa} / 4 \, \ln(1/\varepsilon)$. Where this error is the larger one, raise `k`,
        or shift or precondition the operator.

    With `num_steps`, and below `k = 16`, it is stochastic Lanczos quadrature alone, by default with
    $\lfloor\sqrt{k} / 3\rfloor$ probes (at least one).

    For all other operators it is the mean over $\lfloor\sqrt{k}\rfloor$ probes z (unless
    `num_steps` is given) of $z^H f(A) z$ by Arnoldi's recurrence, with the same two errors. f must
    then be holomorphic, on the field of values of A and a little beyond: exponentials, polynomials
    and other entire functions always are, and converge at a rate that only the norm of A decides.
    The Hessenberg matrices may be defective: functions of them are exact to some 1e-10 (5e-5 in
    single precision). A function that is holomorphic only in parts of the plane, as
    `jnp.maximum(x, 0)` is, is not noticed.

    First derivatives, in forward and reverse mode, are taken with the probes held fixed, and
    converge as the value does. With respect to what the operator depends on they cost
    `k` tangent products in one block; they are also taken with respect to the arrays
    that `fn` closes over, and to `shifts`. Second derivatives are refused. f must be differentiable
    at the eigenvalues: derivatives of the root of a singular operator are NaN. Take
    $\sqrt{x + \varepsilon}$, or [`traceax.schatten_norm`][], which has subgradients.

    !!! Example

        ```python
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        solution = tr.spectral_sum(jax.random.key(0), jnp.log, operator, k=120)  # log det
        solution.value, solution.std_err, solution.quadrature_error

        noise = jnp.logspace(-3, 0, 20)  # log det(A + s I) for 20 values of s, by the same products
        tr.spectral_sum(jax.random.key(0), jnp.log, operator, k=120, shifts=noise).value
        ```

    Cost: at most `k` matvecs, in blocks; `k n` numbers for the Krylov bases; about `5 n k^2`
    operations, and `8 n k num_steps` with `num_steps`. Every shift costs some `k^3` operations
    more, and no product. With `k >= n`, n matvecs and an eigendecomposition: `n x n` numbers and
    some `10 n^3` operations. For operators that are not Hermitian, `k n` numbers and
    `8 n k num_steps` operations, and with `k >= n` some `25 n^3`.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `fn`: a JAX function of one real number with real values, such as `jax.numpy.log`. It is
        applied to (approximate) eigenvalues, all of which lie within the spectrum. If the operator
        is not Hermitian: a holomorphic function of one complex number, such as `jax.numpy.exp`.
    - `operator`: a lineax operator with `n` rows, between any PyTrees. If it is Hermitian, say so
        by a tag (symmetric, if real, or positive or negative semidefinite): the same products then
        give a smaller error.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `rtol`, `atol`, `max_k`: a tolerance in the place of a budget, for operators that are tagged
        Hermitian: as of [`traceax.trace`][]. Both errors together are then within it.
    - `shifts`: numbers s, a real array of any shape: the value is then tr f(A + s I) for each of
        them. They need not be static.
    - `num_steps`: the number of steps for each probe, a static Python int, at most `k`. The number
        of probes is then `k // num_steps`.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] with a real value and with a `quadrature_error`, which have the shape
    of `shifts`. The value is complex if the operator is complex and not tagged Hermitian, or if it
    is not Hermitian and `fn` has complex values for real numbers. If f is not finite at a Ritz
    value (for any of the shifts), or if a value that should be real is not, as for the logarithm
    of a real matrix with negative eigenvalues, the result is `outside_domain` and the value NaN.
    It is `not_converged`, with the best estimate, if the quadrature error exceeds four standard
    errors and 5 % of the value (for all shifts together), for an exact value half of it.

    **Raises:**

    - `TypeError`: for complex shifts, for a function that cannot take the complex numbers that an
        operator asks for, and for a key, function, operator or `k` of the wrong type.
    - `ValueError`: for an operator that is not square, or with `shifts` not tagged Hermitian, for
        an empty array of shifts, `k < 1`, a `num_steps` that is no int from 1 to `k`, or a function
        that does not return a scalar.
    - `NotImplementedError`: for a second derivative.

    ??? cite "References"

        S. Ubaru, J. Chen, Y. Saad, *Fast estimation of tr(f(A)) via stochastic Lanczos quadrature*,
        2017, doi:10.1137/16M1104974. T. Chen, E. Hallman, *Krylov-aware stochastic trace
        estimation*, 2023, arXiv:2205.01736. The derivative:
        arXiv:2605.12801. `traceax/_functions/funm.py` derives both errors,
        `traceax/_functions/krylov_aware.py` the choices, and `traceax/_functions/non_hermitian.py`
        both errors of operators that are not Hermitian.
    """
    check_function(fn)
    operator = as_operator(operator)
    dtype = _real_dtype(operator)
    estimator: AbstractEstimator
    if check_either("spectral_sum", k, rtol, atol, max_k):
        if shifts is not None or num_steps is not None:
            raise ValueError(
                "A tolerance is for one function, and chooses the number of steps. Give a budget k "
                "with `shifts` or `num_steps`."
            )
        given = None, hoist_function(fn, dtype), operator, rtol, atol, max_k
        budget, estimator = sampled_function("spectral_sum", *given)
        return solve(spectral_sum_p, key, operator, budget, estimator, throw=throw)
    budget = check_budget(k, 1, operator.in_size(), "A spectral sum")
    num_steps = checked_num_steps(num_steps, budget)
    if shifts is None and not is_hermitian(operator):
        function = hoist_function(fn, np.result_type(dtype, np.complex64))
        estimator = ArnoldiEstimator(function, num_steps, _is_real(fn, operator))
        return solve(spectral_sum_p, key, operator, budget, estimator, throw=throw)
    function = hoist_function(fn, dtype)
    if shifts is not None:
        function = _shifted(function, shifts, dtype)
    estimator = KrylovAwareEstimator(function)
    if num_steps is not None or budget < LEAST:
        estimator = QuadratureEstimator(function, num_steps, "A spectral sum with `shifts`")
    return solve(spectral_sum_p, key, operator, budget, estimator, throw=throw)


def _is_real(fn: Callable[[Array], Array], operator: lx.AbstractLinearOperator) -> bool:
    """Whether the spectral sum of a holomorphic function is real: whether the operator is, and the
    values of the function for real numbers are.
    """
    with any_promotion():
        at_real = jax.eval_shape(fn, jax.ShapeDtypeStruct((), _real_dtype(operator)))
    return not (is_complex(operator) or jnp.issubdtype(at_real.dtype, jnp.complexfloating))


def _shifted(fn: Function, shifts: ArrayLike, dtype: Any) -> Function:
    """The function x -> f(x + s) for all shifts s."""
    shifts = jnp.asarray(shifts)
    if jnp.issubdtype(shifts.dtype, jnp.complexfloating):
        raise TypeError(
            f"shifts must be real numbers, got an array of {shifts.dtype}. If the imaginary parts "
            "are 0, take the real part."
        )
    if shifts.size == 0:
        raise ValueError(f"shifts has the shape {shifts.shape}: give one number at least.")
    shifts = shifts.astype(dtype)
    return hoist_function(lambda x: on_nodes(fn, x + shifts), dtype, scalar=False)


def spectral_density(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int,
    grid: ArrayLike,
    *,
    width: ArrayLike | None = None,
    num_steps: int | None = None,
    throw: bool = False,
) -> Solution:
    r"""Estimate the density of the eigenvalues of a Hermitian operator, broadened by a Gaussian:

    $$\phi(t) = \frac{1}{n} \sum_i \frac{1}{\sigma \sqrt{2 \pi}}
    \exp\left(-\frac{(t - \lambda_i)^2}{2 \sigma^2}\right), \qquad \int \phi(t) \, dt = 1.$$

    For each point of the grid this is the spectral sum of a Gaussian. All points share the same
    products: see [`traceax.spectral_sum`][] for the errors, derivatives and cost.

    !!! Example

        ```python
        grid = jnp.linspace(-1.0, 5.0, 200)
        density = tr.spectral_density(jax.random.key(0), operator, 100, grid)
        density.value, density.std_err  # arrays of the shape of the grid
        ```

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a Hermitian lineax operator with `n` rows, as for [`traceax.spectral_sum`][].
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `grid`: the points t, a real array of any shape.
    - `width`: the standard deviation $\sigma$ of the Gaussian. By default the extent of the grid
        divided by the number of steps, which is the smallest that the steps resolve if the grid
        spans the spectrum.
    - `num_steps`: the number of steps for each probe, as for [`traceax.spectral_sum`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] whose `value`, `std_err` and `quadrature_error` have the shape of the
    grid. At a point to which only one or two eigenvalues contribute, all probes may have missed
    these eigenvalues, above all at the ends of the spectrum, of which Lanczos' recurrence sees the
    inside ([`traceax.eigenpairs`][] has bounds). The error is then larger than stated, but not on
    average over the grid.

    **Raises:**

    - `TypeError`: for a key, operator or `k` of the wrong type.
    - `ValueError`: for an operator that is not square or not tagged Hermitian, `k < 1`, a
        `num_steps` that is not between 1 and `k`, or no `width` for a grid of a single point.
    - `NotImplementedError`: for a second derivative.

    ??? cite "References"

        L. Lin, Y. Saad, C. Yang, *Approximating spectral densities of large matrices*, 2016,
        doi:10.1137/130934283.
    """
    operator = as_operator(operator)
    dtype, n = _real_dtype(operator), operator.in_size()
    budget = check_budget(k, 1, n, "A spectral density")
    num_steps = checked_num_steps(num_steps, int(k))
    points = jnp.asarray(grid).astype(dtype)
    if width is None:
        if points.size < 2:
            raise ValueError(
                f"A grid of shape {points.shape} has no extent to choose a width from: give the "
                "`width`, or more points."
            )
        # The smallest width that the steps resolve.
        sigma = (jnp.max(points) - jnp.min(points)) / plan(budget, num_steps)[1]
    else:
        sigma = jnp.asarray(width).astype(dtype)

    def gaussian(theta):
        height = 1 / (n * math.sqrt(2 * math.pi) * sigma)
        return height * jnp.exp(-jnp.square((points - theta) / sigma) / 2)

    function = hoist_function(gaussian, dtype, scalar=False)
    estimator = QuadratureEstimator(function, num_steps, "A spectral density")
    return solve(spectral_density_p, key, operator, budget, estimator, throw=throw)


def eigenvalue_count(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    a: ArrayLike,
    b: ArrayLike,
    k: int,
    *,
    num_steps: int | None = None,
    throw: bool = False,
) -> Solution:
    r"""Estimate how many eigenvalues of a Hermitian operator lie in the interval $[a, b]$.

    This is the spectral sum of a function that is 1 in the interval and 0 elsewhere; see
    [`traceax.spectral_sum`][] for the errors and the cost. The `quadrature_error` is a bound, by
    the inequalities of Chebyshev, Markov and Stieltjes, and falls only like `n / num_steps`: a
    count is accurate where few eigenvalues lie near `a` and `b`. Eigenvalues that are as close to
    `a` or `b` as rounding errors are counted, and their number is part of the errors. The
    derivative of a count is 0.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a Hermitian lineax operator with `n` rows, as for [`traceax.spectral_sum`][].
    - `a`: the lower end of the interval, which may be `-inf`.
    - `b`: the upper end of the interval, which may be `inf`.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `num_steps`: the number of steps for each probe, as for [`traceax.spectral_sum`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] with a real value and with a `quadrature_error`.

    **Raises:**

    - `TypeError`: for a key, operator or `k` of the wrong type.
    - `ValueError`: for an operator that is not square or not tagged Hermitian, `a > b`, `k < 1`, or
        a `num_steps` that is not between 1 and `k`.

    ??? cite "References"

        E. Di Napoli, E. Polizzi, Y. Saad, *Efficient estimation of eigenvalue counts in an
        interval*, 2016, doi:10.1002/nla.2048.
    """
    operator = as_operator(operator)
    traced = any(isinstance(x, jax.core.Tracer) for x in (a, b))
    if not traced and not np.asarray(a) <= np.asarray(b):
        raise ValueError(
            f"The interval [a, b] of an eigenvalue count is empty, got a={a} and b={b}. Give the "
            "smaller end first."
        )
    dtype = _real_dtype(operator)
    check_budget(k, 1, operator.in_size(), "An eigenvalue count")
    num_steps = checked_num_steps(num_steps, int(k))
    lower, upper = (lax.stop_gradient(jnp.asarray(x).astype(dtype)) for x in (a, b))
    step = hoist_function(lambda x: ((x >= lower) & (x <= upper)).astype(dtype), dtype)
    estimator = QuadratureEstimator(step, num_steps, "An eigenvalue count", (lower, upper))
    return solve(spectral_sum_p, key, constant(operator), k, estimator, throw=throw)

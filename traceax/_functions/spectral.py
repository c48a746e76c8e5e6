"""Spectral sums, densities, eigenvalue counts and Schatten norms: the functions that users call."""

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

from .._core.derivatives import constant
from .._core.estimate import power_of
from .._core.precision import any_promotion
from .._core.primitive import compiled_once, spectral_density_p, spectral_sum_p
from .._core.verdict import transformed
from .._estimators.estimator import check_budget, check_either, check_key, estimated
from .._estimators.solution import Solution
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._operators.gram import gram, unit_of
from .._operators.tags import is_complex, is_hermitian
from .._probes.random import split
from .funm import QuadratureEstimator, checked_plan, hermitian_operator, hoist_function, plan
from .krylov_aware import LEAST, KrylovAwareEstimator
from .nodes import Function, on_nodes
from .non_hermitian import ArnoldiEstimator
from .tolerance import with_tolerance


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

    Hermitian operators: a block Krylov space, of which a quarter of the start vectors in turn tests
    what the others leave; with `num_steps`, and below `k = 16`, stochastic Lanczos quadrature.
    Others: Arnoldi's recurrence, for f holomorphic on the field of values and a little beyond.
    `std_err` is the error of random probes, `quadrature_error` the bias of short recurrences, often
    several times too large: where it is larger, raise `k`.

    **Cost:** at most `k` matvecs; `k n` numbers; some `5 n k^2` operations (`8 n k num_steps` with
    `num_steps` or without a tag), and `k^3` for every shift. First derivatives, also with respect
    to `shifts` and to arrays in `fn`, take `k` tangent products.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `fn`: a JAX function of one real number with real values, such as `jax.numpy.log`; of an
        operator without a tag a holomorphic one of a complex number, such as `jax.numpy.exp`.
    - `operator`: a square lineax operator, between any PyTrees; if it is Hermitian, with a tag.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `rtol`, `atol`, `max_k`: a tolerance instead, as of [`traceax.trace`][].
    - `shifts`: numbers s, a real array of any shape, for tr f(A + s I).
    - `num_steps`: the number of products for each probe, a static Python int.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:** a [`traceax.Solution`][], of the shape of `shifts`: `outside_domain` where f is not
    finite at a Ritz value, `not_converged` where the quadrature error exceeds four standard errors
    and 5 % of the value (for an exact value half of it).

    **Raises:** `TypeError`, `ValueError`; `NotImplementedError` for a second derivative.

    **Source:** S. Ubaru, J. Chen, Y. Saad, 2017, doi:10.1137/16M1104974; T. Chen, E. Hallman, 2023,
    arXiv:2205.01736.
    """
    operator = as_operator(operator)
    dtype = _real_dtype(operator)
    estimator: Any
    tolerance = check_either("spectral_sum", k, rtol, atol, max_k)
    if tolerance or shifts is not None:
        operator = hermitian_operator(operator, "A spectral sum with a tolerance or `shifts`")
    if tolerance:
        if shifts is not None or num_steps is not None:
            raise ValueError(
                "A tolerance is for one function, and chooses the number of steps. Give a budget k "
                "with `shifts` or `num_steps`."
            )
        inner = KrylovAwareEstimator(hoist_function(fn, dtype))
        budget, estimator = with_tolerance("spectral_sum", inner, operator, rtol, atol, max_k)
        return estimated(spectral_sum_p, key, operator, budget, estimator, throw=throw)
    budget, num_steps = checked_plan(k, num_steps, operator.in_size(), "A spectral sum")
    if not is_hermitian(operator):
        function = hoist_function(fn, np.result_type(dtype, np.complex64))
        estimator = ArnoldiEstimator(function, num_steps, _is_real(fn, operator))
        return estimated(spectral_sum_p, key, operator, budget, estimator, throw=throw)
    function = hoist_function(fn, dtype)
    if shifts is not None:
        function = _shifted(function, shifts, dtype)
    estimator = KrylovAwareEstimator(function)
    if num_steps is not None or budget < LEAST:
        estimator = QuadratureEstimator(function, num_steps)
    return estimated(spectral_sum_p, key, operator, budget, estimator, throw=throw)


def _is_real(fn: Callable[[Array], Array], operator: lx.AbstractLinearOperator) -> bool:
    """Whether the spectral sum of a holomorphic function is real: operator and function are."""
    with any_promotion():
        at_real = jax.eval_shape(fn, jax.ShapeDtypeStruct((), _real_dtype(operator)))
    return not (is_complex(operator) or jnp.issubdtype(at_real.dtype, jnp.complexfloating))


def _shifted(fn: Function, shifts: ArrayLike, dtype: Any) -> Function:
    """The function x -> f(x + s) for all shifts s."""
    shifts = jnp.asarray(shifts)
    if jnp.issubdtype(shifts.dtype, jnp.complexfloating) or shifts.size == 0:
        raise TypeError(
            f"shifts must be real numbers, at least one, got an array of {shifts.dtype} of shape "
            f"{shifts.shape}. If the imaginary parts are 0, take the real part."
        )
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

    Each point of the grid is the spectral sum of a Gaussian, by stochastic Lanczos quadrature from
    the same products: for errors and derivatives see [`traceax.spectral_sum`][].

    **Cost:** that of [`traceax.spectral_sum`][] with `num_steps`.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a Hermitian lineax operator with `n` rows, as for [`traceax.spectral_sum`][].
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `grid`: the points t, a real array of any shape.
    - `width`: the standard deviation $\sigma$, by default the extent of the grid divided by the
        number of steps: the smallest that steps resolve if the grid spans the spectrum.
    - `num_steps`: the number of steps for each probe, as for [`traceax.spectral_sum`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:** a [`traceax.Solution`][] of the shape of the grid. Where only one or two
    eigenvalues contribute, as at the ends of the spectrum, all probes may have missed them, and the
    error is larger than stated ([`traceax.eigenpairs`][] has bounds).

    **Raises:** those of [`traceax.spectral_sum`][].

    **Source:** L. Lin, Y. Saad, C. Yang, 2016, doi:10.1137/130934283.
    """
    operator = hermitian_operator(operator, "A spectral density")
    dtype, n = _real_dtype(operator), operator.in_size()
    budget, num_steps = checked_plan(k, num_steps, n, "A spectral density")
    points = jnp.asarray(grid).astype(dtype)
    if width is None:
        if points.size < 2:
            raise ValueError(
                f"A grid of shape {points.shape} has no extent to choose a width from. Give the "
                "`width`, or more points."
            )
        # The smallest width that the steps resolve.
        _, steps = plan(budget, num_steps)
        width = (jnp.max(points) - jnp.min(points)) / steps
    sigma = jnp.asarray(width).astype(dtype)

    def gaussian(theta):
        height = 1 / (n * math.sqrt(2 * math.pi) * jnp.where(sigma > 0, sigma, jnp.nan))
        return height * jnp.exp(-jnp.square((points - theta) / sigma) / 2)

    estimator = QuadratureEstimator(hoist_function(gaussian, dtype, scalar=False), num_steps)
    return estimated(spectral_density_p, key, operator, budget, estimator, throw=throw)


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

    A count is the spectral sum of a function that is 1 in the interval and 0 elsewhere. The
    `quadrature_error` is a bound, and falls only like `n / num_steps`: a count is accurate where
    few eigenvalues lie near `a` and `b`. Eigenvalues that are as close to `a` or `b` as rounding
    errors are counted, and are part of the errors. The derivative is 0.

    **Cost:** that of [`traceax.spectral_sum`][] with `num_steps`.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a Hermitian lineax operator with `n` rows, as for [`traceax.spectral_sum`][].
    - `a`, `b`: the ends of the interval, which may be `-inf` and `inf`.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `num_steps`: the number of steps for each probe, as for [`traceax.spectral_sum`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:** a [`traceax.Solution`][] with a real value and with a `quadrature_error`.

    **Raises:** those of [`traceax.spectral_sum`][], and `ValueError` for `a > b`.

    **Source:** E. Di Napoli, E. Polizzi, Y. Saad, 2016, doi:10.1002/nla.2048.
    """
    operator = hermitian_operator(operator, "An eigenvalue count")
    traced = any(isinstance(x, jax.core.Tracer) for x in (a, b))
    if not traced and not np.asarray(a) <= np.asarray(b):
        raise ValueError(
            f"The interval [a, b] of an eigenvalue count is empty, got a={a} and b={b}. Give the "
            "smaller end first, and k last."
        )
    dtype = _real_dtype(operator)
    _, num_steps = checked_plan(k, num_steps, operator.in_size(), "An eigenvalue count")
    lower, upper = (lax.stop_gradient(jnp.asarray(x).astype(dtype)) for x in (a, b))

    def inside(x):  # of ends that are traced, only the numbers show that they are wrong
        return jnp.where(lower <= upper, ((x >= lower) & (x <= upper)).astype(dtype), jnp.nan)

    estimator = QuadratureEstimator(hoist_function(inside, dtype), num_steps, (lower, upper))
    return estimated(spectral_sum_p, key, constant(operator), k, estimator, throw=throw)


def schatten_norm(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int,
    p: float = 1.0,
    *,
    num_steps: int | None = None,
    throw: bool = False,
) -> Solution:
    r"""Estimate the Schatten norm $\|A\|_p = (\sum_i \sigma_i^p)^{1/p}$ with the singular values
    $\sigma_i$: the nuclear norm for p = 1.

    The p-th power is the spectral sum of $|x|^p$ if A is tagged Hermitian, and otherwise that of
    $x^{p/2}$ for $A^* A$ (or $A A^*$, if that is smaller), which takes two products for one. For
    errors and derivatives see [`traceax.spectral_sum`][]. (For p = 2, [`traceax.frobenius_norm`][]
    is closer; for p = inf, take [`traceax.eigenpairs`][].)

    **Cost:** that of [`traceax.spectral_sum`][], and a product that finds a unit.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a lineax operator between any PyTrees, real or complex, square or not; `n` is the
        smaller of its numbers of rows and columns.
    - `k`: the budget of matvecs, a static Python int. With `k > n` (`k > 2 n` for an operator that
        is not tagged Hermitian) the norm is exact.
    - `p`: the exponent, a positive Python number. Below 1 the result is a quasi-norm.
    - `num_steps`: the number of steps for each probe, as for [`traceax.spectral_sum`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:** a [`traceax.Solution`][] with a real value and with a `quadrature_error`. The root
    of an unbiased estimate is biased, by about the square of its relative error. At 0, and where a
    singular value is 0, the derivative is a subgradient (p = 1), or 0.

    **Raises:** those of [`traceax.spectral_sum`][], and `ValueError` for a `p` that is not positive
    and finite.
    """
    if not isinstance(p, int | float | np.integer | np.floating) or not 0 < p < math.inf:
        raise ValueError(
            f"The exponent p of a Schatten norm must be a positive finite number, got {p!r}. "
            "Give 1 for the nuclear norm; the largest singular value is for `traceax.eigenpairs`."
        )
    p = float(p)
    operator = as_operator(operator, square=False)
    n = min(operator.out_size(), operator.in_size())
    hermitian = is_hermitian(operator)
    products = 1 if hermitian else 2
    k = check_budget(k, products + 1, products * n + 1, "A Schatten norm") - 1
    unit_key, key = split(check_key(key))
    unit = compiled_once(unit_of, unit_key, operator)

    def fn(x):
        return power_of(jnp.abs(x) / unit, p) if hermitian else power_of(jnp.abs(x), p / 2)

    target = operator if hermitian else gram(operator, unit, rows=operator.out_size() == n)
    found = spectral_sum(key, fn, target, k // products, num_steps=num_steps)
    value = unit * power_of(found.value, 1 / p)

    def root_error(error):
        """How far the norm is from that of a power that is larger or smaller by `error`."""
        roots = [unit * power_of(found.value + x, 1 / p) for x in (error, -error)]
        return lax.stop_gradient(jnp.maximum(roots[0] - value, value - roots[1]))

    std_err, error = (root_error(jnp.asarray(x)) for x in (found.std_err, found.quadrature_error))
    spent = products * found.num_matvecs + 1
    return transformed(found, throw, value, std_err, quadrature_error=error, num_matvecs=spent)

"""`traceax.trace`, `traceax.diagonal` and `traceax.block_traces`; `frobenius_norm` and `row_norms`,
roots of a trace and of a diagonal of Gram matrices.
"""

import math
from functools import partial
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax import lax
from jaxtyping import Array, PRNGKeyArray, Real

from .._core.estimate import norm_of, power_of, relative
from .._core.primitive import compiled_once, diagonal_p, trace_p
from .._core.verdict import transformed
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._operators.gram import gram, unit_of
from .auto import AutoTraceEstimator
from .estimator import (
    AbstractInnerEstimator,
    AbstractTraceEstimator,
    RowsEstimator,
    check_budget,
    check_either,
    check_key,
    estimated,
    largest_budget,
    tolerance_of,
)
from .exact import with_known_parts
from .rows import Rows
from .solution import Solution, restructure
from .tolerance import norm_factor, sample_to_tolerance

#: The `tail` of XNysTrace for a Gram matrix, whose eigenvalues decay twice as fast.
TAIL = 9.0


def trace(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    estimator: AbstractTraceEstimator = AutoTraceEstimator(),
    *,
    rtol: float | Array | None = None,
    atol: float | Array | None = None,
    max_k: int | None = None,
    throw: bool = False,
) -> Solution:
    r"""Estimate $\mathrm{tr}(A)$ from at most `k` products $A v$, or from as many as a tolerance
    takes, with an error bar.

    With a budget the estimate is unbiased, $E[\mathtt{value}] = \mathrm{tr}(A)$, and so is its
    derivative at every order. The default estimator reads stored entries without a product.

    *With a tolerance* samples are drawn until about two standard errors are within
    `atol + rtol |value|`; 95 % of calls end within the tolerance (with a small bias, as a call ends
    where its error looks small). The last resort, if `max_k` allows it, is the exact trace, from n
    further products. Otherwise the result is `RESULTS.not_converged`, with the best estimate.

    **Cost:** at most `k` matvecs; the memory of the estimator.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the trace is exact.
    - `estimator`: by default [`traceax.AutoTraceEstimator`][].
    - `rtol`, `atol`: the relative and the absolute tolerance, which may be traced.
    - `max_k`: the largest budget for a tolerance, by default n, or 1000 for more rows.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:** a [`traceax.Solution`][].

    **Raises:** `TypeError` for arguments of the wrong type, or not either `k` or a tolerance;
    `ValueError` for an operator that the estimator does not take, `k < 1`, a negative tolerance.
    """
    options = {"rtol": rtol, "atol": atol, "max_k": max_k, "throw": throw}
    return solve_either("trace", key, operator, k, estimator, None, **options)


def diagonal(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    estimator: AbstractTraceEstimator = AutoTraceEstimator(),
    *,
    rtol: float | Array | None = None,
    atol: float | Array | None = None,
    max_k: int | None = None,
    throw: bool = False,
) -> Solution[Any]:
    r"""Estimate the diagonal of A from at most `k` products with A and its adjoint, or from as many
    as a tolerance takes (of the Euclidean norms of the errors and of the diagonal).

    Every entry is unbiased, $E[\mathtt{value}_i] = A_{ii}$, has its own standard error, and has a
    derivative as for [`traceax.trace`][]. The default estimator reads stored entries.

    **Cost:** at most `k` matvecs; the memory of the estimator.

    **Arguments:**

    - `key`, `k`, `rtol`, `atol`, `max_k`, `throw`: as of [`traceax.trace`][].
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `estimator`: by default [`traceax.AutoTraceEstimator`][].

    **Returns:** a [`traceax.Solution`][] whose `value` and `std_err` have the structure of the
    operator's input.

    **Raises:** `TypeError`, `ValueError` as [`traceax.trace`][].
    """
    options = {"rtol": rtol, "atol": atol, "max_k": max_k, "throw": throw}
    solution = solve_either("diagonal", key, operator, k, estimator, Rows(), **options)
    return restructure(solution, operator.in_structure())


def block_traces(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    estimator: AbstractTraceEstimator = AutoTraceEstimator(),
    *,
    rtol: float | Array | None = None,
    atol: float | Array | None = None,
    max_k: int | None = None,
    throw: bool = False,
) -> Solution[Any]:
    r"""Estimate the trace of every diagonal block of A: one for each leaf of its input PyTree.

    For the Hessian of a network these are the traces layer by layer. All come from the same
    products, and each is unbiased and has a standard error and a derivative. Their sum is an
    estimate of tr(A). A tolerance works as for [`traceax.diagonal`][].

    **Cost:** that of [`traceax.diagonal`][].

    **Arguments:**

    - `key`, `k`, `rtol`, `atol`, `max_k`, `throw`: as of [`traceax.trace`][].
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `estimator`: by default [`traceax.AutoTraceEstimator`][].

    **Returns:** a [`traceax.Solution`][] whose `value` and `std_err` are PyTrees of scalars, of the
    structure of the operator's input.

    **Raises:** `TypeError`, `ValueError` as [`traceax.trace`][].
    """
    structure = as_operator(operator).in_structure()
    rows = Rows(tuple(math.prod(leaf.shape) for leaf in jtu.tree_leaves(structure)))
    options = {"rtol": rtol, "atol": atol, "max_k": max_k, "throw": throw}
    solution = solve_either("block_traces", key, operator, k, estimator, rows, **options)
    return restructure(solution, jtu.tree_map(lambda _: np.zeros(()), structure))


def frobenius_norm(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    rtol: float | Array | None = None,
    max_k: int | None = None,
    throw: bool = False,
) -> Solution:
    r"""Estimate the Frobenius norm $\|A\|_F = \sqrt{\mathrm{tr}(A^* A)}$.

    The square of the value is unbiased: it is XNysTrace of $A^* A$. A probe takes a product with A
    and one with its adjoint. One more product gives a unit in which squares neither over- nor
    underflow.

    **Cost:** at most `k` matvecs; four blocks of `n x k/2` numbers.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a lineax operator with `n` columns, square or not, between any PyTrees.
    - `k`: the budget of matvecs, a static Python int. With `k > 2 n` the norm is exact.
    - `rtol`, `max_k`: a relative tolerance in place of a budget, as of [`traceax.trace`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:** a [`traceax.Solution`][].

    **Raises:** `TypeError`, `ValueError` as [`traceax.trace`][].
    """
    return _root_of_gram("frobenius_norm", key, operator, k, None, rtol, max_k, throw)


def row_norms(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    rtol: float | Array | None = None,
    max_k: int | None = None,
    throw: bool = False,
) -> Solution[Any]:
    """Estimate the Euclidean norms of the rows of A.

    Their squares, the diagonal of $A A^*$, are unbiased estimates by XNysDiag; where one is below
    0, the norm is 0.

    **Cost:** that of [`traceax.frobenius_norm`][], with six blocks of `n x k/2` numbers.

    **Arguments:**

    - `key`, `k`, `rtol`, `max_k`, `throw`: as of [`traceax.frobenius_norm`][].
    - `operator`: a lineax operator with `n` rows, square or not, between any PyTrees.

    **Returns:** a [`traceax.Solution`][] whose `value` and `std_err` have the structure of the
    operator's output PyTree.

    **Raises:** `TypeError`, `ValueError` as [`traceax.trace`][].
    """
    solution = _root_of_gram("row_norms", key, operator, k, Rows(), rtol, max_k, throw)
    return restructure(solution, operator.out_structure())


def _root_of_gram(name, key, operator, k, rows: Rows | None, rtol, max_k, throw) -> Solution:
    """The root of the trace, or diagonal, of a Gram operator of A / unit. Of k products with A one
    finds the unit, and each with the Gram operator takes two.
    """
    operator = as_operator(operator, square=False)
    unit_key, key = jr.split(check_key(key))
    largest = 2 * (operator.in_size() if rows is None else operator.out_size()) + 1
    has_tolerance = check_either(name, k, rtol, None, max_k)
    if has_tolerance:
        max_k = (largest_budget(max_k, largest, name, 5)[0] - 1) // 2
    else:
        k = (check_budget(k, 3, largest, name) - 1) // 2
    unit = compiled_once(unit_of, unit_key, operator)
    squares = gram(operator, unit, rows is not None)
    options = {"rtol": rtol, "atol": None, "max_k": max_k, "throw": False, "root": True}
    solution = solve_either(name, key, squares, k, AutoTraceEstimator(), rows, **options)

    value, std_err = _root_in(unit, solution.value, solution.std_err)
    # XNysTrace is for budgets: a tolerance draws independent samples.
    tail = solution.tail if has_tolerance or rows is not None else TAIL
    more = {"num_matvecs": 2 * solution.num_matvecs + 1, "tail": tail}
    return transformed(solution, throw, value, std_err, **more)


@jax.jit  # one program for an eager call
def _root_in(unit: Array, square: Array, std_err: Array) -> tuple[Array, Array]:
    value = root(square)
    unit = unit.astype(std_err.dtype)
    return unit * value, unit * root_error(value, std_err)


def root(square: Array) -> Array:
    """The root of an estimated square, 0 where that is negative."""
    return power_of(square.real, 0.5)


def root_error(value: Array, std_err: Array) -> Array:
    """The standard error of a root, from the root and the standard error of the square."""
    # d sqrt(t) = dt / (2 sqrt(t)), but at most sqrt(dt), which it is where t vanishes.
    value = lax.stop_gradient(value)
    slope = 1 / jnp.where(value == 0, 1, 2 * value)
    largest = jnp.sqrt(std_err)
    return jnp.where(value == 0, largest, jnp.minimum(largest, slope * std_err))


@final
class ToleranceEstimator(AbstractInnerEstimator):
    """An estimator with a tolerance in the place of a budget. It reads known parts."""

    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    root: bool = eqx.field(static=True)
    max_k: int = eqx.field(static=True)

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""

        def sampled(rest, offset, scale):
            sampling = self.inner.sampling(rest, self.rows)
            block = BlockOperator(rest, self.batch_size)
            ratio = partial(self.ratio, offset, scale)
            return sample_to_tolerance(key, block, sampling, ratio, self.max_k, weights)

        return with_known_parts(operator, self.rows, sampled)

    def ratio(self, offset: Array, scale: Array, value: Array, std_err: Array) -> Array:
        """The standard error over the largest that is allowed, as Euclidean norms, of
        offset + scale * value, or of its root.
        """
        whole = offset + scale * value
        error = jnp.abs(scale) * std_err
        if self.root:
            whole = root(whole)
            error = root_error(whole, error)
        allowed = self.atol + self.rtol * norm_of(whole)
        return relative(norm_factor(error) * norm_of(error), allowed.astype(error.dtype))


def solve_either(
    name, key, operator, k, estimator, rows, *, throw, root=False, **tolerance
) -> Solution:
    """A trace (`rows=None`), or entries of a diagonal, with a budget or a tolerance (with `root`
    that of the square root).
    """
    if not isinstance(estimator, AbstractTraceEstimator):
        raise TypeError(
            f"The estimator must be an AbstractTraceEstimator, got {estimator!r}. Give an "
            "instance, such as `traceax.XTraceEstimator()`."
        )
    check_key(key)  # of a call without one, k is missing, too
    primitive = trace_p if rows is None else diagonal_p
    if not check_either(name, k, **tolerance):
        budgeted = estimator if rows is None else RowsEstimator(estimator, rows)
        return estimated(primitive, key, operator, k, budgeted, throw=throw)
    operator = as_operator(operator)
    max_k, budget = largest_budget(tolerance["max_k"], operator.in_size(), name)
    both = tolerance_of(tolerance["rtol"], "rtol"), tolerance_of(tolerance["atol"], "atol")
    tolerant = ToleranceEstimator(estimator, rows, *both, root, max_k)
    return estimated(primitive, key, operator, budget, tolerant, throw=throw)

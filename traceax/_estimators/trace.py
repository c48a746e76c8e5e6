"""`traceax.trace`, `traceax.diagonal` and `traceax.block_traces`."""

import math

import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, PRNGKeyArray

from .._core.primitive import diagonal_p, trace_p
from .._operators.block_operator import unflatten
from .._operators.checks import as_operator
from .auto import AutoTraceEstimator
from .estimator import AbstractTraceEstimator
from .rows import Rows
from .solution import Solution, restructure
from .tolerance import solve_either


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

    !!! Example

        ```python
        solution = tr.trace(jax.random.key(0), operator, rtol=1e-3)
        solution.value, solution.std_err, solution.num_matvecs, solution.result
        ```

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the trace is exact.
    - `estimator`: by default [`traceax.AutoTraceEstimator`][].
    - `rtol`, `atol`: the relative and the absolute tolerance, which may be traced.
    - `max_k`: the largest budget for a tolerance, by default n, or 1000 for more rows.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][].

    **Raises:**

    - `TypeError`: for arguments of the wrong type, or not either `k` or a tolerance.
    - `ValueError`: for an operator that the estimator does not take, `k < 1`, a negative tolerance.
    """
    options = {"rtol": rtol, "atol": atol, "max_k": max_k, "throw": throw}
    return solve_either("trace", trace_p, key, operator, k, estimator, None, **options)


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
) -> Solution:
    r"""Estimate the diagonal of A from at most `k` products with A and its adjoint, or from as many
    as a tolerance takes (of the Euclidean norms of the errors and of the diagonal).

    Every entry is unbiased, $E[\mathtt{value}_i] = A_{ii}$, has its own standard error, and has a
    derivative as for [`traceax.trace`][]. The default estimator reads stored entries.

    **Arguments:**

    - `key`, `k`, `rtol`, `atol`, `max_k`, `throw`: as of [`traceax.trace`][].
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `estimator`: by default [`traceax.AutoTraceEstimator`][].

    **Returns:**

    A [`traceax.Solution`][] whose `value` and `std_err` have the structure of the operator's input.

    **Raises:**

    - `TypeError`, `ValueError`: as [`traceax.trace`][].
    """
    options = {"rtol": rtol, "atol": atol, "max_k": max_k, "throw": throw}
    given = "diagonal", diagonal_p, key, operator, k, estimator, Rows()
    solution = solve_either(*given, **options)
    structure = operator.in_structure()
    return restructure(solution, lambda vector: unflatten(structure, vector))


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
) -> Solution:
    r"""Estimate the trace of every diagonal block of A: one for each leaf of its input PyTree.

    For the Hessian of a network these are the traces layer by layer. All come from the same
    products, and each is unbiased and has a standard error and a derivative. Their sum is an
    estimate of tr(A). A tolerance works as for [`traceax.diagonal`][].

    **Arguments:**

    - `key`, `k`, `rtol`, `atol`, `max_k`, `throw`: as of [`traceax.trace`][].
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `estimator`: by default [`traceax.AutoTraceEstimator`][].

    **Returns:**

    A [`traceax.Solution`][] whose `value` and `std_err` are PyTrees of scalars, of the structure of
    the operator's input.

    **Raises:**

    - `TypeError`, `ValueError`: as [`traceax.trace`][].
    """
    structure = as_operator(operator).in_structure()
    rows = Rows(tuple(math.prod(leaf.shape) for leaf in jtu.tree_leaves(structure)))
    options = {"rtol": rtol, "atol": atol, "max_k": max_k, "throw": throw}
    given = "block_traces", diagonal_p, key, operator, k, estimator, rows
    solution = solve_either(*given, **options)
    treedef = jtu.tree_structure(structure)
    return restructure(solution, lambda vector: jtu.tree_unflatten(treedef, list(vector)))

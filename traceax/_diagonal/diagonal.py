"""`traceax.diagonal` and `traceax.block_traces`."""

import math
from typing import Any

import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, PRNGKeyArray

from .._estimators.arguments import Tolerance
from .._estimators.estimator import AbstractDiagonalEstimator, check_estimator
from .._estimators.rows import Rows
from .._estimators.solution import Solution, restructure
from .._operators.block_operator import unflatten
from .._operators.checks import as_operator
from .._tolerance.estimator import solve_either
from .auto import AutoDiagonalEstimator


def diagonal(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | Array | None = None,
    estimator: AbstractDiagonalEstimator = AutoDiagonalEstimator(),
    *,
    rtol: float | Array | None = None,
    atol: float | Array | None = None,
    max_k: int | None = None,
    state: Any = None,
    keep_state: bool = False,
    progress: bool = False,
    throw: bool = False,
) -> Solution:
    r"""Estimate the diagonal of A from at most `k` products with A and its adjoint, or from as many
    as a tolerance takes.

    Where the entries are stored, the default estimator reads the diagonal, and it is exact.
    Otherwise every entry is unbiased, and has a standard error of its own. It has a derivative like
    that of [`traceax.trace`][]: unbiased, in forward and reverse mode, and at every order.

    *With a tolerance* it works as [`traceax.trace`][] does, where the error and the diagonal d are
    measured by their Euclidean norms: the number of probes is doubled until c ||std_err|| <=
    `atol + rtol ||d||`. The factor c (2, or less where many entries share the error) was measured
    so that 95 % of runs end within the tolerance. If the budget allows n products, the last resort
    is the exact diagonal, completed from the products made so far. This takes no more than n
    products in all, with two exceptions: XDiag (up to 5 n / 4) and Diag++ (7 n / 6) of an operator
    that is not tagged symmetric or semidefinite, because products with the adjoint do not help to
    complete it.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `k`: the budget of matvecs, as of [`traceax.trace`][]. With `k >= n` the diagonal is exact.
    - `estimator`: by default [`traceax.AutoDiagonalEstimator`][].
    - `rtol`, `atol`, `max_k`, `state`, `keep_state`, `progress`: as of [`traceax.trace`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] whose `value` and `std_err` have the structure of the operator's input
    PyTree.

    **Raises:**

    - `TypeError`, `ValueError`: as [`traceax.trace`][].
    """
    check_estimator(estimator, AbstractDiagonalEstimator, "XDiagEstimator")
    options = Tolerance(rtol, atol, max_k, progress, state, keep_state)
    solution = solve_either("diagonal", key, operator, k, estimator, options, throw, Rows())
    structure = operator.in_structure()
    return restructure(solution, lambda vector: unflatten(structure, vector))


def block_traces(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | Array | None = None,
    estimator: AbstractDiagonalEstimator = AutoDiagonalEstimator(),
    *,
    rtol: float | Array | None = None,
    atol: float | Array | None = None,
    max_k: int | None = None,
    state: Any = None,
    keep_state: bool = False,
    progress: bool = False,
    throw: bool = False,
) -> Solution:
    r"""Estimate the trace of every diagonal block of A: one for each leaf of its input PyTree.

    For the Hessian of a network these are the traces layer by layer. All come from the same
    products, and each is unbiased and has a standard error and a derivative. Their sum is an
    estimate of tr(A). A tolerance works as for [`traceax.diagonal`][], with the Euclidean norm of
    all traces and that of their errors.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `k`: the budget of matvecs, as of [`traceax.trace`][]. With `k >= n` the traces are exact.
    - `estimator`: a diagonal estimator, by default [`traceax.AutoDiagonalEstimator`][].
    - `rtol`, `atol`, `max_k`, `state`, `keep_state`, `progress`: as of [`traceax.trace`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] whose `value` and `std_err` are PyTrees of scalars, of the structure of
    the operator's input.

    **Raises:**

    - `TypeError`, `ValueError`: as [`traceax.trace`][].
    """
    check_estimator(estimator, AbstractDiagonalEstimator, "XDiagEstimator")
    structure = as_operator(operator).in_structure()
    rows = Rows(tuple(math.prod(leaf.shape) for leaf in jtu.tree_leaves(structure)))
    options = Tolerance(rtol, atol, max_k, progress, state, keep_state)
    solution = solve_either("block_traces", key, operator, k, estimator, options, throw, rows)
    treedef = jtu.tree_structure(structure)
    return restructure(solution, lambda vector: jtu.tree_unflatten(treedef, list(vector)))

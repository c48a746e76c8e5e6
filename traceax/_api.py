"""The functions that users call."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, PRNGKeyArray

from ._calibration import CALIBRATION
from ._diagonal.auto import AutoDiagonalEstimator
from ._diagonal.blocks import BlockTraceEstimator
from ._estimator import (
    AbstractDiagonalEstimator,
    AbstractTraceEstimator,
    check_budget,
    check_estimator,
    check_key,
    solve,
)
from ._operator import as_operator, is_complex, unflatten
from ._primitive import diagonal_p, trace_p
from ._rows import Rows
from ._solution import Solution
from ._tolerance import solve_to_tolerance
from ._tolerance_arguments import Tolerance
from ._trace.auto import AutoTraceEstimator


def trace(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    estimator: AbstractTraceEstimator = AutoTraceEstimator(),
    *,
    rtol: float | Array | None = None,
    atol: float | Array | None = None,
    max_k: int | None = None,
    state: Any = None,
    keep_state: bool = False,
    progress: bool = False,
    throw: bool = False,
) -> Solution:
    r"""Estimate $\mathrm{tr}(A)$ from at most `k` products $A v$, or from as many as a
    tolerance takes, with an error bar.

    With a budget the estimate is unbiased, $E[\mathtt{value}] = \mathrm{tr}(A)$, and so is its
    derivative with respect to anything that the operator depends on, in forward and reverse mode
    and at every order: it is $\sum_j v_j^* \, dA \, u_j$ with weights $u_j, v_j$ held fixed. A run
    that a tolerance ends is not quite: it ends where its error looks small, which says something
    about the value. Where the entries are stored (dense, sparse, diagonal ones, and sums and
    multiples of such), the default estimator reads the trace: it is exact, and so is its
    derivative.

    !!! Example

        ```python
        operator = lx.FunctionLinearOperator(product, input_structure)
        solution = tr.trace(jax.random.key(0), operator, k=100)
        solution.value, solution.std_err

        solution = tr.trace(jax.random.key(0), operator, rtol=1e-3)
        solution.value, solution.num_matvecs, solution.result
        ```

    *With a tolerance* blocks of probes double (16, 32, 64, ... in all) until about two standard
    errors are within `atol + rtol |t|`, with constants measured so that 95 % of runs end within
    the tolerance, looking after every block included. New columns are appended to what is known:
    no product and no factorisation is made again. If the budget allows n products, the last resort
    is the exact trace, completed from the products made so far: never more than n in all.
    Otherwise the result is `RESULTS.not_converged`, with the best estimate. NaN, a wrong tag and
    an operator of low rank end the run with the first block. All of this works under `jit`; under
    `vmap` every lane gets what it would get by itself, and the products go on until the slowest is
    done. Memory: blocks for `max_k`; work: in proportion to the products made.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the trace is exact. None with
        a tolerance.
    - `estimator`: by default [`traceax.AutoTraceEstimator`][].
    - `rtol`: the relative tolerance. It need not be static.
    - `atol`: the absolute tolerance. It need not be static.
    - `max_k`: the largest budget for a tolerance, a static Python int. By default n, but 1000 for
        operators with more rows. (From n on, operators with 64 rows or fewer are exact at once.)
    - `state`: the `state` of an earlier solution for the *same* operator, to go on from. (That it
        is the same cannot be checked.) Its products count in `num_matvecs`.
    - `keep_state`: whether to return such a state: probes and products for `max_k`. (None where
        the trace was read.)
    - `progress`: whether to show estimate, error and products after every block on standard error
        (with `tqdm`, if it is installed); never under `vmap`.
    - `throw`: whether to raise an error (at run time, also under `jit`) if the result is not
        `RESULTS.successful`.

    **Returns:**

    A [`traceax.Solution`][].

    **Raises:**

    - `TypeError`: for a key, operator, `k`, tolerance or state of the wrong type, or unless either
        `k` or a tolerance is given.
    - `ValueError`: for an operator that is not square, `k < 1`, an operator without the tag that
        the estimator needs, an estimator that cannot work to a tolerance, a negative tolerance, or
        a state that does not fit.
    """
    check_estimator(estimator, AbstractTraceEstimator, "XTraceEstimator")
    options = Tolerance(rtol, atol, max_k, progress, state, keep_state)
    return _solve("trace", key, operator, k, estimator, options, throw)


def _solve(
    name: str,
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None,
    estimator: AbstractTraceEstimator | AbstractDiagonalEstimator,
    options: Tolerance,
    throw: bool,
    rows: Rows | None = None,
) -> Solution:
    """A trace (`rows=None`), or a diagonal or sums of its entries; with a budget or a tolerance."""
    check_key(key)
    primitive = trace_p if rows is None else diagonal_p
    if options.wanted(k, name, "`max_k`, `state`, `keep_state`, `progress`"):
        return solve_to_tolerance(primitive, key, operator, estimator, rows, options, throw=throw)
    blocks = rows is not None and rows.sizes is not None
    budgeted: Any = BlockTraceEstimator(estimator, rows) if blocks else estimator  # pyright: ignore
    return solve(primitive, key, operator, k, budgeted, throw=throw)


def diagonal(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
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

    Where the entries are stored, the default estimator reads the diagonal: it is exact. Otherwise
    every entry is unbiased, has a standard error of its own, and a derivative as that of
    [`traceax.trace`][]: unbiased, in forward and reverse mode and at every order.

    *With a tolerance* it works as [`traceax.trace`][] does, the error and the diagonal d measured
    by their Euclidean norms: blocks of probes double until c ||std_err|| <= `atol + rtol ||d||`.
    The factor c (2, less where many entries share the error) is measured so that 95 % of runs end
    within the tolerance. If the budget allows n products, the last resort is the exact diagonal,
    completed from the products made so far: never more than n in all, except for XDiag (up to
    5 n / 4) and Diag++ (7 n / 6) of an operator that is not tagged symmetric or semidefinite, whose
    products with the adjoint are then of no use.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the diagonal is exact. None
        with a tolerance.
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
    solution = _solve("diagonal", key, operator, k, estimator, options, throw, Rows())
    structure = operator.in_structure()
    return restructure(solution, lambda vector: unflatten(structure, vector))


def block_traces(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
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
    products, are unbiased, and have a standard error and a derivative each. They add up to an
    estimate of tr(A). With a tolerance they work as [`traceax.diagonal`][] does, with the Euclidean
    norm of all traces and of their errors.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the traces are exact. None
        with a tolerance.
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
    solution = _solve("block_traces", key, operator, k, estimator, options, throw, rows)
    treedef = jtu.tree_structure(structure)
    return restructure(solution, lambda vector: jtu.tree_unflatten(treedef, list(vector)))


def restructure(solution: Solution, fn: Callable[[Array], Any]) -> Solution:
    """The solution with `fn` applied to its value and its standard error."""
    value, std_err = fn(solution.value), fn(solution.std_err)
    stats = {**solution.stats, "std.err": std_err}
    return dataclasses.replace(solution, value=value, std_err=std_err, stats=stats)


def frobenius_norm(
    key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int, *, throw: bool = False
) -> Solution:
    r"""Estimate the Frobenius norm $\|A\|_F = \sqrt{\mathrm{tr}(A^* A)}$.

    The square of the value is unbiased: XNysTrace of $A^* A$, two products with A (one of them with
    its adjoint) a probe.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `k`: the budget of matvecs, a static Python int. With `k >= 2 n` the norm is exact.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][].

    **Raises:**

    - `TypeError`: for a key, operator or `k` of the wrong type.
    - `ValueError`: for an operator that is not square, or `k < 1`.
    """
    return _root_of_gram(trace, key, operator, k, throw, rows=False)


def row_norms(
    key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int, *, throw: bool = False
) -> Solution:
    r"""Estimate the Euclidean norms of the rows of A.

    Their squares, the diagonal of $A A^*$, are unbiased: XNysDiag, two products with A (one of them
    with its adjoint) a probe. An estimate of a square below 0 gives 0.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `k`: the budget of matvecs, a static Python int. With `k >= 2 n` the norms are exact.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] whose `value` and `std_err` have the structure of the operator's input
    PyTree.

    **Raises:**

    - `TypeError`: for a key, operator or `k` of the wrong type.
    - `ValueError`: for an operator that is not square, or `k < 1`.
    """
    return _root_of_gram(diagonal, key, operator, k, throw, rows=True)


def root(square: Array) -> Array:
    """The root of an estimated square, 0 where that is negative."""
    # sqrt has an infinite slope at 0; a norm that is 0 keeps the derivative 0.
    positive = ~(square.real <= 0)  # NaN stays NaN
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square.real, 1)), 0)


def root_error(value: Array, std_err: Array) -> Array:
    """The standard error of a root, from the root and the standard error of the square."""
    # d sqrt(t) = dt / (2 sqrt(t)), and never more than sqrt(dt), the size of it where t vanishes.
    value = lax.stop_gradient(value)
    slope = 1 / jnp.where(value == 0, 1, 2 * value)
    largest = jnp.sqrt(std_err)
    return jnp.where(value == 0, largest, jnp.minimum(largest, slope * std_err))


def _root_of_gram(estimate, key, operator, k, throw, rows: bool) -> Solution:
    operator = as_operator(operator)
    budget = check_budget(k, 2, 2 * operator.in_size(), "A Gram operator") // 2
    transpose = operator.T
    if is_complex(operator):
        transpose = lx.conj(transpose)
    gram = operator @ transpose if rows else transpose @ operator
    gram = lx.TaggedLinearOperator(gram, lx.positive_semidefinite_tag)
    solution = estimate(key, gram, budget, throw=throw)

    value = jtu.tree_map(root, solution.value)
    std_err = jtu.tree_map(root_error, value, solution.std_err)
    stats = {**solution.stats, "std.err": std_err}
    spent = 2 * solution.num_matvecs
    tail = solution.tail if rows else CALIBRATION["xnystrace, squares"].tail
    return dataclasses.replace(
        solution, value=value, std_err=std_err, num_matvecs=spent, stats=stats, tail=tail
    )

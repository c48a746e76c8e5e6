"""`traceax.frobenius_norm` and `traceax.row_norms`: roots of a trace and a diagonal of Gram
matrices.
"""

import dataclasses

import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, PRNGKeyArray

from .._core.estimate import power_of
from .._estimators.calibration import CALIBRATION
from .._estimators.estimator import check_budget
from .._estimators.solution import Solution
from .._operators.block_operator import as_operator, gram
from .._trace.trace import trace
from .diagonal import diagonal


def frobenius_norm(
    key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int, *, throw: bool = False
) -> Solution:
    r"""Estimate the Frobenius norm $\|A\|_F = \sqrt{\mathrm{tr}(A^* A)}$.

    The square of the value is unbiased: it is XNysTrace of $A^* A$. A probe takes two products, one
    with A and one with its adjoint.

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

    Their squares, the diagonal of $A A^*$, are unbiased estimates by XNysDiag. A probe takes two
    products, one with A and one with its adjoint. If the estimate of a square is below 0, the norm
    is 0.

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
    return power_of(square.real, 0.5)


def root_error(value: Array, std_err: Array) -> Array:
    """The standard error of a root, from the root and the standard error of the square."""
    # d sqrt(t) = dt / (2 sqrt(t)), but at most sqrt(dt), which it is where t vanishes.
    value = lax.stop_gradient(value)
    slope = 1 / jnp.where(value == 0, 1, 2 * value)
    largest = jnp.sqrt(std_err)
    return jnp.where(value == 0, largest, jnp.minimum(largest, slope * std_err))


def _root_of_gram(estimate, key, operator, k, throw, rows: bool) -> Solution:
    operator = as_operator(operator)
    budget = check_budget(k, 2, 2 * operator.in_size(), "A Gram operator") // 2
    solution = estimate(key, gram(operator, rows=rows), budget, throw=throw)

    value = jtu.tree_map(root, solution.value)
    std_err = jtu.tree_map(root_error, value, solution.std_err)
    stats = {**solution.stats, "std.err": std_err}
    spent = 2 * solution.num_matvecs
    tail = solution.tail if rows else CALIBRATION["xnystrace, squares"].tail
    return dataclasses.replace(
        solution, value=value, std_err=std_err, num_matvecs=spent, stats=stats, tail=tail
    )

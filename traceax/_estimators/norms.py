"""`frobenius_norm` and `row_norms`: roots of a trace and of a diagonal of Gram matrices."""

import dataclasses

import jax.random as jr
import lineax as lx
from jaxtyping import Array, PRNGKeyArray

from .._core.primitive import compiled_once, diagonal_p, trace_p
from .._operators.block_operator import unflatten
from .._operators.checks import as_operator
from .._operators.gram import gram, unit_of
from .auto import AutoTraceEstimator
from .calibration import root, root_error
from .estimator import check_budget, check_either, check_key, largest_budget
from .rows import Rows
from .solution import Solution, restructure
from .trace import solve_either

#: The `tail` of XNysTrace for a Gram matrix, whose eigenvalues decay twice as fast.
TAIL = 9.0


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
    underflow. Cost: at most `k` matvecs; four blocks of `n x k/2` numbers.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a lineax operator with `n` columns, square or not, between any PyTrees.
    - `k`: the budget of matvecs, a static Python int. With `k > 2 n` the norm is exact.
    - `rtol`, `max_k`: a relative tolerance in place of a budget, as of [`traceax.trace`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][].

    **Raises:**

    - `TypeError`, `ValueError`: as [`traceax.trace`][].
    """
    operator = as_operator(operator, square=False)
    given = "frobenius_norm", trace_p, key, operator, k, None
    return _root_of_gram(*given, rtol=rtol, max_k=max_k, throw=throw)


def row_norms(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    rtol: float | Array | None = None,
    max_k: int | None = None,
    throw: bool = False,
) -> Solution:
    """Estimate the Euclidean norms of the rows of A.

    Their squares, the diagonal of $A A^*$, are unbiased estimates by XNysDiag; where one is below
    0, the norm is 0. Cost: that of [`traceax.frobenius_norm`][], with six blocks of `n x k/2`
    numbers.

    **Arguments:**

    - `key`, `k`, `rtol`, `max_k`, `throw`: as of [`traceax.frobenius_norm`][].
    - `operator`: a lineax operator with `n` rows, square or not, between any PyTrees.

    **Returns:**

    A [`traceax.Solution`][] whose `value` and `std_err` have the structure of the operator's output
    PyTree.

    **Raises:**

    - `TypeError`, `ValueError`: as [`traceax.trace`][].
    """
    operator = as_operator(operator, square=False)
    given = "row_norms", diagonal_p, key, operator, k, Rows()
    solution = _root_of_gram(*given, rtol=rtol, max_k=max_k, throw=throw)
    structure = operator.out_structure()
    return restructure(solution, lambda vector: unflatten(structure, vector))


def _root_of_gram(
    name, primitive, key, operator, k, rows: Rows | None, *, rtol, max_k, throw
) -> Solution:
    unit_key, key = jr.split(check_key(key))
    largest = 2 * (operator.in_size() if rows is None else operator.out_size()) + 1
    if check_either(name, k, rtol, None, max_k):
        max_k = max((largest_budget(max_k, largest, name)[0] - 1) // 2, 1)
    else:
        k = max((check_budget(k, 3, largest, name) - 1) // 2, 1)
    unit = compiled_once(unit_of, unit_key, operator)
    squares = gram(operator, unit, rows is not None)
    given = name, primitive, key, squares, k, AutoTraceEstimator(), rows
    options = {"rtol": rtol, "atol": None, "max_k": max_k, "throw": throw}
    solution = solve_either(*given, **options, root=True)

    unit = unit.astype(solution.std_err.dtype)
    value = root(solution.value)
    std_err = unit * root_error(value, solution.std_err)
    return dataclasses.replace(
        solution,
        value=unit * value,
        std_err=std_err,
        num_matvecs=2 * solution.num_matvecs + 1,
        stats={**solution.stats, "std.err": std_err},
        tail=TAIL if rows is None else solution.tail,
    )

"""`traceax.trace`."""

from typing import Any

import lineax as lx
from jaxtyping import Array, PRNGKeyArray

from .._estimators.arguments import Tolerance
from .._estimators.estimator import AbstractTraceEstimator, check_estimator
from .._estimators.solution import Solution
from .._tolerance.estimator import solve_either
from .auto import AutoTraceEstimator


def trace(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int | Array | None = None,
    estimator: AbstractTraceEstimator = AutoTraceEstimator(),
    *,
    rtol: float | Array | None = None,
    atol: float | Array | None = None,
    max_k: int | None = None,
    state: Any = None,
    keep_state: bool = False,
    throw: bool = False,
) -> Solution:
    r"""Estimate $\mathrm{tr}(A)$ from at most `k` products $A v$, or from as many as a
    tolerance takes, with an error bar.

    With a budget the estimate is unbiased, $E[\mathtt{value}] = \mathrm{tr}(A)$, and so is its
    derivative with respect to anything that the operator depends on, in forward and reverse mode
    and at every order: it is $\sum_j v_j^* \, dA \, u_j$ with weights $u_j, v_j$ held fixed. With a
    tolerance there is a small bias: a run ends where its error looks small, and that is not
    independent of the value. Where the entries are stored (in dense, sparse or diagonal operators,
    and their sums and multiples), the default estimator reads the trace, which is then exact, as is
    its derivative.

    !!! Example

        ```python
        operator = lx.FunctionLinearOperator(product, input_structure)
        solution = tr.trace(jax.random.key(0), operator, k=100)
        solution.value, solution.std_err

        solution = tr.trace(jax.random.key(0), operator, rtol=1e-3)
        solution.value, solution.num_matvecs, solution.result
        ```

    *With a tolerance* the number of probes doubles (16, 32, 64, ... in all) until about two
    standard errors are within `atol + rtol |t|`, where t is the estimate. The constants are
    calibrated, with a check after every stage, so that 95 % of runs end within the tolerance. New
    columns are appended to the factorisations: none of them, and no product, is made again. If the
    budget allows n products, the last resort is the exact trace, completed from the products made
    so far, with no more than n in all. (An estimator of another package without an `extendable` of
    its own takes n further products for that.) Otherwise the result is `RESULTS.not_converged`,
    with the best estimate. NaN, a wrong tag and an operator of low rank end the run with the first
    stage. All of this works under `jit`. Under `vmap` every lane gets what it would get by itself,
    and products are made until the slowest lane is done. Probes come in panels of one width (16,
    or 10 to 15 if much less of the budget is then left over), and a rest that is smaller is not
    spent. Memory: blocks for `max_k`; work: in proportion to the products made.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the trace is exact. None with
        a tolerance. Together with `max_k` it may be a traced integer up to `max_k`: one program for
        all budgets. Such a budget is spent in panels of 10 to 16 probes (at least one, and as many
        whole ones as fit), and is never exact.
    - `estimator`: by default [`traceax.AutoTraceEstimator`][].
    - `rtol`: the relative tolerance. It need not be static.
    - `atol`: the absolute tolerance. It need not be static.
    - `max_k`: the largest budget for a tolerance or a traced `k`, a static Python int. By default
        n, but 1000 for operators with more rows. (To a tolerance with `max_k >= n`, the trace of an
        operator with 64 rows or fewer is computed exactly at once.)
    - `state`: the `state` of an earlier solution for the *same* operator, to go on from. (It cannot
        be checked that the operator is the same.) The products of that solution count in
        `num_matvecs`.
    - `keep_state`: whether to return such a state, which holds probes and products for `max_k`. (It
        is None where the trace was read.)
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
    options = Tolerance(rtol, atol, max_k, state, keep_state)
    return solve_either("trace", key, operator, k, estimator, options, throw)

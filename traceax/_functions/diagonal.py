"""Diagonals of functions of a Hermitian matrix from a budget: one half for a Krylov space, the
other for probes. `sampling` has the samples, their errors and their derivative.
"""

import math
from collections.abc import Callable
from typing import final

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, PRNGKeyArray

from .._core.estimate import rounding_of, worse
from .._core.primitive import spectral_diagonal_p
from .._estimators.estimator import check_budget, check_either, solve
from .._estimators.rows import Rows
from .._estimators.solution import Solution, restructure
from .._operators.block_operator import BlockOperator, unflatten
from .._probes.random import split
from .funm import AbstractFunctionEstimator, hermitian_operator, hoist_function
from .quadrature_error import entries_std_err, quadrature_estimate
from .sampling import FunctionSampling, Recurrences, sampled_function

#: The largest number of vectors in the Krylov space.
MOST_VECTORS = 512


def sizes_of(k: int) -> tuple[int, int, int, int]:
    """Returns (vectors of the Krylov space, steps of the space, probes, steps of a probe). Entries
    converge half as fast as quadratic forms, and short recurrences are biased: there are more steps
    than for spectral sums, and as few probes as errors can be told from.
    """
    half = min(k // 2, MOST_VECTORS)
    block = max(1, min(round(math.sqrt(k) / 2.75), half // 4))
    steps = half // block
    left = k - block * steps  # products for the probes
    probes = max(3 if left >= 12 else 2, round(math.sqrt(left) / 2))
    return block, steps, probes, left // probes


@final
class SpectralDiagonalEstimator(AbstractFunctionEstimator):
    """The diagonal of f(A) from a budget."""

    sampling: FunctionSampling

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        width, steps, p, probe_steps = sizes_of(k)
        block = BlockOperator(operator).linearised()
        start_key, probe_key = split(key)
        prepared = self.sampling.prepared_space(start_key, block, width, steps)
        given = probe_key, block, prepared, p, probe_steps
        panel, fixed = self.sampling.panel_and_recurrences(*given)
        value = prepared.value + jnp.mean(panel.samples, axis=-1)
        std_err, _ = entries_std_err(panel.samples.T, jnp.asarray(p, value.dtype))
        rounding = rounding_of(jnp.hypot(prepared.size, panel.size), block.eps)
        std_err = jnp.hypot(std_err, rounding)
        spent = width * steps + p * probe_steps
        evidence = worse(prepared.evidence, panel.evidence)
        estimate = quadrature_estimate(
            value, jnp.asarray(panel.bias), std_err, spent, p - 1, evidence
        )
        return estimate, (prepared.basis, fixed) if weights else None

    def exact(self, operator):
        """See `AbstractEstimator`."""
        return self.sampling.exact(BlockOperator(operator))

    def contract(self, weights, operator):
        """See `AbstractEstimator`. The leaves of `fn` have derivatives, too."""
        basis, recurrences = weights
        if not isinstance(recurrences, Recurrences):
            return self.sampling.contract_exact(weights, operator)
        block = BlockOperator(operator)
        space = self.sampling.captured_space(block, basis)
        return space.value + self.sampling.mean_of(block, space, recurrences)


def spectral_diagonal(
    key: PRNGKeyArray,
    fn: Callable[[Array], Array],
    operator: lx.AbstractLinearOperator,
    k: int | None = None,
    *,
    rtol: float | Array | None = None,
    atol: float | Array | None = None,
    max_k: int | None = None,
    throw: bool = False,
) -> Solution:
    r"""Estimate the diagonal of $f(A)$ of a Hermitian operator: subgraph centralities ($e^A$ of an
    adjacency matrix), leverage scores ($x / (x + s)$ of a kernel), and other numbers that every row
    has. For an inverse, [`traceax.inverse_diagonal`][] is better.

    Half of the budget goes to a block Krylov space V, on which f(A) is known, and the other half to
    probes of random signs, with recurrences of their own, for what V does not know.

    !!! Example

        ```python
        centralities = tr.spectral_diagonal(jax.random.key(0), jnp.exp, adjacency, k=120)
        low, high = centralities.interval()  # 95 % for every entry
        ```

    Cost: at most `k` matvecs, in blocks; `k n` numbers; about `5 n k^2` operations. First
    derivatives, also with respect to arrays in `fn`, are unbiased. With q = max(k / 4, 4 sqrt(k))
    they take q products for each probe in reverse mode, `q k` in forward mode, and agree as far as
    the recurrences have converged.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `fn`: a JAX function of one real number with real values, as for [`traceax.spectral_sum`][].
    - `operator`: a Hermitian lineax operator with `n` rows, between any PyTrees, with a tag.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `rtol`, `atol`, `max_k`: a tolerance in the place of a budget, as of [`traceax.diagonal`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] with two errors for every entry, `std_err` of the probes and
    `quadrature_error` of short recurrences; both and `value` have the structure of the operator's
    input PyTree, real. It is `outside_domain` and NaN where f is not finite at a Ritz value, and
    `not_converged` where the quadrature errors of all entries exceed four standard errors and 5 %
    of the value. Below some 24 products, recurrences may end too early and not show it.

    **Raises:** those of [`traceax.spectral_sum`][].
    """
    name = "The diagonal of a function"
    operator = hermitian_operator(operator, name)
    function = hoist_function(fn, jnp.finfo(BlockOperator(operator).dtype).dtype)
    if check_either("spectral_diagonal", k, rtol, atol, max_k):
        given = Rows(), function, operator, rtol, atol, max_k
        budget, estimator = sampled_function("spectral_diagonal", *given)
    else:
        sampling = FunctionSampling(rows=Rows(), fn=function, rtol=0.0, atol=0.0, max_steps=0)
        budget = check_budget(k, 8, operator.in_size(), name)
        estimator = SpectralDiagonalEstimator(sampling)
    solution = solve(spectral_diagonal_p, key, operator, budget, estimator, throw=throw)
    structure = operator.in_structure()
    return restructure(solution, lambda vector: unflatten(structure, vector))

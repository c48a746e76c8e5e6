"""Diagonals of functions of a Hermitian matrix: `sampling` has the samples, their errors and their
derivative.

With a budget, half of it is for a Krylov space V, from b vectors and s steps, and the other half
for probes, with q steps each.

*What is removed from the probes.* Q are the vectors of the first j steps. With D = f(T) - f(T'), T'
after s/8 steps less, the error of f(A) Q Q^H omega ~ V f(T) V^H Q Q^H omega has about the norm
e(j) = ||D V^H Q||_F, which grows with j. That of f(A) omega after q steps is known from Lanczos'
recurrence for T from the start vectors, in comparison with f(T). The largest j with an e(j) below a
tenth of this is taken, before probes are drawn.
"""

import math
from collections.abc import Callable
from typing import ClassVar, final

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, PRNGKeyArray

from .._core.estimate import rounding_of, worse
from .._core.primitive import spectral_diagonal_p
from .._estimators.estimator import solve
from .._estimators.rows import Rows
from .._estimators.solution import Solution, restructure
from .._estimators.tolerance import check_either
from .._operators.block_operator import BlockOperator, unflatten
from .._operators.checks import as_operator
from .._probes.random import split
from .funm import AbstractFunctionEstimator, check_function, check_hermitian, hoist_function
from .quadrature_error import entries_std_err, quadrature_estimate
from .sampling import ExactDiagonalWeights, FunctionSampling, sampled_function

#: The largest number of vectors in the Krylov space.
MOST_VECTORS = 512


def sizes_of(k: int) -> tuple[int, int, int, int]:
    """The number of vectors of the Krylov space, its steps, the number of probes and their steps.
    Entries converge half as fast as quadratic forms, and too few steps are a bias: there are more
    steps than for spectral sums, and as few probes as errors can be told from.
    """
    half = min(k // 2, MOST_VECTORS)
    block = max(1, min(round(math.sqrt(k) / 2.75), half // 4))
    steps = half // block
    left = k - block * steps
    probes = max(3 if left >= 12 else 2, round(math.sqrt(left) / 2))
    return block, steps, probes, left // probes


@final
class SpectralDiagonalEstimator(AbstractFunctionEstimator):
    """The diagonal of f(A) from a budget."""

    sampling: FunctionSampling
    smallest: ClassVar[int] = 8

    @property
    def label(self):
        """See `AbstractEstimator`."""
        return "The diagonal of a function"

    def check(self, operator):
        """See `AbstractEstimator`."""
        check_hermitian(operator, self.label)

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
        """See `AbstractEstimator`. The contraction depends on the leaves of `fn`, too."""
        if isinstance(weights, ExactDiagonalWeights):
            return self.sampling.contract_exact(weights, operator)
        block = BlockOperator(operator)
        basis, recurrences = weights
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
    r"""Estimate the diagonal of $f(A)$ of a Hermitian operator: subgraph centralities
    ($e^A$ of an adjacency matrix), leverage scores ($x / (x + s)$ of a kernel), and other numbers
    that every row has. For the inverse of a positive definite operator,
    [`traceax.inverse_diagonal`][] has a preconditioner, and is better.

    Half of the budget goes to a block Krylov space V, on which f(A) is known, and the other half to
    probes $\omega$ of random signs, each with Lanczos' recurrence of its own, for what V does not
    know. Every entry has two errors: that of the probes, `std_err`, and that of ending the
    recurrences early, `quadrature_error`.

    First derivatives are unbiased, and converge as the value does. With respect to what the
    operator depends on they cost `k` tangent products and, with q = max(k / 4, 4 sqrt(k)), in
    reverse mode q products for every probe, and in forward mode `q k` products, as every Ritz
    vector needs a Krylov space. As these are recurrences of their own, which end early, both modes
    agree for a given key only as far as they have converged. Derivatives are also taken with
    respect to the arrays that `fn` closes over. Second derivatives are refused.

    !!! Example

        ```python
        centralities = tr.spectral_diagonal(jax.random.key(0), jnp.exp, adjacency, k=120)
        centralities.value, centralities.std_err, centralities.quadrature_error
        low, high = centralities.interval()  # 95 % for every entry
        ```

    Cost: at most `k` matvecs, in blocks; `k n` numbers for the Krylov bases; about `5 n k^2`
    operations. With `k >= n`, n matvecs and an eigendecomposition.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `fn`: a JAX function of one real number with real values, as for [`traceax.spectral_sum`][].
    - `operator`: a Hermitian lineax operator with `n` rows, between any PyTrees: tagged symmetric
        (if real) or positive or negative semidefinite.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` the value is exact.
    - `rtol`, `atol`, `max_k`: a tolerance in the place of a budget, as of [`traceax.diagonal`][].
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Solution`][] whose `value`, `std_err` and `quadrature_error` have the structure of
    the operator's input PyTree, real. If f is not finite at a Ritz value, the result is
    `outside_domain` and the value NaN. It is `not_converged`, with the best estimate, if the
    quadrature errors of all entries together exceed four standard errors and 5 % of the value. With
    three to five probes, two standard errors cover about 81 %; `interval()` covers 95 %. Below
    some 24 products the recurrences have two to five steps, which do not always show that they end
    too early: where f or the spectrum varies over many orders of magnitude, as $e^x$ does over 100,
    take more. (Eigenvalues between 1 and 2, and three above 10,000: 5 to 8 products found nothing
    of the 97 that $e^{-x}$ sees, and said so in one of twenty runs.) The quadrature error of an
    exact value is that of rounding.

    **Raises:**

    - `TypeError`: for a key, function, operator or `k` of the wrong type.
    - `ValueError`: for an operator that is not square or not tagged Hermitian, `k < 1`, or a
        function that does not return a scalar.
    - `NotImplementedError`: for a second derivative.

    ??? cite "References"

        T. Chen, E. Hallman, *Krylov-aware stochastic trace estimation*, 2023, arXiv:2205.01736, is
        for traces: `traceax/_functions/diagonal.py` derives the diagonal and its derivative.
    """
    check_function(fn)
    operator = as_operator(operator)
    function = hoist_function(fn, jnp.finfo(BlockOperator(operator).dtype).dtype)
    if check_either("spectral_diagonal", k, rtol, atol, max_k):
        given = Rows(), function, operator, rtol, atol, max_k
        budget, estimator = sampled_function("spectral_diagonal", *given)
    else:
        sampling = FunctionSampling(rows=Rows(), fn=function, rtol=0.0, atol=0.0, max_steps=0)
        budget, estimator = k, SpectralDiagonalEstimator(sampling)
    solution = solve(spectral_diagonal_p, key, operator, budget, estimator, throw=throw)
    structure = operator.in_structure()
    return restructure(solution, lambda vector: unflatten(structure, vector))

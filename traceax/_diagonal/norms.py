"""`traceax.frobenius_norm` and `traceax.row_norms`: roots of a trace and a diagonal of Gram
matrices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Bool, Int, PRNGKeyArray, Real

from .._core.control_flow import nothing_like
from .._core.estimate import Estimate, power_of
from .._core.primitive import diagonal_p, trace_p
from .._estimators.calibration import CALIBRATION
from .._estimators.estimator import AbstractEstimator, check_budget, solve
from .._estimators.solution import Solution, restructure
from .._operators.block_operator import BlockOperator, unflatten
from .._operators.checks import as_operator
from .._operators.gram import adjoint, as_part, semidefinite_product
from .._operators.tags import leaf_dtypes
from .._sketch.weights import AbstractWeights
from .._trace.auto import AutoTraceEstimator
from .auto import AutoDiagonalEstimator


def frobenius_norm(
    key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int, *, throw: bool = False
) -> Solution:
    r"""Estimate the Frobenius norm $\|A\|_F = \sqrt{\mathrm{tr}(A^* A)}$.

    The square of the value is unbiased: it is XNysTrace of $A^* A$. A probe takes two products, one
    with A and one with its adjoint. If squares overflow, or if all are so small that some underflow
    (in single precision, below a norm of some $3 \cdot 10^{-16} \sqrt n$), the estimate is made
    again in another unit, once or twice, which takes `k` further products each time.

    Cost: at most `k` matvecs, half of them with the adjoint, and what a change of the unit takes;
    four blocks of `n x k/2` numbers.

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
    return _root_of_gram(key, operator, k, throw, rows=False)


def row_norms(
    key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int, *, throw: bool = False
) -> Solution:
    r"""Estimate the Euclidean norms of the rows of A.

    Their squares, the diagonal of $A A^*$, are unbiased estimates by XNysDiag. A probe takes two
    products, one with A and one with its adjoint. If the estimate of a square is below 0, the norm
    is 0. Squares that over- or underflow are treated as for [`traceax.frobenius_norm`][].

    Cost: that of [`traceax.frobenius_norm`][], with six blocks of `n x k/2` numbers.

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
    return _root_of_gram(key, operator, k, throw, rows=True)


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


class _Gram(NamedTuple):
    """A Gram operator's estimate, in a unit: the state of the loop."""

    unit: Real[Array, ""]
    rounds: Int[Array, ""]
    again: Bool[Array, ""]
    spent: Int[Array, ""]
    estimate: Estimate
    weights: AbstractWeights


def _gram(operator, unit, rows: bool) -> lx.AbstractLinearOperator:
    narrowest = min(leaf_dtypes(operator), key=lambda dtype: jnp.finfo(dtype).bits)
    unit = unit.astype(jnp.finfo(narrowest).dtype)
    root = jnp.sqrt(unit)
    # Most of the square of the unit goes between both products, so that the image of an extreme
    # operator is not extreme, and some of it to the end, where reverse mode begins.
    part = as_part(operator)
    first, second = (adjoint(operator), part) if rows else (part, adjoint(operator))
    return semidefinite_product(second / root, first / (unit * root))


@final
class GramEstimator(AbstractEstimator):
    """The trace or diagonal of the Gram operator of A, divided by a unit, which is the state of the
    estimate.

    The unit is 1, unless the squares overflow, or are so small that some underflow. The estimate is
    then made again: with the fourth root of the largest or smallest number of the dtype as the
    unit, and if that is not enough, with its square root.
    """

    inner: AutoTraceEstimator | AutoDiagonalEstimator
    rows: bool = eqx.field(static=True)

    def _gram(self, operator, unit):
        return _gram(operator, unit, self.rows)

    def _estimate(self, operator, estimate: Callable[..., Any]):
        limits = jnp.finfo(BlockOperator(operator).dtype)
        smallest = operator.in_size() * float(limits.tiny) / float(limits.eps)
        root = 2.0 ** (limits.minexp // 4)  # a power of 4, of which the root is exact, too

        def step(state: _Gram) -> _Gram:
            found, weights = estimate(self._gram(operator, state.unit))
            sizes = [jnp.max(jnp.abs(x)) for x in jtu.tree_leaves(found.value)]
            largest = jnp.max(jnp.stack(sizes))
            # Before it is divided by the root of the unit (see `gram`), no product may underflow.
            over, under = ~jnp.isfinite(largest), largest * jnp.sqrt(state.unit) < smallest
            again = (over | under) & (state.rounds < 2)
            factor = jnp.where(over, 1 / root, root).astype(state.unit.dtype)
            unit = jnp.where(again, state.unit * factor, state.unit)
            spent = state.spent + found.num_matvecs
            return _Gram(unit, state.rounds + 1, again, spent, found, weights)

        unit, none = jnp.ones((), limits.dtype), jnp.zeros((), jnp.int32)
        nothing = nothing_like(lambda: estimate(self._gram(operator, unit)))
        start = _Gram(unit, none, jnp.array(True), none, *nothing)
        state = lax.while_loop(lambda state: state.again, step, start)
        found = dataclasses.replace(state.estimate, num_matvecs=state.spent, state=state.unit)
        return found, GramWeights(state.weights, state.unit, self.rows)

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        return self._estimate(operator, lambda of: self.inner.compute(key, of, k))

    def exact(self, operator):
        """See `AbstractEstimator`."""
        return self._estimate(operator, self.inner.exact)


@final
class GramWeights(AbstractWeights):
    """The weights of the Gram operator."""

    inner: AbstractWeights
    unit: Real[Array, ""]
    rows: bool = eqx.field(static=True)

    def contract(self, operator):
        """See `AbstractWeights`."""
        return self.inner.contract(_gram(operator, self.unit, self.rows))


def _root_of_gram(key, operator, k, throw, *, rows: bool) -> Solution:
    operator = as_operator(operator)
    primitive, inner = trace_p, AutoTraceEstimator()
    if rows:
        primitive, inner = diagonal_p, AutoDiagonalEstimator()
    budget = check_budget(k, 2, 2 * operator.in_size(), "A Gram operator") // 2
    solution = solve(primitive, key, operator, budget, GramEstimator(inner, rows), throw=throw)
    if rows:
        structure = operator.in_structure()
        solution = restructure(solution, lambda vector: unflatten(structure, vector))

    unit = lax.stop_gradient(solution.state)
    value = jtu.tree_map(root, solution.value)
    std_err = jtu.tree_map(lambda *pair: root_error(*pair) * unit, value, solution.std_err)
    return dataclasses.replace(
        solution,
        value=jtu.tree_map(lambda x: x * unit, value),
        std_err=std_err,
        num_matvecs=2 * solution.num_matvecs,
        stats={**solution.stats, "std.err": std_err},
        tail=solution.tail if rows else CALIBRATION["xnystrace, squares"].tail,
        state=None,
    )

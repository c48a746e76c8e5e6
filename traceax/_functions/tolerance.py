"""Functions of a matrix to a tolerance: estimates from budgets that grow, each by itself, until one
is good enough. The last resort, where the budget allows n products, is the exact value.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray, Real

from .._core.control_flow import if_any
from .._core.derivatives import constant
from .._core.estimate import Estimate, norm_of, relative
from .._estimators.estimator import largest_budget, tolerance_of
from .._estimators.solution import student_quantile
from .._estimators.tolerance import norm_factor
from .funm import AbstractFunctionEstimator

#: The first budget, and the factor from one to the next.
FIRST, GROWTH = 16, 4


def budgets_of(max_k: int, n: int) -> list[int]:
    """The budgets in turn. The last one is what the others leave of `max_k`, or n: exact."""
    is_exact = max_k >= n
    budgets = []
    budget = FIRST
    while 2 * budget <= (n if is_exact else max_k - sum(budgets) - budget):
        budgets.append(budget)
        budget *= GROWTH
    return [*budgets, n if is_exact else max_k - sum(budgets)]


class Chosen(NamedTuple):
    """The number of the budget that a call ended with. The weights are made again."""

    keys: PRNGKeyArray  # one for each budget
    number: Int[Array, ""]


@final
class FunctionToleranceEstimator(AbstractFunctionEstimator):
    """An estimator of a function of a matrix, with a tolerance in the place of a budget."""

    inner: AbstractFunctionEstimator
    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    max_k: int = eqx.field(static=True)

    def judged(self, estimate):
        """See `AbstractEstimator`: both errors together are at most the tolerance."""
        quantile = student_quantile(0.95, estimate.dof, estimate.std_err)
        quantile = jnp.where(estimate.dof > 0, quantile, 1)
        std_err = estimate.inflation * quantile * estimate.std_err
        error = norm_factor(std_err) * norm_of(std_err) + norm_of(estimate.quadrature_error)
        unconverged = relative(error, self.atol + self.rtol * norm_of(estimate.value))
        evidence = dataclasses.replace(estimate.evidence, unconverged=unconverged)
        return dataclasses.replace(estimate, evidence=evidence)

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        del k, weights

        def estimate_from(budget: int, number: int, previous: Estimate | None) -> Estimate:
            if budget == operator.in_size():
                assert previous is not None
                found, _ = self.inner.exact(operator)
                dof = found.dof.astype(previous.dof.dtype)
                found = dataclasses.replace(found, dof=dof, inflation=previous.inflation)
            else:
                found, _ = self.inner.compute(keys[number], operator, budget, False)
            spent = found.num_matvecs + (0 if previous is None else previous.num_matvecs)
            return dataclasses.replace(found, num_matvecs=spent)

        first, *others = budgets_of(self.max_k, operator.in_size())
        keys = jr.split(key, 1 + len(others))
        estimate = estimate_from(first, 0, None)
        chosen = jnp.zeros((), jnp.int32)
        for number, budget in enumerate(others, 1):
            failures = dataclasses.replace(estimate.evidence, unconverged=0.0)
            goes_on = (self.judged(estimate).evidence.unconverged > 1) & ~failures.fails
            estimate = if_any(goes_on, partial(estimate_from, budget, number, estimate), estimate)
            chosen = jnp.where(goes_on, number, chosen)
        return estimate, Chosen(keys, chosen)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        return self.inner.exact(operator)

    def contract(self, weights, operator):
        """See `AbstractEstimator`. The leaves of `fn` have derivatives, too."""
        if not isinstance(weights, Chosen):
            return self.inner.contract(weights, operator)
        still, fixed = constant((operator, self.inner))

        def contracted(budget, number):
            if budget == operator.in_size():
                _, made = fixed.exact(still)
            else:
                _, made = fixed.compute(weights.keys[number], still, budget, True)
            return self.inner.contract(made, operator)

        budgets = budgets_of(self.max_k, operator.in_size())
        branches = [partial(contracted, budget, i) for i, budget in enumerate(budgets)]
        return lax.switch(weights.number, branches)


def with_tolerance(
    name: str,
    inner: AbstractFunctionEstimator,
    operator: lx.AbstractLinearOperator,
    rtol: Any,
    atol: Any,
    max_k: int | None,
) -> tuple[int, FunctionToleranceEstimator]:
    """Returns (budget, estimator) of a call with a tolerance."""
    max_k, budget = largest_budget(max_k, operator.in_size(), name, FIRST)
    tolerances = tolerance_of(rtol, "rtol"), tolerance_of(atol, "atol")
    return budget, FunctionToleranceEstimator(inner, *tolerances, max_k)

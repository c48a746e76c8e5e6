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
from jaxtyping import Array, Int, Real

from .._core.control_flow import if_any, nothing_like
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
    """The number of the budget that a call ended with, and the weights of all budgets: zeros of
    those that were not spent.
    """

    number: Int[Array, ""]
    weights: tuple[Any, ...]


@final
class FunctionToleranceEstimator(AbstractFunctionEstimator):
    """An estimator of a function of a matrix, with a tolerance in the place of a budget."""

    inner: AbstractFunctionEstimator
    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    max_k: int = eqx.field(static=True)

    def judged(self, estimate):
        """See `AbstractEstimator`: both errors together are at most the tolerance."""
        quantile = student_quantile(0.05, estimate.dof, estimate.std_err)
        quantile = jnp.where(estimate.dof > 0, quantile, 1)
        std_err = estimate.inflation * quantile * estimate.std_err
        error = norm_factor(std_err) * norm_of(std_err) + norm_of(estimate.quadrature_error)
        unconverged = relative(error, self.atol + self.rtol * norm_of(estimate.value))
        evidence = dataclasses.replace(estimate.evidence, unconverged=unconverged)
        return dataclasses.replace(estimate, evidence=evidence)

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        del k
        first, *others = budgets_of(self.max_k, operator.in_size())
        keys = jr.split(key, 1 + len(others))

        def next_estimate(budget: int, number: int, previous: Estimate) -> tuple[Estimate, Any]:
            if budget == operator.in_size():
                found, made = self.inner.exact(operator)
                dof = found.dof.astype(previous.dof.dtype)
                found = dataclasses.replace(found, dof=dof, inflation=previous.inflation)
            else:
                found, made = self.inner.compute(keys[number], operator, budget, weights)
            spent = found.num_matvecs + previous.num_matvecs
            return dataclasses.replace(found, num_matvecs=spent), made if weights else None

        estimate, made = self.inner.compute(keys[0], operator, first, weights)
        chosen = Chosen(jnp.zeros((), jnp.int32), (made,))
        for number, budget in enumerate(others, 1):
            failures = dataclasses.replace(estimate.evidence, unconverged=0.0)
            goes_on = (self.judged(estimate).evidence.unconverged > 1) & ~failures.fails
            new = partial(next_estimate, budget, number, estimate)
            estimate, made = if_any(goes_on, new, (estimate, nothing_like(new)[1]))
            chosen = Chosen(jnp.where(goes_on, number, chosen.number), (*chosen.weights, made))
        return estimate, chosen if weights else None

    def exact(self, operator):
        """See `AbstractEstimator`."""
        return self.inner.exact(operator)

    def contract(self, weights, operator):
        """See `AbstractEstimator`. The leaves of `fn` have derivatives, too."""
        if not isinstance(weights, Chosen):
            return self.inner.contract(weights, operator)
        branches = [partial(self.inner.contract, made, operator) for made in weights.weights]
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

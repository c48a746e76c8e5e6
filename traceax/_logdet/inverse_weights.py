"""The derivative of the inverse of a positive definite operator, and the exact inverse."""

import dataclasses
from typing import Any, final

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact

from .._core.estimate import Estimate, scale_of
from .._operators.block_operator import BlockOperator
from .._sketch.leave_one_out import matmul
from .._sketch.low_rank import AbstractFactors
from .._sketch.weights import AbstractWeights
from .conjugate_gradients import definite_solve
from .estimator import exact_logdet
from .weights import ExactLogdetWeights


@final
class InverseWeights(AbstractWeights):
    """The samples as functions of A. A contraction costs a matvec and a solve for every probe."""

    x: Inexact[Array, "n p"]
    omega: Inexact[Array, "n p"]  # divided by the number of probes
    factors: AbstractFactors
    of_trace: bool = eqx.field(static=True)

    def contract(self, block):
        """See `AbstractWeights`. It depends on A as x does."""
        forms = (self.omega * self.weights_at(block.operator).x).real
        return jnp.sum(forms) if self.of_trace else jnp.sum(forms, axis=1)

    def weights_at(self, operator):
        """See above."""
        block = BlockOperator(operator)
        images = block.mm(self.x)
        change = definite_solve(block, self.factors, images - lax.stop_gradient(images))
        return dataclasses.replace(self, x=self.x - change)


@final
class ExactInverseWeights(AbstractWeights):
    """The same for the exact inverse."""

    inverse: ExactLogdetWeights
    of_trace: bool = eqx.field(static=True)

    def contract(self, block):
        """See `AbstractWeights`."""
        diagonal = jnp.diagonal(self.weights_at(block.operator).inverse.inverse).real
        return jnp.sum(diagonal) if self.of_trace else diagonal

    def weights_at(self, operator):
        """See above."""
        return dataclasses.replace(self, inverse=self.inverse.weights_at(operator))


def exact_inverse(operator, of_trace: bool) -> tuple[Estimate, Any]:
    """The diagonal of the inverse, or its sum, from a factorisation, and its weights."""
    exact = exact_logdet(operator)
    weights = exact.weights()
    inverse = weights.inverse
    value = jnp.diagonal(inverse).real
    unit = scale_of(inverse)
    error = matmul(jnp.square(jnp.abs(inverse / unit)), exact.rounding * unit) * unit
    if of_trace:
        value = jnp.sum(value)
        error = jnp.sum(error)
    numbers = {"value": value, "std_err": jnp.zeros_like(value), "quadrature_error": error}
    return dataclasses.replace(exact.estimate, **numbers), ExactInverseWeights(weights, of_trace)

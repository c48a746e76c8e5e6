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


@final
class InverseWeights(AbstractWeights):
    """The samples as functions of A. A contraction costs a matvec and a solve for every probe."""

    x: Inexact[Array, "n p"]
    omega: Inexact[Array, "n p"]  # divided by the number of probes
    factors: AbstractFactors | None  # None if x is the inverse, and omega the identity
    of_trace: bool = eqx.field(static=True)

    def contract(self, block):
        """See `AbstractWeights`. It depends on A as x does."""
        forms = (self.omega * self.weights_at(block.operator).x).real
        return jnp.sum(forms) if self.of_trace else jnp.sum(forms, axis=1)

    def weights_at(self, operator):
        """See above."""
        block = BlockOperator(operator)
        images = block.mm(self.x)
        moved = images - lax.stop_gradient(images)
        if self.factors is None:
            change = matmul(self.x, moved)
        else:
            change = definite_solve(block, self.factors, moved)
        return dataclasses.replace(self, x=self.x - change)


def exact_inverse(operator, of_trace: bool) -> tuple[Estimate, Any]:
    """The diagonal of the inverse, or its sum, from a factorisation, and its weights."""
    exact = exact_logdet(operator)
    inverse = exact.weights().inverse
    value = jnp.diagonal(inverse).real
    unit = scale_of(inverse)
    error = matmul(jnp.square(jnp.abs(inverse / unit)), exact.rounding * unit) * unit
    if of_trace:
        value = jnp.sum(value)
        error = jnp.sum(error)
    numbers = {"value": value, "std_err": jnp.zeros_like(value), "quadrature_error": error}
    one = jnp.eye(len(inverse), dtype=inverse.dtype)
    weights = InverseWeights(inverse, one, None, of_trace)
    return dataclasses.replace(exact.estimate, **numbers), weights

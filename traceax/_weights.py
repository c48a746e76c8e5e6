"""The derivative of an estimate: its weights, held fixed.

An estimate of tr(A) that is linear in A *given the probes and what was learnt from them* is

    value = <G, A> = sum_j v_j^H A u_j,      E[G] = I,

so that d tr(A) = tr(dA) is estimated without bias by sum_j v_j^H dA u_j with u_j, v_j held fixed.
That is linear in dA, needs no derivative of a factorisation, and is right at every order.
"""

import abc
from typing import final

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact

from ._operator import BlockOperator


class AbstractWeights(eqx.Module):
    """The matrix `G = sum_j u_j v_j^H` of an estimate, as something that can be contracted."""

    @abc.abstractmethod
    def contract(self, operator: lx.AbstractLinearOperator) -> Inexact[Array, ""]:
        """The number `<G, A> = sum_j v_j^H A u_j`, differentiable in the operator.

        **Arguments:**

        - `operator`: the operator A.

        **Returns:**

        A scalar array of the operator's working dtype.
        """

    def moved(self, operator: lx.AbstractLinearOperator) -> "AbstractWeights":
        """The weights themselves, as a function of the operator: see `AbstractEstimator`.

        **Arguments:**

        - `operator`: the operator A.

        **Returns:**

        Weights of the same structure. E[G] = I does not depend on A.
        """
        return self


@final
class LowRankWeights(AbstractWeights):
    """`G = U V^H` with explicit factors. Contracting costs as many matvecs as `U` has columns."""

    u: Inexact[Array, "n p"]
    v: Inexact[Array, "n p"]

    def contract(self, operator):
        """See `AbstractWeights`."""
        return jnp.sum(jnp.conj(self.v) * BlockOperator(operator).mm(self.u))

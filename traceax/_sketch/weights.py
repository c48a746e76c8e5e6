"""The derivative of an estimate: its weights, held fixed.

An estimate of tr(A) that is linear in A, *given the probes and what was computed from them*, is

    value = <G, A> = sum_j v_j^H A u_j,      E[G] = I,

so that sum_j v_j^H dA u_j, with u_j and v_j held fixed, is an unbiased estimate of
d tr(A) = tr(dA). It is linear in dA, needs no derivative of a factorisation, and is right at every
order.
"""

import abc
from typing import Any, final

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact

from .._operators.block_operator import BlockOperator


class AbstractWeights(eqx.Module):
    r"""The matrix $G = \sum_j u_j v_j^*$ of an estimate, in a form that can be contracted with A.

    For a diagonal every entry has its own G, and `contract` returns the vector of all entries.
    """

    @abc.abstractmethod
    def contract(self, block: BlockOperator) -> Any:
        r"""The number $\langle G, A \rangle = \sum_j v_j^* A u_j$, differentiable in A, of the
        working dtype of the operator.
        """

    def weights_at(self, operator: lx.AbstractLinearOperator) -> "AbstractWeights":
        """The weights as a function of A, for derivatives of higher order: constant where E[G] = I,
        as for traces and diagonals.
        """
        return self


@final
class LowRankWeights(AbstractWeights):
    """$G = U V^*$, for traces. A contraction costs as many matvecs as U has columns.

    **Attributes:**

    - `u`: the vectors that A multiplies, as columns.
    - `v`: the vectors of the inner products with these products, as columns.
    """

    u: Inexact[Array, "n p"]
    v: Inexact[Array, "n p"]

    def contract(self, block):
        """See `AbstractWeights`."""
        return jnp.sum(block.forms(block.leaves(self.v), block.leaves(self.u)))

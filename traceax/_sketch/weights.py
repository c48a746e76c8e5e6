"""The derivative of an estimate: its weights, held fixed.

An estimate of tr(A) that is linear in A, *given the probes and what was computed from them*, is

    value = <G, A> = sum_j v_j^H A u_j,      E[G] = I,

so that sum_j v_j^H dA u_j, with u_j and v_j held fixed, is an unbiased estimate of
d tr(A) = tr(dA). It is linear in dA, needs no derivative of a factorisation, and is right at every
order.
"""

import abc
from collections.abc import Callable
from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from equinox import AbstractVar
from jax import lax
from jaxtyping import Array, Inexact, Int, PyTree

from .._operators.block_operator import BlockOperator


class AbstractWeights(eqx.Module):
    """The matrix `G = sum_j u_j v_j^H` of an estimate, in a form that can be contracted with A.

    For a diagonal every entry has its own G, and `contract` returns the vector of all entries.
    """

    @abc.abstractmethod
    def contract(self, operator: lx.AbstractLinearOperator) -> Inexact[Array, ""]:
        """The number `<G, A> = sum_j v_j^H A u_j`, differentiable in the operator.

        **Arguments:**

        - `operator`: the operator A.

        **Returns:**

        A scalar array of the operator's working dtype.
        """

    def weights_at(self, operator: lx.AbstractLinearOperator) -> "AbstractWeights":
        """The weights themselves, as a function of the operator: see `AbstractEstimator`.

        **Arguments:**

        - `operator`: the operator A.

        **Returns:**

        Weights of the same structure. E[G] = I does not depend on A.
        """
        return self


@final
class InUse(eqx.Module):
    """Which columns of padded weights are in use: those of the first stages of a run.

    **Attributes:**

    - `ends`: the number of columns up to the end of each stage.
    - `level`: the last stage whose columns are in use.
    """

    ends: tuple[int, ...] = eqx.field(static=True)
    level: Int[Array, ""]

    def each(self, multiply: Callable[..., Array], *blocks: Inexact[Array, "n c"]) -> list[Array]:
        """For every stage `multiply`, given the columns of this stage; 0 where they are not in use.
        (If a block is several times as wide, columns from each part belong to a stage.)
        """
        starts, room = (0, *self.ends[:-1]), self.ends[-1]

        def columns(block, start, end):
            parts = range(0, block.shape[1], room)
            return jnp.concatenate([block[:, i + start : i + end] for i in parts], axis=1)

        found = []
        for j, (start, end) in enumerate(zip(starts, self.ends, strict=True)):
            mine = [columns(block, start, end) for block in blocks]
            found.append(self.if_used(j, lambda mine=mine: multiply(*mine)))
        return found

    def if_used(self, stage: int, make: Callable[[], PyTree[Array]]) -> PyTree[Array]:
        """`make()`, or zeros if this stage is not in use."""
        zeros = jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make))
        return lax.cond(stage <= self.level, make, lambda: zeros)


@final
class PanelWeights(AbstractWeights):
    """The sum of the weights of panels, whose probes are drawn again.

    **Attributes:**

    - `panels`: their weights, stacked.
    - `width`: the number of probes in a panel.
    - `together`: the number of panels that are contracted at once.
    - `in_use`: which of the probes are in use.
    """

    panels: AbstractWeights
    width: int = eqx.field(static=True)
    together: int = eqx.field(static=True)
    in_use: InUse | None = None

    def contract(self, operator):
        """See `AbstractWeights`."""
        assert self.in_use is not None
        # Without the checkpoint, reverse mode would store the probes of all panels.
        one = jax.checkpoint(lambda panel: panel.contract(operator), prevent_cse=False)
        terms, start = [], 0
        for j, rows in enumerate(self.in_use.ends):
            stop = rows // self.width
            panels = jtu.tree_map(lambda x, a=start, b=stop: x[a:b], self.panels)

            def total(panels=panels):
                each = lax.map(one, panels, batch_size=self.together)
                return jtu.tree_map(lambda x: jnp.sum(x, axis=0), each)

            terms.append(self.in_use.if_used(j, total))
            start = stop
        return jtu.tree_map(lambda *x: sum(x[1:], start=x[0]), *terms)


class AbstractTwoSidedWeights(AbstractWeights):
    """A diagonal as a function of products with A and with its adjoint, linear in all of them.

    Columns that are 0 (of Omega and Q alike) change nothing.
    """

    q: AbstractVar[Inexact[Array, "n m"]]
    omega: AbstractVar[Inexact[Array, "n p"]]
    in_use: AbstractVar[InUse | None]

    @abc.abstractmethod
    def combine(
        self, products: Inexact[Array, "n p"], adjoint_products: Inexact[Array, "n m"]
    ) -> Inexact[Array, " n"]:
        """The diagonal.

        **Arguments:**

        - `products`: A Omega.
        - `adjoint_products`: A^H Q.

        **Returns:**

        A vector.
        """

    def contract(self, operator):
        """See `AbstractWeights`."""
        block = BlockOperator(operator)
        if self.in_use is None:
            return self.combine(block.mm(self.omega), block.adjoint_mm(self.q))
        pairs = (block.mm, self.omega), (block.adjoint_mm, self.q)
        products = [jnp.concatenate(self.in_use.each(*pair), axis=1) for pair in pairs]
        return self.combine(*products)


@final
class LowRankWeights(AbstractWeights):
    """`G = U V^H` with explicit factors, for traces.

    A contraction costs as many matvecs as `U` has columns. Columns that are 0 change nothing.

    **Attributes:**

    - `u`: the vectors that A multiplies, as columns.
    - `v`: the vectors of the inner products with these products, as columns.
    - `in_use`: which of the columns are in use; None if all are.
    """

    u: Inexact[Array, "n p"]
    v: Inexact[Array, "n p"]
    in_use: InUse | None = None

    def contract(self, operator):
        """See `AbstractWeights`."""
        block = BlockOperator(operator)

        def forms(u, v):
            return jnp.sum(block.forms(block.leaves(v), block.leaves(u)))

        if self.in_use is None:
            return forms(self.u, self.v)
        return sum(self.in_use.each(forms, self.u, self.v))

"""The derivative of an estimate: its weights, held fixed.

An estimate of tr(A) that is linear in A, *given the probes and what was computed from them*, is

    value = <G, A> = sum_j v_j^H A u_j,      E[G] = I,

so that sum_j v_j^H dA u_j, with u_j and v_j held fixed, is an unbiased estimate of
d tr(A) = tr(dA). It is linear in dA, needs no derivative of a factorisation, and is right at every
order.
"""

import abc
from collections.abc import Callable
from functools import partial
from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from equinox import AbstractVar
from jax import lax
from jaxtyping import Array, Inexact, Int, PyTree

from .._core.control_flow import nothing_like
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
    """Which columns of padded weights are in use: the first ones. They are contracted part by part.

    **Attributes:**

    - `ends`: the number of columns up to the end of each part.
    - `count`: the number of columns in use.
    """

    ends: tuple[int, ...] = eqx.field(static=True)
    count: Int[Array, ""]

    def each(self, multiply: Callable[..., Array], *blocks: Inexact[Array, "n c"]) -> list[Array]:
        """`multiply` of the columns of every part; 0 where they are not in use. (If a block is
        several times as wide, columns of each of these belong to a part.)
        """
        room = self.ends[-1]

        def part(start, end):
            def columns(block):
                each = [block[:, i + start : i + end] for i in range(0, block.shape[1], room)]
                return jnp.concatenate(each, axis=1)

            return multiply(*map(columns, blocks))

        return self.parts(part)

    def parts(self, make: Callable[[int, int], PyTree[Array]]) -> list[PyTree[Array]]:
        """`make(start, end)` for every part, or zeros if its columns are not in use."""
        found = []
        for start, end in zip((0, *self.ends[:-1]), self.ends, strict=True):
            one = partial(make, start, end)
            found.append(lax.cond(start < self.count, one, partial(nothing_like, one)))
        return found

    def total(self, make: Callable[[int, int], PyTree[Array]]) -> PyTree[Array]:
        """The sum of these."""
        return jtu.tree_map(lambda *x: sum(x[1:], start=x[0]), *self.parts(make))


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
        count = self.in_use.count

        # Without the checkpoint, reverse mode would store the probes of all panels.
        @partial(jax.checkpoint, prevent_cse=False)
        def one(pair):
            start, panel = pair
            term = panel.contract(operator)
            return jtu.tree_map(lambda x: jnp.where(start < count, x, jnp.zeros_like(x)), term)

        def part(start, end):
            starts = jnp.arange(start, end, self.width, dtype=count.dtype)
            some = slice(start // self.width, end // self.width)
            panels = jtu.tree_map(lambda x: x[some], self.panels)
            each = lax.map(one, (starts, panels), batch_size=self.together)
            return jtu.tree_map(lambda x: jnp.sum(x, axis=0), each)

        return self.in_use.total(part)


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
        return jnp.sum(jnp.stack(self.in_use.each(forms, self.u, self.v)))

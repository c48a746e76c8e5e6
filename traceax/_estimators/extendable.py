"""Algorithms that can go on with further blocks of probes, without making a product again."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, get_type_hints

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
from equinox import AbstractVar
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree, Real

from .._core.estimate import Estimate, if_wanted, rounding_of
from .._linalg.factorisations import complement, divide_by_upper
from .._operators.block_operator import BlockOperator
from .._sketch.leave_one_out import append_basis, matmul
from .._sketch.weights import AbstractWeights, LowRankWeights
from .calibration import Calibration
from .rows import Rows


class AbstractExtendable(eqx.Module):
    """An algorithm that can be extended by blocks of probes: how a block changes the state, and the
    estimate from a state.

    The state is a NamedTuple of arrays. The axes with one entry for each probe are those that the
    annotations of the state call m, as in `Inexact[Array, "n m"]`. A final subclass declares the
    abstract variables, and implements the abstract methods.
    """

    #: The number of matvecs that a probe takes.
    matvecs_per_probe: AbstractVar[int]

    #: The fewest probes that a block may have.
    least_probes: ClassVar[int] = 1

    #: The constants of the error bars, as measured for the algorithm.
    calibration: AbstractVar[Calibration]

    def prepare(self, operator: lx.AbstractLinearOperator) -> BlockOperator:
        """The operator in the form that `extend` multiplies."""
        return BlockOperator(operator).linearised()

    @abc.abstractmethod
    def extend(self, state: Any, key: PRNGKeyArray, block: BlockOperator, k: int) -> Any:
        """Spend products on new probes.

        **Arguments:**

        - `state`: the state so far; None at the start.
        - `key`: the random key of the new probes.
        - `block`: the operator, as `prepare` made it.
        - `k`: the number of matvecs to spend.

        **Returns:**

        The new state.
        """

    @abc.abstractmethod
    def estimate(self, state: Any, block: BlockOperator) -> Estimate:
        """The estimate from all probes so far, without further products. Its standard error
        includes rounding.

        **Arguments:**

        - `state`: the state.
        - `block`: the operator, as `prepare` made it.

        **Returns:**

        The estimate.
        """

    @abc.abstractmethod
    def weights(
        self,
        state: Any,
        block: BlockOperator,
        keys: Sequence[tuple[Any, Any]],
        budgets: Sequence[int],
    ) -> tuple[Sequence[AbstractWeights], list[float]]:
        """The weights of the estimate, one part for each block of probes.

        **Arguments:**

        - `state`: the state.
        - `block`: the operator, as `prepare` made it.
        - `keys`: for each block its random key, as data and implementation.
        - `budgets`: the matvecs spent up to the end of each block.

        **Returns:**

        The parts, and the factor of each in their sum.
        """

    @abc.abstractmethod
    def complete(self, state: Any, block: BlockOperator) -> "Completed":
        """The exact trace (or diagonal), from the state and further products.

        **Arguments:**

        - `state`: the state.
        - `block`: the operator, as `prepare` made it.

        **Returns:**

        A `Completed`.
        """


def probe_axes(state: type) -> list[tuple[int, ...]]:
    """For each field of a state, the axes that have one entry for each probe."""
    dims = [getattr(hint, "dim_str", "").split() for hint in get_type_hints(state).values()]
    return [tuple(i for i, name in enumerate(names) if name == "m") for names in dims]


def run_once(
    extendable: AbstractExtendable, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
) -> tuple[Estimate, AbstractWeights]:
    """The estimate from a single block."""
    block = extendable.prepare(operator)
    state = extendable.extend(None, key, block, k)
    estimate = extendable.estimate(state, block)
    keys = [(jr.key_data(key), jr.key_impl(key))]
    weights = if_wanted(lambda: extendable.weights(state, block, keys, [k])[0][0])
    return extendable.calibration.applied(estimate), weights


def by_block(weights: LowRankWeights, left: int, widths: Sequence[int]) -> list[AbstractWeights]:
    """Cut weights into one part for each block of probes.

    **Arguments:**

    - `weights`: the weights. Both in their first `left` columns and in the others, the columns are
        in the order of the blocks.
    - `left`: the number of columns in the first half.
    - `widths`: the number of columns in each half, up to the end of each block.

    **Returns:**

    A list of weights.
    """
    if len(widths) == 1:
        return [weights]

    def part(x, start, end):
        return jnp.concatenate([x[:, start:end], x[:, left + start : left + end]], axis=1)

    starts = [0, *widths[:-1]]
    return [
        LowRankWeights(part(weights.u, a, b), part(weights.v, a, b))
        for a, b in zip(starts, widths, strict=True)
    ]


class Completed(NamedTuple):
    """The exact value, from a state and further products."""

    value: PyTree[Inexact[Array, "..."]]
    #: 0, except for products of half precision, whose rounding is far above that of the value.
    std_err: PyTree[Real[Array, "..."]]
    num_matvecs: int | Int[Array, ""]  # the further products


def complete_diagonal(
    block: BlockOperator,
    q: Inexact[Array, "n m"],
    products: Inexact[Array, "n m"],
    others: tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]] | None = None,
    rows: Rows = Rows(),
) -> Completed:
    """The diagonal of A, from products with given vectors and with their orthogonal complement.

    **Arguments:**

    - `block`: the operator.
    - `q`: orthonormal columns.
    - `products`: A q.
    - `others`: more vectors, which together with q are well-conditioned, and the products of A with
        them; or None.
    - `rows`: which rows to add up.

    **Returns:**

    A `Completed`: it takes n further products, less the number of given vectors.
    """
    if others is not None:
        vectors, other_products = others
        basis, c, r = append_basis(q, vectors)
        # vectors = q c + basis r, hence A basis = (A vectors - A q c) r^{-1}.
        rest = divide_by_upper(other_products - matmul(products, c), r)
        q, products = jnp.concatenate([q, basis], axis=1), jnp.concatenate([products, rest], axis=1)
    orthogonal = complement(q)
    missing = block.mm(orthogonal)
    diagonal = jnp.sum(jnp.conj(q) * products, axis=1)
    diagonal = diagonal + jnp.sum(jnp.conj(orthogonal) * missing, axis=1)

    value = rows.of_vector(diagonal)
    std_err = jnp.zeros_like(value.real)
    if block.eps > float(jnp.finfo(block.dtype).eps):
        size = jnp.hypot(rows.norms(products), rows.norms(missing))
        std_err = rounding_of(size, block.eps)
    return Completed(value, std_err, orthogonal.shape[1])


def complete_trace(block: BlockOperator, q: Array, products: Array, others=None) -> Completed:
    """The trace of A, from products with given vectors and with their orthogonal complement.

    **Arguments:**

    - `block`: the operator.
    - `q`: orthonormal columns.
    - `products`: A q.
    - `others`: more vectors, which together with q are well-conditioned, and the products of A with
        them; or None.

    **Returns:**

    A `Completed`: it takes n further products, less the number of given vectors.
    """
    done = complete_diagonal(block, q, products, others, Rows((block.n,)))
    return done._replace(value=done.value[0], std_err=done.std_err[0])

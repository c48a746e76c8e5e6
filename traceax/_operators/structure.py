"""The parts of an operator whose diagonal is known without probing."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Inexact, Int

from .._core.estimate import status_of
from .block_operator import BlockOperator, is_tagged
from .shift import stored_diagonal
from .width import batch_size_of, in_batches


class KnownParts(NamedTuple):
    """`tr(A) = exact + scale tr(rest)`, or the same of diagonals; `rest=None` if nothing is left.

    `exact` and `scale` are differentiable and of the working dtype; `has_exact` tells (statically)
    whether anything was split off, and `status` whether what that was read from is finite.
    """

    exact: Inexact[Array, "..."]
    num_matvecs: int
    scale: Inexact[Array, ""]
    rest: lx.AbstractLinearOperator | None
    has_exact: bool
    status: Int[Array, ""]


def _banded_diagonal(operator: lx.AbstractLinearOperator, width: int) -> tuple[Array, int]:
    # Rows i and j with the same colour i = j (mod width) do not meet in a (tri)diagonal matrix, so
    # that (A e_c)_i = A_ii for the indicator e_c of the colour of i.
    block = BlockOperator(operator)
    colours = min(width, block.n)
    indicator = (jnp.arange(block.n)[:, None] % colours) == jnp.arange(colours)[None, :]
    products = block.mm(indicator.astype(block.dtype))
    return jnp.sum(jnp.where(indicator, products, jnp.zeros((), block.dtype)), axis=1), colours


class _Known(NamedTuple):
    """A trace (or diagonal), the number of products it took, and whether all entries are finite."""

    exact: Inexact[Array, "..."]
    num_matvecs: int
    status: Int[Array, ""]


def _known(operator: lx.AbstractLinearOperator, paid: bool, diagonal: bool) -> _Known | None:
    """What is known of an operator, or None if that is not cheap."""
    dtype = BlockOperator(operator).dtype
    n = operator.in_size()
    if is_tagged(lx.has_unit_diagonal, operator):  # the identity among them
        return _Known(jnp.ones(n, dtype) if diagonal else jnp.asarray(n, dtype), 0, status_of())
    entries, spent, status = stored_diagonal(operator), 0, status_of()
    if entries is not None:
        # A product would show NaN off the diagonal, too. Looking at all entries costs as much as
        # one product.
        status = status_of(*jtu.tree_leaves(eqx.filter(operator, eqx.is_inexact_array)))
    elif not paid:
        return None
    elif is_tagged(lx.is_diagonal, operator):
        entries, spent = _banded_diagonal(operator, 1)
    elif is_tagged(lx.is_tridiagonal, operator):
        entries, spent = _banded_diagonal(operator, 3)
    else:
        return None
    return _Known(entries if diagonal else jnp.sum(entries), spent, status)


def split_known_parts(
    operator: lx.AbstractLinearOperator, budget: int, cost_of_rest: int, diagonal: bool = False
) -> KnownParts:
    """Split off what is exact: stored, diagonal, tridiagonal, identity and unit-diagonal parts of
    sums, multiples, quotients and negations.

    **Arguments:**

    - `operator`: the operator.
    - `budget`: the number of matvecs there is.
    - `cost_of_rest`: how many of them must remain if anything is left over. A diagonal that is
        known by its tag only takes products to read (one, or three if tridiagonal): it is split
        off where they can be paid.
    - `diagonal`: whether `exact` should be the diagonal rather than the trace.

    **Returns:**

    A `KnownParts`.
    """
    parts = _split_known_parts(operator, True, diagonal)
    spent = parts.num_matvecs + (0 if parts.rest is None else cost_of_rest)
    return parts if spent <= budget else _split_known_parts(operator, False, diagonal)


def _split_known_parts(
    operator: lx.AbstractLinearOperator, paid: bool, diagonal: bool
) -> KnownParts:
    """`split_known_parts`, with or without parts that take products."""
    parts = _split_composite(operator, paid, diagonal)
    if parts.rest is None:
        return parts
    known = _known(operator, paid, diagonal)
    if known is None:
        return parts
    exact, spent, status = known
    return KnownParts(exact.astype(parts.exact.dtype), spent, parts.scale, None, True, status)


def _split_composite(operator: lx.AbstractLinearOperator, paid: bool, diagonal: bool) -> KnownParts:
    """Split a sum, multiple, quotient, negation or tagged operator into what its parts give.

    A factor in front of everything is taken out too, so that the tags of what it multiplies
    still count: the sign of a traced factor is unknown, hence `c K` is not tagged semidefinite.
    """
    dtype = BlockOperator(operator).dtype
    one = jnp.ones((), dtype)
    nothing = jnp.zeros(operator.in_size() if diagonal else (), dtype)
    whole = KnownParts(nothing, 0, one, operator, False, status_of())

    if isinstance(operator, lx.AddLinearOperator):
        terms = (operator.operator1, operator.operator2)
        parts = [_split_known_parts(term, paid, diagonal) for term in terms]
        if not any(part.has_exact for part in parts):
            return whole
        exact = parts[0].exact.astype(dtype) + parts[1].exact.astype(dtype)
        spent = parts[0].num_matvecs + parts[1].num_matvecs
        status = jnp.maximum(parts[0].status, parts[1].status)
        left = [part for part in parts if part.rest is not None]
        if len(left) < 2:
            scale, rest = (left[0].scale.astype(dtype), left[0].rest) if left else (one, None)
            return KnownParts(exact, spent, scale, rest, True, status)
        # A part with nothing exact in it stays as it was written, for the sake of its tags.
        first, second = (
            part.rest * part.scale if part.has_exact else term  # pyright: ignore
            for part, term in zip(left, terms, strict=True)
        )
        return KnownParts(exact, spent, one, first + second, True, status)

    if isinstance(operator, lx.NegLinearOperator):
        return _times(_split_known_parts(operator.operator, paid, diagonal), -one)
    if isinstance(operator, lx.MulLinearOperator):
        return _times(
            _split_known_parts(operator.operator, paid, diagonal),
            jnp.asarray(operator.scalar).astype(dtype),
        )
    if isinstance(operator, lx.DivLinearOperator):
        factor = one / jnp.asarray(operator.scalar).astype(dtype)
        return _times(_split_known_parts(operator.operator, paid, diagonal), factor)
    if isinstance(operator, lx.TaggedLinearOperator):
        # The tags belong to the whole, not to what is left of it. (On Gaussian-process kernels
        # XTrace on K alone beats XNysTrace on K + s I, whose flat tail it cannot compress.)
        inner = _split_known_parts(operator.operator, paid, diagonal)
        if not inner.has_exact:
            return whole
        if inner.rest is None:
            return inner
        return inner._replace(rest=in_batches(inner.rest, batch_size_of(operator)))
    return whole


def _times(part: KnownParts, factor: Array) -> KnownParts:
    exact, scale = part.exact.astype(factor.dtype), part.scale.astype(factor.dtype)
    return part._replace(exact=exact * factor, scale=scale * factor)

"""What is known of an operator without a product, from the way it is written: entries (columns, the
diagonal, the matrix), the diagonal part of a sum such as K + s I, and the scaling by that part.

All functions here take sums, multiples and tags apart by `_fold`. They differ in what they compute
from the parts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Bool, Inexact, Int, Real

from .._core.estimate import scale_of, status_of
from .._core.precision import any_promotion, matmul
from .block_operator import BlockOperator, is_tagged, semidefinite_sign
from .sparse import SparseLinearOperator
from .width import STORED, batch_size_of, in_batches

_T = TypeVar("_T")

# Operators whose `as_matrix` needs no product and has its rows in the order of those of a block.
_STORED_WHOLE = (
    lx.MatrixLinearOperator,
    lx.DiagonalLinearOperator,
    lx.TridiagonalLinearOperator,
    lx.IdentityLinearOperator,
)


def _has_columns(operator: Any) -> bool:
    """Whether an operator without parts has a method `columns`, as kernels have."""
    return callable(getattr(operator, "columns", None))


def _has_columns_and_diagonal(operator: Any) -> bool:
    """Whether such an operator registers `lineax.diagonal` as well, which lineax does not insist
    on.
    """
    dispatch = lx.diagonal.dispatch
    return _has_columns(operator) and dispatch(type(operator)) is not dispatch(object)


def _fold(
    operator: Any,
    leaf: Callable[[Any], _T],
    *,
    add: Callable[[Any, _T, _T], _T],
    times: Callable[[Any, Array, _T], _T],
    tagged: Callable[[Any, _T], _T],
) -> _T:
    """Compute a value for an operator from the values for its parts.

    **Arguments:**

    - `operator`: the operator.
    - `leaf`: the value for an operator without parts: no sum, multiple or tagged operator.
    - `add`: the value for a sum, from the values for its two terms.
    - `times`: the value for a multiple, quotient or negation, from its factor and the value for the
        operator that is multiplied.
    - `tagged`: the value for a tagged operator, from the value for the operator inside.
    """
    again: Any = partial(_fold, leaf=leaf, add=add, times=times, tagged=tagged)
    if isinstance(operator, lx.TaggedLinearOperator):
        return tagged(operator, again(operator.operator))
    if isinstance(operator, lx.AddLinearOperator):
        return add(operator, again(operator.operator1), again(operator.operator2))
    one = jnp.ones((), BlockOperator(operator).dtype)
    if isinstance(operator, lx.NegLinearOperator):
        return times(operator, -one, again(operator.operator))
    if isinstance(operator, lx.MulLinearOperator):
        factor = jnp.asarray(operator.scalar).astype(one.dtype)
        return times(operator, factor, again(operator.operator))
    if isinstance(operator, lx.DivLinearOperator):
        factor = one / jnp.asarray(operator.scalar).astype(one.dtype)
        return times(operator, factor, again(operator.operator))
    return leaf(operator)


class Terms(NamedTuple):
    """A = diag(shift) + (the rest)."""

    shift: Inexact[Array, " n"] | None  # None if A has no stored diagonal part
    has_rest: bool
    semidefinite: bool  # whether every part of the rest is tagged semidefinite
    sign: Real[Array, ""]  # if so, 1 for positive, -1 for negative (factors may be traced)

    @property
    def positive(self) -> Bool[Array, ""]:
        """Whether tags and factors say that the rest is positive semidefinite."""
        return jnp.asarray(self.semidefinite) & (self.sign > 0)


def terms_of(operator: lx.AbstractLinearOperator) -> Terms:
    """Find the diagonal part of a sum.

    **Arguments:**

    - `operator`: the operator, whose sums, multiples and tags are taken apart.

    **Returns:**

    The `Terms`. This takes no product.
    """

    def leaf(operator):
        if isinstance(operator, STORED) and is_tagged(lx.is_diagonal, operator):
            dtype = BlockOperator(operator).dtype
            return Terms(lx.diagonal(operator).astype(dtype), False, True, jnp.ones(()))
        sign = semidefinite_sign(operator)
        return Terms(None, True, sign != 0, jnp.asarray(float(sign)))

    def add(_, first, second):
        shifts = [part.shift for part in (first, second) if part.shift is not None]
        shift = sum(shifts[1:], start=shifts[0]) if shifts else None
        semidefinite = first.semidefinite and second.semidefinite
        signs = [part.sign for part in (first, second) if part.has_rest]
        sign = signs[0] if signs else first.sign
        if len(signs) == 2:
            sign = jnp.where(signs[0] == signs[1], sign, 0)
        return Terms(shift, first.has_rest or second.has_rest, semidefinite, sign)

    def times(_, factor, inner):
        shift = inner.shift
        shift = None if shift is None else factor.astype(shift.dtype) * shift
        sign = inner.sign * jnp.sign(factor.real).astype(inner.sign.dtype)
        return inner._replace(shift=shift, sign=sign)

    def tagged(operator, inner):
        sign = semidefinite_sign(operator)
        if inner.shift is None and sign != 0:
            return inner._replace(semidefinite=True, sign=jnp.asarray(float(sign)))
        return inner

    return _fold(operator, leaf, add=add, times=times, tagged=tagged)


def _stored(operator: Any, read: Callable[[Any], Array | None]) -> Array | None:
    """The sum over all parts of what `read` returns for them, or None if it is None for a part."""

    def add(operator, first, second):
        if first is None or second is None:
            return None
        dtype = BlockOperator(operator).dtype
        return first.astype(dtype) + second.astype(dtype)

    def times(_, factor, inner):
        return None if inner is None else factor * inner.astype(factor.dtype)

    return _fold(operator, read, add=add, times=times, tagged=lambda _, inner: inner)


def stored_diagonal(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"] | None:
    """The diagonal, where it can be read without a product, or None.

    **Arguments:**

    - `operator`: the operator.
    """

    def read(operator):
        dtype = BlockOperator(operator).dtype
        if is_tagged(lx.has_unit_diagonal, operator):
            return jnp.ones(operator.in_size(), dtype)
        if isinstance(operator, lx.ComposedLinearOperator):
            factors = operator.operator1, operator.operator2
            if not any(is_tagged(lx.is_diagonal, part) for part in factors):
                return None
            # (D A)_jj = d_j A_jj, and (A D)_jj as well.
            first, second = map(stored_diagonal, factors)
            if first is None or second is None:
                return None
            return first.astype(dtype) * second.astype(dtype)
        known = isinstance(operator, STORED) or _has_columns_and_diagonal(operator)
        return lx.diagonal(operator).astype(dtype) if known else None

    if is_tagged(lx.has_unit_diagonal, operator):
        return read(operator)
    return _stored(operator, read)


def _on_diagonals(
    operator: lx.AbstractLinearOperator, indices: Int[Array, " m"]
) -> Inexact[Array, "n m"]:
    """Columns of a diagonal or tridiagonal operator."""
    n, m = operator.in_size(), indices.shape[0]
    if is_tagged(lx.is_diagonal, operator):
        bands = {0: lx.diagonal(operator)}
    else:
        main, lower, upper = lx.tridiagonal(operator)
        bands = {0: main, 1: jnp.pad(lower, (0, 1)), -1: jnp.pad(upper, (1, 0))}
    found = jnp.zeros((n, m), BlockOperator(operator).dtype)
    for offset, band in bands.items():
        rows = indices + offset
        rows = jnp.where(rows < 0, n, rows)  # outside of the matrix, as n is
        found = found.at[rows, jnp.arange(m)].set(band[indices].astype(found.dtype), mode="drop")
    return found


def _entries(
    operator: lx.AbstractLinearOperator, indices: Int[Array, " m"] | None
) -> Inexact[Array, "n m"] | None:
    """Columns of an operator, or the whole matrix (for None), where they can be read without a
    product; None where they cannot.
    """

    def read(operator):
        dtype = BlockOperator(operator).dtype
        if isinstance(operator, lx.ComposedLinearOperator):
            return scaled(operator.operator1, operator.operator2, dtype)
        if indices is None:
            whole = isinstance(operator, _STORED_WHOLE) or _has_columns(operator)
            return operator.as_matrix().astype(dtype) if whole else None
        if isinstance(operator, lx.MatrixLinearOperator):
            return operator.matrix[:, indices].astype(dtype)
        if _has_columns(operator):
            return operator.columns(indices).astype(dtype)
        return _on_diagonals(operator, indices) if isinstance(operator, _STORED_WHOLE) else None

    def scaled(first, second, dtype):
        """D A, or A D, with a diagonal D."""
        by_rows = is_tagged(lx.is_diagonal, first)
        if not by_rows and not is_tagged(lx.is_diagonal, second):
            return None
        factors = stored_diagonal(first if by_rows else second)
        found = _entries(second if by_rows else first, indices)
        if factors is None or found is None:
            return None
        factors = factors.astype(dtype)
        if by_rows:
            return factors[:, None] * found.astype(dtype)
        return found.astype(dtype) * (factors if indices is None else factors[indices])

    return _stored(operator, read)


def stored_matrix(operator: lx.AbstractLinearOperator) -> Inexact[Array, "n n"] | None:
    """The matrix, where all of its entries can be read without a product, or None.

    **Arguments:**

    - `operator`: the operator.
    """
    return _entries(operator, None)


def has_entries(operator: lx.AbstractLinearOperator, *, sparse: bool = False) -> bool:
    """Whether a column costs far less than a product: dense matrices and kernels (and operators of
    other packages with a method `columns`, and a diagonal), their sums with each other and with
    diagonal operators, multiples and diagonal scalings. (Columns of sparse matrices are cheap, too,
    but so are their products.)

    **Arguments:**

    - `operator`: the operator.
    - `sparse`: whether sparse matrices count as well.
    """

    def leaf(operator):
        if isinstance(operator, lx.ComposedLinearOperator):
            factors = operator.operator1, operator.operator2
            return any(
                is_tagged(lx.is_diagonal, one)
                and isinstance(one, STORED)
                and has_entries(other, sparse=sparse)
                for one, other in (factors, factors[::-1])
            )
        if isinstance(operator, lx.MatrixLinearOperator):
            return True
        dense = not isinstance(operator, SparseLinearOperator)
        return (sparse or dense) and _has_columns_and_diagonal(operator)

    def diagonal(operator):
        return isinstance(operator, STORED) and is_tagged(lx.is_diagonal, operator)

    def of(operator):
        # Whether entries are known, and whether there are any beside those of a diagonal.
        return leaf(operator) or diagonal(operator), leaf(operator)

    known, dense = _fold(
        operator,
        of,
        add=lambda _, first, second: (first[0] and second[0], first[1] or second[1]),
        times=lambda _, factor, inner: inner,
        tagged=lambda _, inner: inner,
    )
    return known and dense


def columns(
    operator: lx.AbstractLinearOperator, indices: Int[ArrayLike, " m"]
) -> Inexact[Array, "n m"]:
    """Columns of an operator, `A[:, indices]`.

    Entries are read where the operator knows them: dense matrices are sliced, sparse ones looked
    up, kernels evaluated (an operator with a method `columns(indices)` is asked). Sums, multiples
    and quotients, tagged operators, and products with a diagonal operator pass the request on.
    Everything else multiplies unit vectors.

    Cost: no product where the entries are known: n evaluations of a kernel for each column.
    Otherwise one matvec for each column.

    **Arguments:**

    - `operator`: a lineax operator with n rows and columns. If its vectors are PyTrees, rows and
        columns are those of all leaves, one after the other.
    - `indices`: the numbers of the columns, integers from 0 to n - 1; they may be traced, and equal
        to one another.

    **Returns:**

    An array of shape `(n, m)`, of the operator's dtype (at least float32).
    """
    indices = jnp.asarray(indices)
    block = BlockOperator(operator)
    with any_promotion():
        found = _entries(operator, indices)
        if found is not None:
            return found.astype(block.dtype)
        unit = (jnp.arange(block.n)[:, None] == indices).astype(block.dtype)
        return block.mm(unit)


def matrix_of(block: BlockOperator) -> tuple[Inexact[Array, "n n"], int]:
    """The matrix of an operator, and the number of products that it takes: 0 if the entries are
    stored, n otherwise.

    **Arguments:**

    - `block`: the operator.
    """
    stored = stored_matrix(block.operator)
    if stored is not None:
        return stored.astype(block.dtype), 0
    return block.mm(jnp.eye(block.n, dtype=block.dtype)), block.n


def contracted(
    operator: lx.AbstractLinearOperator,
    vectors: Inexact[Array, "n c"],
    core: Inexact[Array, "c c"],
) -> Real[Array, ""]:
    """The number `Re <V C V^H, A>` for a Hermitian C, differentiable in everything: c matvecs, or
    what the method `contracted` of a part takes, as kernels have it. Parts are contracted one by
    one.

    **Arguments:**

    - `operator`: the operator A.
    - `vectors`: V.
    - `core`: C.
    """

    def leaf(operator):
        block = BlockOperator(operator)
        if callable(getattr(operator, "contracted", None)):
            return operator.contracted(vectors, core).astype(block.dtype)
        left = block.leaves(matmul(vectors, core))
        return jnp.sum(block.forms(left, block.leaves(vectors)))

    return _fold(
        operator,
        leaf,
        add=lambda _, first, second: first + second,
        times=lambda _, factor, inner: factor * inner,
        tagged=lambda _, inner: inner,
    ).real


class Scaling(NamedTuple):
    """The scaling D of `_sketch.low_rank`, as a unit and as numbers relative to it. Where the unit
    is not known, the first products determine it.
    """

    relative: Real[Array, " n"]  # (D / unit)^(1/2)
    unit: Real[Array, ""]  # the unit, if it is known, otherwise 1
    usable: Bool[Array, ""]  # whether the unit is known

    def fixed(self, products: Array, eps: float) -> tuple[Real[Array, ""], Bool[Array, ""]]:
        """The unit, and whether s = 1 is known. It is not if rounding errors hide the shift."""
        scale = scale_of(products)
        known = self.usable & (self.unit > eps * scale)
        return jnp.where(known, self.unit, scale), known


def scaling_of(operator: lx.AbstractLinearOperator) -> Scaling:
    """The scaling by the diagonal part of A, or by a scalar if A has no positive diagonal part.

    **Arguments:**

    - `operator`: the operator.
    """
    block = BlockOperator(operator)
    real = jnp.finfo(block.dtype).dtype
    one = jnp.ones((), real)
    shift = terms_of(operator).shift
    if shift is None:
        return Scaling(jnp.ones(block.n, real), one, jnp.array(False))
    shift = shift.real.astype(real)
    unit = jnp.max(shift, initial=0.0)
    # Below eps times the diagonal of A, a shift is lost in rounding.
    diagonal = stored_diagonal(operator)
    size = unit if diagonal is None else jnp.abs(diagonal).astype(real)
    usable = jnp.all(shift > block.eps * size) & jnp.isfinite(unit)
    unit = jnp.where(usable, unit, one)
    return Scaling(jnp.sqrt(jnp.where(usable, shift / unit, 1)), unit, usable)


class KnownParts(NamedTuple):
    """`tr(A) = exact + scale tr(rest)`, or the same for diagonals; `rest=None` if nothing is left.

    `exact` and `scale` are differentiable and of the working dtype. `has_exact` says (statically)
    whether anything was split off, and `status` whether the parts that were split off are finite.
    """

    exact: Inexact[Array, "..."]
    num_matvecs: int
    scale: Inexact[Array, ""]
    rest: lx.AbstractLinearOperator | None
    has_exact: bool
    status: Int[Array, ""]


def _banded_diagonal(operator: lx.AbstractLinearOperator, width: int) -> tuple[Array, int]:
    # Give the index i the colour i mod width. In a (tri)diagonal matrix a row has no two nonzero
    # columns of the same colour, so that (A e_c)_i = A_ii for the indicator e_c of i's colour c.
    block = BlockOperator(operator)
    colours = min(width, block.n)
    indicator = (jnp.arange(block.n)[:, None] % colours) == jnp.arange(colours)[None, :]
    products = block.mm(indicator.astype(block.dtype))
    return jnp.sum(jnp.where(indicator, products, jnp.zeros((), block.dtype)), axis=1), colours


class _Known(NamedTuple):
    """A trace (or diagonal), the number of products it took, and a status: whether all entries of
    the operator are finite.
    """

    exact: Inexact[Array, "..."]
    num_matvecs: int
    status: Int[Array, ""]


def _known(operator: lx.AbstractLinearOperator, paid: bool, diagonal: bool) -> _Known | None:
    """The trace (or diagonal) of an operator, or None if its structure does not give it.

    With `paid`, it may take a few products.
    """
    dtype = BlockOperator(operator).dtype
    n = operator.in_size()
    if is_tagged(lx.has_unit_diagonal, operator):  # this includes the identity
        return _Known(jnp.ones(n, dtype) if diagonal else jnp.asarray(n, dtype), 0, status_of())
    entries, spent, status = stored_diagonal(operator), 0, status_of()
    if entries is not None:
        # A product would reveal a NaN off the diagonal, so this looks at all entries, too. It costs
        # as much as one product.
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
    """Split off the parts whose trace or diagonal is known exactly: stored, diagonal, tridiagonal,
    identity and unit-diagonal parts of sums, multiples, quotients and negations.

    **Arguments:**

    - `operator`: the operator.
    - `budget`: the budget of matvecs.
    - `cost_of_rest`: how many matvecs must remain if the split leaves a rest. To read a part that
        is only tagged takes one product if it is diagonal, and three if it is tridiagonal: such
        parts are split off where the budget allows for it.
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
    """`split_known_parts`, with or without parts that take products.

    A factor in front of everything is taken out, too, for the sake of the tags of what it
    multiplies: if c is traced, its sign is unknown and `c K` is not tagged semidefinite, but K is.
    """

    def whole(operator):
        dtype = BlockOperator(operator).dtype
        nothing = jnp.zeros(operator.in_size() if diagonal else (), dtype)
        return KnownParts(nothing, 0, jnp.ones((), dtype), operator, False, status_of())

    def or_known(operator, parts):
        """These parts, or only an exact one if the whole operator is known."""
        known = None if parts.rest is None else _known(operator, paid, diagonal)
        if known is None:
            return parts
        exact, spent, status = known
        return KnownParts(exact.astype(parts.exact.dtype), spent, parts.scale, None, True, status)

    def add(operator, *parts):
        if not any(part.has_exact for part in parts):
            return or_known(operator, whole(operator))
        dtype = BlockOperator(operator).dtype
        one = jnp.ones((), dtype)
        exact = parts[0].exact.astype(dtype) + parts[1].exact.astype(dtype)
        spent = parts[0].num_matvecs + parts[1].num_matvecs
        status = jnp.maximum(parts[0].status, parts[1].status)
        left = [part for part in parts if part.rest is not None]
        if len(left) < 2:
            scale, rest = (left[0].scale.astype(dtype), left[0].rest) if left else (one, None)
            return or_known(operator, KnownParts(exact, spent, scale, rest, True, status))
        # A term without an exact part stays as it was written, and so keeps its tags.
        terms = operator.operator1, operator.operator2
        first, second = (
            part.rest * part.scale if part.has_exact else term
            for part, term in zip(parts, terms, strict=True)
        )
        return or_known(operator, KnownParts(exact, spent, one, first + second, True, status))

    def times(operator, factor, part):
        exact, scale = part.exact.astype(factor.dtype), part.scale.astype(factor.dtype)
        return or_known(operator, part._replace(exact=exact * factor, scale=scale * factor))

    def tagged(operator, inner):
        # The tags belong to the whole operator, not to what is left of it. (On Gaussian-process
        # kernels XTrace of K, without the tags, still beats XNysTrace of K + s I, whose flat tail
        # no low-rank part captures.)
        if not inner.has_exact:
            return or_known(operator, whole(operator))
        if inner.rest is None:
            return inner
        rest = in_batches(inner.rest, batch_size_of(operator))
        return or_known(operator, inner._replace(rest=rest))

    def leaf(operator):
        return or_known(operator, whole(operator))

    return _fold(operator, leaf, add=add, times=times, tagged=tagged)

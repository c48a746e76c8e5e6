"""What is known of an operator without a product, from the way it is written: entries (columns, the
diagonal, the matrix), the diagonal part of a sum such as K + s I, and the scaling by that part.

Each question is a function that is dispatched on the class of the operator, as `lineax.diagonal`
is. A class of another package registers with `stored_columns` and `stored_diagonal`.
"""

from collections.abc import Callable
from functools import singledispatch
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Bool, Inexact, Int, Real

from .._core.estimate import Evidence, evidence_of, scale_of, worse
from .._core.precision import any_promotion, matmul
from .block_operator import BlockOperator
from .kernel import KernelLinearOperator
from .questions import answers
from .sparse import SparseLinearOperator
from .tags import is_tagged, semidefinite_sign
from .width import STORED, batch_size_of, in_batches

_MULTIPLES = lx.MulLinearOperator, lx.DivLinearOperator, lx.NegLinearOperator


def _factor(operator: Any) -> Inexact[Array, ""]:
    """The number c of a multiple, quotient or negation c B."""
    one = jnp.ones((), BlockOperator(operator).dtype)
    if isinstance(operator, lx.NegLinearOperator):
        return -one
    scalar = jnp.asarray(operator.scalar).astype(one.dtype)
    return scalar if isinstance(operator, lx.MulLinearOperator) else one / scalar


def _is_stored_diagonal(operator: lx.AbstractLinearOperator) -> bool:
    return isinstance(operator, STORED) and is_tagged(lx.is_diagonal, operator)


def _diagonal_part(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"] | None:
    """The diagonal of a stored diagonal operator."""
    return stored_diagonal(operator) if _is_stored_diagonal(operator) else None


# --- entries --------------------------------------------------------------------------------------


@singledispatch
def stored_diagonal(operator: Any) -> Inexact[Array, " n"] | None:
    """The diagonal, where it can be read without a product.

    A class of operators whose diagonal costs far less than a product registers a function:
    `traceax.extend.stored_diagonal.register(Class)(function)`.

    **Arguments:**

    - `operator`: a lineax operator with n rows and columns.

    **Returns:**

    An array of shape `(n,)`, of at least single precision, or None where it cannot be read.
    """
    return _unit_diagonal(operator)


def _unit_diagonal(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"] | None:
    if is_tagged(lx.has_unit_diagonal, operator):
        return jnp.ones(operator.in_size(), BlockOperator(operator).dtype)
    return None


@singledispatch
def stored_columns(
    operator: Any, indices: Int[Array, " m"] | slice
) -> Inexact[Array, "n m"] | None:
    """Columns of an operator, `A[:, indices]`, where they can be read without a product.

    A class of operators whose columns cost far less than products registers a function:
    `traceax.extend.stored_columns.register(Class)(function)`. If it registers with
    [`traceax.extend.stored_diagonal`][], too, log-determinants make their preconditioner from
    columns.

    **Arguments:**

    - `operator`: a lineax operator with n rows and columns.
    - `indices`: the numbers of the columns, which may be traced; `slice(None)` for all of them.

    **Returns:**

    An array of shape `(n, m)`, of at least single precision, or None where they cannot be read.
    """
    return None


@singledispatch
def _contraction(operator: Any, vectors: Array, core: Array) -> Inexact[Array, ""]:
    """See `contracted`; this may be complex."""
    block = BlockOperator(operator)
    left = block.leaves(matmul(vectors, core))
    return jnp.sum(block.forms(left, block.leaves(vectors)))


def _register_linear(question: Any) -> None:
    """Answer a question for sums, multiples and tagged operators from the answers for their parts:
    what is asked for is linear in the operator.
    """

    @question.register(lx.AddLinearOperator)
    def _(operator, *args):
        first = question(operator.operator1, *args)
        second = question(operator.operator2, *args)
        return None if first is None or second is None else first + second

    def of_multiple(operator, *args):
        inner = question(operator.operator, *args)
        return None if inner is None else _factor(operator) * inner

    for kind in _MULTIPLES:
        question.register(kind)(of_multiple)

    @question.register(lx.TaggedLinearOperator)
    def _(operator, *args):
        return question(operator.operator, *args)


for _question in (stored_diagonal, stored_columns, _contraction):
    _register_linear(_question)


def _read_diagonal(operator):
    return lx.diagonal(operator).astype(BlockOperator(operator).dtype)


for _class in (*STORED, KernelLinearOperator):
    stored_diagonal.register(_class)(_read_diagonal)


@stored_diagonal.register(lx.TaggedLinearOperator)
def _(operator):
    ones = _unit_diagonal(operator)
    return stored_diagonal(operator.operator) if ones is None else ones


@stored_diagonal.register(lx.ComposedLinearOperator)
def _(operator):
    factors = operator.operator1, operator.operator2
    if not any(is_tagged(lx.is_diagonal, factor) for factor in factors):
        return None
    # (D A)_jj = d_j A_jj, and (A D)_jj as well.
    first, second = map(stored_diagonal, factors)
    return None if first is None or second is None else first * second


@stored_columns.register(lx.MatrixLinearOperator)
def _(operator, indices):
    return operator.matrix[:, indices].astype(BlockOperator(operator).dtype)


@stored_columns.register(lx.DiagonalLinearOperator)
@stored_columns.register(lx.IdentityLinearOperator)
def _(operator, indices):
    return _columns_of_band(_read_diagonal(operator), indices, 0)


@stored_columns.register(lx.TridiagonalLinearOperator)
def _(operator, indices):
    dtype = BlockOperator(operator).dtype
    main, lower, upper = (band.astype(dtype) for band in lx.tridiagonal(operator))
    below = _columns_of_band(jnp.pad(lower, (0, 1)), indices, 1)
    above = _columns_of_band(jnp.pad(upper, (1, 0)), indices, -1)
    return _columns_of_band(main, indices, 0) + below + above


def _columns_of_band(band: Array, indices: Array | slice, offset: int) -> Array:
    """Columns of the matrix with entry `band[j]` in column j, so many rows below the diagonal."""
    rows = jnp.arange(band.shape[0])
    return jnp.where(rows[:, None] == rows[indices] + offset, band[indices], 0)


@stored_columns.register(SparseLinearOperator)
@stored_columns.register(KernelLinearOperator)
def _(operator, indices):
    whole = isinstance(indices, slice)
    entries = operator.as_matrix() if whole else operator.columns(indices)
    return entries.astype(BlockOperator(operator).dtype)


@stored_columns.register(lx.ComposedLinearOperator)
def _(operator, indices):
    by_rows = is_tagged(lx.is_diagonal, operator.operator1)  # D A, or A D
    factors = operator.operator1, operator.operator2
    diagonal, other = factors if by_rows else factors[::-1]
    if not is_tagged(lx.is_diagonal, diagonal):
        return None
    scaling = stored_diagonal(diagonal)
    entries = stored_columns(other, indices)
    if scaling is None or entries is None:
        return None
    return (scaling[:, None] if by_rows else scaling[indices]) * entries


@_contraction.register(KernelLinearOperator)
def _(operator, vectors, core):
    return operator.contracted(vectors, core).astype(BlockOperator(operator).dtype)


def contracted(
    operator: lx.AbstractLinearOperator,
    vectors: Inexact[Array, "n c"],
    core: Inexact[Array, "c c"],
) -> Real[Array, ""]:
    """The number `Re <V C V^H, A>` for a Hermitian C, differentiable in everything: c matvecs, or
    what kernels take for it. Parts are contracted one by one.

    **Arguments:**

    - `operator`: the operator A.
    - `vectors`: V.
    - `core`: C.
    """
    return _contraction(operator, vectors, core).real


def columns(
    operator: lx.AbstractLinearOperator, indices: Int[ArrayLike, " m"]
) -> Inexact[Array, "n m"]:
    """Columns of an operator, `A[:, indices]`.

    Entries are read where the operator knows them: dense matrices are sliced, sparse ones looked
    up, kernels evaluated (and a class of another package says so by
    [`traceax.extend.stored_columns`][]). Sums, multiples and quotients, tagged operators, and
    products with a diagonal operator pass the request on. Everything else multiplies unit vectors.

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
        found = stored_columns(operator, indices)
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
    stored = stored_columns(block.operator, slice(None))
    if stored is not None:
        return stored.astype(block.dtype), 0
    return block.mm(jnp.eye(block.n, dtype=block.dtype)), block.n


def has_entries(operator: lx.AbstractLinearOperator, *, sparse: bool = False) -> bool:
    """Whether a column costs far less than a product: dense matrices and kernels (and operators of
    other packages with stored columns and a stored diagonal), their sums with each other and with
    diagonal operators, multiples and diagonal scalings. (Columns of sparse matrices are cheap, too,
    but so are their products.)

    **Arguments:**

    - `operator`: the operator.
    - `sparse`: whether sparse matrices count as well.
    """
    kinds = _kinds_of_parts(operator)
    wanted = {"dense", "sparse"} if sparse else {"dense"}
    return kinds <= {"diagonal", *wanted} and bool(kinds & wanted)


def _kinds_of_parts(operator: Any) -> set[str]:
    """What the parts of a sum are: "diagonal", "sparse", "dense" (cheap columns), "unknown"."""
    if isinstance(operator, lx.AddLinearOperator):
        return _kinds_of_parts(operator.operator1) | _kinds_of_parts(operator.operator2)
    if isinstance(operator, (*_MULTIPLES, lx.TaggedLinearOperator)):
        return _kinds_of_parts(operator.operator)
    if isinstance(operator, lx.ComposedLinearOperator):
        factors = operator.operator1, operator.operator2
        others = [factor for factor in factors if not _is_stored_diagonal(factor)]
        return _kinds_of_parts(others[0]) if len(others) == 1 else {"unknown"}
    if _is_stored_diagonal(operator):
        return {"diagonal"}
    if isinstance(operator, SparseLinearOperator):
        return {"sparse"}
    known = answers(stored_columns, operator) and answers(stored_diagonal, operator)
    dense = known and not isinstance(operator, lx.TridiagonalLinearOperator)
    return {"dense"} if dense else {"unknown"}


# --- the diagonal part of a sum -------------------------------------------------------------------


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
    """Find the diagonal part of a sum. This takes no product.

    **Arguments:**

    - `operator`: the operator, whose sums, multiples and tags are taken apart.

    **Returns:**

    The `Terms`.
    """
    parts = _split(operator, _diagonal_part)
    shift = parts.exact if parts.has_exact else None
    if parts.rest is None:
        return Terms(shift=shift, has_rest=False, semidefinite=True, sign=jnp.ones(()))
    sign = _sign_of(parts.rest)
    if sign is None:
        return Terms(shift=shift, has_rest=True, semidefinite=False, sign=jnp.zeros(()))
    sign = sign * jnp.sign(parts.scale.real).astype(sign.dtype)
    return Terms(shift=shift, has_rest=True, semidefinite=True, sign=sign)


def _sign_of(operator: Any) -> Real[Array, ""] | None:
    """1 or -1 for an operator that is positive or negative semidefinite as all its parts are tagged
    and as its factors are, which may be traced; 0 if parts differ; None if a part is not tagged.
    """
    sign = semidefinite_sign(operator)
    if sign != 0:
        return jnp.asarray(float(sign))
    if isinstance(operator, lx.AddLinearOperator):
        first = _sign_of(operator.operator1)
        second = _sign_of(operator.operator2)
        if first is None or second is None:
            return None
        return jnp.where(first == second, first, 0)
    if isinstance(operator, (*_MULTIPLES, lx.TaggedLinearOperator)):
        inner = _sign_of(operator.operator)
        if inner is not None and isinstance(operator, _MULTIPLES):
            return inner * jnp.sign(_factor(operator).real).astype(inner.dtype)
        return inner
    return None


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


# --- traces and diagonals -------------------------------------------------------------------------


class KnownParts(NamedTuple):
    """`tr(A) = exact + scale tr(rest)`, or the same for diagonals; `rest=None` if nothing is left.

    `exact` and `scale` are differentiable and of the working dtype. `has_exact` says (statically)
    whether anything was split off, and `evidence` whether the parts that were split off are finite.
    """

    exact: Inexact[Array, "..."]
    scale: Inexact[Array, ""]
    rest: lx.AbstractLinearOperator | None
    has_exact: bool
    evidence: Evidence


def split_known_parts(operator: lx.AbstractLinearOperator, diagonal: bool = False) -> KnownParts:
    """Split off the parts of sums, multiples and quotients whose diagonal can be read.

    A factor in front of everything is taken out, too, for the sake of the tags of what it
    multiplies: if c is traced, its sign is unknown and `c K` is not tagged semidefinite, but K is.

    **Arguments:**

    - `operator`: the operator.
    - `diagonal`: whether `exact` should be the diagonal rather than the trace.

    **Returns:**

    A `KnownParts`.
    """
    parts = _split(operator, stored_diagonal)
    if parts.has_exact and parts.rest is not None:
        parts = parts._replace(rest=in_batches(parts.rest, batch_size_of(operator)))
    return parts if diagonal else parts._replace(exact=jnp.sum(parts.exact))


def _split(operator: Any, question: Callable[[Any], Array | None]) -> KnownParts:
    """Split off the parts whose diagonal a question is answered with; `exact` is a diagonal."""
    if isinstance(operator, lx.AddLinearOperator):
        first = _split(operator.operator1, question)
        second = _split(operator.operator2, question)
        return _split_sum(operator, first, second)
    if isinstance(operator, _MULTIPLES):
        inner = _split(operator.operator, question)
        factor = _factor(operator)
        return inner._replace(exact=factor * inner.exact, scale=factor * inner.scale)
    whole = _split_whole(operator, question)
    if isinstance(operator, lx.TaggedLinearOperator) and not whole.has_exact:
        # The tags belong to the whole operator, not to what is left of it.
        inner = _split(operator.operator, question)
        return inner if inner.has_exact else whole
    return whole


def _split_sum(operator: Any, first: KnownParts, second: KnownParts) -> KnownParts:
    """The parts of a sum, from those of its terms."""
    whole = KnownParts(
        exact=first.exact + second.exact,
        scale=jnp.ones_like(first.scale),
        rest=operator,
        has_exact=first.has_exact or second.has_exact,
        evidence=worse(first.evidence, second.evidence),
    )
    if not whole.has_exact:
        return whole
    if first.rest is None or second.rest is None:
        left = second if first.rest is None else first
        return whole._replace(scale=left.scale, rest=left.rest)
    # A term without an exact part stays as it was written, and so keeps its tags.
    rest1 = first.rest * first.scale if first.has_exact else operator.operator1
    rest2 = second.rest * second.scale if second.has_exact else operator.operator2
    return whole._replace(rest=rest1 + rest2)


def _split_whole(operator: Any, question: Callable[[Any], Array | None]) -> KnownParts:
    """All or nothing: the parts of an operator that is not taken apart."""
    dtype = BlockOperator(operator).dtype
    entries = question(operator)
    known = entries is not None
    # A product would reveal a NaN off the diagonal: this looks at all entries, too.
    arrays = jtu.tree_leaves(eqx.filter(operator, eqx.is_inexact_array)) if known else []
    return KnownParts(
        exact=entries.astype(dtype) if known else jnp.zeros(operator.in_size(), dtype),
        scale=jnp.ones((), dtype),
        rest=None if known else operator,
        has_exact=known,
        evidence=evidence_of(*arrays),
    )

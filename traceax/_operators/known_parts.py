"""Known parts of an operator, from the way it is written: entries (columns, the diagonal, the
matrix), the diagonal part of a sum such as K + s I, and the scaling by that part.

Each question is a function that is dispatched on the class of the operator, as `lineax.diagonal`
is. `terms` asks the question of the terms of a sum.
"""

import dataclasses
from collections.abc import Callable
from functools import partial, reduce, singledispatch
from operator import add
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Bool, Inexact, Int, Real

from .._core.estimate import Evidence, evidence_of, scale_of
from .._core.precision import any_promotion
from .block_operator import STORED, BlockOperator
from .kernel import KernelLinearOperator
from .sparse import SparseLinearOperator
from .tags import LINEAR, is_tagged, parts_of, semidefinite_sign

_BANDED = lx.DiagonalLinearOperator, lx.IdentityLinearOperator, lx.TridiagonalLinearOperator


class Term(NamedTuple):
    """A term c B of a sum."""

    factor: Any  # c
    operator: lx.AbstractLinearOperator  # B
    written: lx.AbstractLinearOperator  # c B, with the tags that it has in the sum
    known: Any  # what answers the question for B, or None


def terms(operator: Any, question: Callable[[Any], Any]) -> list[Term]:
    """The terms of a sum, as far as they answer a question: sums and tagged operators without known
    parts stay whole. Factors are taken out; their signs may be traced.
    """
    is_sum = isinstance(operator, lx.AddLinearOperator)
    if isinstance(operator, LINEAR) and not is_sum:
        factor = _factor(operator)
        return [
            term._replace(
                factor=factor * term.factor,
                written=dataclasses.replace(operator, operator=term.written),
            )
            for term in terms(operator.operator, question)
        ]
    known = None if is_sum else question(operator)
    if known is None and (is_sum or isinstance(operator, lx.TaggedLinearOperator)):
        inner = [term for part in parts_of(operator) for term in terms(part, question)]
        if any(term.known is not None for term in inner):
            return inner
    return [Term(factor=1.0, operator=operator, written=operator, known=known)]


def _factor(operator: Any) -> Any:
    """The number c of a multiple, quotient or negation c B."""
    if isinstance(operator, lx.NegLinearOperator):
        return -1.0
    scalar = jnp.asarray(operator.scalar).astype(BlockOperator(operator).dtype)
    return scalar if isinstance(operator, lx.MulLinearOperator) else 1 / scalar


def _sum_of(found: list[Term]) -> Any:
    """What is known of a sum, if it is linear in the operator; None if a term is not known."""
    if any(term.known is None for term in found):
        return None
    with any_promotion():
        return sum(term.factor * term.known for term in found)


def _is_stored_diagonal(operator: lx.AbstractLinearOperator) -> bool:
    return isinstance(operator, STORED) and is_tagged(lx.is_diagonal, operator)


# --- entries --------------------------------------------------------------------------------------

Indices = Int[Array, " a"] | slice


@singledispatch
def stored_entries(operator: Any, rows: Indices, columns: Indices) -> Inexact[Array, "a b"] | None:
    """The entries `A[rows][:, columns]`, of at least single precision, or None where they take
    products.

    A class of operators whose columns cost far less than products registers a function:
    `traceax.extend.stored_entries.register(Class)(function)`. Traces and diagonals are then read,
    and log-determinants make their preconditioner from entries.

    **Arguments:**

    - `operator`: a lineax operator with n rows and columns.
    - `rows`, `columns`: vectors of numbers, which may be traced, or `slice(None)` for all.
    """
    return None


@singledispatch
def stored_diagonal(operator: Any) -> Inexact[Array, " n"] | None:
    """The diagonal, an array of at least single precision, or None where it takes products.

    A class of operators that knows its diagonal alone registers a function:
    `traceax.extend.stored_diagonal.register(Class)(function)`.

    **Arguments:**

    - `operator`: a lineax operator with n rows and columns.
    """
    n = operator.in_size()
    if is_tagged(lx.has_unit_diagonal, operator):
        return jnp.ones(n, BlockOperator(operator).dtype)
    if isinstance(operator, lx.TaggedLinearOperator):
        return stored_diagonal(operator.operator)
    found = submatrices(operator, jnp.arange(n)[:, None])
    return None if found is None else found[:, 0, 0]


for _class in LINEAR:

    @stored_entries.register(_class)
    def _(operator, rows, columns):
        return _sum_of(terms(operator, partial(stored_entries, rows=rows, columns=columns)))

    @stored_diagonal.register(_class)
    def _(operator):
        return _sum_of(terms(operator, stored_diagonal))


@stored_entries.register(lx.TaggedLinearOperator)
def _(operator, rows, columns):
    return stored_entries(operator.operator, rows, columns)


@stored_entries.register(lx.ComposedLinearOperator)
def _(operator, rows, columns):
    first, second = operator.operator1, operator.operator2
    by_rows = is_tagged(lx.is_diagonal, first)
    if not by_rows and not is_tagged(lx.is_diagonal, second):
        return None
    scaling = stored_diagonal(first if by_rows else second)
    entries = stored_entries(second if by_rows else first, rows, columns)
    if scaling is None or entries is None:
        return None
    return scaling[rows][:, None] * entries if by_rows else entries * scaling[columns]


@stored_diagonal.register(lx.ComposedLinearOperator)
def _(operator):
    factors = operator.operator1, operator.operator2
    if not any(is_tagged(lx.is_diagonal, factor) for factor in factors):
        return None
    # (D A)_jj = d_j A_jj, and (A D)_jj as well.
    first, second = map(stored_diagonal, factors)
    return None if first is None or second is None else first * second


def _read_diagonal(operator):
    return lx.diagonal(operator).astype(BlockOperator(operator).dtype)


for _class in (*STORED, KernelLinearOperator):
    stored_diagonal.register(_class)(_read_diagonal)


def _read_entries(operator, matrix, rows, columns):
    if not isinstance(rows, slice) and not isinstance(columns, slice):
        rows = rows[:, None]
    return jnp.asarray(matrix)[rows, columns].astype(BlockOperator(operator).dtype)


@stored_entries.register(lx.MatrixLinearOperator)
def _(operator, rows, columns):
    return _read_entries(operator, operator.matrix, rows, columns)


@stored_entries.register(SparseLinearOperator)
def _(operator, rows, columns):
    if isinstance(rows, slice) and not isinstance(columns, slice):
        return _unit_products(BlockOperator(operator), columns)
    return _read_entries(operator, operator.as_matrix(), rows, columns)


@stored_entries.register(KernelLinearOperator)
def _(operator, rows, columns):
    return operator.entries(rows, columns).astype(BlockOperator(operator).dtype)


@stored_entries.register(lx.DiagonalLinearOperator)
@stored_entries.register(lx.IdentityLinearOperator)
@stored_entries.register(lx.TridiagonalLinearOperator)
def _(operator, rows, columns):
    numbers = jnp.arange(operator.in_size())
    offset = numbers[columns] - numbers[rows][:, None]
    diagonal, lower, upper = lx.tridiagonal(operator)
    bands = (0, diagonal), (-1, jnp.pad(lower, (1, 0))), (1, jnp.pad(upper, (0, 1)))
    dtype = BlockOperator(operator).dtype
    found = [jnp.where(offset == i, band[rows][:, None].astype(dtype), 0) for i, band in bands]
    return found[0] + found[1] + found[2]


def _unit_products(block: BlockOperator, indices: Indices) -> Array:
    """Columns by products with unit vectors."""
    rows = jnp.arange(block.n)
    return block.mm((rows[:, None] == rows[indices]).astype(block.dtype))


def submatrices(operator: lx.AbstractLinearOperator, indices: Int[Array, "b s"]) -> Any:
    """The matrices `A[s, s]` for a set s of indices a row, or None: see `stored_entries`."""
    return jax.vmap(lambda s: stored_entries(operator, s, s))(indices)


def columns(
    operator: lx.AbstractLinearOperator, indices: Int[ArrayLike, " m"]
) -> Inexact[Array, "n m"]:
    """Columns of an operator, `A[:, indices]`, of its dtype (at least float32).

    Entries are read where the operator knows them, see [`traceax.extend.stored_entries`][]: those
    of matrices and kernels, also in sums, multiples and products with a diagonal operator.
    Everything else multiplies unit vectors, at the cost of one matvec for each column.

    **Arguments:**

    - `operator`: a lineax operator with n rows and columns: those of all leaves, one after the
        other, if its vectors are PyTrees.
    - `indices`: the numbers of the columns, from 0 to n - 1; they may be traced.
    """
    indices = jnp.asarray(indices)
    block = BlockOperator(operator)
    with any_promotion():
        found = stored_entries(operator, slice(None), indices)
        return _unit_products(block, indices) if found is None else found.astype(block.dtype)


def matrix_of(block: BlockOperator) -> tuple[Inexact[Array, "n n"], int]:
    """The matrix of an operator, and its number of products: 0 for stored entries, n otherwise."""
    stored = stored_entries(block.operator, slice(None), slice(None))
    if stored is None:
        return _unit_products(block, slice(None)), block.n
    return stored.astype(block.dtype), 0


def has_entries(operator: lx.AbstractLinearOperator, *, sparse: bool = False) -> bool:
    """Whether a column costs far less than a product, as for dense matrices and kernels, also in
    sums with banded operators, multiples and diagonal scalings. With `sparse`, sparse matrices
    count, too, whose columns cost no less than products.
    """
    kinds = _kinds(operator)
    wanted = {"dense", "sparse"} if sparse else {"dense"}
    return kinds <= {"banded", *wanted} and bool(kinds & wanted)


def _kinds(operator: lx.AbstractLinearOperator) -> set[str]:
    """What stores the entries of the parts of an operator: "banded", "sparse" or "dense" operators,
    or "products".
    """
    if isinstance(operator, _BANDED):
        return {"banded"}
    if isinstance(operator, SparseLinearOperator):
        return {"sparse"}
    if isinstance(operator, lx.MatrixLinearOperator | KernelLinearOperator):
        return {"dense"}  # others are asked, which takes a millisecond
    inner = parts_of(operator)
    scaled = any(is_tagged(lx.is_diagonal, part) for part in inner)
    if isinstance(operator, lx.ComposedLinearOperator) and not scaled:
        return {"products"}
    if inner:
        return set().union(*map(_kinds, inner))
    index = jax.ShapeDtypeStruct((1,), jnp.int32)
    known = jax.eval_shape(partial(stored_entries, operator), index, index)
    return {"products" if known is None else "dense"}


# --- known parts of a sum -------------------------------------------------------------------------


class KnownParts(NamedTuple):
    """`diag(A) = exact + scale diag(rest)`."""

    exact: Inexact[Array, " n"]  # differentiable, as `scale` is
    scale: Inexact[Array, ""]
    rest: lx.AbstractLinearOperator | None  # None if nothing is left
    evidence: Evidence  # whether the parts that were split off are finite

    @property
    def sign(self) -> Real[Array, ""] | None:
        """The `sign_of` what is left, 1 if nothing is."""
        sign = jnp.ones(()) if self.rest is None else sign_of(self.rest)
        return None if sign is None else sign * jnp.sign(self.scale.real).astype(sign.dtype)


def split_known_parts(operator: lx.AbstractLinearOperator) -> KnownParts:
    """Split off the parts of sums and multiples whose diagonal can be read."""
    return _split(operator, stored_diagonal)


def split_shift(operator: lx.AbstractLinearOperator) -> KnownParts:
    """Split off stored diagonals, such as the s I of K + s I."""

    def diagonal_of_term(part):
        return _read_diagonal(part) if _is_stored_diagonal(part) else None

    return _split(operator, diagonal_of_term)


def is_diagonal(operator: lx.AbstractLinearOperator) -> bool:
    """Whether all of the operator is a stored diagonal."""
    found = terms(operator, lambda part: _is_stored_diagonal(part) or None)
    return all(term.known for term in found)


def noise_of(operator: lx.AbstractLinearOperator) -> Real[Array, " n"]:
    """D of A = K + D where A - D and D are semidefinite, so that A^{-1} <= D^{-1}; else 0."""
    parts = split_shift(operator)
    noise = parts.exact.real
    is_positive = False if parts.sign is None else parts.sign > 0
    return jnp.where(is_positive & (jnp.min(noise) >= 0), noise, 0)


def _split(operator: lx.AbstractLinearOperator, question: Callable[[Any], Any]) -> KnownParts:
    found = terms(operator, question)
    known = [term for term in found if term.known is not None]
    left = [term for term in found if term.known is None]
    dtype = BlockOperator(operator).dtype
    scale = 1.0
    rest = None
    if len(left) == 1:
        scale = left[0].factor
        rest = left[0].operator
    elif left:
        rest = reduce(add, [term.written for term in left])
    # A product would reveal a NaN off the diagonal: this looks at all entries, too.
    read = eqx.filter([term.operator for term in known], eqx.is_inexact_array)
    return KnownParts(
        exact=jnp.broadcast_to(jnp.asarray(_sum_of(known)).astype(dtype), operator.in_size()),
        scale=jnp.asarray(scale, dtype),
        rest=rest,
        evidence=evidence_of(*jtu.tree_leaves(read)),
    )


def sign_of(operator: lx.AbstractLinearOperator) -> Real[Array, ""] | None:
    """1 or -1 for terms that are all positive or all negative semidefinite by tags, stored
    diagonals and factors, which may be traced; 0 if terms differ; None if a term says nothing.
    """
    found = terms(operator, _sign_of_term)
    if any(term.known is None for term in found):
        return None
    signs = [jnp.sign(jnp.real(term.factor)).astype(float) * term.known for term in found]
    return jnp.where(jnp.all(jnp.stack(signs) == signs[0]), signs[0], 0)


def _sign_of_term(operator: lx.AbstractLinearOperator) -> Any:
    if _is_stored_diagonal(operator):
        entries = _read_diagonal(operator).real
        return jnp.where(jnp.all(entries >= 0), 1.0, jnp.where(jnp.all(entries <= 0), -1.0, 0.0))
    return semidefinite_sign(operator) or None


def definite_sign(operator: lx.AbstractLinearOperator) -> Any:
    """-1 for negative semidefinite operators, else 1 (if terms differ, too); an int if tagged."""
    tagged = semidefinite_sign(operator)
    sign: Any = sign_of(operator)
    return jnp.where(sign < 0, -1, 1) if tagged == 0 else tagged


# --- the scaling by a shift -----------------------------------------------------------------------


class Scaling(NamedTuple):
    """The scaling D of `_logdet.sketch`: a unit, perhaps unknown, and numbers relative to it."""

    relative: Real[Array, " n"]  # (D / unit)^(1/2)
    unit: Real[Array, ""]  # the unit, if it is known, otherwise 1
    usable: Bool[Array, ""]  # whether the unit is known

    def fixed(self, products: Array, eps: float) -> tuple[Real[Array, ""], Bool[Array, ""]]:
        """The unit, and whether s = 1 is known. It is not if rounding errors hide the shift."""
        scale = scale_of(products)
        known = self.usable & (self.unit > eps * scale)
        return jnp.where(known, self.unit, scale), known


def scaling_of(operator: lx.AbstractLinearOperator) -> Scaling:
    """The scaling by the diagonal part of A, or by a scalar if A has no positive diagonal part."""
    block = BlockOperator(operator)
    parts = split_shift(operator)
    shift = parts.exact.real
    unit = jnp.max(shift, initial=0.0)
    # Below eps times the diagonal of A, a shift is lost in rounding.
    diagonal = stored_diagonal(operator)
    size = unit if diagonal is None else jnp.abs(diagonal)
    usable = jnp.all(shift > block.eps * size) & jnp.isfinite(unit)
    if parts.sign is not None:  # D - K lies below D, which then is no noise
        usable &= parts.sign >= 0
    unit = jnp.where(usable, unit, 1)
    return Scaling(jnp.sqrt(jnp.where(usable, shift / unit, 1)), unit, usable)

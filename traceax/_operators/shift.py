"""What an operator is written with: the diagonal part of a sum such as K + s I, and scaling by it;
stored diagonals and matrices.
"""

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Bool, Inexact, Real

from .._core.estimate import scale_of
from .block_operator import BlockOperator, is_tagged, semidefinite_sign
from .sparse import SparseLinearOperator

# Operators whose diagonal is stored, so that reading it costs no product.
_STORED = (
    lx.MatrixLinearOperator,
    lx.PyTreeLinearOperator,
    lx.DiagonalLinearOperator,
    lx.TridiagonalLinearOperator,
    lx.IdentityLinearOperator,
    SparseLinearOperator,
)

# Operators all of whose entries are stored, in the order of the rows of a block.
_STORED_WHOLE = (
    lx.MatrixLinearOperator,
    lx.DiagonalLinearOperator,
    lx.TridiagonalLinearOperator,
    lx.IdentityLinearOperator,
)


class Terms(NamedTuple):
    """A = diag(shift) + (the rest)."""

    shift: Inexact[Array, " n"] | None  # None if no diagonal part is written down
    has_rest: bool
    semidefinite: bool  # the rest is tagged semidefinite, part by part
    sign: Real[Array, ""]  # 1 if it is positive then, as factors tell that may be traced

    @property
    def positive(self) -> Bool[Array, ""]:
        """Whether the rest is positive semidefinite, as far as is written down."""
        return jnp.asarray(self.semidefinite) & (self.sign > 0)


def _factor(operator: Any) -> Array | None:
    """The factor that a multiple, quotient or negation puts in front of its operator."""
    if isinstance(operator, lx.MulLinearOperator):
        return jnp.asarray(operator.scalar)
    if isinstance(operator, lx.DivLinearOperator):
        return 1 / jnp.asarray(operator.scalar)
    return -jnp.ones(()) if isinstance(operator, lx.NegLinearOperator) else None


def terms_of(operator: lx.AbstractLinearOperator) -> Terms:
    """Find the diagonal part of a sum.

    **Arguments:**

    - `operator`: the operator, of which sums, multiples and tags are taken apart.

    **Returns:**

    The `Terms`. No product is spent.
    """
    if isinstance(operator, lx.TaggedLinearOperator):
        inner, sign = terms_of(operator.operator), semidefinite_sign(operator)
        if inner.shift is None and sign != 0:
            return inner._replace(semidefinite=True, sign=jnp.asarray(float(sign)))
        return inner
    if isinstance(operator, lx.AddLinearOperator):
        first, second = terms_of(operator.operator1), terms_of(operator.operator2)
        shifts = [part.shift for part in (first, second) if part.shift is not None]
        shift = sum(shifts[1:], start=shifts[0]) if shifts else None
        semidefinite = first.semidefinite and second.semidefinite
        signs = [part.sign for part in (first, second) if part.has_rest]
        sign = signs[0] if signs else first.sign
        if len(signs) == 2:
            sign = jnp.where(signs[0] == signs[1], sign, 0)
        return Terms(shift, first.has_rest or second.has_rest, semidefinite, sign)
    factor = _factor(operator)
    if factor is not None:
        inner = terms_of(operator.operator)  # pyright: ignore[reportAttributeAccessIssue]
        if inner.shift is not None:
            dtype = inner.shift.dtype
            inner = inner._replace(shift=factor.astype(dtype) * inner.shift)
        return inner._replace(sign=inner.sign * jnp.sign(factor.real).astype(inner.sign.dtype))
    if isinstance(operator, _STORED) and is_tagged(lx.is_diagonal, operator):
        dtype = BlockOperator(operator).dtype
        return Terms(lx.diagonal(operator).astype(dtype), False, True, jnp.ones(()))
    sign = semidefinite_sign(operator)
    return Terms(None, True, sign != 0, jnp.asarray(float(sign)))


def is_shifted_down(operator: Any) -> bool:
    """Whether a diagonal part that is not positive is written down, as in K - s I: such a sum may
    be indefinite, whatever the tag of K says. False where that is traced, or no operator.

    **Arguments:**

    - `operator`: the operator, or what a user took for one.
    """
    if not isinstance(operator, lx.AbstractLinearOperator):
        return False
    with jax.ensure_compile_time_eval():  # what is known is read inside of a program, too
        shift = terms_of(operator).shift
    known = shift is not None and not isinstance(shift, jax.core.Tracer)
    return known and not bool(np.all(np.real(np.asarray(shift)) > 0))


def stored_diagonal(operator: lx.AbstractLinearOperator) -> Inexact[Array, " n"] | None:
    """The diagonal, where it can be read without a product, or None.

    **Arguments:**

    - `operator`: the operator.
    """
    dtype = BlockOperator(operator).dtype
    if is_tagged(lx.has_unit_diagonal, operator):
        return jnp.ones(operator.in_size(), dtype)
    if isinstance(operator, lx.TaggedLinearOperator):
        return stored_diagonal(operator.operator)
    if isinstance(operator, lx.AddLinearOperator):
        first, second = stored_diagonal(operator.operator1), stored_diagonal(operator.operator2)
        if first is None or second is None:
            return None
        return first.astype(dtype) + second.astype(dtype)
    if isinstance(operator, lx.ComposedLinearOperator):
        factors = operator.operator1, operator.operator2
        if not any(is_tagged(lx.is_diagonal, part) for part in factors):
            return None
        # (D A)_jj = d_j A_jj, and (A D)_jj as well.
        first, second = map(stored_diagonal, factors)
        if first is None or second is None:
            return None
        return first.astype(dtype) * second.astype(dtype)
    factor = _factor(operator)
    if factor is not None:
        inner = stored_diagonal(operator.operator)  # pyright: ignore[reportAttributeAccessIssue]
        return None if inner is None else factor.astype(dtype) * inner
    return lx.diagonal(operator).astype(dtype) if isinstance(operator, _STORED) else None


def stored_matrix(operator: lx.AbstractLinearOperator) -> Inexact[Array, "n n"] | None:
    """The matrix, where all of its entries can be read without a product, or None.

    **Arguments:**

    - `operator`: the operator.
    """
    dtype = BlockOperator(operator).dtype
    if isinstance(operator, lx.TaggedLinearOperator):
        return stored_matrix(operator.operator)
    if isinstance(operator, lx.AddLinearOperator):
        first, second = stored_matrix(operator.operator1), stored_matrix(operator.operator2)
        return None if first is None or second is None else first + second
    factor = _factor(operator)
    if factor is not None:
        inner = stored_matrix(operator.operator)  # pyright: ignore[reportAttributeAccessIssue]
        return None if inner is None else factor.astype(dtype) * inner
    return operator.as_matrix().astype(dtype) if isinstance(operator, _STORED_WHOLE) else None


def matrix_of(block: BlockOperator) -> tuple[Inexact[Array, "n n"], int]:
    """The matrix of an operator, and the number of products that it takes: none where the entries
    are stored, n otherwise.

    **Arguments:**

    - `block`: the operator.
    """
    stored = stored_matrix(block.operator)
    if stored is not None:
        return stored.astype(block.dtype), 0
    return block.mm(jnp.eye(block.n, dtype=block.dtype)), block.n


class Scaling(NamedTuple):
    """D up to its unit, which the first products decide."""

    relative: Real[Array, " n"]  # the roots of D / unit
    unit: Real[Array, ""]  # the known unit, if it is known
    usable: Bool[Array, ""]  # whether it is

    def fixed(self, products: Array, eps: float) -> tuple[Real[Array, ""], Bool[Array, ""]]:
        """The unit, and whether s = 1 is known: not if the shift is lost in the rounding."""
        scale = scale_of(products)
        known = self.usable & (self.unit > eps * scale)
        return jnp.where(known, self.unit, scale), known


def scaling_of(operator: lx.AbstractLinearOperator) -> Scaling:
    """The scaling by the diagonal part of A; by a scalar where it has none, or not a positive one.

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
    usable = jnp.all(shift > block.eps * unit) & jnp.isfinite(unit)
    unit = jnp.where(usable, unit, one)
    return Scaling(jnp.sqrt(jnp.where(usable, shift / unit, 1)), unit, usable)

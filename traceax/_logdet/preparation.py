r"""The preconditioner of a call, and what is left of its budget.

*Entries* (`sparse_factor`) cost no product: all of the budget is left for probes.

*Products.* A sketch takes k/6 products (at least 16, or k/3 if that is less). Let t(l) be the mean
eigenvalue of the part of K that a Nystrom approximation of rank l leaves out.

1. If t has hardly fallen from half of this rank to all of it (by less than 16 %), or will exceed
   3 s at a rank of 2k/3, low rank does not pay, and P is the diagonal part alone. The exception is
   a flat spectrum with an end that the budget reaches (features and noise); the angles between the
   parts of the probes that are left out show such an end.
2. Otherwise the rank grows to 2k/3.
3. If t(l) / s, extrapolated to the rank 11k/12, is below 1/3 and promises a smaller error, or if
   that rank reaches the end, the rank grows to 11k/12.

Matrices have room for the largest rank; columns that are not in use are 0.
"""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, PRNGKeyArray, Real

from .._core.control_flow import if_any
from .._operators.block_operator import BlockOperator
from .._sketch.low_rank import LowRank
from .preconditioners import (
    KernelPreconditioner,
    Preparation,
    knows_entries,
    no_preconditioner,
)
from .sketch import Sketch

#: A smaller budget is not divided.
SMALLEST = 24


def preparation_for(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int,
    preconditioner: Any,
    inverse: bool,
) -> Preparation:
    """The preconditioner of a call with the budget k."""
    if isinstance(preconditioner, str):
        if not knows_entries(operator) and k >= SMALLEST:
            return _from_products(key, operator, k, inverse)
        preconditioner = KernelPreconditioner() if knows_entries(operator) else None
    if preconditioner is None:
        return Preparation(no_preconditioner(BlockOperator(operator)), 0)
    return preconditioner.prepared(key, operator, k)


def ranks(k: int, inverse: bool) -> tuple[int, int, int]:
    """The ranks of the three stages. (Solves take more steps than logarithms.)"""
    first = max(k // 6, min(16, k // 3))
    second = max(first + 1, k // 2 if inverse else 2 * k // 3)
    few = max(1, k // 60) * (2 if inverse else 1)
    return first, second, max(second + 1, k - 5 * few)


def _from_products(key, operator, k: int, inverse: bool) -> Preparation:
    """The preconditioner from products, by the three rules of above."""
    first, second, third = ranks(k, inverse)
    sketch = Sketch(key, operator, first, third)
    small = sketch.low_rank(sketch.first)
    later = _extrapolated(small.left_out_by_half, small, first // 2, first, second)
    grows = (small.left_out <= 0.84 * small.left_out_by_half) & (later <= 3)
    if not inverse:  # 1/x needs more steps than such a rank leaves
        grows |= _ends(small, first, third, jnp.where(sketch.known, 1, 1.6))

    def larger():
        y = sketch.extended(sketch.first, second)
        low_rank = sketch.low_rank(y)
        again = _pays(small, low_rank, (first, second, third), k)
        if not inverse:
            again |= _ends(low_rank, second, third, 1)

        def largest():
            return sketch.built(sketch.low_rank(sketch.extended(y, third)))

        return if_any(again, largest, sketch.built(low_rank)), jnp.where(again, third, second)

    diagonal_part = eqx.tree_at(
        lambda built: (built.factors.eigenvalues, built.control_variate_weight),
        sketch.built(small),
        replace_fn=jnp.zeros_like,
    )
    return Preparation(*if_any(grows, larger, (diagonal_part, jnp.asarray(first))))


def _extrapolated(before, low_rank: LowRank, rank: int, grown: int, later: int) -> Real[Array, ""]:
    """The ratio t / s at the rank `later`, if t goes on to fall from `before` like a power."""
    ratio = low_rank.left_out / jnp.where(before > 0, before, 1)
    slope = jnp.log(jnp.clip(ratio, 1e-6, 1)) / math.log(grown / rank)
    return low_rank.left_out / low_rank.shift * (later / grown) ** slope


def _ends(low_rank: LowRank, rank: int, third: int, doubt):
    """Whether the third rank captures all of a flat spectrum: with d equal eigenvalues left out,
    the end is at rank + d. (`doubt` corrects d where s is unknown: then d comes out too small.)
    """
    return rank + doubt * low_rank.dimension <= 1.1 * third


def _pays(before: LowRank, low_rank: LowRank, ranks: tuple[int, int, int], k: int):
    """Whether the third rank promises a smaller error than the second."""
    first, second, third = ranks
    relative = low_rank.left_out / low_rank.shift
    later = _extrapolated(before.left_out, low_rank, first, second, third)
    # Five steps are enough only for an M that is close to the identity; else some eight are.
    gain = (later / (1 + later)) * math.sqrt(max(1, (k - second) // 8) / max(1, (k - third) // 5))
    return ((later < 1 / 3) & (gain < relative / (1 + relative))) | ~(low_rank.left_out > 0)

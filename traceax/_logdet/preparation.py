r"""The preconditioner of a call, and what is left of its budget.

*Entries* (`sparse_factor`) cost no product: all of the budget is left for probes.

*Products.* A sketch takes k/6 products, at least 4. Let t(l) be the mean eigenvalue of the part of
K that a Nystrom approximation of rank l leaves out. The rank grows to 3k/4 if t falls from half of
the first rank to all of it, by 16 % or more (30 % where s is neither known nor seen), and will be
at most 3 s at the final rank, if it goes on to fall like a power. It grows as well if K has a flat
spectrum with an end that the budget reaches (features and noise), which the angles between the
parts of the probes that are left out show. Otherwise P is the diagonal part alone, and the sketch
gives a control variate (`log_quadrature`).
"""

import math
from typing import Any

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, PRNGKeyArray

from .._core.control_flow import if_any
from .._operators.known_parts import noise_of, split_shift
from .factors import diagonal_preconditioner
from .low_rank import LowRank, Sketch
from .preconditioners import KernelPreconditioner, Preparation, knows_entries

#: A smaller budget is not divided, nor one of twice as many for an inverse (more probes).
SMALLEST = 12


def preparation_for(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int,
    preconditioner: Any,
    inverse: bool,
) -> Preparation:
    """The preconditioner of a call with the budget k."""
    if isinstance(preconditioner, str):
        parts = split_shift(operator)
        if parts.rest is None:  # A is diagonal
            return diagonal_preconditioner(operator, parts.exact.real), 0, {}, (0, 0)
        if not knows_entries(operator) and k >= SMALLEST * (2 if inverse else 1):
            return _from_products(key, operator, k, inverse)
        preconditioner = KernelPreconditioner() if knows_entries(operator) else None
    if preconditioner is None:
        floor = jnp.min(noise_of(operator)) if inverse else None
        return diagonal_preconditioner(operator, floor=floor), 0, {}, (0, 0)
    return preconditioner.prepared(key, operator, k)


def _from_products(
    key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int, inverse: bool
) -> Preparation:
    """The preconditioner from products, by the rules of above."""
    first = max(4, k // 6)
    rank = k // 2 if inverse else 3 * k // 4  # solves take more steps
    sketch = Sketch(key, operator, first, rank)
    small = sketch.low_rank(sketch.first)

    def larger():
        return sketch.built(sketch.low_rank(sketch.whole()))

    diagonal_part = sketch.built(small._replace(f=jnp.zeros_like(small.f)))
    half = sketch.low_rank(sketch.first[:, : first // 2], small.shift)
    pays = _pays(small, half.left_out, first, rank, k, inverse)
    quotients = sketch.quotient() / small.mu, jnp.where(pays, 0, first)
    built = if_any(pays, larger, diagonal_part)
    return built, jnp.where(pays, rank, first), {}, quotients


def _pays(low_rank: LowRank, half: Array, first: int, rank: int, k: int, inverse: bool) -> Array:
    """Whether a larger rank pays, by what the first one leaves out, and `half` of it."""
    ratio = low_rank.left_out / jnp.where(half > 0, half, 1)
    slope = jnp.log(jnp.clip(ratio, 1e-6, 1)) / math.log(first / (first // 2))
    later = low_rank.left_out / low_rank.shift * (rank / first) ** slope
    falls = (ratio <= jnp.where(low_rank.is_flat, 0.84, 0.7)) & (later <= 3)
    # With d equal eigenvalues left out, the end is at first + d. (1/x needs steps beyond the rank.)
    reached = first + low_rank.dimension <= (rank if inverse else k)
    return falls | (low_rank.is_flat & reached)

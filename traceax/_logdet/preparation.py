r"""The preconditioner of a call, and what is left of its budget.

*Entries* (`sparse_factor`) cost no product: all of the budget is left for probes.

*Products.* A sketch takes k/6 products, at least 4. The rank grows to 3k/4 (for inverses to k/2) if
k products reach the end of the spectrum of K: if the first l of them leave d dimensions out
(`_sketch.low_rank` tells d from angles), and l + d <= k, or 0.45 k where s is neither known nor
seen, and small eigenvalues may follow. Otherwise P is the diagonal part alone, and the sketch gives
a control variate (`log_quadrature`). Of shares from 0.3 to 0.6, 0.45 was the best on many spectra.
"""

from typing import Any

import jax.numpy as jnp
import lineax as lx
from jaxtyping import PRNGKeyArray

from .._core.control_flow import if_any
from .._operators.known_parts import is_diagonal, noise_of, split_shift
from .factors import diagonal_preconditioner
from .preconditioners import KernelPreconditioner, Preparation, knows_entries
from .sketch import Sketch

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
        if is_diagonal(operator):
            diagonal = split_shift(operator).exact.real
            return diagonal_preconditioner(operator, diagonal), 0, {}, None
        if not knows_entries(operator) and k >= SMALLEST * (2 if inverse else 1):
            return _from_products(key, operator, k, inverse)
        preconditioner = KernelPreconditioner() if knows_entries(operator) else None
    if preconditioner is None:
        floor = jnp.min(noise_of(operator)) if inverse else None
        return diagonal_preconditioner(operator, floor=floor), 0, {}, None
    return preconditioner.prepared(key, operator, k)


def _from_products(
    key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int, inverse: bool
) -> Preparation:
    """The preconditioner from products, by the rules of above."""
    first = max(4, k // 6)
    rank = k // 2 if inverse else 3 * k // 4  # solves take more steps
    sketch = Sketch(key, operator, first, rank)
    small = sketch.low_rank(sketch.first)
    pays = first + small.dimension <= jnp.where(small.is_flat, k, 0.45 * k)

    none = small._replace(f=jnp.zeros_like(sketch.omega))
    chosen = if_any(pays, lambda: sketch.low_rank(sketch.whole()), none)
    omega, forms = sketch.forms()
    left = omega, forms / small.mu, jnp.where(pays, 0, first)
    return sketch.built(chosen), jnp.where(pays, rank, first), {}, left

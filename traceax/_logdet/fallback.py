"""The exact value, where it costs less than what a budget asks for.

A Cholesky factorisation takes n^3 / 3 operations, k products with a stored matrix take 2 n^2 k:
from k = n / 6 on the exact value is cheaper. With few rows it always is.
"""

from typing import Any

import lineax as lx

from .._operators.known_parts import has_entries

#: The most rows of a kernel whose matrix is formed for the sake of an exact value, unless the user
#: asks for it (k >= n): 1 GiB in float32.
MOST_ROWS = 2**14

#: Up to so many rows a factorisation takes less time than anything else.
FEW_ROWS = 1024


def check_fallback(fallback: Any) -> None:
    """Raise a `ValueError` unless this is "exact" or None."""
    if fallback not in ("exact", None):
        raise ValueError(
            f"fallback must be 'exact' (the exact value where it is cheaper) or None, got "
            f"{fallback!r}."
        )


def budget_or_all(operator: Any, k: Any, *, sparse: bool = False, tolerance: bool = False) -> Any:
    """The budget k, or n, for which the value is exact, where that is cheaper. (What is wrong with
    operator or budget is found later.) With a `tolerance` k is but the most that it may take.
    """
    known = isinstance(operator, lx.AbstractLinearOperator) and type(k) is int and k > 0
    if not known or operator.in_size() != operator.out_size():
        return k
    n = operator.in_size()
    few = n <= FEW_ROWS
    worth = few or (n <= MOST_ROWS and 6 * (1 if tolerance else k) >= n)
    return max(k, n) if worth and has_entries(operator, sparse=sparse or few) else k

"""The exact value, where it costs less than what a budget asks for.

A Cholesky factorisation takes n^3 / 3 operations, k products with a stored matrix take 2 n^2 k:
from k = n / 6 on the exact value is cheaper. The entries must be known (see `known_parts`): to
compute them by products would take n of them.
"""

from typing import Any

import lineax as lx

from .._operators.known_parts import has_entries

#: The most rows of a kernel whose matrix is formed for the sake of an exact value, unless the user
#: asks for it (k >= n): 1 GiB in float32.
MOST_ROWS = 2**14


def check_fallback(fallback: Any) -> None:
    """Raise a `ValueError` unless this is "exact" or None."""
    if fallback not in ("exact", None):
        raise ValueError(
            f"fallback must be 'exact' (the exact value where it is cheaper) or None, got "
            f"{fallback!r}."
        )


def check_no_tolerance(atol: Any) -> None:
    """Raise a `ValueError` if a tolerance is given."""
    if atol is not None:
        raise ValueError(
            f"A tolerance is not available yet, got atol={atol!r}. Give a budget k instead."
        )


def exact_is_cheaper(operator: lx.AbstractLinearOperator, k: int, *, sparse: bool = False) -> bool:
    """Whether a factorisation takes fewer operations than k products.

    **Arguments:**

    - `operator`: the operator.
    - `k`: the number of products.
    - `sparse`: whether to treat a sparse matrix as a dense one.
    """
    n = operator.in_size()
    return 6 * k >= n and n <= MOST_ROWS and has_entries(operator, sparse=sparse)


def budget_or_all(
    operator: lx.AbstractLinearOperator, k: Any, fallback: Any, *, sparse: bool = False
) -> Any:
    """The budget k, or n, for which the value is exact, where that is cheaper and wanted. (What is
    wrong with operator or budget is found later.)

    **Arguments:**

    - `operator`: the operator.
    - `k`: the budget.
    - `fallback`: the argument of the user, as `check_fallback` accepts it.
    - `sparse`: as for `exact_is_cheaper`.
    """
    known = isinstance(operator, lx.AbstractLinearOperator) and type(k) is int and k > 0
    if fallback is None or not known or operator.in_size() != operator.out_size():
        return k
    return max(k, operator.in_size()) if exact_is_cheaper(operator, k, sparse=sparse) else k

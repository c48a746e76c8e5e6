"""Counts, other than budgets, and functions that a user gives."""

import operator as op
from typing import Any, cast

import numpy as np


def checked_count(value: Any, name: str, least: int = 1, none: str | None = None) -> Any:
    """A count (no bool) as a Python int, or a `ValueError`; None where `none` explains None."""
    if value is None and none is not None:
        return None
    try:
        count = None if isinstance(value, bool | np.bool_) else op.index(cast(Any, value))
    except TypeError:  # no integer
        count = None
    if count is None or count < least:
        alternative = "" if none is None else f" Or leave it out: {none}."
        raise ValueError(
            f"{name} must be a Python int of at least {least}, got {value!r}.{alternative}"
        )
    return count


def check_function(value: Any, name: str, example: str) -> None:
    """A `TypeError` for what cannot be called with JAX's arrays."""
    if not callable(value) or isinstance(value, np.ufunc):
        raise TypeError(f"{name} must be a JAX function, such as `{example}`, got {value!r}.")

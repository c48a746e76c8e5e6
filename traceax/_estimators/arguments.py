"""The arguments of calls that may give a tolerance in place of a budget."""

import sys
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .estimator import check_budget

#: The largest budget, if the user gives none (n for operators with fewer rows).
DEFAULT_MAX_K = 1000


class Tolerance(NamedTuple):
    """The arguments of a tolerance, as the user gave them, and defaults for the others."""

    rtol: Any
    atol: Any
    max_k: Any
    state: Any = None
    keep_state: Any = False

    def wanted(self, k: Any, name: str, belonging: str) -> bool:
        """Whether a tolerance was given rather than a budget. Both, neither, or a budget with
        options that belong to a tolerance, raise a `TypeError`.

        **Arguments:**

        - `k`: the budget.
        - `name`: the name of the function that was called.
        - `belonging`: the names of its arguments that belong to a tolerance.
        """
        if self.rtol is None and self.atol is None:
            given = [option is not None and option is not False for option in self[2:]]
            if k is not None and any(given):
                raise TypeError(
                    f"Got a budget, k={k!r}, and options of a tolerance: leave out the options, or "
                    f"give a tolerance instead of k, `{name}(..., rtol=1e-3)`, to which alone "
                    f"belong {belonging}."
                )
            if k is None:
                raise TypeError(
                    f"The budget k must be a Python int (a number of matvecs), got {k!r} of type "
                    f"{type(k).__name__}; or give a tolerance instead, "
                    f"`{name}(..., rtol=1e-3)`, to which alone belong {belonging}."
                )
            return False
        if k is not None:
            raise TypeError(
                f"Got both a budget, k={k!r}, and a tolerance. To bound the products that a "
                "tolerance may take, pass max_k instead of k."
            )
        return True

    def budget(self, k: Any) -> Array | None:
        """The budget as an array, if one was given together with `max_k`: it need not be static
        then. A `TypeError` or `ValueError` is raised if it is not a whole number up to `max_k`.
        """
        if k is None or self.max_k is None or self[:2] != (None, None) or any(self[3:]):
            return None
        array = k if isinstance(k, jax.Array) else np.asarray(k)
        if array.ndim != 0 or array.dtype.kind not in "iu":
            raise TypeError(
                f"The budget k must be a whole number of matvecs, got {k!r}: give an int, or a "
                "scalar array of integers."
            )
        most = check_budget(self.max_k, 1, sys.maxsize, "", "max_k")
        if not isinstance(array, jax.core.Tracer) and not 1 <= array <= most:
            raise ValueError(
                f"The budget k must be at least 1 and at most max_k = {most}, got {k}."
            )
        return lax.stop_gradient(jnp.asarray(array, jnp.int32))

    def arrays(self) -> tuple[Array, Array]:
        """`rtol` and `atol`, checked, as arrays."""
        return tolerance_of(self.rtol, "rtol"), tolerance_of(self.atol, "atol")


def tolerance_of(value: Any, name: str) -> Array:
    """A tolerance as an array, which may be traced; 0 for None."""
    if value is None:
        value = 0.0
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if array.ndim != 0 or array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be a real number, got {value!r}.")
    if not isinstance(array, jax.core.Tracer) and not (array >= 0 and np.isfinite(array)):
        raise ValueError(f"{name} must be finite and not negative, got {value!r}.")
    return lax.stop_gradient(jnp.asarray(array, jax.dtypes.canonicalize_dtype(float)))


def budgets_for(
    max_k: int | None,
    n: int,
    smallest: int,
    name: str,
    *,
    default_least: int = 1,
    small: int = 64,
) -> tuple[int, int]:
    """The largest budget of a run, and the budget that the primitive gets. If the latter is n, the
    primitive computes the exact value at once; below n the estimator does, as a last resort.

    **Arguments:**

    - `max_k`: the argument of the user, or None.
    - `n`: the size of the operator.
    - `smallest`: the smallest budget of the estimator.
    - `name`: the name of the estimator.
    - `default_least`: a lower bound of the default for `max_k`.
    - `small`: operators with at most this many rows get the exact value at once, if the budget
        allows it.

    **Returns:**

    Two Python ints.
    """
    if max_k is None:
        max_k = max(min(n, DEFAULT_MAX_K), default_least)
    max_k = check_budget(max_k, smallest, n, name, "max_k")
    return max_k, max_k if n <= small else min(max_k, n - 1)

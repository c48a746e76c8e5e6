"""What an estimate returns."""

from typing import Any, final

import equinox as eqx
import lineax as lx
from jaxtyping import Array, Inexact, Int, PyTree, Real


class RESULTS(lx.RESULTS):  # pyright: ignore[reportGeneralTypeIssues]
    """The outcomes of an estimate: compare with `solution.result == tr.RESULTS.successful`.

    `RESULTS[solution.result]` is the message.
    """

    nonfinite_operator = (
        "A product with the operator holds NaN or inf, so nothing can be estimated from it. "
        "Check the arrays inside the operator (and, in float16 or float32, its products) for "
        "overflow; `jax.config.update('jax_debug_nans', True)` finds the first one."
    )
    not_semidefinite = (
        "The operator is tagged positive (or negative) semidefinite, but its products say that it "
        "is not. The value is a plain Hutchinson estimate from the same products, which does not "
        "rely on the tag. Remove the tag, or use `XTraceEstimator` (diagonals: `XDiagEstimator`)."
    )
    outside_domain = (
        "A Ritz value (an approximate eigenvalue) lies where the function is not finite, as for "
        "the logarithm of a matrix that is not positive definite to rounding. Check the spectrum, "
        "shift the operator (A + s I), compute in float64, or use a function that is finite there. "
        "If the operator is semidefinite, tag it so: rounding errors below 0 then count as 0."
    )


@final
class Solution(eqx.Module):
    """An estimate with its error bar.

    Only `value` carries a derivative; the derivative of every other field is zero.

    **Attributes:**

    - `value`: the estimate, of the operator's dtype (float32 for half precision): a scalar array,
        or for diagonals a PyTree of arrays.
    - `std_err`: the estimated standard deviation of `value` (real, of the same structure): 0 if
        the value is exact, inf if a single probe leaves nothing to estimate it from.
    - `num_matvecs`: the number of products with the operator that were spent.
    - `stats`: further statistics: `"std.err"`, and `"dof"`, the degrees of freedom of `std_err`
        (the number of averaged samples, less one).
    - `result`: a [`traceax.RESULTS`][]: whether the number can be trusted.
    - `quadrature_error`: for functions of a matrix, an estimate (made to be too large rather than
        too small) of the error from ending Lanczos' recurrence early, which is no part of
        `std_err`; inf if nothing is known of it. None for estimates that have no such error.
    """

    value: PyTree[Inexact[Array, "..."]]
    std_err: PyTree[Real[Array, "..."]]
    num_matvecs: Int[Array, ""]
    stats: dict[str, PyTree[Array]]
    result: Any  # a member of RESULTS; the enumeration's item type is private to Equinox
    quadrature_error: Real[Array, "..."] | None = None

"""What an estimate returns."""

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PyTree, Real

from .._core.estimate import Estimate
from .._core.verdict import RESULTS, outcome_of
from .._operators.block_operator import unflatten

# Of `value` and its errors: an array, but of diagonals and block traces any PyTree.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Value = TypeVar("Value", default=Array)
else:
    from typing import TypeVar

    Value = TypeVar("Value")


def _is_number(x: Any, ndim: int = 0) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.ndim == ndim


def _shown(tree: PyTree, entries: bool) -> str:
    if entries and _is_number(tree, ndim=1):
        return f"[{', '.join(f'{x:.7g}' for x in tree.tolist())}]"
    return f"{tree.item():.7g}" if _is_number(tree) else eqx.tree_pformat(tree)


def described(
    name: str, parts: dict[str, PyTree], result: Any = None, *, entries: bool = False
) -> str:
    """What a class of results prints: its name and fields, and the name of the result, or how many
    of a batch are successful. Inside `jit`, and of batches, shapes stand for numbers.
    """
    shown = [f"{field}={_shown(part, entries)}" for field, part in parts.items()]
    if result is not None and _is_number(parts["num_matvecs"]):
        shown.append(f"result={outcome_of(result)}")
    elif result is not None and not isinstance(parts["num_matvecs"], jax.core.Tracer):
        right = result == RESULTS.successful
        shown.append(f"result={right.sum()} of {right.size} successful")
    return f"{name}({', '.join(shown)})"


def _constant(x: Any) -> Array:
    return jnp.asarray(x, jnp.float32)


def _aligned(x: Array, like: Array) -> Array:
    """A number for each of a stack of solutions, with axes for the entries of each."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim)).astype(like.dtype)


@final
class Solution(eqx.Module, Generic[Value]):
    """An estimate with its error bar. Only `value` carries a derivative.

    **Attributes:**

    - `value`: the estimate, of the operator's dtype (float32 for half precision; real where a tag
        says that $A^* = A$): a scalar array, or for diagonals a PyTree of arrays.
    - `std_err`: the estimated standard deviation of `value` (real, of the same structure), rounding
        included. It is 0 if the value is exact, and inf if there was a single probe.
    - `num_matvecs`: the number of products with the operator that were spent.
    - `stats`: further statistics: `"std.err"`, and `"dof"`, the degrees of freedom of `std_err`, a
        real number: that of averaged samples, less one (for functions of matrices about that of the
        eigenvalues that dominate the error, times that of the probes). Diagonals and block traces
        add `"nonfinite"`, the number of entries of each leaf that are not finite; log-determinants
        and inverses `"columns"`, which were read without a product, and `"condition"`, the quotient
        of the extreme Ritz values of $P^{-1} A$ to within a factor of two (1 if P is A); log
        densities `"log_det"`, `"quadratic_form"` and `"solve"`.
    - `result`: a [`traceax.RESULTS`][]: whether the value can be trusted.
    - `quadrature_error`: for functions of a matrix, an estimate, rather too large than too small,
        of the error from ending a recurrence early (of exact values, from rounding). It is not a
        part of `std_err`, and inf if nothing is known of it. None where there is no such error.
    - `aux`: what belongs to the estimate of a particular quantity; else None.
    - `bounds`: a pair of numbers, or of PyTrees, between which the truth lies for sure; else None.
    - `inflation`, `tail`: the constants of Student's intervals: see `interval`.
    """

    value: Value
    std_err: Value
    num_matvecs: Int[Array, ""]
    stats: dict[str, PyTree[Array]]
    result: Any  # a member of RESULTS; the enumeration's item type is private to Equinox
    quadrature_error: Value | None = None
    aux: Any = None
    bounds: Any = None
    # Arrays, so that solutions of two estimators have one structure, as `lax.cond` demands.
    inflation: Real[Array, ""] = eqx.field(default=1.0, converter=_constant)
    tail: Real[Array, ""] = eqx.field(default=1.0, converter=_constant)

    def __repr__(self) -> str:
        """See `described`."""
        parts: dict[str, Any] = {"value": self.value, "std_err": self.std_err}
        if self.quadrature_error is not None:
            parts["quadrature_error"] = self.quadrature_error
        parts["num_matvecs"] = self.num_matvecs
        return described("Solution", parts, self.result)

    def interval(self, level: float = 0.95) -> tuple[Value, Value]:
        r"""The interval that holds the true value (its real part) with probability `level`.

        It is $\mathtt{value} \pm c \, t \, \mathtt{std\_err}$ with Student's quantile t, c =
        `inflation` and `stats["dof"] / tail` degrees of freedom; `inflation` and `tail` are 1 for
        independent normal samples. For functions of matrices the quadrature error is added. It
        ends at `bounds`.

        **Arguments:**

        - `level`: the probability, a number, which may be traced.

        **Returns:** the lower and the upper ends, with the structure of `std_err`: both are the
        value itself if it is exact, and -inf and inf if nothing is known of the error.

        **Raises:** `ValueError` for a level that is not between 0 and 1.
        """
        if not isinstance(level, jax.core.Tracer) and not 0 < level < 1:
            raise ValueError(
                f"The level must lie between 0 and 1, got {level!r}. For 95 % give 0.95."
            )
        # The difference is that of Python numbers: in float32 a level next to 1 would be rounded.
        outside = 1 - level if isinstance(level, jax.Array) else np.asarray(1 - level)
        # Whatever else a solution holds would compile this anew.
        needed = dataclasses.replace(self, stats={"dof": self.stats["dof"]}, aux=None)
        return _interval(outside, needed)


@eqx.filter_jit
def _interval(outside: Any, solution: Solution[Any]) -> tuple[Any, Any]:
    """The interval that does not hold the true value with the probability `outside`."""
    # However heavy the tails, one degree of freedom is left.
    dof = jnp.asarray(solution.stats["dof"], float)
    dof = jnp.where(dof > 1, jnp.maximum(dof / _aligned(solution.tail, dof), 1), dof)

    def radius(std_err, *quadrature_error):
        quantile = _aligned(student_quantile(outside, dof, std_err), std_err)
        factor = _aligned(solution.inflation, std_err) * quantile
        known = jnp.where(std_err == 0, jnp.zeros_like(std_err), factor * std_err)
        return sum(quadrature_error, known)

    others = () if solution.quadrature_error is None else (solution.quadrature_error,)
    radii = jtu.tree_map(radius, solution.std_err, *others)
    given = solution.value, radii, *(solution.bounds or ())
    lower = jtu.tree_map(lambda value, r, *ends: jnp.clip(value.real - r, *ends), *given)
    return lower, jtu.tree_map(lambda value, r, *ends: jnp.clip(value.real + r, *ends), *given)


def student_quantile(outside: Any, dof: Real[Array, "..."], like: Array) -> Real[Array, "..."]:
    """Student's quantile t, P(|T| > t) = `outside`, in the precision of `like`; inf for `dof=0`."""
    real = jnp.finfo(like.dtype).dtype
    tail = jnp.asarray(outside, real)
    dof = jnp.asarray(dof, real)
    # P(|T| > t) = I_x(dof / 2, 1 / 2), x = dof / (dof + t^2), by bisection of log t.
    ends = jnp.full_like(dof, -10.0), jnp.full_like(dof, 30.0)
    safe = jnp.where(dof > 0, dof, 1)
    half = jnp.full_like(dof, 0.5)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        outside = lax.betainc(safe / 2, half, safe / (safe + jnp.exp(2 * middle)))
        is_low = outside > tail
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    _, high = lax.fori_loop(0, 60, halve, ends)
    return jnp.where(dof > 0, jnp.exp(high), jnp.inf)


def solution_of(estimate: Estimate) -> Solution:
    """The solution that users get of an estimate with a result."""
    return Solution(
        value=estimate.value,
        std_err=estimate.std_err,
        num_matvecs=estimate.num_matvecs,
        stats={"std.err": estimate.std_err, "dof": estimate.dof, **estimate.stats},
        result=estimate.result,
        quadrature_error=estimate.quadrature_error,
        aux=estimate.aux,
        bounds=estimate.bounds,
        inflation=estimate.inflation,
        tail=estimate.tail,
    )


@jax.jit
def _nonfinite(x: Array) -> Array:
    return jnp.sum(~jnp.isfinite(x))


def restructure(solution: Solution, structure: PyTree) -> Solution[Any]:
    """The solution with its value and its errors as PyTrees of this structure."""
    fn = partial(unflatten, structure)
    given = solution.value, solution.std_err, solution.quadrature_error, solution.bounds
    value, std_err, error, bounds = jtu.tree_map(fn, given, is_leaf=lambda x: isinstance(x, list))
    lost = jtu.tree_map(_nonfinite, value)
    stats = {**solution.stats, "std.err": std_err, "nonfinite": lost}
    return dataclasses.replace(
        solution, value=value, std_err=std_err, quadrature_error=error, stats=stats, bounds=bounds
    )

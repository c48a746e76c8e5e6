"""The contract of an estimator, and the checks in front of every call."""

import abc
import sys
import traceback
import warnings
from typing import Any, ClassVar, final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, PRNGKeyArray

from .._core.counts import checked_count
from .._core.estimate import Estimate
from .._core.primitive import Primitive, bind, trace_p
from .._core.verdict import raised
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._operators.tags import is_hermitian
from .._probes.samplers import random_signs
from .._sketch.weights import AbstractWeights
from .exact import exact
from .rows import Rows
from .solution import Solution, solution_of
from .tolerance import RangeSampling

#: The largest budget with a tolerance, if the user gives none (n for operators with fewer rows).
DEFAULT_MAX_K = 1000

#: With a tolerance, operators with at most this many rows get the exact value at once, if the
#: budget allows it.
SMALL = 64


class AbstractEstimator(eqx.Module):
    """An algorithm that estimates, from products A v, a quantity that is linear in A (to first
    order).

    A final subclass implements `compute` and `exact`. It declares `smallest` if one product is too
    few, and overrides `check` if it does not take every square operator.
    """

    #: Whether E[G] depends on A, as for functions of a matrix. Second derivatives then need the
    #: derivative of the weights, from `weights_at`.
    weights_depend_on_operator: ClassVar[bool] = False

    #: The smallest budget with which the algorithm can do anything.
    smallest: ClassVar[int] = 1

    #: The number of vectors to multiply at once; a subclass may have a field of this name. None
    #: stands for as many as make a block of 2^27 numbers. (An annotation would make this a field,
    #: which would precede the fields of a subclass.)
    batch_size = None  # type: int | None

    def __check_init__(self):
        name = "batch_size (vectors multiplied at once)"
        checked_count(self.batch_size, name, none="as many as fit into a block")

    @property
    def label(self) -> str:
        """The name of the estimator in messages."""
        return type(self).__name__

    def size(self, operator: lx.AbstractLinearOperator) -> int:
        """The budget from which on the value is exact."""
        return operator.in_size()

    #: Whether the values of an operator are real.
    is_hermitian = staticmethod(is_hermitian)

    def check(self, operator: lx.AbstractLinearOperator) -> None:
        """Raise a `ValueError` if this estimator does not take this square operator, judged by its
        structure and tags. By default it takes every one.
        """

    @abc.abstractmethod
    def compute(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int, weights: bool
    ) -> tuple[Estimate, Any]:
        """The algorithm itself, in ordinary JAX operations; the primitive alone calls it.

        **Arguments:**

        - `key`: the random key.
        - `operator`: a square operator.
        - `k`: the budget of matvecs, `smallest <= k < n`. (Larger budgets go to `exact`.)
        - `weights`: whether a derivative is taken.

        **Returns:** the estimate and its weights; without a derivative the weights may be None.
        """

    @abc.abstractmethod
    def exact(self, operator: lx.AbstractLinearOperator) -> tuple[Estimate, Any]:
        """The exact value, as from `compute`, for `k >= n`: `n` products, standard error 0."""

    def judged(self, estimate: Estimate) -> Estimate:
        """The estimate of `compute` or `exact`, which knows whether it meets a tolerance."""
        return estimate

    def contract(self, weights: Any, operator: lx.AbstractLinearOperator) -> Inexact[Array, "..."]:
        """The value as a function of A, and of the arrays inside the estimator, with fixed weights:
        the function whose derivative is that of the estimate.
        """
        return weights.contract(BlockOperator(operator, self.batch_size))

    def weights_at(self, weights: Any, operator: lx.AbstractLinearOperator) -> Any:
        """The weights as a function of A, and of the arrays inside the estimator; at A they are
        `weights`. Second derivatives differentiate it if `weights_depend_on_operator` is set.
        """
        return weights.weights_at(operator)


class AbstractTraceEstimator(AbstractEstimator):
    """An algorithm that estimates tr(A), and perhaps diag(A), from products A v.

    A final subclass needs one method, `compute`; for diagonals also `compute_rows`. It declares the
    class variable `smallest` if one product is too few, overrides `check` if it does not take every
    square operator, and has a field `batch_size` if a user may choose how many vectors are
    multiplied at once. [`traceax.testing.check_estimator`][] checks a subclass.
    """

    def compute_rows(
        self,
        key: PRNGKeyArray,
        operator: lx.AbstractLinearOperator,
        k: int,
        rows: Rows,
        weights: bool,
    ) -> tuple[Estimate, AbstractWeights | None]:
        """The algorithm for a diagonal: the estimate of these entries or sums of entries, and its
        weights, whose `contract` returns `rows` of the diagonal. The default raises an error.
        (`compute` is not enough: the standard error of a sum does not follow from those of the
        entries.)
        """
        raise ValueError(
            f"{self.label} estimates traces only. Use `traceax.XTraceEstimator()` for a diagonal."
        )

    def exact(self, operator):
        """The exact trace: see `AbstractEstimator`."""
        return exact(BlockOperator(operator, self.batch_size))

    def sampling(self, operator: lx.AbstractLinearOperator, rows: Rows | None) -> RangeSampling:
        """What a call with a tolerance prepares and draws, for the trace (`rows=None`) or these
        entries of the diagonal: by default the range of a sketch, and random signs.
        """
        return RangeSampling(rows=rows, sampler=random_signs(BlockOperator(operator).dtype))

    def estimate(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
    ) -> tuple[Inexact[Array, ""], dict[str, Any]]:
        """Estimate the trace of `operator`; `estimator(key, operator, k)` does the same.

        **Arguments:**

        - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
        - `operator`: a square lineax operator with `n` rows.
        - `k`: the number of matvecs to spend, a Python int. With `k >= n` the trace is exact.

        **Returns:** a 2-tuple of the estimate (a scalar array) and a dictionary with `"std.err"`,
        `"num_matvecs"`, `"dof"` and `"result"` (see [`traceax.Solution`][]).

        **Raises:** `TypeError`, `ValueError` as [`traceax.trace`][].
        """
        solution = estimated(trace_p, key, operator, k, self)
        extra = {"num_matvecs": solution.num_matvecs, "result": solution.result}
        return solution.value, {**solution.stats, **extra}

    def __call__(
        self, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
    ) -> tuple[Inexact[Array, ""], dict[str, Any]]:
        """An alias of `estimate`."""
        return self.estimate(key, operator, k)


class AbstractInnerEstimator(AbstractEstimator):
    """A trace estimator as an estimator of a trace (`rows=None`), or of entries of a diagonal."""

    inner: AbstractTraceEstimator
    rows: Rows | None

    @property
    def label(self):
        """The name of the trace estimator."""
        return self.inner.label

    @property
    def batch_size(self):
        """The `batch_size` of the trace estimator."""
        return self.inner.batch_size

    def check(self, operator):
        """Check the operator as the trace estimator does."""
        self.inner.check(operator)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        return exact(BlockOperator(operator, self.batch_size), self.rows)


@final
class RowsEstimator(AbstractInnerEstimator):
    """An estimator of the entries of a diagonal, or of sums of them, with a budget."""

    rows: Rows

    @property
    def smallest(self):  # pyright: ignore
        """The smallest budget of the trace estimator."""
        return self.inner.smallest

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        return self.inner.compute_rows(key, operator, k, self.rows, weights)


def check_key(key: Any) -> Array:
    """Return the key as an array, or raise a `TypeError` that says what a key is."""
    key = jnp.asarray(key) if isinstance(key, np.ndarray) else key
    if isinstance(key, jax.Array):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if key.ndim == 0 if typed else key.dtype == jnp.uint32 and key.shape in ((2,), (4,)):
            return key
    got = eqx.tree_pformat(key, width=1000)
    raise TypeError(
        f"The key must be a single JAX random key, got {got}. Make one with `jax.random.key(0)` "
        "and pass it first, before the operator; for a batch of keys use `jax.vmap`."
    )


def _depth_of_caller() -> int:
    """The depth in the stack of the first frame outside of this package and wrappers."""
    for depth, (frame, _) in enumerate(traceback.walk_stack(sys._getframe(1)), 1):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("traceax", "equinox", "jaxtyping"):
            return depth
    return 1


def check_budget(k: Any, smallest: int, n: int, name: str, argument: str = "k") -> int:
    """`min(max(k, smallest), n)` as a Python int, and no tracer of `jnp.minimum`, for shapes."""
    if isinstance(k, jax.core.Tracer):
        raise TypeError(
            f"The budget {argument} must be a static Python int, got the traced value {k}: shapes "
            f"depend on it. Mark it static (`jax.jit(..., static_argnames='{argument}')`) or close "
            "over it."
        )
    budget = checked_count(k, f"The budget {argument}")
    least = min(smallest, n)
    if budget < least:
        warnings.warn(
            f"{name} needs at least {least} matvecs, got {argument}={budget}. {argument} was "
            f"raised to {least}.",
            stacklevel=_depth_of_caller(),
        )
    return min(max(budget, least), n)


def tolerance_of(value: Any, name: str) -> Array:
    """A tolerance as an array, which may be traced; 0 for None."""
    if value is None:
        value = 0.0
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if array.ndim != 0 or array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be a real number, got {value!r}. Give 1e-2, say.")
    if not isinstance(array, jax.core.Tracer) and not (array >= 0 and np.isfinite(array)):
        raise ValueError(f"{name} must be finite and not negative, got {value!r}. Give 1e-2, say.")
    return lax.stop_gradient(jnp.asarray(array, jax.dtypes.canonicalize_dtype(float)))


def check_either(name: str, k: Any, rtol: Any, atol: Any, max_k: Any) -> bool:
    """Whether there is a tolerance. Both, neither, or `max_k` with a budget are refused."""
    has_tolerance = rtol is not None or atol is not None
    if has_tolerance == (k is not None) or (max_k is not None and not has_tolerance):
        raise TypeError(
            f"`{name}` takes either a budget or a tolerance, got k={k!r}, rtol={rtol!r}, "
            f"atol={atol!r}, max_k={max_k!r}. Give `k=100`, or `rtol=1e-2` and perhaps `max_k`, "
            "which bounds the products that a tolerance may take."
        )
    return has_tolerance


def largest_budget(max_k: int | None, n: int, name: str, smallest: int = 2) -> tuple[int, int]:
    """The largest budget of a call with a tolerance; and the primitive's, where n means exact."""
    max_k = check_budget(DEFAULT_MAX_K if max_k is None else max_k, smallest, n, name, "max_k")
    return max_k, max_k if n <= SMALL else min(max_k, n - 1)


def estimated(
    primitive: Primitive, key, operator, k, estimator: AbstractEstimator, *, throw=False
) -> Solution:
    """Check the arguments of a public function, estimate by `compute` (or `exact`, for a budget of
    `size`: see `bind`), judge the estimate by `judged` and `verdict`, and return a `Solution`. With
    `throw` an unsuccessful result raises an error at run time.
    """
    key = check_key(key)
    operator = as_operator(operator)
    estimator.check(operator)
    budget = check_budget(k, estimator.smallest, estimator.size(operator), estimator.label)
    estimate = bind(primitive, key, operator, budget, estimator)
    return solution_of(raised(estimate) if throw else estimate)

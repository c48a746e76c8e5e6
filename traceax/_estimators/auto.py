"""What the two default estimators, of traces and of diagonals, have in common."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, PRNGKeyArray

from .._core.estimate import NONFINITE, Estimate, make_estimate, status_of
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import split_known_parts
from .._operators.tags import semidefinite_sign
from .._sketch.weights import AbstractWeights
from .estimator import AbstractEstimator, AbstractToleranceRun
from .rows import Rows

_Estimator = TypeVar("_Estimator", bound=AbstractEstimator)


@final
class KnownPartsWeights(AbstractWeights):
    """The weights of the estimated part. The exact part is differentiated itself."""

    inner: AbstractWeights | None  # None if nothing was estimated
    diagonal: bool = eqx.field(static=True)

    def contract(self, operator):
        """See `AbstractWeights`."""
        parts = split_known_parts(operator, self.diagonal)
        if self.inner is None or parts.rest is None:
            return parts.exact
        estimated = self.inner.contract(parts.rest)
        return add_parts(BlockOperator(operator), parts.exact, parts.scale, estimated)


def add_parts(block: BlockOperator, exact: Array, scale: Array, estimated: Any) -> Any:
    """`exact + scale * estimated`, leaf by leaf if the estimate is a list of leaves."""

    def add(exact, estimated):
        return exact + scale * estimated.astype(scale.dtype)

    if isinstance(estimated, list):
        return [add(*pair) for pair in zip(block.leaves(exact), estimated, strict=True)]
    return add(exact, estimated)


def choose(
    operator: lx.AbstractLinearOperator,
    k: int,
    memory_limit: int,
    *,
    hutchinson: _Estimator,
    nystrom: _Estimator,
    sketching: _Estimator,
) -> _Estimator:
    """The estimator for an operator without known parts."""
    block = BlockOperator(operator)
    if block.n * k * block.dtype.itemsize > memory_limit:
        return hutchinson
    # The leave-one-out estimators need two probes for a standard error.
    if semidefinite_sign(operator) != 0:
        return nystrom if k >= 2 else hutchinson
    return sketching if k >= 4 else hutchinson


def compute_split(
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    k: int,
    estimate_rest: Callable[..., tuple[Estimate, AbstractWeights]],
    rows: Rows | None = None,
) -> tuple[Estimate, KnownPartsWeights]:
    """Read off the known parts, and estimate the rest with `estimate_rest(key, parts, budget)`."""
    parts = split_known_parts(operator, diagonal=rows is not None)
    exact = parts.exact if rows is None else rows.of_vector(parts.exact)
    if parts.rest is None:
        zero = jnp.zeros_like(exact.real)
        status = jnp.maximum(status_of(exact), parts.status)
        known = make_estimate(exact, zero, 0, 0, status)
        return known, KnownPartsWeights(None, rows is not None)
    inner, weights = estimate_rest(key, parts, k)
    known = jnp.maximum(status_of(exact, parts.scale), parts.status)
    size, real = jnp.abs(parts.scale), exact.real.dtype
    estimate = dataclasses.replace(
        inner,
        value=add_parts(BlockOperator(operator), exact, parts.scale, inner.value),
        std_err=jtu.tree_map(lambda x: size * x.astype(real), inner.std_err),
        num_matvecs=inner.num_matvecs,
        # `inner.status` tells of the products only: the known parts must be finite, too.
        status=jnp.where(known != 0, NONFINITE, inner.status),
    )
    return estimate, KnownPartsWeights(weights, rows is not None)


def split_to_tolerance(
    select: Callable[..., Any],
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    run: AbstractToleranceRun,
) -> tuple[Estimate, KnownPartsWeights]:
    """As `compute_split`, for a run that a tolerance ends: `select(rest, budget)` gives the
    estimator of the rest.
    """

    def estimate(key, parts, left):
        return select(parts.rest, left).to_tolerance(key, parts.rest, run.of_rest(parts))

    most = min(run.max_k, operator.in_size())
    return compute_split(key, operator, most, estimate, run.rows)

"""Calls with a tolerance: prepare, then samples.

Something is prepared from a few products (see `samples`), and then panels of 8 independent samples
of what is left are averaged until their error is small enough,

    t std_err <= atol + rtol |value|        (for diagonals with Euclidean norms),

with Student's 97.5 % quantile t. What is prepared has one of few sizes, all of them static: 0, 16,
64, 256 columns. The first panel at a size predicts how many samples are still needed; if the next
size costs less than they do, it is prepared, from new products. (After the first, the variance is
assumed to fall as much again as it fell before.) The last resort, where the budget allows n
products, is the exact value. Under `vmap` a lane gets what it would get by itself.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.control_flow import if_any
from .._core.estimate import (
    Estimate,
    Evidence,
    make_estimate,
    norm_of,
    relative,
    rounding_of,
    worse,
)
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._sketch.weights import AbstractWeights
from .auto import AutoTraceEstimator
from .calibration import norm_factor, root, root_error
from .estimator import (
    AbstractEstimator,
    AbstractTraceEstimator,
    RowsEstimator,
    check_budget,
    check_key,
    described,
    solve,
)
from .exact import exact, with_known_parts
from .rows import Rows
from .samples import AbstractSampling, Moments, Prepared, merged, no_samples
from .solution import Solution

#: The largest budget, if the user gives none (n for operators with fewer rows).
DEFAULT_MAX_K = 1000

#: Operators with at most this many rows get the exact value at once, if the budget allows it.
SMALL = 64


class Target(NamedTuple):
    """When to stop. The value of interest is offset + scale * (what is sampled), or its root."""

    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    offset: Inexact[Array, "..."] | float
    scale: Inexact[Array, ""] | float
    root: bool

    def ratio(self, value: Array, std_err: Array, bias: Array | float = 0.0) -> Real[Array, ""]:
        """The standard error over the largest that is allowed beside `bias`, as Euclidean norms."""
        error = jnp.abs(self.scale) * std_err
        if self.root:
            error = root_error(self.whole(value), error)
        left = self.limit(value) - norm_of(jnp.asarray(bias, error.dtype))
        return relative(norm_factor(error) * norm_of(error), jnp.maximum(left, 0))

    def whole(self, value: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        """The value of interest."""
        whole = self.offset + self.scale * value
        return root(whole) if self.root else whole

    def limit(self, value: Inexact[Array, "..."]) -> Real[Array, ""]:
        """The largest error that is allowed."""
        return self.atol + self.rtol * norm_of(self.whole(value))


class Samples(NamedTuple):
    """The samples at one size so far."""

    moments: Moments
    least_deviation: Real[Array, "..."]
    size: Real[Array, "..."]
    bias: Real[Array, "..."]
    evidence: Evidence
    panels: Int[Array, ""]
    steps: Int[Array, ""]  # the products of one sample

    def std_err(self) -> Real[Array, "..."]:
        """The standard error of the mean."""
        least = self.least_deviation / jnp.sqrt(self.moments.number)
        return jnp.maximum(self.moments.std_err(), least)

    def deviation(self) -> Real[Array, ""]:
        """The standard deviation of one sample, of all entries together."""
        return norm_of(self.std_err()) * jnp.sqrt(self.moments.number)


class Outcome(NamedTuple):
    """What the sizes so far have led to."""

    estimate: Estimate
    deviation: Real[Array, ""]  # of one sample, all entries together
    size: Int[Array, ""]  # the number of the size that the estimate is from
    wanted: Int[Array, ""]  # the number of the size that is to come next; below 0 if none is
    panels: Int[Array, ""]
    steps: Int[Array, ""]
    basis: tuple[Inexact[Array, "n r"], ...]  # for each size, if there are weights


@final
class SampledWeights(AbstractWeights):
    """The weights of the size that a call ended with. The probes are drawn again."""

    sampling: AbstractSampling
    key: PRNGKeyArray
    basis: tuple[Inexact[Array, "n r"], ...]
    size: Int[Array, ""]
    panels: Int[Array, ""]
    steps: Int[Array, ""]
    max_k: int = eqx.field(static=True)

    def contract(self, block):
        """See `AbstractWeights`."""
        branches = [partial(self._sampled, i, block) for i in range(len(self.basis))]
        if self.max_k >= block.n:
            branches.append(partial(self.sampling.exactly_contracted, block))
        return lax.switch(self.size, branches)

    def _sampled(self, number: int, block: BlockOperator) -> Array:
        prepared = self.sampling.captured(block, self.basis[number])
        _, keys = jr.split(jr.fold_in(self.key, number))
        zeros = jnp.zeros_like(prepared.value)
        panel = min(self.sampling.panel, self.max_k)

        # Without the checkpoint, reverse mode would store the probes of all panels.
        @partial(jax.checkpoint, prevent_cse=False)
        def one_panel(j):
            given = block, prepared, panel, self.steps
            return self.sampling.contracted(jr.fold_in(keys, j), *given)

        def add(total, j):
            return total + lax.cond(j < self.panels, one_panel, lambda _: zeros, j), None

        total, _ = lax.scan(add, zeros, jnp.arange(self.max_k // panel, dtype=jnp.int32))
        return prepared.value + total / self.panels.astype(total.real.dtype)


def sample_to_tolerance(
    key, block: BlockOperator, sampling: AbstractSampling, target: Target, max_k: int, weights: bool
) -> tuple[Estimate, SampledWeights | None]:
    """The estimate, and its weights if a derivative is taken: prepare, draw samples until the
    target is met, and prepare more while that costs less than further samples.
    """
    run = _Run(key, block.linearised(), sampling, target, max_k, weights)
    outcome = run.sampled(0, None)
    for number in range(1, len(run.sizes)):
        more = partial(run.sampled, number, outcome)
        outcome = if_any(outcome.wanted == number, more, outcome)
    if run.may_be_exact:
        outcome = if_any(outcome.wanted == len(run.sizes), partial(run.exact, outcome), outcome)
    if not weights:
        return outcome.estimate, None
    made = SampledWeights(
        sampling=sampling,
        key=key,
        basis=outcome.basis,
        size=outcome.size,
        panels=outcome.panels,
        steps=outcome.steps,
        max_k=max_k,
    )
    return outcome.estimate, made


class _Run:
    """The sizes of one call. (It is not a PyTree, as it exists only during a trace.)"""

    def __init__(self, key, block, sampling, target, max_k, weights):
        self.key = key
        self.block = block
        self.sampling = sampling
        self.target = target
        self.max_k = max_k
        self.weights = weights
        self.panel = min(sampling.panel, max_k)
        products = sampling.products
        # What leaves no room for a second panel is not worth its products.
        fitting = [size for size in sampling.sizes if products(size) + 2 * self.panel <= max_k]
        self.sizes = [0, *[size for size in fitting if 0 < 2 * size <= block.n]]
        self.may_be_exact = max_k >= block.n
        # Student's 97.5 % quantile by the number of panels.
        from scipy.special import stdtrit  # imported only here, because it takes time

        panels = np.arange(max_k // self.panel + 2)
        self.quantiles = stdtrit(np.maximum(self.panel * panels - 1, 1), 0.975)

    def sampled(self, number: int, before: Outcome | None) -> Outcome:
        """The outcome of samples at a size."""
        # The second key is that of the panels, which fold in their number.
        prepare_key, keys = jr.split(jr.fold_in(self.key, number))
        size = self.sizes[number]
        if size == 0:
            empty = jnp.zeros((self.block.n, 0), self.block.dtype)
            prepared = self.sampling.captured(self.block, empty)
        else:
            prepared = self.sampling.prepare(prepare_key, self.block, size, self.weights)
        already = 0 if before is None else before.estimate.num_matvecs
        spent = already + self.sampling.products(size)
        given = self.block, prepared, self.panel

        def step(state):
            _, samples = state
            panel = self.sampling.draw(jr.fold_in(keys, samples.panels), *given, samples.steps)
            share = jnp.asarray(1 / (samples.panels + 1), zero.dtype)
            least = jnp.hypot(
                jnp.sqrt(1 - share) * samples.least_deviation,
                jnp.sqrt(share) * panel.least_deviation,
            )
            grown = Samples(
                moments=merged(samples.moments, panel.samples),
                least_deviation=least,
                size=samples.size + share * (panel.size - samples.size),
                bias=samples.bias + share * (panel.bias - samples.bias),
                evidence=worse(samples.evidence, panel.evidence),
                panels=samples.panels + 1,
                steps=jnp.asarray(panel.steps, jnp.int32),
            )
            return self.choice(number, before, prepared, spent, grown), grown

        zero = jnp.zeros_like(prepared.value.real)
        start = Samples(
            moments=no_samples(prepared.value.shape, prepared.value.dtype),
            least_deviation=zero,
            size=zero,
            bias=zero,
            evidence=prepared.evidence,
            panels=jnp.zeros((), jnp.int32),
            steps=jnp.zeros((), jnp.int32),
        )
        state = jnp.asarray(number, jnp.int32), start
        wanted, samples = lax.while_loop(lambda state: state[0] == number, step, state)
        return Outcome(
            estimate=self.estimate(prepared, samples, spent),
            deviation=samples.deviation(),
            size=jnp.asarray(number, jnp.int32),
            wanted=wanted,
            panels=samples.panels,
            steps=samples.steps,
            basis=self.bases(number, prepared),
        )

    def std_err(self, prepared: Prepared, samples: Samples) -> Real[Array, "..."]:
        """The standard error, with what rounding adds, whatever the number of samples."""
        rounding = rounding_of(jnp.hypot(prepared.size, samples.size), self.block.eps)
        return jnp.hypot(samples.std_err(), rounding)

    def ratio(self, prepared: Prepared, samples: Samples) -> Real[Array, ""]:
        """The error that is exceeded in 5 % of all cases, over the one that is allowed."""
        std_err = self.std_err(prepared, samples)
        quantile = jnp.asarray(self.quantiles, std_err.dtype)[samples.panels]
        value = prepared.value + samples.moments.mean
        return quantile * self.target.ratio(value, std_err, samples.bias)

    def choice(
        self, number: int, before: Outcome | None, prepared: Prepared, spent: Any, samples: Samples
    ) -> Int[Array, ""]:
        """The number of the size to go on with: this one, a later one, or -1 for the end."""
        drawn = self.panel * samples.panels
        # The samples that this size takes in all: their error falls with the root of their number.
        needed = drawn * jnp.square(self.ratio(prepared, samples))
        limit = self.target.limit(prepared.value + samples.moments.mean)
        biased = norm_of(samples.bias) > limit  # which more samples leave as it is
        steps = samples.steps
        more = steps * jnp.maximum(needed - drawn, 0)
        left = self.max_k - spent - drawn * steps
        choice = jnp.where((left >= self.panel * steps) & ~biased, number, -1)
        if number + 1 < len(self.sizes):
            cost = self.sampling.products(self.sizes[number + 1]) + self.panel * steps
            fall = 0.0
            if before is not None and number > 1:
                fall = jnp.minimum(samples.deviation() / before.deviation, 1) ** 2
            pays = (cost + fall * needed * steps < more) | biased
            choice = jnp.where(pays & (cost <= left), number + 1, choice)
        if self.may_be_exact:
            last_resort = (more > self.block.n) & (choice == number) | (choice < 0)
            choice = jnp.where(last_resort, len(self.sizes), choice)
        ends = (needed <= drawn) | samples.evidence.fails
        return jnp.where(ends, -1, choice).astype(jnp.int32)

    def estimate(self, prepared: Prepared, samples: Samples, spent: Any) -> Estimate:
        """The estimate from the samples at a size."""
        drawn = self.panel * samples.panels
        return make_estimate(
            prepared.value + samples.moments.mean,
            self.std_err(prepared, samples),
            spent + drawn * samples.steps,
            drawn - 1,
            worse(samples.evidence, Evidence(unconverged=self.ratio(prepared, samples))),
            quadrature_error=samples.bias if self.sampling.has_bias else None,
            # At the first size, where NaN and inf end a call, entries are.
            separate=self.sampling.rows is not None,
        )

    def bases(self, number: int, prepared: Prepared) -> tuple[Inexact[Array, "n r"], ...]:
        """The basis of this size, and zeros for the others."""
        if not self.weights:
            return ()
        shape = self.block.n
        others = [jnp.zeros((shape, size), self.block.dtype) for size in self.sizes]
        others[number] = lax.stop_gradient(prepared.basis)
        return tuple(others)

    def exact(self, before: Outcome) -> Outcome:
        """The outcome of n products with unit vectors."""
        found, _ = self.sampling.exact(self.block)
        unconverged = Evidence(unconverged=self.target.ratio(found.value, found.std_err))
        estimate = dataclasses.replace(
            before.estimate,
            value=found.value,
            std_err=found.std_err,
            num_matvecs=before.estimate.num_matvecs + found.num_matvecs,
            dof=found.dof.astype(before.estimate.dof.dtype),
            evidence=worse(found.evidence, unconverged),
            quadrature_error=found.quadrature_error,
        )
        return before._replace(
            estimate=estimate,
            size=jnp.asarray(len(self.sizes), jnp.int32),
            wanted=jnp.asarray(-1, jnp.int32),
        )


@final
class ToleranceEstimator(AbstractEstimator):
    """An estimator with a tolerance in the place of a budget."""

    inner: AbstractTraceEstimator
    rows: Rows | None
    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    max_k: int = eqx.field(static=True)
    root: bool = eqx.field(default=False, static=True)

    @property
    def batch_size(self):
        """The `batch_size` of the trace estimator."""
        return self.inner.batch_size

    def check(self, operator):
        """Check the operator as the trace estimator does, and that it can end early."""
        self.inner.check(operator)
        if self.inner.sampling(operator, self.rows) is None:
            raise ValueError(
                f"{self.inner.label} cannot work to a tolerance. Give it a budget k, or use "
                "`traceax.XTraceEstimator()`."
            )

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`. The default estimator reads known parts."""
        if not isinstance(self.inner, AutoTraceEstimator):
            return self._sampled(key, weights, operator)
        return with_known_parts(operator, self.rows, partial(self._sampled, key, weights))

    def _sampled(self, key, weights, operator, offset=0.0, scale=1.0):
        sampling = self.inner.sampling(operator, self.rows)
        assert sampling is not None
        block = BlockOperator(operator, self.batch_size)
        real = jnp.finfo(block.dtype).dtype
        target = Target(
            rtol=self.rtol.astype(real),
            atol=self.atol.astype(real),
            offset=offset,
            scale=scale,
            root=self.root,
        )
        return sample_to_tolerance(key, block, sampling, target, self.max_k, weights)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        return exact(BlockOperator(operator, self.batch_size), self.rows)


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
    if max_k is None:
        max_k = min(n, DEFAULT_MAX_K)
    max_k = check_budget(max_k, min(smallest, n), n, name, "max_k")
    return max_k, max_k if n <= SMALL else min(max_k, n - 1)


def solve_either(
    name, primitive, key, operator, k, estimator, rows: Rows | None, *, rtol, atol, max_k, throw
) -> Solution:
    """A trace (`rows=None`), or entries of a diagonal, with a budget or a tolerance."""
    if not isinstance(estimator, AbstractTraceEstimator):
        raise TypeError(
            "The estimator must be an instance of an AbstractTraceEstimator, such as "
            f"`traceax.XTraceEstimator()`, got {described(estimator)}."
        )
    check_key(key)  # of a call without one, k is missing, too
    if not check_either(name, k, rtol, atol, max_k):
        budgeted = estimator if rows is None else RowsEstimator(estimator, rows)
        return solve(primitive, key, operator, k, budgeted, throw=throw)
    operator = as_operator(operator)
    max_k, budget = largest_budget(max_k, operator.in_size(), name)
    run = ToleranceEstimator(
        inner=estimator,
        rows=rows,
        rtol=tolerance_of(rtol, "rtol"),
        atol=tolerance_of(atol, "atol"),
        max_k=max_k,
    )
    return solve(primitive, key, operator, budget, run, throw=throw)

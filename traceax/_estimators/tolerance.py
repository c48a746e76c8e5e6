r"""Calls with a tolerance: prepare, then samples.

A low-rank part of A is *prepared*: Q Q^H A, with an orthonormal basis Q of the range of a sketch of
r columns (r products for the sketch, r for A Q or A^H Q). Its trace, or diagonal, is known. Given
it, samples of the rest are independent and unbiased,

    trace:      omega^H B omega,            B = (I - Q Q^H) A (I - Q Q^H)
    diagonal:   conj(omega) o B omega,      B = (I - Q Q^H) A

which are Hutchinson's samples for r = 0. Panels of 8 are averaged until their error is small
enough,

    t std_err <= atol + rtol |value|        (for diagonals with Euclidean norms),

with Student's 97.5 % quantile t. What is prepared has one of few sizes, all of them static: 0, 16,
64, 256 columns. The panels at a size predict how many samples are still needed, and how many with
s more columns: of d equal singular values these would leave 1 - s / d of the variance, and the
cosines of the products B omega show d (`concentration_of`). The cheapest size is prepared, from new
products. The last resort, where the budget allows n products, is the exact value. Under `vmap` a
lane gets what it would get by itself.

*The least variance.* Few samples cannot tell their variance: a panel of them may agree by chance.
But the vectors behind each sample say much more. Rows of a real symmetric B with random signs have
the variances sum_j B_ij^2, of which those of a sum over rows are twice the sum. Half of that is
taken as the least variance of a sample, since B need not be symmetric. What is prepared depends on
all of it, if that is less than the samples' own: else a panel that scatters widely by chance would
have a sketch made where the diagonal dominates.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.control_flow import if_any
from .._core.estimate import Estimate, Evidence, evidence_of, norm_of, rounding_of, safe_norm, worse
from .._operators.block_operator import BlockOperator
from .._probes.samplers import AbstractSampler
from .._sketch.ranges import captured_diagonal, concentration_of, range_basis, residual_products
from .._sketch.weights import AbstractWeights
from .exact import exact
from .rows import Rows, added

#: The numbers of columns of a sketch, one of which is prepared.
SIZES = (0, 16, 64, 256)


class Moments(NamedTuple):
    """The number of samples so far, their mean, and the root of the sum of squared deviations."""

    number: Real[Array, ""]
    mean: Inexact[Array, "..."]
    spread: Real[Array, "..."]

    def std_err(self) -> Real[Array, "..."]:
        """The standard error of the mean; inf for a single sample."""
        pairs = self.number * jnp.maximum(self.number - 1, 1)
        return jnp.where(self.number > 1, self.spread / jnp.sqrt(pairs), jnp.inf)


def no_samples(shape: tuple[int, ...], dtype: Any) -> Moments:
    """The moments to begin with."""
    mean = jnp.zeros(shape, dtype)
    return Moments(jnp.zeros((), mean.real.dtype), mean, mean.real)


def merged(moments: Moments, samples: Inexact[Array, "... m"]) -> Moments:
    """The moments with m more samples, by Chan's update."""
    count, mean, spread = moments
    m = samples.shape[-1]
    # Without a barrier, XLA adds up all m n terms of all samples in one reduction, and rounding
    # errors grow with m n.
    samples = lax.optimization_barrier(samples)
    block_mean = jnp.mean(samples, axis=-1)
    shift = block_mean - mean
    total = count + m
    gap = jnp.abs(shift) * jnp.sqrt(count * m / total)
    spread = jnp.hypot(jnp.hypot(spread, safe_norm(samples - block_mean[..., None])), gap)
    return Moments(total, mean + shift * (m / total), spread)


class Prepared(NamedTuple):
    """A low-rank part, by its basis Q and by A Q, or for a diagonal A^H Q."""

    basis: Inexact[Array, "n r"]
    products: Inexact[Array, "n r"]
    value: Inexact[Array, "..."]  # its trace, or sums of entries of its diagonal
    size: Real[Array, "..."]  # its norm, or those of its rows
    evidence: Evidence


class Hints(NamedTuple):
    """What the vectors behind samples say: in the mean over panels."""

    least_deviation: Real[Array, "..."]  # the least standard deviation of a sample
    size: Real[Array, "..."]  # the norm of the rest
    concentration: Real[Array, ""]  # 1 / d


#: Samples, and what was seen as they were made.
Panel = tuple[Inexact[Array, "... m"], Hints, Evidence]


def norms_of(rows: Rows | None, block: Inexact[Array, "n m"]) -> Real[Array, "..."]:
    """The norm of a block, or those of its rows."""
    return safe_norm(block.reshape(-1)) if rows is None else rows.norms(block)


@final
class RangeSampling(eqx.Module):
    """What a call with a tolerance prepares, a basis of the range of a sketch, and the samples that
    it draws of what the basis leaves, as Hutch++ and Diag++ do.

    **Arguments:**

    - `rows`: the entries of a diagonal that are wanted; None for traces.
    - `sampler`: the distribution of the probes.
    - `sizes`: of the sketches that may be prepared, the smallest first.
    """

    rows: Rows | None
    sampler: AbstractSampler
    sizes: tuple[int, ...] = eqx.field(default=SIZES, static=True)

    #: The number of samples that are drawn at once.
    panel = 8

    def prepare(self, key: PRNGKeyArray, block: BlockOperator, size: int) -> Prepared:
        """The low-rank part from a sketch of `size` columns, and twice as many products."""
        if size == 0:
            return self.captured(block, jnp.zeros((block.n, 0), block.dtype))
        omega = self.sampler.probes(key, block.n, size, block.dtype)
        return self.captured(block, range_basis(block, omega))

    def captured(self, block: BlockOperator, basis: Inexact[Array, "n r"]) -> Prepared:
        """The low-rank part for a basis, as a function of A."""
        if basis.shape[1] == 0:
            value = added(self.rows, jnp.zeros(block.n, block.dtype))
            return Prepared(basis, basis, value, value.real, Evidence())
        if self.rows is None:
            products = block.mm(basis)
            value = jnp.sum(jnp.conj(basis) * products)
        else:
            products = block.adjoint_mm(basis)
            value = self.rows.of_vector(captured_diagonal(basis, products))
        size = norms_of(self.rows, products)
        return Prepared(basis, products, value, size, evidence_of(products))

    def draw(
        self, key: PRNGKeyArray, block: BlockOperator, prepared: Prepared, count: int
    ) -> Panel:
        """`count` samples of the rest."""
        rows = self.rows
        q = prepared.basis
        omega = self.sampler.probes(key, block.n, count, block.dtype)
        if rows is None:
            images = block.mm(residual_products(q, omega, omega, q))
            rest = residual_products(q, images, images, q)  # B omega
        else:
            rest = residual_products(q, omega, block.mm(omega), prepared.products)
        entries = jnp.conj(omega) * rest
        deviations = safe_norm(entries - jnp.mean(entries, axis=1, keepdims=True))
        deviations = deviations / math.sqrt(max(count - 1, 1))
        sizes = safe_norm(rest) / math.sqrt(count)
        samples = jnp.sum(entries, axis=0) if rows is None else rows(entries)
        least_deviation = norms_of(rows, deviations[:, None])
        sizes = norms_of(rows, sizes[:, None])
        hints = Hints(least_deviation, sizes, concentration_of(rest))
        return samples, hints, evidence_of(entries)


def norm_factor(std_err: Real[Array, "..."]) -> Array | float:
    """The 95 % quantile of ||error|| / ||std_err|| for a vector of errors, over that of
    |error| / std_err for a single error: 1 for one error, 0.52 for infinitely many of equal size.

    For normal errors e with covariance C, ||e||^2 is about tr(C) times chi^2 / nu with
    nu = tr(C)^2 / tr(C^2) degrees of freedom. The std_err show the diagonal of C alone. But for
    samples conj(omega_i) (B omega)_i with independent real omega_i of modulus 1,
    C_ij = B_ij B_ji for i != j, and C_ii = sum_{j != i} B_ij^2, so that
    sum_{i != j} C_ij^2 <= sum_{i != j} B_ij^4 <= sum_i C_ii^2. Hence nu is at least half of its
    value for uncorrelated errors. (The same holds for sums over groups of entries, B symmetric.)
    """
    if std_err.ndim == 0:
        return 1.0
    norm = norm_of(std_err)
    shares = jnp.square(std_err / jnp.where(norm > 0, norm, 1))
    # tr(C)^2 / tr(C^2) >= 1 / (2 sum_i shares_i^2); a single number has nu = 1.
    nu = jnp.maximum(1, 1 / (2 * norm_of(shares) ** 2))
    return _chi_square_root(nu) / _chi_square_root(1.0)


def _chi_square_root(nu: Array | float) -> Any:
    """The root of the 95 % quantile of chi^2 / nu, after Wilson and Hilferty (to 2 %)."""
    deviation = 2 / (9 * nu)
    return (1 - deviation + 1.645 * deviation**0.5) ** 1.5


#: The error of a value with this standard error, over the one that is allowed.
Ratio = Callable[[Inexact[Array, "..."], Real[Array, "..."]], Real[Array, ""]]


class Samples(NamedTuple):
    """The samples at one size so far."""

    moments: Moments
    hints: Hints
    evidence: Evidence
    panels: Int[Array, ""]

    def joined(self, panel: Panel) -> "Samples":
        """These and the samples of one more panel."""
        samples, hints, evidence = panel
        share = jnp.asarray(1 / (self.panels + 1), self.hints.size.dtype)
        return Samples(
            moments=merged(self.moments, samples),
            hints=jtu.tree_map(lambda old, new: old + share * (new - old), self.hints, hints),
            evidence=worse(self.evidence, evidence),
            panels=self.panels + 1,
        )


class Outcome(NamedTuple):
    """What the sizes so far have led to."""

    estimate: Estimate
    size: Int[Array, ""]  # the number of the size that the estimate is from
    wanted: Int[Array, ""]  # the number of the size that is to come next; below 0 if none is
    panels: Int[Array, ""]
    basis: Inexact[Array, "n r"]  # with zeros up to the largest size; no columns without weights


@final
class SampledWeights(AbstractWeights):
    """The weights of the size that a call ended with. The probes are drawn again."""

    sampling: RangeSampling
    key: PRNGKeyArray
    outcome: Outcome
    sizes: tuple[int, ...] = eqx.field(static=True)
    max_k: int = eqx.field(static=True)

    def contract(self, block):
        """See `AbstractWeights`."""
        branches = [partial(self._sampled, i, block) for i in range(len(self.sizes))]
        if self.max_k >= block.n:
            rows = self.sampling.rows
            branches = [*branches, lambda: exact(block, rows)[1].contract(block)]
        return lax.switch(self.outcome.size, branches)

    def _sampled(self, number: int, block: BlockOperator) -> Array:
        prepared = self.sampling.captured(block, self.outcome.basis[:, : self.sizes[number]])
        _, keys = jr.split(jr.fold_in(self.key, number))
        panel = min(self.sampling.panel, self.max_k)
        panels = self.outcome.panels

        # Without the checkpoint, reverse mode would store the probes of all panels.
        @partial(jax.checkpoint, prevent_cse=False)
        def one_panel(j):
            samples, *_ = self.sampling.draw(jr.fold_in(keys, j), block, prepared, panel)
            return jnp.mean(samples, axis=-1)

        def add(total, j):
            return total + lax.cond(j < panels, one_panel, lambda _: jnp.zeros_like(total), j), None

        zeros = jnp.zeros_like(prepared.value)
        total, _ = lax.scan(add, zeros, jnp.arange(self.max_k // panel, dtype=jnp.int32))
        return prepared.value + total / panels.astype(total.real.dtype)


def sample_to_tolerance(
    key, block: BlockOperator, sampling: RangeSampling, ratio: Ratio, max_k: int, weights: bool
) -> tuple[Estimate, SampledWeights | None]:
    """The estimate, and its weights if a derivative is taken: prepare, draw samples until `ratio`
    allows their error, and prepare more while that costs less than further samples.
    """
    call = _Call(key, block.linearised(), sampling, ratio, max_k, weights)
    outcome = call.sampled(0, 0)
    for number in range(1, len(call.sizes)):
        more = partial(call.sampled, number, outcome.estimate.num_matvecs)
        outcome = if_any(outcome.wanted == number, more, outcome)
    if call.may_be_exact:
        outcome = if_any(outcome.wanted == len(call.sizes), partial(call.exact, outcome), outcome)
    if not weights:
        return outcome.estimate, None
    return outcome.estimate, SampledWeights(sampling, key, outcome, tuple(call.sizes), max_k)


class _Call:
    """The sizes of one call. (It is not a PyTree, as it exists only during a trace.)"""

    def __init__(self, key, block, sampling, ratio, max_k, weights):
        self.key = key
        self.block = block
        self.sampling = sampling
        self.ratio = ratio
        self.max_k = max_k
        self.panel = min(sampling.panel, max_k)
        # What leaves no room for a second panel is not worth its products.
        fitting = [size for size in sampling.sizes if 2 * (size + self.panel) <= max_k]
        self.sizes = [0, *[size for size in fitting if 0 < 2 * size <= block.n]]
        self.width = self.sizes[-1] if weights else 0
        self.may_be_exact = max_k >= block.n
        # Student's 97.5 % quantile by the number of panels.
        from scipy.special import stdtrit  # imported only here, because it takes time

        panels = np.arange(max_k // self.panel + 2)
        self.quantiles = stdtrit(np.maximum(self.panel * panels - 1, 1), 0.975)

    def sampled(self, number: int, already: int | Array) -> Outcome:
        """The outcome of samples at a size, after so many products at other sizes."""
        # The second key is that of the panels, which fold in their number.
        prepare_key, keys = jr.split(jr.fold_in(self.key, number))
        prepared = self.sampling.prepare(prepare_key, self.block, self.sizes[number])
        spent = already + 2 * self.sizes[number]

        def step(state):
            _, samples = state
            panel_key = jr.fold_in(keys, samples.panels)
            panel = self.sampling.draw(panel_key, self.block, prepared, self.panel)
            samples = samples.joined(panel)
            estimate = self.estimate(prepared, samples, spent)
            return self.choice(number, estimate, samples), samples

        zero = jnp.zeros_like(prepared.value.real)
        start = Samples(
            moments=no_samples(prepared.value.shape, prepared.value.dtype),
            hints=Hints(zero, zero, jnp.zeros((), zero.dtype)),
            evidence=prepared.evidence,
            panels=jnp.int32(0),
        )
        state = jnp.int32(number), start
        wanted, samples = lax.while_loop(lambda state: state[0] == number, step, state)
        basis = lax.stop_gradient(prepared.basis[:, : self.width])
        return Outcome(
            estimate=self.estimate(prepared, samples, spent),
            size=jnp.int32(number),
            wanted=wanted,
            panels=samples.panels,
            basis=jnp.pad(basis, ((0, 0), (0, self.width - basis.shape[1]))),
        )

    def estimate(self, prepared: Prepared, samples: Samples, spent: Any) -> Estimate:
        """The estimate from the samples at a size."""
        value = prepared.value + samples.moments.mean
        least = samples.hints.least_deviation / jnp.sqrt(samples.moments.number)
        # Rounding adds its part whatever the number of samples.
        rounding = rounding_of(jnp.hypot(prepared.size, samples.hints.size), self.block.eps)
        std_err = jnp.hypot(jnp.maximum(samples.moments.std_err(), least), rounding)
        # The error that is exceeded in 5 % of all cases, over the one that is allowed.
        quantile = jnp.asarray(self.quantiles, std_err.dtype)[samples.panels]
        unconverged = quantile * self.ratio(value, std_err)
        drawn = self.panel * samples.panels
        evidence = worse(samples.evidence, Evidence(unconverged=unconverged))
        # At the first size, where NaN and inf end a call, entries are.
        separate = self.sampling.rows is not None
        return Estimate(value, std_err, spent + drawn, drawn - 1, evidence, separate=separate)

    def choice(self, number: int, estimate: Estimate, samples: Samples) -> Int[Array, ""]:
        """The number of the size to go on with: this one, a later one, or -1 for the end."""
        drawn = self.panel * samples.panels
        # The samples that this size takes in all: their error falls with the root of their number.
        needed = drawn * jnp.square(estimate.evidence.unconverged)
        # A few samples may scatter widely by chance. The vectors behind them say better how many
        # it will take: the variance of a sample is at most 2 least_deviation^2.
        error = samples.hints.least_deviation * jnp.sqrt(2 / samples.moments.number)
        quantile = jnp.asarray(self.quantiles, error.dtype)[samples.panels]
        likely = drawn * jnp.square(quantile * self.ratio(estimate.value, error))
        likely = jnp.minimum(needed, likely)
        left = self.max_k - estimate.num_matvecs
        later = np.array(self.sizes[number + 1 :])
        products = 2 * later + self.panel
        share = jnp.maximum(1 - later * samples.hints.concentration, 0)
        costs = jnp.where(products <= left, products + share * likely, jnp.inf)
        stay = jnp.where(left >= self.panel, jnp.maximum(likely - drawn, 0), jnp.inf)
        costs = jnp.append(stay, costs)
        if self.may_be_exact:
            costs = jnp.append(costs, self.block.n)
        ends = (needed <= drawn) | samples.evidence.fails | (jnp.min(costs) == jnp.inf)
        return jnp.where(ends, -1, number + jnp.argmin(costs)).astype(jnp.int32)

    def exact(self, previous: Outcome) -> Outcome:
        """The outcome of n products with unit vectors."""
        found, _ = exact(self.block, self.sampling.rows)
        unconverged = Evidence(unconverged=self.ratio(found.value, found.std_err))
        estimate = dataclasses.replace(
            found,
            num_matvecs=previous.estimate.num_matvecs + found.num_matvecs,
            dof=found.dof.astype(previous.estimate.dof.dtype),
            evidence=worse(found.evidence, unconverged),
            separate=previous.estimate.separate,
        )
        size = jnp.int32(len(self.sizes))
        return previous._replace(estimate=estimate, size=size, wanted=jnp.int32(-1))

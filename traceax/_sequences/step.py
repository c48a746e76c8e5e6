r"""One step of a tracked trace: the recycled subspace, DeltaShift, or both at once.

Below, probes z have the norm sqrt(n), k is the budget of a step, and l = k // 2.

*Recycled Hutch++.* `Q_j = orth(A_{j-1} Q_{j-1})` continues a subspace iteration from step to step,
and costs nothing: the products with `Q_{j-1}` were made for the trace. As `Q_j` depends only on the
past, `tr(Q^H A Q) + mean c g^H A g`, `g = (I - Q Q^H) z`, is unbiased.

*DeltaShift.* With the same probes on both operators, and a = 1 - gamma,

    t_j = a t_{j-1} + mean z^H (A_j - a A_{j-1}) z,
    v_j = a^2 v_{j-1} + (beta / l) (M + a^2 N - 2 a C),        a = C / (l v_{j-1} / beta + N),

where `N = ||A_{j-1}||_F^2`, `M = ||A_j||_F^2`, `C = Re <A_j, A_{j-1}>`, and beta is 2 for real
probes and 1 for complex ones (for which `E[z z^T] = 0`, as for independent phases). For probes on
the sphere the part of A z orthogonal to z gives exactly

    Var z^H A z = beta E ||A z - z (z^H A z) / n||^2        (A Hermitian; otherwise at most this).

So N, M and C are computed from these parts. A multiple of I, which adds no variance, then adds
nothing to them.

*What `a` may look at.* It multiplies the error of the past, e = t_{j-1} - tr(A_{j-1}), and that of
the products with A_{j-1} at this step: what correlates with either is a bias, E[a e].

- The same probes, now or at an earlier step (0.6 standard deviations after 16 steps, measured with
  k = 8 on rotating positive definite matrices). So each half of the probes has a t of its own, and
  the a of one half comes from the norms that the other half sees. Both t are then unbiased. The
  variance of their mean is that of one recursion with all the probes, up to the square of the
  correlation above: the true error is up to 10 % larger than reported with k = 8, and 5 % with 20.
- The batch of this step, which is a part of A_j and of the products with A_{j-1}. So the a of a
  step comes from the norms of the steps before it.
- The batches of the past, which are a part of e. A batch of large curvature has large norms, of
  both operators. So a comes from ratios of norms of the same step. Per half, the state holds

      delta = ||A_j - A_{j-1}||_F^2 / (M + N) = 1 - 2 C / (M + N),   w = M / (M + v_j / beta),

  delta smoothed over the steps; then, with N = M of the last step, C = (1 - delta) N, and v brought
  to the scale of N at this step,

      a = (1 - delta) w / (w + l (1 - w)),
      a^2 v_{j-1} / beta = N a (1 - delta) (1 - w) / (w + l (1 - w)).

  (w, and not its inverse, which has no value at an operator that has become zero.)

*One program.* A step may be one of several plans. Vectors are rows. Their numbers are traced, and
all arrays have room for the most vectors that any plan has. Those that a plan does not have are
zeros among the products, and whatever is summed over them needs no other mask. Conditions leave out
what a plan does not need; only the products are compiled for each plan.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.estimate import rounding_of, safe_norm, scale_of, status_of
from .._linalg.factorisations import panel_qr
from .._operators.block_operator import BlockOperator
from .._operators.width import APART_LIMIT
from .._probes.random import split
from .._probes.samplers import AbstractSampler, RademacherSampler
from .._sketch.leave_one_out import (
    adjoint,
    matmul,
    resphering,
    row_dots,
    row_squares,
    scaled,
    shift_of,
)

RECYCLED, DELTASHIFT = 0, 1


@final
class TrackState(eqx.Module):
    """What a [`traceax.Tracker`][] remembers between steps. Its arrays have fixed shapes, so that
    `lax.scan` can carry it, `vmap` batch it, and `equinox.tree_serialise_leaves` save it.

    **Attributes:**

    - `step`: the number of steps so far whose products were finite.
    - `method`: the method of the next step: 0 for the recycled subspace, 1 for DeltaShift.
    - `sketch`: the sketch $A_{j-1} Q_{j-1}$, with its columns as rows. After a step with a smaller
        budget its last rows are those of an earlier step.
    - `previous`: the arrays that are kept of the previous operator (random keys as raw data).
    - `values`: the estimate from each half of the probes.
    - `trust`: what the next step weighs the value by: the squared norm of the operator in its sum
        with the variance of the value, for each half as computed from the probes of the other half.
    - `std_errs`: the standard error of each half, as computed from its own probes.
    - `levels`: smoothed sizes, of the operator off the subspace and of the operator, as the other
        half sees them.
    - `drift`: the smoothed square of the relative change in a step, as the other half sees it.
    - `k`: the largest budget of a step (static).
    - `numbers`: the Python numbers that are kept of the operator (static).
    """

    step: Int[Array, ""]
    method: Int[Array, ""]
    sketch: Inexact[Array, "l n"]
    previous: tuple[Array, ...]
    values: Inexact[Array, " 2"]
    trust: Real[Array, " 2"]
    std_errs: Real[Array, " 2"]
    levels: Real[Array, "2 2"]
    drift: Real[Array, " 2"]
    k: int = eqx.field(static=True)
    numbers: tuple[Any, ...] = eqx.field(static=True)


TrackState.__init__.__doc__ = "**Arguments:**" + (TrackState.__doc__ or "").partition("es:**")[2]


class StepPlan(NamedTuple):
    """How one step spends its products. The numbers may be traced."""

    basis: Any  # the number of products A_j Q
    probes: Any  # of products A_j g
    shared: Any  # of products A_{j-1} z, with the first of the same probes
    method: Any  # the method that the value is computed by

    @property
    def shifts(self) -> Any:
        """Whether the value is that of DeltaShift."""
        return (self.method == DELTASHIFT) & (self.shared > 0)

    @property
    def cost(self) -> Any:
        """The number of all products."""
        return self.basis + self.probes + self.shared

    @property
    def dof(self) -> Array:
        """The number of probes behind the value."""
        return jnp.where(self.shifts, self.shared, self.probes)


def plan_of(plans: list[StepPlan], index: Array) -> StepPlan:
    """The plan of this index. What is the same in all plans remains a Python number."""
    chosen = jnp.asarray(plans, jnp.int32)[index]
    columns = enumerate(zip(*plans, strict=True))
    return StepPlan(*(x[0] if len(set(x)) == 1 else chosen[i] for i, x in columns))


def divide(a: Array, b: Array) -> Array:
    """`a / b`, or 0 where b is not positive."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, jnp.ones_like(b)), jnp.zeros_like(a))


def _either(condition: Any, fn: Callable[[], Any], otherwise: Callable[[], Any] | None = None):
    """`fn()` if the condition holds; if not, `otherwise()`, or zeros."""

    def zeros():
        return jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn))

    if isinstance(condition, bool):
        return (fn if condition else otherwise or zeros)()
    return lax.cond(condition, fn, otherwise or zeros)


class _Halves(NamedTuple):
    """The two halves of the first `count` of so many columns. One column alone is in both."""

    weights: Real[Array, "columns 2"]  # of their means
    counts: Real[Array, " 2"]

    @classmethod
    def of(cls, count: Any, columns: int, dtype: Any) -> "_Halves":
        i, middle = jnp.arange(columns)[:, None], count // 2
        members = i < jnp.maximum(middle, 1), (i >= middle) & (i < count)
        members = jnp.concatenate(members, axis=1).astype(dtype)
        counts = jnp.maximum(jnp.sum(members, axis=0), 1)
        return cls(members / counts, counts)

    def means(self, samples: Array) -> Array:
        """The mean of each half, over the last axis."""
        return matmul(samples, self.weights)

    def total(self, means: Array) -> Array:
        """The mean of all, from the means of the halves."""
        return jnp.sum(means * self.counts, axis=-1) / jnp.sum(self.counts)


def _smooth(old: Array, new: Array) -> Array:
    # The geometric mean, which forgets a jump of the operator within a few updates.
    return jnp.where((old > 0) & (new > 0), jnp.sqrt(old) * jnp.sqrt(new), new)


def beta_of(sampler: AbstractSampler, dtype: Any) -> int:
    """The factor beta of the variance: 1 for complex probes that are rotation invariant, or of
    independent phases, otherwise 2.
    """
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    single = sampler.respheres(None, dtype) or sampler.independent_phases
    return 1 if is_complex and single else 2


class _Forms(NamedTuple):
    """What is left of probes: numbers for each, in units of which the squares do not overflow."""

    unit: Real[Array, " m"]
    residual: Inexact[Array, " m"]  # samples of the trace off the subspace
    spread: Real[Array, " m"]  # the variances of these
    new: Inexact[Array, " m"]  # z^H A_j z
    old: Inexact[Array, " m"]  # z^H A_{j-1} z
    new_norm: Real[Array, " m"]  # M
    old_norm: Real[Array, " m"]  # N
    change: Real[Array, " m"]  # ||A_j - A_{j-1}||_F^2


def _components(a: Inexact[Array, "m n"], basis: Inexact[Array, "l n"]) -> Inexact[Array, "m l"]:
    """A Q^H, as the adjoint of Q A^H: a product with a few long vectors on the left is slow."""
    return adjoint(matmul(basis, adjoint(a)))


def _signs(key: PRNGKeyArray, m: int, n: int, dtype: Any) -> Inexact[Array, "m n"]:
    """Rows of random signs that are nearly orthogonal to each other: one draw of them, times rows
    of a Hadamard matrix, (-1)^(the number of ones that the numbers of row and column share).
    """
    i, j = (lax.broadcasted_iota(np.uint32, (m, n), axis) for axis in range(2))
    odd = lax.population_count(i & j) & np.uint32(1)
    signs = RademacherSampler().probes(key, n, 1, dtype).T
    return jnp.where(odd == 1, -signs, signs)


def follow(
    plans: list[StepPlan],
    index: Array,
    sampler: AbstractSampler,
    state: TrackState,
    key: Array,
    operator: lx.AbstractLinearOperator,
    previous: lx.AbstractLinearOperator,
) -> tuple[TrackState, Array, Array, Array]:
    """Take one step.

    The products `P = A_j U` carry the derivative: the value is linear in them, and everything that
    multiplies them is a constant.

    **Arguments:**

    - `plans`: the ways to spend the products.
    - `index`: which of them to follow.
    - `sampler`: the distribution of the probes.
    - `state`: the state after the previous step, without derivatives.
    - `key`: the random key.
    - `operator`: the operator of this step.
    - `previous`: the operator of the previous step.

    **Returns:**

    The state with what this step changes of it, the value (which alone carries a derivative), its
    standard error, and the status.
    """
    block, plan = BlockOperator(operator).linearised(), plan_of(plans, index)
    n, real = block.n, jnp.finfo(block.dtype).dtype
    columns, most, *_ = (max(each) for each in zip(*plans, strict=True))
    spherical, beta = sampler.respheres(None, block.dtype), beta_of(sampler, block.dtype)
    probe_key, noise_key = split(key)
    width = 1 if block.shares_no_work and n * most > APART_LIMIT else most

    def multiply(block, rows):
        """The products with these rows."""
        if width == most:
            return block.mm(rows.T).T
        return lax.map(lambda row: block.mm(row[:, None])[:, 0], rows)

    def with_basis():
        """Q_j = orth(A_{j-1} Q_{j-1}), and A_j Q_j."""
        # Noise of the size of rounding errors completes the basis where the sketch spans fewer than
        # l dimensions: at the first step, and after a zero operator, it spans none.
        sketch = scaled(state.sketch[:columns])
        shift = shift_of(sketch.norm, n, block.eps)
        basis = panel_qr(sketch.numbers + shift * _signs(noise_key, columns, n, block.dtype))[0]
        return basis, multiply(block, basis)

    none = jnp.zeros((columns, n), block.dtype)
    basis, on = _either(plan.basis > 0, with_basis, lambda: (none, none))
    known = lax.stop_gradient(on)

    def products(block, rows, count, counts):
        """Those with the first rows, as many as this plan has: one of these counts. The others are
        zero.
        """
        counts = [1] if width < most else sorted(set(counts))

        def first(count):
            return jnp.pad(multiply(block, rows[:count]), ((0, width - count), (0, 0)))

        branches = [partial(first, count) for count in counts]
        if len(branches) == 1:
            return branches[0]()
        return lax.switch(jnp.searchsorted(jnp.asarray(counts), count), branches)

    def forms(old, i, key):
        """`_Forms` of a block of probes z, of which the first is the i-th; `old` is the previous
        operator, in plans that multiply with it.
        """
        probes, shared = plan.probes, plan.shared
        if width < most:
            probes, shared = (jnp.clip(x - i, 0, 1) for x in (probes, shared))
        z = sampler.probes(key, n, width, block.dtype).T
        if sampler.rotation_invariant:  # scale normal probes to the sphere, for less variance
            z = z * (math.sqrt(n) / jnp.sqrt(row_squares(z)))[:, None]

        def off_basis():
            """W = Q^H z, and g = (I - Q Q^H) z."""
            w = _components(z, basis)
            return w, z - matmul(w, basis)

        w, g = _either(plan.basis > 0, off_basis, lambda: (jnp.zeros((width, columns), z.dtype), z))
        own = [p for p in plans if (p.shared > 0) == (old is not None)]
        image, before = products(block, g, probes, [p.probes for p in own]), jnp.zeros_like(z)
        if old is not None:
            count = [p.shared for p in own]
            before = _either(shared > 0, lambda: products(old, z, shared, count))
        # Numbers are divided by this unit before they are squared, so that no square overflows.
        images = lax.stop_gradient(image), lax.stop_gradient(before)
        unit = scale_of(jnp.stack([jnp.max(jnp.abs(x)) for x in images]))

        def residual():
            """The samples off the subspace, with their variances."""
            dimension = jnp.asarray(float(n) - plan.basis if spherical else float(n), real)
            factor = resphering(dimension, row_squares(g), spherical)
            samples = factor * row_dots(g, image)
            h = lax.stop_gradient(image) / unit
            h = h - matmul(_components(h, basis), basis)
            sizes = jnp.abs(lax.stop_gradient(samples)) / unit
            return samples, jnp.maximum(factor * row_squares(h) - jnp.square(sizes) / dimension, 0)

        def shift():
            """Forms with both operators, and the norms N, M and of the difference."""
            # A_j z = A_j g + (A_j Q) (Q^H z), without further products.
            both = image + _either(plan.basis > 0, lambda: matmul(w, on)), before
            forms = [row_dots(z, x) for x in both]
            parts = [
                (x - z * (form / n)[:, None]) / unit
                for x, form in zip(*lax.stop_gradient((both, forms)), strict=True)
            ]
            return *forms, *map(row_squares, (*parts, parts[0] - parts[1]))

        samples = _either((plan.basis > 0) | (plan.shared == 0), residual)
        return _Forms(jnp.full(width, unit), *samples, *_either(shared > 0, shift))

    def all_forms(old):
        """`_Forms` of all probes."""
        if width == most:
            return forms(old, 0, probe_key)
        # One after the other, and again in reverse mode, so that no block of products is held.
        each = jax.checkpoint(partial(forms, old), prevent_cse=False)

        def one(given):
            i, key = given
            return _either(i < plan.probes, lambda: each(i, key))

        given = jnp.arange(most), split(probe_key, most)
        return jtu.tree_map(jnp.ravel, lax.map(one, given))

    def with_old():
        return all_forms(BlockOperator(previous).linearised())

    samples = _either(plan.shared > 0, with_old, lambda: all_forms(None))
    on_basis = jnp.sum(row_dots(basis, on))
    sizes = [samples.unit, jnp.max(jnp.abs(known), initial=0.0)[None], state.std_errs]
    unit = scale_of(jnp.concatenate(sizes))
    square = jnp.square(samples.unit / unit)
    norms = jnp.stack([samples.new_norm, samples.old_norm, samples.change])
    spread, norms = samples.spread * square, norms * square[None, :]
    halves = _Halves.of(plan.probes, most, real)
    pairs = _Halves.of(plan.shared, most, real)

    spreads, means = halves.means(spread), pairs.means(norms)  # in units of beta
    theirs, (m, nn, d) = spreads[::-1], means[:, ::-1]  # each half takes the norms of the other
    # Without a subspace the first samples are those of the operator itself.
    size = jnp.where(plan.shared > 0, (m + nn) / 2, theirs)
    sizes = unit * jnp.sqrt(jnp.stack([theirs, size]))
    seen = jnp.asarray([plan.basis > 0, (plan.shared > 0) | (plan.basis == 0)])[:, None]
    levels = jnp.where(seen, _smooth(state.levels, sizes), state.levels)
    drift = jnp.where(plan.shared > 0, _smooth(state.drift, divide(d, m + nn)), state.drift)

    a, trust, *shifted = _shift(state, means, unit, pairs, beta)
    afresh = _trust(jnp.square(levels[1] / unit), theirs / plan.probes)
    trust = jnp.where(plan.shifts, trust, afresh).astype(real)
    recycled = (
        jnp.sqrt(beta * spreads / halves.counts),
        jnp.sqrt(beta * halves.total(spreads) / plan.probes),
    )
    errors = [unit * jnp.where(plan.shifts, *each) for each in zip(shifted, recycled, strict=True)]
    std_errs, std_err = (x.astype(real) for x in errors)
    # ||A||_F, on the subspace and off it.
    norm = jnp.hypot(safe_norm(jnp.ravel(known)), jnp.max(sizes))
    std_err = jnp.hypot(std_err, rounding_of(norm, block.eps))

    values = on_basis + halves.means(samples.residual)
    changed = pairs.means(samples.new) + a * (state.values - pairs.means(samples.old))
    value = jnp.where(plan.shifts, pairs.total(changed), halves.total(values))
    values = jnp.where(plan.shifts, changed, values)

    # A step with a smaller budget takes, and renews, the first rows: those of the subspace
    # iteration that converge to the largest eigenvalues.
    renewed = state.sketch.at[:columns].set(known)
    sketch = jnp.where(plan.basis > 0, renewed, state.sketch)
    status = status_of(*lax.stop_gradient(samples), on_basis, value)
    changes = {"values": values, "trust": trust, "std_errs": std_errs, "levels": levels}
    new = dataclasses.replace(state, **changes, drift=drift, sketch=sketch)
    return lax.stop_gradient(new), value, lax.stop_gradient(std_err), status


def _trust(square_norm: Array, variance: Array) -> Array:
    """The weight w; 1 of a value without an error."""
    total = square_norm + variance
    return jnp.where(variance > 0, divide(square_norm, total), jnp.ones_like(total))


def _shift(
    state: TrackState, means: Array, unit: Array, pairs: _Halves, beta: int
) -> tuple[Array, Array, Array, Array]:
    """The factors a of the two halves; and after the step, w for each half, and the errors of each
    half and of the mean, in this unit.
    """
    b = jnp.sum(pairs.counts)
    m, nn, d = means[:, ::-1]  # each half takes the norms of the other
    w = state.trust
    similarity, share = jnp.maximum(1 - state.drift, 0), w + b * (1 - w)
    a = similarity * w / share

    def added(m, nn, d):
        # M + a^2 N - 2 a C, with 2 C = M + N - ||A_j - A_{j-1}||^2, in a form without cancellation.
        return jnp.maximum((1 - a) * (m - a * nn) + a * d, 0)

    trust = _trust(m, nn * a * similarity * (1 - w) / share + added(m, nn, d) / b)
    # A half's own norms are independent of its a, so that their mean is exactly the variance.
    variances = jnp.square(state.std_errs / unit)
    std_errs = jnp.sqrt(a**2 * variances + beta * added(*means) / pairs.counts)
    return a, trust, std_errs, safe_norm(pairs.counts / b * std_errs)

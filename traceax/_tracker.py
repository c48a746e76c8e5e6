"""The trace of an operator that changes from step to step: `Tracker`.

Blocks of vectors are rows. Below, probes z have the norm sqrt(n), k is the budget of a step, and
beta is 2 for real probes and 1 for complex ones (for which `E[z z^T] = 0`, as for independent
phases). For probes on the sphere the part of A z orthogonal to z gives exactly

    Var z^H A z = beta E ||A z - z (z^H A z) / n||^2        (A Hermitian; otherwise at most this).

*Recycled Hutch++.* `Q_j = orth(A_{j-1} Q_{j-1})` continues a subspace iteration without further
products. It depends on the past alone: `tr(Q^H A Q) + mean c g^H A g`, `g = (I - Q Q^H) z`, is
unbiased.

*DeltaShift.* With the same l = k // 2 probes on both operators, and a = 1 - gamma,

    t_j = a t_{j-1} + mean z^H (A_j - a A_{j-1}) z,
    v_j = a^2 v_{j-1} + (beta / l) (M + a^2 N - 2 a C),        a = C / (l v_{j-1} / beta + N),

where `N = ||A_{j-1}||_F^2`, `M = ||A_j||_F^2` and `C = Re <A_j, A_{j-1}>`, each of A less the
multiple of I that adds no variance.

NOTE: the paper's `a` depends on the probes of its own step. It multiplies the error of the past, so
everything that correlates with that error is a bias: the probes and the batch of the step, and the
batches of the past (large curvature has large norms). So each half of the probes has its own t,
with an a from the earlier steps of the other half, in ratios of norms of one step:

    delta = ||A_j - A_{j-1}||_F^2 / (M + N) = 1 - 2 C / (M + N),   w = M / (M + v_j / beta),

delta smoothed over the steps; then, with N = M of the last step, C = (1 - delta) N, and v brought
to the scale of N at this step,

    a = (1 - delta) w / (w + l (1 - w)),
    a^2 v_{j-1} / beta = N a (1 - delta) (1 - w) / (w + l (1 - w)).
"""

import math
from typing import Any, Literal, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, PRNGKeyArray, Real

from ._core.estimate import Estimate, evidence_of, rounding_of, safe_norm, scale_of
from ._core.precision import adjoint, any_promotion, matmul, row_dots, row_squares
from ._core.verdict import RESULTS, verdict
from ._estimators.estimator import check_budget, check_key
from ._estimators.solution import Solution, solution_of
from ._estimators.trace import trace
from ._linalg.factorisations import qr
from ._operators.block_operator import BlockOperator
from ._operators.checks import as_operator
from ._probes.random import split
from ._probes.samplers import AbstractSampler, SphereSampler
from ._sketch.leave_one_out import resphering, scaled, shift_of

_SMALLEST = {"recycled": 2, "deltashift": 4}


class Halves(NamedTuple):
    """What DeltaShift remembers: an entry for each half of the probes."""

    values: Inexact[Array, " 2"]  # t
    std_errs: Real[Array, " 2"]  # sqrt(v)
    trust: Real[Array, " 2"]  # w; 0 where there is no past
    drift: Real[Array, " 2"]  # delta


@final
class TrackState(eqx.Module):
    """What a [`traceax.Tracker`][] remembers between steps: arrays of fixed shapes, for `lax.scan`.

    **Attributes:**

    - `sketch`: with `"recycled"` the sketch $A_{j-1} Q_{j-1}$, as rows; otherwise None.
    - `halves`: with `"deltashift"` the estimate from each half of the probes; otherwise None.
    - `k`: the budget of a step (static).
    """

    sketch: Inexact[Array, "l n"] | None
    halves: Halves | None
    k: int = eqx.field(static=True)


TrackState.__init__.__doc__ = "**Arguments:**" + (TrackState.__doc__ or "").partition("es:**")[2]


@final
class Tracker(eqx.Module):
    """Estimates the traces of $A_1, A_2, ...$, of an operator that changes slowly, such as the
    Hessian of a network in training. Each step uses the steps before it.

    - `"recycled"`: Hutch++ with the subspace of the last step, improved by the products of that
        step. Best where few eigenvalues stand out.
    - `"deltashift"`: the last estimate plus an estimate of the difference, for which half of the
        budget is spent on the previous operator. Best where the operator changes little. With a new
        batch at every step, give the previous parameters on the new batch.

    The value of a step, and its derivative with respect to the operator of that step, are unbiased
    for operators that do not depend on earlier keys. The standard error comes from the products of
    this step; with sphere probes it is too large for operators that are not Hermitian.

    **Cost:** `k` matvecs a step, those with the previous operator included; the state is `n x k/2`
    numbers for the recycled subspace, and eight for DeltaShift.

    **Source:** P. Dharangutte, C. Musco, 2021, arXiv:2110.13752; R. A. Meyer, C. Musco, C. Musco,
    D. P. Woodruff, 2021, arXiv:2010.09649.

    **Attributes:**

    - `method`: `"recycled"` or `"deltashift"`. Their smallest budgets are 2 and 4.
    - `sampler`: the distribution of the probes. By default [`traceax.SphereSampler`][]; normal
        probes are scaled to the sphere.
    """

    method: Literal["recycled", "deltashift"] = eqx.field(default="recycled", static=True)
    sampler: AbstractSampler = SphereSampler()

    def __check_init__(self):
        if self.method not in _SMALLEST:
            raise ValueError(
                f"The method must be one of {list(_SMALLEST)}, got {self.method!r}. Leave it out "
                'for "recycled".'
            )

    def init(self, operator: lx.AbstractLinearOperator, k: int) -> TrackState:
        """The state before the first step, a [`traceax.TrackState`][]. This takes no products.

        **Arguments:**

        - `operator`: an operator of the size and dtype of those to come.
        - `k`: the budget of matvecs of a step, a static Python int.
        """
        block = BlockOperator(as_operator(operator))
        self.sampler.check_dtype(block.dtype)
        k = check_budget(k, _SMALLEST[self.method], block.n, f'Tracker("{self.method}")')
        if self.method == "recycled":
            return TrackState(jnp.zeros((k // 2, block.n), block.dtype), None, k)
        zeros = jnp.zeros(2, jnp.finfo(block.dtype).dtype)
        return TrackState(None, Halves(zeros.astype(block.dtype), zeros, zeros, zeros), k)

    def update(
        self,
        key: PRNGKeyArray,
        operator: lx.AbstractLinearOperator,
        state: TrackState,
        previous: lx.AbstractLinearOperator | None = None,
    ) -> tuple[TrackState, Solution]:
        """Estimate the trace of the next operator.

        **Arguments:**

        - `key`: a random key, a new one for each step.
        - `operator`: the next operator.
        - `state`: from `init` or the last `update`.
        - `previous`: for `"deltashift"` the operator of the last step, held constant. Without it,
            as at the first step, the estimate begins anew with all products on `operator`.

        **Returns:** the next state, and a [`traceax.Solution`][]. If a product holds NaN or inf,
        the state stays as it was.
        """
        operator = as_operator(operator)
        has_halves = self.method == "deltashift"
        if not isinstance(state, TrackState) or (state.halves is not None) != has_halves:
            raise TypeError(
                f"The state of this step must be one of the method {self.method!r}, got "
                f"{state!r}. Make one with `tracker.init(operator, k)`."
            )
        if state.k >= operator.in_size():
            return state, trace(key, operator, operator.in_size())
        previous = None if previous is None else as_operator(previous)
        return _update(self.sampler, check_key(key), operator, state, previous)


Tracker.__init__.__doc__ = "**Arguments:**" + (Tracker.__doc__ or "").partition("es:**")[2]


@eqx.filter_jit
def _update(
    sampler: AbstractSampler, key: Array, operator: Any, state: TrackState, previous: Any
) -> tuple[TrackState, Solution]:
    """See `Tracker.update`."""
    block = BlockOperator(operator).linearised()
    state = lax.stop_gradient(state)
    with any_promotion():  # the algebra mixes real and complex numbers
        if state.sketch is not None:
            estimate, new = _recycled(key, block, sampler, state.sketch, state.k)
        else:
            old = None if previous is None else BlockOperator(previous).linearised()
            estimate, new = _deltashift(key, block, old, sampler, state.halves, state.k)
        failed = estimate.result != RESULTS.successful

        def chosen(new, old):
            return jnp.where(failed, old, new).astype(old.dtype)

        next_state = jtu.tree_map(chosen, lax.stop_gradient(new), state)
    return next_state, solution_of(estimate)


def _estimate(
    block: BlockOperator, value: Array, std_err: Array, norm: Array, num_matvecs: int, dof: int
) -> Estimate:
    """The estimate of a step; its value is linear in the products, and all else is constant."""
    std_err = lax.stop_gradient(jnp.hypot(std_err, rounding_of(norm, block.eps)))
    return verdict(Estimate(value, std_err, num_matvecs, dof, evidence_of(norm)))


def _recycled(
    key: Array, block: BlockOperator, sampler: AbstractSampler, sketch: Array, k: int
) -> tuple[Estimate, TrackState]:
    """Hutch++ with the subspace of the last step."""
    m, n = sketch.shape
    count = k - m
    spherical = sampler.respheres(None, block.dtype)
    dimension = float(n - m if spherical else n)
    probe_key, noise_key = split(key)
    # Noise of the size of rounding completes the basis where the sketch spans fewer than m
    # dimensions: at the first step, and after a zero operator, it spans none.
    last = scaled(sketch)
    noise = _probes(noise_key, SphereSampler(), block, m)
    q = qr((last.numbers + shift_of(last.norm, n, block.eps) * noise).T)[0].T
    image = block.mm(q.T).T
    z = _probes(probe_key, sampler, block, count)
    g = z - matmul(matmul(z, adjoint(q)), q)
    residual = block.mm(g.T).T
    c = resphering(dimension, row_squares(g), spherical)
    samples = c * row_dots(g, residual)
    value = jnp.sum(row_dots(q, image)) + jnp.mean(samples)

    known = lax.stop_gradient(image)
    unit = _unit(known, residual)
    h = lax.stop_gradient(residual) / unit
    h = h - matmul(matmul(h, adjoint(q)), q)
    sizes = jnp.abs(lax.stop_gradient(samples)) / unit
    variance = jnp.mean(jnp.maximum(c * row_squares(h) - sizes**2 / dimension, 0))
    rest = unit * jnp.sqrt(variance)  # ||A||_F off the subspace
    std_err = rest * math.sqrt(_beta(sampler, block) / count)
    norm = jnp.hypot(safe_norm(jnp.ravel(known)), rest)
    return _estimate(block, value, std_err, norm, k, count), TrackState(known, None, k)


def _deltashift(
    key: Array, block: BlockOperator, old: Any, sampler: AbstractSampler, past: Any, k: int
) -> tuple[Estimate, TrackState]:
    """A step of DeltaShift, for each half of the probes; see the top of this file. Without the
    previous operator `old` it is Hutchinson's estimator: nothing is known of the `past`, so that
    a = 0.
    """
    count = k if old is None else k // 2  # l
    counts = jnp.asarray([count // 2, count - count // 2])  # of each half
    beta = _beta(sampler, block)
    z = _probes(key, sampler, block, count)
    image = block.mm(z.T).T
    if old is None:
        previous, past = image, jtu.tree_map(jnp.zeros_like, past)
    else:
        previous = old.mm(z.T).T
    previous = lax.stop_gradient(previous)

    similarity = jnp.maximum(1 - past.drift, 0)  # 1 - delta
    share = past.trust + count * (1 - past.trust)
    a = similarity * past.trust / share
    values = _means(row_dots(z, image)) + a * (past.values - _means(row_dots(z, previous)))

    unit = _unit(image, previous, past.std_errs)
    images = lax.stop_gradient(image), previous
    # A z - z (z^H A z) / n
    parts = [(x - z * (row_dots(z, x) / block.n)[:, None]) / unit for x in images]
    parts.append(parts[0] - parts[1])
    norms = jnp.stack([_means(row_squares(x)) for x in parts])  # M, N, ||A_j - A_{j-1}||_F^2

    def added(m, n, d):
        # M + a^2 N - 2 a C, with 2 C = M + N - ||A_j - A_{j-1}||^2, in a form without cancellation.
        return jnp.maximum((1 - a) * (m - a * n) + a * d, 0)

    # A half's own norms are independent of its a, so that their mean is exactly the variance.
    variances = a**2 * jnp.square(past.std_errs / unit) + beta * added(*norms) / counts
    std_errs = unit * jnp.sqrt(variances)
    m, n, d = norms[:, ::-1]  # each half takes the norms of the other
    past_variance = n * a * similarity * (1 - past.trust) / share  # a^2 v_{j-1} / beta
    variance = past_variance + added(m, n, d) / count
    trust = jnp.where(variance == 0, 1, _ratio(m, m + variance))  # w; 1 without an error
    drift = _ratio(d, m + n)  # delta
    # The geometric mean forgets a jump of the operator within a few steps.
    smooth = jnp.sqrt(past.drift) * jnp.sqrt(drift)
    drift = jnp.where((past.drift > 0) & (drift > 0), smooth, drift)
    value = jnp.sum(values * counts) / count
    std_err = safe_norm(std_errs * counts / count)
    norm = unit * jnp.sqrt(jnp.max((m + n) / 2))
    spent = count if old is None else 2 * count
    estimate = _estimate(block, value, std_err, norm, spent, count)
    return estimate, TrackState(None, Halves(values, std_errs, trust, drift), k)


def _probes(key: Array, sampler: AbstractSampler, block: BlockOperator, count: int) -> Array:
    """Probes as rows; normal ones are scaled to the sphere, for less variance."""
    z = sampler.probes(key, block.n, count, block.dtype).T
    norms = jnp.sqrt(row_squares(z))[:, None] if sampler.rotation_invariant else math.sqrt(block.n)
    return z * (math.sqrt(block.n) / norms)


def _unit(*arrays: Array) -> Array:
    """The size of these arrays: divided by it, their squares do not overflow."""
    return scale_of(jnp.stack([jnp.max(jnp.abs(lax.stop_gradient(x))) for x in arrays]))


def _beta(sampler: AbstractSampler, block: BlockOperator) -> int:
    """The factor beta of the variance."""
    single = sampler.respheres(None, block.dtype) or sampler.independent_phases
    return 1 if jnp.issubdtype(block.dtype, jnp.complexfloating) and single else 2


def _means(samples: Inexact[Array, " m"]) -> Inexact[Array, " 2"]:
    """The mean of each half of the samples."""
    middle = samples.shape[0] // 2
    return jnp.stack([jnp.mean(samples[:middle]), jnp.mean(samples[middle:])])


def _ratio(a: Array, b: Array) -> Array:
    """`a / b` for numbers that are not negative, or 0 where b is 0."""
    return a / jnp.where(b == 0, 1, b)

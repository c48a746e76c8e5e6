"""Traces of an operator that changes slowly, step by step."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, PRNGKeyArray

from .._core.devices import along_auto_axes
from .._core.estimate import NONFINITE, scale_of
from .._core.precision import any_promotion
from .._core.primitive import bind, trace_p
from .._estimators.estimator import check_budget, check_key
from .._estimators.solution import RESULTS, Solution
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._probes.samplers import AbstractSampler, SphereSampler
from .._trace.exact import ExactTraceEstimator
from .kept import Kept, all_but_data, kept_of, with_arrays
from .step import (
    DELTASHIFT,
    RECYCLED,
    StepPlan,
    TrackState,
    beta_of,
    divide,
    follow,
    plan_of,
)

_SMALLEST = {"auto": 8, "recycled": 2, "deltashift": 4}
# The number of steps with the recycled subspace before the first choice; then how often a step
# looks at the drift while it recycles, and at the subspace while DeltaShift runs.
_WARM_UP, _LOOK_AT_DRIFT, _LOOK_AT_SUBSPACE = 4, 4, 8
# Ratios of variances at which "auto" changes to DeltaShift, and back: only for a clear gain.
_ENTER, _LEAVE = 0.6, 1.1


@final
class Tracker(eqx.Module):
    r"""Estimates tr(A_1), tr(A_2), ...: the traces of an operator that changes slowly, such as the
    Hessian of a network in training. Each step makes use of the steps before it.

    !!! Example

        ```python
        tracker = tr.Tracker()
        state = tracker.init(operator, k=20)
        for key, operator in sequence:  # or in `jax.lax.scan`, with the state in the carry
            state, solution = tracker.update(state, key, operator, k=20)
        ```

    - `"recycled"`: Hutch++ with the subspace of the last step, improved by the products that the
        trace of that step needed anyway. Half of the budget goes to the subspace, half to residual
        probes. Best where few eigenvalues stand out, even if their eigenvectors turn fast.
    - `"deltashift"`: the last estimate plus an estimate of the difference, for which the same
        probes are multiplied with the new and with the previous operator. The more the operator
        drifted, the faster older estimates are forgotten. Best where the operator changes little
        from step to step.
    - `"auto"`: the better of the two, as judged from the residual and the drift that the steps
        show. It starts with the recycled subspace. Every fourth step with the recycled subspace,
        and every eighth with DeltaShift, spends a part of its budget on the other method.

    The value of a step, and its derivative with respect to the operator of that step, are unbiased
    for operators that do not depend on earlier keys (with `"auto"`, given the methods chosen). In
    the derivative weights are held fixed, and the past is a constant.

    DeltaShift multiplies with the previous operator again, of which the state holds the arrays that
    `keep` names. All else (functions and the numbers written in them) is taken from the new one,
    and what it changes is not seen, but added up in the value. Of operators made by
    [`traceax.curvature.of`][] the state holds the parameters, and the previous parameters meet the
    new batch: a last batch of another size is no new state, and the noise of the batches does not
    drown the drift. The value is then an average over the batches of recent steps, for the mean
    over batches that are drawn independently, and the standard error is that of the probes, with
    these batches. How fast older estimates are forgotten depends on the batches before this one,
    and on them by ratios of norms alone, lest large ones count more or less than others: no bias
    was seen over 10,000 keys, with batches of 50 and of 10 examples. Scalar arrays beside
    the batch are held, too; other arrays that change slowly belong into the parameters, where `wrt`
    may leave them out. Of all other operators the state holds all arrays by default.

    As a step forgets by what the steps before it have seen, it learns of a jump one step later. An
    operator that shrinks to a small part of itself at once has one step with the error of the
    operator before, and the standard error says so.

    The standard error comes from the norms of the products of this step, so that a jump of the
    operator shows in it. With sphere probes it is right for Hermitian operators (measured: the true
    error is 0.95 to 1.1 times the reported one with `k = 8`), and too large for others.

    The budget `k` may change from step to step, up to the one that the state was made for.

    Cost: at most `k` matvecs a step, including those with the previous operator (under `vmap` over
    states, `"auto"` makes the products of all its alternatives); one QR factorisation of `n x k/2`
    numbers for the recycled subspace. The state holds `n x k/2` numbers for `"recycled"`, a copy of
    what is kept of the operator for `"deltashift"`, and both for `"auto"`.

    ??? cite "References"

        P. Dharangutte, C. Musco, *Dynamic trace estimation*, 2021, arXiv:2110.13752. R. A. Meyer,
        C. Musco, C. Musco, D. P. Woodruff, *Hutch++: optimal stochastic trace estimation*, 2021,
        arXiv:2010.09649.
    """

    method: Literal["auto", "recycled", "deltashift"] = eqx.field(default="auto", static=True)
    sampler: AbstractSampler = SphereSampler()
    keep: Callable[[Any], Any] = eqx.field(default=all_but_data, static=True)

    def __check_init__(self):
        if self.method not in _SMALLEST:
            raise ValueError(f"method must be one of {list(_SMALLEST)}, got {self.method!r}.")
        if not isinstance(self.sampler, AbstractSampler):
            raise TypeError(
                "The sampler must be an instance of an AbstractSampler, such as "
                f"`traceax.SphereSampler()`, got {self.sampler!r}."
            )
        if not callable(self.keep):
            raise TypeError(
                "keep must be a function that returns parts of an operator, such as "
                f"`lambda operator: operator.params`, got {self.keep!r}."
            )

    def _checked(self, operator, k: int) -> tuple[lx.AbstractLinearOperator, int]:
        operator = as_operator(operator)
        self.sampler.check_dtype(BlockOperator(operator).dtype)
        name = f'Tracker("{self.method}")'
        return operator, check_budget(k, _SMALLEST[self.method], operator.in_size(), name)

    def init(self, operator: lx.AbstractLinearOperator, k: int) -> TrackState:
        """The state before the first step, all zero. This takes no products.

        **Arguments:**

        - `operator`: an operator of the same structure as those to come. Its numbers do not matter.
        - `k`: the largest budget of matvecs of a step, a static Python int.

        **Returns:**

        A [`traceax.TrackState`][].

        **Raises:**

        - `TypeError`, `ValueError`: as [`traceax.trace`][].
        """
        operator, k = self._checked(operator, k)
        return self._empty(operator, k)

    def _kept(self, operator) -> Kept:
        return Kept((), ()) if self.method == "recycled" else kept_of(operator, self.keep)

    def _empty(self, operator, k: int) -> TrackState:
        block = BlockOperator(operator)
        real = jnp.finfo(block.dtype).dtype
        columns = 0 if self.method == "deltashift" else k // 2
        kept = self._kept(operator)
        return TrackState(
            step=jnp.zeros((), jnp.int32),
            method=jnp.full((), int(self.method == "deltashift"), jnp.int32),
            sketch=jnp.zeros((columns, block.n), block.dtype),
            previous=tuple(jnp.zeros_like(x) for x in kept.arrays),
            values=jnp.zeros(2, block.dtype),
            trust=jnp.zeros(2, real),
            std_errs=jnp.zeros(2, real),
            levels=jnp.zeros((2, 2), real),
            drift=jnp.zeros(2, real),
            k=k,
            numbers=kept.numbers,
        )

    def update(
        self, state: TrackState, key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int
    ) -> tuple[TrackState, Solution]:
        """Estimate the trace of the next operator.

        **Arguments:**

        - `state`: from `init` or the previous `update`.
        - `key`: a random key, a new one for each step.
        - `operator`: the next operator. What the state keeps of it has the same structure.
        - `k`: the budget of matvecs, a static Python int, at most that given to `init`. It includes
            products with the previous operator, and may change from step to step.

        **Returns:**

        The next state, and a [`traceax.Solution`][] whose `stats["method"]` says which method gave
        the value: 0 for the recycled subspace, 1 for DeltaShift. If a product holds NaN or inf,
        the state stays as it was.

        **Raises:**

        - `TypeError`, `ValueError`: as [`traceax.trace`][]; and if the state was made for an
            operator of another structure, for a smaller `k`, or for another method.
        """
        key = check_key(key)
        operator, k = self._checked(operator, k)
        _check_state(state, k, lambda k: eqx.filter_eval_shape(self._empty, operator, k))
        return _advance(self, state, key, operator, k)

    def _plans(self, k: int) -> list[StepPlan]:
        half = k // 2
        recycled = StepPlan(half, k - half, 0, RECYCLED)
        delta = StepPlan(0, half, half, DELTASHIFT)
        if self.method == "recycled":
            return [recycled]
        if self.method == "deltashift":
            return [StepPlan(0, k, 0, DELTASHIFT), delta]
        quarter = (k - half) // 2
        at_drift = StepPlan(half, k - half - 1, 1, RECYCLED)
        at_subspace = StepPlan(half, quarter, quarter, DELTASHIFT)
        return [recycled, at_drift, delta, at_subspace]

    def _select(self, state: TrackState) -> Array:
        """Which of the plans this step follows. It depends only on the past."""
        if self.method == "recycled":
            return jnp.zeros((), jnp.int32)
        later = state.step > 0
        if self.method == "deltashift":
            return later.astype(jnp.int32)
        warming_up = later & (state.step < _WARM_UP)
        drift = warming_up | (later & (state.step % _LOOK_AT_DRIFT == 0))
        look = jnp.where(state.method == DELTASHIFT, state.step % _LOOK_AT_SUBSPACE == 0, drift)
        return 2 * state.method + look.astype(jnp.int32)

    def _choose(self, state: TrackState, k: int, std_err: Array, beta: int) -> Array:
        """The method of the next step, from the state after this one."""
        if self.method != "auto":
            return state.method
        half = k // 2
        unit = scale_of(jnp.append(state.levels, std_err))
        residual, size = jnp.mean(jnp.square(state.levels / unit), axis=1)
        recycled = residual * (half / (k - half))
        running = state.method == DELTASHIFT
        s = jnp.where(running, half / beta * jnp.square(std_err / unit), recycled)
        # With M = N and variances in units of beta / l, one step of DeltaShift turns a variance s
        # into
        #     phi(s) = N - C^2 / (s + N) = (N s + N^2 - C^2) / (s + N),
        # whose fixed point is sqrt(N^2 - C^2). Enter DeltaShift if that point is low enough; leave
        # it if phi(s) of the next step is too high.
        gap = jnp.minimum(jnp.mean(state.drift), 1) * size  # N - C
        square = gap * (2 * size - gap)  # N^2 - C^2
        stays = divide(size * s + square, s + size) < _LEAVE * recycled
        chosen = jnp.where(running, stays, jnp.sqrt(square) < _ENTER * recycled)
        chosen = chosen & (state.step + 1 >= _WARM_UP)
        return jnp.where(chosen, DELTASHIFT, RECYCLED).astype(jnp.int32)


Tracker.__init__.__doc__ = """**Arguments:**

- `method`: `"auto"`, `"recycled"` or `"deltashift"`. Their smallest budgets are 8, 2 and 4.
- `sampler`: the distribution of the probes. By default [`traceax.SphereSampler`][]; normal
    probes are scaled to the sphere.
- `keep`: called with an operator; returns the parts of it (a PyTree of them, as `where` of
    `equinox.tree_at`) whose arrays the state holds for DeltaShift, such as `lambda operator:
    operator.params`. By default the parameters and scalars of operators made by
    `traceax.curvature.of`, and all of any other operator.

**Raises:**

- `ValueError`: for an unknown method.
- `TypeError`: if `sampler` is not a sampler, or `keep` is not a function; and at the first step, if
    `keep` returns anything else than parts of the operator.
"""


def _check_state(state: Any, k: int, empty: Callable[[int], TrackState]) -> None:
    """Raise unless the state has the structure of `empty(k)` for its own k, which suffices."""
    if not isinstance(state, TrackState):
        raise TypeError(
            f"The state must be a traceax.TrackState, got {type(state).__name__}: make one with "
            "`tracker.init(operator, k)`."
        )
    if state.k < k:
        raise ValueError(
            f"The state was made for k={state.k}, but this step has k={k}: give the largest budget "
            "of a step to `tracker.init(operator, k)`. Smaller ones need no new state."
        )
    ours, theirs = _parts_of(state), _parts_of(empty(state.k))
    different = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    if different:
        name, (here, there) = different[0], (_shown(x.get(different[0])) for x in (ours, theirs))
        raise ValueError(
            f"The state does not fit this step: its `{name}` is {here}, and that of this step is "
            f"{there}. Neither the method nor the "
            "operator's structure (shapes, dtypes, Python numbers) may change: make a new state "
            "with `tracker.init(operator, k)`, and an array of a number that changes. Data, such "
            "as a last batch, need not be kept: see `keep` of traceax.Tracker, or "
            "`traceax.curvature.of`. A stack of states is updated under `equinox.filter_vmap`."
        )


def _parts_of(state: TrackState) -> dict[str, Any]:
    """The dtypes and shapes of the arrays of a state, and its Python numbers, as text. (Every step
    asks for them.)
    """
    return {
        f"{field.name}[{i}]": (x.dtype, x.shape) if hasattr(x, "dtype") else repr(x)
        for field in dataclasses.fields(state)
        for i, x in enumerate(jtu.tree_leaves(getattr(state, field.name)))
    }


def _shown(part: Any) -> str:
    return f"{part[0]}{list(part[1])}" if isinstance(part, tuple) else part or "missing"


@eqx.filter_jit
@along_auto_axes
def _advance(
    tracker: Tracker, state: TrackState, key: Array, operator: lx.AbstractLinearOperator, k: int
) -> tuple[TrackState, Solution]:
    state = lax.stop_gradient(state)
    block = BlockOperator(operator)
    beta = beta_of(tracker.sampler, block.dtype)
    # The algebra mixes real and complex numbers, whatever promotion the user allows.
    with any_promotion():
        if k >= block.n:
            estimate = bind(trace_p, key, operator, k, ExactTraceEstimator())
            value, status, zeros = estimate.value, estimate.status, jnp.zeros_like(state.std_errs)
            values, std_err = lax.stop_gradient(jnp.stack([value] * 2)), zeros[0]
            new = dataclasses.replace(state, values=values, trust=zeros + 1, std_errs=zeros)
            spent, dof, method = estimate.num_matvecs, estimate.dof, state.method
        else:
            plans, index = tracker._plans(k), tracker._select(state)
            plan = plan_of(plans, index)
            previous = operator
            if tracker.method != "recycled":
                previous = with_arrays(operator, tracker.keep, state.previous)
            given = plans, index, tracker.sampler, state, key, operator, previous
            new, value, std_err, status = follow(*given)
            spent, dof, method = (
                jnp.asarray(x, jnp.int32) for x in (plan.cost, plan.dof, plan.method)
            )

        failed = status == NONFINITE
        value = jnp.where(failed, jnp.nan, value).astype(block.dtype)
        next_method = tracker._choose(new, k, std_err, beta)
        arrays = lax.stop_gradient(tracker._kept(operator).arrays)
        changes = {"step": state.step + 1, "method": next_method, "previous": arrays}
        std_err = jnp.where(failed, jnp.nan, std_err).astype(std_err.dtype)

        def keep(new, old):
            return jnp.where(failed, old, new).astype(old.dtype)

        state = jtu.tree_map(keep, dataclasses.replace(new, **changes), state)
    successful: Any = RESULTS.successful
    result = RESULTS.where(failed, RESULTS.nonfinite_operator, successful)
    stats = {"std.err": std_err, "dof": dof, "method": method}
    return state, Solution(value, std_err, spent, stats, result)

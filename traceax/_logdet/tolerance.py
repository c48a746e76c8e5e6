r"""Log-determinants that spend what a tolerance needs.

There is one loop (`jax.lax.while_loop`). In a round the sketch grows to twice its rank, if the
state asks for it (see `growing_sketch`); a few more probes take Lanczos' recurrence (see
`budget_policy`); and the rule decides how to go on, from c standard errors and the quadrature error
on one side, and the tolerance atol + rtol |value| on the other:

- done, if the sum of the errors is within the tolerance. If r probes were not enough, the rule
  looks again at 2 r, and not before: every look is a chance to stop on an error bar that happens to
  be too small.
- a larger rank, if what the approximation leaves out still falls with the rank, and either more
  probes would cost more or the quadrature error is too large. The probes so far belong to another
  preconditioner, and are forgotten.
- longer recurrences (8, 24, 72, ... steps), if the quadrature error is too large, and the rank
  cannot help.
- otherwise more probes.
- the exact value, as the last resort, if the budget allows n products. It takes n new ones, so that
  all others may be no more than n / 4.

Factors have the size of the largest rank; columns that are not there yet are 0. The derivative
comes from the last few probes, which are held fixed, as is all that was learnt (see `weights`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, Real

from .._core.control_flow import any_lane, keep
from .._core.estimate import (
    NOT_CONVERGED,
    SUCCESSFUL,
    Estimate,
    if_wanted,
    status_of,
    weights_wanted,
)
from .._core.progress import report
from .._estimators.arguments import budgets_for
from .._estimators.estimator import AbstractEstimator
from .._functions.quadrature_error import with_quadrature_error
from .._operators.block_operator import BlockOperator
from .._probes.random import numbered, split
from .._sketch.low_rank import BuiltPreconditioner
from .budget_policy import Plan, PreconditionedQuadrature, preconditioned_quadrature
from .estimator import estimate_from, exact_logdet
from .growing_sketch import GrowingSketch
from .preconditioners import check_definite
from .weights import ExactLogdetWeights, LogdetWeights, weights_of

#: The number of standard errors that must be within the tolerance. (In 99 % of runs the error then
#: is, too: five kernels, three tolerances, 10 keys. Standard errors are rather too large than too
#: small.)
FACTOR = 2.0

#: The first rank, and the first number of steps.
FIRST_RANK, FIRST_STEPS = 16, 8

#: The most probes of one round (the first look at a preconditioner takes one).
TOGETHER = 4

#: The smallest budget that has room for a run.
LEAST = 64


def ranks(most: int) -> tuple[int, ...]:
    """The ranks: each is about twice the one before, the last is three quarters of the budget."""
    last = 3 * most // 4
    found = [FIRST_RANK]
    while 3 * found[-1] <= last:
        found.append(2 * found[-1])
    return (*found, last)


def shapes(most: int, n: int) -> tuple[tuple[int, int], ...]:
    """Pairs of numbers of probes and steps: one for the first look, then one for each depth, with
    as many probes as a third of the budget allows.
    """
    found, steps = [(1, FIRST_STEPS), (TOGETHER, FIRST_STEPS)], 3 * FIRST_STEPS
    while steps <= min(most // 2, n):
        found.append((min(TOGETHER, max(1, most // 3 // steps)), steps))
        steps *= 3
    return tuple(found)


class _Sums(NamedTuple):
    """Sums over the probes with one preconditioner and one depth."""

    probes: Int[Array, ""]
    value: Real[Array, ""]
    error: Real[Array, ""]
    variance: Real[Array, ""]
    doubt: Real[Array, ""]  # half of the variance of `variance`

    @staticmethod
    def none(real: Any) -> "_Sums":
        zero = jnp.zeros((), real)
        return _Sums(jnp.zeros((), jnp.int32), zero, zero, zero, zero)

    def plus(self, probes: int, estimate: Estimate) -> "_Sums":
        (value, error), (std_err, _) = estimate.value, estimate.std_err
        variance = (probes * std_err) ** 2
        return _Sums(
            self.probes + probes,
            self.value + probes * value,
            self.error + probes * error,
            self.variance + variance,
            self.doubt + variance**2 / jnp.where(estimate.dof > 0, estimate.dof, 1),
        )

    def means(self) -> tuple[Array, Array, Array]:
        """The value, the quadrature error, and the standard error."""
        count = jnp.maximum(self.probes, 1)
        return self.value / count, self.error / count, jnp.sqrt(self.variance) / count

    @property
    def dof(self) -> Array:
        """The degrees of freedom of the variance, by Satterthwaite's rule."""
        known = self.doubt > 0
        return jnp.where(known, self.variance**2 / jnp.where(known, self.doubt, 1), self.probes)


class LogdetAim(NamedTuple):
    """The aim of a run: the log-determinant itself. (Log densities have another aim, which solves a
    system during the run: see `gaussian_tolerance`.)
    """

    rtol: Real[Array, ""]
    atol: Real[Array, ""]

    @property
    def start(self) -> Any:
        """What is known besides the log-determinant at the start."""
        return ()

    def advanced(self, known: Any, run: PreconditionedQuadrature, estimate: Estimate) -> Any:
        """What is known after another round of probes, and its estimate of the log-determinant."""
        return known

    def tolerance(self, value: Real[Array, ""], known: Any) -> Real[Array, ""]:
        """The error that a log-determinant of this value may have."""
        return self.rtol * jnp.abs(value) + self.atol


class State(NamedTuple):
    y: Inexact[Array, "n rank"]  # the products so far
    built: BuiltPreconditioner
    left_out: Real[Array, ""]
    decays: Bool[Array, ""]  # whether twice the rank is worthwhile
    level: Int[Array, ""]
    depth: Int[Array, ""]
    grows: Bool[Array, ""]  # whether the rank is to grow next
    sums: _Sums
    target: Int[Array, ""]  # the number of probes at the next look
    spent: Int[Array, ""]
    rounds: Int[Array, ""]
    status: Int[Array, ""]
    weights: LogdetWeights
    known: Any  # what the aim knows besides
    done: Bool[Array, ""]


def _where(condition: Array, new: Any, old: Any) -> Any:
    return jtu.tree_map(lambda a, b: jnp.where(condition, a, b), new, old)


class Loop:
    """One run. (It is not a PyTree, as it exists only during a trace.)"""

    def __init__(
        self, aim: Any, key, operator, most: int, falls_back_to_exact: bool, progress: bool
    ):
        """Make the first products.

        **Arguments:**

        - `aim`: the aim, a `LogdetAim` or an object with its methods.
        - `key`: the random key.
        - `operator`: the operator.
        - `most`: the largest number of products.
        - `falls_back_to_exact`: whether the exact value may replace the result.
        - `progress`: whether to show the progress.
        """
        sketch_key, self.probe_key = split(key)
        self.aim, self.most, self.progress = aim, most, progress
        self.block = BlockOperator(operator).linearised()
        self.ranks, self.shapes = ranks(most), shapes(most, self.block.n)
        columns = self.ranks[-1] + max(p * (q + 1) for p, q in self.shapes)
        self.columns = max(columns, self.block.n) if falls_back_to_exact else columns
        first, last = self.ranks[0], self.ranks[-1]
        self.sketch = GrowingSketch(sketch_key, operator, self.block, first, last)
        self.real = jnp.finfo(self.block.dtype).dtype

    def _built(self, low_rank) -> BuiltPreconditioner:
        """The preconditioner, padded to the largest rank."""
        built = self.sketch.built(low_rank)
        return dataclasses.replace(built, factors=built.factors.padded(self.ranks[-1]))

    def start(self) -> State:
        y, zero = self.sketch.first, jnp.zeros((), jnp.int32)
        low_rank = self.sketch.low_rank(y)
        built = self._built(low_rank)
        no_weights = LogdetWeights(
            jnp.zeros((self.block.n, self.columns), y.dtype),
            jnp.zeros((self.columns, self.columns), y.dtype),
            built.factors,
        )
        return State(
            y=jnp.pad(y, ((0, 0), (0, self.ranks[-1] - y.shape[1]))),
            built=built,
            left_out=low_rank.left_out,
            decays=_decay(low_rank, low_rank.left_out_by_half),
            level=zero,
            depth=zero,
            grows=jnp.array(False),
            sums=_Sums.none(self.real),
            target=zero,
            spent=zero + self.ranks[0],
            rounds=zero,
            status=jnp.maximum(built.status, jnp.asarray(status_of(y), jnp.int32)),
            weights=no_weights,
            known=self.aim.start,
            done=jnp.array(False),
        )

    def _grown(self, state: State) -> State:
        """The state with the next rank, if that is wanted."""
        for j in range(1, len(self.ranks)):
            wanted = state.grows & (state.level == j - 1) & ~state.done
            before, rank = self.ranks[j - 1 : j + 1]

            def extend(state=state, j=j, before=before, rank=rank):
                new = self.sketch.products(before, rank)
                y = jnp.concatenate([state.y[:, :before], new], axis=1)
                low_rank = self.sketch.low_rank(y)
                built = self._built(low_rank)
                seen = jnp.maximum(built.status, jnp.asarray(status_of(new), jnp.int32))
                return state._replace(
                    y=state.y.at[:, before:rank].set(new),
                    built=built,
                    left_out=low_rank.left_out,
                    decays=_decay(low_rank, state.left_out),
                    level=jnp.full_like(state.level, j),
                    grows=jnp.zeros_like(state.grows),
                    spent=state.spent + (rank - before),
                    status=jnp.maximum(state.status, seen),
                )

            state = if_any(wanted, extend, state)
        return state

    def _probed(self, state: State) -> State:
        """The state with a few more probes."""
        key = numbered(self.probe_key, state.rounds)
        depth, first = state.depth, (state.depth == 0) & (state.sums.probes == 0)
        for j, (p, q) in enumerate(self.shapes):
            wanted = first if j == 0 else ~first & (depth == j - 1)

            def probe(state=state, p=p, q=q):
                plan = Plan(self.ranks[-1], p, q)
                done = preconditioned_quadrature(key, self.block, state.built, plan, state.status)
                estimate = estimate_from(done)
                return state._replace(
                    sums=state.sums.plus(p, estimate),
                    spent=state.spent + p * q,
                    rounds=state.rounds + 1,
                    status=jnp.asarray(estimate.status, jnp.int32),
                    weights=weights_of(done._replace(columns=self.columns)),
                    known=self.aim.advanced(state.known, done, estimate),
                )

            state = if_any(wanted & ~state.done, probe, state)
        return state

    def _decided(self, state: State) -> State:
        """The state with the decision of the rule (see above)."""
        sums = state.sums
        value, error, std_err = sums.means()
        tolerance = self.aim.tolerance(value, state.known).astype(self.real)
        met = FACTOR * std_err + error <= tolerance
        room = jnp.maximum(tolerance - error, 0)
        needed = jnp.square(FACTOR * std_err / jnp.where(room > 0, room, jnp.nan))
        needed = jnp.where(jnp.isnan(needed), jnp.inf, needed)

        # For the last rank or depth, the whole budget stands for the cost of the next.
        costs = [b - a for a, b in zip(self.ranks, self.ranks[1:], strict=False)]
        extendable = jnp.array([*costs, self.most])[state.level]
        steps = jnp.array([q for _, q in self.shapes[1:]])[state.depth]
        rounds = [p * q for p, q in self.shapes[1:]]
        now = jnp.array(rounds)[state.depth]
        deeper = jnp.array([*rounds[1:], self.most])[state.depth]

        left = self.most - state.spent
        errs = error > tolerance / 2
        dearer = sums.probes * steps * (needed - 1) > extendable
        grows = state.decays & (extendable + FIRST_STEPS <= left) & (errs | dearer)
        deepens = ~grows & errs & (deeper <= left)
        # Even if the tolerance is out of reach, more probes help while std_err is the larger error.
        useful = (room > 0) | (std_err > error)
        again = ~grows & ~deepens & (now <= left) & useful
        ends = ~(grows | deepens | again)
        # If a further round no longer fits, the rule looks now.
        looks = (sums.probes >= state.target) | ends | (now > left)
        failed = state.status != SUCCESSFUL
        done = (looks & met) | ends | failed
        changed = (grows | deepens) & ~done & looks
        status = jnp.where(done & ~met & ~failed, NOT_CONVERGED, state.status)
        new = state._replace(
            grows=grows & changed,
            depth=jnp.where(changed, jnp.where(grows, 0, state.depth + 1), state.depth),
            sums=_where(changed, _Sums.none(self.real), sums),
            target=jnp.where(changed, 0, jnp.where(looks, 2 * sums.probes, state.target)),
            status=status,
            done=state.done | done,
        )
        if self.progress:
            report(self.probe_key, self.most, state.spent, value, std_err + error, done)
        return new

    def run(self) -> State:
        """Make rounds until the state is done."""

        def step(state):
            return self._decided(self._probed(self._grown(state)))

        return lax.while_loop(lambda state: ~state.done, step, self.start())


def _decay(low_rank, before: Array) -> Array:
    """Whether this rank leaves out much less than half of it did (`before`)."""
    return low_rank.left_out <= 0.84 * before


def if_any(wanted: Array, new: Callable[[], Any], old: Any) -> Any:
    """`new()` if it is wanted, else `old`. It is computed only if any lane of a `vmap` wants it."""
    return lax.cond(any_lane(wanted), lambda: keep(~wanted, old, new()), lambda: old)


def loop_budgets(
    max_k: int | None, operator: lx.AbstractLinearOperator, preconditioner: Any, name: str
) -> tuple[int, int]:
    """The largest budget, and the budget for the primitive: see `budgets_for`.

    **Arguments:**

    - `max_k`: the argument of the user, or None.
    - `operator`: the operator.
    - `preconditioner`: the argument of the user. Unless it is "auto", a `ValueError` is raised.
    - `name`: the name of the estimator.
    """
    if not isinstance(preconditioner, str) or preconditioner != "auto":
        raise ValueError(
            f"To a tolerance, the preconditioner must be 'auto', got {preconditioner!r}: the rank "
            "is part of what the tolerance decides."
        )
    return budgets_for(max_k, operator.in_size(), 1, name, small=4 * LEAST)


def check_most(max_k: int, n: int, name: str) -> None:
    """Raise a `ValueError` unless the largest budget has room for a run."""
    if max_k < min(n, LEAST):
        raise ValueError(
            f"To a tolerance, {name} needs max_k of at least {min(n, LEAST)}, got {max_k}. With "
            "fewer products, give them as k instead of a tolerance."
        )


def as_moving(weights: ExactLogdetWeights, state: State) -> LogdetWeights:
    """The exact weights A^{-1} as `V C V^H` with V = I, padded to the size of the others."""
    n, columns = state.weights.vectors.shape
    pad = lambda x, rows: jnp.pad(x, ((0, rows), (0, columns - n)))  # noqa: E731
    eye = jnp.eye(n, dtype=weights.inverse.dtype)
    core = pad(weights.inverse, columns - n)
    return LogdetWeights(pad(eye, 0), core, state.built.factors)


@final
class ToleranceLogdetEstimator(AbstractEstimator):
    """The log-determinant to a tolerance. The value is a pair, as for `LogdetEstimator`."""

    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    max_k: int = eqx.field(static=True)
    progress: bool = eqx.field(static=True)
    smallest: ClassVar[int] = 1
    weights_depend_on_operator: ClassVar[bool] = True

    def check(self, operator):
        """See `AbstractEstimator`."""
        check_definite(operator, "A log-determinant")
        check_most(self.max_k, operator.in_size(), "a log-determinant")

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        n = operator.in_size()
        falls_back_to_exact = self.max_k >= n
        with weights_wanted(True):  # the state of the loop has them in any case
            most, aim = (
                n // 4 if falls_back_to_exact else self.max_k,
                LogdetAim(self.rtol, self.atol),
            )
            state = Loop(aim, key, operator, most, falls_back_to_exact, self.progress).run()
        value, error, std_err = state.sums.means()
        counts = state.spent, state.sums.dof, state.status
        estimate = with_quadrature_error(value, error, std_err, *counts)
        if not falls_back_to_exact:
            return estimate, state.weights

        def complete():
            found = exact_logdet(operator)
            spent = found.estimate.num_matvecs + state.spent
            exact = dataclasses.replace(found.estimate, num_matvecs=spent)
            return exact, as_moving(found.weights(), state)

        return if_any(state.status == NOT_CONVERGED, complete, (estimate, state.weights))

    def exact(self, operator):
        """See `AbstractEstimator`."""
        exact = exact_logdet(operator)
        return exact.estimate, if_wanted(exact.weights)

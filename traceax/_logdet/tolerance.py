r"""Log-determinants that spend what a tolerance needs.

There is one loop (`jax.lax.while_loop`). In a round the sketch grows to twice its rank, if the
state asks for it (by products, see `growing_sketch`, or, where these cost no product, by columns,
see `growing_columns`); a few more probes take Lanczos' recurrence (see `budget_policy`); and the
rule decides how to go on, from c standard errors and the quadrature error on one side, and the
tolerance atol + rtol |value| on the other:

- done, if the sum of the errors is within the tolerance. If r probes were not enough, the rule
  looks again at 2 r, and not before: every look is a chance to stop on an error bar that happens to
  be too small.
- a larger rank, if either more probes would cost more or the quadrature error is too large; and if
  what the approximation leaves out still falls with the rank, or there is no last resort, the
  budget has no room for the probes, and the larger rank takes a quarter of what is left at most.
  The probes so far belong to another preconditioner, and are forgotten.
- longer recurrences (8, 24, 72, ... steps), if the quadrature error is too large, and the rank
  cannot help.
- otherwise more probes.
- the exact value, as the last resort, if the budget allows n products. It takes n new ones, so that
  all others may be no more than n / 4. If the entries are known, it takes no products but as many
  operations as n / 6 of them; columns and products may then take no more than half of these. What
  the standard error says of the probes that are still needed ends the run before.

Factors have the size of the largest rank; columns that are not there yet are 0. The derivative
comes from the last few probes, which are held fixed, as is all that was learnt (see `weights`).
"""

import dataclasses
import math
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Bool, Int, Real

from .._core.control_flow import if_any, nothing_like
from .._core.estimate import (
    NOT_CONVERGED,
    SUCCESSFUL,
    Estimate,
    if_wanted,
    status_of,
)
from .._estimators.arguments import budgets_for
from .._estimators.estimator import AbstractEstimator
from .._functions.quadrature_error import with_quadrature_error
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import has_entries, is_shifted_down
from .._probes.random import numbered, split
from .._sketch.low_rank import BuiltPreconditioner
from .budget_policy import (
    MOST_COLUMNS,
    Plan,
    PreconditionedQuadrature,
    preconditioned_quadrature,
    rank_from_columns,
)
from .estimator import estimate_from, exact_logdet
from .fallback import MOST_ROWS
from .growing_columns import GrowingColumns
from .growing_sketch import GrowingSketch
from .preconditioners import check_definite
from .weights import EitherWeights, LogdetWeights, weights_of

#: The number of standard errors that must be within the tolerance. (In 99 % of runs the error then
#: is, too: five kernels, three tolerances, 10 keys. Standard errors are rather too large than too
#: small.)
FACTOR = 2.0

#: The smallest budget that has room for a run.
LEAST = 64

#: Columns are enough when the mean eigenvalue of what is left out is this small beside the noise:
#: one look at the probes then meets all but very small tolerances.
ENOUGH = 1e-4

#: Up to this size the exact value takes less time than a run with columns.
SMALL = 1000


class Schedule(NamedTuple):
    """The numbers that a run chooses from. Costs are in products."""

    ranks: tuple[int, ...]
    costs: tuple[int, ...]  # of every rank, in addition to the one before
    first: int  # probes of the first look at a preconditioner
    together: int  # probes of any other round, at most
    steps: int  # of the first recurrences

    def shapes(self, most: int, n: int) -> tuple[tuple[int, int], ...]:
        """Pairs of numbers of probes and steps: one for the first look, then one for each depth,
        with as many probes as a third of the budget allows.
        """
        found, steps = [(self.first, self.steps), (self.together, self.steps)], 3 * self.steps
        while steps <= min(most // 2, n):
            found.append((min(self.together, max(1, most // 3 // steps)), steps))
            steps *= 3
        return tuple(found)


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """The ranks: each is about twice the one before."""
    found = [first]
    while 3 * found[-1] <= last:
        found.append(2 * found[-1])
    return (*found, last) if last > found[-1] else (last,)


def of_products(most: int) -> Schedule:
    """The schedule with a preconditioner from products, which takes up to three quarters of the
    budget.
    """
    ranks = _doubling(16, 3 * most // 4)
    costs = tuple(after - before for before, after in pairwise((0, *ranks)))
    return Schedule(ranks, costs, first=1, together=4, steps=8)


def of_columns(most: int, n: int, budget_is_time: bool) -> Schedule:
    """The schedule with a preconditioner from columns. Its time, about 10 n rank^2 operations, is
    that of 5 rank^2 / n products; up to three quarters of the budget, if the budget stands for
    time. A pass with many probes takes little longer than one with a few, and few steps are enough.
    """
    last = min(n // 2, math.isqrt(3 * n * most // 20), MOST_COLUMNS)
    ranks = _doubling(64, max(1, last if budget_is_time else rank_from_columns(n, most)))
    costs = [-(-5 * rank**2 // n) for rank in (0, *ranks)]
    costs = tuple(after - before for before, after in pairwise(costs))
    return Schedule(ranks, costs, first=4, together=8, steps=4)


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


def _times(error: Array, room: Array) -> Array:
    """How many times the probes so far would bring a standard error down to `room`."""
    return jnp.where(room > 0, jnp.square(error / jnp.where(room > 0, room, 1)), jnp.inf)


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
    y: Any  # the products, or the columns, so far
    built: BuiltPreconditioner
    left_out: Real[Array, ""]
    decays: Bool[Array, ""]  # whether twice the rank is worthwhile
    # By what factor the last doubling of the rank lowered `left_out`; infinite where a rank within
    # reach leaves nothing out.
    gain: Real[Array, ""]
    level: Int[Array, ""]
    depth: Int[Array, ""]
    grows: Bool[Array, ""]  # whether the rank is to grow next
    sums: _Sums
    target: Int[Array, ""]  # the number of probes at the next look
    spent: Int[Array, ""]  # products
    work: Int[Array, ""]  # what of the budget is used up
    rounds: Int[Array, ""]
    status: Int[Array, ""]
    last: Any  # the probes, recurrences, quadrature and shape of the last round, if wanted
    known: Any  # what the aim knows besides
    done: Bool[Array, ""]


def _where(condition: Array, new: Any, old: Any) -> Any:
    return jtu.tree_map(lambda a, b: jnp.where(condition, a, b), new, old)


class Loop:
    """One run. (It is not a PyTree, as it exists only during a trace.)"""

    def __init__(self, aim: Any, key, operator, most: int, falls_back_to_exact: bool):
        """Make the first products.

        **Arguments:**

        - `aim`: the aim, a `LogdetAim` or an object with its methods.
        - `key`: the random key.
        - `operator`: the operator.
        - `most`: the largest number of products.
        - `falls_back_to_exact`: whether the exact value may replace the result.
        """
        sketch_key, self.probe_key = split(key)
        self.aim, self.most = aim, most
        self.falls_back_to_exact = falls_back_to_exact
        self.block = BlockOperator(operator).linearised()
        n = self.block.n
        if picks_columns(operator):
            self.schedule = of_columns(most, n, falls_back_to_exact)
            ranks = self.schedule.ranks
            self.sketch: Any = GrowingColumns(sketch_key, operator, ranks, enough=ENOUGH)
            nothing = (0,) * len(ranks)
            self.products = nothing
            self.charged = self.schedule.costs if falls_back_to_exact else nothing
        else:
            self.schedule = of_products(most)
            ranks = self.schedule.ranks
            self.sketch = GrowingSketch(sketch_key, operator, self.block, ranks)
            self.products = self.charged = self.schedule.costs
        self.shapes = self.schedule.shapes(most, n)
        self.plans = tuple(Plan(ranks[-1], p, q) for p, q in self.shapes)
        self.columns = max(each.columns for each in self.plans)
        self.real = jnp.finfo(self.block.dtype).dtype

    def start(self) -> State:
        y, zero = self.sketch.first, jnp.zeros((), jnp.int32)
        built = nothing_like(lambda: self.sketch.built(self.sketch.low_rank(y, zero)))
        return State(
            y=y,
            built=built,
            left_out=jnp.zeros((), self.real),
            decays=jnp.array(False),
            gain=jnp.ones((), self.real),
            level=zero - 1,
            depth=zero,
            grows=jnp.array(True),
            sums=_Sums.none(self.real),
            target=zero,
            spent=zero,
            work=zero,
            rounds=zero,
            status=zero,
            last=nothing_like(lambda: self._last(self._round(self.probe_key, built, zero, zero))),
            known=self.aim.start,
            done=jnp.array(False),
        )

    def _round(self, key, built, which, status) -> PreconditionedQuadrature:
        return preconditioned_quadrature(key, self.block, built, self.plans, which, status)

    def _last(self, run: PreconditionedQuadrature) -> Any:
        """What the weights need of a round."""
        return if_wanted(lambda: (run.probes, run.krylov, run.bounds, run.which))

    def weights(self, state: State) -> LogdetWeights | EitherWeights:
        """The weights from the last round."""
        probes, krylov, bounds, which = state.last
        outcome = self.block, state.built, probes, krylov, bounds, state.status, state.spent
        found = weights_of(PreconditionedQuadrature(*outcome, self.plans, which, self.columns))
        return EitherWeights.of_run(found) if self.falls_back_to_exact else found

    def _grown(self, state: State) -> State:
        """The state with the next rank, if that is wanted."""

        def extended():
            level = state.level + 1
            y = self.sketch.grown(state.y, level)
            low_rank = self.sketch.low_rank(y, level)
            built = self.sketch.built(low_rank)
            # Whether this rank leaves out much less than half of it did.
            before = jnp.where(level == 0, low_rank.left_out_by_half, state.left_out)
            # A flat spectrum that ends within reach does not decay before: see `_adaptive`.
            ranks = jnp.array(self.schedule.ranks)
            ends = ranks[level] + low_rank.dimension <= ranks[-1]
            gain = before / jnp.where(low_rank.left_out > 0, low_rank.left_out, before)
            found = jnp.asarray(status_of(*jtu.tree_leaves(y)), jnp.int32)
            seen = jnp.maximum(built.status, found)
            return state._replace(
                y=y,
                built=built,
                left_out=low_rank.left_out,
                decays=(low_rank.left_out <= 0.84 * before) | ends,
                gain=jnp.where(ends, jnp.inf, gain),
                level=level,
                grows=jnp.zeros_like(state.grows),
                spent=state.spent + jnp.array(self.products, jnp.int32)[level],
                work=state.work + jnp.array(self.charged, jnp.int32)[level],
                status=jnp.maximum(state.status, seen),
            )

        return if_any(state.grows & ~state.done, extended, state)

    def _probed(self, state: State) -> State:
        """The state with a few more probes."""
        first = (state.depth == 0) & (state.sums.probes == 0)
        which = jnp.where(first, 0, state.depth + 1)
        key = numbered(self.probe_key, state.rounds)
        run = self._round(key, state.built, which, state.status)
        estimate = estimate_from(run)
        _, p, q = run.numbers
        return state._replace(
            sums=state.sums.plus(p, estimate),
            spent=state.spent + p * q,
            work=state.work + p * q,
            rounds=state.rounds + 1,
            status=jnp.asarray(estimate.status, jnp.int32),
            last=self._last(run),
            known=self.aim.advanced(state.known, run, estimate),
        )

    def _decided(self, state: State) -> State:
        """The state with the decision of the rule (see above)."""
        sums = state.sums
        value, error, std_err = sums.means()
        tolerance = self.aim.tolerance(value, state.known).astype(self.real)
        met = FACTOR * std_err + error <= tolerance
        room = jnp.maximum(tolerance - error, 0)
        needed = _times(FACTOR * std_err, room)

        # For the last rank or depth, the whole budget stands for the cost of the next.
        extendable = jnp.array([*self.schedule.costs[1:], self.most])[state.level]
        charged = jnp.array([*self.charged[1:], self.most])[state.level]
        steps = jnp.array([q for _, q in self.shapes[1:]])[state.depth]
        rounds = [p * q for p, q in self.shapes[1:]]
        now = jnp.array(rounds)[state.depth]
        deeper = jnp.array([*rounds[1:], self.most])[state.depth]

        left = self.most - state.work
        errs = error > tolerance / 2
        more = sums.probes * steps * (needed - 1)
        first_look = self.shapes[0][0] * self.shapes[0][1]
        worthwhile = state.decays
        if not self.falls_back_to_exact:
            # What no number of probes can reach, a larger rank may: a few large eigenvalues, all of
            # about the same size, do not decay before the rank exceeds their number.
            worthwhile |= (more > left) & (4 * charged <= left)
        grows = worthwhile & (charged + first_look <= left) & (errs | (more > extendable))
        deepens = errs & (deeper <= left)
        # Even if the tolerance is out of reach, more probes help while std_err is the larger error.
        useful = (room > 0) | (std_err > error)
        if self.falls_back_to_exact:
            # The exact value is better, and no dearer than what remains to be done.
            least = sums.probes * steps * _times(FACTOR * std_err, tolerance)
            # (The Frobenius norm of what is left out falls a little faster than its trace.)
            grows &= least / state.gain**3 <= left
            deepens &= least <= left
            useful = more <= left
        deepens &= ~grows
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
        return new

    def run(self) -> State:
        """Make rounds until the state is done."""

        def step(state):
            return self._decided(self._probed(self._grown(state)))

        return lax.while_loop(lambda state: ~state.done, step, self.start())


def loop_budgets(
    max_k: int | None,
    operator: lx.AbstractLinearOperator,
    preconditioner: Any,
    fallback: Any,
    name: str,
) -> tuple[int, int]:
    """The largest budget, and the budget for the primitive: see `budgets_for`.

    **Arguments:**

    - `max_k`: the argument of the user, or None.
    - `operator`: the operator.
    - `preconditioner`: the argument of the user. Unless it is "auto", a `ValueError` is raised.
    - `fallback`: the argument of the user. If it is None, the largest budget is less than n.
    - `name`: the name of the estimator.
    """
    if not isinstance(preconditioner, str) or preconditioner != "auto":
        raise ValueError(
            f"To a tolerance, the preconditioner must be 'auto', got {preconditioner!r}: the rank "
            "is part of what the tolerance decides."
        )
    n, small = operator.in_size(), 4 * LEAST
    if picks_columns(operator):
        small = SMALL
        if fallback and max_k is None and n <= MOST_ROWS:
            max_k = n  # the last resort takes no products
    max_k, k = budgets_for(max_k, n, 1, name, small=small)
    if fallback or n <= LEAST:  # a run would take as many products as the exact value
        return max_k, k
    return min(max_k, n - 1), min(k, n - 1)


def most_products(operator: lx.AbstractLinearOperator, max_k: int) -> tuple[int, bool]:
    """The budget of a run, and whether it falls back to the exact value. Where that takes no
    products, the run may take half as many operations.

    **Arguments:**

    - `operator`: the operator.
    - `max_k`: the largest budget.
    """
    n = operator.in_size()
    if max_k < n:
        return max_k, False
    return n // 12 if picks_columns(operator) else n // 4, True


def picks_columns(operator: lx.AbstractLinearOperator) -> bool:
    """Whether the preconditioner of a run is made from columns."""
    return has_entries(operator) and not is_shifted_down(operator)


def completed(estimate: Estimate, exact: Estimate) -> Estimate:
    """The exact estimate, with what was spent before."""
    spent, read = estimate.num_matvecs + exact.num_matvecs, exact.columns
    if read is not None and estimate.columns is not None:
        read = read + estimate.columns
    return dataclasses.replace(exact, num_matvecs=spent, columns=read)


def judged(estimate: Estimate, rtol: Real[Array, ""], atol: Real[Array, ""]) -> Estimate:
    """The estimate of a run that has ended, with the status that its errors and the tolerance give
    it: rounding may exceed a tolerance that all else meets.
    """
    (value, error, *_), (std_err, *_) = estimate.value, estimate.std_err
    tolerance = rtol.astype(value.dtype) * jnp.abs(value) + atol.astype(value.dtype)
    met = FACTOR * std_err + error <= tolerance
    ended = (estimate.status == SUCCESSFUL) | (estimate.status == NOT_CONVERGED)
    status = jnp.where(met, SUCCESSFUL, NOT_CONVERGED)
    return dataclasses.replace(estimate, status=jnp.where(ended, status, estimate.status))


def check_most(max_k: int, n: int, name: str) -> None:
    """Raise a `ValueError` unless the largest budget has room for a run."""
    if max_k < min(n, LEAST):
        raise ValueError(
            f"To a tolerance, {name} needs max_k of at least {min(n, LEAST)}, got {max_k}. With "
            "fewer products, give them as k instead of a tolerance."
        )


@final
class ToleranceLogdetEstimator(AbstractEstimator):
    """The log-determinant to a tolerance. The value is a pair, as for `LogdetEstimator`."""

    rtol: Real[Array, ""]
    atol: Real[Array, ""]
    max_k: int = eqx.field(static=True)
    smallest: ClassVar[int] = 1
    weights_depend_on_operator: ClassVar[bool] = True

    def check(self, operator):
        """See `AbstractEstimator`."""
        check_definite(operator, "A log-determinant")
        check_most(self.max_k, operator.in_size(), "a log-determinant")

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        most, falls_back_to_exact = most_products(operator, self.max_k)
        aim = LogdetAim(self.rtol, self.atol)
        loop = Loop(aim, key, operator, most, falls_back_to_exact)
        state = loop.run()
        value, error, std_err = state.sums.means()
        counts = state.spent, state.sums.dof, state.status, loop.sketch.read(state.y)
        estimate = with_quadrature_error(value, error, std_err, *counts)
        weights = if_wanted(lambda: loop.weights(state))
        if not falls_back_to_exact:
            return estimate, weights

        def complete():
            found = exact_logdet(operator)
            exact = judged(completed(estimate, found.estimate), self.rtol, self.atol)
            return exact, if_wanted(lambda: weights.replaced_by(found.weights()))

        return if_any(state.status == NOT_CONVERGED, complete, (estimate, weights))

    def exact(self, operator):
        """See `AbstractEstimator`."""
        exact = exact_logdet(operator)
        return judged(exact.estimate, self.rtol, self.atol), if_wanted(exact.weights)

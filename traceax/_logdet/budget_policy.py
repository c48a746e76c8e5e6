r"""How the budget of a log-determinant is spent: on rank, on probes, and on steps.

With a preconditioner P = R R^H (see `preconditioners`) and M = R^{-1} A R^{-H},

    log det A = log det P + tr log M,

The first term is exact. The second is estimated from p probes on the sphere, with q steps of
Lanczos' recurrence for each (see `_linalg.lanczos`, `log_quadrature`). The closer M is to the
identity, the smaller is the scatter, and the fewer steps are needed. The docstring of `logdet`
gives the rule that divides the budget.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.control_flow import nothing_like
from .._core.estimate import if_wanted, status_of
from .._functions.funm import plan
from .._linalg.lanczos import Lanczos, narrowed, padded_lanczos
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import has_entries, is_shifted_down
from .._probes.random import split
from .._probes.samplers import RademacherSampler, SphereSampler
from .._sketch.low_rank import BuiltPreconditioner, LowRank, LowRankPlusIdentity
from .growing_columns import GrowingColumns
from .growing_sketch import GrowingSketch
from .log_quadrature import LogQuadrature, log_quadrature
from .preconditioners import AbstractPreconditioner, built_of_rank, check_definite


class Plan(NamedTuple):
    """How a budget is spent: `rank + probes * steps <= k`."""

    rank: int
    probes: int
    steps: int

    @property
    def columns(self) -> int:
        """The number of columns of the weights."""
        return self.rank + self.probes * (self.steps + 1)


def plan_with(rank: int, probes: int, k: int) -> Plan:
    """The plan with this rank and number of probes (fewer, if they had less than two steps)."""
    left = k - rank
    probes = max(1, min(probes, left // 2))
    return Plan(rank, probes, left // probes)


def plans(k: int, fewest: int = 1) -> tuple[Plan, Plan, Plan]:
    """The three plans of "auto": see `logdet`. For the inverse there are at least `fewest` probes,
    more than one, and the second plan has half the probes and a smaller rank: solves take more
    steps than logarithms. (RBF kernel, d = 5, noise 1e-2, n = 1000, k = 120: the error of tr A^-1
    is 2.8 % with rank 80 and 8 steps, and 1.4 % with rank 60 and 15 steps.)
    """
    # Fewer than 16 columns rarely show whether a spectrum decays.
    first = plan_with(max(k // 6, min(16, k // 3)), math.isqrt(k) // 2, k)
    rank, probes = (2 * k // 3, k // 24) if fewest == 1 else (k // 2, k // 48)
    second = plan_with(rank, max(fewest, probes), k)
    few = max(fewest, k // 60)
    return first, second, plan_with(max(k - 5 * few, second.rank + 1), few, k)


#: Plans for a preconditioner from columns: up to a condition number of 1 + the first number, there
#: are so many steps. (16 kernels, noise 0.1 and 1e-3, n = 2000, k = 200: the quadrature error is
#: then below a third of the standard error in all but two cases.)
STEPS_FOR = ((0.5, 3), (25, 6), (100, 12), (math.inf, 30))


#: The largest rank of a preconditioner from columns.
MOST_COLUMNS = 768


def rank_from_columns(n: int, k: int) -> int:
    """The largest rank where columns cost no product. Its time, about 10 n rank^2 operations, is
    then about that of the k products, 2 n^2 k operations; or it is 128, which takes no time.
    """
    return max(1, min(n // 2, max(128, math.isqrt(n * k // 5)), MOST_COLUMNS))


def numbers(plans: Sequence[Plan], which: int | Int[Array, ""]) -> Plan:
    """One of these plans: its numbers are traced, unless there is no other."""
    if len(plans) == 1:
        return plans[0]
    return Plan(*jnp.array(plans, jnp.int32)[which])


class PreconditionedQuadrature(NamedTuple):
    """The outcome of a budget: the preconditioner, the recurrences and their quadrature.

    Arrays are large enough for all plans; what goes beyond the plan that was chosen is 0.
    """

    block: BlockOperator
    built: BuiltPreconditioner
    probes: Inexact[Array, "n p"]
    krylov: Lanczos  # see `padded_lanczos`
    bounds: LogQuadrature
    status: Array
    spent: int | Int[Array, ""]
    plans: tuple[Plan, ...]
    which: int | Int[Array, ""]  # of the plans was chosen
    columns: int  # of the weights, for the plan that has the most of them
    read: Int[Array, ""] | None = None  # columns that were read without a product, if any can be
    signs: Real[Array, "n p"] | None = None  # omega, if the probes are R^{-1} omega
    of_derivative: Any = None  # the outcome that the derivative is taken from, if it is another

    @property
    def numbers(self) -> Plan:
        """The plan that was chosen."""
        return numbers(self.plans, self.which)

    @property
    def in_use(self) -> Bool[Array, " p"]:
        """Which of the probes are in use."""
        return jnp.arange(self.probes.shape[1]) < self.numbers.probes

    @property
    def for_derivative(self) -> "PreconditionedQuadrature":
        """The outcome that the derivative is taken from: see `_for_both`."""
        return self if self.of_derivative is None else self.of_derivative

    @property
    def floor(self) -> Array:
        """A lower bound of the eigenvalues of M if one is known; else the smallest Ritz value,
        which is good enough.
        """
        known = self.built.floor
        return jnp.where(jnp.isnan(known), self.bounds.smallest, known)


def no_preconditioner(block: BlockOperator) -> BuiltPreconditioner:
    """The identity in the place of a preconditioner."""
    real = jnp.finfo(block.dtype).dtype
    basis, eigenvalues = jnp.zeros((block.n, 0), block.dtype), jnp.zeros(0, real)
    one = jnp.ones((), real)
    factors = LowRankPlusIdentity(jnp.ones(block.n, real), basis, eigenvalues, one)
    none = jnp.full((), jnp.nan, real), jnp.zeros((), real), jnp.zeros((), jnp.int32)
    return BuiltPreconditioner(factors, *none)


@final
class BudgetPolicy(eqx.Module):
    """How budgets are spent: with a given preconditioner, or by the rule of `logdet`."""

    preconditioner: AbstractPreconditioner | None
    auto: bool = eqx.field(static=True)
    wary: bool = eqx.field(default=False, static=True)  # long recurrences: see `logdet`
    for_inverse: bool = eqx.field(default=False, static=True)  # probes R^{-1} omega: see `inverse`

    def _fewest(self, k: int) -> int:
        """The smallest number of probes. For the inverse only their scatter tells the errors; the
        recurrences keep three steps at least.
        """
        return max(2, min(4, k // 12)) if self.for_inverse and k >= 6 else 1

    def check(self, operator: lx.AbstractLinearOperator, name: str) -> None:
        """Raise a `ValueError` if no budget can be spent on this operator."""
        check_definite(operator, name)
        if self.preconditioner is not None:
            self.preconditioner.check(operator)

    def apply(self, key: PRNGKeyArray, operator, k: int) -> PreconditionedQuadrature:
        """Spend a budget.

        **Arguments:**

        - `key`: the random key.
        - `operator`: the operator.
        - `k`: the budget.

        **Returns:**

        The outcome.
        """
        sketch_key, probe_key = split(key)
        block = BlockOperator(operator).linearised()
        rule = self._adaptive if self.auto and k >= 24 else self._fixed
        if self.auto and not self.wary and has_entries(operator):  # columns are cheap
            rule = self._from_columns
        return rule(sketch_key, probe_key, block, operator, k)

    def _steps(self, chosen: Plan, k: int) -> Plan:
        """The plan, or for K - s I one with a quarter of its probes, and more steps. (1138_bus -
        5 I, 183 of 1138 eigenvalues negative, k = 200: none of 8 probes has a negative Ritz value
        after 8 steps, nearly all have one after 12.)
        """
        return plan_with(chosen.rank, chosen.probes // 4, k) if self.wary else chosen

    def _fixed(self, sketch_key, probe_key, block, operator, k) -> PreconditionedQuadrature:
        """One plan, for a preconditioner that was given, or for a very small budget."""
        rank = 0
        if self.preconditioner is not None:
            rank = max(0, min(self.preconditioner.rank or 2 * k // 3, k - 2))
        if rank == 0:
            p = min(k, max(self._fewest(k), plan(k, None)[0]))
            built, chosen = no_preconditioner(block), Plan(0, p, k // p)
            return self._outcome(probe_key, block, built, (chosen,), 0, status_of())
        assert self.preconditioner is not None
        built = built_of_rank(self.preconditioner, sketch_key, operator, rank)
        chosen = self._steps(plan_with(rank, max(self._fewest(k), (k - rank) // 10), k), k)
        status = built.status_with_factors()
        return self._outcome(probe_key, block, built, (chosen,), 0, status)

    def _from_columns(self, sketch_key, probe_key, block, operator, k):
        """A preconditioner that takes no products: all of them are left for probes. A pass with
        many vectors takes little longer than one with a few, so that there are as few steps as the
        condition number of M allows: about 1 + n t / (rank s), if what is left out spreads over as
        many eigenvalues as were captured; and more if eigenvalues below s were seen.
        """
        rank = rank_from_columns(block.n, k)
        enough = math.sqrt(block.eps)  # the next column would not matter for any estimate
        growing = GrowingColumns(sketch_key, operator, (rank,), enough=enough)
        pivoted = growing.grown(growing.first, 0)
        low_rank = growing.low_rank(pivoted, 0)
        built = growing.built(low_rank)
        probes = [min(k, max(self._fewest(k), k // steps)) for _, steps in STEPS_FOR]
        chosen = tuple(
            Plan(rank, p, min(k // p, steps, block.n))
            for p, (_, steps) in zip(probes, STEPS_FOR, strict=True)
        )
        spread = block.n * (low_rank.left_out / low_rank.shift) / jnp.maximum(pivoted.rank, 1)
        spread = jnp.where(growing.certain, (1 + spread) * growing.below - 1, jnp.inf)
        limits = jnp.array([limit for limit, _ in STEPS_FOR[:-1]], spread.dtype)
        which = jnp.sum(~(spread <= limits), dtype=jnp.int32)
        status = built.status_with_factors()
        outcome = self._outcome(probe_key, block, built, chosen, which, status)
        _, p, q = outcome.numbers
        return outcome._replace(spent=p * q, read=growing.read(pivoted))

    def _adaptive(self, sketch_key, probe_key, block, operator, k):
        """The rule of `logdet`."""
        _, second, third = three = plans(k, self._fewest(k))
        sketch = GrowingSketch(sketch_key, operator, block, tuple(each.rank for each in three))

        def step(state: _Growth) -> _Growth:
            level = state.level + 1
            y = sketch.grown(state.y, level)
            low_rank = sketch.low_rank(y, level)
            left_out, first = low_rank.left_out, state.low_rank.left_out
            decays = left_out <= 0.84 * low_rank.left_out_by_half
            # A flat spectrum with an end does not decay, but a rank beyond the end captures all of
            # it. If d equal eigenvalues are left out, the end is at rank + d; d errs by 2 / rank.
            # (An unknown s is at first taken for half of the smallest Ritz value, and d is then
            # about 1.6 times too small: features + noise, k = 48 to 200.)
            doubt = jnp.where(sketch.known | (level > 0), 1, 1.6)
            rank = jnp.array([each.rank for each in three])[level]
            ends = rank + doubt * low_rank.dimension <= 1.1 * third.rank
            ends &= not self.for_inverse  # 1 / x needs more steps than the third plan has
            # t (see `logdet`) falls like a power of the rank, or faster.
            ratio = left_out / jnp.where(first > 0, first, 1)
            slope = jnp.log(jnp.clip(ratio, 1e-6, 1)) / math.log(second.rank / three[0].rank)
            relative = left_out / low_rank.shift
            later = relative * (third.rank / second.rank) ** slope
            # Few steps are enough only for an M that is close to the identity.
            gain = (later / (1 + later)) * math.sqrt(second.probes / third.probes)
            pays = (later < 1 / 3) & (gain < relative / (1 + relative))
            pays |= ~(left_out > 0)
            goes_on = jnp.stack([decays | ends, pays | ends, jnp.array(False)])[level]
            return _Growth(y, low_rank, level, goes_on)

        level = jnp.full((), -1, jnp.int32)
        low_rank = nothing_like(sketch.low_rank, sketch.first, level)
        start = _Growth(sketch.first, low_rank, level, jnp.array(True))
        y, low_rank, level, _ = lax.while_loop(lambda state: state.goes_on, step, start)
        built = sketch.built(low_rank)
        status = jnp.maximum(status_of(y), built.status)
        chosen = tuple(self._steps(each, k) for each in three)
        return self._outcome(probe_key, block, built, chosen, level, status)

    def _outcome(self, key, block, built, plans, which, status) -> PreconditionedQuadrature:
        twice = not self.for_inverse and if_wanted(lambda: True) is not None
        return preconditioned_quadrature(
            key, block, built, plans, which, status, for_inverse=self.for_inverse, twice=twice
        )


class _Growth(NamedTuple):
    """The state of the rule of `logdet`."""

    y: Inexact[Array, "n r"]
    low_rank: LowRank
    level: Int[Array, ""]
    goes_on: Bool[Array, ""]


def preconditioned_quadrature(
    key: PRNGKeyArray,
    block: BlockOperator,
    built: BuiltPreconditioner,
    plans: tuple[Plan, ...],
    which: int | Int[Array, ""],
    status: Array,
    *,
    for_inverse: bool = False,
    twice: bool = False,
) -> PreconditionedQuadrature:
    """The outcome of one of these plans with this preconditioner. The probes are on the sphere of
    radius sqrt(n), or R^{-1} omega with vectors omega of random signs. For `twice` see
    `_for_both`.
    """
    most = max(each.probes for each in plans)
    in_use = jnp.arange(most) < numbers(plans, which).probes
    sampler = RademacherSampler() if for_inverse else SphereSampler()
    probes = jnp.where(in_use, sampler.probes(key, block.n, most, block.dtype), 0)
    signs = None
    if for_inverse:
        signs, probes = probes.real, built.factors.inverse_root(probes)
    rank, p, q = numbers(plans, which)
    columns = max(each.columns for each in plans)

    def outcome(krylov, bounds, probes=probes, plans=plans, which=which):
        found = jnp.maximum(status, krylov.status)
        arrays = block, built, probes, krylov, bounds, found, rank + p * q
        return PreconditionedQuadrature(*arrays, plans, which, columns, signs=signs)

    fewer = tuple(longer(each, block.n) for each in plans) if twice else plans
    if fewer == plans:
        return outcome(*_quadrature(block, built, probes, plans, which))
    first, (krylov, bounds), last = _for_both(block, built, probes, plans + fewer, which)
    used = jnp.arange(most) < numbers(plans + fewer, last).probes
    probes = jnp.where(used, probes, 0)
    of_derivative = outcome(krylov, bounds, probes, plans + fewer, last)
    return outcome(*first)._replace(of_derivative=of_derivative)


def _quadrature(block, built, probes, plans, which) -> tuple[Lanczos, LogQuadrature]:
    """Lanczos' recurrence with this preconditioner, and the quadrature of the logarithm."""
    _, p, q = numbers(plans, which)
    product = narrowed(block.mm, [each.probes for each in plans], p)
    mm = partial(built.factors.preconditioned, product)
    krylov = padded_lanczos(mm, probes, [each[1:] for each in plans], p, q, block.eps)
    sizes = [each.steps for each in plans]
    is_complex = jnp.iscomplexobj(probes)
    return krylov, log_quadrature(krylov, built.floor, block.n, is_complex, p, sizes)


def longer(plan: Plan, n: int) -> Plan:
    """A third of the probes, with three times as many steps."""
    rank, p, q = plan
    fewer = max(1, p // 3)
    return plan if fewer == p else Plan(rank, fewer, min(p * (q + 1) // fewer - 1, n))


def _for_both(block, built, probes, plans, which) -> tuple[Any, Any, Int[Array, ""]]:
    """The recurrences (without their bases) and the quadrature of a plan, then those that are good
    enough for a derivative, and the number of the plan that these belong to. Of the plans, the
    first half is to choose from; the other half is `longer`.

    If Lanczos' recurrence ended too early, the derivative has a larger bias than the value. A third
    of the probes then takes three times as many steps, at the cost of up to `p (q + 1)` further
    matvecs. (RBF in 5 dimensions, noise 1e-3, n = 1000, k = 240: the derivative with respect to the
    length scale had a bias of 7 %, 4 standard deviations.) Both rounds are one program.
    """
    half = len(plans) // 2

    def round_(which):
        used = jnp.arange(probes.shape[1]) < numbers(plans, which).probes
        return _quadrature(block, built, jnp.where(used, probes, 0), plans, which)

    def step(state):
        which, _, first, _ = state
        krylov, bounds = found = round_(which)
        small = krylov._replace(basis=krylov.basis[:0]), bounds._replace(core=None)
        first = jtu.tree_map(partial(jnp.where, which < half), small, first)
        # NaN, too, takes the short way.
        early = (which < half) & (bounds.error > bounds.std_err / 4)
        early &= numbers(plans, (which + half) % len(plans)).probes < numbers(plans, which).probes
        return jnp.where(early, which + half, which), early, first, found

    which = jnp.asarray(which, jnp.int32)
    krylov, bounds = nothing = nothing_like(round_, which)
    first = krylov._replace(basis=krylov.basis[:0]), bounds._replace(core=None)
    start = which, jnp.array(True), first, nothing
    which, _, first, last = lax.while_loop(lambda state: state[1], step, start)
    return first, last, which


def policy_of(preconditioner: Any, operator: lx.AbstractLinearOperator) -> BudgetPolicy:
    """The policy for the user's `preconditioner`. A `TypeError` is raised unless that is "auto", a
    way to build one, or None.
    """
    auto = isinstance(preconditioner, str) and preconditioner == "auto"
    if isinstance(preconditioner, BuiltPreconditioner):
        raise TypeError(
            "A preconditioner that was built before is taken by `logdet` and "
            "`gaussian_log_density` alone. Say how to build one: "
            "`traceax.NystromPreconditioner(rank=100)`."
        )
    if not auto and not isinstance(preconditioner, AbstractPreconditioner | None):
        raise TypeError(
            "The preconditioner must be 'auto', None, or an instance such as "
            f"`traceax.NystromPreconditioner(rank=100)`, got {preconditioner!r}."
        )
    chosen: Any = None if auto else lax.stop_gradient(preconditioner)
    return BudgetPolicy(chosen, auto, is_shifted_down(operator))

r"""How the budget of a log-determinant is spent: on rank, on probes, and on steps.

With a preconditioner P = R R^H (see `preconditioners`) and M = R^{-1} A R^{-H},

    log det A = log det P + tr log M,

The first term is exact. The second is estimated from p probes on the sphere, with q steps of
Lanczos' recurrence for each (see `_linalg.lanczos`, `log_quadrature`). The closer M is to the
identity, the smaller is the scatter, and the fewer steps are needed.

*The rule* of "auto", where t(l) is the mean eigenvalue of the part of K that a Nystrom
approximation of rank l leaves out:

1. A sketch takes k/6 products (at least 16, or k/3 if that is less). If t has hardly fallen from
   half of this rank to all of it (by less than 16 %), low rank does not pay, and the rest goes to
   sqrt(k) / 2 probes with as many steps as that allows. The exception is a flat spectrum with an
   end that the budget reaches (features and noise), which the angles between what is left out of
   the probes tell.
2. Otherwise the rank grows to 2k/3. If t is not yet small relative to s, the rest goes to k/24
   probes with 8 steps each.
3. If t(l) / s, extrapolated to the full budget, is below 1/3 and promises a smaller error than at
   2k/3, or if that rank reaches the end, the rank grows to 11k/12, and k/60 probes (at least one)
   take 5 steps.

Where columns cost no product, P comes from columns (see `columns`) until the mean of what is left
of the diagonal is rounding beside s, or the rank is sqrt(n k / 5) (from 128 to 768). All products
are left for probes, with 3 to 30 steps each, as the condition number of P^{-1} A asks for.

Every plan that may be chosen is a part of the program, with arrays of its own sizes.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.control_flow import if_any, nothing_like
from .._core.estimate import Evidence, worse
from .._functions.funm import plan
from .._linalg.lanczos import Lanczos, lanczos
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import has_entries
from .._probes.random import split
from .._probes.samplers import RademacherSampler, SphereSampler
from .._sketch.low_rank import BuiltPreconditioner, LowRank, LowRankPlusIdentity
from .columns import preconditioner_from_columns
from .log_quadrature import LogQuadrature, log_quadrature
from .preconditioners import AbstractPreconditioner, built_of_rank, check_definite
from .sketch import Sketch


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
    """The three plans of "auto". For the inverse there are at least `fewest` probes,
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


class PreconditionedQuadrature(NamedTuple):
    """The outcome of a plan: the preconditioner, the recurrences and their quadrature."""

    block: BlockOperator
    built: BuiltPreconditioner
    probes: Inexact[Array, "n p"]
    krylov: Lanczos
    bounds: LogQuadrature
    evidence: Evidence
    spent: int
    plans: tuple[Plan, ...]  # those that this one was chosen from
    read: Int[Array, ""] | None = None  # columns that were read without a product, if any can be
    signs: Real[Array, "n p"] | None = None  # omega, if the probes are R^{-1} omega

    @property
    def most(self) -> tuple[int, int, int]:
        """The largest rank, number of probes, and number of columns of the weights, of all plans:
        the outcomes of all of them have arrays of the same size.
        """
        each = [(plan.rank, plan.probes, plan.columns) for plan in self.plans]
        rank, probes, columns = map(max, zip(*each, strict=True))
        return rank, probes, columns

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
    none = jnp.full((), jnp.nan, real), jnp.zeros((), real)
    return BuiltPreconditioner(factors, *none)


@final
class BudgetPolicy(eqx.Module):
    """How budgets are spent: with a given preconditioner, or by the rule of above."""

    preconditioner: AbstractPreconditioner | None
    auto: bool = eqx.field(static=True)
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

    def apply(
        self, key: PRNGKeyArray, operator, k: int, finish: Callable[[PreconditionedQuadrature], Any]
    ) -> Any:
        """Spend a budget.

        **Arguments:**

        - `key`: the random key.
        - `operator`: the operator.
        - `k`: the budget.
        - `finish`: what is wanted of the outcome. It is called once for each plan that may be
            chosen, and returns arrays of the same shapes for all of them.

        **Returns:**

        What `finish` returns for the plan that is chosen.
        """
        rule = self._adaptive if self.auto and k >= 24 else self._fixed
        if self.auto and has_entries(operator):  # columns are cheap
            rule = self._from_columns
        return rule(key, BlockOperator(operator).linearised(), operator, k, finish)

    def _fixed(self, key, block, operator, k, finish):
        """One plan, for a preconditioner that was given, or for a very small budget."""
        sketch_key, probe_key = split(key)
        rank = 0
        if self.preconditioner is not None:
            rank = max(0, min(self.preconditioner.rank or 2 * k // 3, k - 2))
        if rank == 0:
            p = min(k, max(self._fewest(k), plan(k, None)[0]))
            chosen, built = Plan(0, p, k // p), no_preconditioner(block)
        else:
            assert self.preconditioner is not None
            chosen = plan_with(rank, max(self._fewest(k), (k - rank) // 10), k)
            built = built_of_rank(self.preconditioner, sketch_key, operator, rank)
        return finish(self._outcome(probe_key, block, built, chosen, (chosen,)))

    def _from_columns(self, key, block, operator, k, finish):
        """A preconditioner that takes no products: all of them are left for probes. A pass with
        many vectors takes little longer than one with a few, so that there are as few steps as the
        condition number of M allows: about 1 + n t / (rank s), if what is left out spreads over as
        many eigenvalues as were captured; and more if eigenvalues below s were seen.
        """
        sketch_key, probe_key = split(key)
        rank = rank_from_columns(block.n, k)
        enough = math.sqrt(block.eps)  # the next column would not matter for any estimate
        found = preconditioner_from_columns(sketch_key, operator, rank, enough=enough)
        limits = jnp.array([limit for limit, _ in STEPS_FOR[:-1]], found.spread.dtype)
        wanted = jnp.sum(~(found.spread <= limits), dtype=jnp.int32)
        candidates = []
        for _, steps in STEPS_FOR:
            p = min(k, max(self._fewest(k), k // steps))
            candidates.append(Plan(rank, p, min(k // p, steps, block.n)))
        distinct = tuple(dict.fromkeys(candidates))  # small budgets have fewer
        which = jnp.array([distinct.index(each) for each in candidates], jnp.int32)[wanted]

        def outcome(chosen):
            run = self._outcome(probe_key, block, found.built, chosen, distinct)
            return finish(run._replace(spent=chosen.probes * chosen.steps, read=found.read))

        return _chosen(which, [partial(outcome, each) for each in distinct])

    def _adaptive(self, key, block, operator, k, finish):
        """The rule of three plans (see above)."""
        sketch_key, probe_key = split(key)
        three = plans(k, self._fewest(k))
        first, second, third = (each.rank for each in three)
        sketch = Sketch(sketch_key, operator, block, first, third)

        def extended(y, rank):
            y = sketch.extended(y, rank)
            return y, sketch.low_rank(y)

        low_rank = sketch.low_rank(sketch.first)
        ends = self._ends(low_rank, three[0], three, jnp.where(sketch.known, 1, 1.6))
        grows = (low_rank.left_out <= 0.84 * low_rank.left_out_by_half) | ends
        larger = partial(extended, sketch.first, second)
        larger_y, larger_rank = if_any(grows, larger, nothing_like(larger))
        ends = self._ends(larger_rank, three[1], three, 1)
        grows_again = grows & (_pays(low_rank, larger_rank, three) | ends)

        def outcome(chosen, make):
            built = sketch.built(make())
            return finish(self._outcome(probe_key, block, built, chosen, three))

        makes = (
            lambda: low_rank,
            lambda: larger_rank,
            lambda: extended(larger_y, third)[1],
        )
        which = grows.astype(jnp.int32) + grows_again
        outcomes = [partial(outcome, *pair) for pair in zip(three, makes, strict=True)]
        return _chosen(which, outcomes)

    def _ends(self, low_rank: LowRank, plan: Plan, three, doubt) -> Bool[Array, ""]:
        """Whether a rank beyond the end of a flat spectrum is within reach, which then captures all
        of it. If d equal eigenvalues are left out, the end is at rank + d; d errs by 2 / rank. (An
        unknown s is at first taken for half of the smallest Ritz value, and d is then about 1.6
        times too small: features + noise, k = 48 to 200.)
        """
        if self.for_inverse:  # 1 / x needs more steps than the third plan has
            return jnp.array(False)
        return plan.rank + doubt * low_rank.dimension <= 1.1 * three[2].rank

    def _outcome(self, key, block, built, chosen, plans) -> PreconditionedQuadrature:
        """The outcome of a plan with this preconditioner. The probes are on the sphere of radius
        sqrt(n), or R^{-1} omega with vectors omega of random signs.
        """
        rank, p, q = chosen
        sampler = RademacherSampler() if self.for_inverse else SphereSampler()
        most, signs = max(each.probes for each in plans), None
        probes = sampler.probes(key, block.n, most, block.dtype)[:, :p]  # the same for all plans
        if self.for_inverse:
            signs, probes = probes.real, built.factors.inverse_root(probes)
        krylov = lanczos(partial(built.factors.preconditioned, block.mm), probes, q, block.eps)
        return PreconditionedQuadrature(
            block=block,
            built=built,
            probes=probes,
            krylov=krylov,
            bounds=log_quadrature(krylov, built.floor, block.n, jnp.iscomplexobj(probes)),
            evidence=worse(built.evidence, krylov.evidence),
            spent=rank + p * q,
            plans=plans,
            signs=signs,
        )


def _pays(before: LowRank, low_rank: LowRank, three: Sequence[Plan]) -> Bool[Array, ""]:
    """Whether the third plan promises a smaller error than the second."""
    first, second, third = three
    # t (see above) falls like a power of the rank, or faster.
    ratio = low_rank.left_out / jnp.where(before.left_out > 0, before.left_out, 1)
    slope = jnp.log(jnp.clip(ratio, 1e-6, 1)) / math.log(second.rank / first.rank)
    relative = low_rank.left_out / low_rank.shift
    later = relative * (third.rank / second.rank) ** slope
    # Few steps are enough only for an M that is close to the identity.
    gain = (later / (1 + later)) * math.sqrt(second.probes / third.probes)
    return ((later < 1 / 3) & (gain < relative / (1 + relative))) | ~(low_rank.left_out > 0)


def _chosen(which: Int[Array, ""], outcomes: Sequence[Callable[[], Any]]) -> Any:
    """The outcome of this number. Under `vmap` those that some lane chooses are computed."""
    if len(outcomes) == 1:
        return outcomes[0]()
    found = nothing_like(outcomes[0])
    for number, outcome in enumerate(outcomes):
        found = if_any(which == number, outcome, found)
    return found


def policy_of(preconditioner: Any) -> BudgetPolicy:
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
    return BudgetPolicy(chosen, auto)

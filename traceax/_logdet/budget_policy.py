r"""How the budget of a log-determinant is spent: on rank, on probes, and on steps.

With a preconditioner P = R R^H (see `preconditioners`) and M = R^{-1} A R^{-H},

    log det A = log det P + tr log M,

The first term is exact. The second is estimated from p probes on the sphere, with q steps of
Lanczos' recurrence for each (see `_linalg.lanczos`, `log_quadrature`). The closer M is to the
identity, the smaller is the scatter, and the fewer steps are needed. The docstring of `logdet`
gives the rule that divides the budget.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, PRNGKeyArray

from .._core.estimate import status_of
from .._functions.funm import plan
from .._linalg.lanczos import Lanczos, lanczos
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import is_shifted_down
from .._probes.random import split
from .._probes.samplers import SphereSampler
from .._sketch.low_rank import BuiltPreconditioner, LowRankPlusIdentity
from .growing_sketch import GrowingSketch
from .log_quadrature import LogQuadrature, log_quadrature
from .preconditioners import AbstractPreconditioner, check_definite


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


def plans(k: int) -> tuple[Plan, Plan, Plan]:
    """The three plans of "auto": see `logdet`."""
    # Fewer than 16 columns rarely show whether a spectrum decays.
    first = plan_with(max(k // 6, min(16, k // 3)), math.isqrt(k) // 2, k)
    second = plan_with(2 * k // 3, k // 24, k)
    few = max(1, k // 60)
    return first, second, plan_with(k - 5 * few, few, k)


class PreconditionedQuadrature(NamedTuple):
    """The outcome of a budget: the preconditioner, the recurrences and their quadrature."""

    block: BlockOperator
    built: BuiltPreconditioner
    probes: Inexact[Array, "n p"]
    krylov: Lanczos
    bounds: LogQuadrature
    status: Array
    spent: int
    rank: int  # the largest of all plans
    columns: int  # of the weights, for the plan that has the most of them

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


Finish = Callable[[PreconditionedQuadrature], Any]


@final
class BudgetPolicy(eqx.Module):
    """How budgets are spent: with a given preconditioner, or by the rule of `logdet`."""

    preconditioner: AbstractPreconditioner | None
    auto: bool = eqx.field(static=True)
    wary: bool = eqx.field(default=False, static=True)  # long recurrences: see `logdet`

    def check(self, operator: lx.AbstractLinearOperator, name: str) -> None:
        """Raise a `ValueError` if no budget can be spent on this operator."""
        check_definite(operator, name)
        if self.preconditioner is not None:
            self.preconditioner.check(operator)

    def apply(self, key: PRNGKeyArray, operator, k: int, finish: Finish) -> Any:
        """Spend a budget.

        **Arguments:**

        - `key`: the random key.
        - `operator`: the operator.
        - `k`: the budget.
        - `finish`: a function of the outcome, a `PreconditionedQuadrature`. Its result must have
            the same shapes for every plan: see `rank` and `columns` of the outcome.

        **Returns:**

        What `finish` returns.
        """
        sketch_key, probe_key = split(key)
        block = BlockOperator(operator).linearised()
        if not self.auto or k < 24:
            return finish(self._fixed(sketch_key, probe_key, block, operator, k))
        return self._adaptive(sketch_key, probe_key, block, operator, k, finish)

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
            p, q = plan(k, None)
            return preconditioned_quadrature(
                probe_key, block, no_preconditioner(block), Plan(0, p, q), status_of()
            )
        built = self.preconditioner.of_rank(sketch_key, operator, rank)  # pyright: ignore[reportOptionalMemberAccess]
        chosen = self._steps(plan_with(rank, max(1, (k - rank) // 10), k), k)
        status = status_of(built.factors.mu, built.factors.eigenvalues)
        return preconditioned_quadrature(
            probe_key, block, built, chosen, jnp.maximum(status, built.status)
        )

    def _adaptive(self, sketch_key, probe_key, block, operator, k, finish):
        """The rule of `logdet`."""
        first, second, third = plans(k)
        columns = max(each.columns for each in (first, second, third))
        sketch = GrowingSketch(sketch_key, operator, block, first.rank, third.rank)
        low_rank, products = sketch.low_rank, sketch.products

        def end(y, low_rank, chosen):
            built = sketch.built(low_rank)
            status = jnp.maximum(status_of(y), built.status)
            done = preconditioned_quadrature(
                probe_key, block, built, self._steps(chosen, k), status
            )
            return finish(done._replace(rank=third.rank, columns=columns))

        y = sketch.first
        start = low_rank(y)

        def go_on(y):
            y = jnp.concatenate([y, products(first.rank, second.rank)], axis=1)
            middle = low_rank(y)

            def to_the_end(y):
                y = jnp.concatenate([y, products(second.rank, third.rank)], axis=1)
                return end(y, low_rank(y), third)

            # t (see `logdet`) falls like a power of the rank, or faster.
            ratio = middle.left_out / jnp.where(start.left_out > 0, start.left_out, 1)
            slope = jnp.log(jnp.clip(ratio, 1e-6, 1)) / math.log(second.rank / first.rank)
            left_out = middle.left_out / middle.shift
            later = left_out * (third.rank / second.rank) ** slope
            # Few steps are enough only for an M that is close to the identity.
            gain = (later / (1 + later)) * math.sqrt(second.probes / third.probes)
            pays = (later < 1 / 3) & (gain < left_out / (1 + left_out))
            done = lambda y: end(y, middle, second)  # noqa: E731
            return lax.cond(pays | ~(left_out > 0), to_the_end, done, y)

        decays = start.left_out <= 0.84 * start.left_out_by_half
        return lax.cond(decays, go_on, lambda y: end(y, start, first), y)


def _quadrature(
    block: BlockOperator, built: BuiltPreconditioner, probes: Array, steps: int
) -> tuple[Lanczos, LogQuadrature]:
    """Lanczos' recurrence with this preconditioner, and the quadrature of the logarithm."""
    mm = partial(built.factors.preconditioned, block.mm)
    krylov = lanczos(mm, probes, steps, block.eps)
    return krylov, log_quadrature(krylov, built.floor, block.n, jnp.iscomplexobj(probes))


def preconditioned_quadrature(
    key, block: BlockOperator, built: BuiltPreconditioner, chosen: Plan, status: Array
) -> PreconditionedQuadrature:
    """The outcome of a plan with this preconditioner."""
    # (Plans with different numbers of probes share none: the key draws all of them at once.)
    probes = SphereSampler().probes(key, block.n, chosen.probes, block.dtype)
    krylov, bounds = _quadrature(block, built, probes, chosen.steps)
    status = jnp.maximum(status, krylov.status)
    spent = chosen.rank + chosen.probes * krylov.alpha.shape[0]
    return PreconditionedQuadrature(
        block, built, probes, krylov, bounds, status, spent, chosen.rank, chosen.columns
    )


def for_derivative(run: PreconditionedQuadrature, finish: Finish) -> Any:
    """Finish with a quadrature that is good enough for a derivative.

    If Lanczos' recurrence ended too early, the derivative has a larger bias than the value. A third
    of the probes then takes three times as many steps, at the cost of up to `p (q + 1)` further
    matvecs. (RBF in 5 dimensions, noise 1e-3, n = 1000, k = 240: the derivative with respect to the
    length scale had a bias of 7 %, 4 standard deviations.)

    **Arguments:**

    - `run`: the outcome of the budget.
    - `finish`: as for `BudgetPolicy.apply`.

    **Returns:**

    What `finish` returns.
    """
    q, p = run.krylov.alpha.shape
    fewer = max(1, p // 3)
    steps = min(p * (q + 1) // fewer - 1, run.block.n)
    if fewer == p:
        return finish(run)

    def longer(run):
        probes = run.probes[:, :fewer]
        krylov, bounds = _quadrature(run.block, run.built, probes, steps)
        return finish(run._replace(probes=probes, krylov=krylov, bounds=bounds))

    # NaN, too, takes the short way.
    early = run.bounds.error > run.bounds.std_err / 4
    return lax.cond(early, lambda: longer(run), lambda: finish(run))


def policy_of(preconditioner: Any, operator: Any = None) -> BudgetPolicy:
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

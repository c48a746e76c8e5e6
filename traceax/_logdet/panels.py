r"""Panels of probes for tr f(M), M = R^{-1} A R^{-H} with a preconditioner P = R R^H, f the
logarithm or 1/x.

A probe z and j steps of Lanczos' recurrence give Gauss quadrature of z^H f(M) z (see
`_linalg.lanczos`, `log_quadrature`) and M^{-1} z. The first panel finds the number of steps: it has
few probes, and goes on until the quadrature error is below a third of the standard error that the
whole budget will leave,

    3 error <= sd sqrt(j / k),        k / j: the number of probes that k products are enough for,

or below a third of the tolerance. Later panels take as many steps, with as many probes as the rest
of the budget is enough for, until nothing is left, or the tolerance is met. Probes of a panel that
are not in use are 0, and not counted.

*Observations ride along.* Conjugate gradients for M x = R^{-1} y take a step with every step of
every panel, as further columns of its products, until their residuals are small enough; panels that
follow after the last probe have no others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.control_flow import if_any, nothing_like
from .._core.estimate import Evidence, scale_of, worse
from .._core.precision import einsum
from .._functions.funm import degrees_of_freedom
from .._linalg.arnoldi import Arnoldi, begun, in_own_unit, with_product
from .._linalg.lanczos import Lanczos, tridiagonal
from .._operators.block_operator import BlockOperator
from .._probes.random import numbered
from .._probes.samplers import RademacherSampler, SphereSampler
from .conjugate_gradients import Solve, cg_step, goes_on
from .factors import Factors
from .log_quadrature import Quadrature, quadrature_after, solutions_after

#: The most steps of a recurrence.
MOST_STEPS = 100


class Bases(NamedTuple):
    """What derivatives need, of N probes and k basis vectors; 0 where none is in use."""

    starts: Inexact[Array, "n N"]  # z, for each probe
    rows: Inexact[Array, "k n"]  # the bases of all probes
    core: Real[Array, "k k"]  # the derivatives of all quadratures by V^H M V, which are added up

    def added(self, panel: "Panel", sums: "Sums", _, z: Array, count: Array) -> "Bases":
        """The bases with those of a panel, whose rows are as many as its products."""
        room = len(self.rows)
        basis = panel.krylov.basis
        step = jnp.arange(basis.shape[1])
        probe = jnp.arange(len(basis))[:, None]
        used = (step < panel.steps) & (probe < count)
        at = jnp.where(used, sums.spent + step * count + probe, room)
        core = panel.found.core * len(z)
        return Bases(
            put(self.starts, z, sums.drawn),
            self.rows.at[at].set(basis, mode="drop"),
            self.core.at[at[:, :, None], at[:, None, :]].set(core, mode="drop"),
        )


class Solutions(NamedTuple):
    """What inverses need, for each of N probes; 0 for probes that are not in use."""

    signs: Real[Array, "n N"]  # omega, with z = R^{-1} omega
    starts: Inexact[Array, "n N"]
    solutions: Inexact[Array, "3 n N"]  # M^{-1} z, after q, q - d and q - 2d steps

    def added(self, panel: "Panel", sums: "Sums", omega: Array, z: Array, _) -> "Solutions":
        """The solutions with those of a panel."""
        found = solutions_after(panel.recurrences(), panel.steps, 3)
        found = (found * jnp.linalg.norm(z, axis=0)[:, None]).astype(z.dtype)
        solved = einsum("pqn,opq->onp", panel.krylov.basis, found)
        new = omega.real, z, solved
        return Solutions(*(put(x, y, sums.drawn) for x, y in zip(self, new, strict=True)))


def put(whole: Array, part: Array, at: Array) -> Array:
    """`whole` with the columns of `part` from column `at` on."""
    return lax.dynamic_update_slice_in_dim(whole, part, at, axis=-1)


class Sums(NamedTuple):
    """The sums over the probes of all panels so far; functions of M are relative to `centre`."""

    drawn: Int[Array, ""]  # probes
    spent: Int[Array, ""]  # products
    panels: Int[Array, ""]
    steps: Int[Array, ""]  # of the panels after the first
    centre: Real[Array, ""]
    unit: Real[Array, ""]
    moments: Real[Array, "4"]  # quadrature of the powers of f(M) - centre, over unit: see below
    error: Real[Array, ""]  # the mean quadrature error
    smallest: Real[Array, ""]  # Ritz value
    largest: Real[Array, ""]
    exhausted: Bool[Array, ""]
    evidence: Evidence
    kept: Any  # `Bases` or `Solutions`, if anything is
    solve: Any  # a `Solve`, if there is one


class Panel(NamedTuple):
    """The recurrences of a panel of p probes; [i] of a basis belongs to probe i."""

    krylov: Arnoldi  # in a unit of its own
    steps: Int[Array, ""]
    history: Real[Array, "q p"]  # Gauss quadrature after each number of steps
    found: Any  # `Quadrature`, once there is one
    ends: Bool[Array, ""]
    solve: Solve | None

    def recurrences(self) -> Lanczos:
        """The recurrences as a `Lanczos`, whose M is Hermitian."""
        return tridiagonal(in_own_unit(self.krylov))


class Sampling(NamedTuple):
    """What is sampled, and for how long."""

    block: BlockOperator
    factors: Factors
    floor: Real[Array, ""] | None  # a lower bound of the eigenvalues of M; None, NaN: unknown
    inverse: bool  # whether f is 1/x
    k: int  # the budget of the call
    left: Int[Array, ""]  # products
    width: int  # of a panel
    first: int  # the number of probes in the first panel
    allowed: Callable[[Array], Any] | None  # the error of tr f(M) that ends a call, by its value
    weights: bool  # whether a derivative is taken
    most_solve: int = 0  # the largest number of steps of the solve

    @property
    def steps(self) -> int:
        """The largest number of steps."""
        return max(1, min(self.k // self.first, self.block.n, MOST_STEPS))

    @property
    def probes(self) -> int:
        """The largest number of probes in all panels."""
        return max(self.first, self.k // 3)


def stepped(mm: Callable, panel: Panel, eps: float, most: int) -> Panel:
    """One step of all recurrences, and of the solve."""
    columns = panel.krylov.following.T
    if panel.solve is not None:
        columns = jnp.concatenate([columns, panel.solve.p], axis=1)
    products = mm(columns)
    p = len(panel.krylov.following)
    krylov = with_product(panel.krylov, panel.steps, products[:, :p], eps)
    solve = None if panel.solve is None else cg_step(panel.solve, products[:, p:], most)
    return panel._replace(krylov=krylov, steps=panel.steps + 1, solve=solve)


def one_panel(key: PRNGKeyArray, sampling: Sampling, sums: Sums) -> Sums:
    """The sums with those of one more panel of probes."""
    block = sampling.block
    factors = sampling.factors
    n = block.n
    pilot = sums.panels == 0
    left = sampling.left - sums.spent
    count = number_of_probes(sampling, sums)
    active = jnp.arange(sampling.width) < count
    drawn = (block.n, sampling.width, block.dtype)
    sampler = RademacherSampler() if sampling.inverse else SphereSampler()
    omega = jnp.where(active, sampler.probes(numbered(key, sums.panels), *drawn), 0)
    z = factors.inverse_root(omega) if sampling.inverse else omega
    norms = jnp.linalg.norm(z, axis=0)
    lengths = jnp.square(norms) / n
    real = norms.dtype

    def mm(x):
        return factors.preconditioned(block.mm, x)

    def assessed(panel: Panel) -> Panel:
        """The panel with its quadrature, and whether the pilot has gone on for long enough."""
        given = panel.recurrences(), panel.steps, panel.history
        quadrature = sampling.floor, lengths, sampling.inverse, sampling.weights
        found, history = quadrature_after(*given, *quadrature)
        sums_of_panel = with_moments(sampling, sums, found, lengths, count)
        sd, _ = std_err_of(sums_of_panel, block, sampling.inverse, one=True)
        aim = sd * jnp.sqrt(panel.steps / jnp.maximum(left, 1))
        if sampling.allowed is not None:
            aim = jnp.maximum(aim, sampling.allowed(n * found.mean) / 2)
        rounding = 4 * float(jnp.finfo(real).eps) * n * (jnp.sum(lengths) / count)
        small = 3 * n * found.error <= jnp.maximum(aim, rounding)
        if sampling.inverse:  # fewer steps do not show what they miss
            small &= panel.steps >= 4
        fits = (panel.steps + 1) * count <= left
        return panel._replace(found=found, history=history, ends=small | ~fits)

    def step(panel: Panel) -> Panel:
        panel = stepped(mm, panel, block.eps, sampling.most_solve)
        last = panel.steps >= jnp.where(pilot, sampling.steps, sums.steps)
        panel = if_any(pilot | last, lambda: assessed(panel), panel)
        return panel._replace(ends=last | (panel.ends & pilot))

    panel = Panel(
        krylov=begun(z, sampling.steps),
        steps=jnp.zeros((), jnp.int32),
        history=jnp.zeros((sampling.steps, sampling.width), real),
        found=None,
        ends=jnp.array(False),
        solve=sums.solve,
    )
    panel = panel._replace(found=nothing_like(lambda: assessed(panel).found))
    panel = lax.while_loop(lambda panel: ~panel.ends, step, panel)
    return added(sampling, sums, panel, omega, z, norms, count)


def number_of_probes(sampling: Sampling, sums: Sums) -> Int[Array, ""]:
    """The number of probes of the next panel; 0 if there is none."""
    left = sampling.left - sums.spent
    # Logarithms want depth first, inverses several probes, whose scatter alone tells their error.
    few = jnp.maximum(jnp.minimum(sampling.first, left // (4 if sampling.inverse else 6)), 1)
    rest = jnp.minimum(left // jnp.maximum(sums.steps, 1), sampling.probes - sums.drawn)
    return jnp.where(sums.panels == 0, few, jnp.clip(rest, 0, sampling.width))


def with_moments(sampling: Sampling, sums: Sums, found: Quadrature, lengths, count) -> Sums:
    """The sums with the moments of a panel: of f(M) - centre with the masses of quadrature, or for
    1/x of the samples, whose scatter gives their error.
    """
    active = lengths[:, None] > 0
    shares = jnp.where(active, found.masses, 0)
    values = found.samples[:, None] if sampling.inverse else found.values
    masses = active.astype(lengths.dtype) if sampling.inverse else shares
    initial = sums.panels == 0
    centre = jnp.where(initial, found.mean, sums.centre)
    away = jnp.where(masses > 0, values - centre, 0)
    unit = jnp.where(initial, scale_of(away), sums.unit)
    away = away / unit
    higher = [jnp.sum(masses * away**power) for power in (2, 3, 4)]
    if sampling.inverse:  # how many eigenvalues dominate, the nodes tell
        higher[1:] = [jnp.sum(shares * (found.values - 1) ** power) for power in (2, 4)]
    samples = jnp.where(lengths > 0, found.samples - centre, 0)
    return sums._replace(
        drawn=sums.drawn + count,
        centre=centre,
        unit=unit,
        moments=sums.moments + jnp.stack([jnp.sum(samples) / unit, *higher]),
    )


def added(sampling: Sampling, sums: Sums, panel: Panel, omega, z, norms, count) -> Sums:
    """The sums with the moments, errors and bases of a panel."""
    found = panel.found
    lengths = jnp.square(norms) / len(z)
    krylov = panel.recurrences()
    # Products with A have rounding errors in the unit of P.
    evidence = krylov.evidence(sampling.block.eps, sampling.factors.top)
    # The error of a logarithm is known after all numbers of steps alone, and so in the first panel.
    error = jnp.where(sums.panels == 0, found.error, sums.error)
    if sampling.inverse:
        total = sums.drawn * sums.error + count * found.error
        error = total / (sums.drawn + count)
    kept = sums.kept
    if kept is not None:
        kept = kept.added(panel, sums, omega, z, count)
    return with_moments(sampling, sums, found, lengths, count)._replace(
        spent=sums.spent + panel.steps * count,
        panels=sums.panels + 1,
        steps=panel.steps,
        error=error,
        smallest=jnp.minimum(sums.smallest, found.smallest),
        largest=jnp.maximum(sums.largest, found.largest),
        exhausted=sums.exhausted & found.exhausted,
        evidence=worse(sums.evidence, evidence),
        solve=panel.solve,
        kept=kept,
    )


def sampled(key: PRNGKeyArray, sampling: Sampling, solve: Solve | None) -> Sums:
    """The sums over all panels: see above."""
    block = sampling.block
    real = jnp.finfo(block.dtype).dtype
    zero = jnp.zeros((), real)
    none = jnp.zeros((), jnp.int32)
    room = sampling.probes + sampling.width
    starts = jnp.zeros((block.n, room), block.dtype)
    kept = None
    if sampling.inverse:
        kept = Solutions(starts.real, starts, jnp.zeros((3, *starts.shape), block.dtype))
    elif sampling.weights:
        rows = jnp.zeros((sampling.k, block.n), block.dtype)
        kept = Bases(starts, rows, jnp.zeros((sampling.k, sampling.k), real))
    sums = Sums(
        drawn=none,
        spent=none,
        panels=none,
        steps=none,
        centre=zero,
        unit=zero + 1,
        moments=jnp.zeros(4, real),
        error=zero,
        smallest=zero + jnp.inf,
        largest=zero,
        exhausted=jnp.array(True),
        evidence=Evidence(),
        kept=kept,
        solve=solve,
    )

    def more(sums: Sums) -> Array:
        wanted = number_of_probes(sampling, sums) > 0
        solving = solve is not None and jnp.any(goes_on(sums.solve, sampling.most_solve))
        if sampling.allowed is not None:
            std_err, _ = std_err_of(sums, block, sampling.inverse)
            limit = sampling.allowed(mean_of(sums, block.n)[0])
            wanted &= ~(2 * std_err <= limit)
        return (wanted | solving | (sums.panels == 0)) & ~sums.evidence.fails

    return lax.while_loop(more, lambda sums: one_panel(key, sampling, sums), sums)


def mean_of(sums: Sums, n: int) -> tuple[Array, Array]:
    """Returns (the estimate of tr f(M), or for 1/x of tr B of `inverse`; quadrature error)."""
    mean = sums.centre + sums.unit * (sums.moments[0] / sums.drawn)
    return n * mean, n * sums.error


def std_err_of(
    sums: Sums, block: BlockOperator, inverse: bool = False, *, one: bool = False
) -> tuple[Array, Array]:
    """Returns (standard error, degrees of freedom), of the mean or (`one`) of a single probe: for
    the logarithm as of probes on the sphere (see `_functions.funm`), for 1/x from the scatter.
    """
    n = block.n
    count = jnp.maximum(sums.drawn, 1).astype(sums.unit.dtype)
    p = jnp.ones_like(count) if one else count
    m, m2, m3, m4 = sums.moments / count
    spread = jnp.maximum(m2 - m**2, 0)
    if inverse:
        others = jnp.maximum(count - 1, 1)
        dof = degrees_of_freedom(m3, m4, n * count)
        return n * sums.unit * jnp.sqrt(spread * (count / others) / p), dof
    complex_ = jnp.issubdtype(block.dtype, jnp.complexfloating)
    c = n / (n + 1) if complex_ else 2 * n / (n + 2)
    fourth = m4 - 4 * m * m3 + 6 * m**2 * m2 - 3 * m**4
    dof = degrees_of_freedom(spread, fourth, n * count)
    variance = n * c * spread / p / (1 - c / (n * p)) * (1 + 1 / dof)
    return sums.unit * jnp.sqrt(variance), dof

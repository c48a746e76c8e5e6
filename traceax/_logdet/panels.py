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

*A known eigenvector* u of M, of an eigenvalue mu far below the others, would bias the derivative: a
probe hardly sees u, and 1 / mu is large. Probes of the logarithm are projected, z - u u^H z, and

    log det M = log mu + tr_{n-1} log M,        G = u u^H / mu + (the mean of their L(M)[z z^H]).

u is 1, the null vector of Laplacians and of intrinsic fields, or for P from entries the Ritz vector
to which a few steps from 1 lead (`run`).

*Observations ride along.* Conjugate gradients for M x = R^{-1} y take a step with every step of
every panel, as further columns of its products, until their residuals are small enough; panels that
follow after the last probe have no others.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.control_flow import if_any, nothing_like
from .._core.estimate import Evidence, worse
from .._core.precision import adjoint, einsum, matmul, square_of
from .._linalg.arnoldi import Arnoldi, begun, in_own_unit, with_product
from .._linalg.conjugate_gradients import Solve, cg_step, goes_on
from .._linalg.lanczos import tridiagonal
from .._operators.block_operator import BlockOperator
from .._probes.samplers import RademacherSampler, SphereSampler
from .factors import Factors
from .log_quadrature import Probes, quadrature_after, sum_of_inverses, sum_of_logarithms

#: The most steps of a recurrence.
MOST_STEPS = 100


class Bases(NamedTuple):
    """What derivatives need, of N probes and k basis vectors; 0 where none is in use."""

    starts: Inexact[Array, "n N"]  # omega, for each probe
    rows: Inexact[Array, "k n"]  # the bases of all probes
    core: Real[Array, "k k"]  # the derivatives of all quadratures by V^H M V, which are added up

    def added(self, panel: "Panel", sums: "Sums", omega: Array, _, count: Array) -> "Bases":
        """The bases with those of a panel, whose rows are as many as its products."""
        room = len(self.rows)
        basis = panel.krylov.basis
        step = jnp.arange(basis.shape[1])
        probe = jnp.arange(len(basis))[:, None]
        used = (step < panel.steps) & (probe < count)
        places = jnp.where(used, sums.spent + step * count + probe, room)
        return Bases(
            put(self.starts, omega, sums.drawn),
            self.rows.at[places].set(basis, mode="drop"),
            self.core.at[places[:, :, None], places[:, None, :]].set(panel.kept, mode="drop"),
        )


class Solutions(NamedTuple):
    """What inverses need, for each of N probes; 0 for probes that are not in use."""

    signs: Real[Array, "n N"]  # omega, with z = R^{-1} omega
    starts: Inexact[Array, "n N"]
    solutions: Inexact[Array, "3 n N"]  # M^{-1} z, after q, q - d and q - 2d steps

    def added(self, panel: "Panel", sums: "Sums", omega: Array, z: Array, _) -> "Solutions":
        """The solutions with those of a panel."""
        found = (panel.kept * jnp.linalg.norm(z, axis=0)[:, None]).astype(z.dtype)
        solved = einsum("pqn,opq->onp", panel.krylov.basis, found)
        new = omega.real, z, solved
        return Solutions(*(put(x, y, sums.drawn) for x, y in zip(self, new, strict=True)))


def put(whole: Array, part: Array, start: Array, axis: int = -1) -> Array:
    """`whole` with the columns (rows) of `part` from `start` on."""
    return lax.dynamic_update_slice_in_dim(whole, part, start, axis=axis)


class Sums(NamedTuple):
    """What all panels so far have shown."""

    drawn: Int[Array, ""]  # probes
    spent: Int[Array, ""]  # products
    panels: Int[Array, ""]
    steps: Int[Array, ""]  # of the panels after the first
    probes: Probes
    error: Real[Array, ""]  # the mean quadrature error of z^H f(M) z / n
    evidence: Evidence
    vectors: Any  # `Bases` or `Solutions`, if anything is
    solve: Solve


class Panel(NamedTuple):
    """The recurrences of a panel of p probes; [i] of a basis belongs to probe i."""

    krylov: Arnoldi  # in a unit of its own
    steps: Int[Array, ""]
    solve: Solve
    ends: Bool[Array, ""]
    # Once there is a quadrature:
    probes: Any = None
    error: Any = None
    kept: Any = None  # what `Bases` or `Solutions` keep of it
    evidence: Any = None


class Sampling(NamedTuple):
    """What is sampled, and for how long."""

    block: BlockOperator
    factors: Factors
    # A lower bound of the eigenvalues of M (of 1/x, else one of them); None or 0 if unknown.
    floor: Real[Array, ""] | None
    inverse: bool  # whether f is 1/x
    eigenpair: tuple[Array, Array] | None  # the known eigenvector of M, or 0; its eigenvalue, or 1
    k: int  # the budget of the call
    left: Int[Array, ""]  # products
    width: int  # of a panel
    first: int  # the number of probes in the first panel
    allowed: Callable[[Array], Any] | None  # the error of tr f(M) that ends a call, by its value
    weights: bool  # whether a derivative is taken
    # The mean of z^H M z / |z|^2 over a sketch that no rank uses, and their number.
    quotients: tuple[Array, Array] | None = None

    @property
    def steps(self) -> int:
        """The largest number of steps."""
        return max(1, min(self.k // self.first, self.block.n, MOST_STEPS))

    @property
    def most_probes(self) -> int:
        """The largest number of probes in all panels."""
        return max(self.first, self.k // 3)

    @property
    def size(self) -> Any:
        """The dimension of the space of the probes, without the known eigenvector."""
        n = self.block.n
        return n if self.eigenpair is None else n - jnp.sum(square_of(self.eigenpair[0]))

    def sum_over(self, probes: Probes) -> tuple[Array, Array, Array]:
        """Returns (tr log M, or for 1/x tr B of `inverse`; standard error, degrees of freedom)."""
        if self.inverse:
            return sum_of_inverses(probes, self.block.n)
        is_complex = jnp.issubdtype(self.block.dtype, jnp.complexfloating)
        mu = 1.0 if self.eigenpair is None else self.eigenpair[1]
        value, std_err, dof = sum_of_logarithms(probes, self.size, is_complex, self.quotients)
        return value + jnp.log(mu), std_err, dof

    def number_of_probes(self, sums: Sums) -> Int[Array, ""]:
        """The number of probes of the next panel; 0 if there is none."""
        left = self.left - sums.spent
        # Logarithms want depth first, inverses several probes, whose scatter alone tells their
        # error.
        few = jnp.maximum(jnp.minimum(self.first, left // (4 if self.inverse else 6)), 1)
        rest = jnp.minimum(left // jnp.maximum(sums.steps, 1), self.most_probes - sums.drawn)
        return jnp.where(sums.panels == 0, few, jnp.clip(rest, 0, self.width))


def stepped(sampling: Sampling, panel: Panel) -> Panel:
    """One step of all recurrences, and of the solve."""
    block = sampling.block
    columns = jnp.concatenate([panel.krylov.following.T, panel.solve.p], axis=1)
    products = sampling.factors.preconditioned(block.mm, columns)
    p = len(panel.krylov.following)
    krylov = with_product(panel.krylov, panel.steps, products[:, :p], block.eps)
    solve = cg_step(panel.solve, products[:, p:])
    return panel._replace(krylov=krylov, steps=panel.steps + 1, solve=solve)


def assessed(sampling: Sampling, panel: Panel, left: Array, lengths: Array) -> Panel:
    """The panel with its quadrature, and whether it has gone on for long enough, with so many
    products `left`.
    """
    krylov = tridiagonal(in_own_unit(panel.krylov))
    given = krylov, panel.steps, lengths, sampling.floor
    apart = float(sampling.factors.has_low_rank)
    flags = {"inverse": sampling.inverse, "weights": sampling.weights, "apart": apart}
    probes, (error, whole_error), kept = quadrature_after(*given, **flags)
    n = sampling.block.n
    value, std_err, _ = sampling.sum_over(probes)
    # The standard error of one probe is `std_err` sqrt(number).
    aim = std_err * jnp.sqrt(probes.number * panel.steps / jnp.maximum(left, 1))
    if sampling.allowed is not None:
        aim = jnp.maximum(aim, sampling.allowed(value) / 2)
    size = n * jnp.sum(lengths) / probes.number
    size = jnp.abs(value) if sampling.inverse and not apart else size
    rounding = 4 * float(jnp.finfo(lengths.dtype).eps) * size
    enough = 3 * n * error <= jnp.maximum(aim, rounding)
    if sampling.inverse:  # fewer steps do not show what they miss
        enough &= panel.steps >= 4
    fits = (panel.steps + 1) * probes.number <= left
    # In M, products with A have rounding errors relative to `top`: see `Factors`.
    evidence = krylov.evidence(sampling.block.eps, sampling.factors.top)
    found = {"probes": probes, "error": whole_error, "kept": kept, "evidence": evidence}
    return panel._replace(ends=enough | ~fits, **found)


def one_panel(keys: PRNGKeyArray, sampling: Sampling, sums: Sums) -> Sums:
    """The sums with those of one more panel of probes."""
    n = sampling.block.n
    pilot = sums.panels == 0
    left = sampling.left - sums.spent
    count = sampling.number_of_probes(sums)
    active = jnp.arange(sampling.width) < count
    sampler = RademacherSampler() if sampling.inverse else SphereSampler()
    omega = sampler.probes(keys[sums.panels], n, sampling.width, sampling.block.dtype)
    omega = jnp.where(active, omega, 0)
    z = sampling.factors.inverse_root(omega) if sampling.inverse else omega
    if sampling.eigenpair is not None:
        u = sampling.eigenpair[0][:, None].astype(z.dtype)
        z = z - matmul(u, matmul(adjoint(u), z))
    lengths = jnp.square(jnp.linalg.norm(z, axis=0)) / n

    def step(panel: Panel) -> Panel:
        panel = stepped(sampling, panel)
        last = panel.steps >= jnp.where(pilot, sampling.steps, sums.steps)
        last |= (count == 0) & ~jnp.any(goes_on(panel.solve))
        now = partial(assessed, sampling, panel, left, lengths)
        panel = if_any(pilot | last, now, panel)
        return panel._replace(ends=last | (panel.ends & pilot))

    panel = Panel(
        krylov=begun(z, sampling.steps),
        steps=jnp.zeros((), jnp.int32),
        solve=sums.solve,
        ends=jnp.array(False),
    )
    none = nothing_like(lambda: assessed(sampling, panel, left, lengths))
    panel = none._replace(krylov=panel.krylov, solve=panel.solve)
    panel = lax.while_loop(lambda panel: ~panel.ends, step, panel)
    return added(sampling, sums, panel, omega, z, count)


def added(sampling: Sampling, sums: Sums, panel: Panel, omega, z, count) -> Sums:
    """The sums with the quadrature, errors and bases of a panel."""
    # The number of steps fits the first panel: errors of single probes of others scatter widely.
    error = jnp.where(sums.panels == 0, panel.error, sums.error)
    if sampling.inverse:
        total = sums.drawn * sums.error + count * panel.error
        error = total / (sums.drawn + count)
    vectors = sums.vectors
    if vectors is not None:
        vectors = vectors.added(panel, sums, omega, z, count)
    return Sums(
        drawn=sums.drawn + count,
        spent=sums.spent + panel.steps * count,
        panels=sums.panels + 1,
        steps=jnp.where(sums.panels == 0, panel.steps, sums.steps),
        probes=jtu.tree_map(partial(put, start=sums.drawn, axis=0), sums.probes, panel.probes),
        error=error,
        evidence=worse(sums.evidence, panel.evidence),
        vectors=vectors,
        solve=panel.solve,
    )


def sampled(keys: PRNGKeyArray, sampling: Sampling, solve: Solve) -> Sums:
    """The sums over all panels, at most one for each key: see above."""
    block = sampling.block
    real = jnp.finfo(block.dtype).dtype
    none = jnp.zeros((), jnp.int32)
    room = sampling.most_probes + sampling.width
    starts = jnp.zeros((block.n, room), block.dtype)
    vectors = None
    if sampling.inverse:
        vectors = Solutions(starts.real, starts, jnp.zeros((3, *starts.shape), block.dtype))
    elif sampling.weights:
        rows = jnp.zeros((sampling.k, block.n), block.dtype)
        vectors = Bases(starts, rows, jnp.zeros((sampling.k, sampling.k), real))
    nodes = jnp.zeros((room, sampling.steps), real)
    probes = Probes(nodes[:, 0], nodes[:, 0], nodes, nodes, jnp.ones(room, bool), nodes[:, 0])
    zero = jnp.zeros((), real)
    sums = Sums(none, none, none, none, probes, zero, Evidence(), vectors, solve)

    def more(sums: Sums) -> Array:
        wanted = sampling.number_of_probes(sums) > 0
        if sampling.allowed is not None:
            value, std_err, _ = sampling.sum_over(sums.probes)
            wanted &= ~(2 * std_err <= sampling.allowed(value))
        wanted |= jnp.any(goes_on(sums.solve)) | (sums.panels == 0)
        return wanted & ~sums.evidence.fails

    return lax.while_loop(more, lambda sums: one_panel(keys, sampling, sums), sums)

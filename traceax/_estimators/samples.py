r"""Independent samples of what a low-rank part leaves of an operator, for calls with a tolerance.

A low-rank part is *prepared* from a sketch of r columns: Q Q^H A with an orthonormal basis Q of the
range (r products for the sketch, r for A Q or A^H Q), or for semidefinite operators a Nystrom
approximation F F^H (r products). Its trace, or diagonal, is known. Given it, samples of the rest
are independent and unbiased,

    range, trace:      c g^H A g,  g = (I - Q Q^H) omega, c = (n - r) / ||g||^2 if resphered
    range, diagonal:   conj(omega) o (I - Q Q^H) A omega
    Nystrom:           conj(omega) o (A - F F^H) omega, added up for a trace
    r = 0:             conj(omega) o A omega, added up for a trace (Hutchinson's samples).

*The least variance.* Few samples cannot tell their variance: a panel of them may agree by chance.
But the vectors behind each sample say much more. Rows of a real symmetric B with random signs have
the variances sum_j B_ij^2, of which those of a sum over rows are twice the sum; with probes on the
sphere the variance of omega^H B omega is 2 (||B||_F^2 - tr(B)^2 / n) up to O(1 / n). Half of that
is taken as the least variance of a sample, since B need not be symmetric.
"""

import abc
import math
from typing import Any, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
from equinox import AbstractVar
from jax import lax
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.estimate import Estimate, Evidence, evidence_of, safe_norm, scale_of
from .._linalg.factorisations import divide_by_upper, qr
from .._operators.block_operator import BlockOperator
from .._probes.samplers import AbstractSampler, RademacherSampler
from .._sketch.leave_one_out import column_dots, resphering, scaled, square_norms, square_of
from .._sketch.nystrom import core_of, shifted_cholesky
from .._sketch.ranges import captured_diagonal, range_basis, residual_products
from .exact import exact
from .rows import Rows, added

#: The number of samples that are drawn at once.
PANEL = 8

#: The numbers of columns of a sketch, one of which is prepared.
SIZES = (0, 16, 64, 256)


class Moments(NamedTuple):
    """The number of samples so far, their mean, and the root of the sum of squared deviations."""

    number: Real[Array, ""]
    mean: Inexact[Array, "..."]
    spread: Real[Array, "..."]

    def std_err(self) -> Real[Array, "..."]:
        """The standard error of the mean; inf for a single sample."""
        pairs = self.number * jnp.maximum(self.number - 1, 1)
        return jnp.where(self.number > 1, self.spread / jnp.sqrt(pairs), jnp.inf)


def no_samples(shape: tuple[int, ...], dtype: Any) -> Moments:
    """The moments to begin with."""
    mean = jnp.zeros(shape, dtype)
    return Moments(jnp.zeros((), mean.real.dtype), mean, mean.real)


def merged(moments: Moments, samples: Inexact[Array, "... m"]) -> Moments:
    """The moments with m more samples, by Chan's update."""
    count, mean, spread = moments
    m = samples.shape[-1]
    # Without a barrier, XLA adds up all m n terms of all samples in one reduction, and rounding
    # errors grow with m n.
    samples = lax.optimization_barrier(samples)
    block_mean = jnp.mean(samples, axis=-1)
    shift = block_mean - mean
    total = count + m
    between = jnp.abs(shift) * jnp.sqrt(count * m / total)
    spread = jnp.hypot(jnp.hypot(spread, safe_norm(samples - block_mean[..., None])), between)
    return Moments(total, mean + shift * (m / total), spread)


class Prepared(NamedTuple):
    """A low-rank part, by its left factor (Q or F) and its right one (A^H Q, A Q or F)."""

    left: Inexact[Array, "n r"]
    right: Inexact[Array, "n r"]
    value: Inexact[Array, "..."]  # its trace, or sums of entries of its diagonal
    size: Real[Array, "..."]  # its norm, or those of its rows
    basis: Inexact[Array, "n r"]  # Q, which the weights hold fixed
    evidence: Evidence


class Panel(NamedTuple):
    """Samples, the least standard deviation of one, and the norm of what they were made from; for
    functions of matrices also the products of a sample and a quadrature error.
    """

    samples: Inexact[Array, "... m"]
    least_deviation: Real[Array, "..."]
    size: Real[Array, "..."]
    evidence: Evidence
    steps: Array | int = 1  # the products that each took
    bias: Array | float = 0.0  # the error that all share


class AbstractSampling(eqx.Module):
    """What a call with a tolerance prepares (a `Prepared`, or an object with at least `value`,
    `size`, `basis` and `evidence`), and which samples it draws.
    """

    rows: AbstractVar[Rows | None]  # the entries of a diagonal that are wanted; None for traces
    sampler: AbstractVar[AbstractSampler]
    sizes: AbstractVar[tuple[int, ...]]  # of what may be prepared, the smallest first

    #: The number of samples that are drawn at once.
    panel = PANEL

    #: Whether samples have an error that all share, as functions of a matrix do.
    has_bias = False

    @abc.abstractmethod
    def products(self, size: int) -> int:
        """The number of products that a preparation takes."""

    @abc.abstractmethod
    def prepare(self, key: PRNGKeyArray, block: BlockOperator, size: int, weights: bool) -> Any:
        """The low-rank part from a sketch of `size` columns; its basis too, if `weights`."""

    @abc.abstractmethod
    def draw(self, key, block: BlockOperator, prepared, count: int, steps: Any = 0) -> Panel:
        """`count` samples of the rest, of as many products as in the last panel; 0 at first."""

    def contracted(self, key, block: BlockOperator, prepared, count: int, steps: Any = 0) -> Array:
        """The mean of the samples of a panel as a function of A, with the basis held fixed."""
        del steps
        return jnp.mean(_range_panel(self, key, block, prepared, count).samples, axis=-1)

    def captured(self, block: BlockOperator, basis: Inexact[Array, "n r"]) -> Any:
        """Q Q^H A for a basis Q, as a function of A."""
        return _captured(self.rows, block, basis)

    def exact(self, block: BlockOperator) -> tuple[Estimate, Any]:
        """The exact value and its weights, for the last resort."""
        return exact(block, self.rows)

    def exactly_contracted(self, block: BlockOperator) -> Inexact[Array, "..."]:
        """The exact value as a function of A."""
        return self.exact(block)[1].contract(block)


def norms_of(rows: Rows | None, block: Inexact[Array, "n m"]) -> Real[Array, "..."]:
    """The norm of a block, or those of its rows."""
    return safe_norm(block.reshape(-1)) if rows is None else rows.norms(block)


def _captured(rows: Rows | None, block: BlockOperator, q: Inexact[Array, "n r"]) -> Prepared:
    if q.shape[1] == 0:
        value = added(rows, jnp.zeros(block.n, block.dtype))
        return Prepared(q, q, value, value.real, q, Evidence())
    if rows is None:
        z = block.mm(q)
        value = jnp.sum(jnp.conj(q) * z)
    else:
        z = block.adjoint_mm(q)
        value = rows.of_vector(captured_diagonal(q, z))
    return Prepared(q, z, value, norms_of(rows, z), q, evidence_of(z))


def _one_sided_panel(
    rows: Rows | None, omega: Inexact[Array, "n m"], products: Inexact[Array, "n m"]
) -> Panel:
    """The samples conj(omega) o products, whose rows have independent variances."""
    entries = jnp.conj(omega) * products
    deviations = entries - jnp.mean(entries, axis=1, keepdims=True)
    deviation = safe_norm(deviations) / math.sqrt(max(omega.shape[1] - 1, 1))
    size = safe_norm(products) / math.sqrt(omega.shape[1])
    return Panel(
        samples=jnp.sum(entries, axis=0) if rows is None else rows(entries),
        least_deviation=norms_of(rows, deviation[:, None]),
        size=norms_of(rows, size[:, None]),
        evidence=evidence_of(entries),
    )


def _form_panel(
    forms: Inexact[Array, " m"],
    factor: Real[Array, " m"] | float,
    images: Inexact[Array, "n m"],
    rest: Inexact[Array, "n m"],
    dimension: int,
) -> Panel:
    """The samples c g^H B g, from the images B g and what B is in a space of this dimension."""
    scale = scale_of(rest)
    variance = jnp.mean(square_norms(rest / scale) - square_of(forms / scale) / dimension)
    size = safe_norm(images.reshape(-1)) / math.sqrt(forms.shape[0])
    deviation = scale * jnp.sqrt(jnp.maximum(variance, 0))
    return Panel(factor * forms, deviation, size, evidence_of(forms))


def _range_panel(
    sampling: Any, key: PRNGKeyArray, block: BlockOperator, prepared: Prepared, count: int
) -> Panel:
    rows = sampling.rows
    q = prepared.left
    n, r = q.shape
    if r == 0:
        omega = sampling.plain_sampler.probes(key, n, count, block.dtype)
        return _one_sided_panel(rows, omega, block.mm(omega))
    omega = sampling.sampler.probes(key, n, count, block.dtype)
    if rows is not None:
        products = residual_products(q, omega, block.mm(omega), prepared.right)
        return _one_sided_panel(rows, omega, products)
    g = residual_products(q, omega, omega, q)
    images = block.mm(g)
    factor = resphering(float(n - r), square_norms(g), sampling.resphere)  # c
    rest = residual_products(q, images, images, q)
    return _form_panel(column_dots(g, images), factor, images, rest, n - r)


@final
class RangeSampling(AbstractSampling):
    """Samples of (I - Q Q^H) A, as Hutch++ and Diag++ draw them."""

    rows: Rows | None
    sampler: AbstractSampler
    resphere: bool = eqx.field(static=True)
    sizes: tuple[int, ...] = eqx.field(default=SIZES, static=True)

    @property
    def plain_sampler(self) -> AbstractSampler:
        """The probes without a basis: random signs see no diagonal."""
        return self.sampler if self.sizes == (0,) else RademacherSampler()

    def products(self, size):
        """See `AbstractSampling`."""
        return 2 * size

    def prepare(self, key, block, size, weights):
        """See `AbstractSampling`."""
        omega = RademacherSampler().probes(key, block.n, size, block.dtype)
        return _captured(self.rows, block, range_basis(block, omega))

    def draw(self, key, block, prepared, count, steps=0):
        """See `AbstractSampling`."""
        return _range_panel(self, key, block, prepared, count)


@final
class NystromSampling(AbstractSampling):
    """Samples of A - F F^H, for a semidefinite operator. (They are unbiased for any F.)"""

    rows: Rows | None
    sampler: AbstractSampler
    sign: int | Int[Array, ""]  # of the operator
    sizes: tuple[int, ...] = eqx.field(default=SIZES, static=True)

    #: See `RangeSampling`.
    plain_sampler = RademacherSampler()

    @property
    def resphere(self) -> bool:
        """Whether the weights renormalise residual probes."""
        return self.sampler.rotation_invariant

    def products(self, size):
        """See `AbstractSampling`."""
        return size

    def prepare(self, key, block, size, weights):
        """See `AbstractSampling`."""
        p, _ = qr(RademacherSampler().probes(key, block.n, size, block.dtype))
        sketch = scaled(self.sign * block.mm(p))
        core, _, least, limit, skew = core_of(p, sketch, block.eps)
        nu, factor = shifted_cholesky(core, least)
        shifted = sketch.numbers + nu * p
        f = jnp.sqrt(sketch.size) * divide_by_upper(shifted, factor)
        value = added(self.rows, jnp.sum(square_of(f), axis=1))
        return Prepared(
            left=f,
            right=self.sign * f,
            value=(self.sign * value).astype(block.dtype),
            size=norms_of(self.rows, sketch.size * sketch.numbers),
            basis=qr(shifted)[0] if weights else f,
            evidence=evidence_of(sketch.square, skew=skew, negative=nu / limit),
        )

    def draw(self, key, block, prepared, count, steps=0):
        """See `AbstractSampling`."""
        n, r = prepared.left.shape
        if r == 0:
            return _range_panel(self, key, block, prepared, count)
        omega = self.sampler.probes(key, n, count, block.dtype)
        images = residual_products(prepared.left, omega, block.mm(omega), prepared.right)
        if self.rows is None and self.sampler.rotation_invariant:
            return _form_panel(column_dots(omega, images), 1.0, images, images, n)
        return _one_sided_panel(self.rows, omega, images)

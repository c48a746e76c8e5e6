"""The Girard-Hutchinson estimator, of traces and of diagonals."""

from collections.abc import Callable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PRNGKeyArray

from .._core.estimate import Estimate, as_value, rounding_of
from .._operators.block_operator import APART_LIMIT, BlockOperator, block_width
from .._probes.random import split
from .._probes.samplers import AbstractSampler, RademacherSampler, as_sampler
from .._sketch.weights import AbstractWeights
from .estimator import AbstractTraceEstimator
from .rows import Rows
from .tolerance import Moments, RangeSampling, merged, no_samples


@final
class MeanOverProbes(AbstractWeights):
    """`G = Omega Omega^H / k`; for entries of the diagonal those of `A G`.

    Probes are drawn from the key block by block: forward and reverse mode keep one block at most.
    """

    key: PRNGKeyArray
    sampler: AbstractSampler
    rows: Rows | None
    k: int = eqx.field(static=True)
    width: int = eqx.field(static=True)

    def fold(self, block: BlockOperator, add: Callable, parts: list[Any]) -> list[Any]:
        """The parts after `add(part, samples)` for all blocks of probes."""

        def step(parts, key, m):
            omega = self.sampler.probes_by_leaf(key, block.shapes, m, block.dtype)
            samples = samples_of(block, self.rows, omega)
            return [add(*pair) for pair in zip(parts, samples, strict=True)]

        whole, rest = divmod(self.k, self.width)
        if whole == 1 and rest == 0:
            return step(parts, self.key, self.k)
        keys = split(self.key, whole + 1)
        # Without the checkpoint, reverse mode would store each block's probes.
        one_block = jax.checkpoint(lambda c, key: step(c, key, self.width), prevent_cse=False)
        parts, _ = lax.scan(lambda c, key: (one_block(c, key), None), parts, keys[:whole])
        return step(parts, keys[whole], rest) if rest else parts

    def contract(self, block):
        """See `AbstractWeights`."""
        zeros = [moments.mean for moments in none_of(block, self.rows)]
        totals = self.fold(block, lambda total, x: total + jnp.sum(x, axis=-1), zeros)
        return as_value([_flat(total, self.rows) / self.k for total in totals])


def none_of(block: BlockOperator, rows: Rows | None) -> list[Moments]:
    """The moments to begin with: one for the trace, or leaf by leaf."""
    if rows is None:
        return [no_samples((), block.dtype)]
    zeros = [jnp.zeros((*shape, 1), block.dtype) for shape in block.shapes]
    return [no_samples(x.shape[:-1], block.dtype) for x in rows.by_leaf(zeros)]


def samples_of(block: BlockOperator, rows: Rows | None, omega: list[Array]) -> list[Array]:
    """The samples omega_i^H A omega_i, or leaf by leaf those of the diagonal,
    conj(omega_i) (A omega_i).
    """
    if rows is None:
        return [block.quadratic_forms(omega)]
    products = block.mm_by_leaf(omega)
    return rows.by_leaf([jnp.conj(o) * p for o, p in zip(omega, products, strict=True)])


def _flat(x: Array, rows: Rows | None) -> Array:
    return x if rows is None else x.reshape(-1)


def _std_err(moments: Moments, eps: float) -> Array:
    # What rounding does to all samples alike does not show in their scatter.
    size = jnp.hypot(jnp.abs(moments.mean), moments.spread / jnp.sqrt(moments.number))
    return jnp.hypot(moments.std_err(), rounding_of(size, eps))


@final
class HutchinsonEstimator(AbstractTraceEstimator):
    r"""Hutchinson's estimator: the mean of $\omega_i^* A \omega_i$ over `k` independent probes, and
    for a diagonal that of $\bar\omega_i \circ (A \omega_i)$.

    It is unbiased. For a real symmetric A and Rademacher probes the variance of the trace is
    $\frac{2}{k} \sum_{i \ne j} A_{ij}^2$, and that of a diagonal entry is
    $\frac{1}{k} \sum_{j \ne i} |A_{ij}|^2$ for any A. It is best for flat spectra, for dominant
    diagonals, and where memory allows no sketch.

    **Cost:** `k` matvecs; two to four blocks of `n x batch_size` numbers, in value and gradient
    (five vectors of size n for the operators of `traceax.curvature`, whatever `batch_size`).

    **Arguments:**

    - `sampler`: the distribution of the probes. By default [`traceax.RademacherSampler`][].
    - `batch_size`: the number of probes to multiply at once; by default a block of $2^{27}$
        numbers.

    **Source:** A. Girard, 1989, doi:10.1007/BF01395775; M. F. Hutchinson, 1990,
    doi:10.1080/03610919008812866; of diagonals C. Bekas, E. Kokiopoulou, Y. Saad, 2007,
    doi:10.1016/j.apnum.2007.01.003.
    """

    sampler: AbstractSampler = eqx.field(
        default=None, converter=lambda sampler: as_sampler(sampler) or RademacherSampler()
    )
    batch_size: int | None = eqx.field(default=None, static=True)

    def check(self, operator):
        """Any square operator will do."""
        self.sampler.check_dtype(BlockOperator(operator).dtype)

    def sampling(self, operator, rows):
        """See `AbstractTraceEstimator`."""
        return RangeSampling(rows=rows, sampler=self.sampler, sizes=(0,))

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        return self._estimate(key, operator, k, None, inflation=1.02, tail=5.0)

    def compute_rows(self, key, operator, k, rows, weights):
        """See `AbstractTraceEstimator`."""
        return self._estimate(key, operator, k, rows, separate=True)

    def _estimate(self, key, operator, k, rows, **more) -> tuple[Estimate, MeanOverProbes]:
        block = BlockOperator(operator, self.batch_size)
        width = self.batch_size or block_width(block.n, k)
        if rows is None and block.has_forms:
            width = block_width(block.n, width, APART_LIMIT)
        else:
            block = block.linearised()
        weights = MeanOverProbes(key, self.sampler, rows, k, min(k, width))
        moments = weights.fold(block, merged, none_of(block, rows))
        value = as_value([_flat(part.mean, rows) for part in moments])
        std_err = as_value([_flat(_std_err(part, block.eps), rows) for part in moments])
        return Estimate(value, std_err, k, k - 1, **more), weights

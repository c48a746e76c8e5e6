"""Hutchinson's estimator of the diagonal."""

from typing import Any, ClassVar, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._core.estimate import as_value, rounding_of, safe_norm, status_of
from .._estimators.calibration import CALIBRATION, Calibration
from .._estimators.estimator import AbstractDiagonalEstimator
from .._estimators.extendable import AbstractExtendable, complete_diagonal, run_once
from .._estimators.rows import Rows
from .._operators.block_operator import BlockOperator
from .._operators.width import block_width
from .._probes.random import split
from .._probes.samplers import AbstractSampler, RademacherSampler
from .._sketch.weights import AbstractWeights


@final
class _ProbeWeights(AbstractWeights):
    """The diagonal of `A Omega Omega^H / count`, with the probes drawn again block by block."""

    key_data: Any
    key_impl: Any = eqx.field(static=True)
    sampler: AbstractSampler
    k: int = eqx.field(static=True)
    width: int = eqx.field(static=True)
    count: float | Real[Array, ""]

    def contract(self, operator):
        """See `AbstractWeights`."""
        block = BlockOperator(operator)
        start = [jnp.zeros(shape, block.dtype) for shape in block.shapes]

        def add(totals, samples):
            return [t + jnp.sum(x, axis=-1) for t, x in zip(totals, samples, strict=True)]

        totals, count = self.over_blocks(start, add, block), jnp.asarray(self.count, block.dtype)
        return as_value([total.reshape(-1) / count for total in totals])

    def over_blocks(self, carry, add, block: BlockOperator):
        """Fold `add(carry, samples)` over blocks of the samples conj(omega_i) (A omega_i). `add` is
        given them leaf by leaf.
        """
        key = jr.wrap_key_data(self.key_data, impl=self.key_impl)

        def samples(key, m):
            omega = self.sampler.probes_by_leaf(key, block.shapes, m, block.dtype)
            products = block.mm_by_leaf(omega)
            return [jnp.conj(o) * p for o, p in zip(omega, products, strict=True)]

        whole, rest = self.k // self.width, self.k % self.width
        if whole == 1 and rest == 0:
            return add(carry, samples(key, self.k))
        keys = split(key, whole + 1)
        # Without the checkpoint, reverse mode would store each block's probes.
        one_block = jax.checkpoint(lambda key: samples(key, self.width), prevent_cse=False)
        carry, _ = lax.scan(lambda c, key: (add(c, one_block(key)), None), carry, keys[:whole])
        return add(carry, samples(keys[whole], rest)) if rest else carry


def _merge(state, samples):
    """Chan's update of the count, the mean, and the root of the sum of squared deviations."""
    count, mean, spread = state
    m = samples.shape[-1]
    block_mean = jnp.mean(samples, axis=-1)
    shift = block_mean - mean
    total = count + m
    between = jnp.abs(shift) * jnp.sqrt(count * m / total)
    spread = jnp.hypot(jnp.hypot(spread, safe_norm(samples - block_mean[..., None])), between)
    return total, mean + shift * (m / total), spread


class HutchinsonDiagonalState(NamedTuple):
    """Count, mean and spread of the samples, leaf by leaf; and probes and products (without entries
    if they are not kept).
    """

    moments: list[tuple[Array, Array, Array]]
    omega: Inexact[Array, "m kept"]
    products: Inexact[Array, "m kept"]


@final
class HutchinsonDiagonalExtendable(AbstractExtendable):
    """Hutchinson's estimator. Probes are kept only if the exact diagonal may have to be completed
    from them.
    """

    sampler: AbstractSampler
    batch_size: int | None = eqx.field(static=True)
    rows: Rows
    keeps: bool = eqx.field(static=True)
    matvecs_per_probe: ClassVar[int] = 1
    calibration: ClassVar[Calibration] = CALIBRATION["hutchinson-diagonal"]

    def _panel(self, block: BlockOperator, key: Any, k: int, count: Any = 1.0) -> _ProbeWeights:
        width = min(k, self.batch_size or block_width(block.n, k))
        width, data = k if self.keeps else width, (jr.key_data(key), jr.key_impl(key))
        return _ProbeWeights(*data, self.sampler, k, width, count)

    def start(self, growth, block):
        """See `AbstractExtendable`."""
        zeros = [jnp.zeros((*shape, 1), block.dtype) for shape in block.shapes]
        count = jnp.zeros((), block.dtype).real
        moments = [(count, x[..., 0], x[..., 0].real) for x in self.rows.by_leaf(zeros)]
        kept = growth.empty(block, self.keeps)
        return HutchinsonDiagonalState(moments, kept, kept)

    def extend(self, state, growth, block):
        """See `AbstractExtendable`."""
        k = growth.width

        def add(moments, samples):
            pairs = zip(moments, self.rows.by_leaf(samples), strict=True)
            return [_merge(*pair) for pair in pairs]

        if not self.keeps:

            def drawn(moments, key, _):
                return self._panel(block, key, k).over_blocks(moments, add, block)

            return state._replace(moments=growth.fold(drawn, state.moments))

        def probes(key):
            return block.join(self.sampler.probes_by_leaf(key, block.shapes, k, block.dtype)).T

        omega = growth.each(probes, state.omega)
        products = growth.multiply(block, block.mm, omega, state.products)

        def kept(moments, _, rows):
            leaves = block.leaves((jnp.conj(rows(omega)) * rows(products)).T)
            shaped = [x.reshape(*s, -1) for x, s in zip(leaves, block.shapes, strict=True)]
            return add(moments, shaped)

        return HutchinsonDiagonalState(growth.fold(kept, state.moments), omega, products)

    def estimate(self, state, columns, block):
        """See `AbstractExtendable`."""
        values, spreads = ([m[i].reshape(-1) for m in state.moments] for i in (1, 2))
        pairs = jnp.sqrt(columns.pairs(jnp.finfo(block.dtype).dtype))
        std_errs = [jnp.where(columns.used > 1, spread / pairs, jnp.inf) for spread in spreads]
        # What rounding does to all samples alike does not show in their scatter.
        pairs = zip(values, std_errs, strict=True)
        std_errs = [jnp.hypot(s, rounding_of(jnp.abs(x), block.eps)) for x, s in pairs]
        value, std_err = as_value(values), as_value(std_errs)
        return value, std_err, status_of(*values)

    def weights(self, state, columns, growth, block):
        """See `AbstractExtendable`."""
        k, count = growth.width, jnp.asarray(columns.used, jnp.finfo(block.dtype).dtype)
        return growth.drawn_again(block, lambda key: self._panel(block, key, k, count))

    def complete(self, state, block):
        """See `AbstractExtendable`."""
        nothing = state.omega.T[:, :0]
        known = state.omega.T, state.products.T
        done = complete_diagonal(block, nothing, nothing, known, self.rows)
        if self.rows.sizes is not None:
            return done
        value, std_err = (as_value(block.leaves(part)) for part in (done.value, done.std_err))
        return done._replace(value=value, std_err=std_err)


@final
class HutchinsonDiagonalEstimator(AbstractDiagonalEstimator):
    r"""The mean of $\bar\omega_i \circ (A \omega_i)$ over `k` independent probes.

    This is unbiased. With Rademacher (or Steinhaus) probes no division is needed, and the variance
    of an entry is $\sum_{j \ne i} |A_{ij}|^2 / k$. (For a real symmetric A and Rademacher probes,
    the variance of the trace is twice the sum of these.) This estimator is best where the spectrum
    is flat, and where memory allows no sketch.

    Cost: `k` matvecs; two blocks of `n x batch_size` numbers, in value and gradient.

    ??? cite "References"

        C. Bekas, E. Kokiopoulou, Y. Saad, *An estimator for the diagonal of a matrix*, 2007,
        doi:10.1016/j.apnum.2007.01.003.
    """

    sampler: AbstractSampler = RademacherSampler()
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 1

    def check(self, operator):
        """Any square operator will do."""
        self.sampler.check_dtype(BlockOperator(operator).dtype)

    def extendable(self, operator, falls_back_to_exact=False, rows=Rows()):
        """See `AbstractDiagonalEstimator`."""
        return HutchinsonDiagonalExtendable(
            self.sampler, self.batch_size, rows, falls_back_to_exact
        )

    def compute_rows(self, key, operator, k, rows):
        """See `AbstractDiagonalEstimator`."""
        return run_once(self.extendable(operator, rows=rows), key, operator, k)


HutchinsonDiagonalEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.RademacherSampler`][].
- `batch_size`: the number of probes to multiply at once. By default as many as make a block of
    2^27 numbers.
"""

"""Hutchinson's estimator of the diagonal."""

import math
from typing import Any, ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax

from .._estimate import as_value, make_estimate, safe_norm, status_of
from .._estimator import AbstractDiagonalEstimator
from .._exact import block_width
from .._operator import BlockOperator
from .._sampler import AbstractSampler, RademacherSampler, check_batch_size
from .._weights import AbstractWeights


@final
class _ProbeWeights(AbstractWeights):
    """The diagonal of `A Omega Omega^H / k`, the probes drawn again block by block."""

    key_data: Any
    key_impl: Any = eqx.field(static=True)
    sampler: AbstractSampler
    k: int = eqx.field(static=True)
    width: int = eqx.field(static=True)

    def contract(self, operator):
        """See `AbstractWeights`."""
        block = BlockOperator(operator)
        start = [jnp.zeros(size, block.dtype) for size in block.sizes]

        def add(totals, samples):
            return [t + jnp.sum(x, axis=1) for t, x in zip(totals, samples, strict=True)]

        totals = self.over_blocks(start, add, block)
        return as_value([total / self.k for total in totals])

    def over_blocks(self, carry, add, block: BlockOperator):
        """Fold `add(carry, samples)` over blocks of the samples conj(omega_i) (A omega_i), given
        leaf by leaf.
        """
        key = jr.wrap_key_data(self.key_data, impl=self.key_impl)

        def samples(key, m):
            omega = self.sampler.probes_by_leaf(key, block.sizes, m, block.dtype)
            products = block.mm_by_leaf(omega)
            return [jnp.conj(o) * p for o, p in zip(omega, products, strict=True)]

        whole, rest = self.k // self.width, self.k % self.width
        if whole == 1 and rest == 0:
            return add(carry, samples(key, self.k))
        keys = jr.split(key, whole + 1)
        # Without the checkpoint, reverse mode would store each block's probes.
        one_block = jax.checkpoint(lambda key: samples(key, self.width), prevent_cse=False)
        carry, _ = lax.scan(lambda c, key: (add(c, one_block(key)), None), carry, keys[:whole])
        return add(carry, samples(keys[whole], rest)) if rest else carry


def _merge(state, samples):
    """Chan's update of the count, the mean, and the root of the sum of squared deviations."""
    count, mean, spread = state
    m = samples.shape[1]
    block_mean = jnp.mean(samples, axis=1)
    shift = block_mean - mean
    total = count + m
    between = jnp.abs(shift) * jnp.sqrt(count * m / total)
    spread = jnp.hypot(jnp.hypot(spread, safe_norm(samples - block_mean[:, None])), between)
    return total, mean + shift * (m / total), spread


@final
class HutchinsonDiagonalEstimator(AbstractDiagonalEstimator):
    r"""The mean of $\bar\omega_i \circ (A \omega_i)$ over `k` independent probes.

    Unbiased. With Rademacher (or Steinhaus) probes no division is needed, and the variance of an
    entry is $\sum_{j \ne i} |A_{ij}|^2 / k$ (twice that for the symmetric part's trace): best where
    the spectrum is flat, and where memory allows no sketch.

    Cost: `k` matvecs; two blocks of `n x batch_size` numbers, in value and gradient.

    ??? cite "References"

        C. Bekas, E. Kokiopoulou, Y. Saad, *An estimator for the diagonal of a matrix*, 2007,
        doi:10.1016/j.apnum.2007.01.003.
    """

    sampler: AbstractSampler = RademacherSampler()
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 1

    def __check_init__(self):
        check_batch_size(self.batch_size)

    def check(self, operator):
        """Any square operator will do."""
        self.sampler.check_dtype(BlockOperator(operator).dtype)

    def compute_rows(self, key, operator, k, rows):
        """See `AbstractDiagonalEstimator`."""
        block = BlockOperator(operator).linearised()
        width = min(k, self.batch_size or block_width(block.n, k))
        weights = _ProbeWeights(jr.key_data(key), jr.key_impl(key), self.sampler, k, width)

        zeros = rows.by_leaf([jnp.zeros((size, 1), block.dtype) for size in block.sizes])
        count = jnp.zeros((), block.dtype).real
        start = [(count, zero[:, 0], zero[:, 0].real) for zero in zeros]

        def add(states, samples):
            return [_merge(*pair) for pair in zip(states, rows.by_leaf(samples), strict=True)]

        states = weights.over_blocks(start, add, block)
        values, spreads = [state[1] for state in states], [state[2] for state in states]
        if k > 1:
            std_errs = [spread / math.sqrt(k * (k - 1)) for spread in spreads]
        else:
            std_errs = [jnp.full_like(spread, jnp.inf) for spread in spreads]
        status = status_of(*values)
        return make_estimate(as_value(values), as_value(std_errs), k, k - 1, status), weights


HutchinsonDiagonalEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.RademacherSampler`][].
- `batch_size`: the number of probes to multiply at once. By default as many as make a block of
    2^27 numbers.
"""

"""The Girard-Hutchinson estimator."""

from typing import Any, ClassVar, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._core.estimate import rounding_of, safe_norm, status_of
from .._estimators.calibration import CALIBRATION, Calibration
from .._estimators.estimator import AbstractTraceEstimator
from .._estimators.extendable import AbstractExtendable, complete_trace, run_once
from .._operators.block_operator import BlockOperator
from .._operators.width import APART_LIMIT, block_width
from .._probes.random import split
from .._probes.samplers import AbstractSampler, RademacherSampler
from .._sketch.leave_one_out import column_dots
from .._sketch.weights import AbstractWeights


def _blocks(k: int, width: int) -> tuple[int, int]:
    """The number of whole blocks of `width` among `k` probes, and the number of probes left."""
    return k // width, k % width


@final
class _ProbeWeights(AbstractWeights):
    """`G = Omega Omega^H / count`, with the probes drawn again block by block from their key, so
    that neither forward nor reverse mode keeps more than one block of them.
    """

    key_data: Any
    key_impl: Any = eqx.field(static=True)
    sampler: AbstractSampler
    k: int = eqx.field(static=True)
    width: int = eqx.field(static=True)
    count: float | Real[Array, ""]

    def contract(self, operator):
        """See `AbstractWeights`."""
        samples = self.samples(operator)
        return jnp.sum(samples) / jnp.asarray(self.count, samples.dtype)

    def samples(self, operator):
        """The k numbers omega_i^H A omega_i."""
        block = BlockOperator(operator)
        key = jr.wrap_key_data(self.key_data, impl=self.key_impl)

        def forms(key, m):
            omega = self.sampler.probes_by_leaf(key, block.shapes, m, block.dtype)
            return block.quadratic_forms(omega)

        whole, rest = _blocks(self.k, self.width)
        if whole == 1 and rest == 0:
            return forms(key, self.k)
        keys = split(key, whole + 1)
        # Without the checkpoint, reverse mode would store each block's probes.
        one_block = jax.checkpoint(lambda key: forms(key, self.width), prevent_cse=False)
        samples = lax.map(one_block, keys[:whole]).reshape(-1)
        return jnp.concatenate([samples, forms(keys[whole], rest)]) if rest else samples


class HutchinsonState(NamedTuple):
    """The samples; and probes and products (without entries if they are not kept)."""

    samples: Inexact[Array, " m"]
    omega: Inexact[Array, "m kept"]
    products: Inexact[Array, "m kept"]


@final
class HutchinsonExtendable(AbstractExtendable):
    """Hutchinson's estimator. Probes are kept only if the exact trace may have to be completed from
    them.
    """

    sampler: AbstractSampler
    batch_size: int | None = eqx.field(static=True)
    keeps: bool = eqx.field(static=True)
    matvecs_per_probe: ClassVar[int] = 1
    calibration: ClassVar[Calibration] = CALIBRATION["hutchinson"]

    def prepare(self, operator):
        """See `AbstractExtendable`."""
        block = BlockOperator(operator)
        return block if block.has_forms and not self.keeps else block.linearised()

    def _panel(self, block: BlockOperator, key: Any, k: int, count: Any = 1.0) -> _ProbeWeights:
        width = min(k, self.batch_size or block_width(block.n, k))
        if block.has_forms:
            width = block_width(block.n, width, APART_LIMIT)
        width = k if self.keeps else width
        data = jr.key_data(key), jr.key_impl(key)
        return _ProbeWeights(*data, self.sampler, k, width, count)

    def start(self, growth, block):
        """See `AbstractExtendable`."""
        kept = growth.empty(block, self.keeps)
        return HutchinsonState(jnp.zeros(growth.capacity, block.dtype), kept, kept)

    def extend(self, state, growth, block):
        """See `AbstractExtendable`."""
        k = growth.width
        if not self.keeps:

            def samples(key):
                return self._panel(block, key, k).samples(block.operator)

            return state._replace(samples=growth.each(samples, state.samples))

        def probes(key):
            return block.join(self.sampler.probes_by_leaf(key, block.shapes, k, block.dtype)).T

        omega = growth.each(probes, state.omega)
        products = growth.multiply(block, block.mm, omega, state.products)
        return HutchinsonState(column_dots(omega.T, products.T), omega, products)

    def estimate(self, state, columns, block):
        """See `AbstractExtendable`."""
        # Without a barrier, XLA adds up all k n terms of all samples in one reduction, and rounding
        # errors grow with k n.
        samples = lax.optimization_barrier(state.samples)
        value, std_err = columns.mean_and_std_err(samples)
        # What rounding does to all samples alike does not show in their scatter.
        size = safe_norm(columns.only(samples)) / jnp.sqrt(jnp.asarray(columns.used, std_err.dtype))
        return value, jnp.hypot(std_err, rounding_of(size, block.eps)), status_of(value)

    def weights(self, state, columns, growth, block):
        """See `AbstractExtendable`."""
        k, count = growth.width, jnp.asarray(columns.used, jnp.finfo(block.dtype).dtype)
        return growth.drawn_again(block, lambda key: self._panel(block, key, k, count))

    def complete(self, state, block):
        """See `AbstractExtendable`."""
        nothing = state.omega.T[:, :0]
        return complete_trace(block, nothing, nothing, (state.omega.T, state.products.T))


@final
class HutchinsonEstimator(AbstractTraceEstimator):
    r"""Girard-Hutchinson: the mean of $\omega_i^* A \omega_i$ over `k` independent probes.

    It is unbiased for every probe distribution with $E[\omega \omega^*] = I$. For a real symmetric
    A the variance is $2 (\|A\|_F^2 - \sum_i A_{ii}^2) / k$ with Rademacher probes, and
    $2 \|A\|_F^2 / k$ with normal probes. The error falls only like $1 / \sqrt{k}$. This estimator
    is best where the spectrum is flat, and where memory allows no sketch.

    Cost: `k` matvecs; two to four blocks of `n x batch_size` numbers, in value and gradient (about
    five vectors of size n for the operators of `traceax.curvature`, whatever `batch_size`).

    ??? cite "References"

        A. Girard, *A fast 'Monte-Carlo cross-validation' procedure for large least squares
        problems with noisy data*, 1989, doi:10.1007/BF01395775. M. F. Hutchinson, *A stochastic
        estimator of the trace of the influence matrix for Laplacian smoothing splines*, 1990,
        doi:10.1080/03610919008812866.
    """

    sampler: AbstractSampler = RademacherSampler()
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 1

    def check(self, operator):
        """Any square operator will do."""
        self.sampler.check_dtype(BlockOperator(operator).dtype)

    def extendable(self, operator, falls_back_to_exact=False):
        """See `AbstractTraceEstimator`."""
        return HutchinsonExtendable(self.sampler, self.batch_size, falls_back_to_exact)

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        return run_once(self.extendable(operator), key, operator, k)


HutchinsonEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.RademacherSampler`][].
- `batch_size`: the number of probes to multiply at once. By default as many as make a block of
    2^27 numbers.
"""

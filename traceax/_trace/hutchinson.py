"""The Girard-Hutchinson estimator."""

from typing import Any, ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax

from .._estimate import make_estimate, mean_and_std_err, status_of
from .._estimator import AbstractTraceEstimator
from .._exact import block_width
from .._operator import BlockOperator
from .._sampler import AbstractSampler, RademacherSampler, check_batch_size
from .._weights import AbstractWeights

#: Numbers in one block of vectors for an operator that computes quadratic forms without products.
#: Nothing is shared by the columns then, so that blocks beyond the cache only take memory.
_FORM_LIMIT = 2**18


def _blocks(k: int, width: int) -> tuple[int, int]:
    """`k` probes as whole blocks of `width` and a rest."""
    return k // width, k % width


@final
class _ProbeWeights(AbstractWeights):
    """`G = Omega Omega^H / k`, with the probes drawn again block by block from their key, so that
    neither direction of differentiation keeps more than one block of them.
    """

    key_data: Any
    key_impl: Any = eqx.field(static=True)
    sampler: AbstractSampler
    k: int = eqx.field(static=True)
    width: int = eqx.field(static=True)

    def contract(self, operator):
        """See `AbstractWeights`."""
        return jnp.sum(self.samples(operator)) / self.k

    def samples(self, operator):
        """The k numbers omega_i^H A omega_i."""
        block = BlockOperator(operator)
        key = jr.wrap_key_data(self.key_data, impl=self.key_impl)

        def forms(key, m):
            omega = self.sampler.probes_by_leaf(key, block.sizes, m, block.dtype)
            return block.quadratic_forms(omega)

        whole, rest = _blocks(self.k, self.width)
        if whole == 1 and rest == 0:
            return forms(key, self.k)
        keys = jr.split(key, whole + 1)
        # Without the checkpoint, reverse mode would store each block's probes.
        one_block = jax.checkpoint(lambda key: forms(key, self.width), prevent_cse=False)
        samples = lax.map(one_block, keys[:whole]).reshape(-1)
        return jnp.concatenate([samples, forms(keys[whole], rest)]) if rest else samples


@final
class HutchinsonEstimator(AbstractTraceEstimator):
    r"""Girard-Hutchinson: the mean of $\omega_i^* A \omega_i$ over `k` independent probes.

    Unbiased for every probe distribution with $E[\omega \omega^*] = I$. With Rademacher probes
    and a symmetric A its variance is $2 (\|A\|_F^2 - \sum_i A_{ii}^2) / k$, with normal ones
    $2 \|A\|_F^2 / k$: the error falls like $1 / \sqrt{k}$ only, which is best where the spectrum
    is flat, and where memory allows no sketch.

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

    def __check_init__(self):
        check_batch_size(self.batch_size)

    def check(self, operator):
        """Any square operator will do."""
        self.sampler.check_dtype(BlockOperator(operator).dtype)

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator)
        width = min(k, self.batch_size or block_width(block.n, k))
        if block.has_forms:
            width = block_width(block.n, width, _FORM_LIMIT)
        else:
            block = block.linearised()
        weights = _ProbeWeights(jr.key_data(key), jr.key_impl(key), self.sampler, k, width)
        samples = weights.samples(block.operator)
        value, std_err = mean_and_std_err(samples)
        return make_estimate(value, std_err, k, k - 1, status_of(samples)), weights


HutchinsonEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.RademacherSampler`][].
- `batch_size`: the number of probes to multiply at once. By default as many as make a block of
    2^27 numbers.
"""

"""Hutch++."""

from typing import ClassVar, final

import jax.numpy as jnp
import jax.random as jr

from .._estimate import make_estimate, mean_and_std_err, scale_of, status_of
from .._estimator import AbstractTraceEstimator
from .._linalg import qr
from .._operator import BlockOperator
from .._sampler import AbstractSampler, SphereSampler
from .._sketch import adjoint, column_dots, matmul, resphering, square_norms
from .._weights import LowRankWeights


@final
class HutchPlusPlusEstimator(AbstractTraceEstimator):
    r"""Hutch++: the trace on the range of a sketch, plus Hutchinson's estimate of the rest.

    With $Q$ an orthonormal basis of the range of $A \Omega$ ($m = \lfloor k/3 \rfloor$ probes) and
    $m' = k - 2m$ fresh probes, $g_i = (I - Q Q^*) \omega_i$,

    $$\mathrm{tr}(Q^* A Q) + \frac{1}{m'} \sum_i c_i \, g_i^* A g_i, \qquad
    c_i = (n - m) / \|g_i\|^2 \text{ if improved, else } 1.$$

    Unbiased. Given $Q$, the samples are independent, so the standard error is the plain one.

    Cost: `k` matvecs (`2 floor(k/3)` for the sketch and its basis, the rest for probes); about
    three blocks of `n x k/3` numbers.

    ??? cite "References"

        R. A. Meyer, C. Musco, C. Musco, D. P. Woodruff, *Hutch++: optimal stochastic trace
        estimation*, 2021, arXiv:2010.09649, doi:10.1137/1.9781611976496.16.
    """

    sampler: AbstractSampler = SphereSampler()
    improved: bool | None = None
    smallest: ClassVar[int] = 3

    def __check_init__(self):
        self.sampler.check_resphering(self.improved)

    def check(self, operator):
        """Any square operator will do."""
        self.sampler.check_dtype(BlockOperator(operator).dtype, self.improved)

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        n, m = block.n, k // 3
        fresh = k - 2 * m
        sketch_key, probe_key = jr.split(key)

        sketch = block.mm(self.sampler.probes(sketch_key, n, m, block.dtype))
        # A basis of any scale of the sketch is the same; its QR factorisation must not overflow.
        q, _ = qr(sketch / scale_of(sketch))
        probes = self.sampler.probes(probe_key, n, fresh, block.dtype)
        g = probes - matmul(q, matmul(adjoint(q), probes))
        factor = resphering(
            n - m, square_norms(g), self.sampler.respheres(self.improved, block.dtype)
        )
        products = block.mm(jnp.concatenate([q, g], axis=1))

        captured = jnp.sum(jnp.conj(q) * products[:, :m])
        residual, std_err = mean_and_std_err(factor * column_dots(g, products[:, m:]))
        status = status_of(sketch, products)
        weights = LowRankWeights(
            jnp.concatenate([q, g * (factor / fresh)], axis=1), jnp.concatenate([q, g], axis=1)
        )
        return make_estimate(captured + residual, std_err, k, fresh - 1, status), weights


HutchPlusPlusEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.SphereSampler`][].
- `improved`: whether to renormalise ("resphere") the residual probes, which needs a rotation
    invariant distribution. By default wherever that is so.
"""

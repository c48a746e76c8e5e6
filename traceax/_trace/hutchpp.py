"""Hutch++."""

from typing import ClassVar, final

import equinox as eqx
import jax.numpy as jnp

from .._core.estimate import rounding_of, safe_norm, status_of
from .._estimators.calibration import CALIBRATION, Calibration
from .._estimators.estimator import AbstractTraceEstimator
from .._estimators.extendable import AbstractExtendable, complete_trace, run_once
from .._operators.block_operator import BlockOperator
from .._probes.samplers import AbstractSampler, SphereSampler
from .._sketch.columns import Columns
from .._sketch.leave_one_out import adjoint, column_dots, matmul, resphering, square_norms
from .._sketch.split_sketch import SplitSketch, empty_split, extend_split
from .._sketch.weights import LowRankWeights


@final
class HutchPlusPlusExtendable(AbstractExtendable):
    """Hutch++, a stage of which gives sketch, basis and residual probes a third of its products
    each.

    When the basis grows by q, it is projected out of the residual probes g and of their products,
    A (I - q q^H) g = A g - (A q) q^H g. No probe is drawn or multiplied again, and given the basis
    all of them are independent.
    """

    sampler: AbstractSampler
    resphere: bool = eqx.field(static=True)
    keeps: bool = eqx.field(static=True)
    matvecs_per_probe: ClassVar[int] = 3
    takes_rest: ClassVar[bool] = True
    calibration: ClassVar[Calibration] = CALIBRATION["hutch++"]

    def start(self, growth, block):
        """See `AbstractExtendable`."""
        return empty_split(growth, block, self.keeps)

    def extend(self, state, growth, block):
        """See `AbstractExtendable`."""
        state = extend_split(state, self.sampler, growth, block, self.keeps)
        z = growth.multiply(block, block.mm, state.q, state.z)
        g = growth.residuals(state.q, state.g)
        products = growth.multiply(block, block.mm, g, state.products)
        return state._replace(z=z, g=g, products=products)

    def _residual(self, state: SplitSketch, columns: Columns):
        """G and A G for the whole basis, the factors of the samples, and how many are in use."""
        q, z, g, products = state.q.T, state.z.T, state.g.T, state.products.T
        if columns.inside is not None:
            captured = matmul(adjoint(q), g)
            g, products = g - matmul(q, captured), products - matmul(z, captured)
        tested = state.tested(columns)
        square = tested.only(square_norms(g), 1)
        factor = resphering(g.shape[0] - columns.used, square, self.resphere)
        return g, products, factor, tested

    def estimate(self, state, columns, block):
        """See `AbstractExtendable`."""
        g, products, factor, tested = self._residual(state, columns)
        captured = jnp.sum(jnp.conj(state.q) * state.z)
        residual, std_err = tested.mean_and_std_err(factor * column_dots(g, products))
        # ||A||_F^2 is the sum of ||A Q||_F^2 and of the rest, which the residual probes estimate.
        count = jnp.asarray(tested.used, std_err.dtype)
        rest = safe_norm(products.reshape(-1)) / jnp.sqrt(count)
        size = jnp.hypot(safe_norm(state.z.T.reshape(-1)), rest)
        std_err = jnp.hypot(std_err, rounding_of(size, block.eps))
        # A NaN or inf in the sketch shows in the basis, and then in its products.
        return captured + residual, std_err, status_of(state.z, state.products)

    def weights(self, state, columns, growth, block):
        """See `AbstractExtendable`."""
        g, _, factor, tested = self._residual(state, columns)
        q, count = state.q.T, jnp.asarray(tested.used, factor.dtype)
        u = jnp.concatenate([q, g * (factor / count)], axis=1)
        return LowRankWeights(u, jnp.concatenate([q, g], axis=1))

    def complete(self, state, block):
        """See `AbstractExtendable`."""
        return complete_trace(block, state.q.T, state.z.T, state.others())


@final
class HutchPlusPlusEstimator(AbstractTraceEstimator):
    r"""Hutch++: the trace on the range of a sketch, plus Hutchinson's estimate of the rest.

    With $Q$ an orthonormal basis of the range of $A \Omega$ ($m = \lfloor k/3 \rfloor$ probes) and
    $m' = k - 2m$ fresh probes, $g_i = (I - Q Q^*) \omega_i$,

    $$\mathrm{tr}(Q^* A Q) + \frac{1}{m'} \sum_i c_i \, g_i^* A g_i, \qquad
    c_i = (n - m) / \|g_i\|^2 \text{ if improved, else } 1.$$

    This is unbiased. Given $Q$ the samples are independent, so the standard error is the plain one.

    Cost: `k` matvecs (`2 floor(k/3)` for the sketch and its basis, the rest for probes); about
    seven blocks of `n x k/3` numbers.

    ??? cite "References"

        R. A. Meyer, C. Musco, C. Musco, D. P. Woodruff, *Hutch++: optimal stochastic trace
        estimation*, 2021, arXiv:2010.09649, doi:10.1137/1.9781611976496.16.
    """

    sampler: AbstractSampler = SphereSampler()
    improved: bool | None = None
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 3

    def __check_init__(self):
        self.sampler.check_resphering(self.improved)

    def check(self, operator):
        """Any square operator will do."""
        self.sampler.check_dtype(BlockOperator(operator).dtype, self.improved)

    def extendable(self, operator, falls_back_to_exact=False):
        """See `AbstractTraceEstimator`."""
        resphere = self.sampler.respheres(self.improved, BlockOperator(operator).dtype)
        return HutchPlusPlusExtendable(self.sampler, resphere, falls_back_to_exact)

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        return run_once(self.extendable(operator), key, operator, k)


HutchPlusPlusEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.SphereSampler`][].
- `improved`: whether to renormalise ("resphere") the residual probes, which needs a rotation
    invariant distribution. By default wherever that is so.
- `batch_size`: the number of vectors to multiply at once. By default as many as make a block of
    2^27 numbers, or 64 vectors for operators that call functions. (A dense matrix is multiplied
    at once.)
"""

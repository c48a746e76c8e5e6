"""Hutch++."""

import math
from typing import ClassVar, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._core.estimate import make_estimate, mean_and_std_err, rounding_of, safe_norm, status_of
from .._estimators.calibration import CALIBRATION, Calibration
from .._estimators.estimator import AbstractTraceEstimator
from .._estimators.extendable import AbstractExtendable, by_block, complete_trace, run_once
from .._operators.block_operator import BlockOperator
from .._probes.random import split
from .._probes.samplers import AbstractSampler, SphereSampler
from .._sketch.leave_one_out import (
    adjoint,
    append_basis,
    column_dots,
    empty_state,
    matmul,
    resphering,
    square_norms,
)
from .._sketch.weights import LowRankWeights


class HutchPlusPlusState(NamedTuple):
    """The basis and the residual probes, with their products; and the probes of the sketch with the
    sketch itself (without rows if they are not kept).
    """

    q: Inexact[Array, "n m"]
    z: Inexact[Array, "n m"]  # A Q
    g: Inexact[Array, "n m"]
    products: Inexact[Array, "n m"]  # A G
    omega: Inexact[Array, "rows m"]
    sketch: Inexact[Array, "rows m"]  # A Omega
    scale: Real[Array, ""]  # of the first sketch
    status: Int[Array, ""]


@final
class HutchPlusPlusExtendable(AbstractExtendable):
    """Hutch++ block by block. Sketch, basis and residual probes each get a third of a block.

    When the basis grows by q, it is projected out of the residual probes g and of their products,
    A (I - q q^H) g = A g - (A q) q^H g. No probe is drawn or multiplied again, and given the basis
    all of them are independent.
    """

    sampler: AbstractSampler
    resphere: bool = eqx.field(static=True)
    keeps: bool = eqx.field(static=True)
    matvecs_per_probe: ClassVar[int] = 3
    calibration: ClassVar[Calibration] = CALIBRATION["hutch++"]

    def extend(self, state, key, block, k):
        """See `AbstractExtendable`."""
        n, m = block.n, k // 3
        fresh = k - 2 * m
        sketch_key, probe_key = split(key)
        omega = self.sampler.probes(sketch_key, n, m, block.dtype)
        sketch = block.mm(omega)
        rows = n if self.keeps else 0
        if state is None:
            state = empty_state(HutchPlusPlusState, sketch, self.keeps)
        # Scaled, so that the QR factorisation does not overflow. The basis stays the same.
        new_q, _, _ = append_basis(state.q, sketch / state.scale)
        q = jnp.concatenate([state.q, new_q], axis=1)
        probes = self.sampler.probes(probe_key, n, fresh, block.dtype)
        new_g = probes - matmul(q, matmul(adjoint(q), probes))
        products = block.mm(jnp.concatenate([new_q, new_g], axis=1))
        status = jnp.maximum(state.status, status_of(sketch, products))

        new_z, new_products = products[:, :m], products[:, m:]
        g, old_products = state.g, state.products
        if g.shape[1]:
            captured = matmul(adjoint(new_q), g)
            g = g - matmul(new_q, captured)
            old_products = old_products - matmul(new_z, captured)
        return HutchPlusPlusState(
            q,
            jnp.concatenate([state.z, new_z], axis=1),
            jnp.concatenate([g, new_g], axis=1),
            jnp.concatenate([old_products, new_products], axis=1),
            jnp.concatenate([state.omega, omega[:rows]], axis=1),
            jnp.concatenate([state.sketch, sketch[:rows]], axis=1),
            state.scale,
            status,
        )

    def _factor(self, state: HutchPlusPlusState) -> Array:
        n, m = state.q.shape
        return resphering(float(n - m), square_norms(state.g), self.resphere)

    def estimate(self, state, block):
        """See `AbstractExtendable`."""
        m, fresh = state.q.shape[1], state.g.shape[1]
        captured = jnp.sum(jnp.conj(state.q) * state.z)
        samples = self._factor(state) * column_dots(state.g, state.products)
        residual, std_err = mean_and_std_err(samples)
        spent = 2 * m + fresh
        # ||A||_F^2 is the sum of ||A Q||_F^2 and of the rest, which the residual probes estimate.
        rest = safe_norm(state.products.reshape(-1)) / math.sqrt(fresh)
        size = jnp.hypot(safe_norm(state.z.reshape(-1)), rest)
        std_err = jnp.hypot(std_err, rounding_of(size, block.eps))
        return make_estimate(captured + residual, std_err, spent, fresh - 1, state.status)

    def weights(self, state, block, keys, budgets):
        """See `AbstractExtendable`."""
        q, g, fresh = state.q, state.g, state.g.shape[1]
        scaled = g * (self._factor(state) / fresh)
        weights = LowRankWeights(
            jnp.concatenate([q, scaled], axis=1), jnp.concatenate([q, g], axis=1)
        )
        parts = by_block(weights, q.shape[1], [k // 3 for k in budgets])
        return parts, [1.0] * len(parts)

    def complete(self, state, block):
        """See `AbstractExtendable`."""
        others = jnp.concatenate([state.g, state.omega], axis=1)
        products = jnp.concatenate([state.products, state.sketch], axis=1)
        return complete_trace(block, state.q, state.z, (others, products))


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

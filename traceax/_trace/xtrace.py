"""XTrace."""

from typing import ClassVar, final

import equinox as eqx
import jax.numpy as jnp

from .._core.estimate import rounding_of, status_of
from .._estimators.calibration import CALIBRATION, Calibration
from .._estimators.estimator import AbstractTraceEstimator
from .._estimators.extendable import AbstractExtendable, complete_trace, run_once
from .._operators.block_operator import BlockOperator
from .._probes.samplers import AbstractSampler, SphereSampler
from .._sketch.leave_one_out import (
    RangeFinder,
    adjoint,
    column_dots,
    empty_sketch,
    extend_sketch,
    frobenius_norm_of,
    leave_one_out_error,
    matmul,
    pairs_of,
    quadratic_forms,
    rescale_error,
    resphering,
    xtrace_weights,
)


def _xtrace_samples(factors: RangeFinder, h, t, n: float, resphere: bool):
    """The samples t_i - tr H and the differences D_ij = t_i - t_ij (see `_sketch.leave_one_out`).

    With a_i = Q^H A g_i = r_i - H x_i and b_i = (g_i^H A Q)^H = (Z^H omega)_i - H^H x_i,

        g_i^H A g_i = omega_i^H s_i s_i^H r_i - t_i^H x_i + x_i^H H x_i =: e_i
        t_i         = tr H - s_i^H H s_i + c_i e_i.

    Holding out j as well adds Q u_ij beta to the residual probe, beta = u_ij^H x_i, hence

        t_ij = tr H - s_i^H H s_i - u_ij^H H u_ij
               + c_ij (e_i + conj(beta) u_ij^H a_i + beta conj(u_ij^H b_i) + |beta|^2 u_ij^H H u_ij)

    with c_ij = (n - m + 2) / (||g_i||^2 + |beta|^2) if resphered, else 1.
    """
    _, r, s, w, x, square, factor, columns = factors
    m = columns.used
    hx = matmul(h, x)
    residual = (
        jnp.conj(column_dots(s, w)) * column_dots(s, r) - column_dots(t, x) + column_dots(x, hx)
    )
    samples = factor * residual - quadratic_forms(h, s)

    s_h = adjoint(s)
    pairs = pairs_of(s, columns)
    lost = pairs.forms(matmul(s_h, matmul(h, s)))
    beta = pairs.components(matmul(s_h, x))
    towards = pairs.components(matmul(s_h, r - hx))
    against = pairs.components(matmul(s_h, t - matmul(adjoint(h), x)))
    size = jnp.abs(beta) ** 2
    pair_residual = (
        residual[:, None] + jnp.conj(beta) * towards + beta * jnp.conj(against) + size * lost
    )
    pair_factor = resphering(n - m + 2, square[:, None] + size, resphere)
    differences = lost + (factor * residual)[:, None] - pair_factor * pair_residual
    return samples, jnp.where(pairs.valid, differences, jnp.zeros_like(differences))


@final
class XTraceExtendable(AbstractExtendable):
    """XTrace, whose sketch can be extended by further probes."""

    sampler: AbstractSampler
    resphere: bool = eqx.field(static=True)
    matvecs_per_probe: ClassVar[int] = 2
    calibration: ClassVar[Calibration] = CALIBRATION["xtrace"]

    def start(self, growth, block):
        """See `AbstractExtendable`."""
        return empty_sketch(growth, block)

    def extend(self, state, growth, block):
        """See `AbstractExtendable`."""
        return extend_sketch(state, self.sampler, growth, block, adjoint=False)

    def estimate(self, state, columns, block):
        """See `AbstractExtendable`."""
        n, factors = float(block.n), state.factors(columns, self.resphere)
        h, t = state.inner_products(factors)
        samples, differences = _xtrace_samples(factors, h, t, n, self.resphere)
        rounding = rounding_of(frobenius_norm_of(state.r, columns), block.eps)
        std_err = leave_one_out_error(samples, differences, rounding, columns)
        std_err = rescale_error(state.size, std_err)
        value = state.size * (jnp.trace(h) + columns.mean(samples) - n * state.nu)
        # A NaN or inf in a product shows in one of these factors.
        return value, std_err, status_of(state.r, h)

    def weights(self, state, columns, growth, block):
        """See `AbstractExtendable`."""
        return xtrace_weights(state.omega.T, state.factors(columns, self.resphere))

    def complete(self, state, block):
        """See `AbstractExtendable`: A is known on the span of Q and Omega."""
        known = state.omega.T, state.sketch()
        return complete_trace(block, state.q.T, state.products.T, known)


@final
class XTraceEstimator(AbstractTraceEstimator):
    r"""XTrace: Hutch++ made exchangeable, so that every probe serves both as sketch and as test.

    With $m = \lfloor k/2 \rfloor$ probes, $Q_{(i)}$ an orthonormal basis of the range of
    $A \Omega_{-i}$ and $g_i = (I - Q_{(i)} Q_{(i)}^*) \omega_i$, the estimate is the mean over i of

    $$\mathrm{tr}(Q_{(i)}^* A Q_{(i)}) + c_i \, g_i^* A g_i, \qquad
    c_i = (n - m + 1) / \|g_i\|^2 \text{ if improved, else } 1.$$

    It is unbiased, and exact to rounding if the rank of A is less than m. The standard error
    includes the correlation between the samples, which is estimated without bias from their
    leave-two-out counterparts, without further products. The customary standard error is too small
    by 1.1 to 4 times.

    Cost: `2 floor(k/2)` matvecs; four blocks of `n x k/2` numbers (six with the gradient);
    `10 n m^2` operations beside the products. (As each probe takes two matvecs, one of an odd
    budget is left over.)

    ??? cite "References"

        E. N. Epperly, J. A. Tropp, R. J. Webber, *XTrace: making the most of every sample in
        stochastic trace estimation*, 2024, arXiv:2301.07825, doi:10.1137/23M1548323.
        The identity of the standard error is derived in `_sketch.leave_one_out`.
    """

    sampler: AbstractSampler = SphereSampler()
    improved: bool | None = None
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 2

    def __check_init__(self):
        self.sampler.check_resphering(self.improved)

    def check(self, operator):
        """Any square operator will do."""
        self.sampler.check_dtype(BlockOperator(operator).dtype, self.improved)

    def extendable(self, operator, falls_back_to_exact=False):
        """See `AbstractTraceEstimator`."""
        del falls_back_to_exact  # all probes are kept in any case
        resphere = self.sampler.respheres(self.improved, BlockOperator(operator).dtype)
        return XTraceExtendable(self.sampler, resphere)

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        return run_once(self.extendable(operator), key, operator, k)


XTraceEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.SphereSampler`][].
- `improved`: whether to renormalise ("resphere") the residual probes, which needs a rotation
    invariant distribution. By default wherever that is so.
- `batch_size`: the number of vectors to multiply at once. By default as many as make a block of
    2^27 numbers, or 64 vectors for operators that call functions. (A dense matrix is multiplied
    at once.)
"""

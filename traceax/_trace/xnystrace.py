"""XNysTrace."""

from typing import ClassVar, final

import equinox as eqx
import jax.numpy as jnp

from .._estimators.calibration import CALIBRATION, Calibration
from .._estimators.estimator import AbstractTraceEstimator
from .._estimators.extendable import AbstractExtendable, complete_trace, run_once
from .._operators.block_operator import BlockOperator
from .._operators.checks import check_semidefinite
from .._operators.tags import semidefinite_sign
from .._probes.samplers import AbstractSampler, SphereSampler
from .._sketch.leave_one_out import matmul, quadratic_forms, range_finder_of, xtrace_weights
from .._sketch.nystrom import best_shift, empty_nystrom, extend_nystrom, signed_estimate


@final
class XNysTraceExtendable(AbstractExtendable):
    """XNysTrace, whose basis of probes can be extended by further ones. Everything else is computed
    anew from the products, in `8 n m^2 + 80 m^3` operations for all m probes so far.
    """

    sampler: AbstractSampler
    resphere: bool = eqx.field(static=True)
    sign: int = eqx.field(static=True)
    matvecs_per_probe: ClassVar[int] = 1
    calibration: ClassVar[Calibration] = CALIBRATION["xnystrace"]

    def start(self, growth, block):
        """See `AbstractExtendable`."""
        return empty_nystrom(growth, block)

    def extend(self, state, growth, block):
        """See `AbstractExtendable`."""
        return extend_nystrom(state, self.sampler, growth, block, self.sign)

    def estimate(self, state, columns, block):
        """See `AbstractExtendable`."""
        factors = state.factors(columns, block.eps)
        shifts, rounding = factors.complex_shifts(), factors.rounding(block.eps)
        best = best_shift(factors, shifts, self.resphere, rounding)
        # If the tag is wrong, the value is the mean of Hutchinson's samples, which needs no tag.
        plain = columns.mean_and_std_err(quadratic_forms(factors.core, factors.r).real)
        value, std_err = factors.unless_wrong((best.value, plain[0]), (best.std_err, plain[1]))
        return signed_estimate(factors, self.sign, value, std_err)

    def counts(self, state, probes):
        """See `AbstractExtendable`. All samples share what the probes leave of the space: next to
        k = n they scatter together, like one number with nearly n - k degrees of freedom.
        """
        spent, dof = super().counts(state, probes)
        real = jnp.finfo(state.p.dtype).dtype
        left = jnp.maximum(jnp.asarray(state.p.shape[1] - probes, real), 1) - 0.2
        return spent, jnp.minimum(jnp.asarray(dof, real), self.calibration.tail * left)

    def weights(self, state, columns, growth, block):
        """See `AbstractExtendable`."""
        factors = state.factors(columns, block.eps)
        # The weights belong to the sketch A Omega = (A P) R, of either sign.
        original, omega = matmul(factors.sketch, state.r), state.omega()
        q, r = growth.again(block, original.T)
        return xtrace_weights(omega, range_finder_of(omega, q, r, columns, self.resphere))

    def complete(self, state, block):
        """See `AbstractExtendable`."""
        return complete_trace(block, state.p.T, self.sign * state.products.T)


@final
class XNysTraceEstimator(AbstractTraceEstimator):
    r"""XNysTrace: the leave-one-out Nystrom estimator for semidefinite operators.

    With `k` probes and $\hat A_{(i)}$ the Nystrom approximation of A from all probes but the i-th,
    the estimate is the mean over i of

    $$\mathrm{tr}(\hat A_{(i)}) + c_i \, \omega_i^* (A - \hat A_{(i)}) \omega_i, \qquad
    c_i = (n - k + 1) / \|g_i\|^2 \text{ if improved, else } 1,$$

    where $g_i$ is the part of $\omega_i$ orthogonal to the other probes. It is unbiased. A probe
    takes one product, half of what XTrace takes. A negative semidefinite operator is negated.

    A multiple of the identity, delta I, is taken off A first, and its trace is added afterwards.
    This takes no products. If the tail of the spectrum is flat, or narrow, a complex shift inverts
    what remains; of several shifts, 0 among them, that with the smallest standard error is taken.
    Where a few large eigenvalues stand above such a tail, the error is up to 100,000 times smaller
    than without; where the eigenvalues decay, the shift is 0. As the shift depends on the probes,
    there is a bias where it is not 0, of at most some tenth of the standard error
    (`docs/shifts.md`).

    A multiplies an orthonormal basis of the probes, which gives the same approximation in exact
    arithmetic. The published algorithm forms $\Omega^* A \Omega$ of the probes themselves. In
    floating point the basis is better: it does not matter that the probes are nearly dependent as k
    approaches n, and $c_i$ needs no Gram matrix. (If 50 eigenvalues are 1 and the rest 1e-8, the
    error of the published algorithm, without resphering, stalls near 1e-8; this one reaches 5e-10
    at k = 200.)

    The standard error includes the correlation between the samples (see
    [`traceax.XTraceEstimator`][]), without which it would be too small by 1.3 to 4 times.

    Cost: `k` matvecs; four blocks of `n x k` numbers (six with the gradient); `12 n k^2 + 80 k^3`
    operations beside the products.
    The derivative takes `2k` tangent products. It uses XTrace's weights from the same sketch,
    because the derivative of A need not be semidefinite.

    ??? cite "References"

        E. N. Epperly, J. A. Tropp, R. J. Webber, *XTrace: making the most of every sample in
        stochastic trace estimation*, 2024, arXiv:2301.07825, doi:10.1137/23M1548323.
    """

    sampler: AbstractSampler = SphereSampler()
    improved: bool | None = None
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 1

    def __check_init__(self):
        self.sampler.check_resphering(self.improved)

    def check(self, operator):
        """The operator must be tagged semidefinite."""
        self.sampler.check_dtype(BlockOperator(operator).dtype, self.improved)
        check_semidefinite(operator, "XNysTraceEstimator", "XTraceEstimator")

    def extendable(self, operator, falls_back_to_exact=False):
        """See `AbstractTraceEstimator`."""
        del falls_back_to_exact  # all probes are kept in any case
        resphere = self.sampler.respheres(self.improved, BlockOperator(operator).dtype)
        return XNysTraceExtendable(self.sampler, resphere, semidefinite_sign(operator))

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        return run_once(self.extendable(operator), key, operator, k)


XNysTraceEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.SphereSampler`][].
- `improved`: whether to renormalise ("resphere") the residual probes, which needs a rotation
    invariant distribution. By default wherever that is so.
- `batch_size`: the number of vectors to multiply at once. By default as many as make a block of
    2^27 numbers, or 64 vectors for operators that call functions. (A dense matrix is multiplied
    at once.)
"""

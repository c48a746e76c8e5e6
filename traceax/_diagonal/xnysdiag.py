"""XNysDiag."""

from typing import ClassVar, final

import equinox as eqx
import jax.numpy as jnp

from .._estimators.calibration import CALIBRATION, Calibration
from .._estimators.estimator import AbstractDiagonalEstimator
from .._estimators.extendable import AbstractExtendable, complete_diagonal, run_once
from .._estimators.rows import Rows
from .._operators.block_operator import BlockOperator
from .._operators.checks import check_semidefinite
from .._operators.tags import semidefinite_sign
from .._probes.samplers import AbstractSampler, RademacherSampler
from .._sketch.leave_one_out import matmul, pairs_of_gram, range_finder_of, square_of
from .._sketch.nystrom import (
    best_shift,
    empty_nystrom,
    extend_nystrom,
    rounding_of_nystrom,
    signed_estimate,
)
from .leave_one_out import DiagonalParts, diagonal_and_error
from .xdiag import xdiag_weights


@final
class XNysDiagExtendable(AbstractExtendable):
    """XNysDiag, like `XNysTraceExtendable`."""

    sampler: AbstractSampler
    sign: int = eqx.field(static=True)
    rows: Rows
    matvecs_per_probe: ClassVar[int] = 1
    calibration: ClassVar[Calibration] = CALIBRATION["xnysdiag"]

    def start(self, growth, block):
        """See `AbstractExtendable`."""
        return empty_nystrom(growth, block)

    def extend(self, state, growth, block):
        """See `AbstractExtendable`."""
        return extend_nystrom(state, self.sampler, growth, block, self.sign)

    def estimate(self, state, columns, block):
        """See `AbstractExtendable`."""
        factors, omega = state.factors(columns, block.eps), state.omega()
        # The shift for the trace, whose samples are the sums of those of the diagonal: as it is,
        # the standard errors of all entries would take n times the operations.
        shifts, rounding = factors.real_shifts(), factors.rounding(block.eps)
        nystrom = factors.shifted(best_shift(factors, shifts, False, rounding).shift)
        images = factors.products.numbers - nystrom.shift * factors.p
        images = matmul(images, factors.vectors)
        root = jnp.sqrt(nystrom.inverse)
        z = matmul(images, nystrom.b * root)
        low_rank = jnp.sum(square_of(images) * nystrom.inverse_core, axis=1)
        estimated = diagonal_and_error(
            DiagonalParts(
                base=low_rank + nystrom.shift,
                left=z,
                right=z,
                left_over=factors.rho * root,
                omega=omega,
                pairs=pairs_of_gram(nystrom.gram * root[:, None] * root, columns),
                columns=columns,
            ),
            self.rows,
            rounding_of_nystrom(self.rows.norms(factors.products.numbers), block.eps),
        )
        original = matmul(factors.products.numbers, factors.r)
        plain = columns.mean_and_std_err(self.rows(jnp.conj(omega) * original))
        value, std_err = factors.unless_wrong(*zip(estimated, plain, strict=True))
        return signed_estimate(factors, self.sign, value, std_err)

    def weights(self, state, columns, growth, block):
        """See `AbstractExtendable`."""
        shifted, omega = matmul(state.factors(columns, block.eps).sketch, state.r), state.omega()
        q, r = growth.again(block, shifted.T)
        return xdiag_weights(omega, range_finder_of(omega, q, r, columns, False))

    def complete(self, state, block):
        """See `AbstractExtendable`."""
        products = self.sign * state.products.T
        return complete_diagonal(block, state.p.T, products, rows=self.rows)


@final
class XNysDiagEstimator(AbstractDiagonalEstimator):
    r"""XNysDiag: the leave-one-out Nystrom estimator of the diagonal of a semidefinite operator.

    With `k` probes and $\hat A_{(i)}$ the Nystrom approximation from all probes but the i-th, the
    estimate is the mean over i of
    $\mathrm{diag}(\hat A_{(i)}) + \bar\omega_i \circ (A - \hat A_{(i)}) \omega_i$.
    It is unbiased, and a probe takes one product. The standard error of every entry includes the
    correlation between the samples. A negative semidefinite operator is negated. As in
    [`traceax.XNysTraceEstimator`][] a multiple of the identity is taken off A first: that with the
    smallest standard error of the trace, with the same small bias.

    Cost: `k` matvecs; six blocks of `n x k` numbers; `26 n k^2 + 60 k^3` operations. The
    derivative is that of XDiag from the same sketch, and takes `2k` tangent products.

    ??? cite "References"

        E. N. Epperly, J. A. Tropp, R. J. Webber, *XTrace: making the most of every sample in
        stochastic trace estimation*, 2024, arXiv:2301.07825, doi:10.1137/23M1548323.
    """

    sampler: AbstractSampler = RademacherSampler()
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 1

    def check(self, operator):
        """The operator must be tagged semidefinite."""
        self.sampler.check_dtype(BlockOperator(operator).dtype)
        check_semidefinite(operator, "XNysDiagEstimator", "XDiagEstimator")

    def extendable(self, operator, falls_back_to_exact=False, rows=Rows()):
        """See `AbstractDiagonalEstimator`."""
        del falls_back_to_exact  # all probes are kept in any case
        return XNysDiagExtendable(self.sampler, semidefinite_sign(operator), rows)

    def compute_rows(self, key, operator, k, rows):
        """See `AbstractDiagonalEstimator`."""
        return run_once(self.extendable(operator, rows=rows), key, operator, k)


XNysDiagEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.RademacherSampler`][].
- `batch_size`: the number of vectors to multiply at once. By default as many as make a block of
    2^27 numbers. (A dense matrix is multiplied at once.)
"""

"""XNysDiag."""

from typing import ClassVar, final

import jax.numpy as jnp

from .._estimate import NOT_SEMIDEFINITE, make_estimate, mean_and_std_err, status_of
from .._estimator import AbstractDiagonalEstimator
from .._nystrom import nystrom
from .._operator import BlockOperator, check_semidefinite, semidefinite_sign
from .._sampler import AbstractSampler, RademacherSampler
from .._sketch import matmul, pairs_of, range_finder, rescale_error
from ._leave_one_out import Split, diagonal_and_error
from .xdiag import xdiag_weights


@final
class XNysDiagEstimator(AbstractDiagonalEstimator):
    r"""XNysDiag: the leave-one-out Nystrom estimator of the diagonal of a semidefinite operator.

    With `k` probes and $\hat A_{(i)}$ the Nystrom approximation from all but the i-th, the mean
    over i of $\mathrm{diag}(\hat A_{(i)}) + \bar\omega_i \circ (A - \hat A_{(i)}) \omega_i$.
    Unbiased, and one product a probe. The standard error of every entry includes the correlation
    between the samples. A negative semidefinite operator is negated.

    Cost: `k` matvecs; six blocks of `n x k` numbers; `20 n k^2` operations. The derivative takes
    `2k` tangent products: XDiag's from the same sketch.

    ??? cite "References"

        E. N. Epperly, J. A. Tropp, R. J. Webber, *XTrace: making the most of every sample in
        stochastic trace estimation*, 2024, arXiv:2301.07825, doi:10.1137/23M1548323.
    """

    sampler: AbstractSampler = RademacherSampler()
    smallest: ClassVar[int] = 1

    def check(self, operator):
        """The operator must be tagged semidefinite."""
        self.sampler.check_dtype(BlockOperator(operator).dtype)
        check_semidefinite(operator, "XNysDiagEstimator", "XDiagEstimator")

    def compute_rows(self, key, operator, k, rows):
        """See `AbstractDiagonalEstimator`."""
        block = BlockOperator(operator).linearised()
        sign = semidefinite_sign(operator)
        omega = self.sampler.probes(key, block.n, k, block.dtype)
        factors = nystrom(block, omega, sign)
        f, z = factors.f, matmul(factors.f, factors.q)
        value, std_err = diagonal_and_error(
            Split(
                base=jnp.sum(jnp.abs(f) ** 2, axis=1) - factors.nu,
                left=z,
                right=z,
                left_over=factors.rho * jnp.sqrt(factors.inverse),
                omega=omega,
                pairs=pairs_of(factors.q),
            ),
            rows,
        )
        # With a wrong tag, fall back on what needs none: Hutchinson's samples from the products.
        original = matmul(factors.products / factors.scale, factors.r)
        plain, plain_err = mean_and_std_err(rows(jnp.conj(omega) * original))
        value = jnp.where(factors.wrong, plain, value).astype(block.dtype)
        std_err = jnp.where(factors.wrong, plain_err, std_err)
        status = status_of(factors.products)
        status = jnp.where((status == 0) & factors.wrong, NOT_SEMIDEFINITE, status)

        size = factors.size
        estimate = make_estimate(
            sign * size * value, rescale_error(size, std_err), k, k - 1, status
        )
        shifted = matmul(factors.sketch, factors.r)
        return estimate, xdiag_weights(omega, range_finder(omega, shifted, False))


XNysDiagEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.RademacherSampler`][].
"""

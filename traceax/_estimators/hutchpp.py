"""Hutch++ for traces, and Diag++, in its unbiased form, for diagonals."""

from typing import ClassVar, final

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact

from .._core.estimate import Estimate, evidence_of, mean_and_std_err, rounding_of, safe_norm
from .._core.precision import adjoint, column_dots, matmul, square_norms
from .._operators.block_operator import BlockOperator
from .._probes.random import split
from .._probes.samplers import AbstractSampler, SphereSampler, as_sampler, random_signs
from .._sketch.leave_one_out import resphering
from .._sketch.ranges import captured_diagonal, range_basis, residual_products
from .._sketch.weights import LowRankWeights
from .diagonal_error import DiagonalWeights, with_ties
from .estimator import AbstractTraceEstimator
from .rows import without_nonfinite
from .tolerance import RangeSampling


class AbstractSketchEstimator(AbstractTraceEstimator):
    """An estimator with a sketch, whose residual probes may be renormalised ("resphered")."""

    sampler: AbstractSampler | None = eqx.field(default=None, converter=as_sampler)
    improved: bool | None = None
    batch_size: int | None = eqx.field(default=None, static=True)

    def check(self, operator):
        """Any square operator will do."""
        self.residual_sampler.check_dtype(BlockOperator(operator).dtype, self.improved)

    @property
    def residual_sampler(self) -> AbstractSampler:
        """The distribution of probes whose residuals may be renormalised."""
        return self.sampler or SphereSampler()

    def sampling(self, operator, rows):
        """See `AbstractTraceEstimator`."""
        sampler = self.sampler_of_rows(BlockOperator(operator).dtype)
        return RangeSampling(rows=rows, sampler=sampler)

    def sampler_of_rows(self, dtype: np.dtype) -> AbstractSampler:
        """The distribution of the probes for a diagonal: independent entries of modulus 1."""
        return self.sampler or random_signs(dtype)

    def respheres(self, dtype: np.dtype) -> bool:
        """Whether the residual probes of a trace are renormalised."""
        return self.residual_sampler.respheres(self.improved, dtype)


@final
class HutchPlusPlusEstimator(AbstractSketchEstimator):
    r"""Hutch++: the trace on the range of a sketch, plus Hutchinson's estimate of the rest.

    With $Q$ an orthonormal basis of the range of $A \Omega$ ($m = \lfloor k/3 \rfloor$ probes) and
    $l = k - 2m$ fresh probes, $g_i = (I - Q Q^*) \omega_i$,

    $$\mathrm{tr}(Q^* A Q) + \frac{1}{l} \sum_i c_i \, g_i^* A g_i, \qquad
    c_i = (n - m) / \|g_i\|^2 \text{ if improved, else } 1.$$

    For a diagonal it is Diag++ (the published one drops the cross terms, and is biased),

    $$\mathrm{diag}(Q Q^* A) + \frac{1}{l} \sum_i \bar\omega_i \circ (I - Q Q^*) A \omega_i.$$

    Both are unbiased, and the samples are independent given $Q$.

    **Cost:** `k` matvecs (`2 floor(k/3)` for the sketch and its basis, the rest for probes; for a
    diagonal those of the basis are with the adjoint); about seven blocks of `n x k/3` numbers.

    **Arguments:**

    - `sampler`, `improved`, `batch_size`: as of [`traceax.XTraceEstimator`][].

    **Source:** R. A. Meyer, C. Musco, C. Musco, D. P. Woodruff, 2021, arXiv:2010.09649; of
    diagonals R. A. Baston, Y. Nakatsukasa, 2022, arXiv:2201.10684.
    """

    smallest: ClassVar[int] = 3

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator, self.batch_size).linearised()
        n = block.n
        m = k // 3
        tested = k - 2 * m  # m'
        q, omega = _basis_and_probes(key, block, self.residual_sampler, m, tested)
        z = block.mm(q)
        g = omega - matmul(q, matmul(adjoint(q), omega))
        products = block.mm(g)
        factor = resphering(float(n - m), square_norms(g), self.respheres(block.dtype))  # c_i
        residual, std_err = mean_and_std_err(factor * column_dots(g, products))
        value = jnp.sum(jnp.conj(q) * z) + residual

        # ||A||_F^2 is the sum of ||A Q||_F^2 and of the rest, which the residual probes estimate.
        rest = safe_norm(products.reshape(-1)) / jnp.sqrt(float(tested))
        size = jnp.hypot(safe_norm(z.reshape(-1)), rest.astype(std_err.dtype))
        std_err = jnp.hypot(std_err, rounding_of(size, block.eps))
        # A NaN or inf in the sketch shows in these products as well.
        evidence = evidence_of(z, products)
        estimate = Estimate(value, std_err, k, tested - 1, evidence, inflation=1.09, tail=4.5)
        u = jnp.concatenate([q, g * (factor / tested)], axis=1)
        v = jnp.concatenate([q, g], axis=1)
        return estimate, LowRankWeights(u, v)

    def compute_rows(self, key, operator, k, rows, weights):
        """See `AbstractTraceEstimator`."""
        block = BlockOperator(operator, self.batch_size).linearised()
        m = k // 3
        tested = k - 2 * m  # m'
        sampler = self.sampler_of_rows(block.dtype)
        q, omega = _basis_and_probes(key, block, sampler, m, tested)
        z, nan_rows = without_nonfinite(block.adjoint_mm(q))
        products, more_nan_rows = without_nonfinite(block.mm(omega))
        nan_rows = nan_rows + more_nan_rows
        samples = jnp.conj(omega) * residual_products(q, omega, products, z)
        residual, std_err = mean_and_std_err(rows(samples))
        if rows.sizes is None:
            std_err = with_ties(std_err, tested)
        value = rows.of_vector(captured_diagonal(q, z) + nan_rows) + residual
        std_err = jnp.hypot(std_err, rounding_of(rows.norms(z), block.eps))
        estimate = Estimate(value, std_err, k, tested - 1, evidence_of(z, nan_rows), separate=True)
        s = jnp.zeros((m, tested), block.dtype)
        ones = jnp.ones_like(s[0].real)
        return estimate, DiagonalWeights(q=q, s=s, omega=omega, beta=ones, rows=rows)


def _basis_and_probes(
    key, block: BlockOperator, sampler: AbstractSampler, m: int, tested: int
) -> tuple[Inexact[Array, "n m"], Inexact[Array, "n p"]]:
    """The basis Q = orth(A Omega) of a sketch with m probes, and fresh probes."""
    sketch_key, test_key = split(key)
    q = range_basis(block, sampler.probes(sketch_key, block.n, m, block.dtype))
    return q, sampler.probes(test_key, block.n, tested, block.dtype)

"""XNysTrace for traces, and XNysDiag for diagonals."""

from functools import partial
from typing import final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from .._core.estimate import Estimate, evidence_of, mean_and_std_err, worse
from .._linalg.factorisations import qr
from .._operators.block_operator import BlockOperator
from .._operators.checks import check_semidefinite
from .._operators.known_parts import definite_sign
from .._probes.samplers import AbstractSampler
from .._sketch.leave_one_out import (
    RangeFinder,
    matmul,
    pairs_of_gram,
    published_samples,
    quadratic_forms,
    range_finder,
    square_of,
)
from .._sketch.nystrom import Nystrom, ShiftedNystrom, best_shift, nystrom, rounding_of_nystrom
from .._sketch.shrunk import FEWEST
from .diagonal_error import DiagonalParts, DiagonalWeights, diagonal_and_error, shrinkage_of_rows
from .rows import RowWeights, without_nonfinite
from .sketching import AbstractLeaveOneOutEstimator


@final
class XNysTraceEstimator(AbstractLeaveOneOutEstimator):
    r"""XNysTrace: the leave-one-out Nystrom estimator for semidefinite operators.

    With `k` probes and $\hat A_{(i)}$ the Nystrom approximation of A from all probes but the i-th,
    the estimate is the mean over i of

    $$\mathrm{tr}(\hat A_{(i)}) + c_i \, \omega_i^* (A - \hat A_{(i)}) \omega_i, \qquad
    c_i = (n - k + 1) / \|g_i\|^2 \text{ if improved, else } 1,$$

    where $g_i$ is the part of $\omega_i$ orthogonal to the other probes, and for a diagonal
    (XNysDiag) that of $\mathrm{diag}(\hat A_{(i)}) + \bar\omega_i \circ (A - \hat A_{(i)})
    \omega_i$. It is unbiased. A probe takes one product, half of what XTrace takes.

    If the tail of the spectrum is flat or narrow, a multiple of the identity is taken off A first,
    without products. Of several shifts, 0 among them, the one with the smallest standard error of
    the trace is taken. As the shift depends on the probes, a nonzero shift has a small bias
    (`docs/shifts.md`).

    Cost: `k` matvecs; four blocks of `n x k` numbers (six with the gradient, or for a diagonal);
    `12 n k^2 + 80 k^3` operations beside the products, `26 n k^2 + 60 k^3` for a diagonal. The
    derivative takes `2k` tangent products, with XTrace's weights from the same sketch, because the
    derivative of A need not be semidefinite.

    **Arguments:** as [`traceax.XTraceEstimator`][].

    ??? cite "References"

        E. N. Epperly, J. A. Tropp, R. J. Webber, *XTrace: making the most of every sample in
        stochastic trace estimation*, 2024, arXiv:2301.07825, doi:10.1137/23M1548323.
    """

    sampler: AbstractSampler | None = None
    improved: bool | None = None
    batch_size: int | None = eqx.field(default=None, static=True)
    shrink: bool = eqx.field(default=False, static=True)

    @property
    def smallest(self):  # pyright: ignore
        """The smallest budget."""
        return FEWEST if self.shrink else 1

    def check(self, operator):
        """The operator must be tagged semidefinite."""
        super().check(operator)
        check_semidefinite(operator, "XNysTraceEstimator", "XTraceEstimator")

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        sign = definite_sign(operator)
        block = BlockOperator(operator, self.batch_size).linearised()
        omega = self.sampler_of_trace(block.dtype).probes(key, block.n, k, block.dtype)
        p, r = qr(omega)
        factors = nystrom(p, r, sign * block.mm(p), block.eps)
        terms = jnp.conj(omega) * matmul(factors.products.numbers, r)
        best = best_shift(
            factors, factors.complex_shifts(), self.samples_of(block, terms), factors.rounding()
        )
        # If the tag is wrong, the value is the mean of Hutchinson's samples, which needs no tag.
        without_tag = mean_and_std_err(quadratic_forms(factors.core, factors.r).real)
        value, std_err = factors.estimate(sign, (best.value, best.std_err), without_tag)
        # All samples share what the probes leave of the space: next to k = n they scatter together,
        # like one number with nearly n - k degrees of freedom.
        tail = 3.0
        dof = min(k - 1, tail * (max(block.n - k, 1) - 0.2))
        estimate = Estimate(value, std_err, k, dof, factors.evidence, inflation=1.11, tail=tail)
        if not weights:
            return estimate, None
        return estimate, self.weights_of(omega, _range_finder(factors, omega), best.weight)

    def compute_rows(self, key, operator, k, rows, weights):
        """See `AbstractTraceEstimator`."""
        sign = definite_sign(operator)
        block = BlockOperator(operator, self.batch_size).linearised()
        omega = self.sampler_of_rows(block.dtype).probes(key, block.n, k, block.dtype)
        p, r = qr(omega)
        products, lost = without_nonfinite(block.mm(p))
        factors = nystrom(p, r, sign * products, block.eps)
        # The shift for the trace, whose samples are the sums of those of the diagonal: as it is,
        # the standard errors of all entries would take n times the operations.
        samples_of = partial(published_samples, n=block.n, resphere=False)
        best = best_shift(factors, factors.real_shifts(), samples_of, factors.rounding())
        parts = _diagonal_parts(factors, omega, factors.shifted(best.shift))
        beta = shrinkage_of_rows(parts) if self.shrink else jnp.ones_like(factors.rho)
        rounding = rounding_of_nystrom(rows.norms(factors.products.numbers), factors.precision)
        estimated = diagonal_and_error(parts, beta, rows, rounding, hermitian=True)
        without_tag = mean_and_std_err(rows(jnp.conj(omega) * parts.products))
        value, std_err = factors.estimate(sign, estimated, without_tag)
        value = value + rows.of_vector(lost)
        evidence = worse(factors.evidence, evidence_of(lost))
        estimate = Estimate(value, std_err, k, k - 1, evidence, separate=True)
        if not weights:
            return estimate, None
        ranges = _range_finder(factors, omega)
        made = DiagonalWeights(q=ranges.q, s=ranges.s, omega=omega, beta=beta)
        return estimate, RowWeights(made, rows)


def _diagonal_parts(factors: Nystrom, omega: Array, shifted: ShiftedNystrom) -> DiagonalParts:
    """The pieces of the leave-one-out diagonal of A / scale."""
    products = factors.products.numbers
    images = matmul(products - shifted.shift * factors.p, factors.vectors)
    root = jnp.sqrt(shifted.inverse)
    z = matmul(images, shifted.b * root)
    return DiagonalParts(
        base=jnp.sum(square_of(images) * shifted.inverse_core, axis=1) + shifted.shift,
        left=z,
        right=z,
        left_over=factors.rho * root,
        omega=omega,
        products=matmul(products, factors.r),
        pairs=pairs_of_gram(shifted.gram * root[:, None] * root),
    )


def _range_finder(factors: Nystrom, omega: Array) -> RangeFinder:
    """The range finder of the sketch A Omega = (A P) R, which is that of A of either sign."""
    sketch = factors.products.numbers + factors.nu * factors.p
    return range_finder(omega, matmul(sketch, factors.r))

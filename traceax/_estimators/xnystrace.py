"""XNysTrace for traces, and XNysDiag for diagonals."""

from typing import ClassVar, final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from .._core.estimate import evidence_of, make_estimate, mean_and_std_err, worse
from .._linalg.factorisations import qr
from .._operators.block_operator import BlockOperator
from .._operators.checks import check_semidefinite
from .._operators.tags import semidefinite_sign
from .._probes.samplers import AbstractSampler, RademacherSampler, SphereSampler
from .._sketch.leave_one_out import (
    RangeFinder,
    matmul,
    pairs_of_gram,
    quadratic_forms,
    range_finder,
    square_of,
    xtrace_weights,
)
from .._sketch.nystrom import (
    Nystrom,
    ShiftedNystrom,
    best_shift,
    nystrom,
    rounding_of_nystrom,
    signed_estimate,
)
from .calibration import CALIBRATION
from .diagonal_error import DiagonalParts, diagonal_and_error
from .estimator import AbstractTraceEstimator
from .rows import Rows, RowWeights, without_nonfinite
from .samples import NystromSampling
from .xtrace import xdiag_weights


@final
class XNysTraceEstimator(AbstractTraceEstimator):
    r"""XNysTrace: the leave-one-out Nystrom estimator for semidefinite operators.

    With `k` probes and $\hat A_{(i)}$ the Nystrom approximation of A from all probes but the i-th,
    the estimate is the mean over i of

    $$\mathrm{tr}(\hat A_{(i)}) + c_i \, \omega_i^* (A - \hat A_{(i)}) \omega_i, \qquad
    c_i = (n - k + 1) / \|g_i\|^2 \text{ if improved, else } 1,$$

    where $g_i$ is the part of $\omega_i$ orthogonal to the other probes, and for a diagonal
    (XNysDiag) that of $\mathrm{diag}(\hat A_{(i)}) + \bar\omega_i \circ (A - \hat A_{(i)})
    \omega_i$. It is unbiased. A probe takes one product, half of what XTrace takes. A negative
    semidefinite operator is negated.

    A multiple of the identity, delta I, is taken off A first, and its trace is added afterwards.
    This takes no products. If the tail of the spectrum is flat, or narrow, a complex shift (for a
    diagonal a real one) inverts what remains; of several shifts, 0 among them, that with the
    smallest standard error of the trace is taken. Where a few large eigenvalues stand above such a
    tail, the error is up to 100,000 times smaller than without; where the eigenvalues decay, the
    shift is 0. As the shift depends on the probes, there is a bias where it is not 0, of at most
    some tenth of the standard error (`docs/shifts.md`).

    A multiplies an orthonormal basis of the probes, which gives the same approximation in exact
    arithmetic as the published algorithm, and a better one in floating point. The standard error
    includes the correlation between the samples (see [`traceax.XTraceEstimator`][]), without which
    it would be too small by 1.3 to 4 times.

    Cost: `k` matvecs; four blocks of `n x k` numbers (six with the gradient, or for a diagonal);
    `12 n k^2 + 80 k^3` operations beside the products, `26 n k^2 + 60 k^3` for a diagonal. The
    derivative takes `2k` tangent products. It uses XTrace's weights from the same sketch, because
    the derivative of A need not be semidefinite.

    ??? cite "References"

        E. N. Epperly, J. A. Tropp, R. J. Webber, *XTrace: making the most of every sample in
        stochastic trace estimation*, 2024, arXiv:2301.07825, doi:10.1137/23M1548323.
    """

    sampler: AbstractSampler | None = None
    improved: bool | None = None
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 1

    def __check_init__(self):
        (self.sampler or SphereSampler()).check_resphering(self.improved)

    def check(self, operator):
        """The operator must be tagged semidefinite."""
        dtype = BlockOperator(operator).dtype
        (self.sampler or SphereSampler()).check_dtype(dtype, self.improved)
        check_semidefinite(operator, "XNysTraceEstimator", "XTraceEstimator")

    def sampling(self, operator, rows):
        """See `AbstractTraceEstimator`."""
        sampler = self.sampler or (SphereSampler() if rows is None else RademacherSampler())
        return NystromSampling(rows=rows, sampler=sampler, sign=semidefinite_sign(operator))

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        sampler = self.sampler or SphereSampler()
        sign = semidefinite_sign(operator)
        block = BlockOperator(operator).linearised()
        resphere = sampler.respheres(self.improved, block.dtype)
        p, r = qr(sampler.probes(key, block.n, k, block.dtype))
        factors = nystrom(p, r, sign * block.mm(p), block.eps)
        rounding = factors.rounding(block.eps)
        best = best_shift(factors, factors.complex_shifts(), resphere, rounding)
        # If the tag is wrong, the value is the mean of Hutchinson's samples, which needs no tag.
        plain = mean_and_std_err(quadratic_forms(factors.core, factors.r).real)
        value, std_err = factors.unless_wrong((best.value, plain[0]), (best.std_err, plain[1]))
        value, std_err = signed_estimate(factors, sign, value, std_err)
        # All samples share what the probes leave of the space: next to k = n they scatter together,
        # like one number with nearly n - k degrees of freedom.
        dof = min(k - 1, CALIBRATION["xnystrace"].tail * (max(block.n - k, 1) - 0.2))
        estimate = make_estimate(value, std_err, k, dof, factors.evidence)
        made = xtrace_weights(*_sketch_of_probes(factors, resphere)) if weights else None
        return CALIBRATION["xnystrace"].applied(estimate), made

    def compute_rows(self, key, operator, k, rows, weights):
        """See `AbstractTraceEstimator`."""
        sign = semidefinite_sign(operator)
        block = BlockOperator(operator).linearised()
        sampler = self.sampler or RademacherSampler()
        p, r = qr(sampler.probes(key, block.n, k, block.dtype))
        products, lost = without_nonfinite(block.mm(p))
        factors = nystrom(p, r, sign * products, block.eps)
        # The shift for the trace, whose samples are the sums of those of the diagonal: as it is,
        # the standard errors of all entries would take n times the operations.
        rounding = factors.rounding(block.eps)
        best = best_shift(factors, factors.real_shifts(), False, rounding)
        parts = _diagonal_parts(factors, factors.shifted(best.shift))
        products = factors.products.numbers
        rounding = rounding_of_nystrom(rows.norms(products), block.eps)
        value, std_err = diagonal_and_error(parts, rows, rounding)
        plain = mean_and_std_err(rows(jnp.conj(parts.omega) * matmul(products, factors.r)))
        value, std_err = factors.unless_wrong((value, plain[0]), (std_err, plain[1]))
        value, std_err = signed_estimate(factors, sign, value, std_err)
        value = value + rows.of_vector(lost)
        evidence = worse(factors.evidence, evidence_of(lost))
        estimate = make_estimate(value, std_err, k, k - 1, evidence, separate=True)
        return estimate, _row_weights(factors, rows) if weights else None


def _diagonal_parts(factors: Nystrom, shifted: ShiftedNystrom) -> DiagonalParts:
    """The pieces of the leave-one-out diagonal of A / scale."""
    images = matmul(factors.products.numbers - shifted.shift * factors.p, factors.vectors)
    root = jnp.sqrt(shifted.inverse)
    z = matmul(images, shifted.b * root)
    return DiagonalParts(
        base=jnp.sum(square_of(images) * shifted.inverse_core, axis=1) + shifted.shift,
        left=z,
        right=z,
        left_over=factors.rho * root,
        omega=matmul(factors.p, factors.r),
        pairs=pairs_of_gram(shifted.gram * root[:, None] * root),
    )


def _sketch_of_probes(factors: Nystrom, resphere: bool) -> tuple[Array, RangeFinder]:
    """The probes Omega = P R, and the range finder of their sketch A Omega = (A P) R, which is that
    of A of either sign.
    """
    omega = matmul(factors.p, factors.r)
    return omega, range_finder(omega, matmul(factors.sketch, factors.r), resphere)


def _row_weights(factors: Nystrom, rows: Rows) -> RowWeights:
    return RowWeights(xdiag_weights(*_sketch_of_probes(factors, False)), rows)


XNysTraceEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.SphereSampler`][] for traces, and
    [`traceax.RademacherSampler`][] for diagonals.
- `improved`: whether to renormalise ("resphere") the residual probes of a trace, which needs a
    rotation invariant distribution. By default wherever that is so.
- `batch_size`: the number of vectors to multiply at once. By default as many as make a block of
    2^27 numbers, or 64 vectors for operators that call functions. (A dense matrix is multiplied
    at once.)
"""

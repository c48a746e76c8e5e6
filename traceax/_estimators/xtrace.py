"""XTrace and XNysTrace for traces, XDiag and XNysDiag for diagonals."""

from collections.abc import Callable
from functools import partial
from typing import final

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact

from .._core.estimate import Estimate, evidence_of, mean_and_std_err, rounding_of, worse
from .._core.precision import adjoint, column_dots, matmul, square_norms, square_of
from .._linalg.factorisations import qr
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import definite_sign, sign_of
from .._operators.tags import is_hermitian, semidefinite_sign
from .._probes.samplers import AbstractSampler
from .._sketch.leave_one_out import (
    LeaveOneOut,
    RangeFinder,
    Samples,
    leave_one_out_error,
    pairs_of,
    pairs_of_gram,
    published_samples,
    quadratic_forms,
    range_finder,
    rescale_error,
    shifted_sketch,
    xtrace_weights,
)
from .._sketch.nystrom import (
    Nystrom,
    ShiftedNystrom,
    best_samples,
    best_shift,
    nystrom,
    rounding_of_nystrom,
)
from .._sketch.ranges import captured_diagonal
from .._sketch.shrunk import FEWEST, plain_samples, shrunk_samples, shrunk_weights, skew_samples
from .._sketch.weights import LowRankWeights
from .diagonal_error import DiagonalParts, DiagonalWeights, diagonal_and_error
from .hutchpp import AbstractSketchEstimator
from .rows import without_nonfinite


def xtrace_parts(factors: RangeFinder, h: Array, t: Array) -> LeaveOneOut:
    """What leaving out probes does (see `_sketch.leave_one_out`), from H = Q^H A Q and
    T = (A Q)^H Omega.

    With a_i = Q^H A g_i = r_i - H x_i and b_i = (g_i^H A Q)^H = (Z^H omega)_i - H^H x_i,

        e_i = g_i^H A g_i = omega_i^H s_i s_i^H r_i - t_i^H x_i + x_i^H H x_i,

    and tr H loses s_i^H H s_i. Without j as well the residual probe gains Q u_ij beta,
    beta = u_ij^H x_i, hence

        e_ij = e_i + conj(beta) u_ij^H a_i + beta conj(u_ij^H b_i) + |beta|^2 u_ij^H H u_ij.

    As s_j^H r_i = 0, what Q_ij leaves of A omega_i is Q (s_i s_i^H + u_ij u_ij^H) r_i, of norm
    |s_i^H r_i| / nu_ij and with the inner product g_ij^H A omega_i
    = (conj(s_i^H w_i) - conj(beta gamma_ij) / nu_ij) s_i^H r_i.
    """
    _, r, s, w, x, square = factors
    s_h = adjoint(s)
    hx = matmul(h, x)
    height = column_dots(s, r)
    component = column_dots(s, w)
    residual = jnp.conj(component) * height - column_dots(t, x) + column_dots(x, hx)  # e_i

    pairs = pairs_of(s)
    lost = pairs.forms(matmul(s_h, matmul(h, s)))
    beta = pairs.components(matmul(s_h, x))
    right = pairs.components(matmul(s_h, r - hx))  # u_ij^H a_i
    left = pairs.components(matmul(s_h, t - matmul(adjoint(h), x)))  # u_ij^H b_i
    size = square_of(beta)
    change = jnp.conj(beta) * right + beta * jnp.conj(left) + size * lost
    pair_square = square[:, None] + size
    shared = component[:, None] - beta * pairs.gamma / jnp.sqrt(pairs.square)
    energy = 1 / pairs.square - square_of(shared) / pair_square
    return LeaveOneOut(
        base=jnp.trace(h),
        lost=quadratic_forms(h, s),
        residual=residual,
        square=square,
        pair_lost=lost,
        pair_residual=residual[:, None] + change,
        pair_square=pair_square,
        energy=square_of(height)[:, None] * energy,
        valid=pairs.valid,
    )


class AbstractLeaveOneOutEstimator(AbstractSketchEstimator):
    """An estimator whose samples may be shrunk towards Hutchinson's."""

    shrink: bool = eqx.field(default=False, static=True)

    def __check_init__(self):
        invariant = self.sampler is not None and self.sampler.rotation_invariant
        if self.shrink and (self.improved or invariant):
            raise ValueError(
                "shrink=True needs probes with independent entries of modulus 1, which are not "
                f"renormalised, got improved={self.improved} and sampler={self.sampler}. Leave "
                "these out, or use RademacherSampler()."
            )

    def sampler_of_trace(self, dtype: np.dtype) -> AbstractSampler:
        """The distribution of the probes for a trace."""
        return self.sampler_of_rows(dtype) if self.shrink else self.residual_sampler

    def samples_of(
        self, block: BlockOperator, terms: Inexact[Array, "n m"]
    ) -> Callable[[LeaveOneOut], Samples]:
        """The function that makes samples; `terms` are conj(omega) o A omega."""
        if not self.shrink:
            return partial(published_samples, n=block.n, resphere=self.respheres(block.dtype))
        plain = plain_samples if is_hermitian(block.operator) else skew_samples
        return partial(shrunk_samples, plain=plain(terms), n=block.n)

    def weights_of(self, omega: Array, factors: RangeFinder, beta: Array) -> LowRankWeights:
        """The weights of a trace, with those of the samples."""
        if self.shrink:
            return shrunk_weights(omega, factors, beta)
        return xtrace_weights(omega, factors, self.respheres(omega.dtype))


@final
class XTraceEstimator(AbstractLeaveOneOutEstimator):
    r"""XTrace: Hutch++ made exchangeable, so that every probe serves both as sketch and as test.

    With $m = \lfloor k/2 \rfloor$ probes, $Q_{(i)}$ an orthonormal basis of the range of
    $A \Omega_{-i}$ and $g_i = (I - Q_{(i)} Q_{(i)}^*) \omega_i$, the estimate is the mean over i of

    $$\mathrm{tr}(Q_{(i)}^* A Q_{(i)}) + c_i \, g_i^* A g_i, \qquad
    c_i = (n - m + 1) / \|g_i\|^2 \text{ if improved, else } 1,$$

    and for a diagonal (XDiag) that of
    $\mathrm{diag}(Q_{(i)} Q_{(i)}^* A) + \bar\omega_i \circ (I - Q_{(i)} Q_{(i)}^*) A \omega_i$.
    It is unbiased, and exact to rounding if the rank of A is less than m. The standard error
    includes the correlation between the samples, estimated without further products.

    **Cost:** `2 floor(k/2)` matvecs (for a diagonal half of them with the adjoint, or with A itself
    where it is tagged symmetric); four blocks of `n x k/2` numbers (six with the gradient);
    `10 n m^2` operations beside the products, `20 n m^2` for a diagonal.

    **Arguments:**

    - `sampler`: the distribution of the probes: by default [`traceax.SphereSampler`][], and for
        diagonals and shrunk samples random signs (phases for complex operators).
    - `improved`: whether to renormalise ("resphere") the residual probes of a trace: by default
        wherever the distribution is rotation invariant.
    - `batch_size`: the number of vectors to multiply at once; by default a block of $2^{27}$
        numbers, or 64 vectors for operators that call functions.
    - `shrink`: whether to shrink each sample towards Hutchinson's from the same probe, which is
        never much worse than the better of both. Such samples are not renormalised.

    **Source:** E. N. Epperly, J. A. Tropp, R. J. Webber, 2024, arXiv:2301.07825; of the standard
    error and of `shrink`: `_sketch.leave_one_out` and `_sketch.shrunk`.
    """

    @property
    def smallest(self):  # pyright: ignore
        """The smallest budget: a probe takes two products."""
        return 2 * FEWEST if self.shrink else 2

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator, self.batch_size).linearised()
        n = block.n
        m = k // 2
        omega = self.sampler_of_trace(block.dtype).probes(key, n, m, block.dtype)
        products, nu, sketch = shifted_sketch(block, omega, block.mm(omega))
        factors = range_finder(omega, sketch)
        z = block.mm(factors.q) / products.scale
        # The shift is added to the small matrices, so that no further block of n rows is made.
        h = matmul(adjoint(factors.q), z) + nu * jnp.eye(m, dtype=block.dtype)
        t = matmul(adjoint(z), omega) + nu * factors.w
        parts = xtrace_parts(factors, h, t)
        samples_of = self.samples_of(block, jnp.conj(omega) * sketch)
        values, differences, beta, _ = samples_of(parts)
        size = products.size
        value = size * (parts.base + jnp.mean(values) - n * nu)
        rounding = rounding_of(jnp.sqrt(jnp.mean(square_norms(factors.r))), block.eps)
        std_err = rescale_error(size, leave_one_out_error(values, differences, rounding))
        # A NaN or inf in a product shows in one of these factors.
        evidence = evidence_of(factors.r, h)
        estimate = Estimate(value, std_err, 2 * m, m - 1, evidence, inflation=1.15, tail=3.0)
        return estimate, self.weights_of(omega, factors, beta) if weights else None

    def compute_rows(self, key, operator, k, rows, weights):
        """See `AbstractTraceEstimator`."""
        block = BlockOperator(operator, self.batch_size).linearised()
        m = k // 2
        omega = self.sampler_of_rows(block.dtype).probes(key, block.n, m, block.dtype)
        products, nan_rows = without_nonfinite(block.mm(omega))
        products, nu, sketch = shifted_sketch(block, omega, products)
        factors = range_finder(omega, sketch)
        q = factors.q
        s = factors.s
        adjoint_products, more_nan_rows = without_nonfinite(block.adjoint_mm(q))
        nan_rows = nan_rows + more_nan_rows
        z = adjoint_products / products.scale + nu * q
        parts = DiagonalParts(
            base=captured_diagonal(q, z),
            left=matmul(q, s),
            right=matmul(z, s),
            left_over=column_dots(s, factors.r),
            omega=omega,
            products=sketch,
            pairs=pairs_of(s),
        )
        rounding = rounding_of(rows.norms(z), block.eps)
        value, std_err, beta = diagonal_and_error(parts, rows, rounding, shrink=self.shrink)
        size = products.size
        value = size * (value - rows.of_vector(jnp.full(block.n, nu)))
        value = value + rows.of_vector(nan_rows)
        std_err = rescale_error(size, std_err)
        evidence = evidence_of(factors.r, z, nan_rows)
        estimate = Estimate(value, std_err, 2 * m, m - 1, evidence, separate=True)
        return estimate, DiagonalWeights(q=q, s=s, omega=omega, beta=beta, rows=rows)


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
    without products. Of several shifts, 0 among them, each probe takes the one that the other
    probes find best. As these shifts depend on all probes, a nonzero one has a small bias.

    **Cost:** `k` matvecs; four blocks of `n x k` numbers (six with the gradient, or a diagonal);
    `12 n k^2 + 80 k^3` operations beside the products, `26 n k^2 + 60 k^3` for a diagonal. The
    derivative takes `2k` tangent products, with XTrace's weights from the same sketch, because the
    derivative of A need not be semidefinite.

    **Arguments:** as [`traceax.XTraceEstimator`][].

    **Source:** E. N. Epperly, J. A. Tropp, R. J. Webber, 2024, arXiv:2301.07825.
    """

    @property
    def smallest(self):  # pyright: ignore
        """The smallest budget."""
        return FEWEST if self.shrink else 1

    def check(self, operator):
        """The operator, or every term of it, must be tagged semidefinite."""
        super().check(operator)
        if semidefinite_sign(operator) == 0 and sign_of(operator) is None:
            raise ValueError(
                "XNysTraceEstimator needs a semidefinite operator, and this "
                f"{type(operator).__name__} is not tagged so. If it is, say so with "
                "`lineax.TaggedLinearOperator(operator, lineax.positive_semidefinite_tag)` (or "
                "`negative_semidefinite_tag`); otherwise use XTraceEstimator."
            )

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        sign = definite_sign(operator)
        block = BlockOperator(operator, self.batch_size).linearised()
        omega = self.sampler_of_trace(block.dtype).probes(key, block.n, k, block.dtype)
        p, r = qr(omega)
        factors = nystrom(p, r, sign * block.mm(p), block.eps)
        terms = jnp.conj(omega) * matmul(factors.products.numbers, r)
        values, differences, beta, _ = best_samples(factors, self.samples_of(block, terms))
        std_err = leave_one_out_error(values, differences, factors.rounding())
        estimated = jnp.mean(values), std_err
        # If the tag is wrong, the value is the mean of Hutchinson's samples, which needs no tag.
        without_tag = mean_and_std_err(quadratic_forms(factors.core, factors.r).real)
        value, std_err = factors.estimate(sign, estimated, without_tag)
        # All samples share what the probes leave of the space: next to k = n they scatter together,
        # like one number with nearly n - k degrees of freedom.
        tail = 3.0
        dof = min(k - 1, tail * (max(block.n - k, 1) - 0.2))
        estimate = Estimate(value, std_err, k, dof, factors.evidence, inflation=1.11, tail=tail)
        if not weights:
            return estimate, None
        return estimate, self.weights_of(omega, _range_finder(factors, omega), beta)

    def compute_rows(self, key, operator, k, rows, weights):
        """See `AbstractTraceEstimator`."""
        sign = definite_sign(operator)
        block = BlockOperator(operator, self.batch_size).linearised()
        omega = self.sampler_of_rows(block.dtype).probes(key, block.n, k, block.dtype)
        p, r = qr(omega)
        products, nan_rows = without_nonfinite(block.mm(p))
        factors = nystrom(p, r, sign * products, block.eps)
        # The shift for the trace, whose samples are the sums of those of the diagonal: as it is,
        # the standard errors of all entries would take n times the operations.
        parts = _diagonal_parts(factors, omega, factors.shifted(best_shift(factors)))
        rounding = rounding_of_nystrom(rows.norms(factors.products.numbers), factors.precision)
        options = {"shrink": self.shrink, "hermitian": True}
        mean, error, beta = diagonal_and_error(parts, rows, rounding, **options)
        without_tag = mean_and_std_err(rows(jnp.conj(omega) * parts.products))
        value, std_err = factors.estimate(sign, (mean, error), without_tag)
        value = value + rows.of_vector(nan_rows)
        evidence = worse(factors.evidence, evidence_of(nan_rows))
        estimate = Estimate(value, std_err, k, k - 1, evidence, separate=True)
        if not weights:
            return estimate, None
        ranges = _range_finder(factors, omega)
        made = DiagonalWeights(q=ranges.q, s=ranges.s, omega=omega, beta=beta, rows=rows)
        return estimate, made


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

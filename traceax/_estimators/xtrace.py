"""XTrace for traces, and XDiag for diagonals."""

from typing import final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from .._core.estimate import Estimate, evidence_of, rounding_of
from .._operators.block_operator import BlockOperator
from .._probes.samplers import AbstractSampler
from .._sketch.leave_one_out import (
    LeaveOneOut,
    RangeFinder,
    adjoint,
    column_dots,
    leave_one_out_error,
    matmul,
    pairs_of,
    quadratic_forms,
    range_finder,
    rescale_error,
    sketch_of,
    square_norms,
    square_of,
)
from .._sketch.ranges import captured_diagonal
from .._sketch.shrunk import FEWEST
from .diagonal_error import DiagonalParts, DiagonalWeights, diagonal_and_error, shrinkage_of_rows
from .rows import RowWeights, without_nonfinite
from .sketching import AbstractLeaveOneOutEstimator


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
    along = column_dots(s, w)
    residual = jnp.conj(along) * height - column_dots(t, x) + column_dots(x, hx)  # e_i

    pairs = pairs_of(s)
    lost = pairs.forms(matmul(s_h, matmul(h, s)))
    beta = pairs.components(matmul(s_h, x))
    towards = pairs.components(matmul(s_h, r - hx))  # u_ij^H a_i
    against = pairs.components(matmul(s_h, t - matmul(adjoint(h), x)))  # u_ij^H b_i
    size = square_of(beta)
    change = jnp.conj(beta) * towards + beta * jnp.conj(against) + size * lost
    pair_square = square[:, None] + size
    shared = along[:, None] - beta * pairs.gamma / jnp.sqrt(pairs.square)
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

    Cost: `2 floor(k/2)` matvecs (for a diagonal half of them with the adjoint, or with A itself
    where it is tagged symmetric); four blocks of `n x k/2` numbers (six with the gradient);
    `10 n m^2` operations beside the products, `20 n m^2` for a diagonal.

    **Arguments:**

    - `sampler`: the distribution of the probes: by default [`traceax.SphereSampler`][], and for
        diagonals and shrunk samples random signs (phases for complex operators).
    - `improved`: whether to renormalise ("resphere") the residual probes of a trace: by default
        wherever the distribution is rotation invariant.
    - `batch_size`: the number of vectors to multiply at once; by default a block of 2^27 numbers,
        or 64 vectors for operators that call functions.
    - `shrink`: whether to shrink each sample towards Hutchinson's from the same probe, which is
        never much worse than the better of both. Such samples are not renormalised.

    ??? cite "References"

        E. N. Epperly, J. A. Tropp, R. J. Webber, *XTrace: making the most of every sample in
        stochastic trace estimation*, 2024, arXiv:2301.07825, doi:10.1137/23M1548323.
        The identity of the standard error is derived in `_sketch.leave_one_out`.
    """

    sampler: AbstractSampler | None = None
    improved: bool | None = None
    batch_size: int | None = eqx.field(default=None, static=True)
    shrink: bool = eqx.field(default=False, static=True)

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
        sketch = sketch_of(block, omega, block.mm(omega))  # A Omega / scale + nu Omega
        factors = range_finder(omega, sketch.shifted)
        z = block.mm(factors.q) / sketch.products.scale
        # The shift is added to the small matrices, so that no further block of n rows is made.
        h = matmul(adjoint(factors.q), z) + sketch.nu * jnp.eye(m, dtype=block.dtype)
        t = matmul(adjoint(z), omega) + sketch.nu * factors.w
        parts = xtrace_parts(factors, h, t)
        samples_of = self.samples_of(block, jnp.conj(omega) * sketch.shifted)
        values, differences, beta = samples_of(parts)
        size = sketch.products.size
        value = size * (parts.base + jnp.mean(values) - n * sketch.nu)
        rounding = rounding_of(jnp.sqrt(jnp.mean(square_norms(factors.r))), block.eps)
        std_err = rescale_error(size, leave_one_out_error(values, differences, rounding))
        # A NaN or inf in a product shows in one of these factors.
        evidence = evidence_of(factors.r, h)
        more = {"inflation": 1.15, "tail": 3.0}
        estimate = Estimate(value, std_err, 2 * m, m - 1, evidence, **more)
        return estimate, self.weights_of(omega, factors, beta) if weights else None

    def compute_rows(self, key, operator, k, rows, weights):
        """See `AbstractTraceEstimator`."""
        block = BlockOperator(operator, self.batch_size).linearised()
        m = k // 2
        omega = self.sampler_of_rows(block.dtype).probes(key, block.n, m, block.dtype)
        products, lost = without_nonfinite(block.mm(omega))
        sketch = sketch_of(block, omega, products)
        factors = range_finder(omega, sketch.shifted)
        q = factors.q
        s = factors.s
        products, lost_too = without_nonfinite(block.adjoint_mm(q))
        lost = lost + lost_too
        z = products / sketch.products.scale + sketch.nu * q
        parts = DiagonalParts(
            base=captured_diagonal(q, z),
            left=matmul(q, s),
            right=matmul(z, s),
            left_over=column_dots(s, factors.r),
            omega=omega,
            products=sketch.shifted,
            pairs=pairs_of(s),
        )
        beta = shrinkage_of_rows(parts) if self.shrink else jnp.ones(m, block.dtype).real
        rounding = rounding_of(rows.norms(z), block.eps)
        value, std_err = diagonal_and_error(parts, beta, rows, rounding)
        size = sketch.products.size
        value = size * (value - rows.of_vector(jnp.full(block.n, sketch.nu)))
        value = value + rows.of_vector(lost)
        std_err = rescale_error(size, std_err)
        evidence = evidence_of(factors.r, z, lost)
        estimate = Estimate(value, std_err, 2 * m, m - 1, evidence, separate=True)
        made = DiagonalWeights(q=q, s=s, omega=omega, beta=beta)
        return estimate, RowWeights(made, rows) if weights else None

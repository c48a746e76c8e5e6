"""XDiag."""

from typing import ClassVar, final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._core.estimate import rounding_of, status_of
from .._estimators.calibration import CALIBRATION, Calibration
from .._estimators.estimator import AbstractDiagonalEstimator
from .._estimators.extendable import AbstractExtendable, complete_diagonal, run_once
from .._estimators.rows import Rows
from .._operators.block_operator import BlockOperator
from .._operators.tags import is_hermitian
from .._probes.samplers import AbstractSampler, RademacherSampler
from .._sketch.leave_one_out import (
    RangeFinder,
    adjoint,
    column_dots,
    empty_sketch,
    extend_sketch,
    leave_one_out_directions,
    matmul,
    pairs_of,
    rescale_error,
    without_zero_pivots,
)
from .._sketch.weights import AbstractTwoSidedWeights, InUse
from .leave_one_out import DiagonalParts, diagonal_and_error


@final
class XDiagWeights(AbstractTwoSidedWeights):
    """XDiag as a function of A, with the probes and everything computed from them held fixed:

    diag(Q (I - S S^H / m) Q^H A)
    + mean_i conj(omega_i) (A omega_i - Q (I - s_i s_i^H) Q^H A omega_i)

    A contraction costs 2 m matvecs, m of them with the adjoint.
    """

    q: Inexact[Array, "n m"]
    s: Inexact[Array, "m m"]
    omega: Inexact[Array, "n m"]
    share: Real[Array, ""]  # 1 / m
    in_use: InUse | None = None

    def combine(self, products, adjoint_products):
        """See `AbstractTwoSidedWeights`."""
        q, s, omega, share = self.q, self.s, self.omega, self.share
        kept = q - matmul(q, matmul(s, adjoint(s))) * share
        captured = jnp.sum(kept * jnp.conj(adjoint_products), axis=1)
        inner = matmul(adjoint(adjoint_products), omega)  # Q^H A Omega
        inner = inner - s * column_dots(s, inner)
        samples = jnp.conj(omega) * (products - matmul(q, inner))
        return captured + jnp.sum(samples, axis=1) * share


def xdiag_weights(omega: Array, factors: RangeFinder) -> XDiagWeights:
    """The weights that belong to a sketch."""
    share = jnp.asarray(1 / factors.columns.used, jnp.finfo(omega.dtype).dtype)
    return XDiagWeights(q=factors.q, s=factors.s, omega=omega, share=share)


@final
class XDiagExtendable(AbstractExtendable):
    """XDiag, whose sketch can be extended by further probes."""

    sampler: AbstractSampler
    rows: Rows
    matvecs_per_probe: ClassVar[int] = 2
    calibration: ClassVar[Calibration] = CALIBRATION["xdiag"]

    def start(self, growth, block):
        """See `AbstractExtendable`."""
        return empty_sketch(growth, block)

    def extend(self, state, growth, block):
        """See `AbstractExtendable`."""
        return extend_sketch(state, self.sampler, growth, block, adjoint=True)

    def estimate(self, state, columns, block):
        """See `AbstractExtendable`."""
        q, z = state.q.T, state.shifted()
        r = without_zero_pivots(columns.triangle(state.r))
        s = leave_one_out_directions(r)
        value, std_err = diagonal_and_error(
            DiagonalParts(
                base=jnp.sum(q * jnp.conj(z), axis=1) - state.nu,
                left=matmul(q, s),
                right=matmul(z, s),
                left_over=column_dots(s, r),
                omega=state.omega.T,
                pairs=pairs_of(s, columns),
                columns=columns,
            ),
            self.rows,
            rounding_of(self.rows.norms(z), block.eps),
        )
        std_err = rescale_error(state.size, std_err)
        return state.size * value, std_err, status_of(state.r, z)

    def weights(self, state, columns, growth, block):
        """See `AbstractExtendable`."""
        return xdiag_weights(state.omega.T, state.factors(columns, False))

    def complete(self, state, block):
        """See `AbstractExtendable`: A is known on the span of Omega and, if A is Hermitian, on the
        span of Q.

        (If A is not Hermitian, products with the adjoint do not help: A on the complement of Omega
        takes n - m more products with or without them.)
        """
        q, known = state.q.T, state.products.T
        if not is_hermitian(block.operator):
            q, known = q[:, :0], known[:, :0]
        others = state.omega.T, state.sketch()
        return complete_diagonal(block, q, known, others, rows=self.rows)


@final
class XDiagEstimator(AbstractDiagonalEstimator):
    r"""XDiag: Diag++ made exchangeable, so that every probe serves both as sketch and as test.

    With $m = \lfloor k/2 \rfloor$ probes and $Q_{(i)}$ an orthonormal basis of the range of
    $A \Omega_{-i}$, the estimate is the mean over i of
    $\mathrm{diag}(Q_{(i)} Q_{(i)}^* A) + \bar\omega_i \circ (I - Q_{(i)} Q_{(i)}^*) A \omega_i$.

    It is unbiased. The standard error of every entry includes the correlation between the samples
    (see [`traceax.XTraceEstimator`][]).

    Cost: `2 floor(k/2)` matvecs, half of them with the adjoint (with A itself where it is tagged
    symmetric or semidefinite); five blocks of `n x k/2` numbers; `20 n m^2` operations.

    ??? cite "References"

        E. N. Epperly, J. A. Tropp, R. J. Webber, *XTrace: making the most of every sample in
        stochastic trace estimation*, 2024, arXiv:2301.07825, doi:10.1137/23M1548323.
    """

    sampler: AbstractSampler = RademacherSampler()
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 2

    def check(self, operator):
        """Any square operator will do."""
        self.sampler.check_dtype(BlockOperator(operator).dtype)

    def extendable(self, operator, falls_back_to_exact=False, rows=Rows()):
        """See `AbstractDiagonalEstimator`."""
        del falls_back_to_exact  # all probes are kept in any case
        return XDiagExtendable(self.sampler, rows)

    def compute_rows(self, key, operator, k, rows):
        """See `AbstractDiagonalEstimator`."""
        return run_once(self.extendable(operator, rows=rows), key, operator, k)


XDiagEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.RademacherSampler`][].
- `batch_size`: the number of vectors to multiply at once. By default as many as make a block of
    2^27 numbers. (A dense matrix is multiplied at once.)
"""

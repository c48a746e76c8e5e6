"""Diag++, the unbiased form."""

from typing import ClassVar, final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._core.estimate import rounding_of, status_of
from .._estimators.calibration import CALIBRATION, Calibration, with_ties
from .._estimators.estimator import AbstractDiagonalEstimator
from .._estimators.extendable import AbstractExtendable, complete_diagonal, run_once
from .._estimators.rows import Rows
from .._operators.block_operator import BlockOperator
from .._operators.tags import is_hermitian
from .._probes.samplers import AbstractSampler, RademacherSampler
from .._sketch.leave_one_out import adjoint, matmul
from .._sketch.split_sketch import empty_split, extend_split
from .._sketch.weights import AbstractTwoSidedWeights, InUse


def _pieces(q: Array, omega: Array, products: Array, adjoint_products: Array):
    """diag(Q Q^H A), and the samples conj(omega_i) (I - Q Q^H) A omega_i."""
    captured = jnp.sum(q * jnp.conj(adjoint_products), axis=1)
    inner = matmul(adjoint(adjoint_products), omega)  # Q^H A Omega
    return captured, jnp.conj(omega) * (products - matmul(q, inner))


@final
class _DiagPlusPlusWeights(AbstractTwoSidedWeights):
    """Diag++ as a function of A, with Q and the probes held fixed."""

    q: Inexact[Array, "n m"]
    omega: Inexact[Array, "n p"]
    share: Real[Array, ""]  # 1 / p
    in_use: InUse | None = None

    def combine(self, products, adjoint_products):
        """See `AbstractTwoSidedWeights`."""
        captured, samples = _pieces(self.q, self.omega, products, adjoint_products)
        return captured + jnp.sum(samples, axis=1) * self.share


@final
class DiagPlusPlusExtendable(AbstractExtendable):
    """Diag++, a stage of which gives sketch, basis and residual probes a third of its products
    each. Given the basis, of whatever size, all residual probes are independent.
    """

    sampler: AbstractSampler
    rows: Rows
    keeps: bool = eqx.field(static=True)
    matvecs_per_probe: ClassVar[int] = 3
    takes_rest: ClassVar[bool] = True
    calibration: ClassVar[Calibration] = CALIBRATION["diag++"]

    def start(self, growth, block):
        """See `AbstractExtendable`."""
        return empty_split(growth, block, self.keeps)

    def extend(self, state, growth, block):
        """See `AbstractExtendable`."""
        state = extend_split(state, self.sampler, growth, block, self.keeps)
        products = growth.multiply(block, block.mm, state.g, state.products)
        z = growth.multiply(block, block.adjoint_mm, state.q, state.z)
        return state._replace(z=z, products=products)

    def estimate(self, state, columns, block):
        """See `AbstractExtendable`."""
        z = state.z.T
        captured, samples = _pieces(state.q.T, state.g.T, state.products.T, z)
        tested = state.tested(columns)
        residual, std_err = tested.mean_and_std_err(self.rows(samples))
        if self.rows.sizes is None:
            std_err = with_ties(std_err, tested.used)
        value = self.rows.of_vector(captured) + residual
        std_err = jnp.hypot(std_err, rounding_of(self.rows.norms(z), block.eps))
        # A NaN or inf in the sketch shows in the basis, and then in its products.
        return value, std_err, status_of(z, value)

    def weights(self, state, columns, growth, block):
        """See `AbstractExtendable`."""
        share = jnp.asarray(1 / state.tested(columns).used, jnp.finfo(block.dtype).dtype)
        return _DiagPlusPlusWeights(q=state.q.T, omega=state.g.T, share=share)

    def complete(self, state, block):
        """See `AbstractExtendable`, and `complete` of `XDiagExtendable`."""
        q, z = state.q.T, state.z.T
        if not is_hermitian(block.operator):
            q, z = q[:, :0], z[:, :0]
        return complete_diagonal(block, q, z, state.others(), rows=self.rows)


@final
class DiagPlusPlusEstimator(AbstractDiagonalEstimator):
    r"""Diag++: the diagonal on the range of a sketch, plus Hutchinson's estimate of the rest.

    With $Q$ an orthonormal basis of the range of $A \Omega$ ($m = \lfloor k/3 \rfloor$ probes) and
    $m' = k - 2m$ fresh probes,

    $$\mathrm{diag}(Q Q^* A) + \frac{1}{m'} \sum_i \bar\omega_i \circ (I - Q Q^*) A \omega_i.$$

    This is unbiased. (The form that projects on both sides drops the cross terms, and is biased.)
    Given Q the samples are independent, so the standard error is the plain one.

    Cost: `k` matvecs, `floor(k/3)` of them with the adjoint; four blocks of `n x k/3` numbers.

    ??? cite "References"

        R. A. Baston, Y. Nakatsukasa, *Stochastic diagonal estimation: probabilistic bounds and an
        improved algorithm*, 2022, arXiv:2201.10684.
    """

    sampler: AbstractSampler = RademacherSampler()
    batch_size: int | None = eqx.field(default=None, static=True)
    smallest: ClassVar[int] = 3

    def check(self, operator):
        """Any square operator will do."""
        self.sampler.check_dtype(BlockOperator(operator).dtype)

    def extendable(self, operator, falls_back_to_exact=False, rows=Rows()):
        """See `AbstractDiagonalEstimator`."""
        return DiagPlusPlusExtendable(self.sampler, rows, falls_back_to_exact)

    def compute_rows(self, key, operator, k, rows):
        """See `AbstractDiagonalEstimator`."""
        return run_once(self.extendable(operator, rows=rows), key, operator, k)


DiagPlusPlusEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.RademacherSampler`][].
- `batch_size`: the number of vectors to multiply at once. By default as many as make a block of
    2^27 numbers, or 64 vectors for operators that call functions. (A dense matrix is multiplied
    at once.)
"""

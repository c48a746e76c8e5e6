"""Diag++, the unbiased form."""

from typing import ClassVar, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .._core.estimate import make_estimate, mean_and_std_err, rounding_of, status_of
from .._estimators.calibration import CALIBRATION, Calibration
from .._estimators.estimator import AbstractDiagonalEstimator
from .._estimators.extendable import AbstractExtendable, complete_diagonal, run_once
from .._estimators.rows import Rows
from .._operators.block_operator import BlockOperator, is_hermitian
from .._probes.random import split
from .._probes.samplers import AbstractSampler, RademacherSampler
from .._sketch.leave_one_out import adjoint, append_basis, empty_state, matmul
from .._sketch.weights import AbstractTwoSidedWeights


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

    def combine(self, products, adjoint_products):
        """See `AbstractTwoSidedWeights`."""
        captured, samples = _pieces(self.q, self.omega, products, adjoint_products)
        return captured + jnp.sum(samples, axis=1) * self.share


class DiagPlusPlusState(NamedTuple):
    """The basis and the residual probes, with their products; and the probes of the sketch with the
    sketch itself (without rows if they are not kept).
    """

    q: Inexact[Array, "n m"]
    z: Inexact[Array, "n m"]  # A^H Q
    omega: Inexact[Array, "n m"]
    products: Inexact[Array, "n m"]  # A Omega
    first: Inexact[Array, "rows m"]  # the probes of the sketch
    sketch: Inexact[Array, "rows m"]
    scale: Real[Array, ""]  # of the first sketch
    status: Int[Array, ""]


@final
class DiagPlusPlusExtendable(AbstractExtendable):
    """Diag++ block by block. Sketch, basis and residual probes each get a third of a block. Given
    the basis, of whatever size, all residual probes are independent.
    """

    sampler: AbstractSampler
    rows: Rows
    keeps: bool = eqx.field(static=True)
    matvecs_per_probe: ClassVar[int] = 3
    calibration: ClassVar[Calibration] = CALIBRATION["diag++"]

    def extend(self, state, key, block, k):
        """See `AbstractExtendable`."""
        n, m = block.n, k // 3
        sketch_key, probe_key = split(key)
        first = self.sampler.probes(sketch_key, n, m, block.dtype)
        sketch = block.mm(first)
        omega = self.sampler.probes(probe_key, n, k - 2 * m, block.dtype)
        products = block.mm(omega)
        rows = n if self.keeps else 0
        if state is None:
            state = empty_state(DiagPlusPlusState, sketch, self.keeps)
        # Scaled, so that the QR factorisation does not overflow. The basis stays the same.
        q, _, _ = append_basis(state.q, sketch / state.scale)
        z = block.adjoint_mm(q)
        return DiagPlusPlusState(
            jnp.concatenate([state.q, q], axis=1),
            jnp.concatenate([state.z, z], axis=1),
            jnp.concatenate([state.omega, omega], axis=1),
            jnp.concatenate([state.products, products], axis=1),
            jnp.concatenate([state.first, first[:rows]], axis=1),
            jnp.concatenate([state.sketch, sketch[:rows]], axis=1),
            state.scale,
            jnp.maximum(state.status, status_of(sketch, products, z)),
        )

    def estimate(self, state, block):
        """See `AbstractExtendable`."""
        m, fresh = state.q.shape[1], state.omega.shape[1]
        captured, samples = _pieces(state.q, state.omega, state.products, state.z)
        residual, std_err = mean_and_std_err(self.rows(samples))
        value = self.rows.of_vector(captured) + residual
        std_err = jnp.hypot(std_err, rounding_of(self.rows.norms(state.z), block.eps))
        return make_estimate(value, std_err, 2 * m + fresh, fresh - 1, state.status)

    def weights(self, state, block, keys, budgets):
        """See `AbstractExtendable`."""
        share = jnp.asarray(1 / state.omega.shape[1], jnp.finfo(block.dtype).dtype)
        return [_DiagPlusPlusWeights(state.q, state.omega, share)], [1.0]

    def complete(self, state, block):
        """See `AbstractExtendable`, and `complete` of `XDiagExtendable`."""
        vectors = jnp.concatenate([state.omega, state.first], axis=1)
        products = jnp.concatenate([state.products, state.sketch], axis=1)
        q, z = state.q, state.z
        if not is_hermitian(block.operator):
            q, z = q[:, :0], z[:, :0]
        return complete_diagonal(block, q, z, (vectors, products), rows=self.rows)


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

"""Diag++, the unbiased form."""

from typing import ClassVar, final

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Inexact

from .._estimate import make_estimate, mean_and_std_err, scale_of, status_of
from .._estimator import AbstractDiagonalEstimator
from .._linalg import qr
from .._operator import BlockOperator
from .._sampler import AbstractSampler, RademacherSampler
from .._sketch import adjoint, matmul
from .._weights import AbstractWeights


@final
class _DiagPlusPlusWeights(AbstractWeights):
    """Diag++ as a function of A, with Q and the probes held fixed."""

    q: Inexact[Array, "n m"]
    omega: Inexact[Array, "n p"]

    def contract(self, operator):
        """See `AbstractWeights`."""
        captured, samples, _ = self.pieces(BlockOperator(operator))
        return captured + jnp.mean(samples, axis=1)

    def pieces(self, block: BlockOperator):
        """diag(Q Q^H A), the samples conj(omega_i) (I - Q Q^H) A omega_i, and all products."""
        q, omega = self.q, self.omega
        products, adjoint_products = block.mm(omega), block.adjoint_mm(q)
        captured = jnp.sum(q * jnp.conj(adjoint_products), axis=1)
        inner = matmul(adjoint(adjoint_products), omega)  # Q^H A Omega
        samples = jnp.conj(omega) * (products - matmul(q, inner))
        return captured, samples, (products, adjoint_products)


@final
class DiagPlusPlusEstimator(AbstractDiagonalEstimator):
    r"""Diag++: the diagonal on the range of a sketch, plus Hutchinson's estimate of the rest.

    With $Q$ an orthonormal basis of the range of $A \Omega$ ($m = \lfloor k/3 \rfloor$ probes) and
    $m' = k - 2m$ fresh probes,

    $$\mathrm{diag}(Q Q^* A) + \frac{1}{m'} \sum_i \bar\omega_i \circ (I - Q Q^*) A \omega_i.$$

    Unbiased: the form that projects on both sides drops the cross terms, and is not. Given Q the
    samples are independent, so the standard error is the plain one.

    Cost: `k` matvecs, `floor(k/3)` of them with the adjoint; four blocks of `n x k/3` numbers.

    ??? cite "References"

        R. A. Baston, Y. Nakatsukasa, *Stochastic diagonal estimation: probabilistic bounds and an
        improved algorithm*, 2022, arXiv:2201.10684.
    """

    sampler: AbstractSampler = RademacherSampler()
    smallest: ClassVar[int] = 3

    def check(self, operator):
        """Any square operator will do."""
        self.sampler.check_dtype(BlockOperator(operator).dtype)

    def compute_rows(self, key, operator, k, rows):
        """See `AbstractDiagonalEstimator`."""
        block = BlockOperator(operator).linearised()
        m = k // 3
        sketch_key, probe_key = jr.split(key)
        sketch = block.mm(self.sampler.probes(sketch_key, block.n, m, block.dtype))
        q, _ = qr(sketch / scale_of(sketch))
        omega = self.sampler.probes(probe_key, block.n, k - 2 * m, block.dtype)
        weights = _DiagPlusPlusWeights(q, omega)
        captured, samples, products = weights.pieces(block)
        residual, std_err = mean_and_std_err(rows(samples))
        status = status_of(sketch, *products)
        value = rows.of_vector(captured) + residual
        return make_estimate(value, std_err, k, k - 2 * m - 1, status), weights


DiagPlusPlusEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.RademacherSampler`][].
"""

"""XDiag."""

from typing import ClassVar, final

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .._estimate import make_estimate, status_of
from .._estimator import AbstractDiagonalEstimator
from .._operator import BlockOperator
from .._sampler import AbstractSampler, RademacherSampler
from .._sketch import (
    RangeFinder,
    adjoint,
    column_dots,
    matmul,
    pairs_of,
    range_finder,
    rescale_error,
    sketch_of,
)
from .._weights import AbstractWeights
from ._leave_one_out import Split, diagonal_and_error


@final
class XDiagWeights(AbstractWeights):
    """XDiag as a function of A, with the probes and all that was learnt from them held fixed:

    diag(Q (I - S S^H / m) Q^H A)
    + mean_i conj(omega_i) (A omega_i - Q (I - s_i s_i^H) Q^H A omega_i)

    Contracting costs 2 m matvecs, m of them with the adjoint.
    """

    q: Inexact[Array, "n m"]
    s: Inexact[Array, "m m"]
    omega: Inexact[Array, "n m"]

    def contract(self, operator):
        """See `AbstractWeights`."""
        block = BlockOperator(operator)
        q, s, omega = self.q, self.s, self.omega
        m = s.shape[0]
        products, adjoint_products = block.mm(omega), block.adjoint_mm(q)
        kept = q - matmul(q, matmul(s, adjoint(s))) / m
        captured = jnp.sum(kept * jnp.conj(adjoint_products), axis=1)
        inner = matmul(adjoint(adjoint_products), omega)  # Q^H A Omega
        inner = inner - s * column_dots(s, inner)
        return captured + jnp.mean(jnp.conj(omega) * (products - matmul(q, inner)), axis=1)


def xdiag_weights(omega: Array, factors: RangeFinder) -> XDiagWeights:
    """The weights that belong to a sketch."""
    return XDiagWeights(factors.q, factors.s, omega)


@final
class XDiagEstimator(AbstractDiagonalEstimator):
    r"""XDiag: Diag++ made exchangeable, every probe serving both as sketch and as test.

    With $m = \lfloor k/2 \rfloor$ probes and $Q_{(i)}$ an orthonormal basis of the range of
    $A \Omega_{-i}$, the mean over i of
    $\mathrm{diag}(Q_{(i)} Q_{(i)}^* A) + \bar\omega_i \circ (I - Q_{(i)} Q_{(i)}^*) A \omega_i$.

    Unbiased. The standard error of every entry includes the correlation between the samples (see
    [`traceax.XTraceEstimator`][]).

    Cost: `2 floor(k/2)` matvecs, half of them with the adjoint (with A itself where it is tagged
    symmetric or semidefinite); five blocks of `n x k/2` numbers; `20 n m^2` operations.

    ??? cite "References"

        E. N. Epperly, J. A. Tropp, R. J. Webber, *XTrace: making the most of every sample in
        stochastic trace estimation*, 2024, arXiv:2301.07825, doi:10.1137/23M1548323.
    """

    sampler: AbstractSampler = RademacherSampler()
    smallest: ClassVar[int] = 2

    def check(self, operator):
        """Any square operator will do."""
        self.sampler.check_dtype(BlockOperator(operator).dtype)

    def compute_rows(self, key, operator, k, rows):
        """See `AbstractDiagonalEstimator`."""
        block = BlockOperator(operator).linearised()
        m = k // 2
        omega = self.sampler.probes(key, block.n, m, block.dtype)
        # From here on the operator is A / scale + nu I.
        sketch = sketch_of(block, omega)
        factors = range_finder(omega, sketch.shifted, False)
        products = block.adjoint_mm(factors.q)
        z = products / sketch.scale + sketch.nu * factors.q

        value, std_err = diagonal_and_error(
            Split(
                base=jnp.sum(factors.q * jnp.conj(z), axis=1) - sketch.nu,
                left=matmul(factors.q, factors.s),
                right=matmul(z, factors.s),
                left_over=column_dots(factors.s, factors.r),
                omega=omega,
                pairs=pairs_of(factors.s),
            ),
            rows,
        )
        status = status_of(sketch.products, products)
        std_err = rescale_error(sketch.size, std_err)
        estimate = make_estimate(sketch.size * value, std_err, 2 * m, m - 1, status)
        return estimate, xdiag_weights(omega, factors)


XDiagEstimator.__init__.__doc__ = """**Arguments:**

- `sampler`: the distribution of the probes. By default [`traceax.RademacherSampler`][].
"""

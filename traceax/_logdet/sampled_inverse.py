r"""The diagonal of the inverse, by samples with the covariance A^{-1}, where that of A is known.

Let D be the diagonal of A, M = D^{-1/2} A D^{-1/2}, and z a vector of random signs. The samples

    x = D^{-1/2} M^{-1/2} z,      E x x^H = A^{-1},

are those of a Gaussian Markov random field with the precision A, if z is normal. The mean of x_i
given all other entries is then y_i, and its variance given them is 1 / D_i, with

    y = x - D^{-1} A x = D^{-1/2} (M^{-1/2} - M^{1/2}) z,      (A^{-1})_ii = 1 / D_i + E |y_i|^2

(Rao-Blackwell; P. Siden, F. Lindgren, D. Bolin, M. Villani, *Efficient covariance approximations
for large sparse precision matrices*, 2018, arXiv:1705.08656). The identity needs E z z^H = I alone,
as the diagonal of M is 1. The error of an entry is relative to |y_i|^2, whatever the range of the
correlations, while probes omega o A^{-1} omega see all correlations.

*The roots* come from Lanczos' recurrence for M from z, M^{1/2} z ~ ||z|| V T^{1/2} e_1.

*Standard errors.* |y_i|^2 has the variance 2 (E |y_i|^2)^2 at most. With p probes and their mean m,
the variance of m is 2 / (p + 2) times the mean of m^2, with (p + 2) / 5 degrees of freedom.
(The scatter of a few squares says nothing: its relative variance is 12 / p + 2 / (p - 1).)

*Quadrature errors* are those of other functions, entry by entry, but the error of sum_i D_i |x_i|^2
is also known (see `inverse`), of which entries have shares in proportion to 1 / D_i.

*The derivative* is that of the mean of conj(x_i) x_i(A), dx = -A^{-1} dA x, with the factor
conj(x_i) held fixed: E x x(A)^H = A^{-1} at every A, so the derivative is unbiased at every order.
"""

import math
from typing import ClassVar, final

import jax.numpy as jnp
from jaxtyping import Array

from .._core.estimate import Evidence, safe_norm, worse
from .._core.precision import einsum
from .._estimators.estimator import AbstractEstimator
from .._functions.funm import ended_after
from .._functions.quadrature_error import entries_truncation_error, orders_of, quadrature_estimate
from .._linalg.lanczos import lanczos, positive, quadrature
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import stored_diagonal
from .._probes.samplers import RademacherSampler
from .estimator import exact_inverse
from .factors import low_rank_plus_diagonal
from .preconditioners import check_definite
from .weights import InverseWeights


@final
class SampledInverseEstimator(AbstractEstimator):
    """The diagonal of the inverse of an operator whose diagonal is known."""

    smallest: ClassVar[int] = 2
    weights_depend_on_operator: ClassVar[bool] = True
    label = "inverse_diagonal"  # pyright: ignore

    def check(self, operator):
        """See `AbstractEstimator`."""
        check_definite(operator, self.label)

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        n = block.n
        p = max(min(k, 2), math.isqrt(k) // 2)
        q = k // p
        diagonal = stored_diagonal(operator)
        assert diagonal is not None  # the estimator is one for such operators
        diagonal = diagonal.real
        root = jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1))  # D^{1/2}
        factors = low_rank_plus_diagonal(jnp.zeros((n, 0), block.dtype), jnp.square(root))
        z = RademacherSampler().probes(key, n, p, block.dtype)
        krylov = lanczos(lambda x: factors.preconditioned(block.mm, x), z, q, block.eps)

        nodes, _, s = quadrature(ended_after(krylov, orders_of(q)))
        nodes = positive(nodes)
        length = safe_norm(z.T)

        def coordinates(values: Array) -> Array:
            """The coordinates ||z|| f(T) e_1 in V, with axes (order, probe, step)."""
            found = einsum("paj,pj->pa", s, s[:, 0, :] * values)
            return found.reshape(-1, p, q) * length[:, None]

        def vectors(coefficients: Array) -> Array:
            return einsum("qnp,...pq->...pn", krylov.basis, coefficients.astype(block.dtype)) / root

        inverse_root = coordinates(1 / jnp.sqrt(nodes))
        y = vectors(inverse_root - coordinates(jnp.sqrt(nodes)))
        means = jnp.mean(jnp.square(jnp.abs(y)), axis=1)
        value = 1 / jnp.square(root) + means[0]

        smallest = jnp.min(nodes)  # tiny, if there is one that is not positive
        rounding = block.eps * jnp.max(nodes) / smallest
        lost = ~((rounding < 0.5) & (jnp.min(diagonal) > 0))
        std_err = jnp.hypot(math.sqrt(2 / (p + 2)) * means[0], rounding * value)
        residual = krylov.residual * jnp.abs(coordinates(1 / nodes)[0, :, -1])
        missed = jnp.mean(residual * (residual / smallest))
        error = entries_truncation_error(means, jnp.all(krylov.exhausted))
        error = jnp.maximum(error, missed / n / jnp.square(root))
        evidence = worse(krylov.evidence(block.eps), Evidence(outside=lost))
        estimate = quadrature_estimate(value, error, std_err, p * q, (p + 2) / 5, evidence)
        if not weights:
            return estimate, None
        x = vectors(inverse_root[0]).T
        return estimate, InverseWeights(x, jnp.conj(x) / p, factors, False)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        return exact_inverse(operator, of_trace=False)

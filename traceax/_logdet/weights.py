r"""The weights of a log-determinant: G with E[G] = A^{-1}, and how G changes with A.

*The derivative* is tr(A^{-1} dA). With L the derivative of the logarithm at M, this is the mean of

    <L(M)[z z^H], R^{-1} dA R^{-H}>.

For the part 𝓛 = dA - (I - U U^H) dA (I - U U^H) of dA (in scaled coordinates),
tr(P^{-1} 𝓛) = sum_j u_j^H dA u_j / (lambda_j + mu) is known exactly, from l products. With
w = R^{-H} z, a control variate is beta (tr(P^{-1} 𝓛) - w^H 𝓛 w), which has mean 0 for any fixed
beta. If M is close to the identity and beta = 1, all but the block of dA outside of U cancels, and
the variance goes to 0 with growing rank. (With P held fixed, a variance would remain that no rank
removes.) If the rank is too small, beta = 1 would add more variance than it removes:
beta = s / (s + 3 t), with t the mean eigenvalue of what P leaves out, is close to the best one on
all kernels tried. (RBF in 5 dimensions, noise 1e-3, n = 400, rank 80, standard deviation of one
probe: 327 with beta = 1, 146 with beta = 0, 144 at best.) Let w_2 be the part of w outside of U:
w_2 w_2^H has mean (I - U U^H) / mu. It is normalised to its mean length, so that the derivative
with respect to s is nearly free of error. The sum of all this is <G, dA> with one matrix
G = V C V^H, and converges with q as the value does.

*The second derivative* is tr(A^{-1} d^2 A) - tr(A^{-1} dA A^{-1} dA). G changes as A^{-1} does,

    dG = -(A^{-1} dA G + G dA A^{-1}) / 2,      that is      dV = -A^{-1} dA V / 2,

so that the mean of <dG, dA> is the second term (as far as E[G] = A^{-1}), likewise at every order,
and it is symmetric in the two directions. It takes a solve with A for every column of V, with the
preconditioner P.
"""

from typing import final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact

from .._operators.block_operator import BlockOperator
from .._operators.known_parts import contracted, matrix_of
from .._sketch.leave_one_out import adjoint, matmul, square_norms
from .._sketch.low_rank import LowRankPlusIdentity
from .._sketch.weights import AbstractWeights
from .budget_policy import PreconditionedQuadrature
from .conjugate_gradients import definite_solve


@final
class LogdetWeights(AbstractWeights):
    """`G = V C V^H` with Hermitian C. A contraction costs as many matvecs as `V` has columns, or
    one pass over the entries of a kernel.
    """

    vectors: Inexact[Array, "n c"]
    core: Inexact[Array, "c c"]
    factors: LowRankPlusIdentity

    def contract(self, block):
        """See `AbstractWeights`."""
        return contracted(block.operator, self.vectors, self.core)

    def times_less(self, t: int, x: Inexact[Array, "n t"]) -> "LogdetWeights":
        """The weights `t G - X X^H`."""
        vectors = jnp.concatenate([self.vectors, x], axis=1)
        more = (0, x.shape[1]), (0, x.shape[1])
        beyond = jnp.arange(vectors.shape[1]) >= self.vectors.shape[1]
        core = jnp.pad(t * self.core, more) - jnp.diag(beyond.astype(self.core.dtype))
        return LogdetWeights(vectors, core, self.factors)

    def solve(self, operator, rhs):
        """`A^{-1} rhs`."""
        return definite_solve(BlockOperator(operator), self.factors, rhs)

    def weights_at(self, operator):
        """See above."""
        images = BlockOperator(operator).mm(self.vectors)
        change = self.solve(operator, images - lax.stop_gradient(images))
        return LogdetWeights(self.vectors - change / 2, self.core, self.factors)


@final
class ExactLogdetWeights(AbstractWeights):
    """`G = A^{-1}`. A contraction costs `n` matvecs, or none if the entries are stored."""

    inverse: Inexact[Array, "n n"]

    def _matrix(self, operator):
        return matrix_of(BlockOperator(operator))[0]

    def contract(self, block):
        """See `AbstractWeights`."""
        return jnp.sum(jnp.conj(self.inverse) * matrix_of(block)[0]).real

    def times_less(self, t: int, x: Inexact[Array, "n t"]) -> "ExactLogdetWeights":
        """The weights `t G - X X^H`."""
        return ExactLogdetWeights(t * self.inverse - matmul(x, adjoint(x)))

    def solve(self, _, rhs):
        """`A^{-1} rhs`."""
        return matmul(self.inverse, rhs)

    def weights_at(self, operator):
        """See above."""
        matrix = self._matrix(operator)
        change = matmul(self.inverse, matmul(matrix - lax.stop_gradient(matrix), self.inverse))
        return ExactLogdetWeights(self.inverse - change)


def weights_of(run: PreconditionedQuadrature) -> LogdetWeights:
    """G (see above), padded to the size that all plans share.

    The columns of V are the vectors U that P has captured, Lanczos' vectors (in the coordinates of
    A), and the part of the probes outside of U.

    **Arguments:**

    - `run`: the outcome of a plan.

    **Returns:**

    The weights. Cost: `4 n l p q` operations.
    """
    factors, beta = run.built.factors, run.built.control_variate_weight
    q, n, p = run.krylov.basis.shape
    root = factors.root.astype(run.probes.dtype)[:, None]
    krylov = factors.inverse_root_adjoint(run.krylov.basis.transpose(1, 2, 0).reshape(n, p * q))

    outside = factors.outside(run.probes)
    length = jnp.sqrt(square_norms(outside))
    rank = jnp.sum(square_norms(factors.basis))  # columns may be 0
    wanted = jnp.sqrt(jnp.maximum(n - rank, 0) / factors.mu)
    outside = outside * (wanted / jnp.where(length > 0, length, 1)).astype(outside.dtype) / root

    from jax.scipy.linalg import block_diag  # imported only here, because it takes time

    vectors = jnp.concatenate([factors.basis / root, krylov, outside], axis=1)
    core = block_diag(
        jnp.diag(beta / (factors.eigenvalues + factors.mu)),
        *(run.bounds.core.at[:, 0, 0].add(-beta) * (n / p)),
        jnp.diag(jnp.full(p, beta / p)),
    )
    most, _, columns = run.most
    more = (0, columns - vectors.shape[1])
    return LogdetWeights(
        vectors=jnp.pad(vectors, ((0, 0), more)),
        core=jnp.pad(core, (more, more)).astype(vectors.dtype),
        factors=factors.padded(most),
    )

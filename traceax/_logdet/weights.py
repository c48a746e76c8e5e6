r"""The weights of a log-determinant: G with E[G] = A^{-1}, and how G changes with A.

*The derivative* is tr(A^{-1} dA). With L the derivative of the logarithm at M, this is the mean of

    <L(M)[z z^H], R^{-1} dA R^{-H}>.

With w = R^{-H} z, a control variate is beta (tr(P^{-1} dA) - w^H dA w). If M is close to the
identity and beta = 1, nearly everything cancels.

*From entries.* P^{-1} = L L^H - E E^H, and beta = 1: tr(P^{-1} dA) is known from
the entries of the neighbourhoods and from r wide products.

*From products.* tr(P^{-1} dA) would take the diagonal of dA. With G = U T, U^H U = I, only the part
D = dA' - (I - U U^H) dA' (I - U U^H) of dA' = L^H dA L has a trace tr((I + G G^H)^{-1} D) that is
known, from r products, and the control variate is beta times its difference from the same form in
z. If the rank is too small, beta = 1 would add variance: beta = s / (s + 3 t), with t the mean
eigenvalue of what P leaves out. The part of z outside of U is normalised to its mean length, so
that the derivative with respect to s is nearly free of error.

The sum of all this is <G, dA>, with G = V C V^H (+ L L^H), and converges as the value does.

*The second derivative* is tr(A^{-1} d^2 A) - tr(A^{-1} dA A^{-1} dA). For a part V C V^H of G with
the mean A^{-1},

    dG = -(A^{-1} dA G + G dA A^{-1}) / 2,      that is      dV = -A^{-1} dA V / 2,

so that the mean of <dG, dA> is the second term, likewise at every order, and it is symmetric in the
two directions. From entries these are the parts from L(M)[z z^H] and from a known eigenvector: the
others have the mean 0. Each column of V that moves takes a solve with A.
"""

import dataclasses
from typing import final

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._core.derivatives import change_of
from .._core.precision import adjoint, matmul
from .._linalg.conjugate_gradients import cg_step, goes_on, start_of_solve
from .._linalg.factorisations import qr
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import matrix_of
from .._sketch.weights import AbstractWeights
from .factors import Factors, outside_of
from .run import Run


def _to_real(x: Inexact[Array, "n m"]) -> Real[Array, "..."]:
    return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x


def _from_real(x: Real[Array, "..."], dtype) -> Inexact[Array, "n m"]:
    return lax.complex(x[0], x[1]) if jnp.issubdtype(dtype, jnp.complexfloating) else x


def definite_solve(
    block: BlockOperator, factors: Factors, rhs: Inexact[Array, "n m"]
) -> Inexact[Array, "n m"]:
    """`A^{-1} rhs`, differentiable (any number of times) in A and in the right-hand sides `rhs`.

    Conjugate gradients with the preconditioner `factors` end at a relative residual of `eps^(3/4)`;
    the slowest column sets the number of block products. Columns that miss the residual are NaN: A
    is not positive definite, or close to singular.
    """
    tolerance = float(jnp.finfo(block.dtype).eps) ** 0.75
    factors = lax.stop_gradient(factors)

    def product(x):
        return _to_real(block.mm(_from_real(x, block.dtype)))

    def solve(_, rhs):
        target = factors.inverse_root(_from_real(rhs, block.dtype))
        end = lax.while_loop(
            lambda state: jnp.any(goes_on(state)),
            lambda state: cg_step(state, factors.preconditioned(block.mm, state.p)),
            start_of_solve(target, tolerance, 10 * block.n),
        )
        found = factors.inverse_root_adjoint(end.z * end.unit)
        return _to_real(jnp.where(end.square <= end.goal, found, jnp.nan))

    found = lax.custom_linear_solve(product, _to_real(rhs), solve, symmetric=True)
    return _from_real(found, block.dtype)


@final
class LogdetWeights(AbstractWeights):
    """`G = V C V^H` with Hermitian C, and `L L^H` if `factors.from_entries`. A contraction costs a
    matvec for each column of V.
    """

    vectors: Inexact[Array, "n c"]  # V
    core: Inexact[Array, "c c"]  # C
    factors: Factors
    moving: int = eqx.field(static=True)  # the number of columns that change with A

    def contract(self, block, x=None):
        """`<G, A>`; for t columns x, `t <G, A> - sum_j x_j^H A x_j` in one pass."""
        x = self.vectors[:, :0] if x is None else x
        times = max(x.shape[1], 1)
        left = jnp.concatenate([times * matmul(self.vectors, self.core), -x], axis=1)
        right = jnp.concatenate([self.vectors, x], axis=1)
        value = jnp.sum(block.forms(block.leaves(left), block.leaves(right))).real
        if self.factors.from_entries:
            value = value + times * self.factors.known_part(block.operator)
        return value

    def solve(self, operator, rhs):
        """`A^{-1} rhs`."""
        return definite_solve(BlockOperator(operator), self.factors, rhs)

    def weights_at(self, operator):
        """The weights of another A: dV = -A^{-1} dA V / 2 for the `moving` columns."""
        moved, fixed = jnp.split(self.vectors, [self.moving], axis=1)
        images = BlockOperator(operator).mm(moved)
        change = self.solve(operator, change_of(images))
        vectors = jnp.concatenate([moved - change / 2, fixed], axis=1)
        return dataclasses.replace(self, vectors=vectors)


@final
class ExactLogdetWeights(AbstractWeights):
    """`G = A^{-1}`. A contraction costs `n` matvecs, or none if the entries are stored."""

    inverse: Inexact[Array, "n n"]

    def contract(self, block, x=None):
        """See `LogdetWeights`."""
        g = self.inverse if x is None else x.shape[1] * self.inverse - matmul(x, adjoint(x))
        return jnp.sum(jnp.conj(g) * matrix_of(block)[0]).real

    def solve(self, _, rhs):
        """`A^{-1} rhs`."""
        return matmul(self.inverse, rhs)

    def weights_at(self, operator):
        """The weights of another A: dG = -A^{-1} dA A^{-1}."""
        matrix, _ = matrix_of(BlockOperator(operator))
        change = matmul(self.inverse, matmul(change_of(matrix), self.inverse))
        return ExactLogdetWeights(self.inverse - change)


@final
class InverseWeights(AbstractWeights):
    """The samples as functions of A. A contraction costs a matvec and a solve for every probe."""

    x: Inexact[Array, "n p"]
    omega: Inexact[Array, "n p"]  # divided by the number of probes
    factors: Factors | None  # None if x is the inverse, and omega the identity
    of_trace: bool = eqx.field(static=True)

    def contract(self, block):
        """See `AbstractWeights`. The contraction depends on A as x does."""
        forms = (self.omega * self.weights_at(block.operator).x).real
        return jnp.sum(forms) if self.of_trace else jnp.sum(forms, axis=1)

    def weights_at(self, operator):
        """The samples of another A: dx = -A^{-1} dA x."""
        block = BlockOperator(operator)
        images = block.mm(self.x)
        moved = change_of(images)
        if self.factors is None:
            change = matmul(self.x, moved)
        else:
            change = definite_solve(block, self.factors, moved)
        return dataclasses.replace(self, x=self.x - change)


def weights_of(run: Run) -> LogdetWeights:
    """G (see above), from the preconditioner and the probes; probes that are not in use are 0."""
    from jax.scipy.linalg import block_diag  # imported only here, because it takes time

    factors = run.built.factors
    omega, rows, bases = run.sums.vectors
    p = run.sums.drawn.astype(bases.dtype)
    beta = run.built.control_variate_weight
    one = jnp.eye(omega.shape[1], dtype=bases.dtype) / p
    vectors = [factors.inverse_root_adjoint(rows.T)]
    cores = [run.sampling.size * bases / p]
    if run.sampling.eigenpair is not None:
        eigenvector, eigenvalue = run.sampling.eigenpair
        vectors.append(factors.inverse_root_adjoint(eigenvector[:, None].astype(omega.dtype)))
        cores.append(jnp.full((1, 1), 1 / eigenvalue))
    moving = sum(block.shape[1] for block in vectors)
    vectors.append(factors.inverse_root_adjoint(omega))
    cores.append(-beta * one)
    if factors.from_entries:
        vectors.append(factors.captured())
        cores.append(-jnp.eye(factors.basis.shape[1], dtype=bases.dtype))
    else:
        u, t = qr(factors.basis)  # G = U T
        root = jnp.eye(len(t), dtype=t.dtype) - matmul(t, matmul(factors.core, adjoint(t)))
        inner = matmul(root, adjoint(root))  # U^H (I + G G^H)^{-1} U
        vectors.append(factors.scattered(jnp.concatenate([u, outside_of(u, omega)], axis=1)))
        cores += [beta * inner, beta * one]
        moving = sum(block.shape[1] for block in vectors)
    core = block_diag(*(core.astype(omega.dtype) for core in cores))
    return LogdetWeights(jnp.concatenate(vectors, axis=1), core, factors, moving)

r"""Spectral sums of operators that are not Hermitian, by Arnoldi's recurrence.

A probe z on the sphere of radius sqrt(n) and q steps of the recurrence (see `_linalg.arnoldi`) give
a Hessenberg matrix H = X diag(theta) X^{-1} (see `_linalg.diagonalisation`). With the weights
w_j = X_1j (X^{-1})_j1, which are complex, the estimate is the mean over p probes of

    a = n e_1^T f(H) e_1 = n sum_j w_j f(theta_j)  ~  z^H f(A) z.

The nodes theta_j lie in the field of values of A, or close by, and f must be holomorphic there.

*The standard error* is that of the scatter of the a.

*The quadrature error* compares q, q - d and q - 2d steps, see `funm`.

*Probes and steps.* A recurrence soon converges for entire functions: there are sqrt(k) probes.

*The derivative.* d tr f(A) = tr(f'(A) dA) = E[z^H dA f'(A) z], and f'(A) z ~ sqrt(n) V f'(H) e_1.
What f itself depends on is differentiated through sum_j w_j f(theta_j).

*Real values.* Of a real operator nodes and weights come in conjugate pairs, and the value is real
if f is real on the real line; unless f has a cut there, as the logarithm has, which is reported.
"""

import math
from typing import NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Complex, Inexact

from .._core.estimate import (
    Evidence,
    all_finite,
    evidence_of,
    mean_and_std_err,
    rounding_of,
    safe_norm,
    scale_of,
    worse,
)
from .._core.precision import einsum, matmul
from .._linalg.arnoldi import arnoldi
from .._linalg.diagonalisation import diagonalised
from .._linalg.factorisations import eigenvalues
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import matrix_of
from .._probes.samplers import SphereSampler
from .funm import AbstractFunctionEstimator, plan
from .nodes import Function, on_nodes, slope_of
from .quadrature_error import exact_estimate, orders_of, quadrature_estimate, truncation_error


class NonHermitianWeights(NamedTuple):
    """`G = U V^H`, and the quadrature. A contraction costs a product for each column of U (two for
    complex columns and a real operator).
    """

    u: Inexact[Array, "n c"]
    v: Inexact[Array, "n c"]
    nodes: Complex[Array, " m"]  # theta_j
    weights: Complex[Array, " m"]  # w_j


def _quadrature(
    fn: Function, nodes: Complex[Array, "..."], weights: Complex[Array, "..."], is_real: bool
) -> tuple[Array, Array, Array]:
    """Returns (sum_j w_j f(theta_j) along the last axis, whether a sum that should be real is
    real, the f(theta_j)). A node of weight 0 does not count, even where f is NaN.
    """
    values = on_nodes(fn, nodes, weights != 0)
    terms = weights * values
    total = jnp.sum(terms, axis=-1)
    if not is_real:
        return total, jnp.array(True), values
    rounding = math.sqrt(jnp.finfo(terms.dtype).eps) * jnp.sum(jnp.abs(terms), axis=-1)
    # NaN and inf are found elsewhere.
    return total.real, ~jnp.any(jnp.abs(total.imag) > rounding), values


@final
class ArnoldiEstimator(AbstractFunctionEstimator):
    """The mean of a over p probes, see above."""

    fn: Function
    num_steps: int | None = eqx.field(static=True)
    is_real: bool = eqx.field(static=True)  # whether the values are: see above

    def compute(self, key, operator, k, weights):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        n = block.n
        p, q = plan(k, self.num_steps or k // math.isqrt(k))
        probes = SphereSampler().probes(key, n, p, block.dtype)
        krylov = arnoldi(block.mm, probes, q, block.eps)
        orders = orders_of(q)
        ended = jnp.concatenate([krylov.ended_after(m) for m in orders])
        found = jax.vmap(diagonalised)(ended)
        nodes = found.nodes * jnp.tile(krylov.unit[:, 0], (len(orders), 1))
        masses = found.left[:, 0] * found.right[:, :, 0]  # w_j = X_1j (X^{-1})_j1
        forms, real_enough, values = _quadrature(self.fn, nodes, masses, self.is_real)
        error = truncation_error(n * forms.reshape(-1, p), krylov.residual == 0)
        value, std_err = mean_and_std_err(n * forms[:p])
        theta, w, values = (x[:p] for x in (nodes, masses, values))
        size = n * jnp.mean(jnp.sum(jnp.abs(w * values), axis=1))
        std_err = jnp.hypot(std_err, rounding_of(size, block.eps))
        usable = real_enough & all_finite(values)
        evidence = worse(evidence_of(krylov.size), Evidence(outside=~usable))

        estimate = quadrature_estimate(value, error, std_err, p * q, p - 1, evidence)
        if not weights:
            return estimate, None
        slopes = on_nodes(slope_of(self.fn), theta, w != 0)
        first = found.right[:p, :, 0]  # X^{-1} e_1
        coordinates = einsum("pij,pj->pi", found.left[:p], slopes * first)
        coordinates = coordinates.real if self.is_real else coordinates
        u = einsum("pin,pi->np", krylov.basis, coordinates) * (math.sqrt(n) / p)
        rule = theta.reshape(-1), w.reshape(-1) * (n / p)
        return estimate, NonHermitianWeights(u, probes, *rule)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        matrix, _ = matrix_of(block)
        unit = scale_of(matrix)
        scaled = matrix / unit
        # A perturbation of A by rounding changes tr f(A) by no more than tr(f'(A) dA), however
        # sensitive single eigenvalues are.
        nodes = eigenvalues(scaled) * unit
        ones = jnp.ones_like(nodes)
        value, real_enough, values = _quadrature(self.fn, nodes, ones, self.is_real)
        evidence = evidence_of(matrix, outside=~(real_enough & all_finite(values)))
        # |tr(f'(A) dA)| <= ||f'(A)||_F ||dA||_F; nothing is known where f' is not finite.
        found = diagonalised(scaled)
        slopes = on_nodes(slope_of(self.fn), found.nodes * unit)
        slope = matmul(found.left, slopes[:, None] * found.right)
        size = unit * safe_norm(scaled.reshape(-1)) * safe_norm(slope.reshape(-1))
        # The values of f, and their sum, are rounded as well.
        size = size + jnp.sum(jnp.where(jnp.isfinite(values), jnp.abs(values), 0))
        # To first order: eigenvalues that are all rounding, as of roots at 0, move further.
        noise = jr.normal(jr.key(0), scaled.shape, scaled.real.dtype)
        noise = 2 * block.eps * safe_norm(scaled.reshape(-1)) / safe_norm(noise.reshape(-1)) * noise
        moved, *_ = _quadrature(self.fn, eigenvalues(scaled + noise) * unit, ones, self.is_real)
        error = jnp.maximum(2 * block.eps * size, 4 * jnp.abs(moved - value))
        error = jnp.where(jnp.isfinite(error), error, jnp.inf)
        estimate = exact_estimate(value, error, block.n, evidence)
        slope = slope.real if self.is_real else slope
        one = jnp.eye(block.n, dtype=block.dtype)
        return estimate, NonHermitianWeights(slope, one, nodes, ones)

    def contract(self, weights, operator):
        """See `AbstractEstimator`. Linear in A; the leaves of `fn` have derivatives, too."""
        block = BlockOperator(operator)
        u = weights.u
        own, *_ = _quadrature(self.fn, weights.nodes, weights.weights, self.is_real)
        if jnp.iscomplexobj(u) and not jnp.issubdtype(block.dtype, jnp.complexfloating):
            images = block.mm(u.real) + 1j * block.mm(u.imag)
        else:
            images = block.mm(u)
        return jnp.sum(jnp.conj(weights.v) * images) + own

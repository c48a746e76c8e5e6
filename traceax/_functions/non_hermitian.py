r"""Spectral sums of operators that are not Hermitian, by Arnoldi's recurrence.

A probe z on the sphere of radius sqrt(n) and q steps of the recurrence (see `_linalg.arnoldi`) give
a Hessenberg matrix H = X diag(theta) X^{-1} (see `_linalg.diagonalisation`). With the weights
w_j = X_1j (X^{-1})_j1, which are complex, the estimate is the mean over p probes of

    a = n e_1^T f(H) e_1 = n sum_j w_j f(theta_j)  ~  z^H f(A) z.

The nodes theta_j lie in the field of values of A, or close by, and f must be holomorphic there.

*The standard error.* Let B = f(A) - tr(f(A)) / n. Over the complex numbers Var(z^H B z) is
n/(n+1) ||B||_F^2. Over the reals it is that of the symmetric part S = (B + B^T) / 2, so that it is
2n/(n+2) ||S||_F^2. With ||B||_F^2 = E ||B z||^2 and, over the reals,

    ||S||_F^2 = (||B||_F^2 + tr(B conj(B))) / 2 = E t,   t = (||B z||^2 + Re z^T B conj(B) z) / 2,

all of this comes from the same spaces: B z ~ sqrt(n) V u with u = (f(H) - a/n) e_1, and
B conj(B) is a function of A, too. For a skew-symmetric f(A) the error is 0, as it should be.
As single t may be negative, X = mean |t| is taken, which is not smaller on average. Then, as for
Hermitian operators (see `funm`),

    std_err^2 = (c X / p) / (1 - c / (n p)),      nu = p X^2 / max(||B^2||_F^2, ||B^H B||_F^2),

with E ||B^2 z||^2 and, for two probes, E |z^H B^H B z'|^2 for the norms.

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
from jaxtyping import Array, Complex, Inexact

from .._core.estimate import (
    Evidence,
    all_finite,
    evidence_of,
    rounding_of,
    safe_norm,
    scale_of,
    worse,
)
from .._core.precision import einsum, matmul
from .._linalg.arnoldi import arnoldi
from .._linalg.diagonalisation import diagonalised, function_of
from .._linalg.factorisations import eigenvalues
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import matrix_of
from .._probes.samplers import SphereSampler
from .funm import AbstractFunctionEstimator, degrees_of_freedom, form_error, plan, truncation_error
from .nodes import Function, on_nodes, slope_of
from .quadrature_error import exact_estimate, orders_of, quadrature_estimate


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
) -> tuple[Array, Array]:
    """Returns (sum_j w_j f(theta_j) along the last axis, whether a sum that should be real is
    real). A node of weight 0 does not count, even where f is NaN.
    """
    terms = weights * on_nodes(fn, nodes, weights != 0)
    total = jnp.sum(terms, axis=-1)
    if not is_real:
        return total, jnp.array(True)
    rounding = math.sqrt(jnp.finfo(terms.dtype).eps) * jnp.sum(jnp.abs(terms), axis=-1)
    # NaN and inf are found elsewhere.
    return total.real, ~jnp.any(jnp.abs(total.imag) > rounding)


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
        forms, real_enough = _quadrature(self.fn, nodes, masses, self.is_real)
        error = truncation_error(n * forms.reshape(-1, p), krylov.exhausted)
        value = n * jnp.mean(forms[:p])

        theta = nodes[:p]
        w = masses[:p]
        left = found.left[:p]  # X
        first = found.right[:p, :, 0]  # X^{-1} e_1
        values = on_nodes(self.fn, theta, w != 0)
        std_err, dof = self._error(values, theta, w, left, first, krylov.basis, probes)
        size = n * jnp.mean(jnp.sum(jnp.abs(w * values), axis=1))
        std_err = jnp.hypot(std_err, rounding_of(size, block.eps))
        usable = real_enough & all_finite(values)
        evidence = worse(krylov.evidence, Evidence(outside=~usable))

        estimate = quadrature_estimate(value, error, std_err, p * q, dof, evidence)
        if not weights:
            return estimate, None
        slopes = on_nodes(slope_of(self.fn), theta, w != 0)
        along = einsum("pij,pj->pi", left, slopes * first)
        along = along.real if self.is_real else along
        u = einsum("pin,pi->np", krylov.basis, along) * (math.sqrt(n) / p)
        rule = theta.reshape(-1), w.reshape(-1) * (n / p)
        return estimate, NonHermitianWeights(u, probes, *rule)

    def _error(self, values, nodes, weights, left, first, basis, probes) -> tuple[Array, Array]:
        """Returns (standard error, degrees of freedom nu): see above."""
        n, p = probes.shape
        is_complex = jnp.iscomplexobj(probes)
        unit = scale_of(values)
        mean = jnp.mean(jnp.sum(weights * values, axis=1)) / unit
        away = values / unit - mean  # f - a/n

        def applied(values):  # g(H) e_1
            return einsum("pij,pj->pi", left, values * first)

        images = einsum("pin,pi->pn", basis, applied(away))  # B z / sqrt(n)
        gram = jnp.square(jnp.abs(matmul(jnp.conj(images), images.T)))
        t = jnp.sqrt(jnp.diagonal(gram))
        if not is_complex:
            # conj(f)(theta) = conj(f(conj(theta)))
            conjugate = values if self.is_real else jnp.conj(on_nodes(self.fn, jnp.conj(nodes)))
            product = away * (jnp.where(weights != 0, conjugate, 0) / unit - jnp.conj(mean))
            t = jnp.abs(t + jnp.sum(weights * product, axis=1).real) / 2
        spread = jnp.mean(t)  # X / n
        std_err = unit * form_error(n * spread, n, p, is_complex)
        fourth = jnp.mean(jnp.sum(jnp.square(jnp.abs(applied(away**2))), axis=1))
        pairs = jnp.sum(gram * (1 - jnp.eye(p))) / max(p * (p - 1), 1)
        return std_err, degrees_of_freedom(spread, jnp.maximum(fourth, n * pairs), n * p)

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
        value, real_enough = _quadrature(self.fn, nodes, ones, self.is_real)
        values = on_nodes(self.fn, nodes)
        evidence = evidence_of(matrix, outside=~(real_enough & all_finite(values)))
        # |tr(f'(A) dA)| <= ||f'(A)||_F ||dA||_F; and |f| where that is less than |f'| ||dA||_F, as
        # for roots of eigenvalues that are made of rounding.
        rounding = 2 * block.eps * (unit * safe_norm(scaled.reshape(-1)))
        found = diagonalised(scaled)
        slopes = on_nodes(slope_of(self.fn), found.nodes * unit)
        most = jnp.abs(on_nodes(self.fn, found.nodes * unit))
        usable = jnp.abs(slopes) * rounding <= most
        limited = jnp.where(usable, slopes, most / jnp.where(rounding > 0, rounding, 1))
        norm = safe_norm(function_of(found, limited).reshape(-1))
        # The values of f, and their sum, are rounded as well.
        sizes = jnp.where(jnp.isfinite(values), jnp.abs(values), 0)
        error = rounding * norm + 2 * block.eps * jnp.sum(sizes)
        estimate = exact_estimate(value, error, block.n, evidence)
        slope = function_of(found, slopes)
        slope = slope.real if self.is_real else slope
        one = jnp.eye(block.n, dtype=block.dtype)
        return estimate, NonHermitianWeights(slope, one, nodes, ones)

    def contract(self, weights, operator):
        """See `AbstractEstimator`. Linear in A; the leaves of `fn` have derivatives, too."""
        block = BlockOperator(operator)
        u = weights.u
        own, _ = _quadrature(self.fn, weights.nodes, weights.weights, self.is_real)
        if jnp.iscomplexobj(u) and not jnp.issubdtype(block.dtype, jnp.complexfloating):
            images = block.mm(u.real) + 1j * block.mm(u.imag)
        else:
            images = block.mm(u)
        return jnp.sum(jnp.conj(weights.v) * images) + own

"""The log-determinant of a positive definite operator, its errors and its weights: from the sums of
a run (`run`), from a Cholesky factorisation, or from a stored diagonal.
"""

import math
from typing import Any, final

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Real

from .._core.estimate import (
    Estimate,
    Evidence,
    evidence_of,
    norm_of,
    safe_norm,
    scale_of,
    skew_of,
    worse,
)
from .._core.precision import adjoint, matmul
from .._functions.quadrature_error import exact_estimate, quadrature_estimate
from .._linalg.factorisations import cholesky_solve, generic, lower_cholesky
from .._operators.block_operator import BlockOperator
from .._operators.known_parts import has_entries, matrix_of, split_shift, stored_diagonal
from .._sketch.weights import AbstractWeights
from .factors import Factors
from .run import Run
from .weights import ExactLogdetWeights, InverseWeights

#: The rounding error of a Cholesky factorisation A = L L^H: log det A is off by at most this many
#: times eps sum_i A_ii / L_ii^2, as L_ii^2 = A_ii - sum_j |L_ij|^2 is accurate to some eps A_ii.
ROUNDING = 4.0


def rounding_of(
    factors: Factors, smallest: Array, largest: Array, eps: float, *evidence: Evidence
) -> tuple[Array, Evidence]:
    """Returns (relative rounding error of M's smallest eigenvalue, absolute of its logarithm;
    the worst of the evidence, and whether rounding hides that A is positive definite).

    `smallest` and `largest` are the extreme Ritz values of M, `eps` the relative precision of
    products with A.
    """
    # Products with A are accurate to eps times its largest eigenvalue; in products with M this
    # error is in the unit of P. Such errors are as good as random, and mostly cancel in the trace.
    positive = jnp.where(smallest > 0, smallest, 1)
    rounding = eps * jnp.maximum(factors.top, largest) / positive
    outside = jnp.where(smallest > 0, 2 * rounding, jnp.inf)
    # The terms of the sums in a product with a random vector have random signs: the largest row of
    # A, rather than its norm, says how large their rounding errors are.
    row = jnp.maximum(2 * factors.row, largest)
    seen = worse(*evidence)
    # An operator that is not Hermitian has no logarithm either.
    seen = worse(seen, Evidence(outside=jnp.maximum(outside, seen.skew)))
    return jnp.minimum(rounding, eps * row / positive), seen


def rounding_of_form(
    factors: Factors, largest: Real[Array, ""], x: Inexact[Array, "n t"], eps: float
) -> Real[Array, " t"]:
    """The rounding error of every x_j^H A x_j: a share of eps ||a|| ||D^{1/2} x||^2, with a the
    largest row of D^{-1/2} A D^{-1/2}, and P's scaling D. `largest` is the largest Ritz value of M,
    `eps` the relative precision of products with A.
    """
    row = jnp.maximum(largest, jnp.maximum(largest, 1) * factors.row)
    share = min(1 / 6, 6 / math.sqrt(len(x)))
    # Not the square of the norm, which overflows for operators of tiny scale.
    scaled = factors.unit[:, None].astype(x.dtype) * x
    return share * eps * jnp.square(jnp.sqrt(row) * safe_norm(scaled.T))


def estimate_of(
    n: int, parts: tuple[Array, ...], error: Array, std_err: Any, *counts: Any, **more: Any
) -> Estimate:
    """The estimate of a sum of n logarithms from its parts, such as log det P and tr log M, with
    the rounding of the logarithms (equal ones err alike) and of the parts added to the `error`.
    `counts` and `more` go to `quadrature_estimate`.
    """
    value = jnp.stack(parts)
    eps = float(jnp.finfo(value.dtype).eps)
    error = error + eps * (4 * n + jnp.sum(jnp.abs(value)))
    return quadrature_estimate(jnp.sum(value), error, std_err, *counts, least=1.0, **more)


def rounding_in(run: Run) -> tuple[Array, Evidence]:
    """Returns what `rounding_of` does, for a run."""
    given = run.built.factors, run.smallest, run.sums.probes.largest, run.sampling.block.eps
    return rounding_of(*given, run.built.evidence, run.sums.evidence)


def estimate_from(run: Run) -> Estimate:
    """The log-determinant and its errors, from the sums of a run."""
    factors = run.built.factors
    rounding, evidence = rounding_in(run)
    sampled, std_err, dof = run.sampling.sum_over(run.sums.probes)
    n = len(factors.basis)
    error = n * run.sums.error + math.sqrt(n) * rounding
    given = n, (factors.log_det, sampled), error, std_err, run.spent, dof, evidence
    return estimate_of(*given, stats=run.stats)


def inverse_size(
    factor: Inexact[Array, "n n"], root: Inexact[Array, " n"]
) -> tuple[Real[Array, ""], Real[Array, ""]]:
    """The spectral and the Frobenius norm of H^-1, H = D^-1/2 A D^-1/2 with the diagonal 1, from a
    few random vectors and the root of D. A factor of A is that of an H off by about eps, which
    changes log det A by eps ||H^-1||_F, and may hide that A is singular.
    """
    block = math.sqrt(root.size) * generic(root.size, 8, root.dtype)
    norms = []
    for _ in range(2):
        block = root[:, None] * cholesky_solve(factor, root[:, None] * block)
        norms.append(norm_of(block))
    return norms[1] / norms[0], norms[0] / math.sqrt(8)


def exact_logdet(
    operator: lx.AbstractLinearOperator,
) -> tuple[Estimate, ExactLogdetWeights, Inexact[Array, "n n"], Real[Array, " n"]]:
    """Returns (the log-determinant from the matrix A = L L^H, the weights, L, the root of the
    error of every squared pivot). Entries that are not stored take n products.
    """
    block = BlockOperator(operator)
    matrix, spent = matrix_of(block)
    n = block.n
    known = stored_diagonal(operator)
    entries = (jnp.diagonal(matrix) if known is None else known).real
    scale = scale_of(entries)  # no entry of a definite matrix exceeds its largest diagonal entry
    matrix = matrix / scale
    entries = entries / scale
    factor = lower_cholesky(matrix)
    diagonal = jnp.square(jnp.diagonal(factor).real)

    # Entries that were computed by products are only as accurate as these.
    eps = block.eps if spent else float(jnp.finfo(scale.dtype).eps)
    largest, size = inverse_size(factor, jnp.sqrt(entries).astype(matrix.dtype))
    lost = 2 * eps * largest

    # Nothing of a factor shows that A^H != A, and what is not Hermitian has no logarithm either. A
    # few vectors tell it in less time than a transpose takes.
    vectors = generic(n, 4, matrix.dtype)
    images = matmul(matrix, vectors)
    asymmetry = norm_of(images - matmul(adjoint(matrix), vectors))
    skew = skew_of(asymmetry, norm_of(images), n, block.eps)
    evidence = evidence_of(images, skew=skew, outside=jnp.maximum(lost, skew))
    parts = jnp.sum(jnp.log(diagonal)), n * jnp.log(scale)
    rounding = ROUNDING * eps * entries
    error = jnp.maximum(jnp.sum(rounding / diagonal), eps * size)
    stats = {"columns": jnp.asarray(n)} if has_entries(operator) else {}
    given = n, parts, error, jnp.zeros_like(error), spent, 0, evidence
    estimate = estimate_of(*given, stats=stats)
    root = jnp.sqrt(scale)
    made = ExactLogdetWeights(cholesky_solve(factor, jnp.eye(n, dtype=factor.dtype)) / scale)
    return estimate, made, factor * root.astype(factor.dtype), jnp.sqrt(rounding) * root


def exact_inverse(operator, of_trace: bool) -> tuple[Estimate, InverseWeights]:
    """Returns (the diagonal of the inverse or its sum, weights), from a Cholesky factorisation."""
    known, made, _, rounding = exact_logdet(operator)
    inverse = made.inverse
    value = jnp.diagonal(inverse).real
    error = jnp.square(safe_norm(inverse * rounding.astype(inverse.dtype)))
    error = error + float(jnp.finfo(error.dtype).tiny)  # smaller numbers underflow
    if of_trace:
        value = jnp.sum(value)
        error = jnp.sum(error)
    estimate = exact_estimate(value, error, known.num_matvecs, known.evidence, stats=known.stats)
    one = jnp.eye(len(inverse), dtype=inverse.dtype)
    return estimate, InverseWeights(inverse, one, None, of_trace)


@final
class DiagonalLogdetWeights(AbstractWeights):
    """The log-determinant of a diagonal operator is differentiated itself."""

    def contract(self, block):
        """See `AbstractWeights`."""
        return jnp.sum(jnp.log(split_shift(block.operator).exact.real))


def logdet_of_diagonal(operator: lx.AbstractLinearOperator) -> tuple[Estimate, AbstractWeights]:
    """Returns (the log-determinant of a diagonal operator, the weights), without a product."""
    made = DiagonalLogdetWeights()
    value = made.contract(BlockOperator(operator))
    diagonal = split_shift(operator).exact
    evidence = evidence_of(diagonal, outside=jnp.any(diagonal.real <= 0))
    zero = jnp.zeros_like(value)
    return estimate_of(diagonal.size, (value,), zero, zero, 0, 0, evidence), made

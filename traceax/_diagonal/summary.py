r"""Many answers from one pass: trace, diagonal, Frobenius norm and extreme eigenvalues.

All of these come from Y = A Omega, Z = A Q and Z' = A^H Q, where Q R = Y (see
`_sketch.leave_one_out`). If A is Hermitian, Z' = Z is not multiplied again. The trace is that of
XTrace, the diagonal that of XDiag.

*The Frobenius norm.* Let P_i project on the range of Q_i, a basis from all probes but i. Three of
the four blocks of A are then known, and the fourth is tested with probe i:

    f_i = ||A - (I - P_i) A (I - P_i)||_F^2 + c_i ||(I - P_i) A g_i||^2

(XTrace for A^H A would test P_i A (I - P_i) with the probes, too, and would not be exact for an A
of low rank that is not Hermitian.) With H = Q^H A Q, a_i = Q^H A g_i, the complements
Z_o = Z - Q H, Z'_o = Z' - Q H^H, y_i = A g_i - Q a_i, and N = Z_o^H Z_o + Z'_o^H Z'_o, this is

    f_i = ||H||_F^2 - |s_i^H H s_i|^2 + tr N - s_i^H N s_i + c_i (||y_i||^2 + |s_i^H a_i|^2).

With j held out as well, the plane of (s_i, u_ij) is lost, and the residual probe gains Q u_ij beta,
beta = u_ij^H x_i. The error of the mean follows from D_ij = f_i - f_ij. With s = s_i, u = u_ij,

    D_ij = |u^H H u|^2 + |s^H H u|^2 + |u^H H s|^2 + u^H N u + c_i (||y_i||^2 + |s^H a_i|^2)
           - c_ij (||y_i + Z_o u beta||^2 + |s^H (a_i + H u beta)|^2 + |u^H (a_i + H u beta)|^2).

*Eigenvalues.* A is known on the span of [Q, Omega], where the Rayleigh-Ritz method approximates its
extreme eigenvalues.

*The derivative.* With Q, S, x_i, c_i and Omega held fixed, trace and diagonal are linear and f_i
is quadratic in the products. Their derivatives are unbiased for the same reason as the values.
"""

from typing import Any, ClassVar, NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jax import lax
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, Real

from .._core.estimate import make_estimate, rounding_of, scale_of, status_of
from .._core.primitive import summary_p
from .._estimators.calibration import CALIBRATION
from .._estimators.estimator import AbstractEstimator, check_budget, solve
from .._estimators.rows import Rows
from .._estimators.solution import Solution
from .._linalg.factorisations import eigh, qr, svd
from .._operators.block_operator import BlockOperator
from .._operators.checks import as_operator
from .._operators.tags import is_hermitian
from .._probes.samplers import SphereSampler
from .._sketch.leave_one_out import (
    RangeFinder,
    adjoint,
    column_dots,
    frobenius_norm_of,
    leave_one_out_error,
    matmul,
    pairs_of,
    quadratic_forms,
    range_finder,
    rescale_error,
    resphering,
    sketch_of,
    square_norms,
)
from .._sketch.nystrom import core_status
from .._sketch.weights import AbstractWeights
from .._trace.xtrace import _xtrace_samples
from .leave_one_out import DiagonalParts, diagonal_and_error
from .norms import root, root_error


def _extremes(h: Inexact[Array, "m m"]) -> tuple[Array, Array]:
    """The smallest and the largest eigenvalue, and their eigenvectors."""
    values, vectors = eigh(h)
    return values[jnp.array([0, -1])], vectors[:, jnp.array([0, -1])]


def _absolute_square(x: Array) -> Array:
    # Not jnp.abs(x) ** 2: the derivative of abs does not exist at a complex 0.
    return (jnp.conj(x) * x).real


class _Blocks(NamedTuple):
    """The blocks of A with respect to Q and its complement, and A times the residual probes."""

    h: Inexact[Array, "m m"]  # Q^H A Q
    right: Inexact[Array, "n m"]  # Z_o = (I - Q Q^H) A Q
    left: Inexact[Array, "n m"]  # Z'_o = (I - Q Q^H) A^H Q
    inside: Inexact[Array, "m m"]  # a_i = Q^H A g_i
    outside: Inexact[Array, "n m"]  # y_i = (I - Q Q^H) A g_i


def _blocks(q: Array, x: Array, y: Array, z: Array, z_adjoint: Array) -> _Blocks:
    q_h = adjoint(q)
    h, images = matmul(q_h, z), y - matmul(z, x)
    inside = matmul(q_h, images)
    outside = images - matmul(q, inside)
    return _Blocks(h, z - matmul(q, h), z_adjoint - matmul(q, adjoint(h)), inside, outside)


def _norm_samples(blocks: _Blocks, s: Array, factor: Array) -> tuple[Array, Array]:
    """The samples f_i, and the part of them that is tested: ||y_i||^2 + |s_i^H a_i|^2."""
    h, right, left, inside, outside = blocks
    tested = square_norms(outside) + _absolute_square(column_dots(s, inside))
    known = jnp.sum(square_norms(h)) + jnp.sum(square_norms(right)) + jnp.sum(square_norms(left))
    lost = _absolute_square(quadratic_forms(h, s))
    lost = lost + square_norms(matmul(right, s)) + square_norms(matmul(left, s))
    return known - lost + factor * tested, tested


def _norm_differences(blocks: _Blocks, factors: RangeFinder, tested: Array, n: int) -> Array:
    """D_ij = f_i - f_ij."""
    h, right, left, inside, outside = blocks
    s, x, square, factor = factors.s, factors.x, factors.square, factors.factor
    s_h, pairs = adjoint(s), pairs_of(factors.s, factors.columns)
    right, left = matmul(right, s), matmul(left, s)
    right_forms = pairs.forms(matmul(adjoint(right), right)).real  # ||Z_o u||^2
    k = matmul(s_h, matmul(h, s))
    uhu, uhs = pairs.forms(k), pairs.components(k)
    shu = jnp.conj(pairs.components(adjoint(k)))
    lost = _absolute_square(uhu) + _absolute_square(uhs) + _absolute_square(shu)
    lost = lost + right_forms + pairs.forms(matmul(adjoint(left), left)).real

    beta = pairs.components(matmul(s_h, x))
    cross = pairs.components(matmul(adjoint(right), outside))  # u^H Z_o^H y_i
    size = _absolute_square(beta)
    outer = square_norms(outside)[:, None] + 2 * (jnp.conj(beta) * cross).real + size * right_forms
    along_s = column_dots(s, inside)[:, None] + shu * beta
    along_u = pairs.components(matmul(s_h, inside)) + uhu * beta
    pair_tested = outer + _absolute_square(along_s) + _absolute_square(along_u)
    pair_factor = resphering(n - s.shape[0] + 2, square[:, None] + size, True)
    differences = lost + (factor * tested)[:, None] - pair_factor * pair_tested
    return jnp.where(pairs.valid, differences, jnp.zeros_like(differences))


def _extreme_ritz(q: Array, omega: Array, y: Array, z: Array, eps: float) -> Array:
    """The smallest and largest Ritz value on the span of [Q, Omega], and their residual norms."""
    n, m = q.shape
    omega, y = omega / jnp.sqrt(n), y / jnp.sqrt(n)
    # After two projections G = Omega - Q C is orthogonal to Q to rounding.
    coefficients = matmul(adjoint(q), omega)
    g = omega - matmul(q, coefficients)
    again = matmul(adjoint(q), g)
    g, coefficients = g - matmul(q, again), coefficients + again

    # A new direction G v / sigma has the product (Y - Z C) v / sigma, with an error of
    # eps ||A|| / sigma. Directions that Q nearly contains are left out (for A = I + (low rank)
    # nearly all of them). The products that are kept have an error of about eps^(3/4).
    basis, r = qr(g)
    u, sigma, v_h = svd(r)
    kept = sigma > jnp.maximum(eps**0.25 * jnp.max(sigma), eps**0.5)
    inverse = jnp.where(kept, 1 / jnp.where(kept, sigma, 1), 0).astype(y.dtype)
    basis = jnp.where(kept, matmul(basis, u), 0)
    products = matmul(y - matmul(z, coefficients), adjoint(v_h)) * inverse

    t, at = jnp.concatenate([q, basis], axis=1), jnp.concatenate([z, products], axis=1)
    h = matmul(adjoint(t), at)
    # A direction that was left out gets a Ritz value in the middle, never an extreme one.
    middle = jnp.where(kept, 0, jnp.trace(h[:m, :m]).real / m)
    h = h + jnp.diag(jnp.concatenate([jnp.zeros_like(middle), middle])).astype(h.dtype)
    ends, vectors = _extremes((h + adjoint(h)) / 2)
    residuals = matmul(at, vectors) - matmul(t, vectors) * ends
    return jnp.concatenate([ends, jnp.sqrt(square_norms(residuals))])


def _vector(
    operator: lx.AbstractLinearOperator,
    trace: Array,
    square: Array,
    diagonal: Array,
    scale: Array | float = 0.0,
    tail: Array | float = 0.0,
) -> Array:
    """All values in one vector, for the primitive: trace, ||A||_F^2 / scale, scale (the square
    alone may over- or underflow), diagonal, and for Hermitian operators two Ritz values and their
    residual norms.
    """
    head = jnp.stack([jnp.asarray(x, diagonal.dtype) for x in (trace, square, scale)])
    tail = jnp.broadcast_to(jnp.asarray(tail, diagonal.dtype), 4 if is_hermitian(operator) else 0)
    return jnp.concatenate([head, diagonal, tail])


@final
class SummaryWeights(AbstractWeights):
    """The estimates as functions of A, with the probes and what was computed from them held fixed.

    Eigenvalues have no derivative. A contraction costs as many matvecs as the estimate.
    """

    omega: Inexact[Array, "n m"]
    q: Inexact[Array, "n m"]
    s: Inexact[Array, "m m"]
    x: Inexact[Array, "m m"]
    factor: Real[Array, " m"]
    scale: Real[Array, ""]

    def contract(self, operator):
        """See `AbstractWeights`."""
        block = BlockOperator(operator)
        omega, q, s, x = self.omega, self.q, self.s, self.x
        m = s.shape[0]
        products = block.mm(jnp.concatenate([omega, q], axis=1)) / self.scale
        y, z = products[:, :m], products[:, m:]
        z_adjoint = z if is_hermitian(operator) else block.adjoint_mm(q) / self.scale
        blocks = _blocks(q, x, y, z, z_adjoint)

        residual_forms = column_dots(omega - matmul(q, x), y - matmul(z, x))  # g_i^H A g_i
        samples = self.factor * residual_forms - quadratic_forms(blocks.h, s)
        trace = jnp.trace(blocks.h) + jnp.mean(samples)
        # As for XDiag: diag(Q (I - S S^H / m) Q^H A) + mean conj(omega_i) (I - P_i) A omega_i.
        kept = q - matmul(matmul(q, s), adjoint(s)) / m
        inner = matmul(adjoint(q), y)
        left_over = y - matmul(q, inner - s * column_dots(s, inner))
        diagonal = jnp.sum(kept * jnp.conj(z_adjoint), axis=1)
        diagonal = diagonal + jnp.mean(jnp.conj(omega) * left_over, axis=1)
        square = jnp.mean(_norm_samples(blocks, s, self.factor)[0])
        return self.scale * _vector(operator, trace, square, diagonal)


@final
class ExactSummaryWeights(AbstractWeights):
    """The exact summary as a function of A. A contraction costs `n` matvecs."""

    scale: Real[Array, ""]

    def contract(self, operator):
        """See `AbstractWeights`."""
        block = BlockOperator(operator)
        matrix = block.mm(jnp.eye(block.n, dtype=block.dtype))
        diagonal = jnp.diagonal(matrix)
        square = self.scale * jnp.sum(square_norms(matrix / self.scale))
        return _vector(operator, jnp.sum(diagonal), square, diagonal)


@final
class SummaryEstimator(AbstractEstimator):
    """XTrace, XDiag, their counterpart for the Frobenius norm, and Rayleigh-Ritz, in a vector."""

    smallest: ClassVar[int] = 2

    def check(self, operator):
        """Any square operator will do."""

    def compute(self, key, operator, k):
        """See `AbstractEstimator`."""
        hermitian = is_hermitian(operator)
        block = BlockOperator(operator).linearised()
        n, m = block.n, k // (2 if hermitian else 3)
        omega = SphereSampler().probes(key, n, m, block.dtype)
        sketch = sketch_of(block, omega)
        factors = range_finder(omega, sketch.shifted, True)
        q, s, x, columns = factors.q, factors.s, factors.x, factors.columns
        products = block.mm(q)
        adjoint_products = products if hermitian else block.adjoint_mm(q)
        size, scale, nu = sketch.products.size, sketch.products.scale, sketch.nu
        y, z = sketch.products.numbers, products / scale

        # Trace and diagonal of A / scale + nu I.
        shifted, left = z + nu * q, adjoint_products / scale + nu * q
        h, t = matmul(adjoint(q), shifted), matmul(adjoint(shifted), omega)
        samples, differences = _xtrace_samples(factors, h, t, n, True)
        trace = size * (jnp.trace(h) + jnp.mean(samples) - n * nu)
        rounding = rounding_of(frobenius_norm_of(factors.r, columns), block.eps)
        trace_error = leave_one_out_error(samples, differences, rounding, columns)
        base, left_over = jnp.sum(q * jnp.conj(left), axis=1) - nu, column_dots(s, factors.r)
        split = DiagonalParts(
            base, matmul(q, s), matmul(left, s), left_over, omega, pairs_of(s, columns), columns
        )
        diagonal, diagonal_error = diagonal_and_error(
            split, Rows(), rounding_of(Rows().norms(left), block.eps)
        )

        # Norm and eigenvalues of A / scale: products need no shift, only the factors did.
        blocks = _blocks(q, x, y, z, adjoint_products / scale)
        squares, tested = _norm_samples(blocks, s, factors.factor)
        square = jnp.mean(squares)
        differences = _norm_differences(blocks, factors, tested, n)
        square_error = leave_one_out_error(
            squares, differences, rounding_of(square, block.eps), columns
        )
        ritz = _extreme_ritz(q, omega, y, z, block.eps) if hermitian else jnp.zeros(0)

        errors = (trace_error, square_error, diagonal_error)
        std_err = _vector(operator, *(rescale_error(size, error) for error in errors))
        value = _vector(operator, trace, scale * square, size * diagonal, scale, size * ritz)
        status = status_of(sketch.products.square, products, adjoint_products)
        if hermitian:
            status = core_status(status, blocks.h, jnp.linalg.norm(z), n, block.eps)
        estimate = make_estimate(value, std_err, m * (2 if hermitian else 3), m - 1, status)
        return estimate, SummaryWeights(omega, q, s, x, factors.factor, scale)

    def exact(self, operator):
        """See `AbstractEstimator`."""
        block = BlockOperator(operator).linearised()
        matrix = block.mm(jnp.eye(block.n, dtype=block.dtype))
        scale, status = scale_of(matrix), status_of(matrix)
        scaled = matrix / scale
        diagonal = jnp.diagonal(matrix)
        tail = jnp.zeros(0)
        if is_hermitian(operator):
            ends, _ = _extremes((scaled + adjoint(scaled)) / 2)
            tail = jnp.concatenate([scale * ends, jnp.zeros_like(ends)])
            norm = jnp.linalg.norm(scaled)
            status = core_status(status, scaled, norm, block.n, block.eps)
        square = scale * jnp.sum(square_norms(scaled))
        value = _vector(operator, jnp.sum(diagonal), square, diagonal, scale, tail)
        estimate = make_estimate(value, jnp.zeros_like(value.real), block.n, 0, status)
        return estimate, ExactSummaryWeights(scale)


@final
class Summary(eqx.Module):
    """What `traceax.summary` estimates of an operator.

    The values of `trace`, `diagonal` and `frobenius_norm` carry derivatives; nothing else does.

    **Attributes:**

    - `trace`: the trace, a [`traceax.Solution`][].
    - `diagonal`: the diagonal, a [`traceax.Solution`][] whose `value` and `std_err` have the
        structure of the operator's input PyTree.
    - `frobenius_norm`: the Frobenius norm, a [`traceax.Solution`][]; its square is unbiased.
    - `extreme_eigenvalues`: the smallest and the largest Ritz value theta, inside the spectrum: an
        array of shape `(2,)`. They are inner bounds only: the extreme eigenvalues may lie far
        outside, and nothing here says how far. [`traceax.eigenpairs`][] finds them, with errors.
        None for an operator whose tags do not say that it is Hermitian.
    - `eigenvalue_residuals`: for each Ritz value the norm ||A u - theta u||. To rounding, *an*
        eigenvalue lies within that distance of theta, not necessarily the extreme one. 0 if the
        eigenvalues are exact; None if there are no Ritz values.
    - `num_matvecs`: the number of all products with the operator.
    - `result`: a [`traceax.RESULTS`][]: whether the numbers can be trusted.
    """

    trace: Solution
    diagonal: Solution
    frobenius_norm: Solution
    extreme_eigenvalues: Real[Array, " 2"] | None
    eigenvalue_residuals: Real[Array, " 2"] | None
    num_matvecs: Int[Array, ""]
    result: Any  # a member of RESULTS, as in `Solution`


Summary.__init__.__doc__ = (Summary.__doc__ or "").replace("**Attributes:**", "**Arguments:**")


def summary(
    key: PRNGKeyArray, operator: lx.AbstractLinearOperator, k: int, *, throw: bool = False
) -> Summary:
    r"""Estimate trace, diagonal, Frobenius norm and extreme eigenvalues from the same products.

    Trace, diagonal and $\|A\|_F^2$ are unbiased, and so are their derivatives, in forward and
    reverse mode and at every order. As they share their (sphere) probes, they are correlated.
    Extreme eigenvalues are estimated for operators tagged symmetric (if real) or semidefinite: they
    are the extreme Ritz values on the span of the probes and their products, and have no
    derivative. Half of the products go to random probes, which know little of the ends of the
    spectrum (of a Hessian with eigenvalues from -0.49 to 0.64, 20 products saw -0.21 to 0.27):
    [`traceax.eigenpairs`][] knows them from as many products, with bounds of the error.

    !!! Example

        ```python
        operator = lx.MatrixLinearOperator(matrix, lx.symmetric_tag)
        summary = tr.summary(jax.random.key(0), operator, k=100)
        summary.trace.value, summary.frobenius_norm.value, summary.extreme_eigenvalues
        ```

    Cost: `2 floor(k/2)` matvecs for m = k/2 probes where the tags say that A is Hermitian, else
    `3 floor(k/3)` for m = k/3, a third of them with the adjoint; some fourteen blocks of `n x m`
    numbers; about `90 n m^2` operations. With `k >= n`, n matvecs and `n x n` numbers.

    **Arguments:**

    - `key`: a random key, `jax.random.key(0)` or `jax.random.PRNGKey(0)`.
    - `operator`: a square lineax operator with `n` rows, between any PyTrees, real or complex.
    - `k`: the budget of matvecs, a static Python int. With `k >= n` everything is exact.
    - `throw`: whether to raise an error (at run time) if the result is not successful.

    **Returns:**

    A [`traceax.Summary`][].

    **Raises:**

    - `TypeError`: for a key, operator or `k` of the wrong type.
    - `ValueError`: for an operator that is not square, or `k < 1`.

    ??? cite "References"

        E. N. Epperly, J. A. Tropp, R. J. Webber, *XTrace: making the most of every sample in
        stochastic trace estimation*, 2024, arXiv:2301.07825, doi:10.1137/23M1548323.
        The modules `_diagonal.summary` and `_sketch.leave_one_out` derive the Frobenius norm and
        the errors.
    """
    return _summary(key, operator, k, throw)


def _summary(key, operator, k, throw: bool) -> Summary:
    operator = as_operator(operator)
    hermitian, n = is_hermitian(operator), operator.in_size()
    k = check_budget(k, 2 if hermitian else 3, n, "A summary")
    solution = solve(summary_p, key, operator, k, SummaryEstimator(), throw=throw)
    value, std_err = solution.value, solution.std_err

    def part(value, std_err, calibration):
        stats = {**solution.stats, "std.err": std_err}
        bars = {"inflation": calibration.interval, "tail": calibration.tail}
        return Solution(value, std_err, solution.num_matvecs, stats, solution.result, **bars)

    unit, norm = lax.stop_gradient(jnp.sqrt(value[2].real)), root(value[1])
    entries, unflatten = slice(3, 3 + n), BlockOperator(operator).unflatten
    ritz = lax.stop_gradient(value[3 + n :].real)
    return Summary(
        trace=part(value[0], std_err[0], CALIBRATION["xtrace"]),
        diagonal=part(
            unflatten(value[entries]), unflatten(std_err[entries]), CALIBRATION["xdiag, sphere"]
        ),
        frobenius_norm=part(
            unit * norm, unit * root_error(norm, std_err[1]), CALIBRATION["xtrace"]
        ),
        extreme_eigenvalues=ritz[:2] if hermitian else None,
        eigenvalue_residuals=ritz[2:] if hermitian else None,
        num_matvecs=solution.num_matvecs,
        result=solution.result,
    )

"""The leave-one-out diagonal, shared by XDiag and XNysDiag.

Without probe i the low-rank part loses l_i r_i^H. The difference between A and the remaining
low-rank part, applied to omega_i, is e_i l_i:

    d_i = diag(low rank) - l_i conj(r_i) + e_i conj(omega_i) l_i                  (entrywise)

    XDiag:    low rank = Q Q^H A, l_i = Q s_i, r_i = A^H Q s_i, e_i = (s_i^H R)_i
    XNysDiag: low rank = F F^H,   l_i = r_i = F q_i,            e_i = rho_i / sqrt(d_i)

Without probe j as well, the plane of (l_i, l_j) is lost. With gamma and nu of that pair (see
`_sketch.leave_one_out`), let l_ij = (l_j - l_i gamma_ij) / nu_ij, and r_ij likewise. Because
(s_j^H R)_i = 0,

    D_ij = d_i - d_ij = l_ij conj(r_ij) + e_i conj(gamma_ij) / nu_ij conj(omega_i) l_ij.

The standard error of every entry follows from the D_ij as for traces.

Samples may be shrunk towards Hutchinson's, conj(omega_i) A omega_i, see `_sketch.shrunk`. All
entries share beta_i, from the sums over all rows: V_t is the mean over j of ||B omega_j||^2.
"""

from typing import NamedTuple, final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._core.estimate import safe_norm
from .._core.precision import adjoint, column_dots, matmul, square_of
from .._sketch.leave_one_out import Pairs, mean_of_others, usable_covariance
from .._sketch.ranges import captured_diagonal
from .._sketch.shrunk import plain_samples, shrinkage
from .._sketch.weights import AbstractWeights
from .rows import Rows


@final
class DiagonalWeights(AbstractWeights):
    """XDiag as a function of A, with the probes and everything computed from the probes held fixed:

        mean_i beta_i diag(Q (I - s_i s_i^H) Q^H A)
        + mean_i conj(omega_i) (A omega_i - beta_i Q (I - s_i s_i^H) Q^H A omega_i)

    added up by `rows` (beta_i: see `_sketch.shrunk`). With s_i = 0 and beta_i = 1 it is Diag++. A
    contraction costs a product with each probe, and one with the adjoint for each column of Q.
    """

    q: Inexact[Array, "n m"]
    s: Inexact[Array, "m p"]
    omega: Inexact[Array, "n p"]
    beta: Real[Array, " p"]
    rows: Rows

    def contract(self, block):
        """See `AbstractWeights`."""
        q = self.q
        s = self.s
        adjoint_products = block.adjoint_mm(q)
        lost = matmul(s * self.beta, adjoint(s)) / s.shape[1]
        held_out = q * jnp.mean(self.beta) - matmul(q, lost)
        inner = matmul(adjoint(adjoint_products), self.omega)  # Q^H A Omega
        inner = (inner - s * column_dots(s, inner)) * self.beta
        samples = jnp.conj(self.omega) * (block.mm(self.omega) - matmul(q, inner))
        captured = captured_diagonal(held_out, adjoint_products)
        return self.rows.of_vector(captured + jnp.mean(samples, axis=1))


class DiagonalParts(NamedTuple):
    """The pieces of a leave-one-out diagonal."""

    base: Inexact[Array, " n"]  # the diagonal of the low-rank part
    left: Inexact[Array, "n m"]  # l_i
    right: Inexact[Array, "n m"]  # r_i
    left_over: Inexact[Array, " m"]  # e_i
    omega: Inexact[Array, "n m"]
    products: Inexact[Array, "n m"]  # A Omega
    pairs: Pairs


def shrinkage_of_rows(parts: DiagonalParts) -> Real[Array, " m"]:
    """The weights beta_i, from V_h (of any matrix, from the products) and V_t."""
    left = parts.left
    pairs = parts.pairs
    # Column i of R has no component along s_j. Without probes i and j, what the low-rank part lacks
    # of A omega_i is e_i / nu_ij times a vector of the norm ||l_ji||: `energy` is its square.
    lengths = pairs.forms(matmul(adjoint(left), left)).real.T
    energy = square_of(parts.left_over)[:, None] / pairs.square * lengths
    _, variance = plain_samples(jnp.conj(parts.omega) * parts.products)
    return shrinkage(variance, mean_of_others(energy, pairs.valid))


def diagonal_and_error(
    parts: DiagonalParts,
    rows: Rows,
    rounding: Real[Array, " g"],
    *,
    shrink: bool,
    hermitian: bool = False,
) -> tuple[Inexact[Array, " g"], Real[Array, " g"], Real[Array, " m"]]:
    """Returns (mean of the d_i for every group of `rows`, its standard error, beta: 1 if they are
    not shrunk); if `hermitian`, A^H = A. Cost: 10 n m^2 operations.
    """
    beta = shrinkage_of_rows(parts) if shrink else jnp.ones(parts.left.shape[1], rounding.dtype)
    base, left, right, left_over, omega, products, pairs = parts
    m = left.shape[1]
    probes = jnp.conj(omega)
    plain = probes * products - base[:, None]  # Hutchinson's, less base
    held = left_over * probes * left - left * jnp.conj(right)  # d_i - base
    part = jnp.real if hermitian else lambda x: x  # the diagonal of a Hermitian matrix is real
    corrections = rows(part(plain - beta * (plain - held)))
    mean = jnp.mean(corrections, axis=1)
    value = rows.of_vector(base) + mean
    if m == 1:
        return value, jnp.full_like(value.real, jnp.inf), beta

    root = jnp.sqrt(pairs.square)

    def held_out(l_i, r_i, omega_i, e_i, l_j, r_j, gamma, nu):
        # D_ij with i fixed and j along the columns, or the other way round.
        l_ij = (l_j - l_i * gamma) / nu
        r_ij = (r_j - r_i * gamma) / nu
        return l_ij * jnp.conj(r_ij) + e_i * (jnp.conj(gamma) / nu) * omega_i * l_ij

    def add(i, total):
        l_i, r_i, omega_i = (
            lax.dynamic_slice_in_dim(x, i, 1, axis=1) for x in (left, right, probes)
        )
        gamma = pairs.gamma[i]
        nu = root[i]
        d_ij = held_out(l_i, r_i, omega_i, left_over[i], left, right, gamma, nu)
        # gamma_ji = conj(gamma_ij), and the roles of i and j exchanged.
        d_ji = held_out(left, right, probes, left_over, l_i, r_i, jnp.conj(gamma), nu)
        product = beta[i] * beta * (rows(part(d_ij)) * jnp.conj(rows(part(d_ji)))).real
        return total + jnp.sum(jnp.where(pairs.valid[i], product, 0), axis=1)

    covariance = lax.fori_loop(0, m, add, jnp.zeros_like(value.real)) / (m * (m - 1))
    variance = jnp.sum(square_of(corrections - mean[:, None]), axis=1) / (m * (m - 1))
    square = jnp.square(rounding)
    covariance = usable_covariance(covariance, jnp.sum(variance), jnp.sum(square), m)
    std_err = jnp.sqrt(variance + covariance + square)
    return value, with_ties(std_err, m) if rows.sizes is None else std_err, beta


#: By the number p of probes: 1.25 sqrt(p) over the 95 % quantile of Student's distribution with
#: p - 1 degrees of freedom. From five probes on ties are rare.
_REACH = {2: 0.14, 3: 0.5, 4: 0.79}


def with_ties(std_err: Real[Array, " n"], probes: int | Real[Array, ""]) -> Real[Array, " n"]:
    """The standard errors of entries, from `probes` (p) independent probes, with a least value.

    If a row has one large number a off the diagonal, each sample of its entry errs by plus or minus
    a. With probability 2^(1 - p) all p samples are equal, and their mean errs by a. Similar rows
    have the standard error a / sqrt(p). The least value is the one whose interval reaches a quarter
    further than sqrt(p) times the typical standard error.
    """
    reach = sum(jnp.where(probes == p, share, 0) for p, share in _REACH.items())
    typical = jnp.where(reach > 0, safe_norm(std_err) / std_err.size**0.5, 0)
    return jnp.maximum(std_err, reach * typical)

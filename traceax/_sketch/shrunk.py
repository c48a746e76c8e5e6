"""Leave-one-out samples, shrunk towards Hutchinson's sample of the same probe.

Projecting a low-rank part off takes the exactness of random signs for the diagonal away. But each
probe gives two samples: with independent phases (random signs) omega_i, h_i = omega_i^H A omega_i
is Hutchinson's, and t_i that of XTrace or XNysTrace. Given the other probes both have the mean
tr A, and so has, for every beta_i that depends on the *other* probes alone,

    s_i = h_i - beta_i (h_i - t_i),      beta_i = 1 / (1 + (V_t / V_h)^2).

V_h and V_t are the variances of h_i and t_i, estimated from the probes j != i, but for a factor (2
for real probes) that both have:

    V_h = sum_r var_{j != i}(u_rj),   u_j = conj(omega_j) o A omega_j,
    V_t = mean_{j != i} V_ji,         V_ji = ||B omega_j||^2 - |g_ji^H B omega_j|^2 / ||g_ji||^2,

where B is what the low-rank part without i and j leaves of A, and g_ji what probe j has beyond the
space of the others. With c_j = u_j - mean(u) and N_j = ||c_j||^2, sum_{j != i} c_j = -c_i, hence
V_h = (sum_j N_j - N_i m / (m - 1)) / (m - 2).

*Level instead of resphering,* which is right for rotation invariant probes only. The flat part of
what is left, delta_i = sum_{j != i} e_ji / sum_{j != i} ||g_ji||^2, is taken off in its place: as
E ||g_i||^2 = n - m + 1, this is unbiased for every isotropic probe:

    t_i = tr(Q_i^H A Q_i) + e_i + delta_i (n - m + 1 - ||g_i||^2)

*The standard error* is that of `leave_one_out`, with D_ij = beta_i (t_i - t_ij).

*Weights.* With c_i = beta_i (n - m + 1 - ||g_i||^2) / (m sum_{j != i} ||g_ji||^2),

    G = 1/m sum_i [ (1 - beta_i) omega_i omega_i^H + beta_i (Q (I - s_i s_i^H) Q^H + g_i g_i^H) ]
        + sum_{i != j} c_i g_ji g_ji^H.

All of it lies in the span of [Q, g_1 ... g_m]: omega_i = g_i + Q x_i, g_ji = g_j + Q a_ji with
a_ji = b_ji u_ji, b_ji = u_ji^H x_j. And <G, I> = n exactly, as ||omega_i||^2 = n.
"""

import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .._core.precision import adjoint, matmul, square_norms, square_of
from .leave_one_out import LeaveOneOut, RangeFinder, Samples, mean_of_others, pairs_of
from .weights import LowRankWeights

#: The fewest probes that tell which of the two samples is the better one.
FEWEST = 3

#: From how many probes on the sample variance of the h_j is believed where it is smaller than V_h,
#: which counts the skew part of a matrix as well; and the shares of V_h below which it is believed
#: for fewer probes, as few samples agree by chance.
ENOUGH = 8
BY_CHANCE = {3: 1e-6}
RARELY = 1e-3


#: Hutchinson's samples h_i, and V_h, for each of them from the others.
PlainSamples = tuple[Inexact[Array, " m"], Real[Array, " m"]]


def plain_samples(terms: Inexact[Array, "n m"]) -> PlainSamples:
    """The samples of a Hermitian matrix from the terms u = conj(omega) o A omega."""
    centred = terms - jnp.mean(terms, axis=1, keepdims=True)  # c_j
    return jnp.sum(terms, axis=0).real, variance_of_others(square_norms(centred))


def skew_samples(terms: Inexact[Array, "n m"]) -> PlainSamples:
    """The same for any matrix. If it is real, the variance of h_i is that of its symmetric part and
    may be less than V_h: the scatter of the h_j shows that. (With phases it is V_h in the mean.)
    """
    _, variance = plain_samples(terms)  # V_h
    values = jnp.sum(terms, axis=0)  # h_i
    m = len(values)
    seen = variance_of_others(square_of(values - jnp.mean(values)))
    if not jnp.iscomplexobj(terms):
        seen = seen / 2
    share = 1.0 if m >= ENOUGH else BY_CHANCE.get(m, RARELY)
    return values, jnp.where(seen < share * variance, seen, variance)


def variance_of_others(squares: Real[Array, " m"]) -> Real[Array, " m"]:
    """For each i the sample variance of the others, from the squared deviations N_j."""
    m = len(squares)
    return jnp.maximum(jnp.sum(squares) - squares * (m / (m - 1)), 0) / (m - 2)


def shrinkage(plain: Real[Array, " m"], tested: Real[Array, " m"]) -> Real[Array, " m"]:
    """The weights beta_i, from V_h and V_t."""
    return 1 / (1 + jnp.square(tested / jnp.maximum(plain, jnp.finfo(plain.dtype).tiny)))


def shrunk_samples(parts: LeaveOneOut, plain: PlainSamples, n: int) -> Samples:
    """The samples s_i."""
    m = len(parts.square)
    values, plain_variance = plain
    variance = mean_of_others(parts.energy, parts.valid)
    beta = shrinkage(plain_variance, variance)
    residual = jnp.sum(jnp.where(parts.valid, parts.pair_residual, 0), axis=0)  # sum of the e_ji
    square = jnp.sum(jnp.where(parts.valid, parts.pair_square, 0), axis=0)  # of the ||g_ji||^2
    delta = residual / jnp.where(square > 0, square, 1)  # delta_i
    t = parts.residual + delta * (n - m + 1 - parts.square) - parts.lost
    h = values - parts.base

    grown = parts.pair_square - parts.square[:, None] - 1
    change = parts.residual[:, None] - parts.pair_residual + delta[:, None] * grown
    differences = beta[:, None] * (parts.pair_lost + change)  # D_ij
    differences = jnp.where(parts.valid, differences, jnp.zeros_like(differences))
    # As if h_i and t_i were independent.
    variance = jnp.square(1 - beta) * plain_variance + jnp.square(beta) * variance
    return Samples(h - beta * (h - t), differences, beta, variance)


def shrunk_weights(
    omega: Inexact[Array, "n m"], factors: RangeFinder, beta: Real[Array, " m"]
) -> LowRankWeights:
    """G = [Q, g] K [Q, g]^H with K = [[K_q, K_x], [K_x^H, K_g]], K_g diagonal (see above)."""
    n, m = omega.shape
    s = factors.s
    x = factors.x
    g = omega - matmul(factors.q, x)
    pairs = pairs_of(s)
    # a_ij = b_ij u_ij = s_j component_ij - s_i correction_ij
    b = jnp.where(pairs.valid, pairs.components(matmul(adjoint(s), x)), 0)
    component = b / jnp.sqrt(pairs.square)
    correction = component * pairs.gamma
    pair_square = jnp.where(pairs.valid, factors.square[:, None] + square_of(b), 0)  # ||g_ij||^2
    total = jnp.sum(pair_square, axis=0)
    share = beta * (n - m + 1 - factors.square) / (m * jnp.where(total > 0, total, 1))
    share = jnp.where(pairs.valid, share, 0)  # c_j, over (i, j)

    plain = (1 - beta) / m
    k_x = x * plain + matmul(s, (share * component).T) - s * jnp.sum(share * correction, axis=1)
    k_g = 1 / m + jnp.sum(share, axis=1)
    cross = (share * component * jnp.conj(correction)).T
    of_j = jnp.sum(share * square_of(component), axis=0)
    of_i = jnp.sum(share * square_of(correction), axis=1)
    inner = jnp.diag(of_i + of_j - beta / m).astype(omega.dtype) - cross - adjoint(cross)
    k_q = matmul(x * plain, adjoint(x)) + matmul(s, matmul(inner, adjoint(s)))
    k_q = k_q + jnp.mean(beta) * jnp.eye(m, dtype=omega.dtype)
    u_q = matmul(factors.q, k_q) + matmul(g, adjoint(k_x))
    u_g = matmul(factors.q, k_x) + g * k_g
    u = jnp.concatenate([u_q, u_g], axis=1).astype(omega.dtype)
    return LowRankWeights(u, jnp.concatenate([factors.q, g], axis=1))

r"""Gauss quadrature of z^H f(M) z as a function of M and z, with exactly its own derivative.

In q steps, Lanczos' recurrence from v_1 = z / ||z|| gives V, T = V^H M V and the residual
beta_q v_(q+1) (see `_linalg.lanczos`), and the number

    F = ||z||^2 e_1^T f(T) e_1.

`_functions.funm` differentiates F with V held fixed, which is right as far as F has converged to
z^H f(M) z. Here V changes with M and z: the derivative is that of F itself, for any q. With C the
derivative of f at T in the direction e_1 e_1^T, and with V^H M = T V^H + beta_q e_q v_(q+1)^H,

    d e_1^T f(T) e_1 = <C, dT> = <C, V^H dM V> + <[T, C], V^H dV> + 2 beta_q Re v_(q+1)^H dV C e_q.

As [T, C] = [f(T), e_1 e_1^T], the second term is 2 Re (V f(T) e_1)^H dv_1, which is 0 for a fixed
z. The third term is the effect of the truncation, which a fixed V neglects. For the third term the
recurrence

    beta_j dv_(j+1) = dM v_j + (M - alpha_j) dv_j - beta_(j-1) dv_(j-1) + (terms in v_i, i <= j + 1)

runs backwards, from the end: with u = beta_q v_(q+1) and gamma = C e_q,

    w_j = gamma_j u + (M - alpha_j) mu_j - beta_j mu_(j+1),     mu_j = w_(j+1) / beta_j,  mu_q = 0,

    2 Re sum_j gamma_j u^H dv_j = 2 Re sum_(j<q) mu_j^H dM v_j + 2 Re w_1^H dv_1.

The terms in v_i drop out, as w_j lies in the span of v_(j+1), v_(j+2), ... (a product with M lowers
the first index by one only); the code keeps w_j orthogonal to v_1, ..., v_j. In total,

    dF = Re <G, dM> + 2 Re x^H dz,      G = ||z||^2 (V C + 2 [mu_1, ..., mu_(q-1), 0]) V^H,
                                        x = ||z|| (V f(T) e_1 + w_1).

(N. Kraemer, P. Moreno-Munoz, H. Roy, S. Hauberg, *Gradients of functions of large matrices*, 2024,
arXiv:2405.17277, run the general adjoint, which T = V^H M V reduces to this.)
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, Real

from .._core.precision import einsum, square_norms
from .._linalg.lanczos import Lanczos


def own_derivative(
    mm: Callable[[Inexact[Array, "n p"]], Inexact[Array, "n p"]],
    probes: Inexact[Array, "n p"],
    krylov: Lanczos,
    vectors: Real[Array, "p q q"],
    values: Real[Array, "p q"],
    slopes: Real[Array, "p q q"],
) -> tuple[Inexact[Array, "q n p"], Inexact[Array, "n p"]]:
    """Returns (the columns of ||z||^2 (V C + 2 mu), x), for every probe z: the derivative of F with
    respect to M and z, see above. `mm` multiplies blocks with M; `krylov` has the recurrences from
    the probes, `vectors` the eigenvectors of every T, `values` f at the nodes, and `slopes` its
    divided differences.

    Cost: q block products, as many as the recurrences took, and twice their other operations.
    """
    basis, alpha, beta, following, *_ = krylov
    q = len(alpha)
    dtype = probes.dtype
    components = vectors * vectors[:, :1, :]
    # In the basis V: `core` is C, `of_first` is f(T) e_1.
    core = einsum("pai,pij,pbj->pab", components, slopes, components).astype(dtype)
    of_first = einsum("paj,pj->pa", vectors, values * vectors[:, 0, :]).astype(dtype)

    residual = krylov.residual.astype(dtype) * following  # u
    last = core[:, :, -1].T  # gamma

    def step(carry, inputs):
        mu, later = carry  # mu_j and mu_(j+1)
        j, gamma, alpha, beta, previous = inputs
        w = gamma * residual + mm(mu) - alpha.astype(dtype) * mu - beta.astype(dtype) * later
        earlier = (jnp.arange(q) <= j).astype(dtype)[:, None]
        for _ in range(2):
            coefficients = earlier * einsum("qnp,np->qp", jnp.conj(basis), w)
            w = w - einsum("qnp,qp->np", basis, coefficients)
        # An exhausted space has no residual: C is 0 beyond it, and u is 0.
        divisor = jnp.where(previous > 0, previous, 1).astype(dtype)
        return (jnp.where(previous > 0, w / divisor, 0), mu), mu

    # Index j stands for v_(j+1). At the start of the recurrence there is no division.
    previous = jnp.concatenate([jnp.ones_like(beta[:1]), beta[:-1]])
    zero = jnp.zeros_like(residual)
    given = jnp.arange(q), last, alpha, beta, previous
    (first, _), mus = lax.scan(step, (zero, zero), given, reverse=True)

    size = square_norms(probes)
    left = einsum("anp,pab->bnp", basis, core) + 2 * mus
    start = einsum("qnp,pq->np", basis, of_first) + first
    length = jnp.sqrt(size).astype(dtype)
    return size.astype(dtype) * left, length * start

r"""Lanczos' recurrence of one vector, for extreme eigenvalues, and bounds on the whole spectrum.

k steps extend an orthonormal basis V, one product a vector,

    A V = V T + beta_k v_next e_k^T,      T = S Theta S^T,

with the residual norm beta_k |S_kj| of a Ritz pair. Where a space is invariant (beta = 0), a random
vector goes on, which finds further copies of a multiple eigenvalue.

*What lies outside of the Ritz values.* Ritz values are inside the spectrum: lambda_max is at least
the largest theta ever seen, and no residual says how far above. But let u be the eigenvector of
lambda_max = x, and a_j = <v_j, u>. All v_j are polynomials in A times the start vector v_0, so

    (x - alpha_j) a_j = beta_{j-1} a_{j-1} + beta_j a_{j+1},

that is, a_j = pi_j(x) a_0 with numbers pi_j(x) that are known and, for x above all Ritz values,
grow with x. By Bessel's inequality sum_j a_j^2 <= 1 over the basis, hence

    sum_j pi_j(x)^2 <= 1 / a_0^2.

A random v_0 has |a_0| >= c but for a probability of at most c sqrt(2n / pi). Hence lambda_max lies
below the x where the sum reaches 1 / c^2: far above the Ritz values for few steps, and just above
them once the largest one has converged and stands alone. This is the inequality behind the bounds
of J. Kuczynski, H. Wozniakowski (*Estimating the largest eigenvalue by the power and Lanczos
algorithms with a random start*, 1992, doi:10.1137/0613066), with the recurrence that was seen in
place of the worst one. For a start eps g + y, with g random and y a given unit vector, c is smaller
by the factor eps / (1 + eps): the density of a_0 is largest without y. (Complex vectors are less
likely than real ones to have a small a_0.)

One eigenvector cannot be told from none: a multiple or nearly multiple eigenvalue may show once. So
there is no such bound for the second value from an end, and its residual must do, within which an
eigenvalue lies with certainty.
"""

import math
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, PRNGKeyArray, Real

from .._core.estimate import rounding_unit
from .._linalg.arnoldi import Arnoldi, advanced, begun, in_own_unit, outside
from .._linalg.factorisations import ritz_values
from .._linalg.lanczos import Lanczos, symmetric_tridiagonal
from .._probes.random import numbered
from .._probes.samplers import SphereSampler

Which = Literal["LA", "SA", "LM", "BE"]


def recurrence(
    mm: Callable[[Inexact[Array, "n 1"]], Inexact[Array, "n 1"]],
    start: Inexact[Array, " n"],
    key: PRNGKeyArray,
    k: int,
    eps: float,
) -> Arnoldi:
    """Make exactly `k` products of a Hermitian operator.

    **Arguments:**

    - `mm`: the operator, as a function that multiplies a block.
    - `start`: the start vector, which is not 0.
    - `key`: a random key, for the vectors that go on in an invariant space.
    - `k`: the number of products, less than n.
    - `eps`: the relative precision of a product.
    """

    def fresh(j, basis):
        probe = SphereSampler().probes(numbered(key, j), start.size, 1, start.dtype)
        probe, _ = outside(basis, probe.T)
        return probe / jnp.linalg.norm(probe)

    return in_own_unit(advanced(mm, begun(start[:, None], k), 0, k, eps, fresh))


def ritz_pairs(krylov: Lanczos) -> tuple[Real[Array, " k"], Real[Array, "k k"]]:
    """The Ritz values, ascending, and the eigenvectors of T."""
    t = symmetric_tridiagonal(krylov.alpha[:, 0], krylov.beta[:-1, 0])
    return ritz_values(t, jnp.ones(len(t), bool))


def order_of(which: Which, values: Real[Array, " m"], num: int) -> Array:
    """The indices of `num` of these ascending values, the outermost first; for `"BE"` in ascending
    order, the larger half from above.
    """
    place = jnp.arange(values.size)
    if which == "BE":
        return jnp.concatenate([place[: num // 2], place[values.size - (num - num // 2) :]])
    if which == "LM":
        place = jnp.argsort(-jnp.abs(values))
    return place[::-1][:num] if which == "LA" else place[:num]


def chance(n: int, probability: float, noise: float | None) -> float:
    """The number log(1 / c^2) of above.

    **Arguments:**

    - `n`: the dimension.
    - `probability`: that the bound of one end is wrong.
    - `noise`: the size eps of the random part beside a given unit vector; None if all is random.
    """
    part = 1.0 if noise is None else noise / (1 + noise)
    return -2 * math.log(probability * part / math.sqrt(2 * n / math.pi))


def bounds(
    krylov: Lanczos, values: Real[Array, " k"], eps: float, log_chance: float
) -> Real[Array, " 2"]:
    """Two numbers between which the whole spectrum lies, but for a small probability, from the
    recurrence and its Ritz values.
    """
    unit = krylov.unit[0, 0]
    alpha = krylov.alpha[:, 0] / unit
    beta = krylov.beta[:, 0] / unit
    size = krylov.size[0] / unit
    high = _upper_bound(alpha, beta, size, values[-1] / unit, eps, log_chance)
    # The recurrence of -A.
    low = -_upper_bound(-alpha, beta, size, -values[0] / unit, eps, log_chance)
    return unit * jnp.stack([low, high])


def log_sum(
    alpha: Real[Array, " k"], beta: Real[Array, " k"], smallest: Array, x: Real[Array, " g"]
) -> Real[Array, " g"]:
    """The logarithm of sum_j pi_j(x)^2 at points above all Ritz values, from the ratios rho_j =
    a_{j+1} / a_j, which are positive there. Those that rounding makes negative count as 0, which
    makes the sum smaller and the bound larger.
    """
    tiny = float(jnp.finfo(x.dtype).tiny) ** 0.5

    def step(carry, coefficients):
        before, log_a, total, ended = carry  # the last beta / rho; log a_j; sum of a_i^2 / a_j^2
        alpha, beta = coefficients
        floor = jnp.maximum(beta, smallest)
        rho = jnp.maximum((x - alpha - before) / floor, tiny)
        new = floor / rho, log_a + jnp.log(rho), 1 + total / jnp.square(rho)
        # Behind an invariant space comes a random vector, of which nothing is known.
        new = tuple(jnp.where(ended, o, n) for o, n in zip(carry[:3], new, strict=True))
        return (*new, ended | (beta == 0)), None

    zero = jnp.zeros_like(x)
    carry = (zero, zero, zero + 1, jnp.zeros((), bool))
    (_, log_a, total, _), _ = lax.scan(step, carry, (alpha, beta))
    return 2 * log_a + jnp.log(total)


def _upper_bound(
    alpha: Real[Array, " k"],
    beta: Real[Array, " k"],
    size: Real[Array, ""],
    end: Real[Array, ""],
    eps: float,
    log_chance: float,
) -> Real[Array, ""]:
    """The x above `end` (the largest Ritz value) at which the sum reaches 1 / c^2, rounded up; inf
    if it does not within 10^9 times the size of the operator.
    """
    limits = jnp.finfo(alpha.dtype)
    unit = jnp.maximum(size, limits.tiny)
    smallest = jnp.maximum(rounding_unit(eps, limits.dtype) * size, limits.tiny)

    def crossing(distances):
        reached = log_sum(alpha, beta, smallest, end + distances) >= log_chance
        # The distance after the last at which the sum is too small.
        return jnp.max(jnp.where(reached, -1, jnp.arange(distances.size))) + 1

    ends = math.log(float(limits.eps)), math.log(1e9)
    coarse = unit * jnp.exp(jnp.linspace(*ends, 64, dtype=alpha.dtype))
    index = crossing(coarse)
    above = coarse[jnp.minimum(index, 63)]
    below = jnp.where(index > 0, coarse[jnp.maximum(index - 1, 0)], above)
    fine = below * jnp.exp(jnp.linspace(0, 1, 33, dtype=alpha.dtype) * jnp.log(above / below))
    distance = jnp.where(index < 64, fine[jnp.minimum(crossing(fine), 32)], jnp.inf)
    return end + jnp.where(size > 0, distance, 0)

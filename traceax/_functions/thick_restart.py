r"""Lanczos' recurrence with full reorthogonalisation and thick restarts, for extreme eigenvalues.

A cycle extends an orthonormal basis V, one product a vector, until it has m vectors, where

    A V = V T + beta v_next e_m^T,      T = S Theta S^T.

A restart keeps p Ritz vectors Y = V S_p and v_next: A Y = Y Theta_p + v_next h^T with the *spikes*
h_i = beta S_mi, so that T begins with diag(Theta_p), bordered by h, and goes on tridiagonal.
(K. Wu, H. Simon, *Thick-restart Lanczos method for large symmetric eigenvalue problems*, 2000,
doi:10.1137/S0895479898334605.) The residual norm of a Ritz pair is |h_i|. Where a space is
invariant (beta = 0), a random vector goes on, which finds further copies of a multiple eigenvalue.

*What lies outside of the Ritz values.* Ritz values are inside the spectrum: lambda_max is at least
the largest theta ever seen, and no residual says how far above. But let u be the eigenvector of
lambda_max = x, and a_j = <v_j, u>. All v_j are polynomials in A times the start vector v_0, so

    (x - alpha_j) a_j = beta_{j-1} a_{j-1} + beta_j a_{j+1}        (in a cycle)
    a_i = a_p h_i / (x - theta_i)                                  (for a kept Ritz vector),

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
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Inexact, Int, PRNGKeyArray, Real

from .._core.control_flow import if_any
from .._core.estimate import rounding_unit, scale_of, status_of, status_with_symmetry
from .._core.precision import matmul
from .._linalg.factorisations import eigh
from .._probes.random import numbered
from .._probes.samplers import SphereSampler

Which = Literal["LA", "SA", "LM", "BE"]


class RitzPairs(NamedTuple):
    """What `ritz_pairs` returns."""

    values: Real[Array, " num"]
    vectors: Inexact[Array, "num n"]
    residuals: Real[Array, " num"]
    ends: Real[Array, " 2"]  # the smallest and the largest Ritz value of all cycles
    bounds: Real[Array, " 2"]  # the whole spectrum lies between them, but for a small probability
    status: Int[Array, ""]


class _History(NamedTuple):
    """The recurrence of all cycles, in one row, and the Ritz values that each restart kept."""

    alpha: Real[Array, " k"]
    beta: Real[Array, " k"]
    first: Bool[Array, " k"]  # the first step of a cycle
    kept: Real[Array, "k p"]  # at the first step of a cycle the Ritz values that were kept, else 0
    spikes: Real[Array, "k p"]


class _Carry(NamedTuple):
    rows: Inexact[Array, "m+1 n"]
    alpha: Real[Array, " m"]
    beta: Real[Array, " m"]
    kept: Real[Array, " p"]
    spikes: Real[Array, " p"]
    size: Real[Array, ""]  # the largest |alpha| or beta so far
    scale: Real[Array, ""]
    skew: Real[Array, ""]  # how far V^H A V is from T
    hull: Real[Array, " 2"]  # the smallest and the largest Ritz value of all cycles
    history: _History


def order_of(which: Which, values: Real[Array, " m"], used: Array | int, num: int) -> Array:
    """The indices of the wanted ones among the first `used` of these (ascending) values.

    **Arguments:**

    - `which`: the end of the spectrum: `"LA"`, `"SA"`, `"LM"` or `"BE"`.
    - `values`: ascending values, of which the first `used` count.
    - `used`: how many count.
    - `num`: how many are wanted.

    **Returns:**

    The indices, the outermost first; for `"BE"` in ascending order, the larger half from above.
    """
    place = jnp.arange(values.shape[0])
    if which == "BE":
        low = num // 2
        return jnp.concatenate([place[:low], used - (num - low) + place[: num - low]])
    if which == "SA":
        return place[:num]
    if which == "LA":
        return used - 1 - place[:num]
    return jnp.argsort(jnp.where(place < used, -jnp.abs(values), jnp.inf))[:num]


def chance(n: int, probability: float, noise: float | None) -> float:
    """The number log(1 / c^2) of above.

    **Arguments:**

    - `n`: the dimension.
    - `probability`: that the bound of one end is wrong.
    - `noise`: the size eps of the random part beside a given unit vector; None if all is random.
    """
    part = 1.0 if noise is None else noise / (1 + noise)
    return -2 * math.log(probability * part / math.sqrt(2 * n / math.pi))


class Run(NamedTuple):
    """The basis and its recurrence after all products. The last cycle began with the column `first`
    and ended with `used` columns.
    """

    carry: _Carry
    first: int
    used: int


def _kept_of(num: int, basis_size: int) -> int:
    """The number of Ritz vectors that a restart keeps."""
    return num + (basis_size - num) // 2


def cycles_of(k: int, num: int, basis_size: int) -> int:
    """The number of cycles, with the arguments of `run_cycles`."""
    left = max(k - basis_size, 0)
    return 1 + -(-left // (basis_size - _kept_of(num, basis_size)))


def run_cycles(
    mm: Callable[[Inexact[Array, "n 1"]], Inexact[Array, "n 1"]],
    start: Inexact[Array, " n"],
    key: PRNGKeyArray,
    k: int,
    num: int,
    which: Which,
    basis_size: int,
    eps: float,
) -> Run:
    """Make exactly `k` products of a Hermitian operator.

    Cost: `basis_size + 1` vectors, and some `8 n basis_size` operations a product.

    **Arguments:**

    - `mm`: the operator, as a function that multiplies a block.
    - `start`: the start vector, which is not 0.
    - `key`: a random key, for the vectors that go on in an invariant space.
    - `k`: the number of products, less than n.
    - `num`: how many pairs are wanted, at most `k`.
    - `which`: the end of the spectrum.
    - `basis_size`: the number m of vectors of a cycle: `k` or less, and then at least `num + 2`.
    - `eps`: the relative precision of a product.

    **Returns:**

    A `Run`.
    """
    n, m = start.size, min(basis_size, k)
    real = jnp.finfo(start.dtype).dtype
    p, cycles = 0 if m == k else _kept_of(num, m), cycles_of(k, num, basis_size)
    sampler = SphereSampler()

    place = jnp.arange(m)

    def step(offset, first, j, carry: _Carry) -> _Carry:
        """The j-th step of a cycle, which began with the step `first`, and whose step 0 would be
        that of the index `offset` in the history.
        """
        rows = carry.rows
        v = lax.dynamic_index_in_dim(rows, j, keepdims=False)
        w = mm(v[:, None])[:, 0]
        # The first product fixes a unit, in which no square over- or underflows.
        scale = jnp.where(offset + j == 0, scale_of(w), carry.scale)
        w = w / scale
        alpha = jnp.vdot(v, w).real

        def outside(w):
            along = matmul(jnp.conj(rows), w)
            w = w - matmul(along, rows)
            return w - matmul(matmul(jnp.conj(rows), w), rows), along[:m]

        w, along = outside(w)
        # Column j of T above the diagonal. If A^H = A, it is that of V^H A V.
        spikes = jnp.pad(carry.spikes, (0, m - p))
        above = jnp.where(j == first, spikes, jnp.where(place + 1 == j, carry.beta, 0))
        apart = along - above - jnp.where(place == j, alpha, 0)
        skew = jnp.maximum(carry.skew, jnp.linalg.norm(apart))
        beta = jnp.linalg.norm(w)
        size = jnp.maximum(carry.size, jnp.maximum(jnp.abs(alpha), beta))
        exhausted = beta <= rounding_unit(eps, size.dtype) * size

        def fresh():
            w = sampler.probes(numbered(key, offset + j), n, 1, start.dtype)[:, 0]
            w, _ = outside(w)
            return w / jnp.linalg.norm(w)

        v_next = w / jnp.where(exhausted, 1, beta).astype(w.dtype)
        v_next = if_any(exhausted, fresh, v_next)
        beta = jnp.where(exhausted, 0, beta)
        rows = lax.dynamic_update_index_in_dim(rows, v_next, j + 1, 0)

        def put(array, value, index):
            return lax.dynamic_update_index_in_dim(array, value, index, 0)

        history, t = carry.history, offset + j
        return carry._replace(
            rows=rows,
            alpha=put(carry.alpha, alpha, j),
            beta=put(carry.beta, beta, j),
            size=size,
            scale=scale,
            skew=skew,
            history=history._replace(
                alpha=put(history.alpha, alpha, t), beta=put(history.beta, beta, t)
            ),
        )

    def restart(carry: _Carry, first, t) -> _Carry:
        values, vectors = _projected(carry, first, m)
        keep = order_of(which, values, m, p)
        s = vectors[:, keep]
        kept, spikes = values[keep], carry.beta[-1] * s[-1]
        rows = jnp.concatenate(
            [
                matmul(s.T.astype(carry.rows.dtype), carry.rows[:m]),
                carry.rows[m:],
                jnp.zeros((m - p, n), carry.rows.dtype),
            ]
        )
        history = carry.history
        return carry._replace(
            rows=rows,
            kept=kept,
            spikes=spikes,
            hull=_widened(carry.hull, values[0], values[-1]),
            history=history._replace(
                first=history.first.at[t].set(True),
                kept=history.kept.at[t].set(kept),
                spikes=history.spikes.at[t].set(spikes),
            ),
        )

    none, zero = jnp.zeros(m, real), jnp.zeros((), real)
    history = _History(
        jnp.zeros(k, real),
        jnp.zeros(k, real),
        jnp.arange(k) == 0,
        jnp.zeros((k, p), real),
        jnp.zeros((k, p), real),
    )
    rows = jnp.zeros((m + 1, n), start.dtype).at[0].set(start / jnp.linalg.norm(start))
    hull = jnp.asarray([jnp.inf, -jnp.inf], real)
    empty = jnp.zeros(p, real)
    carry = _Carry(rows, none, none, empty, empty, zero, zero + 1, zero, hull, history)

    def cycle(c, carry: _Carry) -> _Carry:
        first = jnp.where(c == 0, 0, p)
        done = jnp.where(c == 0, 0, m + (c - 1) * (m - p))  # products of the cycles before
        before = jnp.where(c <= 1, 0, p)
        carry = lax.cond(c == 0, lambda: carry, lambda: restart(carry, before, done))
        end = jnp.minimum(m, first + k - done)
        return lax.fori_loop(first, end, lambda j, x: step(done - first, first, j, x), carry)

    if cycles == 1:
        return Run(lax.fori_loop(0, m, lambda j, x: step(0, 0, j, x), carry), 0, m)
    carry = lax.fori_loop(0, cycles, cycle, carry)
    return Run(carry, p, p + k - (m + (cycles - 2) * (m - p)))


def _projected(carry: _Carry, first: Array | int, used: int) -> tuple[Array, Array]:
    """The eigenvalues and eigenvectors of T; those that do not count come last. `first` is the
    number of Ritz vectors that were kept.
    """
    m, p = carry.alpha.size, carry.kept.size
    place = jnp.arange(m)
    row, column = place[:, None], place
    kept, spikes = (jnp.pad(x, (0, m - p)) for x in (carry.kept, carry.spikes))
    # |theta| <= 3 in this unit. A 4 stands for what does not count.
    unit = scale_of(carry.size)
    diagonal = jnp.where(place < first, kept, carry.alpha) / unit
    diagonal = jnp.where(place < used, diagonal, 4)
    off = jnp.where((place >= first) & (place < used - 1), carry.beta / unit, 0)
    spikes = jnp.where(place < first, spikes / unit, 0)
    t = jnp.where(row == column, diagonal, 0)
    t = t + jnp.where(row + 1 == column, off[:, None], 0)
    t = t + jnp.where(row == column + 1, off, 0)
    t = t + jnp.where(column == first, spikes[:, None], 0)
    t = t + jnp.where(row == first, spikes, 0)
    values, vectors = eigh(t)
    return values * unit, vectors


def ritz_pairs(run: Run, num: int, which: Which, eps: float, log_chance: float) -> RitzPairs:
    """The extreme Ritz pairs of a run.

    **Arguments:**

    - `run`: the run.
    - `num`, `which`, `eps`: those of `run_cycles`.
    - `log_chance`: the number log(1 / c^2) of above.

    **Returns:**

    A `RitzPairs`.
    """
    carry, first, used = run
    values, vectors = _projected(carry, first, used)
    wanted = order_of(which, values, used, num)
    s = vectors[:, wanted]
    hull = _widened(carry.hull, values[0], values[used - 1])
    limits = jnp.finfo(carry.size.dtype)
    smallest = jnp.maximum(rounding_unit(eps, limits.dtype) * carry.size, limits.tiny)
    high = _outside(carry.history, hull[1], smallest, carry.size, log_chance)
    low = -_outside(_mirrored(carry.history), -hull[0], smallest, carry.size, log_chance)
    status = status_of(carry.history.alpha, carry.history.beta)
    n = carry.rows.shape[1]
    return RitzPairs(
        values=carry.scale * values[wanted],
        vectors=matmul(s.T.astype(carry.rows.dtype), carry.rows[:-1]),
        residuals=carry.scale * carry.beta[used - 1] * jnp.abs(s[used - 1]),
        ends=carry.scale * hull,
        bounds=carry.scale * jnp.stack([low, high]),
        status=status_with_symmetry(status, carry.skew, carry.size, n, eps),
    )


def _widened(hull: Array, low: Array, high: Array) -> Array:
    return jnp.stack([jnp.minimum(hull[0], low), jnp.maximum(hull[1], high)])


def _mirrored(history: _History) -> _History:
    """The recurrence of -A."""
    return history._replace(alpha=-history.alpha, kept=-history.kept)


def _log_sum(history: _History, smallest: Array, x: Real[Array, " g"]) -> Real[Array, " g"]:
    """The logarithm of sum_j pi_j(x)^2 at points above all Ritz values, from the ratios rho_j =
    a_{j+1} / a_j, which are positive there. Those that rounding makes negative count as 0, which
    makes the sum smaller and the bound larger.
    """
    tiny = float(jnp.finfo(x.dtype).tiny) ** 0.5

    def step(carry, each):
        previous, log_a, total, ended = carry  # the last beta / rho; log a_j; sum of a_i^2 / a_j^2
        alpha, beta, first, kept, spikes = each
        shares = spikes / jnp.maximum(x[:, None] - kept, tiny)  # a_i / a_p
        before = jnp.where(first, jnp.sum(spikes * shares, axis=1), previous)
        total = jnp.where(first, 1 + jnp.sum(jnp.square(shares), axis=1), total)
        floor = jnp.maximum(beta, smallest)
        rho = jnp.maximum((x - alpha - before) / floor, tiny)
        new = (floor / rho, log_a + jnp.log(rho), 1 + total / jnp.square(rho), beta == 0)
        # Behind an invariant space comes a random vector, of which nothing is known.
        kept_as_it_was = [jnp.where(ended, o, n) for o, n in zip(carry, new, strict=True)]
        kept_as_it_was[3] = ended | new[3]
        return tuple(kept_as_it_was), None

    zero = jnp.zeros_like(x)
    carry = (zero, zero, zero + 1, jnp.zeros((), bool))
    (_, log_a, total, _), _ = lax.scan(step, carry, history)
    return 2 * log_a + jnp.log(total)


def _outside(
    history: _History, end: Array, smallest: Array, size: Array, log_chance: float
) -> Array:
    """The x above `end` (the largest Ritz value) at which the sum reaches 1 / c^2, rounded up; inf
    if it does not within 10^9 times the size of the operator.
    """
    unit = jnp.maximum(size, jnp.finfo(size.dtype).tiny)
    low = math.log(float(jnp.finfo(size.dtype).eps))

    def crossing(distances):
        reached = _log_sum(history, smallest, end + distances) >= log_chance
        # The distance after the last at which the sum is too small.
        last = jnp.max(jnp.where(reached, -1, jnp.arange(distances.size)))
        return last + 1

    coarse = unit * jnp.exp(jnp.linspace(low, math.log(1e9), 64))
    index = crossing(coarse)
    above = coarse[jnp.minimum(index, 63)]
    below = jnp.where(index > 0, coarse[jnp.maximum(index - 1, 0)], above)
    fine = below * jnp.exp(jnp.linspace(0, 1, 33) * jnp.log(above / below))
    distance = fine[jnp.minimum(crossing(fine), 32)]
    distance = jnp.where(index < 64, distance, jnp.inf)
    return end + jnp.where(size > 0, distance, 0)

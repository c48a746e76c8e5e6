"""The published formulas in NumPy: naive, slow, and obviously right.

Nothing here is clever: what the package gets from one factorisation of all probes is computed anew
for every probe (or pair of probes) that is held out. `published_*` are the algorithms as their
authors give them, with their own shifts, and without resphering.
"""

from typing import Any

import equinox as eqx
import jax
import numpy as np

import traceax as tr
from traceax._sketch.nystrom import DAMPING, FEWEST, FLAT, LEAST_PART, MULTIPLES, PARTS, WORTH

from .helpers import operator_for


def each(fn, keys, *args):
    """`fn(key, *args)` for one key after the other, in one compiled loop.

    Not `vmap`: jaxlib 0.10 hands the chunks of a batched LAPACK call to the thread pool that the
    call itself blocks, so that on a machine with two cores two of them at once (the Q of a QR
    factorisation and a solve with its R) wait for each other for ever.
    """
    return jax.jit(lambda keys, args: jax.lax.map(lambda key: fn(key, *args), keys))(keys, args)


@jax.jit(static_argnums=(2, 3, 4))
def solutions(keys, matrix, k, estimator, tags=()):
    """The `Solution` for each of the keys, one after the other."""
    operator = operator_for(estimator, matrix, tags)
    return jax.lax.map(lambda key: tr.trace(key, operator, k, estimator), keys)


def function_of(matrix, fn):
    """f(A) of a Hermitian matrix."""
    values, vectors = np.linalg.eigh(np.asarray(matrix))
    return (vectors * np.asarray(fn(values))) @ vectors.conj().T


def krylov_basis(matrix, start, steps):
    """An orthonormal basis of the (block) Krylov space, by QR factorisations."""
    basis, block = np.zeros((len(start), 0), start.dtype), start
    for _ in range(steps):
        for _ in range(3):
            block = np.linalg.qr(block - basis @ (basis.conj().T @ block))[0]
        basis = np.concatenate([basis, block], axis=1)
        block = np.asarray(matrix) @ block
    return basis


class GivenProbes(tr.AbstractSampler):
    """A sampler that returns, of these blocks of probes, the one with as many as are asked for."""

    blocks: tuple[jax.Array, ...]
    dtype: Any = eqx.field(default=None, static=True)
    rotation_invariant: bool = eqx.field(default=True, static=True)

    def _sample(self, key, shape, k, dtype):
        (block,) = [block for block in self.blocks if block.shape == (*shape, k)]
        return block


def form(matrix, x):
    """x^H A x."""
    return np.vdot(x, matrix @ x)


def hutchinson(matrix, omega):
    """The samples omega_i^H A omega_i."""
    return np.array([form(matrix, column) for column in omega.T])


def hutchpp_estimate(matrix, omega, fresh, resphere):
    """tr(Q^H A Q) plus the mean of the samples c_i g_i^H A g_i, g_i = (I - Q Q^H) omega_i, and the
    standard error.
    """
    n, m = omega.shape
    q, _ = range_rest(matrix, omega, [])
    g = fresh - q @ (q.conj().T @ fresh)
    factors = (n - m) / np.sum(np.abs(g) ** 2, axis=0) if resphere else 1
    samples = factors * hutchinson(matrix, g)
    std_err = samples.std(ddof=1) / np.sqrt(len(samples))
    return np.trace(q.conj().T @ matrix @ q) + samples.mean(), std_err


def xtrace_sample(matrix, omega, i, held_out, resphere):
    """The estimate that tests with probe i what the probes outside {i} and `held_out` span."""
    q, _ = range_rest(matrix, omega, [i, *held_out])
    g = omega[:, i] - q @ (q.conj().T @ omega[:, i])
    factor = (len(q) - q.shape[1]) / np.vdot(g, g).real if resphere else 1
    return np.trace(q.conj().T @ matrix @ q) + factor * form(matrix, g)


def nystrom_rest(matrix, omega, held_out, z=0):
    """A basis of the probes in use, and what their Nystrom approximation leaves of A - delta I.

    With z = delta - i eta it is the real part of F (H - z I)^{-1} F^H.
    """
    basis = np.linalg.qr(np.delete(omega, held_out, axis=1))[0]
    rest_of = matrix - np.real(z) * np.eye(len(omega))
    sketch = rest_of @ basis
    core = basis.conj().T @ sketch
    core = (core + core.conj().T) / 2 - 1j * np.imag(z) * np.eye(len(core))
    approximation = sketch @ np.linalg.solve(core, sketch.conj().T)
    approximation = (approximation + approximation.conj().T) / 2
    return basis, rest_of - (approximation if np.iscomplexobj(matrix) else approximation.real)


def xnystrace_sample(matrix, omega, i, held_out, resphere, z=0):
    """As `xtrace_sample`, with the Nystrom approximation in the place of the projection. If z is
    complex, that does not reproduce the products: its error on the span of the probes is added.
    """
    basis, error = nystrom_rest(matrix, omega, [i, *held_out], z)
    g = omega[:, i] - basis @ (basis.conj().T @ omega[:, i])
    factor = (len(basis) - basis.shape[1]) / np.vdot(g, g).real if resphere else 1
    known = np.trace(matrix) - np.trace(error) + np.trace(basis.conj().T @ error @ basis)
    return known + factor * form(error, g)


def across(x, g):
    """The squared norm of what x has beyond the direction of g."""
    return np.vdot(x, x).real - abs(np.vdot(g, x)) ** 2 / np.vdot(g, g).real


def variance_of_test(matrix, omega, i, z):
    """The mean over j of V_ji: what E g_j has beyond g_j, E from the probes other than i and j."""
    found = []
    for j in [j for j in range(omega.shape[1]) if j != i]:
        basis, error = nystrom_rest(matrix, omega, [i, j], z)
        beyond = np.eye(len(omega)) - basis @ basis.conj().T
        found.append(across(beyond @ error @ beyond @ omega[:, j], beyond @ omega[:, j]))
    return np.mean(found)


def range_rest(matrix, omega, held_out):
    """A basis of the range of the other products, and what the projection on it leaves of A."""
    q = np.linalg.qr(matrix @ np.delete(omega, held_out, axis=1))[0]
    return q, matrix - q @ (q.conj().T @ matrix)


def shrunk(matrix, omega, nystrom, skew=False):
    """The value, the standard error, and the weights beta_i of shrunk samples, with every quantity
    that belongs to sample i made anew from the other probes.
    """
    n, m = omega.shape
    rest_of = nystrom_rest if nystrom else range_rest
    h = hutchinson(matrix, omega)
    terms = omega.conj() * (matrix @ omega)
    common = 1 if np.iscomplexobj(omega) else 2

    def residual(i, held_out):
        """e, the residual probe, and what is left of A and of A omega_i."""
        basis, error = rest_of(matrix, omega, held_out)
        g = omega[:, i] - basis @ (basis.conj().T @ omega[:, i])
        known = np.trace(matrix - error) if nystrom else np.trace(basis.conj().T @ matrix @ basis)
        return form(error if nystrom else matrix, g), g, known, error @ omega[:, i]

    beta, level, samples = np.zeros(m), np.zeros(m, h.dtype), np.zeros(m, h.dtype)
    d = np.zeros((m, m), h.dtype)
    for i in range(m):
        others = [j for j in range(m) if j != i]
        pairs = [residual(j, [i, j]) for j in others]
        square = sum(np.vdot(g, g).real for _, g, _, _ in pairs)
        level[i] = sum(e for e, _, _, _ in pairs) / square
        v_t = np.mean([across(rest, g) for _, g, _, rest in pairs])
        v_h = np.var(terms[:, others], axis=1, ddof=1).sum()
        seen = np.var(h[others], ddof=1) / common
        if skew and seen < (1 if m >= 8 else 1e-6 if m == 3 else 1e-3) * v_h:
            v_h = seen
        beta[i] = 1 / (1 + (v_t / max(v_h, 1e-100)) ** 2)
        e, g, known, _ = residual(i, [i])
        rank = m - 1

        def t(e, g, known, rank, delta):
            return known + e + delta * (n - rank - np.vdot(g, g).real)

        t_i = t(e, g, known, rank, level[i])
        samples[i] = h[i] - beta[i] * (h[i] - t_i)
        for j in others:
            e, g, known, _ = residual(i, [i, j])
            d[i, j] = beta[i] * (t_i - t(e, g, known, rank - 1, level[i]))
    covariance = np.sum(d * d.conj().T).real / (m * (m - 1))
    variance = samples.var(ddof=1) / m + max(covariance, 0)
    return samples.mean(), np.sqrt(variance), beta


def leave_one_out(sample, matrix, omega, resphere):
    """The value, the standard error, and the customary (too small) s / sqrt(m).

    With t_ij the sample that tests with i and has held out j as well, D_ij = t_i - t_ij, the
    square of the standard error is s^2 / m + max(0, mean_{i != j} Re D_ij conj(D_ji)).
    """
    m = omega.shape[1]
    samples = np.array([sample(matrix, omega, i, [], resphere) for i in range(m)])
    d = np.zeros((m, m), dtype=samples.dtype)
    for i in range(m):
        for j in range(m):
            if i != j:
                d[i, j] = samples[i] - sample(matrix, omega, i, [j], resphere)
    pairs = [(d[i, j] * np.conj(d[j, i])).real for i in range(m) for j in range(m) if i != j]
    customary = samples.std(ddof=1) / np.sqrt(m)
    return samples.mean(), np.sqrt(customary**2 + max(0, np.mean(pairs))), customary


def with_best_shifts(matrix, omega, resphere, real=False):
    """The shifts that are taken, with the estimate of the trace.

    0, and complex numbers in the middle of the smallest eigenvalues of P^H A P, P an orthonormal
    basis of the probes, or (if they are to be real) multiples of the smallest are tried if a
    quarter of the eigenvalues are alike, and the probes are not too few. Each probe takes the one
    with the smallest variance (real: of the mean) if it is considerably smaller than without.
    """
    m, p = omega.shape[1], np.linalg.qr(omega)[0]
    eigenvalues = np.linalg.eigvalsh(p.conj().T @ matrix @ p)
    theta = max(0, eigenvalues[0])
    shifts = [multiple * theta for multiple in MULTIPLES[: None if real else 1]]
    flat = m >= FEWEST and eigenvalues[m // 4] <= FLAT * theta
    if flat and not real:
        middle = [eigenvalues[max(m // part, LEAST_PART)] for part in PARTS]
        shifts += [delta - 1j * DAMPING * (delta - eigenvalues[0]) for delta in middle]
    shifts = np.array(shifts if flat else shifts[:1])
    probes = range(m)

    def estimate(taken):
        sample = lambda *given: xnystrace_sample(*given, taken[given[2]])  # noqa: E731
        return taken, *leave_one_out(sample, matrix, omega, resphere)

    if real:
        tried = [estimate([z] * m) for z in shifts]
        variances = np.array([[error**2] * m for _, _, error, _ in tried])
    else:
        variances = np.array(
            [[variance_of_test(matrix, omega, i, z) for i in probes] for z in shifts]
        )
    best = np.where(variances.min(0) < WORTH**2 * variances[0], variances.argmin(0), 0)
    return estimate(shifts[best])


def published_xtrace(matrix, omega):
    """The samples of XTrace as published (arXiv:2301.07825, listing 1), for real matrices."""
    q, r = np.linalg.qr(matrix @ omega)
    s = np.linalg.solve(r.T, np.eye(len(r)))
    s /= np.linalg.norm(s, axis=0)
    z = matrix @ q
    h, w, t = q.T @ z, q.T @ omega, z.T @ omega
    x = w - s * np.sum(s * w, axis=0)
    return (
        np.trace(h)
        - np.sum(s * (h @ s), axis=0)
        + np.sum(w * s, axis=0) * np.sum(s * r, axis=0)
        - np.sum(t * x, axis=0)
        + np.sum(x * (h @ x), axis=0)
    )


def published_xnystrace(matrix, omega):
    """The samples of XNysTrace as published: shift, Cholesky factor of Omega^T Y, no P."""
    n = len(omega)
    sketch = matrix @ omega
    nu = np.finfo(float).eps * np.linalg.norm(sketch) / np.sqrt(n)
    while True:
        core = omega.T @ (sketch + nu * omega)
        try:
            c = np.linalg.cholesky((core + core.T) / 2).T
            break
        except np.linalg.LinAlgError:
            nu *= 10
    f = np.linalg.solve(c.T, (sketch + nu * omega).T).T
    q = np.linalg.inv(c).T
    d = np.sum(q**2, axis=0)
    z = f @ (q / np.sqrt(d))
    return np.sum(f**2) - np.sum(z**2, axis=0) + 1 / d - nu * n


def diagpp_estimate(matrix, omega, fresh):
    """Diag++ without its bias, and its standard errors: diag(Q Q^H A) and the samples
    conj(omega_i) (I - Q Q^H) A omega_i.
    """
    _, rest = range_rest(matrix, omega, [])
    samples = fresh.conj() * (rest @ fresh)
    std_err = samples.std(axis=1, ddof=1) / np.sqrt(fresh.shape[1])
    return np.diag(matrix - rest) + samples.mean(axis=1), std_err


def diagonal_samples(rest_of, matrix, omega, held_out=()):
    """The samples of XDiag or of XNysDiag (real, as the diagonal is), by the probe that tests."""
    samples = []
    for i in range(omega.shape[1]):
        _, rest = rest_of(matrix, omega, [i, *held_out])
        sample = np.diag(matrix - rest) + omega[:, i].conj() * (rest @ omega[:, i])
        samples.append(sample.real if rest_of is nystrom_rest else sample)
    return np.stack(samples)


def leave_one_out_diagonal(rest_of, matrix, omega):
    """The diagonal, and entry by entry the standard error of `leave_one_out`."""
    m = omega.shape[1]
    samples = diagonal_samples(rest_of, matrix, omega)
    without = [diagonal_samples(rest_of, matrix, omega, [j]) for j in range(m)]
    pairs = [(i, j) for i in range(m) for j in range(m) if i != j]
    products = [
        (samples[i] - without[j][i]) * np.conj(samples[j] - without[i][j]) for i, j in pairs
    ]
    covariance = np.maximum(np.mean(np.real(products), axis=0), 0)
    return samples.mean(0), np.sqrt(samples.var(axis=0, ddof=1) / m + covariance)


def shrunk_diagonal(matrix, omega, nystrom):
    """The diagonal from shrunk samples, with one weight for all entries."""
    m = omega.shape[1]
    rest_of = nystrom_rest if nystrom else range_rest
    terms = omega.conj() * (matrix @ omega)
    held_out = diagonal_samples(rest_of, matrix, omega)
    samples = []
    for i in range(m):
        others = [j for j in range(m) if j != i]
        left = [rest_of(matrix, omega, [i, j])[1] @ omega[:, j] for j in others]
        v_t = np.mean([np.vdot(x, x).real for x in left])
        v_h = np.var(terms[:, others], axis=1, ddof=1).sum()
        beta = 1 / (1 + (v_t / v_h) ** 2)
        samples.append(terms[:, i] - beta * (terms[:, i] - held_out[i]))
    return np.mean(np.real(samples) if nystrom else samples, axis=0)

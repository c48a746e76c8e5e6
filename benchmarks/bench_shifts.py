"""The two tables of `docs/shifts.md`: the bias of shifts beside its bound, and the errors.

    python -m benchmarks.bench_shifts              # 4,000 keys; half a minute
    python -m benchmarks.bench_shifts --keys 500

n = 200, float64, random eigenvectors. With the shift z_i' that the rule of `_sketch.nystrom` takes
without probe i, every sample is unbiased; the bound is the mean of |s_i(z_i) - s_i(z_i')|. Errors
are those of `benchmarks/results/regret.json`.
"""

import argparse
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

from traceax._core.precision import adjoint, matmul
from traceax._linalg.factorisations import qr
from traceax._sketch import nystrom
from traceax._sketch.shrunk import plain_samples, shrunk_samples

from .common import with_eigenvalues
from .regret import RESULTS
from .spectra import rms

N = 200
EXPERIMENT = (
    *("30 ones, then 1e-3", "i^-3 + 1e-3", "10 / i over a uniform bulk", "0.7^i"),
    "kernel with noise",
)


def spectra():
    """Those with a tail that is more or less flat."""
    i = np.arange(1, N + 1.0)
    bulk = np.random.default_rng(0).uniform(size=N)
    return {"1 + 10 / i": 1 + 10 / i, EXPERIMENT[2]: 10 / i + bulk, EXPERIMENT[1]: i**-3 + 1e-3}


def without_probe(factors, samples_of, i, others):
    """s_i(z_i')."""
    basis, _ = jnp.linalg.qr(factors.r[:, others])
    core = matmul(adjoint(basis), matmul(factors.core, basis))
    eigenvalues = jnp.linalg.eigvalsh(core) + factors.nu
    seen = factors._replace(eigenvalues=eigenvalues)  # for the shifts alone
    shifts = seen.complex_shifts()

    def sample(z):
        parts = nystrom.xnystrace_parts(factors, factors.shifted(z))
        samples = samples_of(parts)
        return parts.base + samples.values[i], samples.variance[i]

    values, variances = jax.vmap(sample)(shifts)
    return values[nystrom._best(jnp.where(seen.is_flat | (shifts == 0), variances, jnp.inf))]


@functools.partial(jax.jit, static_argnums=2)
def traces(keys, matrix, m):
    """The trace, the same from the s_i(z_i'), and the bound, for each key."""
    others = np.stack([np.delete(np.arange(m), i) for i in range(m)])

    def one(key):
        omega = jax.random.rademacher(key, (N, m), matrix.dtype)
        p, r = qr(omega)
        factors = nystrom.nystrom(p, r, matrix @ p, float(jnp.finfo(matrix.dtype).eps))
        plain = plain_samples(omega * matmul(factors.products.numbers, r))
        samples_of = functools.partial(shrunk_samples, plain=plain, n=N)
        taken = nystrom.best_samples(factors, samples_of).values
        free = functools.partial(without_probe, factors, samples_of)
        other = jax.vmap(free)(np.arange(m), others)
        found = jnp.mean(taken), jnp.mean(other), jnp.mean(jnp.abs(taken - other))
        return factors.products.size * jnp.stack(found)

    return jax.lax.map(one, keys).T


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=4000)
    count = parser.parse_args().keys
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    keys = jax.random.split(jax.random.key(1), count)
    print("| spectrum | k = 8: bias | bound | k = 16: bias | bound |", "| --- " * 5 + "|", sep="\n")
    further = []
    for name, eigenvalues in spectra().items():
        matrix = jnp.asarray(with_eigenvalues(eigenvalues))
        row = []
        for m in (8, 16):
            value, free, bound = np.asarray(traces(keys, matrix, m))
            errors, others = value - eigenvalues.sum(), free - eigenvalues.sum()
            row += [abs(errors.mean()) / rms(errors), bound.mean() / rms(errors)]
            z = abs(others.mean()) / rms(others) * np.sqrt(count)
            further.append((z, rms(others) / rms(errors)))
        print(f"| {name} | " + " | ".join(f"{x:.2f}" for x in row) + " |")
    z, ratio = np.max(further, axis=0)
    print(f"\nWith z_i': bias at most {z:.1f} standard errors, error at most {ratio:.2f} times\n")
    print("| spectrum | k = 16 | k = 64 |", "| --- " * 3 + "|", sep="\n")
    stored = json.loads((RESULTS / "regret.json").read_text())["trace"]
    for name in EXPERIMENT:
        cells = [stored[name][k] for k in ("16", "64")]
        texts = [f"{x['rms']:.1e} ({max(x['ratio'], 1):.2g})".replace("e-0", "e-") for x in cells]
        print(f"| {name} | " + " | ".join(texts) + " |")


if __name__ == "__main__":
    main()

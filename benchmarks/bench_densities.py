"""Log densities from 100 products beside Cholesky factorisations, in 32 cases.

    python -m benchmarks.bench_densities          # n = 2000, 20 keys; some three minutes
    python -m benchmarks.bench_densities 5000 --keys 3
    python -m benchmarks.bench_densities --atol   # half a nat in the place of a budget

Four kernels on uniform points of the unit cube in 1, 2, 5 and 10 dimensions, with length scale
0.3 sqrt(d) and noise 0.1 and 1e-3, float64, y drawn from the distribution itself. For each: how
many keys are within half a nat, the products and columns, how many took the exact value, and
seconds beside those of a density by `jnp.linalg.cholesky` (medians, after a first call).
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr

from .common import PSD, medians
from .gaussian_process_cases import kernels

ATOL, ROUNDS = 0.5, 5


@partial(jax.jit, static_argnames="budget")
def ours(key, y, matrix, s, budget):
    identity = lx.IdentityLinearOperator(jax.ShapeDtypeStruct(y.shape, y.dtype))
    covariance = lx.MatrixLinearOperator(matrix, PSD) + s * identity
    return tr.gaussian_log_density(key, y, covariance, **dict(budget))


@jax.jit
def exact(y, matrix, s):
    factor = jnp.linalg.cholesky(matrix + s * jnp.eye(y.size, dtype=y.dtype))
    z = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
    return -(z @ z + log_det + y.size * jnp.log(2 * jnp.pi)) / 2


def problems(n):
    """The name of each case, and y, K and s."""
    for dim in (1, 2, 5, 10):
        x = np.random.default_rng(dim).uniform(size=(n, dim))
        u = np.square(x[:, None] - x).sum(-1) / (0.09 * dim)
        for name, kernel in kernels(np).items():
            for s in (0.1, 1e-3):
                matrix = kernel(u)
                factor = np.linalg.cholesky(matrix + s * np.eye(n))
                y = factor @ np.random.default_rng(7).standard_normal(n)
                yield f"{name} d={dim} noise {s:g}", tuple(map(jnp.asarray, (y, matrix, s)))


def main():
    parser = argparse.ArgumentParser(description="Log densities from 100 products")
    parser.add_argument("n", type=int, nargs="?", default=2000)
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--atol", action="store_true")
    options = parser.parse_args()
    density = partial(ours, budget=(("atol", ATOL),) if options.atol else (("k", 100),))
    jax.config.update("jax_enable_x64", True)
    found = []
    print("case, within, products, columns, exact, ms, ms of Cholesky, ratio")
    for name, problem in problems(options.n):
        truth = exact(*problem)
        solutions = [density(jax.random.key(i), *problem) for i in range(options.keys)]
        within = np.mean([abs(float(each.value - truth)) <= ATOL for each in solutions])
        products = np.median([int(each.num_matvecs) for each in solutions])
        columns = np.median([int(each.stats["columns"]) for each in solutions])
        taken = np.mean([float(each.std_err) == 0 for each in solutions])
        calls = partial(density, jax.random.key(0), *problem), partial(exact, *problem)
        mine, theirs = medians(calls, ROUNDS)
        numbers = f"{within:.2f}, {products:.0f}, {columns:.0f}, {taken:.2f}"
        times = f"{1e3 * mine:.0f}, {1e3 * theirs:.0f}, {mine / theirs:.2f}"
        print(f"{name}, {numbers}, {times}", flush=True)
        found.append((within, mine / theirs))
    within, ratios = np.array(found).T
    print(f"at least 95 % of keys within {ATOL} nats in {np.sum(within >= 0.95)} of {len(found)};")
    print(f"at most 1.5 times the time in {np.sum(ratios <= 1.5)}, half of it in", end=" ")
    print(f"{np.sum(ratios < 0.5)}; at most {ratios.max():.1f} times")


if __name__ == "__main__":
    main()

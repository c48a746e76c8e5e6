"""Log-determinants of kernels by their entries, beside Cholesky factorisations of the matrix.

    python -m benchmarks.bench_kernels 2000 5000 20000 --exact

Matern-5/2 (length scale 0.3) on uniform points of the unit square, noise 1e-2, float32. For each n,
once compiled: seconds of the value, and of value and gradient (with respect to length scale,
amplitude, noise and the points); the error and its bar in nats; MiB of resident memory, the largest
so far, and how much of it the last program took beyond what the process held before. With `--exact`
the same for `jnp.linalg.cholesky` of the matrix, whose derivative is XLA's.

Compiling takes several hundred MiB, which glibc keeps once they are freed: they are given back here
before a program runs.
"""

import argparse
import ctypes
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tr

from .peak import resident_bytes

#: A call that takes less is made again, as the first one touches new memory.
SHORT = 5.0


def covariance(theta, x):
    length, amplitude, noise = theta

    def kernel(a, b):
        r = jnp.sqrt(jnp.maximum(5 * jnp.sum((a - b) ** 2) / length**2, 1e-20))
        return (1 + r + r**2 / 3) * jnp.exp(-r)

    K = tr.KernelLinearOperator(kernel, x)
    return amplitude * K + noise * lx.IdentityLinearOperator(K.in_structure())


def by_cholesky(_, theta, x):
    factor = jnp.linalg.cholesky(covariance(theta, x).as_matrix())
    return 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))


def measured(fn, *args):
    """The value, the seconds of a call, its bytes beyond what was in use before it, and the largest
    resident memory before that.
    """
    compiled = jax.jit(fn).lower(*args).compile()
    so_far, took = resident_bytes(), 0.0
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the largest begins anew
    before = resident_bytes(now=True)
    for _ in range(2):
        if took < SHORT:
            start = time.perf_counter()
            value = jax.block_until_ready(compiled(*args))
            took = time.perf_counter() - start
    return value, took, resident_bytes() - before, so_far


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", type=int, nargs="+")
    parser.add_argument("--k", type=int, default=120, help="products (default 120)")
    parser.add_argument("--exact", action="store_true", help="also by Cholesky's factorisation")
    parser.add_argument("--no-gradient", action="store_true")
    arguments = parser.parse_args()
    theta = tuple(jnp.asarray(value, jnp.float32) for value in (0.3, 1.0, 1e-2))
    print(
        "n, method, value s, value and gradient s, log-determinant, bar, columns, peak, of the call"
    )
    for n in arguments.n:
        x = jax.random.uniform(jax.random.key(0), (n, 2))

        def estimate(key, theta, x):
            solution = tr.logdet(key, covariance(theta, x), arguments.k, fallback=None)
            return solution.value, solution

        methods = {"traceax": estimate}
        if arguments.exact:
            methods["cholesky"] = lambda *args: (by_cholesky(*args), None)
        for name, method in methods.items():
            key = jax.random.key(1)
            (value, solution), plain, beyond, peak = measured(method, key, theta, x)
            slope = float("nan")
            if not arguments.no_gradient:
                both = jax.value_and_grad(method, (1, 2), has_aux=True)
                _, slope, beyond, so_far = measured(both, key, theta, x)
                peak = max(peak, so_far)
            bar = "" if solution is None else f"{solution.std_err + solution.quadrature_error:.2f}"
            columns = "" if solution is None else solution.stats["columns"]
            peak = f"{max(peak, resident_bytes()) / 2**20:.0f}, {beyond / 2**20:.0f}"
            figures = f"{plain:.2f}, {slope:.2f}, {value:.2f}, {bar}, {columns}, {peak}"
            print(f"{n}, {name}, {figures}", flush=True)


if __name__ == "__main__":
    main()

"""Hyperparameters by L-BFGS: from estimates, and from exact log densities.

    python -m benchmarks.bench_fits              # n = 3000; a quarter of an hour
    python -m benchmarks.bench_fits 1500 --cases "RBF d=2" diabetes

Four kernels in two and in five dimensions, y drawn from the distribution itself, noise 0.01; and
scikit-learn's diabetes data, RBF with a length scale for each of its ten coordinates. float64. The
estimates are from 100 products. For each: by how many
nats the exact log density at the one end is below that at the other, how often the objective was
evaluated, and seconds.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.optimize

import traceax as tr

from .gaussian_process_cases import kernel_of, kernels

K, NOISE = 100, 0.01


def covariance(kernel, theta, x):
    """Logarithms of length scales, one for each coordinate or one for all, amplitude and noise."""
    lengths, amplitude, noise = jnp.exp(theta[:-2]), jnp.exp(theta[-2]), jnp.exp(theta[-1])
    operator = tr.KernelLinearOperator(lambda a, b: kernel(jnp.sum(((a - b) / lengths) ** 2)), x)
    return amplitude * operator + noise * lx.IdentityLinearOperator(operator.in_structure())


def fit(kernel, x, y, start, **accuracy):
    """Where L-BFGS ends, the number of evaluations, and seconds without the first one."""

    @jax.jit
    @jax.value_and_grad
    def loss(theta):
        operator = covariance(kernel, theta, x)
        return -tr.gaussian_log_density(jax.random.key(0), y, operator, **accuracy).value

    def objective(theta):
        value, slope = jax.device_get(loss(jnp.asarray(theta)))
        return float(value), np.asarray(slope)

    objective(start)
    before = time.perf_counter()
    bounds = [(each - 5, each + 5) for each in start]
    found = scipy.optimize.minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds)
    return found.x, found.nfev, time.perf_counter() - before, objective


def drawn(name, dim, n):
    """A case with its true hyperparameters off by a factor of two at the start."""
    kernel, length = kernel_of(jnp, name), 0.3 * np.sqrt(dim)
    x = np.random.default_rng(dim).uniform(size=(n, dim))
    truth = np.log([length, 1.0, NOISE])
    matrix = np.asarray(covariance(kernel, jnp.asarray(truth), jnp.asarray(x)).as_matrix())
    y = np.linalg.cholesky(matrix) @ np.random.default_rng(7).standard_normal(n)
    return kernel, jnp.asarray(x), jnp.asarray(y), truth + np.log([2.0, 0.5, 2.0])


def diabetes():
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    x, y = x / x.std(axis=0), (y - y.mean()) / y.std()
    return kernel_of(jnp, "RBF"), jnp.asarray(x), jnp.asarray(y), np.log([5.0] * 10 + [1.0, 0.5])


def main():
    parser = argparse.ArgumentParser(description="Fits by L-BFGS")
    parser.add_argument("n", type=int, nargs="?", default=3000)
    names = ["diabetes", *(f"{name} d={dim}" for dim in (2, 5) for name in kernels(np))]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print("case, nats lost, evaluations, of the exact one, seconds, of the exact one")
    for case in options.cases:
        name, _, dim = case.partition(" d=")
        problem = diabetes() if name == "diabetes" else drawn(name, int(dim), options.n)
        mine, evaluations, seconds, _ = fit(*problem, k=K)
        best, others, theirs, exact = fit(*problem, k=len(problem[2]))
        lost = exact(mine)[0] - exact(best)[0]
        print(
            f"{case}, {lost:.3f}, {evaluations}, {others}, {seconds:.0f}, {theirs:.0f}", flush=True
        )


if __name__ == "__main__":
    main()

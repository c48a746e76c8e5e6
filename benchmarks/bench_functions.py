"""Spectral sums from equal numbers of products: ours, stochastic Lanczos quadrature alone, matfree.

    python -m benchmarks.bench_functions            # k = 120, 40 keys; some two minutes
    python -m benchmarks.bench_functions 48 240 --keys 20

n = 1000, float64, eigenvectors at random. For each function: root mean square errors over the keys,
relative to the value, how many of our bars (two standard errors and the quadrature error) cover,
and the same errors for the derivative in a direction that changes each eigenvalue by its own
factor. Matfree takes 10 steps a probe, or 40, whichever is better.
"""

import argparse

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr
from traceax._functions.funm import plan

from . import matfree_peer
from .regret import rms

N = 1000
INDEX = np.arange(1.0, N + 1)


def cases():
    """The name of each case, the eigenvalues, and the function."""
    random = np.random.default_rng(0).standard_normal((N, N))
    semicircle = np.linalg.eigvalsh((random + random.T) / np.sqrt(8 * N))
    path = 2 - 2 * np.cos(np.pi * np.arange(N) / N)
    return (
        ("sqrt x, i^-2", INDEX**-2, lambda x: jnp.sqrt(jnp.abs(x))),
        ("log(1 + 1e4 x), i^-2", INDEX**-2, lambda x: jnp.log1p(1e4 * jnp.abs(x))),
        ("1 / (x + 1e-3), i^-2", INDEX**-2, lambda x: 1 / (jnp.abs(x) + 1e-3)),
        ("exp(20 x), random on [-1, 1]", semicircle, lambda x: jnp.exp(20 * x)),
        ("exp(-10 x), path", path, lambda x: jnp.exp(-10 * x)),
        ("log x, 1 + 10 / i", 1 + 10 / INDEX, jnp.log),
        ("sqrt x, 0.9^i", 0.9**INDEX, lambda x: jnp.sqrt(jnp.abs(x))),
    )


def product(basis, eigenvalues):
    """The product of a vector with the matrix of these eigenvectors and eigenvalues."""
    return lambda v: basis @ (eigenvalues * (basis.T @ v))


def errors(basis, eigenvalues, fn, k, keys, num_steps=None):
    """The errors of values and derivatives, relative, and how many bars cover."""
    values = jnp.asarray(eigenvalues)
    factors = jnp.asarray(np.random.default_rng(1).uniform(0, 2, N))
    truth, slope = jax.jvp(
        lambda t: jnp.sum(fn(values * (1 + t * factors))), (jnp.zeros(()),), (jnp.ones(()),)
    )

    def value(t, key):
        moved = values * (1 + t * factors)
        structure = jax.ShapeDtypeStruct(moved.shape, moved.dtype)
        operator = lx.FunctionLinearOperator(product(basis, moved), structure, lx.symmetric_tag)
        solution = tr.spectral_sum(key, fn, operator, k, num_steps=num_steps)
        return solution.value, solution

    compute = jax.jit(jax.vmap(jax.grad(value, has_aux=True), in_axes=(None, 0)))
    slopes, found = compute(jnp.zeros(()), keys)
    off = found.value - truth
    covers = jnp.mean(jnp.abs(off) <= 2 * found.std_err + found.quadrature_error)
    return rms(off / truth), rms((slopes - slope) / slope), float(covers)


def matfree_error(basis, eigenvalues, fn, k, keys):
    """The smaller error of two numbers of steps."""
    values = jnp.asarray(eigenvalues)
    mv, truth, found = product(basis, values), jnp.sum(fn(values)), []
    for steps in (10, 40):
        estimate = matfree_peer.function(fn, values, k, min(steps, k))
        several = jax.jit(jax.vmap(lambda key, e=estimate: e(mv, key)))
        found.append(rms((several(keys) - truth) / truth))
    return min(found)


def budgets_and_keys(description):
    """The budgets and the random keys that the command line asks for, in double precision."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("k", type=int, nargs="*", default=[120])
    parser.add_argument("--keys", type=int, default=40)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    return options.k, jax.random.split(jax.random.key(0), options.keys)


def main():
    budgets, keys = budgets_and_keys("Spectral sums from equal numbers of products")
    square = np.random.default_rng(2).standard_normal((N, N))
    basis = jnp.asarray(np.linalg.qr(square)[0])
    print("case, k, error, covers, quadrature alone, matfree, derivative, quadrature alone")
    for k in budgets:
        _, steps = plan(k, None)
        for name, eigenvalues, fn in cases():
            ours, slope, covers = errors(basis, eigenvalues, fn, k, keys)
            alone, slope_alone, _ = errors(basis, eigenvalues, fn, k, keys, steps)
            matfree = matfree_error(basis, eigenvalues, fn, k, keys)
            numbers = f"{ours:.2g}, {covers:.2f}, {alone:.2g}, {matfree:.2g}"
            print(f"{name}, {k}, {numbers}, {slope:.2g}, {slope_alone:.2g}", flush=True)


if __name__ == "__main__":
    main()

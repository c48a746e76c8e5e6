"""Spectral sums from equal numbers of products: ours, stochastic Lanczos quadrature alone, matfree.

    python -m benchmarks.bench_functions            # k = 120, 40 keys; some two minutes
    python -m benchmarks.bench_functions 48 240 --keys 20

n = 1000, float64, eigenvectors at random. For each function: root mean square errors over the keys,
relative to the value, how many of our bars (two standard errors and the quadrature error) cover,
and the same errors for the derivative in a direction that changes each eigenvalue by its own
factor. Matfree takes 10 steps a probe, or 40, whichever is better. Then tr exp(A) of matrices that
are not symmetric, by Arnoldi's recurrence.
"""

import argparse

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr
from traceax._functions.funm import plan

from . import matfree_peer
from .spectra import N, basis, eigenvalues, functions, not_symmetric, rms

FUNCTIONS = functions(jnp)


def cases():
    """The name of each case, the eigenvalues, and the function."""
    for name, spectrum, values in eigenvalues():
        yield f"{name}, {spectrum}", values, FUNCTIONS[name]


def product(vectors, values):
    """The product of a vector with the matrix of these eigenvectors and eigenvalues."""
    return lambda v: vectors @ (values * (vectors.T @ v))


def errors(vectors, spectrum, fn, k, keys, num_steps=None):
    """The errors of values and derivatives, relative, and how many bars cover."""
    values = jnp.asarray(spectrum)
    factors = jnp.asarray(np.random.default_rng(1).uniform(0, 2, N))
    truth, slope = jax.jvp(
        lambda t: jnp.sum(fn(values * (1 + t * factors))), (jnp.zeros(()),), (jnp.ones(()),)
    )

    def value(t, key):
        moved = values * (1 + t * factors)
        structure = jax.ShapeDtypeStruct(moved.shape, moved.dtype)
        operator = lx.FunctionLinearOperator(product(vectors, moved), structure, lx.symmetric_tag)
        solution = tr.spectral_sum(key, fn, operator, k, num_steps=num_steps)
        return solution.value, solution

    compute = jax.jit(jax.vmap(jax.grad(value, has_aux=True), in_axes=(None, 0)))
    slopes, found = compute(jnp.zeros(()), keys)
    off = found.value - truth
    covers = jnp.mean(jnp.abs(off) <= 2 * found.std_err + found.quadrature_error)
    return rms(off / truth), rms((slopes - slope) / slope), float(covers)


def matfree_error(vectors, spectrum, fn, k, keys):
    """The smaller error of two numbers of steps."""
    values = jnp.asarray(spectrum)
    mv, truth = product(vectors, values), jnp.sum(fn(values))
    return best(lambda steps: matfree_peer.function(fn, values, k, steps), mv, truth, k, keys)


def best(estimate_with, mv, truth, k, keys):
    """The smaller error of matfree's estimates with two numbers of steps."""
    found = []
    for steps in (10, 40):
        estimate = estimate_with(min(steps, k))
        several = jax.jit(jax.vmap(lambda key, e=estimate: e(mv, key)))
        found.append(rms((several(keys) - truth) / truth))
    return min(found)


def not_symmetric_errors(matrix, k, keys, num_steps=None):
    """Of tr exp(A): the error relative to the value, how many bars cover, and matfree's error."""
    matrix, truth = jnp.asarray(matrix), np.sum(np.exp(np.linalg.eigvals(matrix))).real

    def one(key):
        operator = lx.MatrixLinearOperator(matrix)
        return tr.spectral_sum(key, jnp.exp, operator, k, num_steps=num_steps)

    found = jax.jit(jax.vmap(one))(keys)
    off = found.value - truth
    covers = jnp.mean(jnp.abs(off) <= 2 * found.std_err + found.quadrature_error)

    def estimate_with(steps):
        return matfree_peer.exponential(matrix[0], k, steps)

    return (
        rms(off / truth),
        float(covers),
        best(estimate_with, lambda v: matrix @ v, truth, k, keys),
    )


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
    vectors = jnp.asarray(basis())
    print("case, k, error, covers, quadrature alone, matfree, derivative, quadrature alone")
    for k in budgets:
        _, steps = plan(k, None)
        for name, spectrum, fn in cases():
            ours, slope, covers = errors(vectors, spectrum, fn, k, keys)
            alone, slope_alone, _ = errors(vectors, spectrum, fn, k, keys, steps)
            matfree = matfree_error(vectors, spectrum, fn, k, keys)
            numbers = f"{ours:.2g}, {covers:.2f}, {alone:.2g}, {matfree:.2g}"
            print(f"{name}, {k}, {numbers}, {slope:.2g}, {slope_alone:.2g}", flush=True)
    print("exp x of, k, error, covers, matfree")
    for k in budgets:
        for name, matrix in not_symmetric():
            ours, covers, matfree = not_symmetric_errors(matrix, k, keys)
            print(f"{name}, {k}, {ours:.2g}, {covers:.2f}, {matfree:.2g}", flush=True)


if __name__ == "__main__":
    main()

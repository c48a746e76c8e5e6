"""Log-determinants and traces of inverses by products alone: the default beside no preconditioner.

    python -m benchmarks.bench_products             # 400 keys; some ten minutes
    python -m benchmarks.bench_products --keys 50

Root mean square errors (of log-determinants in nats, of inverses relative), the quotient of the
two, and how many 95 % intervals of the default hold the truth. A lattice precision (CAR, 28 x 32),
eigenvalues that are uniform in their logarithm (condition 1e4), and kernels as one operator.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr

from .common import PSD, with_eigenvalues
from .gaussian_process_cases import kernels

COMPUTE = {"logdet": tr.logdet, "inverse_trace": tr.inverse_trace}


def lattice(rows, columns, alpha):
    paths = [np.diag(np.ones(m - 1), 1) for m in (rows, columns)]
    edges = np.kron(paths[0], np.eye(columns)) + np.kron(np.eye(rows), paths[1])
    edges = edges + edges.T
    return np.diag(edges.sum(axis=1)) - alpha * edges


def kernel(dim, length, noise, n=400):
    x = np.random.default_rng(0).uniform(size=(n, dim)) / length
    return kernels(np)["Matern-3/2"](np.square(x[:, None] - x).sum(-1)) + noise * np.eye(n)


@partial(jax.jit, static_argnums=(0, 3, 4))
def solve(what, keys, matrix, k, preconditioner):
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    operator = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, PSD)

    def one(key):
        solution = COMPUTE[what](key, operator, k, preconditioner=preconditioner)
        return solution.value, *solution.interval()

    return jax.lax.map(one, keys)


def main():
    parser = argparse.ArgumentParser(description="Log-determinants and inverses by products")
    parser.add_argument("--keys", type=int, default=400)
    keys = jax.random.split(jax.random.key(3), parser.parse_args().keys)
    jax.config.update("jax_enable_x64", True)
    matrices = {
        "lattice": lattice(28, 32, 0.9),
        "log-uniform": with_eigenvalues(np.geomspace(1e-4, 1, 300)),
        "Matern-3/2, d = 2": kernel(2, 0.4, 1e-2),
        "Matern-3/2, d = 5": kernel(5, 0.7, 1e-1),
    }
    print("operator, k, quantity: default, none, quotient, intervals that hold")
    for name, matrix in matrices.items():
        truth = {
            "logdet": np.linalg.slogdet(matrix)[1],
            "inverse_trace": np.trace(np.linalg.inv(matrix)),
        }
        for k in (24, 32, 48, 60, 100):
            for what, exact in truth.items():
                unit = 1 if what == "logdet" else exact
                found = [solve(what, keys, jnp.asarray(matrix), k, each) for each in ("auto", None)]
                errors = [np.sqrt(np.mean(np.square((x[0] - exact) / unit))) for x in found]
                held = np.mean((found[0][1] <= exact) & (exact <= found[0][2]))
                numbers = (
                    f"{errors[0]:.3g}, {errors[1]:.3g}, {errors[0] / errors[1]:.2f}, {held:.3f}"
                )
                print(f"{name}, {k}, {what}: {numbers}", flush=True)


if __name__ == "__main__":
    main()

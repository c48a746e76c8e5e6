"""Spectral sums by imate and primate, in an environment of their own.

    python3.11 -m venv slq-env
    slq-env/bin/pip install imate==0.29.11 scikit-primate==0.5.6
    slq-env/bin/python -m benchmarks.peers_slq       # from the root of a clone; some two minutes

The cases of `bench_functions` from 120 products: root mean square errors over 40 seeds, relative to
the value. imate has each of these functions (`schatten` with p = 1/2, `logdet`, `traceinv`,
`trexp`) by stochastic Lanczos quadrature. primate has `hutch` of a `MatrixFunction` (quadrature),
and `xtrace` of one, with two products with f(A) for each probe. (Its `xtrace` goes on until it has
n probes: here a callback ends it. With reorthogonalisation, a `MatrixFunction` of version 0.5.6 is
right for its first quadratic form only: here each has one of its own.) Each takes 10 steps or 40,
whichever turns out better, with full reorthogonalisation. Writes
`benchmarks/results/peers_slq.json`. It knows nothing of JAX.
"""

import contextlib
import json
import platform
from importlib.metadata import version
from pathlib import Path

import imate
import numpy as np
from primate.operators import MatrixFunction
from primate.trace import hutch, xtrace

from .spectra import N, basis, eigenvalues, functions, rms

K, SEEDS, STEPS = 120, 40, (10, 40)
RESULTS = Path(__file__).parent / "results/peers_slq.json"

FUNCTIONS = functions(np)


def by_imate(name, matrix, steps, seed):
    """The estimate of imate."""
    options = {
        "method": "slq",
        "min_num_samples": K // steps,
        "max_num_samples": K // steps,
        "lanczos_degree": steps,
        "orthogonalize": -1,
        "num_threads": 1,
        "seed": seed + 1,
    }
    one = np.eye(N)
    if name == "sqrt x":
        return N * imate.schatten(matrix, p=0.5, **options) ** 0.5  # it is a mean to the power 1/p
    if name.startswith("log"):
        return imate.logdet(matrix if name == "log x" else one + 1e4 * matrix, **options)
    if name.startswith("1"):
        return imate.traceinv(matrix + 1e-3 * one, **options)
    return imate.trexp(matrix, coeff=20.0 if name == "exp(20 x)" else -10.0, **options)


class Ended(Exception):
    """Raised to end what does not end by itself."""


class Quadrature(MatrixFunction):
    """A `MatrixFunction` whose quadratic forms know nothing of earlier ones."""

    def quad(self, x):
        """See `MatrixFunction`."""
        fresh = MatrixFunction(self._A, self.fun, deg=self.degree, orth=-1)
        return fresh.quad(x)


def by_hutch(name, matrix, steps, seed):
    """The estimate of primate by quadrature."""
    function = Quadrature(matrix, FUNCTIONS[name], deg=steps, orth=-1)
    return hutch(function, converge="count", count=K // steps, seed=seed)


def by_xtrace(name, matrix, steps, seed):
    """The XTrace of primate, from f(A) v by Lanczos' recurrence."""
    function, found = MatrixFunction(matrix, FUNCTIONS[name], deg=steps, orth=-1), []

    def end(result):
        found.append(result.estimate)
        raise Ended

    with contextlib.suppress(Ended):
        xtrace(function, batch=K // (2 * steps), seed=seed, callback=end)
    return found[0]


def best(estimate, name, matrix, truth):
    """The smaller error of two numbers of steps."""
    errors = []
    for steps in STEPS:
        values = [np.ravel(estimate(name, matrix, steps, seed))[0] for seed in range(SEEDS)]
        errors.append(rms((np.array(values) - truth) / truth))
    return min(errors)


def main():
    vectors, rows = basis(), []
    for name, spectrum, values in eigenvalues():
        matrix = (vectors * values) @ vectors.T
        matrix, truth = (matrix + matrix.T) / 2, np.sum(FUNCTIONS[name](values))
        row = {"case": f"{name}, {spectrum}"}
        for package, estimate in (
            ("imate", by_imate),
            ("primate hutch", by_hutch),
            ("primate xtrace", by_xtrace),
        ):
            row[package] = best(estimate, name, matrix, truth)
        print(row, flush=True)
        rows.append(row)
    packages = {x: version(x) for x in ("imate", "scikit-primate", "numpy")}
    text = json.dumps(
        {"machine": platform.platform(), **packages, "k": K, "errors": rows}, indent=1
    )
    RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main()

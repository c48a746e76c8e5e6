"""The cases of `gaussian_processes.py` and `gaussian_processes_torch.py`: NumPy and SciPy only."""

import argparse
import json
from pathlib import Path

import numpy as np
import scipy.linalg

RESULTS = Path(__file__).parent / "results/gaussian_processes.json"
NOISE, AMPLITUDE = 1e-2, 1.0
#: The dimension and the length scale of each kernel.
CASES = {
    "RBF": (2, 0.3),
    "RBF, d = 5": (5, 0.5),
    "Matern-5/2": (2, 0.3),
    "Matern-3/2": (2, 0.3),
    "Matern-1/2": (2, 0.3),
}


def kernels(xp):
    """Kernels as functions of u = |x - y|^2 / length^2, for arrays of NumPy or of `jax.numpy`."""

    def root(u):  # its derivative is finite at 0
        return xp.sqrt(xp.maximum(u, 1e-12))

    def matern32(u):
        r = root(3 * u)
        return (1 + r) * xp.exp(-r)

    def matern52(u):
        r = root(5 * u)
        return (1 + r + r**2 / 3) * xp.exp(-r)

    return {
        "RBF": lambda u: xp.exp(-u / 2),
        "Matern-5/2": matern52,
        "Matern-3/2": matern32,
        "Matern-1/2": lambda u: xp.exp(-root(u)),
    }


def kernel_of(xp, name):
    """The kernel of a case."""
    return kernels(xp)[name.partition(",")[0]]


def problem(name, n):
    """Points, uniform on the unit cube, and observations: waves with the noise that is stated."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(n, CASES[name][0]))
    y = np.sin(6 * x[:, 0]) * np.cos(4 * x[:, 1]) + np.sqrt(NOISE) * rng.standard_normal(n)
    return x.astype(np.float32), y.astype(np.float32)


def exact(name, n):
    """The log density in float64, and the log-determinant, by one Cholesky factorisation."""
    x, y = (each.astype(np.float64) for each in problem(name, n))
    squares = np.sum(x**2, axis=1)
    matrix = x @ x.T
    for row, square in zip(matrix, squares, strict=True):  # the memory of one matrix
        u = np.maximum(square + squares - 2 * row, 0) / CASES[name][1] ** 2
        row[:] = AMPLITUDE * kernel_of(np, name)(u)
    matrix[np.diag_indices(n)] = AMPLITUDE + NOISE
    factor = scipy.linalg.cholesky(matrix.T, lower=True, overwrite_a=True, check_finite=False)
    z = scipy.linalg.solve_triangular(factor, y, lower=True, check_finite=False)
    log_det = 2 * np.sum(np.log(np.diagonal(factor)))
    return [float(-(z @ z + log_det + n * np.log(2 * np.pi)) / 2), float(log_det)]


def load():
    """What was measured so far: by kernel, number of points, and method."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def save(name, n, cell):
    """Add to the file what was measured in one cell of the table."""
    found = load()
    found.setdefault(name, {}).setdefault(str(n), {}).update(cell)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def true_values(name, n, most=10_000):
    """`exact`, which is computed once, or None for more points than so many."""
    known = load().get(name, {}).get(str(n), {}).get("exact")
    if known is None and n <= most:
        known = exact(name, n)
        save(name, n, {"exact": known})
    return known


def rms(values, truth):
    """The root mean square error."""
    return float(np.sqrt(np.mean(np.square(np.asarray(values, np.float64) - truth))))


def arguments(description, methods):
    """The command line: which cells to measure."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kernels", nargs="+", choices=CASES, default=CASES, metavar="NAME")
    parser.add_argument("--sizes", nargs="*", type=int, default=[], metavar="N")
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods, metavar="NAME")
    return parser.parse_args()


def rounds(n):
    """How many keys and turns for so many points."""
    return 5 if n <= 1000 else 3 if n <= 5000 else 2 if n <= 10_000 else 1

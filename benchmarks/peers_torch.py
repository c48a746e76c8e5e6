"""Trace estimators and log-determinants in PyTorch, in an environment of their own.

    python -m venv torch-env
    torch-env/bin/pip install torch curvlinops-for-pytorch gpytorch   # a CPU build of torch
    torch-env/bin/python benchmarks/peers_torch.py                    # one minute

Curvlinops on a dense float32 matrix, n = 4000 and 100 products (Hutch++: 99), over the time of one
`A @ Omega` with 100 columns. GPyTorch's log-determinant (stochastic Lanczos quadrature with a
partial Cholesky preconditioner, its default settings) of a kernel with noise 0.01 on a grid of
45 x 45 points, over 100 columns, and over torch's dense Cholesky factorisation. Medians, in turns.
Writes `benchmarks/results/peers.json`. It knows nothing of JAX.
"""

import json
import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import curvlinops
import gpytorch
import torch
from linear_operator import to_linear_operator

N, K, ROUNDS = 4000, 100, 15
SIDE, LENGTH, NOISE = 45, 0.1, 0.01
RESULTS = Path(__file__).parent / "results/peers.json"
PACKAGES = ("torch", "curvlinops-for-pytorch", "gpytorch", "linear-operator")


def medians(fns):
    """The median seconds of each: warmed up, and in turns."""
    times = {name: [] for name in fns}
    for _ in range(ROUNDS + 2):
        for name, fn in fns.items():
            start = time.perf_counter()
            fn()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(column[2:]) for name, column in times.items()}


def over(seconds, base):
    """The medians, and their ratios to that of `base`."""
    return {"seconds": seconds, f"over {base}": {x: s / seconds[base] for x, s in seconds.items()}}


def traces():
    factor = torch.randn(N, N) / N**0.5
    matrix, omega = factor @ factor.T, torch.randn(N, K)
    estimators = {
        "hutchinson": (curvlinops.hutchinson_trace, K),
        "hutch++": (curvlinops.hutchpp_trace, K // 3 * 3),
        "xtrace": (curvlinops.xtrace, K),
    }
    fns = {name: lambda f=f, k=k: f(matrix, k) for name, (f, k) in estimators.items()}
    return over(medians({"products": lambda: matrix @ omega, **fns}), "products")


def log_determinant():
    axis = torch.linspace(0, 1, SIDE)
    points = torch.cartesian_prod(axis, axis)
    matrix = torch.exp(-0.5 * torch.cdist(points, points).square() / LENGTH**2)
    omega = torch.randn(SIDE**2, K)
    dense = matrix + NOISE * torch.eye(SIDE**2)

    def slq():
        kernel = to_linear_operator(matrix).add_diagonal(torch.tensor(NOISE))  # caches nothing yet
        with gpytorch.settings.max_cholesky_size(0):
            return kernel.logdet()

    def cholesky():
        return 2 * torch.linalg.cholesky(dense).diagonal().log().sum()

    truth = torch.logdet(dense.double())
    errors = torch.stack([slq() - truth for _ in range(20)])
    fns = {"products": lambda: dense @ omega, "slq": slq, "cholesky": cholesky}
    rms = float(errors.square().mean().sqrt())
    return {
        "value": float(truth),
        "rms_error": rms,
        "rms_relative_error": rms / abs(float(truth)),
        **over(medians(fns), "products"),
    }


def main():
    torch.manual_seed(0)
    with torch.no_grad():
        results = {
            "machine": {
                "system": platform.platform(),
                "cpus": os.cpu_count(),
                "threads": torch.get_num_threads(),
                **{name: version(name) for name in PACKAGES},
            },
            "curvlinops": traces(),
            "gpytorch": log_determinant(),
        }
    text = json.dumps(results, indent=1)
    print(text)
    RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main()

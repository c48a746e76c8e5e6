"""How far the default estimator of traces is from the best of all, and whether its bars hold.

    python -m benchmarks.regret            # all; some ten minutes on two cores
    python -m benchmarks.regret --quick    # few keys, for trying it out

Ten spectra with random eigenvectors, n = 400, float64. Where the eigenvalues are positive the
default is XNysTrace, which takes a multiple of the identity off first
(`traceax/_sketch/nystrom.py`); the Hessian of a network has negative ones, and the default is
XTrace. Every cell has the root mean square of the relative errors over 200 keys: that of the
default, and the smallest of all estimators, with its name; the share of its 95 % intervals that
cover the truth; and the z of its bias, over ten times as many keys for k = 24 and 48 (the choice of
the shift depends on the probes, and its bias is largest where these are few). Results:
`benchmarks/results/regret.json`.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr

from . import network
from .common import ESTIMATORS, PSD, with_eigenvalues
from .spectra import rms

RESULTS = Path(__file__).parent / "results" / "regret.json"
N, COUNT, BUDGETS, LONGER = 400, 200, (24, 48, 96, 192, 384), (24, 48)
#: Errors below this share of the trace are rounding.
ROUNDING = 1e-13


def hessian_of_a_network():
    """The eigenvalues of the Hessian of a network with 400 parameters, after gradient descent."""
    sizes = (15, 15, 10)
    params, batch = network.parameters(sizes), network.examples(sizes, 200)
    flat, restore = jax.flatten_util.ravel_pytree(params)

    def loss(flat):
        return network.loss(restore(flat), batch)

    flat = jax.lax.fori_loop(0, 500, lambda _, x: x - 0.3 * jax.grad(loss)(x), flat)
    return np.asarray(jnp.linalg.eigvalsh(jax.hessian(loss)(flat)))


def kernel():
    """The eigenvalues of an RBF kernel of points in a square, with noise."""
    x = np.random.default_rng(0).uniform(size=(N, 2))
    square = np.sum((x[:, None] - x) ** 2, axis=-1)
    return np.linalg.eigvalsh(np.exp(-square / (2 * 0.3**2)) + 0.01 * np.eye(N))


def ten_spectra():
    """Those on which no estimator is always the best."""
    i = np.arange(1, N + 1.0)
    falling = 1e-2 * (1 - i / (N + 1))
    return {
        "30 ones, then 1e-3": np.where(i <= 30, 1, 1e-3),
        "i^-3 + 1e-3": i**-3 + 1e-3,
        "30 ones over a falling bulk": np.where(i <= 30, 1, falling),
        "10 / i over a uniform bulk": 10 / i + np.random.default_rng(0).uniform(size=N),
        "i^-2": i**-2,
        "0.9^i": 0.9**i,
        "flat, 1 to 3": np.linspace(3, 1, N),
        "0.7^i": 0.7**i,
        "Hessian of a network": hessian_of_a_network(),
        "kernel with noise": kernel(),
    }


@functools.cache
def program(k, estimator, definite):
    """Values and intervals for an array of keys."""
    structure = jax.ShapeDtypeStruct((N,), float)
    tags = PSD if definite else lx.symmetric_tag

    @jax.jit
    def run(keys, matrix):
        operator = lx.FunctionLinearOperator(lambda x: matrix @ x, structure, tags)

        def one(key):
            solution = tr.trace(key, operator, k, estimator)
            return solution.value, *solution.interval()

        return jax.lax.map(one, keys)

    return run


def solutions(eigenvalues, k, estimator, count):
    """The relative errors of so many keys, and which intervals cover the truth."""
    matrix, truth = jnp.asarray(with_eigenvalues(eigenvalues)), eigenvalues.sum()
    run = program(k, estimator, eigenvalues.min() >= 0)
    value, lower, upper = map(np.asarray, run(jax.random.split(jax.random.key(0), count), matrix))
    return (value - truth) / abs(truth), (lower <= truth) & (truth <= upper)


def cell(eigenvalues, k, count):
    """One cell of the table, see above."""
    others = {}
    for name, estimator in ESTIMATORS.items():
        if name != "xnystrace" or eigenvalues.min() >= 0:
            others[name] = rms(solutions(eigenvalues, k, estimator, count)[0])
    errors, covered = solutions(eigenvalues, k, tr.AutoTraceEstimator(), count)
    best = min(others, key=lambda name: others[name])
    longer = errors
    if k in LONGER:
        longer, _ = solutions(eigenvalues, k, tr.AutoTraceEstimator(), 10 * count)
    z = longer.mean() / (longer.std(ddof=1) / np.sqrt(len(longer)))
    figures = {"rms": rms(errors), "best": others[best], "covered": float(covered.mean())}
    ratio = max(figures["rms"], ROUNDING) / max(figures["best"], ROUNDING)
    return {**figures, "by": best, "ratio": ratio, "z": float(z)}


def table(found):
    """The root mean squares and their ratios to the best, for a page of the documents."""

    def entry(row):
        if row["rms"] < ROUNDING:
            return "rounding"
        ratio = "1" if row["ratio"] < 1.05 else f"{row['ratio']:.1f}, {row['by']}"
        return f"{row['rms']:.1e} ({ratio})".replace("e-0", "e-")

    yield "| spectrum | " + " | ".join(f"k = {k}" for k in BUDGETS) + " |"
    yield "| --- " * (1 + len(BUDGETS)) + "|"
    for name, rows in found.items():
        yield f"| {name} | " + " | ".join(map(entry, rows.values())) + " |"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    jax.config.update("jax_enable_x64", True)
    found = {}
    for name, eigenvalues in ten_spectra().items():
        found[name] = {}
        for k in BUDGETS[:2] if quick else BUDGETS:
            found[name][k] = row = cell(eigenvalues, k, 20 if quick else COUNT)
            print(
                f"{name:28s} {k:4d}: {row['rms']:.1e}, best {row['best']:.1e} ({row['by']}), "
                f"ratio {row['ratio']:.2f}, covers {row['covered']:.1%}, z {row['z']:+.1f}",
                flush=True,
            )
    if not quick:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(*table(found), sep="\n")


if __name__ == "__main__":
    main()

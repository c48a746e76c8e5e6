"""Log-determinants of Gaussian-process kernels against matfree: error and time, equal products.

    OPENBLAS_NUM_THREADS=1 python -m pytest benchmarks/bench_logdet.py --benchmark-only

(Several OpenBLAS threads on busy cores wait for each other, which is measured instead otherwise.)

log det(K + s I) of the kernels of `tests/logdet/test_logdet.py`, n = 1000, float64, and its
derivative with respect to the length scale. `traceax.logdet` reads entries for its preconditioner;
matfree's stochastic Lanczos quadrature takes 20 or 60 steps for each of as many random-sign probes
as the budget allows. Root mean square errors over 12 keys; medians of the seconds of one jitted
call, the methods in turns. A run of all budgets writes `results/logdet.json` and
`results/logdet.png`.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import traceax as tr
from tests.logdet.test_logdet import KERNELS, distances, shifted

from . import matfree_peer
from .common import medians

N, KEYS, ROUNDS = 1000, 12, 3
BUDGETS = (60, 120, 240, 480)
METHODS = {"traceax": "C0", "matfree, 20 steps": "C1", "matfree, 60 steps": "C3"}
RESULTS = Path(__file__).parent / "results"


def _ours(k, key, matrix, s):
    solution = tr.logdet(key, shifted(matrix, s), k, fallback=None)  # else exact: few rows
    return solution.value, solution.num_matvecs


def _matfree(steps, k, matvec, key, *parameters):
    estimate = matfree_peer.logdet(jnp.zeros(N), k, steps)
    return estimate(matvec, key, *parameters), k // steps * steps


def _programs(method, k):
    """The value, of (t, key, K, dK, s), and the value of log det(K + t dK + s I) with its
    derivative at t = 0.

    Matfree differentiates a product with respect to t, not to all entries of a matrix, which takes
    it up to four times as long.
    """
    steps = [int(word) for word in method.split() if word.isdigit()]

    def value(t, key, matrix, slope, s):
        if steps:
            return _matfree(*steps, k, lambda v: matrix @ v + s * v, key)
        return _ours(k, key, matrix, s)

    def moved(t, key, matrix, slope, s):
        if steps:
            product = lambda v, t: matrix @ v + t * (slope @ v) + s * v  # noqa: E731
            return _matfree(*steps, k, product, key, t)
        return _ours(k, key, matrix + t * slope, s)

    return jax.jit(value), jax.jit(jax.value_and_grad(moved, has_aux=True))


@pytest.fixture(scope="module")
def problems():
    """K, dK / d(length scale), s, the value and the derivative of each kernel."""
    found = {}
    with jax.enable_x64(True):
        for name, (kernel, dim, length, s, *_) in KERNELS.items():
            r = distances(N, dim)
            matrix, slope = jax.jvp(lambda x: kernel(r, x), (length,), (1.0,))  # noqa: B023
            dense = np.asarray(matrix) + s * np.eye(N)
            truth = np.linalg.slogdet(dense)[1], np.sum(np.linalg.inv(dense) * np.asarray(slope))
            found[name] = (matrix, slope, jnp.asarray(s)), truth
    return found


@pytest.fixture(scope="module")
def figures():
    """The figures of every kernel, method and budget; written when all are there."""
    found = {name: {method: [] for method in METHODS} for name in KERNELS}
    yield found
    if all(len(rows) == len(BUDGETS) for each in found.values() for rows in each.values()):
        _write(found)


def _write(found):
    RESULTS.mkdir(exist_ok=True)
    settings = {
        "n": N,
        "keys": KEYS,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    text = json.dumps({"settings": settings, "kernels": found}, indent=1)
    (RESULTS / "logdet.json").write_text(text + "\n")
    _draw(found).savefig(RESULTS / "logdet.png", dpi=80)


def _draw(found):
    """A row each for errors, errors of the derivative and seconds; a column for each kernel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    axes = figure.subplots(3, len(found), sharex=True)
    quantities = {"error": "rms error", "gradient_error": "rms relative error, derivative"}
    for column, (name, methods) in enumerate(found.items()):
        axes[0, column].set_title(f"{name} (s = {KERNELS[name][3]:g})")
        axes[2, column].set_xlabel("products with the matrix")
        for method, rows in methods.items():
            spent = [row["matvecs"] for row in rows]
            for row, quantity in enumerate(quantities):
                errors = [each[quantity] for each in rows]
                axes[row, column].loglog(
                    spent, errors, color=METHODS[method], marker="o", label=method
                )
            for quantity, line in (("seconds", "--"), ("gradient_seconds", "-")):
                times = [each[quantity] for each in rows]
                axes[2, column].loglog(spent, times, line, color=METHODS[method], marker=".")
    for row, label in enumerate([*quantities.values(), "seconds: value (dashed), both"]):
        axes[row, 0].set_ylabel(label)
    for each in axes.flat:
        each.set_xticks(BUDGETS, [str(k) for k in BUDGETS])
        each.minorticks_off()
        each.grid(alpha=0.3)
    labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside upper center", ncols=len(METHODS), frameon=False)
    return figure


def _rms(errors):
    return float(np.sqrt(np.mean(np.square(errors))))


@pytest.mark.parametrize("k", BUDGETS)
def test_kernels(benchmark, problems, figures, k):
    with jax.enable_x64(True):
        keys, t = jr.split(jr.key(k), KEYS), jnp.zeros(())
        programs = {method: _programs(method, k) for method in METHODS}
        for name, (problem, (truth, slope)) in problems.items():
            calls = {
                (method, part): partial(programs[method][part], t, keys[0], *problem)
                for method in METHODS
                for part in (0, 1)
            }
            times = dict(zip(calls, medians(list(calls.values()), ROUNDS), strict=True))
            for method, (_, both) in programs.items():
                runs = [both(t, key, *problem) for key in keys]
                values, spent = zip(*(value for value, _ in runs), strict=True)
                row = {
                    "budget": k,
                    "matvecs": float(np.mean(spent)),
                    "error": _rms(np.array(values) - truth),
                    "gradient_error": _rms(np.array([g for _, g in runs]) / slope - 1),
                    "seconds": times[method, 0],
                    "gradient_seconds": times[method, 1],
                }
                figures[name][method].append(row)
                print(f"\n{name}, {method}: " + ", ".join(f"{x} {y:.3g}" for x, y in row.items()))
        benchmark.pedantic(lambda: None, rounds=1)

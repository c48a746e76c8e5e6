"""What the benchmarks share: matrices, ratios of medians within one process, and their report."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr

PSD = lx.positive_semidefinite_tag

#: Small sizes, for trying the benchmarks out: `python -m benchmarks --quick` sets it.
QUICK = os.environ.get("TRACEAX_BENCHMARKS_QUICK") == "1"

ESTIMATORS = {
    "hutchinson": tr.HutchinsonEstimator(),
    "hutch++": tr.HutchPlusPlusEstimator(),
    "xtrace": tr.XTraceEstimator(),
    "xnystrace": tr.XNysTraceEstimator(),
}


def dense_psd(n: int, dtype: Any = jnp.float32) -> jax.Array:
    """A positive definite matrix with a moderately decaying spectrum."""
    factor = jax.random.normal(jax.random.key(7), (n, n), dtype) / jnp.sqrt(n).astype(dtype)
    return factor @ factor.T


def spectra(n):
    """The six spectra of the XTrace experiment (arXiv:2301.07825)."""
    i = np.arange(1, n + 1.0)
    return {
        "flat": np.linspace(1, 3, n),
        "poly": i**-2,
        "exp0.9": 0.9**i,
        "exp0.7": 0.7**i,
        "step1e-3": np.where(i <= 50, 1.0, 1e-3),
        "step1e-8": np.where(i <= 50, 1.0, 1e-8),
    }


def eight_spectra(n):
    """From flat to a single eigenvalue that exceeds all others: what error bars are measured on."""
    i = np.arange(1, n + 1.0)
    return {
        "flat": np.linspace(3, 1, n),
        "1/i": 1 / i,
        "i^-2": i**-2,
        "0.7^i": 0.7**i,
        "outlier": np.where(i == 1, 1000.0, 1.0),
        "two large": np.where(i <= 2, 1000 / i, 0.01 * (1 + i / n)),
        "rank 3 + I": np.where(i <= 3, 10 * i, 0) + 1,
        "step": np.where(i <= n // 10, 1.0, 1e-3),
    }


def with_eigenvalues(eigenvalues):
    """A symmetric matrix with random eigenvectors."""
    shape = len(eigenvalues), len(eigenvalues)
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal(shape))[0]
    return (basis * eigenvalues) @ basis.T


def seconds(fn: Callable[..., Any], *args: Any) -> float:
    """The time of one call, the result awaited."""
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start


def medians(fns: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """The median seconds of each: warmed up, and in turns, so that whatever else the machine does
    falls on all of them. The threads of OpenBLAS keep cores busy for some 25 ms after a call: a
    pause, lest one function pays for another.
    """
    for _ in range(2):
        jax.block_until_ready([fn() for fn in fns])

    def rested(fn):
        time.sleep(0.05)
        return seconds(fn)

    times = [[rested(fn) for fn in fns] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def ratio(fn: Callable[[], Any], base: Callable[[], Any], rounds: int = 15) -> float:
    """The median time of `fn` over that of `base`, measured in turns."""
    first, second = medians([fn, base], rounds)
    return first / second


def report(
    benchmark: Any,
    group: str,
    row: str,
    figures: Mapping[str, float],
    targets: Mapping[str, float] | None = None,
    seconds: Mapping[str, Any] | None = None,
) -> None:
    """Hand the figures of a row of a table to pytest-benchmark, and print them.

    **Arguments:**

    - `benchmark`: the fixture.
    - `group`: the table (and the panel of the picture) that they belong to.
    - `row`: the row in it.
    - `figures`: the figures by name, the columns.
    - `targets`: what some of them should not exceed.
    - `seconds`: the times behind them.
    """
    figures = {name: float(figure) for name, figure in figures.items()}
    benchmark.extra_info.update(
        group=group, row=row, figures=figures, targets=targets or {}, seconds=seconds or {}
    )
    print(f"\n{group}, {row}: " + ", ".join(f"{x} {y:.3g}" for x, y in figures.items()))


def compare(
    benchmark: Any,
    group: str,
    row: str,
    pairs: Mapping[str, tuple[Callable[[], Any], Callable[[], Any]]],
    rounds: int,
    targets: Mapping[str, float] | None = None,
) -> None:
    """Report ratios of medians, all functions of the row being measured in turns.

    **Arguments:** as of `report`, and

    - `pairs`: for each figure the function, and the one whose time it is divided by.
    - `rounds`: the number of turns.
    """
    fns = list(dict.fromkeys(fn for pair in pairs.values() for fn in pair))
    times = dict(zip(fns, benchmark.pedantic(medians, (fns, rounds), rounds=1), strict=True))
    seconds = {name: [times[fn] for fn in pair] for name, pair in pairs.items()}
    figures = {name: first / second for name, (first, second) in seconds.items()}
    report(benchmark, group, row, figures, targets, seconds)

"""What the benchmarks share: matrices, and ratios of medians within one process."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr

PSD = lx.positive_semidefinite_tag

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


def seconds(fn: Callable[..., Any], *args: Any) -> float:
    """The time of one call, the result awaited."""
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start


def medians(fns: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """The median seconds of each: warmed up, and in turns, so that whatever else the machine does
    falls on all of them.
    """
    for _ in range(2):
        jax.block_until_ready([fn() for fn in fns])
    times = [[seconds(fn) for fn in fns] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def ratio(fn: Callable[[], Any], base: Callable[[], Any], rounds: int = 15) -> float:
    """The median time of `fn` over that of `base`, measured in turns."""
    first, second = medians([fn, base], rounds)
    return first / second

"""Peak memory: of compiled programs in blocks of `n x k` numbers, and of a process in vectors.

The compiled programs multiply by a diagonal, n = 20,000 and k = 96, float32. The processes are
those of `benchmarks/peak.py`.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tr

from . import matfree_peer, peak
from .common import ESTIMATORS, PSD, QUICK, report

N, K = (500, 24) if QUICK else (20_000, 96)
N_PEAK, K_PEAK = (10**6, 40) if QUICK else (peak.N, peak.K)
PARTS = {"value": False, "value and gradient": True}


def ours(name, diagonal):
    structure = jax.ShapeDtypeStruct((N,), jnp.float32)
    operator = lx.FunctionLinearOperator(lambda v: diagonal * v, structure, PSD)
    return tr.trace(jax.random.key(0), operator, K, ESTIMATORS[name]).value


def theirs(name, diagonal):
    estimate = matfree_peer.trace(name, jnp.zeros(N), K)
    return estimate(lambda v, d: d * v, jax.random.key(0), diagonal)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_compiled(benchmark, name):
    sides = {"": ours, "matfree, ": theirs} if name in matfree_peer.INTEGRANDS else {"": ours}

    def measure():
        figures = {}
        for side, estimate in sides.items():
            for part, gradient in PARTS.items():
                value = lambda diagonal, estimate=estimate: estimate(name, diagonal)  # noqa: E731
                fn = jax.value_and_grad(value) if gradient else value
                compiled = jax.jit(fn).lower(jax.ShapeDtypeStruct((N,), jnp.float32)).compile()
                size = compiled.memory_analysis().temp_size_in_bytes
                figures[side + part] = size / (4 * N * K)
        return figures

    figures = benchmark.pedantic(measure, rounds=1)
    report(benchmark, "temporary memory, blocks of n x k", name, figures)


@pytest.mark.parametrize("part", PARTS)
def test_peak(benchmark, part):
    def measure():
        compiled = peak.program(N_PEAK, K_PEAK, PARTS[part])
        temporary = compiled.memory_analysis().temp_size_in_bytes / (4 * N_PEAK)
        command = [sys.executable, "-m", "benchmarks.peak", f"--n={N_PEAK}", f"--k={K_PEAK}"]
        command += ["--gradient"] if PARTS[part] else []
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return temporary, json.loads(run.stdout)

    temporary, process = benchmark.pedantic(measure, rounds=1)
    figures = {"temporary memory, compiled": temporary, "resident memory": process["vectors"]}
    seconds = {"resident memory": process["seconds"]}
    targets = dict.fromkeys(figures, 20.0)
    report(
        benchmark,
        f"batch_size=8, k = {K_PEAK}: peak memory in vectors",
        part,
        figures,
        targets,
        seconds,
    )

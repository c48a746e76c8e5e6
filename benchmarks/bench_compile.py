"""Cold compile time against matfree's: tracing, lowering and compiling with empty caches.

Dense float32, n = 1000, k = 60 (log-determinants: 80, that is 4 probes of 20 Lanczos steps), value
alone, and value with standard error. Both the CPU time and the time on the clock, in turns.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tr

from . import matfree_peer
from .common import ESTIMATORS, PSD, QUICK, report

N, K, K_LOGDET, STEPS, ROUNDS = (100, 12, 20, 5, 1) if QUICK else (1000, 60, 80, 20, 5)
NAMES = (*matfree_peer.INTEGRANDS, "logdet")


def ours(name, with_error):
    def estimate(key, matrix):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        if name == "logdet":
            solution = tr.logdet(key, operator, K_LOGDET, preconditioner=None)
        else:
            solution = tr.trace(key, operator, K, ESTIMATORS[name])
        return (solution.value, solution.std_err) if with_error else solution.value

    return estimate


def theirs(name, with_error):
    like = jnp.zeros(N)
    if name == "logdet":
        fn = matfree_peer.logdet(like, K_LOGDET, STEPS, with_error)
    else:
        fn = matfree_peer.trace(name, like, K, with_error)
    return lambda key, matrix: fn(lambda v, a: a @ v, key, matrix)


def compile_seconds(fn):
    """CPU time, and time on the clock."""
    arguments = jax.random.key(0), jnp.eye(N)
    jax.clear_caches()
    wall, cpu = time.perf_counter(), time.process_time()
    jax.jit(lambda key, matrix: fn(key, matrix)).lower(*arguments).compile()
    return time.process_time() - cpu, time.perf_counter() - wall


@pytest.mark.parametrize("name", NAMES)
def test_compile(benchmark, name):
    programs = [side(name, with_error) for with_error in (False, True) for side in (ours, theirs)]

    def measure():
        compile_seconds(programs[0])  # what is done once in a process
        rounds = [[compile_seconds(fn) for fn in programs] for _ in range(ROUNDS)]
        # by program and clock
        return [
            [statistics.median(each) for each in zip(*column, strict=True)]
            for column in zip(*rounds, strict=True)
        ]

    value, their_value, both, their_both = benchmark.pedantic(measure, rounds=1)
    seconds = {}
    for i, clock in enumerate(("CPU", "clock")):
        seconds[f"value, {clock}"] = [value[i], their_value[i]]
        seconds[f"value and error, {clock}"] = [both[i], their_both[i]]
    figures = {name: first / second for name, (first, second) in seconds.items()}
    targets = dict.fromkeys(figures, 1.0)
    report(benchmark, "compile time over matfree's", name, figures, targets, seconds)

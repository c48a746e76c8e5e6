"""First calls: CPU time to trace, lower, compile and run once with empty caches, as ratios.

Dense float32, n = 1000. What a tolerance, an automatic preconditioner, a gradient or an automatic
method costs at the first call, over the plainest call of its kind.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tr

from .common import ESTIMATORS, PSD, QUICK, report

N, K, ROUNDS = (100, 20, 1) if QUICK else (1000, 100, 3)
KEY = jax.random.key(0)


def _matrix():
    x = jax.random.uniform(jax.random.key(1), (N, 2))
    square = jnp.sum((x[:, None] - x[None]) ** 2, axis=-1)
    return jnp.exp(-square / 0.1) + 0.1 * jnp.eye(N)


def _trace(estimator, **options):
    return lambda a: tr.trace(KEY, lx.MatrixLinearOperator(a, PSD), estimator=estimator, **options)


def _diagonal(estimator, **options):
    return lambda a: tr.diagonal(
        KEY, lx.MatrixLinearOperator(a, PSD), estimator=estimator, **options
    )


def _logdet(**options):
    return lambda a: tr.logdet(KEY, lx.MatrixLinearOperator(a, PSD), **options).value


def _density(a):
    return tr.gaussian_log_density(KEY, jnp.ones(N), lx.MatrixLinearOperator(a, PSD), K).value


def _tracked(method):
    tracker = tr.Tracker(method)

    def steps(a):
        def step(state, key):
            operator = lx.MatrixLinearOperator(a, PSD)
            state, solution = tracker.update(key, operator, state, operator)
            return state, solution.value

        state = tracker.init(lx.MatrixLinearOperator(a, PSD), k=20)
        return jax.lax.scan(step, state, jax.random.split(KEY, 8))[1]

    return steps


XTRACE, XNYSTRACE = ESTIMATORS["xtrace"], ESTIMATORS["xnystrace"]

#: For each kind the plainest call, and the others with the most that they may take.
CALLS = {
    "XTrace": (
        _trace(XTRACE, k=K),
        {
            "trace(rtol=)": (_trace(XTRACE, rtol=1e-3), 2.0),
            "diagonal(rtol=)": (_diagonal(tr.XTraceEstimator(), rtol=1e-2), 2.0),
        },
    ),
    "XNysTrace": (
        _trace(XNYSTRACE, k=K),
        {
            "trace(rtol=)": (_trace(XNYSTRACE, rtol=1e-3), 2.0),
            "diagonal(rtol=)": (_diagonal(tr.XNysTraceEstimator(), rtol=1e-2), 2.0),
        },
    ),
    "logdet": (
        _logdet(k=K, preconditioner=None),
        {
            "logdet(k=)": (_logdet(k=K), 2.0),
            "log density": (_density, 2.5),
            "log density, gradient": (jax.value_and_grad(_density), 4.0),
        },
    ),
    "Tracker": (_tracked("recycled"), {"deltashift": (_tracked("deltashift"), 2.0)}),
}


def _first_call(fn, matrix):
    jax.clear_caches()
    start = time.process_time()
    jax.block_until_ready(jax.jit(fn)(matrix))
    return time.process_time() - start


@pytest.mark.parametrize("kind", CALLS)
def test_first_call(benchmark, kind):
    plain, others = CALLS[kind]
    programs = [plain, *(fn for fn, _ in others.values())]
    matrix = _matrix()

    def measure():
        _first_call(plain, matrix)  # what is done once in a process
        rounds = [[_first_call(fn, matrix) for fn in programs] for _ in range(ROUNDS)]
        return [statistics.median(each) for each in zip(*rounds, strict=True)]

    first, *rest = benchmark.pedantic(measure, rounds=1)
    pairs = list(zip(others, rest, strict=True))
    figures = {name: seconds / first for name, seconds in pairs}
    targets = {name: target for name, (_, target) in others.items()}
    seconds = {name: [value, first] for name, value in pairs}
    report(benchmark, "first call over the plainest of its kind", kind, figures, targets, seconds)

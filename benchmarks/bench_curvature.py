"""What curvature costs: a training run with and without it, and the error of tracked traces.

    python -m pytest benchmarks/bench_curvature.py --benchmark-only

The network has 10,530 parameters (the sizes for scikit-learn's digits), or 265,482. The data are
random.
"""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import optax
import pytest

import traceax as tr

from .common import ratio
from .network import cross_entropy, examples, logits, loss, parameters

SIZES, LARGER = (64, 96, 40, 10), (256, 512, 256, 10)
STEPS, EVERY, K = 300, 10, 10


def _operator(kind, params, batch):
    if kind == "hessian":
        return tr.curvature.hessian(loss, params, batch)
    return tr.curvature.gauss_newton(logits, cross_entropy, params, batch)


OPTIMISER = optax.adam(3e-3)


def _training(look, batch, steps):
    """A jitted run of so many steps; `look(state, params, key)` every ten of them, or None."""

    def step(carry, key):
        params, moments, state, i = carry
        gradient = jax.grad(loss)(params, batch)
        updates, moments = OPTIMISER.update(gradient, moments)
        nothing = jnp.zeros(())
        seen = nothing
        if look is not None:
            state, seen = jax.lax.cond(
                i % EVERY == 0,
                lambda state: look(state, params, key),
                lambda state: (state, nothing),
                state,
            )
        return (optax.apply_updates(params, updates), moments, state, i + 1), seen

    def run(params, state):
        carry = (params, OPTIMISER.init(params), state, jnp.asarray(0))
        return jax.lax.scan(step, carry, jr.split(jr.key(3), steps))

    return jax.jit(run)


def training_pair(kind, method, size, used, sizes=SIZES, steps=STEPS):
    """A training run with curvature on the first `used` of `size` examples, and one without."""
    batch = examples(sizes, size)
    fewer = jax.tree.map(lambda x: x[:used], batch)
    params = parameters(sizes)
    tracker = None if method == "hutchinson" else tr.Tracker(method)
    state = ()
    if tracker is not None:
        state = tracker.init(_operator(kind, params, fewer), K), params

    def look(state, params, key):
        operator = _operator(kind, params, fewer)
        if tracker is None:
            solution = tr.trace(key, operator, K, tr.HutchinsonEstimator())
        else:
            state, previous = state
            previous = None if method == "recycled" else _operator(kind, previous, fewer)
            state, solution = tracker.update(key, operator, state, previous)
            state = state, params
        return state, solution.value

    return tuple(partial(_training(look, batch, steps), params, state) for look in (look, None))


def _report(benchmark, what, pair):
    """Time a training run with curvature over one without, in turns."""
    cost = ratio(*pair, rounds=7)
    benchmark.extra_info["ratio"] = cost
    print(f"\n{what}: {cost:.2f} of the run without")
    benchmark.pedantic(lambda: jax.block_until_ready(pair[0]()), rounds=1)


@pytest.mark.parametrize("method", ["hutchinson", "recycled", "deltashift"])
@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.parametrize(
    ("size", "used"), [(1797, 256), (1797, 128), (1797, 64), (1024, 128), (1024, 1024), (256, 256)]
)
def test_training_run(benchmark, kind, method, size, used):
    """Full batches of `size` examples, curvature on `used` of them."""
    pair = training_pair(kind, method, size, used)
    _report(benchmark, f"{kind}, {method}, {used} of {size} examples", pair)


@pytest.mark.parametrize("method", ["hutchinson", "recycled", "deltashift"])
@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("used", [64, 128])
def test_training_run_of_a_larger_network(benchmark, kind, method, used):
    """Full batches of 1024 examples, curvature on `used` of them."""
    pair = training_pair(kind, method, 1024, used, LARGER, 100)
    _report(benchmark, f"{kind}, {method}, {used} of 1024 examples, larger network", pair)


# ---------------------------------------------------------------------- sequences of operators

N, BUDGET, LENGTH = 500, 20, 60


def _rotating(drift):
    """Ten outliers over a bulk, the basis turning by `drift` a step."""
    rng = np.random.default_rng(0)
    eigenvalues = np.r_[np.geomspace(30, 8, 10), 0.3 * rng.standard_normal(N - 10)]
    basis = np.linalg.qr(rng.standard_normal((N, N)))[0]
    for _ in range(LENGTH):
        yield (basis * eigenvalues) @ basis.T
        turn = rng.standard_normal((N, N)) / np.sqrt(N)
        basis = np.linalg.qr(basis + drift * turn)[0]


def _random(drift):
    """A symmetric random matrix that forgets itself by `drift` a step."""
    rng = np.random.default_rng(0)

    def fresh():
        g = rng.standard_normal((N, N))
        return (g + g.T) / 2 * np.sqrt(2)

    matrix = fresh()
    for _ in range(LENGTH):
        yield matrix
        matrix = np.sqrt(1 - drift**2) * matrix + drift * fresh()


@pytest.mark.parametrize(("name", "drift"), [("rotating", 0.03), ("random", 0.02)])
def test_sequences(benchmark, name, drift):
    """The root mean square error of the last forty steps over twelve keys, 20 products a step."""
    matrices = np.stack(list((_rotating if name == "rotating" else _random)(drift)))
    truth = np.trace(matrices, axis1=1, axis2=2)
    stack, keys = jnp.asarray(matrices, jnp.float32), jr.split(jr.key(4), 12)
    figures = {}
    for method in ("recycled", "deltashift"):
        tracker = tr.Tracker(method)

        def follow(key, tracker=tracker):
            def step(state, given):
                new, old = (lx.MatrixLinearOperator(x, lx.symmetric_tag) for x in given[1:])
                state, solution = tracker.update(given[0], new, state, old)
                return state, solution.value

            start = tracker.init(lx.MatrixLinearOperator(stack[0], lx.symmetric_tag), BUDGET)
            before = jnp.concatenate([stack[:1], stack[:-1]])
            return jax.lax.scan(step, start, (jr.split(key, LENGTH), stack, before))[1]

        values = np.asarray(jax.jit(lambda keys, follow=follow: jax.lax.map(follow, keys))(keys))
        figures[method] = float(np.sqrt(np.mean((values - truth)[:, 20:] ** 2)))
    for estimator in (tr.HutchinsonEstimator(), tr.XTraceEstimator()):

        def once(key, estimator=estimator):
            def one(pair):
                operator = lx.MatrixLinearOperator(pair[1], lx.symmetric_tag)
                return tr.trace(pair[0], operator, BUDGET, estimator).value

            return jax.lax.map(one, (jr.split(key, LENGTH), stack))

        values = np.asarray(jax.jit(lambda keys, once=once: jax.lax.map(once, keys))(keys))
        figures[type(estimator).__name__] = float(np.sqrt(np.mean((values - truth)[:, 20:] ** 2)))
    benchmark.extra_info.update(figures)
    print(f"\n{name}: " + ", ".join(f"{k} {v:.3g}" for k, v in figures.items()))
    benchmark.pedantic(lambda: None, rounds=1)

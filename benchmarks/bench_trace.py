"""Time of value and gradient against the bare products, and against matfree.

    python -m pytest benchmarks/bench_trace.py --benchmark-only

Dense float32, n = 4000, k = 100. The ratio to one jitted product `A @ Omega` with as many columns
as the estimator spends stands in `extra_info`, and is printed.
"""

import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tr

from .common import ESTIMATORS, PSD, dense_psd, ratio

N, K = 4000, 100


@pytest.fixture(scope="module")
def matrix():
    return jax.block_until_ready(dense_psd(N))


@pytest.fixture(scope="module")
def omega():
    return jax.random.normal(jax.random.key(1), (N, K))


product = jax.jit(jnp.matmul)
KEY = jax.random.key(0)


def _value(matrix, estimator):
    return tr.trace(KEY, lx.MatrixLinearOperator(matrix, PSD), K, estimator).value


def _report(benchmark, name, **ratios):
    benchmark.extra_info.update(ratios)
    print(f"\n{name}: " + ", ".join(f"{what} {figure:.2f}" for what, figure in ratios.items()))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_value(benchmark, name, matrix, omega):
    fn = jax.jit(lambda a: _value(a, ESTIMATORS[name]))
    to_products = ratio(lambda: fn(matrix), lambda: product(matrix, omega))
    _report(benchmark, f"{name} value", to_products=to_products)
    benchmark(lambda: fn(matrix).block_until_ready())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_value_and_grad(benchmark, name, matrix, omega):
    value = jax.jit(lambda a: _value(a, ESTIMATORS[name]))
    both = jax.jit(jax.value_and_grad(lambda a: _value(a, ESTIMATORS[name])))
    to_value = ratio(lambda: both(matrix), lambda: value(matrix))
    to_products = ratio(lambda: both(matrix), lambda: product(matrix, omega))
    _report(benchmark, f"{name} value_and_grad", to_value=to_value, to_products=to_products)
    benchmark(lambda: jax.block_until_ready(both(matrix)))


def _matfree(name):
    """Matfree's estimator with mean and standard error, as a function of (matrix, key)."""
    stochtrace = pytest.importorskip("matfree.stochtrace")
    like = jnp.zeros(N)
    if name == "hutchinson":
        sampler = stochtrace.sampler_signs(like, num=K)
        integrand = stochtrace.monte_carlo_trace()
        estimate = stochtrace.estimator_monte_carlo_mean_and_sem(integrand, sampler)
    else:
        xtrace = name == "xtrace"
        sampler = stochtrace.sampler_sphere(like, num=K // 2 if xtrace else K)
        integrand = (
            stochtrace.leave_one_out_xtrace() if xtrace else stochtrace.leave_one_out_xnystrace()
        )
        estimate = stochtrace.estimator_leave_one_out_mean_and_sem(integrand, sampler)
    return lambda matrix: estimate(lambda v, a: a @ v, KEY, matrix)[0]


@pytest.mark.parametrize("name", ["hutchinson", "xtrace", "xnystrace"])
def test_against_matfree(benchmark, name, matrix):
    ours = jax.jit(lambda a: _value(a, ESTIMATORS[name]))
    theirs = jax.jit(_matfree(name))
    our_grad = jax.jit(jax.value_and_grad(lambda a: _value(a, ESTIMATORS[name])))
    their_grad = jax.jit(jax.value_and_grad(_matfree(name)))
    value = ratio(lambda: ours(matrix), lambda: theirs(matrix), rounds=7)
    gradient = ratio(lambda: our_grad(matrix), lambda: their_grad(matrix), rounds=5)
    _report(benchmark, f"{name} against matfree", value=value, value_and_grad=gradient)
    benchmark(lambda: ours(matrix).block_until_ready())

"""Peak memory of the compiled programs, in blocks of `n x k` numbers.

python -m pytest benchmarks/bench_memory.py --benchmark-only
"""

import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tr

from .common import ESTIMATORS, PSD

N, K = 20_000, 96


def _blocks(fn, columns=K):
    """Temporary memory of the compiled `fn(diagonal)`, in blocks of `N x columns` floats."""
    structure = jax.ShapeDtypeStruct((N,), jnp.float32)
    memory = jax.jit(fn).lower(structure).compile().memory_analysis()
    return memory.temp_size_in_bytes / (4 * N * columns)


def _value(diagonal, estimator):
    structure = jax.ShapeDtypeStruct((N,), jnp.float32)
    operator = lx.FunctionLinearOperator(lambda v: diagonal * v, structure, PSD)
    return tr.trace(jax.random.key(0), operator, K, estimator).value


@pytest.mark.parametrize("name", ESTIMATORS)
def test_memory(benchmark, name):
    def measure():
        value = _blocks(lambda d: _value(d, ESTIMATORS[name]))
        gradient = _blocks(jax.value_and_grad(lambda d: _value(d, ESTIMATORS[name])))
        return value, gradient

    value, gradient = benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info.update(blocks_value=value, blocks_gradient=gradient)
    print(f"\n{name}: value {value:.1f}, value_and_grad {gradient:.1f} blocks of n x k")


def test_memory_of_batched_hutchinson(benchmark):
    estimator = tr.HutchinsonEstimator(batch_size=8)

    def measure():
        value = _blocks(lambda d: _value(d, estimator), 8)
        gradient = _blocks(jax.value_and_grad(lambda d: _value(d, estimator)), 8)
        return value, gradient

    value, gradient = benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info.update(blocks_value=value, blocks_gradient=gradient)
    print(f"\nbatch_size=8: value {value:.1f}, value_and_grad {gradient:.1f} blocks of n x 8")

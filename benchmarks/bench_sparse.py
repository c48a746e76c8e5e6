"""Products with a sparse matrix, and their gradient, against SciPy's CSR product.

    python -m pytest benchmarks/bench_sparse.py --benchmark-only

n = 20,000, 30 entries in a row, a block of 64 vectors. The ratio of medians to SciPy's product of
the same matrix with the same block, measured in turns, stands in `extra_info`, and is printed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as ss

from traceax._operators.sparse import SparseLinearOperator

from .common import ratio

N, M, ENTRIES = 20_000, 64, 30


def _with_row_lengths(rng, lengths):
    rows = np.repeat(np.arange(N), lengths)
    columns = rng.integers(0, N, rows.size)
    return ss.csr_array(ss.coo_array((rng.standard_normal(rows.size), (rows, columns)), (N, N)))


def _matrices():
    """Rows of one length, of random lengths, of a power law, and one that is dense."""
    rng = np.random.default_rng(0)
    columns = np.concatenate([rng.choice(N, ENTRIES, replace=False) for _ in range(N)])
    offsets = np.arange(0, N * ENTRIES + 1, ENTRIES)
    same = ss.csr_array((rng.standard_normal(columns.size), columns, offsets), shape=(N, N))
    dense_row = ss.coo_array((np.ones(N), (np.full(N, 7), np.arange(N))), shape=(N, N))
    return {
        "same": same,
        "random": _with_row_lengths(rng, rng.poisson(ENTRIES, N)),
        "power_law": _with_row_lengths(rng, np.minimum(rng.pareto(1.1, N) * 6, N).astype(int)),
        "dense_row": ss.csr_array(same + dense_row),
    }


@pytest.fixture(scope="module")
def matrices():
    return _matrices()


@jax.jit
def product(operator, block):
    return jax.vmap(operator.mv, in_axes=1, out_axes=1)(block)


@jax.jit
def contraction_gradient(data, operator, u, v):
    """The derivative of `sum_j v_j^T A u_j` in the entries of A."""
    return jax.grad(lambda d: jnp.sum(v * product(operator.with_data(d), u)))(data)


def _case(matrices, name, dtype):
    matrix = matrices[name].astype(dtype)
    rng = np.random.default_rng(1)
    u, v = (rng.standard_normal((N, M)).astype(dtype) for _ in range(2))
    with jax.enable_x64(dtype == "float64"):
        return matrix, SparseLinearOperator(matrix), u, jnp.asarray(u), jnp.asarray(v)


def _report(benchmark, name, figure):
    benchmark.extra_info["to_scipy"] = figure
    print(f"\n{name}: {figure:.2f} of the time of SciPy's product")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["same", "random", "power_law", "dense_row"])
def test_product(benchmark, matrices, name, dtype):
    matrix, operator, block, u, _ = _case(matrices, name, dtype)
    with jax.enable_x64(dtype == "float64"):
        figure = ratio(lambda: product(operator, u), lambda: matrix @ block)
        _report(benchmark, f"product, {name}, {dtype}", figure)
        benchmark(lambda: product(operator, u).block_until_ready())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_transposed_product(benchmark, matrices, dtype):
    matrix, operator, block, u, _ = _case(matrices, "same", dtype)
    transpose = ss.csr_array(matrix.T)
    with jax.enable_x64(dtype == "float64"):
        figure = ratio(lambda: product(operator.T, u), lambda: transpose @ block)
        _report(benchmark, f"transposed product, same, {dtype}", figure)
        benchmark(lambda: product(operator.T, u).block_until_ready())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["same", "random", "power_law", "dense_row"])
def test_gradient(benchmark, matrices, name, dtype):
    matrix, operator, block, u, v = _case(matrices, name, dtype)
    with jax.enable_x64(dtype == "float64"):
        gradient = lambda: contraction_gradient(operator.data, operator, u, v)  # noqa: E731
        figure = ratio(gradient, lambda: matrix @ block)
        _report(benchmark, f"gradient, {name}, {dtype}", figure)
        benchmark(lambda: gradient().block_until_ready())

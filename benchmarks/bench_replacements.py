"""What replaces functions of JAX, against them: whole estimates, compiled with one piece at a time
in plain JAX. The time to run and the CPU time to compile, over those of the package as it is: where
a ratio is above 1, the replacement is worth something.

    python -m pytest -s --benchmark-only benchmarks/bench_replacements.py   # ten minutes

Dense float32, n = 4000, k = 100; a function operator with n = 10^6, k = 32; the Hessian of a
network with 1,002,570 parameters, k = 32.
"""

import statistics
import time
from contextlib import ExitStack
from unittest import mock

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import pytest

import traceax as tr
from traceax._linalg import factorisations
from traceax._operators import block_operator

from .common import ESTIMATORS, PSD, QUICK, dense_psd, medians, report
from .network import examples, loss, parameters

N, WIDE, K, K_WIDE, ROUNDS = (300, 3000, 20, 8, 1) if QUICK else (4000, 10**6, 100, 32, 7)
SIZES, BATCH = ((16, 32, 10), 16) if QUICK else ((784, 1024, 192, 10), 128)


#: For each replacement what takes its place: module, name, plain JAX.
PLAIN = {
    "QR by products": [(factorisations, "_shifted_cholesky_qr", factorisations._householder_qr)],
    "division by products": [(factorisations, "_divide_by_products", factorisations._solve_upper)],
    "products of rows": [
        (
            block_operator.BlockOperator,
            "_products_of_rows",
            lambda self, blocks: [self.join(self._products(self.leaves(blocks[0])))],
        ),
    ],
}


def _dense(name):
    def estimate(key, matrix):
        operator = lx.MatrixLinearOperator(matrix, PSD)
        return tr.trace(key, operator, K, ESTIMATORS[name])

    return estimate, (jr.key(0), dense_psd(N))


def _logdet():
    def estimate(key, matrix):
        return tr.logdet(key, lx.MatrixLinearOperator(matrix, PSD), K)

    return estimate, (jr.key(0), dense_psd(N) + jnp.eye(N))


def _function(name):
    def estimate(key, scale):
        like = jax.ShapeDtypeStruct((WIDE,), jnp.float32)
        operator = lx.FunctionLinearOperator(
            lambda x: scale * x + jnp.roll(x, 1) + jnp.roll(x, -1), like, PSD
        )
        return tr.trace(key, operator, K_WIDE, ESTIMATORS[name])

    return estimate, (jr.key(0), jnp.linspace(2, 3, WIDE))


def _hessian(name):
    def estimate(key, params, batch):
        operator = tr.curvature.hessian(loss, params, batch)
        return tr.trace(key, operator, K_WIDE, ESTIMATORS[name])

    return estimate, (jr.key(0), parameters(SIZES), examples(SIZES, BATCH))


CASES = {
    "dense, hutchinson": lambda: _dense("hutchinson"),
    "dense, hutch++": lambda: _dense("hutch++"),
    "dense, xtrace": lambda: _dense("xtrace"),
    "dense, xnystrace": lambda: _dense("xnystrace"),
    "dense, logdet": _logdet,
    "function, hutchinson": lambda: _function("hutchinson"),
    "function, xtrace": lambda: _function("xtrace"),
    "function, xnystrace": lambda: _function("xnystrace"),
    "Hessian, hutchinson": lambda: _hessian("hutchinson"),
    "Hessian, xtrace": lambda: _hessian("xtrace"),
}


def _compiled(estimate, arguments):
    jax.clear_caches()
    start = time.process_time()
    program = jax.jit(lambda *x: estimate(*x)).lower(*arguments).compile()
    return program, time.process_time() - start


@pytest.mark.parametrize("case", CASES)
def test_replacements(benchmark, case):
    estimate, arguments = CASES[case]()

    def measure():
        programs, costs = {}, {}
        _compiled(estimate, arguments)  # what is done once in a process
        for _ in range(1 if QUICK else 2):
            for name, replaced in [("as it is", []), *PLAIN.items()]:
                with ExitStack() as stack:
                    for where, what, plain in replaced:
                        stack.enter_context(mock.patch.object(where, what, plain))
                    programs[name], seconds = _compiled(estimate, arguments)
                costs.setdefault(name, []).append(seconds)
        costs = {name: statistics.median(each) for name, each in costs.items()}
        calls = [lambda p=program: p(*arguments) for program in programs.values()]
        return dict(zip(programs, medians(calls, ROUNDS), strict=True)), costs

    times, costs = benchmark.pedantic(measure, rounds=1)
    own = "as it is"
    figures = {name: times[name] / times[own] for name in PLAIN}
    compiling = {f"{name}, compile": costs[name] / costs[own] for name in PLAIN}
    report(benchmark, "plain JAX over what replaces it", case, {**figures, **compiling})

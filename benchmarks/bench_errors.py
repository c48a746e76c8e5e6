"""Error per product, ours and matfree's, on two of the six spectra of the XTrace experiment.

n = 1000, float64; root mean squares over 12 keys. All six, without matfree:
`python -m benchmarks.plot_estimators`.
"""

from functools import partial

import jax
import pytest

from . import matfree_peer
from .common import QUICK, report, spectra
from .plot_estimators import BUDGETS, OURS, errors

N, COUNT, USED = (100, 4, BUDGETS[:2]) if QUICK else (1000, 12, BUDGETS[:5])


def _theirs(name, key, matrix, k):
    return matfree_peer.trace(name, matrix[0], k)(lambda v, a: a @ v, key, matrix)


THEIRS = {f"matfree, {name}": partial(_theirs, name) for name in matfree_peer.INTEGRANDS}
METHODS = {**OURS, **THEIRS}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("spectrum", ["poly", "step1e-3"])
def test_errors(benchmark, spectrum, name):
    def measure():
        with jax.enable_x64(True):
            return errors(spectra(N)[spectrum], {name: METHODS[name]}, USED, COUNT)[name]

    found = benchmark.pedantic(measure, rounds=1)
    figures = {str(k): error for k, error in zip(USED, found, strict=True)}
    report(benchmark, f"relative error over products, {spectrum}", name, figures)

"""Extreme eigenvalues against SciPy's `eigsh` at equal products, on six spectra.

Every product of either counts. `eigsh` (ARPACK) is given the smallest tolerance that the budget
reaches, and the better of a basis of 20 (its default for one value) and one of all the budget.
Errors are relative to the extent of the spectrum, the medians over starts.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

import traceax as tr

from .common import QUICK, report, spectra, with_eigenvalues

N, BUDGETS, STARTS = (100, (20,), 2) if QUICK else (1000, (20, 40, 100), 11)


def arpack(matrix, budget, basis, seed):
    """The largest eigenvalue by `eigsh` within so many products: that of the smallest tolerance, in
    steps of a factor of 10, that the budget reaches; NaN if it reaches none.
    """
    v0, best = np.random.default_rng(seed).standard_normal(len(matrix)), np.nan
    for tolerance in np.logspace(0, -15, 16):
        spent = [0]

        def product(v, spent=spent):
            spent[0] += 1
            return matrix @ v

        operator = LinearOperator(matrix.shape, product, dtype=matrix.dtype)
        options = {"k": 1, "which": "LA", "ncv": basis, "v0": v0, "tol": tolerance}
        try:
            value = eigsh(operator, return_eigenvectors=False, maxiter=200, **options)[0]
        except ArpackNoConvergence:
            break
        if spent[0] > budget:
            break
        best = value
    return best


@pytest.mark.parametrize("name", spectra(N))
def test_against_eigsh(benchmark, name):
    jax.config.update("jax_enable_x64", True)  # as SciPy
    eigenvalues = spectra(N)[name]
    matrix = with_eigenvalues(eigenvalues)
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), lx.symmetric_tag)
    top, extent = eigenvalues.max(), np.ptp(eigenvalues)
    figures = {}
    for budget in BUDGETS:
        keys = jr.split(jr.key(0), STARTS)
        found = jax.lax.map(lambda key, k=budget: tr.eigenpairs(key, operator, k), keys)
        ours = (top - np.asarray(found.values[:, 0])) / extent
        stated = np.asarray(found.errors[:, 0]) / extent
        theirs = [
            [(top - arpack(matrix, budget, basis, seed)) / extent for seed in range(STARTS)]
            for basis in (20, min(budget - 1, N))
        ]
        best = np.nanmin([np.median(np.abs(each)) for each in theirs] + [np.inf])
        figures |= {
            f"k = {budget}": np.median(np.abs(ours)),
            f"eigsh, {budget}": best,
            f"stated, {budget}": np.median(stated),
        }
    report(benchmark, "Largest eigenvalue: error over the extent", name, figures)
    benchmark.pedantic(lambda: None, rounds=1)

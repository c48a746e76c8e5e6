"""Error per product of the trace estimators on the six spectra of the XTrace experiment, as a plot.

    python -m benchmarks.plot_estimators

Writes `docs/images/estimators.png` and `benchmarks/results/estimators.json`. About three minutes.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

from .common import ESTIMATORS, PSD, spectra

N, COUNT = 1000, 20
BUDGETS = (12, 24, 48, 96, 192, 384)
ROOT = Path(__file__).parent.parent
TITLES = {
    "flat": "flat: 1 to 3",
    "poly": "polynomial: $i^{-2}$",
    "exp0.9": "exponential: $0.9^i$",
    "exp0.7": "exponential: $0.7^i$",
    "step1e-3": "step: 50 ones, then $10^{-3}$",
    "step1e-8": "step: 50 ones, then $10^{-8}$",
}


def _ours(estimator, key, matrix, k):
    return estimator.estimate(key, lx.MatrixLinearOperator(matrix, PSD), k)[0]


#: Functions of (key, matrix, k).
OURS = {name: partial(_ours, estimator) for name, estimator in ESTIMATORS.items()}


@partial(jax.jit, static_argnums=(2, 3))
def _values(keys, matrix, k, method):
    return jax.lax.map(lambda key: method(key, matrix, k), keys)


def errors(eigenvalues, methods=OURS, budgets=BUDGETS, count=COUNT):
    """The root mean square relative error of every method at every budget."""
    n = len(eigenvalues)
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((n, n)))[0]
    matrix, truth = jnp.asarray((basis * eigenvalues) @ basis.T), eigenvalues.sum()
    keys = jax.random.split(jax.random.key(0), count)

    def rms(k, method):
        values = np.asarray(_values(keys, matrix, k, method))
        return float(np.sqrt(np.mean((values / truth - 1) ** 2)))

    return {name: [rms(k, method) for k in budgets] for name, method in methods.items()}


def main():
    """Measure, write the numbers, draw the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    jax.config.update("jax_enable_x64", True)
    found = {name: errors(values) for name, values in spectra(N).items()}
    results = {"n": N, "keys": COUNT, "budgets": BUDGETS, "rms_relative_error": found}
    (ROOT / "benchmarks/results/estimators.json").write_text(json.dumps(results, indent=1) + "\n")

    figure, axes = plt.subplots(2, 3, figsize=(11, 6.2), sharex=True, layout="constrained")
    styles = {"hutchinson": "o-", "hutch++": "s-", "xtrace": "^-", "xnystrace": "d-"}
    for axis, (name, lines) in zip(axes.flat, found.items(), strict=True):
        for estimator, line in lines.items():
            axis.loglog(BUDGETS, np.maximum(line, 1e-16), styles[estimator], ms=4, label=estimator)
        axis.set_title(TITLES[name], fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_xticks(BUDGETS, [str(k) for k in BUDGETS])
        axis.minorticks_off()
    for axis in axes[1]:
        axis.set_xlabel("products")
    for axis in axes[:, 0]:
        axis.set_ylabel("relative error")
    axes[0, 0].legend(frameon=False)
    path = ROOT / "docs/images/estimators.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

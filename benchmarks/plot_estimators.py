"""Error per product of the trace estimators, as plots: on the six spectra of the XTrace experiment,
and of the default beside the others where the diagonal dominates, where it does not, and between.

    python -m benchmarks.plot_estimators           # about four minutes
    python -m benchmarks.plot_estimators --draw    # from the stored numbers

Writes `docs/images/estimators.png`, `shrunk.png` and `benchmarks/results/estimators.json`.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr

from .common import ESTIMATORS, PSD, spectra, with_eigenvalues

N, COUNT = 1000, 20
BUDGETS = (12, 24, 48, 96, 192, 384)
ROOT = Path(__file__).parent.parent
NUMBERS = ROOT / "benchmarks/results/estimators.json"
TITLES = {
    "flat": "flat: 1 to 3",
    "poly": "polynomial: $i^{-2}$",
    "exp0.9": "exponential: $0.9^i$",
    "exp0.7": "exponential: $0.7^i$",
    "step1e-3": "step: 50 ones, then $10^{-3}$",
    "step1e-8": "step: 50 ones, then $10^{-8}$",
}

#: How each estimator is drawn, and what it is called.
STYLES = {
    "hutchinson": ("o-", "Hutchinson"),
    "hutch++": ("s-", "Hutch++"),
    "xtrace": ("^-", "XTrace"),
    "xnystrace": ("d-", "XNysTrace"),
    "default": ("k--", "the default"),
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
    return errors_of(with_eigenvalues(eigenvalues), methods, budgets, count)


def errors_of(matrix, methods=OURS, budgets=BUDGETS, count=COUNT):
    """The same for a matrix."""
    truth = np.trace(matrix)
    matrix = jnp.asarray(matrix)
    keys = jax.random.split(jax.random.key(0), count)

    def rms(k, method):
        values = np.asarray(_values(keys, matrix, k, method))
        return float(np.sqrt(np.mean((values / truth - 1) ** 2)))

    return {name: [rms(k, method) for k in budgets] for name, method in methods.items()}


def _default(key, matrix, k):
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    operator = lx.FunctionLinearOperator(lambda x: matrix @ x, structure, PSD)
    return tr.trace(key, operator, k).value


def three_matrices():
    """One that a diagonal dominates, one that decays, one that is both."""
    rng = np.random.default_rng(1)
    i = np.arange(1, N + 1.0)
    upper = np.triu(rng.standard_normal((N, N)), 1)
    few = rng.standard_normal((N, 20))
    diagonal = np.diag(1 + i % 7)
    return {
        "diagonal 1 ... 7, 0.01 off it": diagonal + 0.01 * (upper + upper.T),
        "eigenvalues $i^{-2}$": with_eigenvalues(i**-2),
        "diagonal 1 ... 7, plus rank 20": diagonal + few @ few.T / 3,
    }


def picture(found, rows, name):
    """Draw the lines of every panel, and write the file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator

    height = 3.1 * rows
    figure, axes = plt.subplots(
        rows, 3, figsize=(11, height), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, (title, lines) in zip(axes.flat, found.items(), strict=True):
        for method, line in lines.items():
            style, label = STYLES[method]
            axis.loglog(BUDGETS, np.maximum(line, 1e-16), style, ms=4, label=label)
        axis.set_title(TITLES.get(title, title), fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_xticks(BUDGETS, [str(k) for k in BUDGETS])
        axis.minorticks_off()
        low, high = axis.get_ylim()
        if high < 50 * low:  # a single power of ten would be labelled
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(9, 9)))
    for axis in axes[-1]:
        axis.set_xlabel("products")
    for axis in axes[:, 0]:
        axis.set_ylabel("relative error")
    axes[0, 1].legend(frameon=False, loc="lower left", fontsize=8)
    path = ROOT / "docs/images" / name
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def measure():
    """Measure, and write the numbers."""
    jax.config.update("jax_enable_x64", True)
    found = {name: errors(values) for name, values in spectra(N).items()}
    methods = {**OURS, "default": _default}
    others = {name: errors_of(matrix, methods) for name, matrix in three_matrices().items()}
    results = {"n": N, "keys": COUNT, "budgets": BUDGETS, "rms_relative_error": {**found, **others}}
    NUMBERS.write_text(json.dumps(results, indent=1) + "\n")


def main():
    """Measure, unless it is done, and draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="draw the stored numbers")
    if not parser.parse_args().draw:
        measure()
    found = json.loads(NUMBERS.read_text())["rms_relative_error"]
    picture({name: found[name] for name in TITLES}, 2, "estimators.png")
    picture({name: x for name, x in found.items() if name not in TITLES}, 1, "shrunk.png")


if __name__ == "__main__":
    main()

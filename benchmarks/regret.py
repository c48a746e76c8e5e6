"""How far the default estimator of traces and diagonals is from the best, and whether bars hold.

    python -m benchmarks.regret            # all; some twenty minutes on two cores
    python -m benchmarks.regret --quick    # few keys, for trying it out

n = 400, operators by products. Ten spectra in a random basis (where the eigenvalues are positive,
XNysTrace takes a multiple of the identity off first: `traceax/_sketch/nystrom.py`); the same on the
diagonal, with small numbers off it; and what people have: Laplacians, blocks, matrices that are not
symmetric, Hessians. Every cell has the root mean square of the errors over 200 keys (of a diagonal
in the Euclidean norm), relative to the sum of absolute eigenvalues: that of the default, and the
smallest of all estimators, with its name; the share of 95 % intervals that cover the truth; and for
traces with k = 8 and 16 the z of the bias, over ten times as many keys. Results:
`benchmarks/results/regret.json`.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr

from . import network
from .common import ESTIMATORS, PSD, with_eigenvalues

RESULTS = Path(__file__).parent / "results" / "regret.json"
N, COUNT, BUDGETS, LONGER = 400, 200, (8, 16, 64, 256), (8, 16)
#: Errors below this share of the size are rounding.
ROUNDING = 1e-13
FUNCTIONS = {"trace": tr.trace, "diagonal": tr.diagonal}


def network_matrices():
    """Hessians and Gauss-Newton matrices of a network with 400 parameters, before and after
    training; and the Hessian of a loss of each parameter alone.
    """
    sizes = (15, 15, 10)
    params, batch = network.parameters(sizes), network.examples(sizes, 200)
    flat, restore = jax.flatten_util.ravel_pytree(params)

    def loss(flat):
        return network.loss(restore(flat), batch)

    def gauss_newton(flat):
        def outputs(flat):
            return network.logits(restore(flat), batch)

        jacobian = jax.jacobian(outputs)(flat)
        p = jax.nn.softmax(outputs(flat))
        inner = jax.vmap(jnp.diag)(p) - p[:, :, None] * p[:, None, :]
        return jnp.einsum("bia,bij,bjc->ac", jacobian, inner, jacobian) / len(p)

    trained = jax.lax.fori_loop(0, 500, lambda _, x: x - 0.3 * jax.grad(loss)(x), flat)
    return {
        "Hessian, before": jax.hessian(loss)(flat),
        "Hessian, trained": jax.hessian(loss)(trained),
        "Gauss-Newton, before": gauss_newton(flat),
        "Gauss-Newton, trained": gauss_newton(trained),
        "Hessian of each alone": jnp.diag(jnp.cos(3 * flat) + flat**2),
    }


def kernel():
    """The eigenvalues of an RBF kernel of points in a square, with noise."""
    x = np.random.default_rng(0).uniform(size=(N, 2))
    square = np.sum((x[:, None] - x) ** 2, axis=-1)
    return np.linalg.eigvalsh(np.exp(-square / (2 * 0.3**2)) + 0.01 * np.eye(N))


def ten_spectra():
    """Those on which no estimator is always the best."""
    i = np.arange(1, N + 1.0)
    falling = 1e-2 * (1 - i / (N + 1))
    hessian = np.asarray(network_matrices()["Hessian, trained"])
    return {
        "30 ones, then 1e-3": np.where(i <= 30, 1, 1e-3),
        "i^-3 + 1e-3": i**-3 + 1e-3,
        "30 ones over a falling bulk": np.where(i <= 30, 1, falling),
        "10 / i over a uniform bulk": 10 / i + np.random.default_rng(0).uniform(size=N),
        "i^-2": i**-2,
        "0.9^i": 0.9**i,
        "flat, 1 to 3": np.linspace(3, 1, N),
        "0.7^i": 0.7**i,
        "of a Hessian": np.linalg.eigvalsh(hessian),
        "kernel with noise": kernel(),
    }


def matrices():
    """All of them."""
    rng = np.random.default_rng(1)
    i = np.arange(1, N + 1.0)
    upper = np.triu(rng.standard_normal((N, N)), 1)
    general = rng.standard_normal((N, N))
    few = rng.standard_normal((N, 10))
    complex_noise = general + 1j * rng.standard_normal((N, N))
    basis = np.linalg.qr(complex_noise)[0]
    seven = np.diag(1 + i % 7)
    path = np.diag(np.full(N, 2.0)) - np.eye(N, k=1) - np.eye(N, k=-1)
    side = path[:20, :20]
    blocks = rng.standard_normal((20, 20, 20))
    found = {name: with_eigenvalues(values) for name, values in ten_spectra().items()}
    for off in (1e-4, 0.02):
        for name, values in ten_spectra().items():
            found[f"diagonal: {name}, {off:g} off it"] = np.diag(values) + off * (upper + upper.T)
    return {
        **found,
        "diagonal + rank 10": seven + few @ few.T / 3,
        "indefinite diagonal": seven * np.where(i % 3 == 0, -1, 1),
        "Laplacian of a path": path,
        "Laplacian of a grid": np.kron(side, np.eye(20)) + np.kron(np.eye(20), side),
        "20 blocks": np.kron(np.eye(20), np.ones((20, 20)))
        * np.tile((blocks @ blocks.transpose(0, 2, 1)).sum(0) / 400, (20, 20)),
        "diagonal + general": seven + general / np.sqrt(N),
        "diagonal + skew": seven + 0.3 * (upper - upper.T),
        "complex, i^-2": (basis * i**-2) @ basis.conj().T,
        "complex, diagonal": seven + 0.02 * (complex_noise + complex_noise.conj().T),
        **{name: np.asarray(matrix) for name, matrix in network_matrices().items()},
    }


def tags_of(matrix):
    """What is known of a matrix."""
    if not np.allclose(matrix, matrix.conj().T):
        return ()
    if np.linalg.eigvalsh(matrix)[0] >= -1e-12:
        return PSD
    return () if np.iscomplexobj(matrix) else lx.symmetric_tag


@functools.cache
def program(quantity, k, estimator, tags, dtype):
    """Values and intervals for an array of keys."""
    structure = jax.ShapeDtypeStruct((N,), dtype)

    @jax.jit
    def run(keys, matrix):
        operator = lx.FunctionLinearOperator(lambda x: matrix @ x, structure, tags)

        def one(key):
            solution = FUNCTIONS[quantity](key, operator, k, estimator)
            return solution.value, *solution.interval()

        return jax.lax.map(one, keys)

    return run


def errors(quantity, matrix, k, estimator, count):
    """The errors (their norms) of so many keys, what the intervals cover, and the mean error."""
    truth = np.trace(matrix) if quantity == "trace" else np.diag(matrix)
    run = program(quantity, k, estimator, tags_of(matrix), matrix.dtype)
    keys = jax.random.split(jax.random.key(0), count)
    value, lower, upper = (np.asarray(x) for x in run(keys, jnp.asarray(matrix)))
    error = np.atleast_2d((value - truth).T)
    covered = (lower.real <= truth.real) & (truth.real <= upper.real)
    return np.sqrt(np.sum(abs(error) ** 2, axis=0)), covered, error.real.sum(axis=0)


def cell(quantity, matrix, k, count):
    """One cell of the table, see above."""
    size = np.abs(np.linalg.eigvals(matrix)).sum()
    size = size if quantity == "trace" else np.linalg.norm(np.diag(matrix))

    def rms(x):
        return float(np.sqrt(np.mean(x**2)) / size)

    others = {}
    for name, estimator in ESTIMATORS.items():
        if name != "xnystrace" or tags_of(matrix) == PSD:
            others[name] = rms(errors(quantity, matrix, k, estimator, count)[0])
    found, covered, _ = errors(quantity, matrix, k, tr.AutoTraceEstimator(), count)
    best = min(others, key=lambda name: others[name])
    figures = {"rms": rms(found), "best": others[best], "covered": float(covered.mean())}
    ratio = max(figures["rms"], ROUNDING) / max(figures["best"], ROUNDING)
    # The relative standard error of a mean square, and so of the ratio, at most doubled.
    noise = float(np.std(found**2) / np.mean(found**2) / np.sqrt(count)) if rms(found) else 0.0
    figures = {**figures, "by": best, "ratio": ratio, "noise": noise}
    if quantity == "trace" and k in LONGER and figures["rms"] > ROUNDING:
        _, _, signed = errors(quantity, matrix, k, tr.AutoTraceEstimator(), 10 * count)
        figures["z"] = float(signed.mean() / (signed.std(ddof=1) / np.sqrt(len(signed))))
    return figures


def table(found):
    """The root mean squares and their ratios to the best, for a page of the documents."""

    def entry(row):
        if row["rms"] < ROUNDING:
            return "rounding"
        ratio = "1" if row["ratio"] < 1.05 else f"{row['ratio']:.1f}, {row['by']}"
        return f"{row['rms']:.1e} ({ratio})".replace("e-0", "e-")

    yield "| operator | " + " | ".join(f"k = {k}" for k in BUDGETS) + " |"
    yield "| --- " * (1 + len(BUDGETS)) + "|"
    for name, rows in found.items():
        yield f"| {name} | " + " | ".join(map(entry, rows.values())) + " |"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    jax.config.update("jax_enable_x64", True)
    found = {quantity: {} for quantity in FUNCTIONS}
    for name, matrix in matrices().items():
        for quantity, rows in found.items():
            rows[name] = {}
            for k in BUDGETS[:2] if quick else BUDGETS:
                rows[name][k] = row = cell(quantity, matrix, k, 20 if quick else COUNT)
                z = f", z {row['z']:+.1f}" if "z" in row else ""
                print(
                    f"{quantity:8s} {name:44s} {k:4d}: {row['rms']:.1e}, best {row['best']:.1e} "
                    f"({row['by']}), ratio {row['ratio']:.2f} +- {row['noise']:.2f}, covers "
                    f"{row['covered']:.1%}{z}",
                    flush=True,
                )
    if not quick:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        for rows in found.values():
            print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()

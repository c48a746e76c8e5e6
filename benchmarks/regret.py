"""How far the default estimator of traces and diagonals is from the best, and whether bars hold.

    python -m benchmarks.regret               # all; about an hour on two cores
    python -m benchmarks.regret --single      # the same in float32
    python -m benchmarks.regret 3 4 6 8       # some budgets

n = 400, operators by products. Ten spectra in a random basis (where the eigenvalues are positive,
XNysTrace takes a multiple of the identity off first: `traceax/_sketch/nystrom.py`); the same on the
diagonal, with small numbers off it; and what people have: Laplacians, blocks, matrices that are not
symmetric, Hessians. Every cell has the root mean square of the errors over 200 keys (of a diagonal
in the Euclidean norm), relative to the sum of absolute eigenvalues: that of the default, and those
of Hutchinson's and of the published estimators with as many products; the share of 95 % intervals
that cover the truth; and the z of the bias of traces from at most ten probes, over 4,000 keys. A
cell over its limit is measured again, with 2,000 keys. Results: `benchmarks/results/regret.json`.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from sklearn.datasets import load_digits

import traceax as tr

from . import network
from .common import PSD, with_eigenvalues

RESULTS = Path(__file__).parent / "results"
N, COUNT, BUDGETS = 400, 200, (3, 4, 6, 8, 16, 64, 256)
#: Errors below so many units of rounding, relative to the size, count as equal.
ROUNDING = 100
RIVALS = {
    "hutchinson": tr.HutchinsonEstimator(),
    "xtrace": tr.XTraceEstimator(),
    "xnystrace": tr.XNysTraceEstimator(),
}
FUNCTIONS = {"trace": tr.trace, "diagonal": tr.diagonal}


def network_matrices():
    """Hessians and Gauss-Newton matrices of a network with 400 parameters, which reads digits from
    15 principal components, before and after training; those of its last layer; and the Hessian
    of a loss of each parameter alone.
    """
    images, labels = load_digits(return_X_y=True)
    images = images[:200] - images[:200].mean(axis=0)
    components = np.linalg.svd(images, full_matrices=False)[0][:, :15] * np.sqrt(200)
    batch = jnp.asarray(components), jnp.asarray(labels[:200])
    # The parameters of the last layer come last.
    flat, restore = jax.flatten_util.ravel_pytree(network.parameters((15, 15, 10)))

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
    last = jnp.arange(N) >= 15 * 16
    return {
        "Hessian, before": jax.hessian(loss)(flat),
        "Hessian, trained": jax.hessian(loss)(trained),
        "Gauss-Newton, before": gauss_newton(flat),
        "Gauss-Newton, trained": gauss_newton(trained),
        "Gauss-Newton of the last layer": jnp.outer(last, last) * gauss_newton(trained),
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
    """The errors (their norms) of so many keys, what the intervals cover, and their sums."""
    exact = matrix.astype(np.result_type(matrix.dtype, np.float64))
    truth = np.trace(exact) if quantity == "trace" else np.diag(exact)
    run = program(quantity, k, estimator, tags_of(exact), matrix.dtype)
    keys = jax.random.split(jax.random.key(0), count)
    value, lower, upper = (np.asarray(x) for x in run(keys, jnp.asarray(matrix)))
    error = np.atleast_2d((value - truth).T)
    covered = (lower.real <= truth.real) & (truth.real <= upper.real)
    return np.sqrt(np.sum(abs(error) ** 2, axis=0)), covered, error.real.sum(axis=0)


def limit_of(k, probes):
    """What the ratio to the best may be: a probe of XTrace takes two products."""
    if probes < 4:
        return 2.5
    return 1.2 if probes == k else 1.5


def cell(quantity, matrix, k, count=COUNT):
    """One cell of the table, see above."""
    size = np.abs(np.linalg.eigvals(matrix)).sum()
    size = size if quantity == "trace" else np.linalg.norm(np.diag(matrix))
    least = ROUNDING * float(np.finfo(matrix.dtype).eps)
    default = tr.AutoTraceEstimator()
    semidefinite = tags_of(matrix) == PSD
    probes = k if semidefinite else k // 2

    def rms(x):
        return float(np.sqrt(np.mean(x**2)) / size)

    others = {
        name: rms(errors(quantity, matrix, k, estimator, count)[0])
        for name, estimator in RIVALS.items()
        if semidefinite or name != "xnystrace"
    }
    found, covered, _ = errors(quantity, matrix, k, default, count)
    figures = {"rms": rms(found), "covered": float(covered.mean()), **others}
    best = min(others, key=lambda name: others[name])
    ratio = max(figures["rms"], least) / max(others[best], least)
    # The relative standard error of a mean square, and so of the ratio, at most doubled.
    noise = float(np.std(found**2) / np.mean(found**2) / np.sqrt(count)) if rms(found) else 0.0
    figures = {**figures, "by": best, "ratio": ratio, "noise": noise}
    if ratio * (1 - 3 * noise) > limit_of(k, probes) and count == COUNT and k < N / 2:
        return cell(quantity, matrix, k, 10 * count)
    if quantity == "trace" and probes <= 10 and figures["rms"] > least:
        _, _, signed = errors(quantity, matrix, k, default, 20 * COUNT)
        figures["z"] = float(signed.mean() / (signed.std(ddof=1) / np.sqrt(len(signed))))
    return figures


def table(found, least):
    """The root mean squares and their ratios to the best, for a page of the documents."""

    def entry(row):
        if row["rms"] < least:
            return "rounding"
        ratio = "1" if row["ratio"] < 1.05 else f"{row['ratio']:.2f}, {row['by']}"
        return f"{row['rms']:.1e} ({ratio})".replace("e-0", "e-")

    budgets = sorted(next(iter(found.values())), key=int)
    yield "| operator | " + " | ".join(f"k = {k}" for k in budgets) + " |"
    yield "| --- " * (1 + len(budgets)) + "|"
    for name, rows in found.items():
        yield f"| {name} | " + " | ".join(entry(rows[k]) for k in budgets) + " |"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("budgets", nargs="*", type=int, default=BUDGETS)
    parser.add_argument("--single", action="store_true")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    file = RESULTS / f"regret{'32' if given.single else ''}.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for k in given.budgets:
        for name, matrix in matrices().items():
            for quantity in FUNCTIONS:
                single = np.complex64 if np.iscomplexobj(matrix) else np.float32
                row = cell(quantity, matrix.astype(single) if given.single else matrix, k)
                found.setdefault(quantity, {}).setdefault(name, {})[str(k)] = row
                z = f", z {row['z']:+.1f}" if "z" in row else ""
                print(
                    f"{quantity:8s} {name:44s} {k:4d}: {row['rms']:.1e}, best {row[row['by']]:.1e} "
                    f"({row['by']}), ratio {row['ratio']:.2f} +- {row['noise']:.2f}, covers "
                    f"{row['covered']:.1%}{z}",
                    flush=True,
                )
            file.write_text(json.dumps(found, indent=1) + "\n")
    least = ROUNDING * float(np.finfo(np.float32 if given.single else np.float64).eps)
    for rows in found.values():
        print(*table(rows, least), sep="\n")


if __name__ == "__main__":
    main()

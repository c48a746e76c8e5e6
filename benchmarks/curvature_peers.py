"""Curvature beside curvlinops and PyHessian: one network, the same weights and data.

    python -m venv torch-env
    torch-env/bin/pip install torch curvlinops-for-pytorch pyhessian   # a CPU build of torch
    taskset -c 0 python -m benchmarks.curvature_peers torch-env/bin/python   # some five minutes

A network of 2,778 parameters, trained for 300 steps on scikit-learn's digits; 256 of them; float32.
What is true comes from the eigenvalues of the dense matrices, in float64. For each library, over 20
keys: rms errors at 100 products relative to the trace, z (the mean error over its standard error:
above 4.5 is a bias), and median seconds over those of the library's own 100 products, one by one.
All on one core, as threads of PyTorch that wait for each other would measure the machine. Writes
`benchmarks/results/curvature_peers.json`.
"""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_digits

import traceax as tr

from .common import seconds
from .network import cross_entropy, logits, loss, parameters

SIZES, STEPS, EXAMPLES = (64, 32, 16, 10), 300, 256
K, KEYS, LANCZOS, LOOK, POINTS = 100, 20, 20, 20, 400
RESULTS = Path(__file__).parent / "results/curvature_peers.json"
KINDS = ("hessian", "gauss_newton")
ESTIMATORS = {
    "hutchinson": tr.HutchinsonEstimator(),
    "hutch++": tr.HutchPlusPlusEstimator(),
    "xtrace": tr.XTraceEstimator(),
    "auto": tr.AutoTraceEstimator(),
}


def operator_of(kind, params, batch):
    if kind == "hessian":
        return tr.curvature.hessian(loss, params, batch)
    return tr.curvature.gauss_newton(logits, cross_entropy, params, batch)


def trained():
    """The parameters, and the examples that curvature is a mean over."""
    data = load_digits()
    batch = jnp.asarray(data.data / 16, jnp.float32), jnp.asarray(data.target)
    optimiser, params = optax.adam(3e-3), parameters(SIZES)

    def step(carry, _):
        params, moments = carry
        updates, moments = optimiser.update(jax.grad(loss)(params, batch), moments)
        return (optax.apply_updates(params, updates), moments), None

    train = jax.jit(lambda carry: jax.lax.scan(step, carry, length=STEPS)[0])
    params, _ = train((params, optimiser.init(params)))
    return params, jax.tree.map(lambda x: x[:EXAMPLES], batch)


def exact(params, batch):
    """Traces by layer of both matrices, and the eigenvalues of the Hessian, in float64."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        batch = jnp.asarray(batch[0], jnp.float64), jnp.asarray(batch[1])
        flat, unflatten = ravel_pytree(params)

        def curvature(flat):
            return jax.hessian(lambda flat: loss(unflatten(flat), batch))(flat)

        def gauss_newton(flat):
            def one(x):
                outputs = lambda flat: logits(unflatten(flat), (x[None],))[0]  # noqa: E731
                jacobian, p = jax.jacrev(outputs)(flat), jax.nn.softmax(outputs(flat))
                return p @ jacobian**2 - (p @ jacobian) ** 2

            return jnp.mean(jax.lax.map(one, batch[0]), axis=0)

        hessian = np.asarray(jax.jit(curvature)(flat))
        diagonals = dict(zip(KINDS, (np.diag(hessian), jax.jit(gauss_newton)(flat)), strict=True))
        layers = {kind: by_layer(unflatten(jnp.asarray(x))) for kind, x in diagonals.items()}
        return layers, np.linalg.eigvalsh(hessian)


def by_layer(tree):
    """The sums of a PyTree like the parameters, layer by layer."""
    return [float(sum(jnp.sum(x) for x in layer.values())) for layer in tree]


def repeated(fn, count=KEYS):
    """The results for so many keys, and the median seconds of a call."""
    fn, keys = jax.jit(fn), jr.split(jr.key(1), count)
    jax.block_until_ready(fn(jr.key(0)))
    values = [fn(key) for key in keys]
    times = [seconds(fn, key) for key in keys]
    return {"values": jax.device_get(values), "seconds": statistics.median(times)}


def with_traceax(params, batch, grid, width):
    found = {}
    for kind in KINDS:
        make = partial(operator_of, kind, params, batch)
        vectors = jax.tree.map(lambda x: jr.normal(jr.key(3), (K, *x.shape)), params)

        def products(_, make=make, vectors=vectors):
            return jax.tree.map(jnp.sum, jax.lax.map(make().mv, vectors))

        def block(_, make=make, vectors=vectors):
            return jax.tree.map(jnp.sum, jax.vmap(make().mv)(vectors))

        product = repeated(products, 5)
        found[kind] = {
            "product": {"seconds": product["seconds"] / K},
            "block": repeated(block, 5),
            **{
                name: repeated(lambda key, e=e, make=make: tr.trace(key, make(), K, e).value)
                for name, e in ESTIMATORS.items()
            },
            "layers": repeated(
                lambda key, make=make: [
                    sum(jax.tree.leaves(layer)) for layer in tr.block_traces(key, make(), K).value
                ]
            ),
        }
    make = partial(operator_of, "hessian", params, batch)
    found["hessian"] |= {
        "sharpness": repeated(
            lambda key: (tr.eigenpairs(key, make(), LOOK).values[0], jnp.asarray(LOOK))
        ),
        "density": repeated(
            lambda key: tr.spectral_density(key, make(), K, grid, width=width).value
        ),
    }
    return found


def judged(found, layers, eigenvalues, grid, width):
    """Errors and times of one library."""
    bumps = np.exp(-(((grid - eigenvalues[:, None]) / width) ** 2) / 2)
    density = np.mean(bumps, axis=0) / (width * np.sqrt(2 * np.pi))
    figures = {}
    for kind, rows in found.items():
        truth, base = np.asarray(layers[kind]), K * rows["product"]["seconds"]
        table = figures[kind] = {"seconds of a product": rows["product"]["seconds"]}
        for name, row in rows.items():
            if name == "product":
                continue
            time = {"time over products": row["seconds"] / base}
            if name == "block":
                table[name] = time
                continue
            values = np.asarray(row["values"], np.float64)
            if name == "density":
                missed = np.sum(np.abs(values - density), axis=1) * (grid[1] - grid[0])
                table[name] = {"integrated error": float(np.mean(missed)), **time}
                continue
            if name == "sharpness":
                counts, values = values[:, 1], values[:, 0]
                error = np.sqrt(np.mean((values / eigenvalues[-1] - 1) ** 2))
                table[name] = {"rms": float(error), "products": float(np.mean(counts)), **time}
                continue
            error = (values - (truth if name == "layers" else truth.sum())) / truth.sum()
            error = error.reshape(KEYS, -1)
            z = np.mean(error, axis=0) / (np.std(error, axis=0, ddof=1) / np.sqrt(KEYS))
            rms = np.sqrt(np.mean(np.sum(error**2, axis=1)))
            table[name] = {"rms": float(rms), "z": float(z[np.argmax(np.abs(z))]), **time}
    return figures


def main(python):
    params, batch = trained()
    layers, eigenvalues = exact(params, batch)
    low, high = eigenvalues[[0, -1]]
    # The grid and the width that curvlinops takes by default: a margin of 5 %, and kappa = 3.
    margin = 0.05 * (high - low)
    grid = np.linspace(low - margin, high + margin, POINTS).astype(np.float32)
    width = (grid[-1] - grid[0]) / (LANCZOS - 1) / np.sqrt(8 * np.log(3.0))
    problem = {f"{name}{i}": x for i, layer in enumerate(params) for name, x in layer.items()}
    problem |= {"layers": len(params), "inputs": batch[0], "labels": batch[1], "k": K, "keys": KEYS}
    problem |= {"ends": (low, high), "steps": LANCZOS, "grid": grid, "width": width}
    judge = partial(judged, layers=layers, eigenvalues=eigenvalues, grid=grid, width=width)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "problem.npz", Path(folder) / "found.json"
        np.savez(source, **problem)
        script = Path(__file__).with_name("curvature_peers_torch.py")
        subprocess.run([python, script, source, target], check=True)
        found = json.loads(target.read_text())
    versions = {"jax": jax.__version__, **found.pop("versions")}
    found["traceax"] = with_traceax(params, batch, jnp.asarray(grid), width)
    results = {
        "machine": {"system": platform.platform(), **versions},
        "exact": {**layers, "ends of the Hessian": [float(low), float(high)]},
        **{name: judge(tables) for name, tables in found.items()},
    }
    text = json.dumps(results, indent=1)
    print(text)
    RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

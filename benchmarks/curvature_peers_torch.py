"""What curvlinops and PyHessian find for the network of `curvature_peers.py`, which runs this file.

It knows nothing of JAX, and is run by the Python of an environment with PyTorch:

    python curvature_peers_torch.py PROBLEM.npz FOUND.json

PyHessian 0.1 calls `torch.eig`, which PyTorch has no more: here that is `torch.linalg.eigh`, for
its symmetric matrix. Its power iteration and traces run without their tolerance, to the budget.
"""

import json
import statistics
import sys
import time
from importlib.metadata import version

import curvlinops
import numpy as np
import pyhessian
import torch
from pyhessian.utils import hessian_vector_product
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import nn


def eig(matrix, eigenvectors):
    values, vectors = torch.linalg.eigh(matrix)
    return torch.stack([values, torch.zeros_like(values)], dim=1), vectors


torch.eig = eig


def repeated(fn, count):
    """The results for so many seeds, and the median seconds of a call."""
    found, times = [], []
    for seed in range(-1, count):  # the first is not counted
        torch.manual_seed(abs(seed))
        start = time.perf_counter()
        found.append(fn())
        times.append(time.perf_counter() - start)
    return {"values": found[1:], "seconds": statistics.median(times[1:])}


def network(problem):
    """The model, and its parameters layer by layer."""
    layers, modules = int(problem["layers"]), []
    for i in range(layers):
        linear = nn.Linear(*problem[f"w{i}"].shape)
        linear.weight.data = torch.tensor(problem[f"w{i}"].T.copy())
        linear.bias.data = torch.tensor(problem[f"b{i}"])
        modules += [linear, nn.Tanh()] if i < layers - 1 else [linear]
    return nn.Sequential(*modules), [list(m.parameters()) for m in modules if list(m.parameters())]


def with_curvlinops(problem, model, layers, data):
    k, keys, ends = int(problem["k"]), int(problem["keys"]), problem["ends"]
    parameters = [p for layer in layers for p in layer]
    found = {}
    classes = {
        "hessian": curvlinops.HessianLinearOperator,
        "gauss_newton": curvlinops.GGNLinearOperator,
    }

    def operator(kind, parameters):
        loss = nn.CrossEntropyLoss()
        return classes[kind](model, loss, parameters, [data], check_deterministic=False)

    for kind in classes:
        whole, blocks = operator(kind, parameters), [operator(kind, x) for x in layers]
        vectors = torch.randn(whole.shape[1], k)
        found[kind] = {
            "product": repeated(lambda a=whole, v=vectors: float((a @ v[:, 0])[0]), keys),
            "block": repeated(lambda a=whole, v=vectors: float((a @ v)[0, 0]), 5),
            "hutchinson": repeated(lambda a=whole: float(curvlinops.hutchinson_trace(a, k)), keys),
            "hutch++": repeated(
                lambda a=whole: float(curvlinops.hutchpp_trace(a, k // 3 * 3)), keys
            ),
            "xtrace": repeated(lambda a=whole: float(curvlinops.xtrace(a, k)), keys),
            "layers": repeated(
                lambda blocks=blocks: [
                    float(curvlinops.hutchinson_trace(a, k // len(blocks))) for a in blocks
                ],
                keys,
            ),
        }
    hessian, products = operator("hessian", parameters), []
    inner = hessian.to_scipy()

    def multiply(v):
        products.append(1)
        return inner @ v

    counted = LinearOperator(inner.shape, multiply, dtype=inner.dtype)

    def sharpness():
        products.clear()
        value = eigsh(counted, k=1, which="LA", tol=1e-3, return_eigenvectors=False)[0]
        return [float(value), len(products)]

    def density():
        steps, probes = int(problem["steps"]), k // int(problem["steps"])
        _, heights = curvlinops.lanczos_approximate_spectrum(
            hessian, steps, len(problem["grid"]), probes, boundaries=tuple(map(float, ends))
        )
        return heights.tolist()

    found["hessian"] |= {
        "sharpness": repeated(sharpness, keys),
        "density": repeated(density, keys),
    }
    return found


def with_pyhessian(problem, model, data):
    k, keys, steps = (int(problem[x]) for x in ("k", "keys", "steps"))
    hessian = pyhessian.hessian(model, nn.CrossEntropyLoss(), data=data, cuda=False)
    vector = [torch.randn_like(p) for p in hessian.params]
    grid, width = torch.tensor(problem["grid"]), float(problem["width"])

    def product():
        return float(hessian_vector_product(hessian.gradsH, hessian.params, vector)[0].sum())

    def sharpness():
        return [float(hessian.eigenvalues(maxIter=20, tol=0, top_n=1)[0][0]), 20]

    def density():
        nodes, weights = map(torch.tensor, hessian.density(iter=steps, n_v=k // steps))
        bumps = torch.exp(-(((grid - nodes[..., None]) / width) ** 2) / 2)
        heights = bumps / (width * (2 * np.pi) ** 0.5)
        return torch.mean(torch.sum(weights[..., None] * heights, dim=1), dim=0).tolist()

    return {
        "hessian": {
            "product": repeated(product, keys),
            "hutchinson": repeated(lambda: float(np.mean(hessian.trace(maxIter=k, tol=0))), keys),
            "sharpness": repeated(sharpness, keys),
            "density": repeated(density, keys),
        }
    }


def main(source, target):
    problem = np.load(source)
    model, layers = network(problem)
    data = torch.tensor(problem["inputs"]), torch.tensor(problem["labels"], dtype=torch.int64)
    found = {
        "curvlinops": with_curvlinops(problem, model, layers, data),
        "pyhessian": with_pyhessian(problem, model, data),
        "versions": {x: version(x) for x in ("torch", "curvlinops-for-pytorch", "pyhessian")},
    }
    with open(target, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])

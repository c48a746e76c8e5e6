"""The picture of errors against products beside matfree's: `python docs/peers.py` draws it anew,
from the results that are stored in `benchmarks/results`.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "peers.png"
KERNELS = {
    "rbf-2": "log-determinant, RBF kernel, d = 2\nnoise 0.1: rms error in nats",
    "matern32-2": "log-determinant, Matern-3/2, d = 2\nnoise 0.1: rms error in nats",
}


def draw(axes, products, errors, label, style):
    """One line."""
    axes.loglog(products, errors, style, label=label)
    axes.set_xticks(products, [str(p) for p in products])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlabel("products")


def main():
    """Draw the picture."""
    figure, (left, *others) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    figures = json.loads((RESULTS / "traces.json").read_text())["figures"]
    traces = figures["relative error over products, step1e-3"]
    for name, label, style in (
        ("xnystrace", "traceax", "C0o-"),
        ("matfree, xnystrace", "matfree, XNysTrace", "C3d--"),
        ("matfree, hutchinson", "matfree, Hutchinson", "C1s--"),
    ):
        draw(left, [int(k) for k in traces[name]], list(traces[name].values()), label, style)
    left.set_title("trace, 50 eigenvalues of 1, then $10^{-3}$\nrelative rms error", fontsize=10)
    kernels = json.loads((RESULTS / "logdet.json").read_text())["kernels"]
    for axes, (kernel, title) in zip(others, KERNELS.items(), strict=True):
        for name, style in (
            ("traceax", "C0o-"),
            ("matfree, 20 steps", "C3d--"),
            ("matfree, 60 steps", "C1s--"),
        ):
            rows = kernels[kernel][name]
            draw(axes, [r["budget"] for r in rows], [r["error"] for r in rows], name, style)
        axes.set_title(title, fontsize=10)
    for axes in (left, *others):
        axes.legend(fontsize=8)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()

"""The picture of what preconditioners leave: `python docs/preconditioner.py` draws it anew."""

from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np

import traceax as tr

PICTURE = Path(__file__).parent / "images" / "preconditioner.png"
N, RANK, NOISE = 1500, 150, 1e-2
CASES = {
    "RBF, d = 2, length 0.3": (2, 0.3, lambda r: jnp.exp(-(r**2) / 2)),
    "Matern-1/2, d = 2, length 0.3": (2, 0.3, lambda r: jnp.exp(-r)),
    "Matern-3/2, d = 5, length 0.7": (5, 0.7, lambda r: (1 + 3**0.5 * r) * jnp.exp(-(3**0.5) * r)),
}
PARTS = {
    "low rank": (tr.NystromPreconditioner(RANK), "C1"),
    "sparse factor": (tr.KernelPreconditioner(rank=1), "C2"),
    "both": (tr.KernelPreconditioner(RANK), "C0--"),
}


def eigenvalues(preconditioner, operator):
    """Those of P^-1 A, from the largest to the smallest."""
    factors = preconditioner.build(jax.random.key(1), operator).factors
    half = factors.inverse_root(operator.as_matrix())
    return np.linalg.eigvalsh(np.asarray(factors.inverse_root(half.T)))[::-1]


def main():
    """Draw the picture."""
    jax.config.update("jax_enable_x64", True)
    figure, all_axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    for axes, (title, (d, length, of_distance)) in zip(all_axes, CASES.items(), strict=True):
        x = jnp.asarray(np.random.default_rng(0).uniform(size=(N, d)))

        def kernel(a, b, length=length, of_distance=of_distance):
            return of_distance(jnp.sqrt(jnp.maximum(jnp.sum((a - b) ** 2), 1e-12)) / length)

        K = tr.KernelLinearOperator(kernel, x)
        operator = K + NOISE * lx.IdentityLinearOperator(K.in_structure())
        place = np.arange(1, N + 1)
        plain = np.linalg.eigvalsh(np.asarray(operator.as_matrix()))[::-1]
        axes.loglog(place, plain, color="grey", label="A itself")
        for name, (preconditioner, color) in PARTS.items():
            axes.loglog(place, eigenvalues(preconditioner, operator), color, label=name)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("number of the eigenvalue")
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("eigenvalue")
    all_axes[0].legend(fontsize=8)
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()

"""The matrices of spectral sums that are compared with other packages: NumPy only."""

import numpy as np

N = 1000
INDEX = np.arange(1.0, N + 1)


def functions(xp):
    """The functions of the cases by their names, for arrays of NumPy or of `jax.numpy`."""
    return {
        "sqrt x": lambda x: xp.sqrt(xp.abs(x)),
        "log(1 + 1e4 x)": lambda x: xp.log1p(1e4 * xp.abs(x)),
        "1 / (x + 1e-3)": lambda x: 1 / (xp.abs(x) + 1e-3),
        "exp(20 x)": lambda x: xp.exp(20 * x),
        "exp(-10 x)": lambda x: xp.exp(-10 * x),
        "log x": xp.log,
    }


def eigenvalues():
    """The eigenvalues of each case, and the name of its function of them."""
    random = np.random.default_rng(0).standard_normal((N, N))
    semicircle = np.linalg.eigvalsh((random + random.T) / np.sqrt(8 * N))
    path = 2 - 2 * np.cos(np.pi * np.arange(N) / N)
    return (
        ("sqrt x", "i^-2", INDEX**-2),
        ("log(1 + 1e4 x)", "i^-2", INDEX**-2),
        ("1 / (x + 1e-3)", "i^-2", INDEX**-2),
        ("exp(20 x)", "random on [-1, 1]", semicircle),
        ("exp(-10 x)", "path", path),
        ("log x", "1 + 10 / i", 1 + 10 / INDEX),
        ("sqrt x", "0.9^i", 0.9**INDEX),
    )


def basis():
    """Eigenvectors at random."""
    return np.linalg.qr(np.random.default_rng(2).standard_normal((N, N)))[0]


def not_symmetric():
    """Matrices that are not: Gaussian, a directed network, a drift with diffusion on a line."""
    rng = np.random.default_rng(3)
    gaussian = 2 * rng.standard_normal((N, N)) / np.sqrt(N)
    network = np.zeros((N, N))
    for node in range(1, N):  # to three earlier nodes, for the most part those with many links
        chances = network[:, :node].sum(axis=0) + 1
        ends = rng.choice(node, size=min(node, 3), replace=False, p=chances / chances.sum())
        network[node, ends] = 1
    back = rng.integers(0, N, (2, N))
    network[back[0], back[1]] = 1
    drift = 4 * (np.eye(N, k=-1) - np.eye(N)) + np.eye(N, k=1) + np.eye(N, k=-1) - 2 * np.eye(N)
    return (("Gaussian", gaussian), ("directed network", network), ("drift", drift))


def rms(errors):
    """The root mean square."""
    return float(np.sqrt(np.mean(np.square(np.abs(np.asarray(errors))))))

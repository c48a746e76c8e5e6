"""Trace and diagonal of the inverse of kernels from equal numbers of products: ours, functions of
the plain matrix, matfree.

    python -m benchmarks.bench_inverse              # k = 120, 40 keys; some two minutes
    python -m benchmarks.bench_inverse 48 --keys 20

n = 1000 points in the unit cube, float64, the matrix dense or known by its products alone. Root
mean square errors over the keys, relative to the trace (for diagonals: to the norm of the
diagonal), and how many 95 % intervals cover. Then diagonals alone, the marginal variances of Markov
random fields on a grid: samples, for a sparse matrix, and probes, for its products alone.
"""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse

import traceax as tr
from traceax._functions.funm import plan

from . import matfree_peer
from .bench_functions import budgets_and_keys
from .spectra import rms

N, SIDE = 1000, 40
CASES = (("RBF, d = 2", 2, 0.3, 1e-3), ("RBF, d = 2", 2, 0.3, 0.1), ("RBF, d = 5", 5, 0.5, 1e-2))


def kernel(dimension, length):
    """The matrix of a kernel at random points."""
    x = np.random.default_rng(0).uniform(size=(N, dimension))
    squares = np.sum((x[:, None] - x) ** 2, axis=-1)
    return jnp.asarray(np.exp(-squares / (2 * length**2)))


def operators(matrix, noise):
    """K + s I with and without entries."""
    structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
    tag, identity = lx.positive_semidefinite_tag, lx.IdentityLinearOperator(structure)
    hidden = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tag)
    yield "dense", lx.MatrixLinearOperator(matrix, tag) + noise * identity
    yield "products", hidden + noise * identity


def several(solve, keys):
    """The solutions for all keys."""
    return jax.jit(jax.vmap(solve))(keys)


def covered(found, truth):
    """The share of the intervals that hold the truth."""
    low, high = jax.vmap(lambda solution: solution.interval())(found)
    return float(jnp.mean((low <= truth) & (truth <= high)))


def fields():
    """Precision matrices on a grid: powers of L + s I, with the Laplacian L."""
    ends = [np.full(SIDE - 1, -1.0)] * 2
    path = scipy.sparse.diags_array([ends[0], np.full(SIDE, 2.0), ends[1]], offsets=[-1, 0, 1])
    eye = scipy.sparse.eye_array(SIDE)
    laplacian = scipy.sparse.kron(path, eye) + scipy.sparse.kron(eye, path)
    for s, power in ((1, 1), (0.1, 1), (0.01, 1), (1, 2), (0.1, 2)):
        matrix = laplacian + s * scipy.sparse.eye_array(SIDE**2)
        name = f"(L + {s:g} I)^{power}"
        yield name, scipy.sparse.csr_array(matrix if power == 1 else matrix @ matrix)


def marginal_variances(budgets, keys):
    """The table of fields."""
    print("field, k, samples, covers, converged, probes, covers, converged")
    for name, matrix in fields():
        truth = np.diag(np.linalg.inv(matrix.toarray()))
        stored = tr.SparseLinearOperator(matrix, lx.positive_semidefinite_tag)
        structure = jax.ShapeDtypeStruct(truth.shape, truth.dtype)
        hidden = lx.FunctionLinearOperator(stored.mv, structure, lx.positive_semidefinite_tag)
        for k in budgets:
            row = []
            for operator in (stored, hidden):
                found = several(
                    lambda key, o=operator, k=k: tr.inverse_diagonal(key, o, k, fallback=None), keys
                )
                error = rms(jnp.linalg.norm(found.value - truth, axis=1) / np.linalg.norm(truth))
                ended = float(jnp.mean(found.result == tr.RESULTS.successful))
                row.append(f"{error:.2g}, {covered(found, truth):.2f}, {ended:.2f}")
            print(f"{name}, {k}, {', '.join(row)}", flush=True)


def main():
    budgets, keys = budgets_and_keys("Inverses from equal numbers of products")
    print("case, noise, form, k, inverse_trace, covers, spectral_sum, quadrature alone, matfree, "
          "inverse_diagonal, covers")  # fmt: skip
    for k in budgets:
        steps = plan(k, None)[1]
        for name, dimension, length, noise in CASES:
            matrix = kernel(dimension, length)
            diagonal = jnp.diagonal(jnp.linalg.inv(matrix + noise * jnp.eye(N)))
            truth, size = jnp.sum(diagonal), jnp.linalg.norm(diagonal)
            for form, operator in operators(matrix, noise):
                tagged = lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)

                def plain(key, num_steps=None, tagged=tagged, k=k):
                    return tr.spectral_sum(key, jnp.reciprocal, tagged, k, num_steps=num_steps)

                of_trace = several(lambda key, o=operator, k=k: tr.inverse_trace(key, o, k), keys)
                of_diagonal = several(
                    lambda key, o=operator, k=k: tr.inverse_diagonal(key, o, k), keys
                )
                others = [several(plain, keys).value]
                others.append(several(lambda key, f=plain, q=steps: f(key, q), keys).value)
                theirs = []
                for q in (10, 40):
                    estimate = matfree_peer.function(jnp.reciprocal, diagonal, k, min(q, k))
                    theirs.append(several(lambda key, e=estimate, o=tagged: e(o.mv, key), keys))
                errors = [rms((x - truth) / truth) for x in (of_trace.value, *others)]
                matfree = min(rms((x - truth) / truth) for x in theirs)
                entries = rms(jnp.linalg.norm(of_diagonal.value - diagonal, axis=1) / size)
                numbers = f"{errors[0]:.2g}, {covered(of_trace, truth):.2f}, {errors[1]:.2g}"
                numbers += f", {errors[2]:.2g}, {matfree:.2g}, {entries:.2g}"
                shares = covered(of_diagonal, diagonal)
                print(f"{name}, {noise:g}, {form}, {k}, {numbers}, {shares:.2f}", flush=True)
    marginal_variances(budgets, keys)


if __name__ == "__main__":
    main()

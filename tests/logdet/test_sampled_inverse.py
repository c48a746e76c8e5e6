"""The diagonal of the inverse of sparse matrices by samples: the identity on the same signs, no
bias, errors, derivatives, what is not positive definite.
"""

import equinox as eqx
import jax
import jax.random as jr
import lineax as lx
import numpy as np
import scipy.sparse

import traceax as tr

from .. import reference
from ..helpers import PSD, drawn, over_keys

SIDE, K = 12, 60
N = SIDE**2
PROBES = 3  # isqrt(60) // 2


def precision(kappa, dtype=np.float64, side=SIDE):
    """Of a Markov random field on a torus, with phases if it is complex; rows of different size."""
    steps = np.roll(np.eye(side), 1, axis=0)
    if np.issubdtype(dtype, np.complexfloating):
        steps = steps * np.exp(0.7j)
    steps = steps + steps.conj().T
    identity = np.eye(side)
    matrix = (4 + kappa) * np.eye(side**2) - np.kron(steps, identity) - np.kron(identity, steps)
    scale = np.random.default_rng(0).uniform(0.5, 2, side**2)
    return (scale[:, None] * matrix * scale).astype(dtype)


def sparse(matrix):
    return tr.SparseLinearOperator(scipy.sparse.csr_array(matrix), PSD)


@eqx.filter_jit
def estimate(key, operator, k=K):
    return tr.inverse_diagonal(key, operator, k, fallback=None)


def test_the_identity_on_the_same_signs():
    """1 / D and the mean of |D^{-1/2} (M^{-1/2} - M^{1/2}) z|^2, where the recurrences converge;
    and the derivative, that of A^{-1} between samples.
    """
    dtype = np.complex128
    matrix, key = precision(2, dtype), jr.key(3)
    d = np.diag(matrix).real
    scaled = matrix / np.sqrt(d)[:, None] / np.sqrt(d)
    z = drawn(tr.RademacherSampler(), key, N, PROBES, dtype)
    assert set(np.unique(z)) == {-1.0, 1.0}
    root = reference.function_of(scaled, lambda values: values**-0.5)
    y = (root - np.linalg.inv(root)) @ z / np.sqrt(d)[:, None]
    mean = np.mean(np.abs(y) ** 2, axis=1)
    solution = estimate(key, sparse(matrix))
    assert solution.num_matvecs == K
    np.testing.assert_allclose(solution.value, 1 / d + mean, rtol=1e-6)
    np.testing.assert_allclose(solution.std_err, np.sqrt(2 / (PROBES + 2)) * mean, rtol=1e-6)
    # For a single sample given, y is the mean of x_i given all other entries.
    x = root @ z / np.sqrt(d)[:, None]
    np.testing.assert_allclose(y, x - matrix @ x / d[:, None], atol=1e-12)

    change = (1 + np.arange(N) / N)[:, None] * matrix
    change = change + change.conj().T
    operator = sparse(matrix)
    data = sparse(change).data

    def value(t):
        moved = sparse_like(operator, operator.data + t.astype(data.dtype) * data)
        return estimate(key, moved).value

    slope = jax.jit(jax.jacfwd(value))(np.zeros(()))
    truth = -np.mean((x.conj() * np.linalg.solve(matrix, change @ x)).real, axis=1)
    np.testing.assert_allclose(slope, truth, rtol=1e-5, atol=1e-8)


def sparse_like(operator, data):
    """The operator with other numbers in the same places."""
    return eqx.tree_at(lambda operator: operator.data, operator, data)


def test_no_bias_and_bars_that_cover():
    """300 keys: no mean is off by more than 4.5 standard errors (of 144 entries) and the stated
    quadrature error; intervals of 95 % hold the truth, and errors are as large as stated.
    """
    matrix = precision(0.05, np.float32)
    truth = np.diag(np.linalg.inv(matrix.astype(np.float64)))
    operator = sparse(matrix)

    def one(key):
        solution = estimate(key, operator)
        interval = solution.interval()
        return solution.value, solution.std_err, solution.quadrature_error, *interval

    value, std_err, error, lower, upper = (x.astype(float) for x in over_keys(300, one))
    off = value.mean(0) - truth
    scatter = value.std(0, ddof=1) / np.sqrt(len(value))
    assert np.all(np.abs(off) <= 4.5 * scatter + error.mean(0))
    ratio = np.mean((value - truth) ** 2) / np.mean(std_err**2 + error**2)
    assert 0.8 < ratio < 1.25
    assert np.mean((lower <= truth) & (truth <= upper)) > 0.94


def test_what_is_not_positive_definite():
    """An eigenvalue, or an entry of the diagonal, below 0: outside of the domain, and NaN."""
    matrix = precision(1)
    indefinite, negative = matrix - 6 * np.eye(N), matrix.copy()
    negative[3, 3] = -1.0
    assert np.linalg.eigvalsh(indefinite)[0] < 0
    for wrong in (indefinite, negative):
        solution = estimate(jr.key(0), sparse(wrong))
        assert solution.result == tr.RESULTS.outside_domain
        assert np.all(np.isnan(solution.value))
    matrix[3, 3] = np.nan
    assert estimate(jr.key(0), sparse(matrix)).result == tr.RESULTS.nonfinite_operator


def test_multiples_and_sums_with_diagonals():
    """c A + D knows its diagonal as well; and scaling A by c divides the result by c."""
    operator = sparse(precision(1))
    value = estimate(jr.key(0), operator).value
    for scale in (1e-30, 1e30):
        np.testing.assert_allclose(estimate(jr.key(0), scale * operator).value * scale, value)
    identity = lx.IdentityLinearOperator(operator.in_structure())
    added = estimate(jr.key(0), operator + 0.3 * identity).value
    stored = estimate(jr.key(0), sparse(precision(1) + 0.3 * np.eye(N))).value
    np.testing.assert_allclose(added, stored, rtol=1e-10)


def test_few_products_say_that_they_are_few():
    """Two samples: no entry is below 1 / D_i, and the intervals hold the truth."""
    matrix = precision(0.05)
    solution = estimate(jr.key(0), sparse(matrix), 2)
    lower, upper = solution.interval()
    truth = np.diag(np.linalg.inv(matrix))
    assert np.all(np.asarray(solution.value) >= 1 / np.diag(matrix))
    assert np.mean((np.asarray(lower) <= truth) & (truth <= np.asarray(upper))) > 0.9
    assert solution.num_matvecs <= 2
    assert solution.result == tr.RESULTS.not_converged

"""The exact log-determinant and the exact log density of a stored matrix, float64: the times over
those of the same written with `jnp.linalg.cholesky`, and of its derivative by XLA's own rule.

The kernel is squared exponential, with an amplitude, a length scale and a noise variance.
"""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tr

from .common import PSD, QUICK, compare

N, ROUNDS = (200, 2) if QUICK else (3000, 9)
VALUE, GRADIENT = "value over Cholesky's value", "value and gradient over Cholesky's value"
XLA = "Cholesky's value and gradient over its value"


def _problem():
    rng = np.random.default_rng(0)
    points, y = rng.normal(size=(N, 2)), rng.normal(size=N)
    squares = np.square(points[:, None] - points).sum(-1)
    return jnp.asarray(squares), jnp.asarray(y), jnp.asarray([1.3, 0.7, 0.1])


def _kernel(parameters, squares):
    amplitude, scale, noise = parameters
    return amplitude * jnp.exp(-scale * squares) + noise * jnp.eye(N)


def _functions(name, squares, y):
    """The value by traceax and by a Cholesky factorisation, as functions of the parameters."""
    key = jax.random.key(0)

    def ours(parameters):
        operator = lx.MatrixLinearOperator(_kernel(parameters, squares), PSD)
        if name == "logdet":
            return tr.logdet(key, operator, N).value
        return tr.gaussian_log_density(key, y, operator, N).value

    def theirs(parameters):
        factor = jnp.linalg.cholesky(_kernel(parameters, squares))
        logdet = 2 * jnp.sum(jnp.log(jnp.diag(factor)))
        if name == "logdet":
            return logdet
        z = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return -(z @ z + logdet + N * jnp.log(2 * jnp.pi)) / 2

    return ours, theirs


@pytest.mark.parametrize("name", ["logdet", "density"])
def test_exact(benchmark, name):
    with jax.enable_x64(True):
        squares, y, parameters = _problem()
        ours, theirs = _functions(name, squares, y)
        np.testing.assert_allclose(ours(parameters), theirs(parameters), rtol=1e-9)
        fns = [jax.jit(fn) for fn in (theirs, ours, jax.value_and_grad(ours))]
        fns.append(jax.jit(jax.value_and_grad(theirs)))
        base, value, gradient, slow = [lambda fn=fn: fn(parameters) for fn in fns]
        pairs = {VALUE: (value, base), GRADIENT: (gradient, base), XLA: (slow, base)}
        targets = {VALUE: 1.3, GRADIENT: 4.0}
        compare(benchmark, "exact, of a stored matrix", name, pairs, ROUNDS, targets)

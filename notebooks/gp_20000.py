# %% [markdown]
# # A Gaussian process of 20,000 points
#
# Its covariance matrix has 400 million entries: 1.6 GB in single precision, and a derivative of
# its Cholesky factorisation takes several times that. Here the matrix is never formed. A
# `KernelLinearOperator` evaluates a tile of it at a time, multiplies, and forgets the tile.
#
# Three hyperparameters are found from noisy observations, with their uncertainties, and then
# predictions with their variances, in minutes on two cores.

# %%
import os
import time

import jax
import jax.numpy as jnp
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np
import scipy.optimize

import traceax as tr

POINTS = int(os.environ.get("TRACEAX_NOTEBOOK_POINTS", "20_000"))
NAMES = "length", "amplitude", "noise"
TRUTH = np.array([0.3, 1.0, 0.01])

# %% [markdown]
# ## The data
#
# A draw from the process itself at points of the unit square: a sum of 20,000 waves, whose random
# frequencies have the spectral density of the Matern-5/2 kernel (Student's distribution with five
# degrees of freedom), and noise of variance 0.01.


# %%
rng = np.random.default_rng(0)
waves, phases = 20_000, rng.uniform(0, 2 * np.pi, 20_000)
frequencies = rng.standard_normal((2, waves)) / np.sqrt(rng.chisquare(5, waves) / 5) / TRUTH[0]


def field(points):
    parts = [np.cos(part @ frequencies + phases).sum(1) for part in np.array_split(points, 200)]
    return np.sqrt(2 * TRUTH[1] / waves) * np.concatenate(parts)


points = rng.uniform(size=(POINTS, 2))
observed = field(points) + np.sqrt(TRUTH[2]) * rng.standard_normal(POINTS)
x, y = jnp.asarray(points, jnp.float32), jnp.asarray(observed, jnp.float32)
print(f"{POINTS} observations, of standard deviation {observed.std():.2f}")

# %% [markdown]
# ## The log density
#
# `tr.gaussian_log_density` estimates it with its derivatives. Columns of a kernel cost next to
# nothing beside products, so that the preconditioner is made of 600 columns, and 100 products are
# enough. Which columns is decided once, and their values follow the hyperparameters: the log
# density is then a smooth function of them, with exactly the gradient that is returned, as an
# optimiser expects.


# %%
def matern(length, a, b):
    r = jnp.sqrt(jnp.maximum(5 * jnp.sum((a - b) ** 2), 1e-12)) / length
    return (1 + r + r**2 / 3) * jnp.exp(-r)


def covariance(theta, x):
    length, amplitude, noise = jnp.exp(theta)
    kernel = tr.KernelLinearOperator(lambda a, b: matern(length, a, b), x)
    return amplitude * kernel + noise * lx.IdentityLinearOperator(kernel.in_structure())


@jax.jit
def preconditioner(theta, x):
    rank = min(600, len(x) // 4)
    return tr.KernelPreconditioner(rank=rank).build(jax.random.key(1), covariance(theta, x))


@jax.jit
def solution_and_slope(theta, x, y, held):
    def value(theta):
        found = tr.gaussian_log_density(
            jax.random.key(0), y, covariance(theta, x), k=100, preconditioner=held
        )
        return found.value, found

    (_, found), slope = jax.value_and_grad(value, has_aux=True)(theta)
    return found, slope


# %% [markdown]
# ## A tenth of the points
#
# Few points tell where to begin with many. L-BFGS on the logarithms of the hyperparameters, from a
# guess that is wrong by factors of 2, 2 and 5; halfway the columns are chosen anew, for where
# the optimiser is.

# %%
theta, few = jnp.log(jnp.array([0.6, 0.5, 0.05])), (x[: POINTS // 10], y[: POINTS // 10])
for steps in (6, 12):
    held = preconditioner(theta, few[0])

    def loss(theta, held=held):
        found, slope = solution_and_slope(jnp.asarray(theta, jnp.float32), *few, held)
        return -float(found.value), -np.asarray(slope, np.float64)

    found = scipy.optimize.minimize(
        loss,
        theta,
        jac=True,
        method="L-BFGS-B",
        bounds=[(each - 1, each + 1) for each in theta],
        options={"maxiter": steps},
    )
    theta = jnp.asarray(found.x, jnp.float32)
    print(
        f"log density {-found.fun:8.1f} after {found.nfev} evaluations: {np.exp(found.x).round(4)}"
    )

# %% [markdown]
# ## All points
#
# From there a few steps of Newton's method, whose curvature comes from differences of gradients.
# (Values in single precision are rounded to tenths of a nat, too coarse for line searches near the
# maximum. Gradients are not differences of values.) The curvature also gives the uncertainty of
# the hyperparameters given the data.

# %%
start, step = time.perf_counter(), 0.1
for _ in range(3):
    held = preconditioner(theta, x)
    solution, slope = solution_and_slope(theta, x, y, held)
    rows = [
        solution_and_slope(theta + shift, x, y, held)[1]
        - solution_and_slope(theta - shift, x, y, held)[1]
        for shift in step * jnp.eye(3)
    ]
    curvature = -np.array(rows, np.float64) / (2 * step)
    inverse = np.linalg.inv((curvature + curvature.T) / 2)
    uncertainty, newton = np.sqrt(np.diag(inverse)), inverse @ np.asarray(slope, np.float64)
    print(f"log density {solution.value:.2f}, the next step in uncertainties:", end=" ")
    print(np.round(newton / uncertainty, 2))
    theta = theta + jnp.asarray(np.clip(newton, -0.5, 0.5), jnp.float32)

print(f"21 values with gradients in {(time.perf_counter() - start) / 60:.1f} minutes")
print(f"standard error of the log density {solution.std_err:.2f},", end=" ")
print(f"quadrature error at most {solution.quadrature_error:.2f}")
deviation = (theta - np.log(TRUTH)) / uncertainty
print(f"{'':>9}  {'found':>7} {'true':>6}  deviation in uncertainties")
for row in zip(NAMES, np.exp(theta), TRUTH, deviation, strict=True):
    print("{:>9}  {:7.4f} {:6.2f}  {:9.2f}".format(*row))

# %% [markdown]
# ## Predictions
#
# The preconditioner is a lineax operator: with it `lx.linear_solve` takes a few steps. The weights
# $A^{-1} y$ give the posterior mean, and one further solve for each new point its variance.

# %%
line = np.linspace(0, 1, 60)
new = np.stack([line, np.full_like(line, 0.5)], axis=1)


@jax.jit
def predict(theta, new, held):
    length, amplitude, _ = jnp.exp(theta)
    operator = lx.TaggedLinearOperator(covariance(theta, x), lx.positive_semidefinite_tag)
    solver, options = lx.CG(rtol=1e-5, atol=1e-5), {"preconditioner": held.inverse()}

    def one(point):
        column = amplitude * jax.vmap(lambda other: matern(length, point, other))(x)
        solved = lx.linear_solve(operator, column, solver, options=options).value
        return solved @ y, amplitude - column @ solved

    return jax.vmap(one)(new)


start = time.perf_counter()
found = predict(theta, jnp.asarray(new, jnp.float32), preconditioner(theta, x))
mean, variance = map(np.asarray, found)
print(f"{len(new)} predictions in {time.perf_counter() - start:.0f} s")
spread = np.sqrt(np.maximum(variance, 0))
actual = field(new)
near = np.abs(points[:, 1] - 0.5) < 0.005

plt.figure(figsize=(8, 3.6))
plt.plot(points[near, 0], observed[near], ".", ms=3, color="0.7", label="observed nearby")
plt.plot(line, actual, "k--", lw=1, label="true")
plt.plot(line, mean, "C0", lw=1, label="posterior mean")
plt.fill_between(line, mean - 2 * spread, mean + 2 * spread, color="C0", alpha=0.3, lw=0)
plt.xlabel("first coordinate, where the second is 0.5")
plt.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# The hyperparameters are as close to the true ones as their uncertainties say. (More points of
# the same square would not make length and amplitude much more certain: there is one field.) The
# last step was a fraction of them, and the band of two standard deviations holds the true field.

# %%
assert np.all(np.abs(deviation) < 4)
assert np.all(np.abs(newton / uncertainty) < 0.5)
assert np.mean(np.abs(mean - actual) < 2 * spread) > 0.8
assert 0 < spread.max() < 0.1

# %% [markdown]
# # A Gaussian process of 20,000 points
#
# Its covariance matrix has 400 million entries: 1.6 GB in single precision, and a derivative of
# its Cholesky factorisation takes several times that. Here the matrix is never formed. A
# `KernelLinearOperator` evaluates a tile of it at a time, multiplies, and forgets the tile.
#
# Three hyperparameters of a smooth field and of a rough one are found from noisy observations,
# with their uncertainties, and then predictions with their variances, in minutes on two cores.

# %%
import os
import time
from functools import partial

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
# Draws from the processes themselves at points of the unit square: sums of 20,000 waves, whose
# random frequencies have the spectral density of a Matern kernel (Student's distribution with
# five degrees of freedom for Matern-5/2, with one for Matern-1/2), and noise of variance 0.01.


# %%
def waves(seed, degrees):
    rng = np.random.default_rng(seed)
    frequencies = rng.standard_normal((2, 20_000)) / np.sqrt(
        rng.chisquare(degrees, 20_000) / degrees
    )
    return frequencies / TRUTH[0], rng.uniform(0, 2 * np.pi, 20_000)


def field(points, frequencies, phases):
    parts = [np.cos(part @ frequencies + phases).sum(1) for part in np.array_split(points, 200)]
    return np.sqrt(2 * TRUTH[1] / 20_000) * np.concatenate(parts)


rng = np.random.default_rng(0)
points = rng.uniform(size=(POINTS, 2))
smooth, rough = waves(1, 5), waves(2, 1)
noise = np.sqrt(TRUTH[2]) * rng.standard_normal(POINTS)
x = jnp.asarray(points, jnp.float32)
y, y_rough = (jnp.asarray(field(points, *each) + noise, jnp.float32) for each in (smooth, rough))
print(f"{POINTS} observations, of standard deviation {y.std():.2f} and {y_rough.std():.2f}")

# %% [markdown]
# ## The log density
#
# `tr.gaussian_log_density` estimates it with its derivatives, from 100 products. Columns of a
# kernel cost next to nothing beside products: the preconditioner is made of them, and of the
# nearest neighbours of each point, for what a few hundred columns leave out. Which columns and
# neighbours is decided once, and their values follow the hyperparameters: the log density is then
# a smooth function of them, with exactly the gradient that is returned, as an optimiser expects.


# %%
def distance(length, a, b):
    return jnp.sqrt(jnp.maximum(jnp.sum((a - b) ** 2), 1e-12)) / length


def matern52(length, a, b):
    r = np.sqrt(5) * distance(length, a, b)
    return (1 + r + r**2 / 3) * jnp.exp(-r)


def matern12(length, a, b):
    return jnp.exp(-distance(length, a, b))


def covariance(matern, theta, x):
    length, amplitude, noise = jnp.exp(theta)
    kernel = tr.KernelLinearOperator(lambda a, b: matern(length, a, b), x)
    return amplitude * kernel + noise * lx.IdentityLinearOperator(kernel.in_structure())


@partial(jax.jit, static_argnums=0)
def preconditioner(matern, theta, x):
    return tr.KernelPreconditioner().build(jax.random.key(1), covariance(matern, theta, x))


@partial(jax.jit, static_argnums=0)
def solution_and_slope(matern, theta, x, y, held):
    def value(theta):
        found = tr.gaussian_log_density(
            jax.random.key(0), y, covariance(matern, theta, x), k=100, preconditioner=held
        )
        return found.value, found

    (_, found), slope = jax.value_and_grad(value, has_aux=True)(theta)
    return found, slope


# %% [markdown]
# ## A tenth of the points
#
# Few points tell where to begin with many. L-BFGS on the logarithms of the hyperparameters, from a
# guess that is wrong by factors of 2, 2 and 5; halfway columns and neighbours are chosen anew, for
# where the optimiser is.


# %%
def start_from(matern, x, y):
    theta = jnp.log(jnp.array([0.6, 0.5, 0.05]))
    for steps in (6, 12):
        held = preconditioner(matern, theta, x)

        def loss(theta, held=held):
            theta = jnp.asarray(theta, jnp.float32)
            found, slope = solution_and_slope(matern, theta, x, y, held)
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
        print(f"log density {-found.fun:8.1f} after {found.nfev} evaluations:", end=" ")
        print(np.exp(found.x).round(4))
    return theta


few = POINTS // 10
theta = start_from(matern52, x[:few], y[:few])

# %% [markdown]
# ## All points
#
# From there a few steps of Newton's method, whose curvature comes from differences of gradients.
# (Values in single precision are rounded to tenths of a nat, too coarse for line searches near the
# maximum. Gradients are not differences of values.) The curvature also gives the uncertainty of
# the hyperparameters given the data.


# %%
def newton(matern, theta, x, y):
    start, step = time.perf_counter(), 0.1
    for _ in range(3):
        held = preconditioner(matern, theta, x)
        solution, slope = solution_and_slope(matern, theta, x, y, held)
        rows = [
            solution_and_slope(matern, theta + shift, x, y, held)[1]
            - solution_and_slope(matern, theta - shift, x, y, held)[1]
            for shift in step * jnp.eye(3)
        ]
        curvature = -np.array(rows, np.float64) / (2 * step)
        inverse = np.linalg.inv((curvature + curvature.T) / 2)
        uncertainty, change = np.sqrt(np.diag(inverse)), inverse @ np.asarray(slope, np.float64)
        print(f"log density {solution.value:.2f}, the next step in uncertainties:", end=" ")
        print(np.round(change / uncertainty, 2))
        theta = theta + jnp.asarray(np.clip(change, -0.5, 0.5), jnp.float32)

    print(f"21 values with gradients in {(time.perf_counter() - start) / 60:.1f} minutes")
    print(f"standard error of the log density {solution.std_err:.2f},", end=" ")
    print(f"quadrature error at most {solution.quadrature_error:.2f}")
    deviation = (theta - np.log(TRUTH)) / uncertainty
    print(f"{'':>9}  {'found':>7} {'true':>6}  deviation in uncertainties")
    for row in zip(NAMES, np.exp(theta), TRUTH, deviation, strict=True):
        print("{:>9}  {:7.4f} {:6.2f}  {:9.2f}".format(*row))
    return theta, deviation, change / uncertainty


theta, deviation, last = newton(matern52, theta, x, y)

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
    operator = lx.TaggedLinearOperator(covariance(matern52, theta, x), lx.positive_semidefinite_tag)
    solver, options = lx.CG(rtol=1e-5, atol=1e-5), {"preconditioner": held.inverse()}

    def one(point):
        column = amplitude * jax.vmap(lambda other: matern52(length, point, other))(x)
        solved = lx.linear_solve(operator, column, solver, options=options).value
        return solved @ y, amplitude - column @ solved

    return jax.vmap(one)(new)


start = time.perf_counter()
found = predict(theta, jnp.asarray(new, jnp.float32), preconditioner(matern52, theta, x))
mean, variance = map(np.asarray, found)
print(f"{len(new)} predictions in {time.perf_counter() - start:.0f} s")
spread = np.sqrt(np.maximum(variance, 0))
actual = field(new, *smooth)
near = np.abs(points[:, 1] - 0.5) < 0.005

plt.figure(figsize=(8, 3.6))
plt.plot(points[near, 0], y[near], ".", ms=3, color="0.7", label="observed nearby")
plt.plot(line, actual, "k--", lw=1, label="true")
plt.plot(line, mean, "C0", lw=1, label="posterior mean")
band = mean - 2 * spread, mean + 2 * spread
plt.fill_between(line, *band, color="C0", alpha=0.3, lw=0, label="two standard deviations")
plt.xlabel("first coordinate, where the second is 0.5")
plt.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# The hyperparameters are as close to the true ones as their uncertainties say. (More points of
# the same square would not make length and amplitude much more certain: there is one field.) The
# last step was a fraction of them, and the band of two standard deviations holds the true field at
# nearly all points.

# %%
assert np.all(np.abs(deviation) < 4)
assert np.all(np.abs(last) < 0.5)
assert np.mean(np.abs(mean - actual) < 2 * spread) > 0.8
assert 0 < spread.max() < 0.1

# %% [markdown]
# ## A rough field
#
# A Matern-1/2 kernel has no low rank: its eigenvalues fall off too slowly for any number of
# columns. What columns leave out is short in range, and the neighbours of each point take it up.
# Everything else is as above.

# %%
theta = jnp.log(jnp.asarray(TRUTH, jnp.float32))
operator = covariance(matern12, theta, x)
for neighbours in (1, 24):
    given = tr.KernelPreconditioner(neighbours=neighbours)
    key = jax.random.key(0)
    found = tr.gaussian_log_density(
        key, y_rough, operator, 100, preconditioner=given, fallback=None
    )
    print(
        f"{neighbours:2} neighbours: {found.value:.1f}, standard error {found.std_err:.2f},",
        end=" ",
    )
    print(f"quadrature error at most {found.quadrature_error:.2f}")

theta, deviation, last = newton(matern12, start_from(matern12, x[:few], y_rough[:few]), x, y_rough)

# %% [markdown]
# ## What was claimed
#
# That of the smooth field stands above; the same holds for the rough one.

# %%
assert np.all(np.abs(deviation) < 4)
assert np.all(np.abs(last) < 0.5)
print("All of it holds.")

# %% [markdown]
# # Quick start on a power network
#
# The matrix `1138_bus` describes a network of power lines: 1138 nodes, and a number for each line
# between two of them. It is sparse, positive definite, and small enough to know every answer
# exactly. So it is a good place to see what traceax estimates from products $A v$ alone, and how
# far its error bars can be trusted. The same calls work where nothing can be computed exactly.

# %%
from importlib.resources import files

import jax
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np
import scipy.io

import traceax as tr

jax.config.update("jax_enable_x64", True)

matrix = scipy.io.mmread(files("traceax") / "data/1138_bus.mtx", spmatrix=False)
stored = tr.SparseLinearOperator(matrix)
operator = lx.FunctionLinearOperator(stored.mv, stored.in_structure(), lx.positive_semidefinite_tag)
eigenvalues = np.linalg.eigvalsh(matrix.toarray())  # for comparison only
print(f"{matrix.shape[0]} rows, {matrix.nnz} entries")
print(f"eigenvalues from {eigenvalues[0]:.4f} to {eigenvalues[-1]:.0f}")

# %% [markdown]
# The trace of `stored` would be read from its entries, exactly. `operator` is known by its products
# alone, as matrices are that are too large to store.
#
# The tag says that the matrix is positive semidefinite. It is worth giving: half the products
# suffice then.
#
# ## The trace, for a budget
#
# `k` is the number of products with the matrix.

# %%
key = jax.random.key(0)
exact = eigenvalues.sum()

trace = tr.trace(key, operator, k=200)
low, high = trace.interval(0.95)
print(f"estimate {trace.value:.0f} +- {trace.std_err:.0f}")
print(f"95 % interval {low:.0f} to {high:.0f}, exactly {exact:.0f}")
print("result:", "successful" if trace.result == tr.RESULTS.successful else "not to be trusted")

# %% [markdown]
# ## Which estimator?
#
# By default traceax chooses: here XNysTrace, because of the tag. Hutchinson's estimator, the
# oldest, takes the mean of $\omega^\top A \omega$ over vectors $\omega$ of random signs.
# XNysTrace finds the large eigenvalues as it goes, and leaves only the rest to chance. The bars
# are 95 % intervals.

# %%
budgets = (50, 100, 200)
hutchinson = [tr.trace(key, operator, k, tr.HutchinsonEstimator()) for k in budgets]
xnystrace = [tr.trace(key, operator, k) for k in budgets]

figure, axes = plt.subplots(figsize=(7, 3.5))
shown = {f"Hutchinson, k = {k}": one for k, one in zip(budgets, hutchinson, strict=True)}
shown |= {f"XNysTrace, k = {k}": one for k, one in zip(budgets, xnystrace, strict=True)}
tr.plot.interval(shown, truth=exact, axes=axes)
plt.show()

large = eigenvalues > 10_000
print(f"{large.sum()} eigenvalues make {eigenvalues[large].sum() / exact:.0%} of the trace")
for k, one, other in zip(budgets, hutchinson, xnystrace, strict=True):
    print(f"{k} products: standard errors {one.std_err:.0f} and {other.std_err:.0f}")

# %% [markdown]
# Fifty products barely find the 41 large eigenvalues, and little is gained yet. From 50 to 200
# products Hutchinson's standard error is halved, as theory says; that of XNysTrace falls by a
# factor of 13. More on that in [choosing an estimator](../docs/choosing.md).
#
# ## An accuracy instead of a budget
#
# Say the relative error that you can live with. Samples are drawn until it is reached, in 95 % of
# calls. Here without the tag, so that XTrace is chosen: it spends two products where
# XNysTrace spends one, and assumes nothing of the matrix.

# %%
untagged = lx.FunctionLinearOperator(stored.mv, stored.in_structure())
accurate = tr.trace(key, untagged, rtol=1e-2)
plain = tr.trace(key, untagged, rtol=1e-2, estimator=tr.HutchinsonEstimator())
for name, solution in {"XTrace": accurate, "Hutchinson": plain}.items():
    error = abs(solution.value / exact - 1)
    print(f"{name}: {solution.num_matvecs} products, relative error {error:.4f}")

# %% [markdown]
# ## The diagonal
#
# Every entry has its own error bar. About 95 % of the entries should be within two of them.

# %%
diagonal = tr.diagonal(key, operator, k=200)
entries = matrix.diagonal()
inside = np.abs(diagonal.value - entries) < 2 * diagonal.std_err
print(f"relative error {np.linalg.norm(diagonal.value - entries) / np.linalg.norm(entries):.4f}")
print(f"within two standard errors: {np.mean(inside):.1%}")

# %% [markdown]
# ## The density of the eigenvalues
#
# Each eigenvalue becomes a Gaussian bell of width 25; the density is their mean. Two probes with
# 150 steps of Lanczos' recurrence each show its shape below 500.

# %%
width, grid = 25.0, np.linspace(0, 500, 200)
density = tr.spectral_density(key, operator, k=300, grid=grid, width=width, num_steps=150)
bells = np.exp(-0.5 * ((grid[:, None] - eigenvalues) / width) ** 2)
exact_density = np.mean(bells, axis=1) / (width * np.sqrt(2 * np.pi))

figure, axes = plt.subplots(figsize=(7, 3.5))
tr.plot.spectral_density(grid, density, exact=exact_density, axes=axes)
plt.show()

missed = np.abs(density.value - exact_density) / density.std_err
print(f"{np.mean(eigenvalues < 500):.0%} of the eigenvalues are below 500")
print(f"quadrature error at most {np.max(density.quadrature_error):.0e}")
print(f"largest deviation: {missed.max():.1f} standard errors")

# %% [markdown]
# ## The log-determinant and its derivative
#
# If $A + s I$ is the precision matrix of a Gaussian, its density needs $\log\det(A + s I)$. The
# derivative by $s$ is $\mathrm{tr}\,(A + s I)^{-1}$. Nothing is factorised. There are two errors:
# `std_err`, that of the random probes, and `quadrature_error`, an estimate of what ending Lanczos'
# recurrence early leaves out.
#
# Eight keys test the error bar: the scatter of the values should be the standard error.

# %%
identity = lx.IdentityLinearOperator(operator.in_structure())


def log_det(s, key):
    solution = tr.logdet(key, operator + s * identity, k=300, preconditioner=None)
    return solution.value, solution


s = 10.0
runs = [jax.value_and_grad(log_det, has_aux=True)(s, key) for key in jax.random.split(key, 8)]
values = np.array([value for (value, _), _ in runs])
slopes = np.array([slope for _, slope in runs])
std_err = np.sqrt(np.mean([solution.std_err**2 for (_, solution), _ in runs]))
quadrature_error = max(solution.quadrature_error for (_, solution), _ in runs)
slope_err = slopes.std(ddof=1) / np.sqrt(8)
exact_log_det, exact_slope = np.sum(np.log(eigenvalues + s)), np.sum(1 / (eigenvalues + s))
print("log-determinants", *(f"{value:.0f}" for value in values), f"exactly {exact_log_det:.0f}")
print(f"their scatter {values.std(ddof=1):.0f}, standard error {std_err:.0f}")
print(f"quadrature error at most {quadrature_error:.1f}")
print(
    f"derivative, mean of eight: {slopes.mean():.2f} +- {slope_err:.2f}, exactly {exact_slope:.2f}"
)

# %% [markdown]
# The log-determinant is known to one percent from one key, and the derivative to two. For kernel
# matrices, whose spectrum decays, a preconditioner makes both far more accurate: see
# [log-determinants](../docs/logdet.md), and [a Gaussian process for the CO2
# record](gp_co2.ipynb).
#
# ## What was claimed

# %%
# The interval of the trace holds; no estimate is more than three of its standard errors off.
assert trace.result == tr.RESULTS.successful
assert low < exact < high
for solution in hutchinson + xnystrace:
    assert abs(solution.value - exact) < 3 * solution.std_err
# From 50 to 200 products, Hutchinson's error is halved (a bar from 50 samples is itself known to
# 10 %), and that of XNysTrace falls by far more.
assert 1.4 < hutchinson[0].std_err / hutchinson[2].std_err < 2.6
assert xnystrace[0].std_err / xnystrace[2].std_err > 6
# Both reach the accuracy, XTrace with less than half of the products.
assert accurate.result == plain.result == tr.RESULTS.successful
assert max(abs(accurate.value / exact - 1), abs(plain.value / exact - 1)) < 1e-2
assert 2 * accurate.num_matvecs < plain.num_matvecs
# The standard deviation of a share of 95 % of 1138 entries is 0.65 %.
assert abs(np.mean(inside) - 0.95) < 4 * 0.0065
assert np.all(missed < 4)  # the largest of many
# Each log-determinant is within three of its errors, their scatter within the limits (99 %) of
# the chi distribution with 7 degrees of freedom, their derivative within those of Student's.
for (value, solution), _ in runs:
    assert abs(value - exact_log_det) < 3 * solution.std_err + solution.quadrature_error
assert 0.38 < values.std(ddof=1) / std_err < 1.70
assert abs(slopes.mean() - exact_slope) < 3.5 * slope_err
assert 3.5 * slope_err < 0.05 * exact_slope
print("All of it holds.")

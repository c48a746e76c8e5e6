"""Posteriors of hyperparameters by NUTS: from estimates, and from exact log densities.

    python -m benchmarks.bench_nuts              # n = 2000; half an hour; needs NumPyro
    python -m benchmarks.bench_nuts 500 --kernels RBF

Kernels in two dimensions, y drawn from the distribution itself, noise 0.01, wide priors for the
length scale, the amplitude and the noise. float64. For each density: seconds of a value with its
gradient, how many of these the chain took and its seconds without compilation, divergent steps, and
the mean and the standard deviation of each logarithm. The estimates have a fixed key.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import initialize_model

import traceax as tr

from .bench_fits import covariance, drawn
from .common import medians
from .gaussian_process_cases import kernels


def estimated(y, operator):
    """The log density from 100 products."""
    return tr.gaussian_log_density(jax.random.key(0), y, operator, k=100).value


def exact(y, operator):
    """The log density as NumPyro has it, by a Cholesky factorisation."""
    return dist.MultivariateNormal(jnp.zeros(y.size), operator.as_matrix()).log_prob(y)


def sampled(log_density, problem, draws, warmup):
    """Seconds of a gradient, then of one chain: gradients, seconds, divergent steps, the draws."""
    kernel, x, y, start = problem

    def model():
        wide = dist.Normal(jnp.asarray(start), 1.5).to_event(1)
        theta = numpyro.sample("theta", wide)
        numpyro.factor("y", log_density(y, covariance(kernel, theta, x)))

    strategy = numpyro.infer.init_to_value(values={"theta": start})
    at_start = initialize_model(jax.random.key(1), model, init_strategy=strategy)
    gradient = jax.jit(jax.value_and_grad(at_start.potential_fn))
    (seconds,) = medians((lambda: gradient(at_start.param_info.z),), 5)

    nuts = numpyro.infer.NUTS(model, init_strategy=strategy)
    mcmc = numpyro.infer.MCMC(nuts, num_warmup=warmup, num_samples=draws, progress_bar=False)
    fields = ("num_steps", "diverging")
    mcmc.warmup(jax.random.key(2), extra_fields=fields)
    jax.block_until_ready(mcmc.post_warmup_state)
    before = time.perf_counter()
    mcmc.run(jax.random.key(3), extra_fields=fields)
    theta = np.asarray(mcmc.get_samples()["theta"])
    taken = time.perf_counter() - before
    steps, divergent = (int(mcmc.get_extra_fields()[name].sum()) for name in fields)
    return seconds, steps, taken, divergent, theta


def main():
    parser = argparse.ArgumentParser(description="NUTS")
    parser.add_argument("n", type=int, nargs="?", default=2000)
    names = list(kernels(np))
    parser.add_argument("--kernels", nargs="+", choices=names, default=["RBF", "Matern-5/2"])
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=40)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print("case, seconds of a gradient, gradients, seconds, divergent, means, deviations")
    for name in options.kernels:
        problem = drawn(name, 2, options.n)
        for density in (estimated, exact):
            found = sampled(density, problem, options.draws, options.warmup)
            seconds, steps, taken, divergent, theta = found
            moments = zip(theta.mean(0), theta.std(0), strict=True)
            posterior = ", ".join(f"{mean:.3f} +- {deviation:.3f}" for mean, deviation in moments)
            numbers = f"{seconds:.3f}, {steps}, {taken:.0f}, {divergent}, {posterior}"
            print(f"{name}, {density.__name__}: {numbers}", flush=True)


if __name__ == "__main__":
    main()

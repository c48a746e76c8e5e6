"""Posteriors of hyperparameters by NUTS: from estimates, and from exact log densities.

    python -m benchmarks.bench_nuts              # n = 2000; a quarter of an hour; needs NumPyro
    python -m benchmarks.bench_nuts 500 --kernels RBF

A kernel in two dimensions, y drawn from the distribution itself, noise 0.01, wide priors for the
length scale, the amplitude and the noise. float64. For each density: seconds of a value with its
gradient, how many the sampler took and its seconds without compilation, divergent steps, and the
mean and the standard deviation of each logarithm. The estimates have a fixed key.
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


def cholesky_density(y, operator):
    """The log density as one writes it by hand."""
    return dist.MultivariateNormal(jnp.zeros(y.size), operator.as_matrix()).log_prob(y)


def sampled(log_density, start, draws, warmup):
    """Gradients taken, seconds, divergent steps and the draws of NUTS with one chain."""

    def model():
        wide = dist.Normal(jnp.asarray(start), 1.5).to_event(1)
        numpyro.factor("y", log_density(numpyro.sample("theta", wide)))

    strategy = numpyro.infer.init_to_value(values={"theta": start})
    found = initialize_model(jax.random.key(1), model, init_strategy=strategy)
    gradient = jax.jit(jax.value_and_grad(found.potential_fn))
    (seconds,) = medians((lambda: gradient(found.param_info.z),), 5)
    nuts = numpyro.infer.NUTS(model, init_strategy=strategy)
    mcmc = numpyro.infer.MCMC(nuts, num_warmup=warmup, num_samples=draws, progress_bar=False)
    fields = ("diverging", "num_steps")
    mcmc.warmup(jax.random.key(2), extra_fields=fields)
    jax.block_until_ready(mcmc.post_warmup_state)
    before = time.perf_counter()
    mcmc.run(jax.random.key(3), extra_fields=fields)
    theta = np.asarray(mcmc.get_samples()["theta"])
    taken = time.perf_counter() - before
    found = mcmc.get_extra_fields()
    steps, divergent = (int(found[name].sum()) for name in ("num_steps", "diverging"))
    return seconds, steps, taken, divergent, theta


def main():
    parser = argparse.ArgumentParser(description="NUTS")
    parser.add_argument("n", type=int, nargs="?", default=2000)
    parser.add_argument("--kernels", nargs="+", choices=list(kernels(np)), default=["RBF"])
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=50)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print("case, seconds of a gradient, gradients, seconds, divergent, means, deviations")
    for name in options.kernels:
        kernel, x, y, start = drawn(name, 2, options.n)

        def estimated(theta, kernel=kernel, x=x, y=y):
            return tr.gaussian_log_density(
                jax.random.key(0), y, covariance(kernel, theta, x), k=100
            ).value

        def exact(theta, kernel=kernel, x=x, y=y):
            return cholesky_density(y, covariance(kernel, theta, x))

        for label, density in (("estimates", estimated), ("Cholesky", exact)):
            seconds, steps, taken, divergent, theta = sampled(
                density, start, options.draws, options.warmup
            )
            means = ", ".join(
                f"{m:.3f} +- {s:.3f}" for m, s in zip(theta.mean(0), theta.std(0), strict=True)
            )
            print(
                f"{name}, {label}: {seconds:.3f}, {steps}, {taken:.0f}, {divergent}, {means}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""What GPyTorch finds for the cases of `gaussian_processes.py`, in an environment of its own.

    torch-env/bin/python benchmarks/gaussian_processes_torch.py --sizes 1000 2000 5000

The log density is that of `ExactMarginalLogLikelihood` in training mode, by conjugate gradients and
stochastic Lanczos quadrature: with the default settings (10 probes, 20 steps, a preconditioner of
rank 15 from n = 2000 on, a loose tolerance of the solve), and with those of `TUNED`. It knows
nothing of JAX.
"""

import contextlib
import statistics
import time

import gaussian_process_cases as cases
import gpytorch
import torch
from gpytorch import settings


def tuned():
    stack = contextlib.ExitStack()
    for setting in (
        settings.max_preconditioner_size(100),
        settings.min_preconditioning_size(1),
        settings.num_trace_samples(30),
        settings.max_lanczos_quadrature_iterations(60),
        settings.cg_tolerance(0.01),
        settings.max_cg_iterations(1000),
    ):
        stack.enter_context(setting)
    return stack


METHODS = {
    "gpytorch": (contextlib.nullcontext, False),
    "gpytorch, tuned": (tuned, False),
    "gpytorch, gradient": (contextlib.nullcontext, True),
    "gpytorch, tuned, gradient": (tuned, True),
}


class Process(gpytorch.models.ExactGP):
    """A Gaussian process with the hyperparameters of a case."""

    def __init__(self, name, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        if name.startswith("RBF"):
            kernel = gpytorch.kernels.RBFKernel()
        else:
            kernel = gpytorch.kernels.MaternKernel(nu=int(name[-3]) / 2)
        kernel.lengthscale = cases.CASES[name][1]
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel)
        self.covar_module.outputscale = cases.AMPLITUDE

    def forward(self, x):
        """The prior at these points."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def measure(name, n, methods):
    truth = cases.true_values(name, n)
    x, y = map(torch.tensor, cases.problem(name, n))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = cases.NOISE
    model = Process(name, x, y, likelihood).train()
    density = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    times, values = ({method: [] for method in methods} for _ in range(2))
    for seed in range(-1 if n <= 5000 else 0, cases.rounds(n)):  # a first call is not counted
        for method in methods:
            context, gradient = METHODS[method]
            torch.manual_seed(abs(seed))
            start, cpu = time.perf_counter(), time.process_time()
            with context(), torch.set_grad_enabled(gradient):
                value = n * density(model(x), y)
                if gradient:
                    model.zero_grad()
                    value.backward()
            if seed >= 0:
                times[method].append((time.perf_counter() - start, time.process_time() - cpu))
                values[method].append(float(value.detach()))
    cell = {}
    for method in methods:
        row = cell[method] = {
            "seconds": statistics.median(wall for wall, _ in times[method]),
            "CPU seconds": statistics.median(cpu for _, cpu in times[method]),
            "value": values[method],
        }
        if truth is not None:
            row["nats"] = cases.rms(values[method], truth[0])
        print(name, n, method, row, flush=True)
    cases.save(name, n, cell)


def main():
    options = cases.arguments(__doc__, METHODS)
    for n in options.sizes:
        for name in options.kernels:
            measure(name, n, options.methods)


if __name__ == "__main__":
    main()

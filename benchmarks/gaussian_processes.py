"""Log densities of Gaussian processes: seconds and nats, beside Cholesky, matfree and GPyTorch.

    python -m benchmarks.gaussian_processes --sizes 1000 2000 5000     # adds these cells
    torch-env/bin/python benchmarks/gaussian_processes_torch.py --sizes 1000 2000 5000
    python -m benchmarks.gaussian_processes                            # the tables and the picture

Five kernels on points that are uniform on the unit square (or cube), noise variance 0.01, float32;
the derivative is that with respect to length scale, amplitude and noise. Seconds are medians over
keys, in turns, after compilation and a first call (up to n = 10,000); one call above. Nats are root
mean square errors over these keys of the log density, against Cholesky in float64, or of half the
log-determinant for matfree. Cells add up in `benchmarks/results/gaussian_processes.json`; the
picture is `docs/images/gaussian_processes.png`.
"""

import resource
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tr

from . import gaussian_process_cases as cases, matfree_peer

K, STEPS, PRODUCTS = 100, 60, 600
PICTURE = Path(__file__).parent.parent / "docs/images/gaussian_processes.png"


#: The lines of the tables and of the picture.
LINES = (
    "cholesky", "traceax, k = 100", "matfree", "gpytorch", "gpytorch, tuned"
)  # fmt: skip
#: What is compared: other programs that take the machine's cores do not count.
TIME = "CPU seconds"


def kernel_operator(name, theta, x):
    kernel = cases.kernel_of(jnp, name)
    return tr.KernelLinearOperator(lambda a, b: kernel(jnp.sum((a - b) ** 2) / theta[0] ** 2), x)


def estimated(name, **accuracy):
    def value(theta, key, x, y):
        operator = kernel_operator(name, theta, x)
        noise = theta[2] * lx.IdentityLinearOperator(operator.in_structure())
        solution = tr.gaussian_log_density(key, y, theta[1] * operator + noise, **accuracy)
        numbers = solution.std_err, solution.quadrature_error, solution.num_matvecs
        return solution.value, (*numbers, solution.result == tr.RESULTS.successful)

    return value


def cholesky(name):
    def value(theta, key, x, y):
        matrix = theta[1] * kernel_operator(name, theta, x).as_matrix()
        factor = jnp.linalg.cholesky(matrix + theta[2] * jnp.eye(len(y), dtype=y.dtype))
        z = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        half_log_det = jnp.sum(jnp.log(jnp.diagonal(factor)))
        return -(z @ z + len(y) * jnp.log(2 * jnp.pi)) / 2 - half_log_det, ()

    return value


def quadrature(name):
    def value(theta, key, x, y):
        def product(v, theta, x):
            return theta[1] * kernel_operator(name, theta, x).mv(v) + theta[2] * v

        return matfree_peer.logdet(y, PRODUCTS, STEPS)(product, key, theta, x) / 2, ()

    return value


def with_gradient(make):
    return lambda name: jax.value_and_grad(make(name), has_aux=True)


def to_budget(name):
    return estimated(name, k=K)


METHODS = {
    "cholesky": cholesky,
    "traceax, k = 100": to_budget,
    "matfree": quadrature,
    "cholesky, gradient": with_gradient(cholesky),
    "traceax, k = 100, gradient": with_gradient(to_budget),
}


def measure(name, n, methods):
    """One cell of the table: these methods, in turns."""
    truth = cases.true_values(name, n)
    x, y = map(jnp.asarray, cases.problem(name, n))
    theta = jnp.array([cases.CASES[name][1], cases.AMPLITUDE, cases.NOISE], jnp.float32)
    keys = jax.random.split(jax.random.key(0), cases.rounds(n))
    programs, compiled = {}, {}
    for method in methods:
        start = time.perf_counter()
        programs[method] = jax.jit(METHODS[method](name)).lower(theta, keys[0], x, y).compile()
        compiled[method] = time.perf_counter() - start
        if n <= 5000:
            jax.block_until_ready(programs[method](theta, keys[0], x, y))
    times = {method: [] for method in methods}
    found = {method: [] for method in methods}
    peaks = {}
    for key in keys:
        for method, program in programs.items():
            time.sleep(0.05)  # threads of OpenBLAS
            start, cpu = time.perf_counter(), time.process_time()
            found[method].append(jax.block_until_ready(program(theta, key, x, y)))
            times[method].append((time.perf_counter() - start, time.process_time() - cpu))
            peaks[method] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    cell = {}
    for method in methods:
        gradient = method.endswith("gradient")
        results = jax.device_get([each[0] if gradient else each for each in found[method]])
        row = cell[method] = {
            "seconds": statistics.median(wall for wall, _ in times[method]),
            "CPU seconds": statistics.median(cpu for _, cpu in times[method]),
            "compile": compiled[method],
            "value": [float(value) for value, _ in results],
            # Of the process so far.
            "peak GiB": peaks[method],
        }
        if truth is not None:
            target = truth[1] / 2 if method == "matfree" else truth[0]
            row["nats"] = cases.rms(row["value"], target)
        if results[0][1]:
            stated = np.array([aux for _, aux in results], float)
            names = "std_err", "quadrature error", "products", "converged"
            row |= dict(zip(names, stated.mean(axis=0).tolist(), strict=True))
        print(name, n, method, row, flush=True)
    cases.save(name, n, cell)


def shown(number):
    return "" if number is None else f"{number:.2g}" if number < 100 else f"{number:.0f}"


def table(found, methods):
    """Markdown: CPU seconds and, in brackets, nats. An empty cell was not measured."""
    lines = ["| kernel, n | " + " | ".join(methods) + " |", "| --- " * (len(methods) + 1) + "|"]

    def text(row):
        nats = f" ({shown(row['nats'])})" if "nats" in row else ""
        return shown(row[TIME]) + nats if TIME in row else ""

    for name in cases.CASES:
        for n, cell in sorted(found.get(name, {}).items(), key=lambda item: int(item[0])):
            rows = [text(cell.get(method, {})) for method in methods]
            if any(rows):
                lines.append(f"| {name}, {int(n):,} | " + " | ".join(rows) + " |")
    return "\n".join(lines) + "\n"


def crossing(cells, mine, theirs):
    """From which n on the first method takes less time than the second: between the last two
    sizes where that changes both times follow powers of n. None if it is never measured so.
    """
    timed = {
        n: {m: row[TIME] for m, row in cell.items() if TIME in row} for n, cell in cells.items()
    }
    sizes = [n for n in sorted(map(int, cells)) if {mine, theirs} <= set(timed[str(n)])]
    logs = [np.log(timed[str(n)][mine] / timed[str(n)][theirs]) for n in sizes]
    if not logs or logs[-1] > 0:
        return None
    slower = [i for i, each in enumerate(logs) if each > 0]
    if not slower:
        return f"below {sizes[0]:,}"
    i = slower[-1]
    share = logs[i] / (logs[i] - logs[i + 1])
    return f"{np.exp(np.log(sizes[i]) + share * np.log(sizes[i + 1] / sizes[i])):,.0f}"


def crossings(found):
    pairs = [("traceax, k = 100", "cholesky")]
    pairs.append(("traceax, k = 100, gradient", "cholesky, gradient"))
    lines = ["| kernel | " + " | ".join(mine for mine, _ in pairs) + " |"]
    lines.append("| --- " * (len(pairs) + 1) + "|")
    for name in cases.CASES:
        found_here = [crossing(found.get(name, {}), *pair) or "" for pair in pairs]
        lines.append(f"| {name} | " + " | ".join(found_here) + " |")
    return "\n".join(lines)


def draw(found, name="Matern-5/2"):
    """Seconds over n for one kernel: values, and with gradients."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    sizes = sorted(found[name], key=int)
    for axis, gradient in zip(axes, ("", ", gradient"), strict=True):
        for i, method in enumerate(LINES):
            cells = {int(n): found[name][n].get(method + gradient) for n in sizes}
            points = [(n, cell[TIME]) for n, cell in cells.items() if cell and TIME in cell]
            if points:
                label = method.replace("cholesky", "Cholesky").replace("gpytorch", "GPyTorch")
                style = {"ms": 4, "color": f"C{i}", "label": label}
                axis.loglog(*zip(*points, strict=True), "os^dvP"[i] + "-", **style)
        axis.set(xlabel="n", title="value" + gradient.replace(",", " and"))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(TIME)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(PICTURE, dpi=100)


def main():
    options = cases.arguments(__doc__, METHODS)
    for n in options.sizes:
        for name in options.kernels:
            measure(name, n, options.methods)
    if options.sizes:
        return
    found = cases.load()
    for ending in ("", ", gradient"):
        print(table(found, [line + ending for line in LINES]))
    print(crossings(found))
    draw(found)


if __name__ == "__main__":
    main()

"""Mistakes in the numerics that the quick tests must notice: they are chosen, not drawn.

`python -m tests.mutations [NUMBER ...]` makes them one by one in a temporary copy of the checkout,
runs the quick tests of the files named for each (all quick tests, if those pass), and says which
were caught. It exits with 1 if one was not.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("traceax", "tests", "benchmarks", "docs", "notebooks", ".ci", ".github")
IDENTITIES = "tests/estimators/test_identities.py"
RECOVERY = "tests/estimators/test_recovery.py"
STATISTICS = "tests/estimators/test_statistics.py"
TOLERANCE = "tests/estimators/test_tolerance.py"
ASYMMETRY = "tests/sketch/test_asymmetry.py"
NORMS = "tests/estimators/test_norms.py"


class Mutation(NamedTuple):
    """One text for another, in one place."""

    file: str
    old: str
    new: str
    breaks: str
    tests: str  # the files that should notice, first those that do so soonest

    def mutated(self, text):
        """The text of the file with the mistake."""
        assert text.count(self.old) == 1, f"{self.old!r} does not stand once in {self.file}"
        return text.replace(self.old, self.new)


MUTATIONS = [
    Mutation(
        "traceax/_core/primitive.py",
        "tuple(level.axes[i] for i in moving), 0",
        "tuple(None if level.axes[i] is None else 0 for i in moving), 0",
        "the batched axis of a tangent",
        "tests/core/test_transforms.py",
    ),
    Mutation(
        "traceax/_core/primitive.py",
        "(*params.levels, level)",
        "(level, *params.levels)",
        "the order of nested vmaps",
        "tests/core/test_transforms.py",
    ),
    Mutation(
        "traceax/_core/estimate.py",
        "math.sqrt(m * (m - 1))",
        "math.sqrt(m * m)",
        "m for m - 1 in the standard error of a mean",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_sketch/leave_one_out.py",
        "pairs = m * (m - 1)\n    variance = jnp.sum(square_of(samples",
        "pairs = m * m\n    variance = jnp.sum(square_of(samples",
        "m for m - 1 in the error of leave-one-out samples",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_sketch/leave_one_out.py",
        "return (dots.T - jnp.conj(self.gamma) * own)",
        "return (dots.T - self.gamma * own)",
        "a conjugate in the geometry of pairs",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_sketch/leave_one_out.py",
        "1 - (square_of(gamma) if hermitian else gamma * gamma.T)",
        "1 - square_of(gamma)",
        "pairs of probes under a complex shift",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_sketch/leave_one_out.py",
        "return jnp.sqrt(variance + covariance + rounding**2)",
        "return jnp.sqrt(variance + rounding**2)",
        "the covariance of leave-one-out samples",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_sketch/leave_one_out.py",
        "matmul(factors.s, adjoint(factors.s)) / m\n",
        "matmul(factors.s, adjoint(factors.s)) / (m - 1)\n",
        "the weights of XTrace's derivative",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_sketch/nystrom.py",
        "samples = (alpha * inverse - diagonal_of(lengths)).real",
        "samples = (alpha / inverse - diagonal_of(lengths)).real",
        "the tested part of XNysTrace",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_sketch/nystrom.py",
        "alpha = jnp.full_like(rho_square, n - m + 1)",
        "alpha = jnp.full_like(rho_square, n - m)",
        "the dimension that one held-out probe leaves",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_sketch/nystrom.py",
        "nu = jnp.maximum(least, -2 * lowest)",
        "nu = least",
        "a core with negative eigenvalues",
        RECOVERY,
    ),
    Mutation(
        "traceax/_sketch/nystrom.py",
        "return select(best.std_err < WORTH * first.std_err, best, first)",
        "return first",
        "the shift of XNysTrace",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_estimators/xtrace.py",
        "resphering(n - m + 2.0, square[:, None] + size, resphere)",
        "resphering(n - m + 1.0, square[:, None] + size, resphere)",
        "the dimension that two held-out probes leave",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_estimators/xtrace.py",
        "jnp.mean(samples) - n * sketch.nu)",
        "jnp.mean(samples))",
        "the shift that keeps a sketch regular",
        RECOVERY,
    ),
    Mutation(
        "traceax/_estimators/xtrace.py",
        "matmul(q, matmul(s, adjoint(s))) / s.shape[0]",
        "matmul(q, matmul(s, adjoint(s)))",
        "the weights of XDiag's derivative",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_estimators/hutchpp.py",
        "resphering(float(n - m), square_norms(g), resphere)",
        "resphering(float(n), square_norms(g), resphere)",
        "the dimension that a sketch leaves",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_estimators/hutchpp.py",
        "sampler.probes(test_key, block.n",
        "sampler.probes(sketch_key, block.n",
        "a key that is used again: probes that are not independent of the basis",
        STATISTICS,
    ),
    Mutation(
        "traceax/_estimators/xnystrace.py",
        "sign * block.mm(p), block.eps)\n        rounding",
        "block.mm(p), block.eps)\n        rounding",
        "the sign of a negative semidefinite operator",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_estimators/xnystrace.py",
        "* (max(block.n - k, 1) - 0.2))",
        "* k)",
        "degrees of freedom next to the whole space",
        STATISTICS,
    ),
    Mutation(
        "traceax/_estimators/diagonal_error.py",
        "left_over[i], left, right, gamma, nu)",
        "left_over[i], left, right, jnp.conj(gamma), nu)",
        "a conjugate in the error of leave-one-out diagonals",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_estimators/samples.py",
        "shift * (m / total)",
        "shift * (m / count)",
        "the mean of samples that come in blocks",
        TOLERANCE,
    ),
    Mutation(
        "traceax/_estimators/samples.py",
        "block.mm(omega) - matmul(q, inner))",
        "block.mm(omega))",
        "what a sketch has captured of a diagonal, counted twice",
        TOLERANCE,
    ),
    Mutation(
        "traceax/_estimators/samples.py",
        "factor = resphering(float(n - r)",
        "factor = resphering(float(n)",
        "the dimension that a prepared sketch leaves",
        TOLERANCE,
    ),
    Mutation(
        "traceax/_estimators/samples.py",
        "basis=qr(shifted)[0] if weights else f,",
        "basis=f,",
        "the basis of the weights of a Nystrom approximation",
        TOLERANCE,
    ),
    Mutation(
        "traceax/_estimators/tolerance.py",
        "draw(jr.fold_in(keys, samples.panels), *given)",
        "draw(keys, *given)",
        "a key that is used again: every panel draws the same probes",
        TOLERANCE,
    ),
    Mutation(
        "traceax/_estimators/tolerance.py",
        "np.maximum(panel * np.arange(panels + 1) - 1, 1), 0.975)",
        "np.maximum(panel * np.arange(panels + 1) - 1, 1), 0.9)",
        "the quantile that a call ends with",
        TOLERANCE,
    ),
    Mutation(
        "traceax/_estimators/tolerance.py",
        "pays = (cost + fall * needed < more) & (cost <= left)",
        "pays = False",
        "a sketch that pays is not prepared",
        TOLERANCE,
    ),
    Mutation(
        "traceax/_estimators/tolerance.py",
        "last_resort = (more > self.block.n)",
        "last_resort = (more > 0)",
        "an exact value that costs more than samples",
        TOLERANCE,
    ),
    Mutation(
        "traceax/_estimators/tolerance.py",
        "left = self.max_k - spent - drawn",
        "left = self.max_k - drawn",
        "more products than max_k",
        TOLERANCE,
    ),
    Mutation(
        "traceax/_estimators/tolerance.py",
        "return prepared.value + total / self.panels",
        "return total / self.panels",
        "the prepared part of the derivative",
        TOLERANCE,
    ),
    Mutation(
        "traceax/_estimators/tolerance.py",
        "slope = 1 / jnp.where(value == 0, 1, 2 * value)",
        "slope = 1 / jnp.where(value == 0, 1, value)",
        "the error of a root, twice too large",
        NORMS,
    ),
    Mutation(
        "traceax/_estimators/tolerance.py",
        "return relative(norm_factor(error) * norm_of(error), allowed)",
        "return norm_factor(error) * norm_of(error) / allowed",
        "a tolerance of the operator 0",
        TOLERANCE,
    ),
    Mutation(
        "traceax/_estimators/norms.py",
        "budget = max((budget - 1) // 2, 1)",
        "budget = budget - 1",
        "the products of a norm",
        NORMS,
    ),
    Mutation(
        "traceax/_estimators/auto.py",
        "std_err=jtu.tree_map(lambda x: size * x",
        "std_err=jtu.tree_map(lambda x: x",
        "the error of a multiple",
        RECOVERY,
    ),
    Mutation(
        "traceax/_estimators/rows.py",
        "return scale * jnp.sqrt(self.of_vector(jnp.sum(square_of(block / scale), axis=1)))",
        "return jnp.sqrt(self.of_vector(jnp.sum(square_of(block), axis=1)))",
        "squares that overflow",
        RECOVERY,
    ),
    Mutation(
        "traceax/_core/estimate.py",
        "return relative(apart, size) / max(math.sqrt(eps), 100 * math.sqrt(n) * eps)",
        "return relative(apart, size) / max(math.sqrt(eps), 100 * math.sqrt(n) * eps) / 1e4",
        "an operator that is not symmetric",
        ASYMMETRY,
    ),
    Mutation(
        "traceax/_probes/random.py",
        "return lax.complex(*parts) / dtype.type(np.sqrt(2))",
        "return lax.complex(*parts)",
        "the second moment of complex normal probes",
        "tests/probes/test_samplers.py tests/probes/test_random.py",
    ),
    Mutation(
        "traceax/_operators/block_operator.py",
        "return jnp.conj(transposed.mm(jnp.conj(block)))",
        "return transposed.mm(block)",
        "the conjugates of a product with the adjoint",
        IDENTITIES,
    ),
    Mutation(
        "traceax/_linalg/factorisations.py",
        "return solve(solve(rhs), transpose_a=True, conjugate_a=True)",
        "return solve(solve(rhs), transpose_a=True, conjugate_a=False)",
        "a conjugate in a solve with a Cholesky factor",
        "tests/logdet/test_gaussian.py",
    ),
    Mutation(
        "traceax/_linalg/lanczos.py",
        'coefficients = einsum("pjn,pn->pj", jnp.conj(basis), w)',
        'coefficients = einsum("pjn,pn->pj", basis, w)',
        "a conjugate in Lanczos' recurrence",
        "tests/functions/test_spectral_sum.py",
    ),
    Mutation(
        "traceax/_logdet/log_quadrature.py",
        "0, share)[:, None, None] * (changed - core)",
        "0, share)[:, None, None] * changed",
        "the weights of two quadrature rules in the derivative",
        "tests/logdet/test_logdet.py",
    ),
    Mutation(
        "traceax/_logdet/weights.py",
        "return LogdetWeights(self.vectors - change / 2, self.core, self.factors)",
        "return LogdetWeights(self.vectors - change, self.core, self.factors)",
        "the second derivative of a log-determinant",
        "tests/logdet/test_gaussian.py",
    ),
    Mutation(
        "traceax/_core/precision.py",
        "single = any(",
        "single = False and any(",
        "TF32 on a GPU, taken for float32",
        "tests/core/test_precision.py",
    ),
    Mutation(
        "traceax/_operators/known_parts.py",
        "inner._replace(exact=factor * inner.exact, scale=factor * inner.scale)",
        "inner._replace(exact=inner.exact, scale=factor * inner.scale)",
        "the factor of what is known of a multiple",
        "tests/operators/test_operators.py",
    ),
    Mutation(
        "traceax/_operators/known_parts.py",
        "rows[:, None] == rows[indices] + offset",
        "rows[:, None] == rows[indices] - offset",
        "the sides of a tridiagonal matrix",
        "tests/operators/test_kernel.py",
    ),
    Mutation(
        "traceax/_operators/sparse_layout.py",
        "slots = np.where(is_used, entries[position], rows.size)",
        "slots = entries[position]",
        "padding of a sparse matrix that counts",
        "tests/operators/test_sparse.py",
    ),
    Mutation(
        "traceax/_probes/random.py",
        "np.uint32) | np.uint32(2**31))",
        "np.uint32))",
        "the keys of items differ from those of a split",
        "tests/probes/test_random.py",
    ),
    Mutation(
        "traceax/_linalg/factorisations.py",
        "return x + matmul(f - matmul(x, r), inverse)",
        "return x",
        "the refinement of a division by a triangular matrix",
        "tests/linalg/test_linalg.py",
    ),
    Mutation(
        "traceax/_linalg/factorisations.py",
        "lambda: y + 4 * eps * _generic(y)",
        "lambda: y",
        "columns that coincide become orthonormal",
        "tests/linalg/test_linalg.py",
    ),
    Mutation(
        "traceax/_linalg/factorisations.py",
        "jnp.where(failed, 100 * shift, shift)",
        "shift",
        "a shift that grows where a Gram matrix has no Cholesky factor",
        "tests/linalg/test_linalg.py",
    ),
    Mutation(
        "traceax/_functions/funm.py",
        "core=derivative_core(self.fn, nodes, s) * (n / p)",
        "core=derivative_core(self.fn, nodes, s) * n",
        "the weights of the derivative of a spectral sum",
        "tests/functions/test_spectral_sum.py",
    ),
    Mutation(
        "traceax/_sketch/low_rank.py",
        "dimension = m * (m - 1) / others",
        "dimension = m * m / others",
        "the diagonal among the cosines of what is left out",
        "tests/logdet/test_logdet.py",
    ),
    Mutation(
        "traceax/_operators/curvature.py",
        "shares = count * shares / jnp.sum(shares)",
        "shares = count * shares / count",
        "weights of batches that do not add up to one",
        "tests/operators/test_curvature.py",
    ),
    Mutation(
        "traceax/_operators/curvature.py",
        "indexed = jtu.tree_map(lambda x, y: jnp.where(share == 0, y, x), indexed, counted)",
        "",
        "batches of weight 0 that are evaluated",
        "tests/operators/test_curvature.py",
    ),
    Mutation(
        "traceax/_operators/curvature.py",
        "shares = weights / lax.stop_gradient(jnp.max(jnp.abs(weights)))",
        "shares = weights",
        "weights whose sum overflows",
        "tests/operators/test_curvature.py",
    ),
    Mutation(
        "traceax/_operators/curvature.py",
        "jnp.zeros(x.shape, at_least_single(x.dtype))",
        "jnp.zeros(x.shape, x.dtype)",
        "a sum of batches in half precision",
        "tests/operators/test_curvature.py",
    ),
    Mutation(
        "traceax/_operators/curvature.py",
        "return product, None, 4 * eps_along(product, *followed) ** (2 / 3)",
        "return product, None, eps_along(product, *followed)",
        "the precision of a difference of gradients",
        "tests/operators/test_curvature.py",
    ),
    Mutation(
        "traceax/_operators/curvature.py",
        "length = jnp.max(jnp.stack(moves))",
        "length = jnp.sqrt(sum(jnp.sum(v * v) for v in jtu.tree_leaves(vector)))",
        "the step of a difference of gradients",
        "tests/operators/test_curvature.py",
    ),
    Mutation(
        "traceax/_operators/curvature.py",
        "*((type(x), x) for x in leaves))",
        "*leaves)",
        "programs of losses with 2 and 2.0",
        "tests/operators/test_curvature.py",
    ),
    Mutation(
        "traceax/_operators/curvature.py",
        "return jax.jvp(slope, (out,), (direction,))[1]",
        "return 2 * jax.jvp(slope, (out,), (direction,))[1]",
        "the quadratic form of a curvature",
        "tests/operators/test_curvature.py",
    ),
    Mutation(
        "traceax/curvature.py",
        "jnp.exp(at - lax.stop_gradient(at)) / out.size",
        "jnp.ones_like(at) / out.size",
        "the probabilities of labels that were drawn",
        "tests/operators/test_curvature.py",
    ),
    Mutation(
        "traceax/curvature.py",
        "wide = [x.astype(at_least_single(x.dtype)) for x in jtu.tree_leaves(outputs)]",
        "wide = jtu.tree_leaves(outputs)\n        scale = jnp.asarray(scale, wide[0].dtype)",
        "1 / N in half precision",
        "tests/operators/test_curvature.py",
    ),
    Mutation(
        "traceax/_operators/parameters.py",
        "grouping = _names_in_groups(moving, groups), structure_of(moving)",
        "grouping = _names_in_groups(moving, groups), None",
        "groups",
        "tests/operators/test_curvature.py",
    ),
    Mutation(
        "traceax/_tracker.py",
        "m, n, d = norms[:, ::-1]",
        "m, n, d = norms",
        "halves of DeltaShift that look at themselves",
        "tests/tracker/test_tracker.py",
    ),
    Mutation(
        "traceax/_tracker.py",
        "smooth = jnp.sqrt(past.drift) * jnp.sqrt(drift)",
        "smooth = drift",
        "the drift of DeltaShift over the steps",
        "tests/tracker/test_tracker.py",
    ),
    Mutation(
        "traceax/_tracker.py",
        "dimension = float(n - m if spherical else n)",
        "dimension = float(n)",
        "residual probes off a recycled subspace",
        "tests/tracker/test_tracker.py",
    ),
    Mutation(
        "traceax/_tracker.py",
        "return 1 if jnp.issubdtype(block.dtype, jnp.complexfloating) and single else 2",
        "return 2",
        "the variance of complex probes",
        "tests/tracker/test_tracker.py",
    ),
    Mutation(
        "traceax/_tracker.py",
        "lambda new, old: jnp.where(failed, old, new).astype(old.dtype)",
        "lambda new, old: new.astype(old.dtype)",
        "a state after NaN",
        "tests/tracker/test_tracker.py",
    ),
    Mutation(
        "traceax/_tracker.py",
        "q = qr((last.numbers + shift_of(last.norm, n, block.eps) * noise).T)[0].T",
        "q = qr((last.numbers + 1e-30 * jnp.eye(m, n)).T)[0].T",
        "a recycled subspace after zeros",
        "tests/tracker/test_tracker.py",
    ),
    Mutation(
        "traceax/_tracker.py",
        "state = lax.stop_gradient(state)",
        "state = state",
        "derivatives by the past of a tracker",
        "tests/tracker/test_tracker.py",
    ),
    Mutation(
        "traceax/_tracker.py",
        "std_err = lax.stop_gradient(jnp.hypot(std_err, rounding_of(norm, block.eps)))",
        "std_err = lax.stop_gradient(std_err)",
        "the rounding of a tracked trace",
        "tests/tracker/test_tracker.py",
    ),
    Mutation(
        "traceax/_core/verdict.py",
        "lost = void if of is None or not estimate.separate else void & ~jnp.isfinite(of)",
        "lost = void",
        "leaves beside one that holds NaN",
        RECOVERY,
    ),
    Mutation(
        "traceax/_estimators/xtrace.py",
        "value = size * value + rows.of_vector(lost)",
        "value = size * value",
        "a leaf that holds NaN",
        RECOVERY,
    ),
]


def _fails(folder, tests, environment):
    """Whether the quick tests of these files (all, for none) notice."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0"]
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    run = subprocess.run([*command, *tests], **options, check=False)
    assert run.returncode in (0, 1), run.stdout + run.stderr  # not that nothing could be run
    failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    return run.returncode == 1, (failed or [""])[0].split(" - ")[0]


def main(numbers):
    """Make these mistakes (all of them, for none)."""
    missed = 0
    with tempfile.TemporaryDirectory(prefix="traceax-mutations-") as folder:
        for name in COPIED:
            shutil.copytree(ROOT / name, Path(folder, name))
        for path in ROOT.glob("[!.]*.*"):
            shutil.copy(path, folder)
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        compiled = str(ROOT / ".pytest_cache" / "xla")
        environment.setdefault("TRACEAX_TESTS_COMPILED", compiled)
        for number in numbers or range(1, len(MUTATIONS) + 1):
            mutation = MUTATIONS[number - 1]
            path = Path(folder, mutation.file)
            text = path.read_text()
            path.write_text(mutation.mutated(text))
            caught, by = _fails(folder, mutation.tests.split(), environment)
            if not caught:
                # All but the test of this file, which would miss the text that is replaced.
                others = ["--ignore=tests/package/test_mutations.py"]
                caught, by = _fails(folder, others, environment)
            path.write_text(text)
            missed += not caught
            said = f"caught: {by.removeprefix('FAILED ')}" if caught else "NOT CAUGHT"
            print(f"{number:2d} {mutation.file}: {mutation.breaks}. {said}", flush=True)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))

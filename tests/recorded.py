"""Numbers of every public function for fixed keys, and the file that they are recorded in.

`python -m tests.recorded` adds the calls that the file lacks; with names of calls, those are
recorded anew. The numbers are the same, to rounding, with every version of Python and JAX that is
supported: a difference is a change that users see.
"""

import json
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.experimental.sparse
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np

import traceax as tr

FILE = Path(__file__).parent / "recorded.json"
N = 40
PSD, NSD = lx.positive_semidefinite_tag, lx.negative_semidefinite_tag


def _hidden(operator):
    """The operator by its products alone: the default estimators would read what is stored."""
    return lx.FunctionLinearOperator(operator.mv, operator.in_structure(), operator.tags)


def _matrices():
    rng = np.random.default_rng(7)
    general = rng.standard_normal((N, N)) * 0.85 ** np.arange(N)
    basis = np.linalg.qr(rng.standard_normal((N, N)) + 1j * rng.standard_normal((N, N)))[0]
    hermitian = (basis * 1 / np.arange(1.0, N + 1) ** 2) @ basis.conj().T
    stored = {
        "general": lx.MatrixLinearOperator(jnp.asarray(general)),
        "psd": lx.MatrixLinearOperator(jnp.asarray(hermitian.real), PSD),
    }
    return {
        **stored,
        **{f"hidden {name}": _hidden(operator) for name, operator in stored.items()},
        "nsd": lx.MatrixLinearOperator(jnp.asarray(-hermitian.real), NSD),
        "hermitian": lx.MatrixLinearOperator(jnp.asarray(hermitian), PSD),
        "function": lx.FunctionLinearOperator(
            lambda v: jnp.sin(general) @ v, jax.ShapeDtypeStruct((N,), jnp.float64)
        ),
    }


def _kernel(scale=0.2, noise=0.01, form=lambda kernel: kernel):
    x = jnp.linspace(0.0, 1.0, N)
    kernel = jnp.exp(-0.5 * (x[:, None] - x[None, :]) ** 2 / scale**2)
    kernel = form(lx.MatrixLinearOperator(kernel, PSD))
    return kernel + noise * lx.IdentityLinearOperator(kernel.in_structure())


def _curvatures():
    keys = jr.split(jr.key(3), 4)
    params = {"w": jr.normal(keys[0], (3, 4)), "v": jr.normal(keys[1], (4,)), "flag": True}
    batch = jr.normal(keys[2], (6, 3)), jr.normal(keys[3], (6,))

    def predict(params, batch):
        return jax.nn.relu(batch[0] @ params["w"]) @ params["v"]

    def log_likelihood(params, batch):
        return -0.5 * (predict(params, batch) - batch[1]) ** 2

    def squares(outputs, batch):
        return jnp.mean((outputs - batch[1]) ** 2)

    def loss(params, batch):
        return squares(predict(params, batch), batch)

    return {
        "hessian": tr.curvature.hessian(loss, params, batch),
        "gauss_newton": tr.curvature.gauss_newton(predict, squares, params, batch),
        "fisher": tr.curvature.fisher(log_likelihood, params, batch),
    }


TRACES = {
    "hutchinson": (tr.HutchinsonEstimator(), "general"),
    "hutchinson-normal": (tr.HutchinsonEstimator(tr.NormalSampler()), "function"),
    "hutchinson-steinhaus": (tr.HutchinsonEstimator(tr.SteinhausSampler()), "hermitian"),
    "hutch++": (tr.HutchPlusPlusEstimator(), "general"),
    "xtrace": (tr.XTraceEstimator(), "general"),
    "xtrace-rademacher": (tr.XTraceEstimator(tr.RademacherSampler()), "function"),
    "xnystrace": (tr.XNysTraceEstimator(), "psd"),
    "xnystrace-complex": (tr.XNysTraceEstimator(), "hermitian"),
    "xnystrace-negative": (tr.XNysTraceEstimator(), "nsd"),
    "auto": (tr.AutoTraceEstimator(), "hidden psd"),
    "stored": (tr.AutoTraceEstimator(), "psd"),
}
DIAGONALS = {
    "hutchinson": (tr.HutchinsonEstimator(), "general"),
    "hutch++": (tr.HutchPlusPlusEstimator(), "general"),
    "xtrace": (tr.XTraceEstimator(), "general"),
    "xnystrace": (tr.XNysTraceEstimator(), "hermitian"),
    "auto": (tr.AutoTraceEstimator(), "hidden psd"),
    "stored": (tr.AutoTraceEstimator(), "psd"),
}


def _slope(value, at):
    return jax.value_and_grad(value)(at)


def _tracked(method):
    tracker = tr.Tracker(method)
    operators = [_kernel(0.2 + 0.01 * i) for i in range(3)]
    state, found = tracker.init(operators[0], 8), []
    for i, operator in enumerate(operators):
        previous = operators[i - 1] if i else None
        state, solution = tracker.update(jr.key(i), operator, state, previous)
        found.append((solution.value, solution.std_err))
    return found


def calls():
    """What is recorded: functions without arguments, by name, the first word a public name."""
    key, ops = jr.key(11), _matrices()
    y = jnp.sin(7 * jnp.linspace(0.0, 1.0, N))
    found = {}
    for name, (estimator, which) in TRACES.items():
        found[f"trace {name}"] = lambda e=estimator, w=which: tr.trace(key, ops[w], 13, e)
        found[f"{type(estimator).__name__} {name}"] = lambda e=estimator, w=which: e.estimate(
            key, ops[w], 13
        )[0]
    for name, (estimator, which) in DIAGONALS.items():
        found[f"diagonal {name}"] = lambda e=estimator, w=which: tr.diagonal(key, ops[w], 14, e)
    for name, operator in _curvatures().items():
        found[f"curvature {name}"] = lambda op=operator: tr.trace(key, op, 6)
        found[f"block_traces {name}"] = lambda op=operator: tr.block_traces(key, op, 7)
    for name in ("general", "psd", "hermitian"):
        found[f"frobenius_norm {name}"] = lambda w=name: tr.frobenius_norm(key, ops[w], 12)
        found[f"row_norms {name}"] = lambda w=name: tr.row_norms(key, ops[w], 12)
    for name in ("psd", "general"):
        hidden = ops[f"hidden {name}"]
        found[f"trace rtol {name}"] = lambda op=hidden: tr.trace(key, op, rtol=1e-2)
        found[f"diagonal rtol {name}"] = lambda op=hidden: tr.diagonal(key, op, rtol=1e-1)
    for sampler in (tr.NormalSampler, tr.SphereSampler, tr.RademacherSampler, tr.SteinhausSampler):
        found[f"{sampler.__name__} itself"] = lambda s=sampler: s()(key, 7, 3)
    kernel = _kernel()
    for name, preconditioner in {
        "auto": "auto",
        "None": None,
        "nystrom": tr.NystromPreconditioner(12),
        "kernel": tr.KernelPreconditioner(12, 6),
    }.items():
        options = {"preconditioner": preconditioner, "fallback": None}
        found[f"logdet {name}"] = lambda o=options: tr.logdet(key, kernel, 20, **o)
        found[f"gaussian_log_density {name}"] = lambda o=options: tr.gaussian_log_density(
            key, y, kernel, 20, **o
        )
        for fn in (tr.inverse_trace, tr.inverse_diagonal):
            found[f"{fn.__name__} {name}"] = lambda o=options, fn=fn: fn(key, kernel, 20, **o)
        if preconditioner is not None and preconditioner != "auto":
            found[f"{type(preconditioner).__name__} {name}"] = found[f"logdet {name}"]
    held = tr.NystromPreconditioner(12).build(key, kernel)

    def own(s):
        return tr.gaussian_log_density(key, y, _kernel(s), 20, preconditioner=held).value

    found["logdet built"] = lambda: tr.logdet(key, _kernel(0.22), 20, preconditioner=held)
    found["BuiltPreconditioner built"] = found["logdet built"]
    found["gaussian_log_density built"] = lambda: _slope(own, 0.22)
    found["logdet slope"] = lambda: _slope(
        lambda s: tr.logdet(key, _kernel(s), 20, fallback=None).value, 0.2
    )
    found["gaussian_log_density slope"] = lambda: _slope(
        lambda s: tr.gaussian_log_density(key, y, _kernel(s), 20, fallback=None).value, 0.2
    )

    def trace_of_kernel(scale):
        return tr.trace(key, _kernel(scale, form=_hidden), 10).value

    found["trace slope"] = lambda: _slope(trace_of_kernel, 0.2)
    found["trace hessian"] = lambda: jax.jit(jax.hessian(trace_of_kernel))(0.2)
    for name in ("psd", "general", "hermitian"):
        found[f"schatten_norm {name}"] = lambda w=name: tr.schatten_norm(key, ops[w], 30)
    found["spectral_sum general"] = lambda: tr.spectral_sum(key, jnp.exp, ops["general"], 20)
    for name in ("psd", "hermitian"):
        found[f"spectral_sum {name}"] = lambda w=name: tr.spectral_sum(key, jnp.exp, ops[w], 20)
        found[f"spectral_diagonal {name}"] = lambda w=name: tr.spectral_diagonal(
            key, jnp.exp, ops[w], 30
        )
        found[f"eigenpairs {name}"] = lambda w=name: tr.eigenpairs(key, ops[w], 12, 2, "BE").values
        found[f"Eigenpairs {name}"] = lambda w=name: tr.eigenpairs(key, ops[w], 12, 2).bounds
        found[f"eigenvalue_count {name}"] = lambda w=name: tr.eigenvalue_count(
            key, ops[w], 0.1, 2.0, 20
        )
        found[f"spectral_density {name}"] = lambda w=name: tr.spectral_density(
            key, ops[w], 20, jnp.linspace(0.0, 1.0, 5)
        )
    for method in ("recycled", "deltashift"):
        found[f"Tracker {method}"] = lambda m=method: _tracked(m)
    places = jnp.asarray(np.argwhere(np.ones((4, 4))))
    entries = jax.experimental.sparse.BCOO(
        (jnp.asarray((np.eye(4) + 1).reshape(-1)), places), shape=(4, 4)
    )
    found["KernelLinearOperator"] = lambda: tr.KernelLinearOperator(
        lambda x, y: jnp.exp(-jnp.square(x - y)), jnp.linspace(0.0, 1.0, 4)
    ).mv(jnp.arange(4.0))
    coarse = tr.inexact(ops["hidden psd"], 1e-6)
    found["inexact"] = lambda: tr.trace(key, coarse, 13, tr.XNysTraceEstimator())
    found["SparseLinearOperator"] = lambda: tr.SparseLinearOperator(entries).mv(jnp.arange(4.0))
    return found


def numbers_of(result):
    """All the numbers in a result, real and imaginary parts in turn; no state."""
    if isinstance(result, tr.Solution):
        result = (result.value, result.std_err, result.num_matvecs)
    solutions = jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, tr.Solution))
    if any(isinstance(x, tr.Solution) for x in solutions):
        return [n for x in solutions for n in numbers_of(x)]
    leaves = [np.asarray(x) for x in jax.tree.leaves(eqx.filter(result, eqx.is_array_like))]
    flat = [x.reshape(-1) for x in leaves]
    flat = [x.astype(complex).view(float) if x.dtype.kind == "c" else x for x in flat]
    return [float(x) for leaf in flat for x in leaf]


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    recorded = json.loads(FILE.read_text())
    wanted = {name: call for name, call in calls().items() if name not in recorded}
    wanted.update({name: calls()[name] for name in sys.argv[1:]})
    recorded.update({name: numbers_of(call()) for name, call in wanted.items()})
    with FILE.open("w") as file:
        # NaN and inf are no JSON, and no number that anybody should get.
        json.dump({name: recorded[name] for name in calls()}, file, indent=0, allow_nan=True)
        file.write("\n")
    print(len(wanted), "calls recorded with JAX", jax.__version__, file=sys.stderr)

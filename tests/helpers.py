"""What several test files share: the table of estimators, matrices, and naive references."""

import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import jax
import lineax as lx
import numpy as np

import traceax as tr
from benchmarks.common import spectra as spectra
from traceax._operators.tags import CHECKS
from traceax.testing import _by_products

ROOT = Path(__file__).parents[1]
PSD = lx.positive_semidefinite_tag
NSD = lx.negative_semidefinite_tag

# The table of estimators, each of traces and of diagonals: a new one adds a row.
ESTIMATORS = {
    "hutchinson": tr.HutchinsonEstimator(),
    "hutchinson-batched": tr.HutchinsonEstimator(batch_size=5),
    "hutch++": tr.HutchPlusPlusEstimator(),
    "hutch++-rademacher": tr.HutchPlusPlusEstimator(tr.RademacherSampler()),
    "xtrace": tr.XTraceEstimator(),
    "xtrace-normal": tr.XTraceEstimator(tr.NormalSampler()),
    "xtrace-rademacher": tr.XTraceEstimator(tr.RademacherSampler()),
    "xtrace-plain": tr.XTraceEstimator(improved=False),
    "xnystrace": tr.XNysTraceEstimator(),
    "xnystrace-rademacher": tr.XNysTraceEstimator(tr.RademacherSampler()),
    "auto": tr.AutoTraceEstimator(),
}
# The first of each class, where a table over all variants would only repeat itself.
CLASSES = {}
for _name, _estimator in ESTIMATORS.items():
    if type(_estimator) not in {type(other) for other in CLASSES.values()}:
        CLASSES[_name] = _estimator
# And of these the ones that estimate: `auto` runs what the others have.
PROBED = {name: CLASSES[name] for name in CLASSES if name != "auto"}


def random_unitary(rng, n, dtype=np.float64):
    """A Haar-distributed orthogonal or unitary matrix."""
    matrix = rng.standard_normal((n, n))
    if np.issubdtype(dtype, np.complexfloating):
        matrix = matrix + 1j * rng.standard_normal((n, n))
    return np.linalg.qr(matrix)[0].astype(dtype)


def with_spectrum(rng, eigenvalues, dtype=np.float64):
    """A Hermitian matrix with these eigenvalues and a random basis."""
    basis = random_unitary(rng, len(eigenvalues), dtype)
    matrix = (basis * eigenvalues) @ basis.conj().T
    return ((matrix + matrix.conj().T) / 2).astype(dtype)


def by_products(matrix, tags=()):
    """A matrix that is known by its products alone, so that the default estimators estimate."""
    return _by_products(jax.device_put(matrix), tags)


def operator_for(estimator, matrix, tags=()):
    """The matrix as an operator that this estimator does not simply read."""
    if isinstance(estimator, tr.AutoTraceEstimator):
        return by_products(matrix, tags)
    return lx.MatrixLinearOperator(jax.device_put(matrix), tags)


@cache
@jax.ensure_compile_time_eval()  # the first call may be in a trace
def _all_keys(seed):
    return np.asarray(jax.random.split(jax.random.PRNGKey(seed), 10_000))


def keys(count, seed=0):
    """A fixed number of fixed seeds, as NumPy arrays: indexing them compiles nothing."""
    return _all_keys(seed)[:count]


def over_keys(count, fn):
    """What `fn(key)` returns for these keys, one after the other, as NumPy arrays."""
    return jax.device_get(jax.jit(lambda keys: jax.lax.map(fn, keys))(keys(count)))


@partial(jax.jit, static_argnums=(0, 2, 3, 4))
def _drawn(sampler, key, n, k, dtype):
    return sampler(key, n, k, dtype)


def drawn(sampler, key, n, k, dtype=float):
    """The probes of an estimate, drawn by one program."""
    return np.asarray(_drawn(sampler, key, n, k, np.dtype(dtype)))


def compilations(caplog, fn):
    """How many programs JAX compiles while `fn()` runs, as its log says."""
    caplog.clear()
    with jax.log_compiles():
        jax.block_until_ready(fn())
    return sum(record.getMessage().startswith("Compiling ") for record in caplog.records)


def environment(quick=True):
    """For programs. Most compile for longer than they compute: see `conftest.py`."""
    return {
        **os.environ,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(quick)),
        "JAX_COMPILATION_CACHE_DIR": os.environ["TRACEAX_TESTS_COMPILED"],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def output_of(*command, quick=True, variables=None, **options):
    """What a program prints that ends well."""
    env = environment(quick) | (variables or {})
    options = {"capture_output": True, "text": True, "check": False, "cwd": ROOT, **options}
    run = subprocess.run([sys.executable, *command], env=env, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def register_tags(cls, positive):
    """Tell lineax of a class of operators: what `positive(operator)` says, and nothing else."""
    for check in CHECKS.values():
        check.register(cls)(lambda operator: False)
    lx.is_positive_semidefinite.register(cls)(positive)

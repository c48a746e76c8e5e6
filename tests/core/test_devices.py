"""Arrays on several devices: the same numbers, and no sketch on any one of them.

Two runs of `on_devices.py`: one process with 8 virtual devices, and two processes of 2 devices.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from traceax._linalg import factorisations

from ..helpers import environment
from ..linalg.test_linalg import M as COLUMNS, N as ROWS, block_of, check_factors
from .on_devices import ESTIMATORS, K, N

ROOT = Path(__file__).parents[2]


def start(count, *arguments):
    """The program, on so many virtual devices."""
    # NumPy 2.0 says so on threads of XLA, which flush subnormals.
    known = "ignore:The value of the smallest subnormal"
    options = ["-W", "error", "-W", known, "-m", "tests.core.on_devices"]
    command = [sys.executable, *options, *map(str, arguments)]
    env = {**environment(), "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **pipes)


def reports_of(runs):
    """What the programs print. None is left behind, whatever happens."""
    try:
        outputs = [run.communicate(timeout=400) for run in runs]
    finally:
        for run in runs:
            run.kill()
    for run, (_, errors) in zip(runs, outputs, strict=True):
        assert run.returncode == 0, errors
    # Gloo talks, too.
    lines = [[line for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]
    return [json.loads(line) for (line,) in lines]


@pytest.fixture(scope="module")
def report():
    return reports_of([start(8)])[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_device_holds_the_sketch(report, name):
    """Value, standard error and gradient are those of one device, to rounding. What a device
    computes with has N / 8 rows; what it gathers are the triangular factors of all.
    """
    found = report[name]
    assert found["error"] < 1e-11
    m = {"hutchinson": None, "hutch++": K // 3, "xtrace": K // 2, "xnystrace": K}[name]
    assert all(shape == [1, 8 * m, m] for shape in found["gathers"])
    assert len(found["gathers"]) == {"hutchinson": 0, "xnystrace": 2}.get(name, 1)
    assert N // 8 in found["rows"]
    assert max(found["rows"]) < N // 2


@pytest.mark.variant
@pytest.mark.parametrize("name", ["explicit", "set mesh", "dense", "ring"])
def test_matrices_cut_by_rows(report, name):
    """In meshes with automatic and with explicit axes (also under `jax.set_mesh`), and where the
    operator itself is written with `shard_map`: then nothing but the triangular factors is
    gathered.
    """
    assert report[name]["error"] < 1e-11
    factors = [1, 8 * K // 2, K // 2]
    assert factors in report[name]["gathers"]
    if name == "ring":
        assert report[name]["gathers"] == [factors]


@pytest.mark.variant
def test_operators_in_a_mesh_with_explicit_axes(report):
    """Under `jax.set_mesh` with the mesh that `jax.make_mesh` returns: curvature of a batch that is
    cut by examples, with parameters that are whole or cut, also where the model names the axes;
    functions, kernels, and trackers. An estimate is not compiled again in an eager loop.
    """
    found = dict(report["explicit axes"])
    assert found.pop("compilations") == 0
    assert len(found) == 25
    for name, error in found.items():
        assert error < 1e-9, name


@pytest.mark.variant
def test_products_with_matrices_however_they_are_cut(report):
    assert len(report["products"]) == 8
    for name, error in report["products"].items():
        assert error < 1e-13, name


@pytest.mark.variant
def test_factorisations_of_sharded_blocks(report):
    """Orthonormal, and the factors of the block, to a few units of rounding."""
    assert len(report["qr"]) == 10
    for name, (defect, residual) in report["qr"].items():
        assert defect < 20, name
        assert residual < 20, name


@pytest.mark.variant
def test_leaves_cut_along_any_axis(report):
    assert report["tree"]["error"] < 1e-11
    assert report["tree"]["gathers"] == []
    assert report["tree-xtrace"]["error"] < 1e-11


@pytest.mark.variant
def test_batches_cut_by_examples(report):
    """One number, and nothing is sent but what the products (Hutchinson: the quadratic forms) send
    themselves: their sums over the devices.
    """
    found = report["data"]
    for name, alone in (("hutchinson", "quadratic_form"), ("hutch++", "mv"), ("xtrace", "mv")):
        assert found[name]["error"] < 1e-11
        assert found[name]["names"] == found[alone]["names"] == ["all-reduce"]
        assert found[name]["numbers"] == found[alone]["numbers"], name
    # Both summands of the second leaf are summed over the devices for themselves.
    assert found["mv"]["numbers"] == K * (6 * 5 + 2 * 5 * 3)
    assert found["quadratic_form"]["numbers"] == K


@pytest.mark.variant
def test_a_model_as_one_vector(report):
    """As the documentation does it: nothing but ten columns of triangular factors is gathered."""
    assert report["page"] == [[1, 80, 10]]


@pytest.mark.slow
def test_more_rows_than_an_int32_can_count(report):
    assert report["many"] == [[1, 32, 4]]


@pytest.mark.variant
def test_batches_of_operators(report):
    """Inside `shard_map`, over all axes of a mesh or one of two, and under a `vmap` over an axis
    that is cut: every device its own.
    """
    assert report["shard_map"]["error"] < 1e-11
    assert report["partly"]["error"] < 1e-11
    assert report["vmap"]["error"] < 1e-11
    assert report["vmap"]["gathers"] == []


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.variant
def test_two_processes(report):
    port = free_port()
    for found in reports_of([start(2, process, port) for process in range(2)]):
        assert found["devices"] == 4
        np.testing.assert_allclose(found["value"], report["alone"]["value"], rtol=1e-12)
        np.testing.assert_allclose(found["std_err"], report["alone"]["std_err"], rtol=1e-9)


# --- the factorisation for GPUs ------------------------------------------------------------------

sketched_qr = jax.jit(factorisations._sketched_qr)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("condition", [1.0, 1e8, 1e16])
def test_sketched_qr(condition, dtype):
    """As good as Householder's method, and not by falling back on it."""
    block = block_of(condition, dtype)
    q, r = sketched_qr(block)
    check_factors(q, r, block)
    assert np.any(q != jax.jit(factorisations._householder)(block)[0])


@pytest.mark.parametrize("decay", [0.7, 0.5])
def test_sketched_qr_of_fast_decay(decay):
    """Sketches of diag(decay^i), shifted by nu, are singular but for it."""
    omega = np.random.default_rng(0).standard_normal((ROWS, COLUMNS))
    block = decay ** np.arange(ROWS)[:, None] * omega
    block += np.finfo(float).eps * np.linalg.norm(block) / np.sqrt(ROWS) * omega
    q, r = sketched_qr(block)
    check_factors(q, r, block)
    # With decay 0.5, rounding decides whether Householder's method is needed: on some processors.
    if decay == 0.7:
        assert np.any(q != jax.jit(factorisations._householder)(block)[0])


def test_sketched_qr_of_degenerate_blocks():
    """Zero takes Householder's method; repeated columns are orthonormal all the same."""
    low = block_of(2.0, np.float64)[:, :8] @ np.random.default_rng(0).standard_normal((8, COLUMNS))
    for block in (np.zeros((ROWS, COLUMNS)), low):
        check_factors(*sketched_qr(block), block)


def test_sketched_qr_of_many_rows():
    """The random signs are drawn in several parts, of which the last is not whole."""
    rows = 2 * factorisations._SIGNS + 17
    block = np.random.default_rng(0).standard_normal((rows, 4))
    check_factors(*sketched_qr(block), block)


def test_platforms_take_their_own_factorisation():
    """A Cholesky factor, with Householder's method in reserve, on a CPU; random signs before the
    Cholesky factors on a GPU: asked of the lowered programs.
    """
    shape = jax.ShapeDtypeStruct((40_000, 20), np.float32)
    traced = jax.jit(lambda y: factorisations._qr_of_stack(y[None])).trace(shape)
    cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "lapack_sgeqrf_ffi" in cpu
    assert "lapack_spotrf_ffi" in cpu
    assert "shift_left" not in cpu
    cuda = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "cusolver_potrf_ffi" in cuda or "cholesky" in cuda
    assert "shift_left" in cuda

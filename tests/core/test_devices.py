"""Arrays on several devices: the same numbers, and no sketch on any one of them.

Two runs of `on_devices.py`: one process with 8 virtual devices, and two processes of 2 devices.
"""

import json
import socket
import subprocess
import sys

import numpy as np
import pytest

from ..helpers import ROOT, environment
from .on_devices import ESTIMATORS, K, N

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_device_holds_the_sketch(report, name):
    """Value, standard error and gradient are those of one device, to rounding. Nothing is gathered,
    and what a device computes with has N / 8 rows.
    """
    found = report[name]
    assert found["error"] < 1e-11
    assert found["gathers"] == []
    assert N // 8 in found["rows"]
    assert max(found["rows"]) < N // 2


def test_explicit_axes_and_batches(report):
    """Meshes with explicit axes, and batches of operators, give the same numbers."""
    for name, error in report["explicit axes"].items():
        assert error < 1e-9, name
    assert report["batches"]["shard_map"] < 1e-11
    assert report["batches"]["vmap"] < 1e-11
    assert report["batches"]["gathers"] == []


def test_batches_cut_by_examples(report):
    """One number, and nothing is sent but what the products (Hutchinson: the quadratic forms) send
    themselves: their sums over the devices.
    """
    found = report["data"]
    for name, alone in (("hutchinson", "quadratic_form"), ("xtrace", "mv")):
        assert found[name]["error"] < 1e-11
        assert found[name]["names"] == found[alone]["names"] == ["all-reduce"]
        assert found[name]["numbers"] == found[alone]["numbers"], name
    # Both summands of the second leaf are summed over the devices for themselves.
    assert found["mv"]["numbers"] == K * (6 * 5 + 2 * 5 * 3)
    assert found["quadratic_form"]["numbers"] == K


def test_two_processes(report):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for found in reports_of([start(2, process, port) for process in range(2)]):
        assert found["devices"] == 4
        np.testing.assert_allclose(found["value"], report["alone"]["value"], rtol=1e-12)
        np.testing.assert_allclose(found["std_err"], report["alone"]["std_err"], rtol=1e-9)

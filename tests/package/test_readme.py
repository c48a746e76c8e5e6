"""Every Python block of the README runs, in order, as one program."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import traceax as tr

from ..helpers import environment

ROOT = Path(__file__).parents[2]


def program_of_the_blocks():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 7
    return "\n".join(blocks)


def public(node):
    """What an expression such as `tr.curvature.hessian` names, or None if it is not of the package:
    an `AttributeError` if there is no such thing.
    """
    if isinstance(node, ast.Name):
        return tr if node.id == "tr" else None
    if isinstance(node, ast.Attribute) and (owner := public(node.value)) is not None:
        return getattr(owner, node.attr)
    return None


def test_python_blocks_call_what_there_is():
    """Names and keywords, without running them: every call of the package fits its signature."""
    calls = 0
    for node in ast.walk(ast.parse(program_of_the_blocks())):
        called = public(node.func) if isinstance(node, ast.Call) else None
        if called is not None:
            keywords = {keyword.arg: None for keyword in node.keywords}
            inspect.signature(called).bind(*node.args, **keywords)
            calls += 1
        else:
            public(node)
    assert calls == 10


@pytest.mark.slow
def test_python_blocks_run():
    program = program_of_the_blocks()
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env=environment(),
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 9, run.stdout  # one line from each print


def test_there_are_exactly_two_commands():
    commands = re.findall(r"```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(commands) == 2
    # `.ci/run` takes both from the README and runs them as they stand.
    assert "-m traceax logdet traceax/data/1138_bus.mtx" in commands[0]
    assert "-m pytest" in commands[1]


def test_the_output_that_is_shown():
    """That of the first command, to the digits that another processor may round differently."""
    text = (ROOT / "README.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    command = re.findall(r"-m traceax (.*)", text)[0].split()
    run = subprocess.run(
        [sys.executable, "-m", "traceax", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        env=environment(),
    )
    assert len(run.stdout.splitlines()) == len(shown.splitlines())
    for found, line in zip(run.stdout.splitlines(), shown.splitlines(), strict=True):
        assert found[:16] == line[:16]
        if found.startswith(("value", "exact")):
            assert float(found[17:]) == pytest.approx(float(line[17:]), rel=1e-3)

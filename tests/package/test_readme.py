"""Every Python block of the README runs, in order, as one program."""

import re
import subprocess
import sys
from pathlib import Path

from ..helpers import environment

ROOT = Path(__file__).parents[2]


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 7
    program = "\n".join(blocks)
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
    assert "-m traceax trace traceax/data/1138_bus.mtx" in commands[0]
    assert "-m pytest" in commands[1]

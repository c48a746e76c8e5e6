"""Every Python block of the README runs, in order, as one program."""

import re

import pytest

from ..helpers import ROOT, output_of


def program_of_the_blocks():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    assert max(len(block.splitlines()) for block in blocks) <= 12
    return "\n".join(blocks)


@pytest.mark.slow
def test_python_blocks_run():
    program = program_of_the_blocks()
    printed = output_of("-W", "error", "-c", program)
    assert len(printed.splitlines()) == 4, printed  # one line from each print


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
    printed = output_of("-m", "traceax", *command)
    for found, line in zip(printed.splitlines(), shown.splitlines(), strict=True):
        assert found[:16] == line[:16]
        if found.startswith(("value", "exact")):
            assert float(found[17:]) == pytest.approx(float(line[17:]), rel=1e-3)


def test_words_beside_code():
    text = (ROOT / "README.md").read_text()
    assert len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()) <= 600

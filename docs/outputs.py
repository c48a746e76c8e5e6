"""The programs of a page, and what they print: `python docs/outputs.py [PAGE ...]` writes it anew.

The Python blocks of a page are one program, in a process of its own. A `text` block holds what the
block above it prints; a `sh` block is one command of traceax.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
END = "<end of the block>"


def program(blocks: list[tuple[str, str]]) -> str:
    """What Python runs: it prints a line after each block."""
    return "\n".join(f"{code}\nprint({END!r})" for kind, code in blocks if kind == "python")


def outputs(text: str, run) -> list[tuple[str, str]]:
    """What every `text` block of a page shows, and what is printed, where `run(*arguments, input)`
    runs Python.
    """
    blocks = BLOCK.findall(text)
    printed = iter(run("-W", "error", "-", input=program(blocks)).split(f"{END}\n"))
    shown, output = [], ""
    for kind, code in blocks:
        if kind == "python":
            output = next(printed)
        elif kind == "sh":
            output = run("-m", "traceax", *code.split()[3:], input=None)
        elif kind == "text":
            shown.append((code, output))
    return shown


def _run(*arguments, input):
    options = {"capture_output": True, "text": True, "cwd": ROOT}
    run = subprocess.run([sys.executable, *arguments], input=input, check=False, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def renewed(text: str) -> str:
    """The page with what is printed now."""
    found = (f"```text\n{output}```" for _, output in outputs(text, _run))
    return re.sub(r"```text\n.*?```", lambda _: next(found), text, flags=re.DOTALL)


def main():
    """Put what is printed now into the pages."""
    for path in map(Path, sys.argv[1:] or sorted(map(str, (ROOT / "docs").glob("*.md")))):
        if BLOCK.search(text := path.read_text()):
            path.write_text(renewed(text))
            print(path.name)


if __name__ == "__main__":
    main()

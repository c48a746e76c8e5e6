"""Mistakes in the numerics that the tests must notice: they are chosen, not drawn.

`python -m tests.mutations [NUMBER ...]` makes those of `mutations.txt` one by one in a copy of the
checkout, runs the tests of the files named for each (the quick ones, then the slow ones; if all
pass, the quick ones of all files), and says which were caught. It exits with 1 if one was not.
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


def read(text):
    """The mistakes of a table, in blocks of lines: `# what breaks`, the file, the tests that should
    notice, and lines of the text (`- `) and of what takes its place (`+ `).
    """
    found = []
    for block in text.split("\n# ")[1:]:
        breaks, file, tests, *lines = block.rstrip("\n").split("\n")
        old, new = ("\n".join(x[2:] for x in lines if x[0] == sign) for sign in "-+")
        found.append(Mutation(file, old, new, breaks, tests))
    return found


MUTATIONS = read((ROOT / "tests" / "mutations.txt").read_text())


def _fails(folder, tests, environment):
    """Whether the quick tests of these files notice, or those that options of pytest choose."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0"]
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    run = subprocess.run([*command, *tests], **options, check=False)
    assert run.returncode in (0, 1, 5), run.stdout + run.stderr  # not that nothing could be run
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
            tests = mutation.tests.split()
            # The test of this file would miss the text that is replaced.
            others = ["--ignore=tests/package/test_mutations.py"]
            runs = (_fails(folder, x, environment) for x in (tests, [*tests, "-m", "slow"], others))
            caught, by = next((run for run in runs if run[0]), (False, ""))
            path.write_text(text)
            missed += not caught
            said = f"caught: {by.removeprefix('FAILED ')}" if caught else "NOT CAUGHT"
            print(f"{number:2d} {mutation.file}: {mutation.breaks}. {said}", flush=True)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))

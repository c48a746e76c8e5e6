"""The pages of the documentation: their programs run, and every public name has its place."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import traceax as tr

from .helpers import environment

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))
RUNNER = """
import contextlib, io, re, sys
from pathlib import Path

for page in sys.argv[1:]:
    blocks = re.findall(r"```python\\n(.*?)```", Path(page).read_text(), re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\\n".join(blocks), page, "exec"), {"__name__": "page"})
    print(page, len(blocks))
"""


def test_programs_run():
    """The blocks of a page are one program; one process, which imports JAX once, runs them all."""
    pages = [str(DOCS / page) for page in PAGES]
    command = [sys.executable, "-W", "error", "-c", RUNNER, *pages]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert run.returncode == 0, run.stdout + run.stderr
    counts = [int(line.split()[-1]) for line in run.stdout.splitlines()]
    assert len(counts) == len(PAGES)
    assert sum(counts) > 20
    # No other language, and no block that is not run.
    for page in PAGES:
        assert set(re.findall(r"```(\w+)", (DOCS / page).read_text())) <= {"python"}, page


@pytest.mark.parametrize("name", [name for name in vars(tr) if not name.startswith("_")])
def test_public_names_have_a_reference(name):
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    of_module = {
        "curvature": ("hessian", "gauss_newton", "fisher", "jacobian_gram", "CurvatureOperator"),
        "plot": ("spectral_density", "convergence", "interval"),
        # Not imported with the package; where another test imports them: see test_own_estimator.
        "extend": ("BlockOperator",),
        "testing": ("check_estimator",),
    }
    names = [f"{name}.{each}" for each in of_module.get(name, ())] or [name]
    for each in names:
        assert f"::: traceax.{each}\n" in text, each


def test_pages_stand_in_the_navigation():
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f": {page.relative_to(DOCS)}\n" in navigation, page

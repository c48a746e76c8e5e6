"""The notebooks: each finishes, and the outputs that are shown in the documentation are its own."""

import ast
import re

import nbformat
import pytest

from notebooks.execute import HERE, NAMES, source

from ..helpers import ROOT, output_of


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def kinds(cell):
    """What a cell puts out: streams by name, others by their types."""
    return [sorted(output.get("data", [output.get("name")])) for output in cell.outputs]


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_finishes(name, tmp_path):
    """With outputs of the kinds that the committed pair has, and nothing on the error stream."""
    committed = nbformat.read(HERE / f"{name}.ipynb", as_version=4)
    assert cells(committed) == cells(source(name)), f"run `python notebooks/execute.py {name}`"
    points = {"TRACEAX_NOTEBOOK_POINTS": "2000"}
    output_of(HERE / "execute.py", name, "--output", tmp_path, quick=False, variables=points)
    found = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    for new, old in zip(code(found), code(committed), strict=True):
        assert kinds(new) == kinds(old), new.source
        assert not {"stderr", "error"} & {kind for output in kinds(new) for kind in output}
        # Whatever is printed or drawn is shown.
        assert bool(old.outputs) == bool(re.search(r"\bprint\(|plt\.show\(", old.source))


@pytest.mark.parametrize("name", NAMES)
def test_its_last_cell_asserts_what_it_claims(name):
    notebook = source(name)
    assert notebook.cells[0].source.startswith("# ")
    last = notebook.cells[-1]
    assert last.cell_type == "code"
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(last.source)))


def test_pairs_and_pages():
    """Every source has its pair, small enough to be kept, without a path, and a page."""
    assert sorted(path.stem for path in HERE.glob("*.ipynb")) == NAMES
    navigation = (ROOT / "mkdocs.yml").read_text()
    for name in NAMES:
        text = (HERE / f"{name}.ipynb").read_text()
        assert len(text) < 200_000
        assert not re.search(r'"(/home|/tmp|/root|/Users)/', text)
        assert f": notebooks/{name}.md\n" in navigation

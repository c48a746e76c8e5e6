"""The pages of the documentation: their programs run, and every public name has its place."""

import importlib.util
import re
import runpy

import pytest

import traceax as tr

from ..helpers import ROOT, output_of

DOCS = ROOT / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))
OUTPUTS = runpy.run_path(str(DOCS / "outputs.py"))
PROGRAMS = {page: OUTPUTS["BLOCK"].findall((DOCS / page).read_text()) for page in PAGES}


def resembles(printed, shown):
    """Whether words agree, numbers to a tenth, and bars to a factor of five. Seconds are free."""
    printed, shown = (re.sub(r"seconds +\S+", "seconds", text) for text in (printed, shown))
    number = re.compile(r"(\+- *|err\w* +)?(-?\d+\.?\d*(?:e[+-]?\d+)?)")
    words = [re.sub(r"\s+", " ", number.sub(r"\1", text)) for text in (printed, shown)]
    if words[0] != words[1]:
        return False
    for (bar, new), (_, old) in zip(number.findall(printed), number.findall(shown), strict=True):
        new, old = float(new), float(old)
        if not (old / 5 <= new <= old * 5 if bar else abs(new - old) <= 0.1 * abs(old)):
            return False
    return True


def test_what_resembles_an_output():
    assert resembles("value 1.02 +- 0.3\n", "value  1.0 +- 0.1\n")
    assert resembles("seconds   15.2\n", "seconds   1.3\n")
    assert not resembles("value 1.2 +- 0.1", "value 1.0 +- 0.1")
    assert not resembles("value 1.0 +- 0.1", "value 1.0 +- 0.6")
    assert not resembles("value 1.0", "valve 1.0")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, blocks in PROGRAMS.items() if blocks])
def test_programs_run(page):
    """The blocks of a page are one program, in a process of its own, and print what is shown."""

    def run(*arguments, **options):
        return output_of(*arguments, quick=False, **options)

    for shown, printed in OUTPUTS["outputs"]((DOCS / page).read_text(), run):
        assert resembles(printed, shown), f"{printed}\nrun `python docs/outputs.py docs/{page}`"


def test_programs_are_python():
    """Or commands of traceax, with their outputs: no block that is not run."""
    blocks = [block for blocks in PROGRAMS.values() for block in blocks]
    assert {language for language, _ in blocks} == {"python", "text", "sh"}
    assert len(blocks) > 20
    for language, code in blocks:
        assert language != "sh" or re.fullmatch(r"python -m traceax [^\n]*\n", code)


@pytest.mark.parametrize("name", [name for name in vars(tr) if not name.startswith("_")])
def test_public_names_have_a_reference(name):
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    of_module = {
        "curvature": (
            *("hessian", "gauss_newton", "fisher", "of", "ungroup"),
            *("Curvature", "CurvatureOperator"),
        ),
        "plot": ("spectral_density", "traces", "sharpness", "shifts", "interval"),
        # Not imported with the package; where tests/estimators/test_own_estimator.py imports them.
        "extend": ("BlockOperator",),
        "testing": ("check_estimator",),
    }
    names = [f"{name}.{each}" for each in of_module.get(name, ())] or [name]
    for each in names:
        assert f"::: traceax.{each}\n" in text, each


def test_pages_stand_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f": {page.relative_to(DOCS)}\n" in navigation, page


def test_tables_of_benchmarks():
    """They are those of the stored results, and the page is short."""
    text = (DOCS / "benchmarks.md").read_text()
    assert len(text.split()) <= 1000
    renewed = runpy.run_path(str(DOCS / "tables.py"))["renewed"](text)
    assert renewed == text, "run `python docs/tables.py`"


# --- the site ------------------------------------------------------------------------------------

needs_site = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("math_core") is None,
    reason="needs the extra `docs`",
)


@pytest.mark.slow
@needs_site
def test_site_has_no_tex_and_needs_no_network(tmp_path):
    output_of("-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path))
    pages = {str(x.relative_to(tmp_path)): x.read_text() for x in tmp_path.rglob("*.html")}
    assert len(pages) > 25
    for name, page in pages.items():
        text = re.sub(r"<(code|pre|script|style)\b.*?</\1>|<[^>]*>", "", page, flags=re.DOTALL)
        assert not re.search(r"\\[a-zA-Z()\[\]]|\$", text), name
        loaded = re.findall(r"<(?:link\b[^>]*\bhref|[^>]*\bsrc)=[\"']?([^\"'\s>]*)", page)
        assert not [url for url in loaded if re.match(r"\w+:(?!image)|//", url)], name
    for path in tmp_path.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(\w+:(?!image)|//)", path.read_text()), path
    # Formulas of a page, of docstrings, and of a notebook.
    for name in ("gradients", "api/traces", "notebooks/gp_co2"):
        assert len(re.findall(r"<math\b", pages[f"{name}/index.html"])) >= 5


# --- the page for maintainers --------------------------------------------------------------------


def test_the_page_for_maintainers_names_what_there_is():
    """Its files and folders exist, those files define its names, and no room is left out."""
    text = (DOCS / "inside.md").read_text()
    spans = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
    paths = {span for span in spans if re.fullmatch(r"[\w./]+(/|\.(py|md|toml))", span)}
    sources = ""
    for path in paths:
        found = [folder / path for folder in (ROOT, ROOT / "traceax") if (folder / path).exists()]
        assert found, path
        assert found[0].is_dir() == path.endswith("/"), path
        if path.endswith(".py"):
            sources += found[0].read_text()
    names = {span for span in spans if span.isidentifier()} - {"vmap"}
    assert len(paths) > 40
    assert len(names) > 50
    defined = r"(?m)^ *((def|class) {0}\b|{0}(:| =))"
    assert not {name for name in names if not re.search(defined.format(name), sources)}

    rooms = runpy.run_path(str(DOCS / "rooms.py"))
    folders = {path.parent.name for path in (ROOT / "traceax").glob("*/__init__.py")}
    in_picture = {room for layer in rooms["layers"]() for room in layer}
    assert folders == {room for room in in_picture if rooms["path_of"](room).is_dir()}
    for room in in_picture:
        path = rooms["path_of"](room)
        assert (f"{room}/" if path.is_dir() else path.name) in spans
    assert rooms["PICTURE"].read_text() == rooms["picture"](), "run `python docs/rooms.py`"

"""The picture of the rooms, for the page "Inside traceax": `python docs/rooms.py` draws it anew.

The order of the rooms is that of the contract in `pyproject.toml`; what is written in a room is the
beginning of its docstring.
"""

import ast
import html
import re
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "rooms.svg"

#: The rooms that a call of `traceax.trace` goes through.
OF_A_TRACE = (
    "_estimators",
    "_sketch",
    "_operators",
    "_linalg",
    "_core",
    "_probes",
)

WIDTH, HEIGHT, GAP, LEFT = 760, 70, 10, 40
PADDING = 10
# Boxes are opaque, and everything else is grey: right on a light page and on a dark one.
BEGIN = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
font-family="system-ui, sans-serif">
<title>The rooms of traceax, each above those that it may import</title>
<defs><marker id="head" viewBox="0 0 10 10" refX="5" refY="5" markerWidth="8" markerHeight="8" \
orient="auto"><path d="M0 0 10 5 0 10z" fill="#888"/></marker></defs>
<path d="M16 8V{end}" stroke="#888" stroke-width="2" marker-end="url(#head)"/>
<text x="0" y="0" transform="translate(34 {middle}) rotate(-90)" text-anchor="middle" \
font-size="13" fill="#888">imports</text>
"""
BOX = """\
<rect x="{x:g}" y="{y}" width="{width:g}" height="{height}" rx="6" fill="{fill}" stroke="#5c6bc0"/>
<text x="{text_at:g}" y="{name_at}" font-size="14" font-weight="600" \
fill="#1a237e">{name}</text>
"""
LINE = '<text x="{x:g}" y="{y}" font-size="11" fill="#333">{text}</text>\n'


def layers() -> list[list[str]]:
    """The rooms from the top to the bottom; those of one layer do not import each other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    return [re.split(r"\s*\|\s*", layer) for layer in contract["layers"]]


def path_of(room: str) -> Path:
    """The folder, or the file, that a room is."""
    folder = ROOT / "traceax" / room
    return folder if folder.is_dir() else folder.with_suffix(".py")


def purpose(room: str) -> str:
    """The first words of its docstring."""
    path = path_of(room)
    source = (path / "__init__.py" if path.is_dir() else path).read_text()
    docstring = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
    return re.split(r"[.:;](?: |$)", docstring.replace("`", ""))[0]


def picture() -> str:
    """The picture, as SVG."""
    rows = layers()
    height = len(rows) * (HEIGHT + GAP)
    text = BEGIN.format(width=WIDTH, height=height, end=height - GAP - 12, middle=height // 2)
    for row, rooms in enumerate(rows):
        y = row * (HEIGHT + GAP) + 1
        width = (WIDTH - LEFT - 1 - GAP * (len(rooms) - 1)) / len(rooms)
        for column, room in enumerate(rooms):
            x = LEFT + column * (width + GAP)
            name = f"{room}/" if path_of(room).is_dir() else f"{room}.py"
            lines = textwrap.wrap(purpose(room), int((width - 2 * PADDING) / 6))
            first = y + (HEIGHT - 16 - 13 * len(lines)) / 2 + 13
            text += BOX.format(
                x=x,
                y=y,
                width=width,
                height=HEIGHT,
                fill="#c5cae9" if room in OF_A_TRACE else "#f3f4fa",
                text_at=x + PADDING,
                name_at=f"{first:g}",
                name=name,
            )
            for number, line in enumerate(lines):
                at = f"{first + 15 + 13 * number:g}"
                text += LINE.format(x=x + PADDING, y=at, text=html.escape(line))
    return f"{text}</svg>\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())

"""Hook of MkDocs: the names on the page of all names are links to their references."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def on_page_markdown(markdown, page, config, files):
    """Link what has a reference; modules have none."""
    del config, files
    if page.file.src_uri != "api.md":
        return markdown
    references = "".join(path.read_text() for path in (HERE / "api").glob("*.md"))
    names = set(re.findall(r"^::: (\S+)$", references, re.MULTILINE))

    def linked(span):
        return f"[{span[0]}][{span[1]}]" if span[1] in names else span[0]

    return re.sub(r"`([\w.]+)`", linked, markdown)

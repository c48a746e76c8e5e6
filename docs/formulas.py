"""Hook of MkDocs: the formulas of a page are typeset when the site is built.

Markdown's extension `pymdownx.arithmatex` finds the formulas, in pages, docstrings and notebooks
alike, and leaves their TeX source in the page. This hook puts MathML in its place, which browsers
show by themselves: a page needs neither a script nor a network for it.
"""

import html
import re

from math_core import LatexError, LatexToMathML
from mkdocs.exceptions import PluginError

_FORMULA = re.compile(
    r'(?P<before>[(]*)<(?P<tag>span|div) class="arithmatex">'
    r"\\[(\[](?P<source>.*?)\\[)\]]</(?P=tag)>"
    r"(?P<after>[.,;:)]*)",
    re.DOTALL,
)
_CONVERTER = LatexToMathML(fancy_error=False)


def on_page_content(content, page, config, files):
    """Convert every formula, or fail with the page, the formula, and what is wrong with it."""
    del config, files

    def converted(formula):
        tag, source = formula["tag"], html.unescape(formula["source"])
        try:
            mathml = _CONVERTER.convert_with_local_state(source, displaystyle=tag == "div")
        except LatexError as error:
            where = page.file.src_uri
            raise PluginError(f"{where}: the formula {source!r} is not typeset: {error}") from error
        # Within the span, what stands at a formula is not torn from it at the end of a line.
        around = formula["before"], formula["after"]
        return f'<{tag} class="arithmatex">{mathml.join(around)}</{tag}>'

    content = _FORMULA.sub(converted, content)
    if re.search('class="arithmatex">(?![(]*<math)', content):
        raise PluginError(f"{page.file.src_uri}: a formula is not in a form that is typeset.")
    return content

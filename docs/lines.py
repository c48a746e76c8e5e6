"""Hook of MkDocs: what the end of a line must not tear, and links to the sources.

Short code and short cells of tables get the class `short`, long cells the class `long`, for which
`site.css` has rules. A per cent sign stays with its number. What is written `arXiv:2301.07825` or
`doi:10.1137/130934283` becomes a link.
"""

import html
import re

_TAG = re.compile(r"<[^>]*>")
_CELL = re.compile(r"<td( [^>]*)?>(.*?)</td>", re.DOTALL)
#: Parts of a page that stay as they are, inline code among them.
_KEPT = re.compile(r"<(pre|code|a|math|style|script)\b.*?</\1>", re.DOTALL)
_ARXIV = re.compile(r"\barXiv:(\d{4}\.\d{4,5})")
_DOI = re.compile(r"\bdoi:(10\.\d+/[^\s<>;,]*[^\s<>;,.)])")
#: Lengths in characters. So much code fits into a line on a phone.
SHORT_CODE, SHORT_CELL, LONG_CELL = 36, 16, 60


def _length(content):
    return len(html.unescape(_TAG.sub("", content)))


def _code(found):
    name = "short" if _length(found[1]) <= SHORT_CODE else "long"
    return f'<code class="{name}">{found[1]}</code>'


def _cell(found):
    length = 0 if "<math" in found[2] else _length(found[2])
    if SHORT_CELL < length < LONG_CELL:
        return found[0]
    name = "short" if length <= SHORT_CELL else "long"
    return f'<td class="{name}"{found[1] or ""}>{found[2]}</td>'


def _prose(text):
    text = re.sub(r"(\d) %", r"\1&nbsp;%", text)
    text = _ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', text)
    return _DOI.sub(r'<a href="https://doi.org/\1">doi:\1</a>', text)


def on_page_content(content, page, config, files):
    """Mark short and long parts, and write the prose between code and links anew."""
    del page, config, files
    content = _CELL.sub(_cell, content)
    parts, end = [], 0
    for kept in _KEPT.finditer(content):
        span = re.sub(r"<code>(.*?)</code>", _code, kept[0]) if kept[1] != "pre" else kept[0]
        parts += [_prose(content[end : kept.start()]), span]
        end = kept.end()
    return "".join([*parts, _prose(content[end:])])

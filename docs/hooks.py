"""Formulas become MathML when the pages are built: readable offline, without a script from anybody's server."""

import html
import re

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    """Called by mkdocs with the HTML of every page."""

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match[2] == "[" else "inline"
        return convert(html.unescape(match[3]).strip(), display=display)

    return _FORMULA.sub(mathml, content)

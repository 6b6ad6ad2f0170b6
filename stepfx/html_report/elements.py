"""HTML and SVG as text, with everything that a model names escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable

VOID = frozenset({"path", "rect", "line", "br", "meta"})


def text(value: object) -> str:
    """Return a value as text of a page."""
    return html.escape(str(value))


def element(name: str, *content: str, **attributes: object) -> str:
    """Return an element around `content`, which is HTML already.

    An underscore behind an attribute's name is dropped (`class_`), others become hyphens; an
    attribute of None is left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID and not content:
        return f"<{name}{given}/>"
    return f"<{name}{given}>{''.join(content)}</{name}>"


def section(title: str, *content: str, note: str = "") -> str:
    """Return a titled part of the page; `note` is a sentence that says how to read it."""
    head = element("h2", text(title))
    lead = element("p", text(note), class_="note") if note else ""
    return element("section", head, lead, *content)


def details(summary: str, *content: str, is_open: bool = False) -> str:
    """Return content that a click on `summary` (HTML) unfolds."""
    head = element("summary", summary)
    return element("details", head, *content, open="open" if is_open else None)


def table(
    columns: Iterable[str], rows: Iterable[Iterable[str]], numeric: Iterable[int] = ()
) -> str:
    """Return a table whose cells are HTML; `numeric` columns stand right-aligned."""
    right = set(numeric)

    def line(tag: str, cells: Iterable[str]) -> str:
        return element(
            "tr",
            *(
                element(tag, cell, class_="number" if i in right else None)
                for i, cell in enumerate(cells)
            ),
        )

    head = element("thead", line("th", map(text, columns)))
    body = element("tbody", *(line("td", row) for row in rows))
    return element("div", element("table", head, body), class_="scroll")

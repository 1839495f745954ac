# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The page as one HTML document; page.js draws the same from /status.json afterwards.

Invariant: a text becomes markup in `_text` and `_attributes` alone, which escape it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Final, NewType

from agent.page.content import Cell, Page, Table
from agent.page.graph import HEIGHT, WIDTH, Graph

Markup = NewType("Markup", str)

STYLE: Final = files("agent.page").joinpath("page.css").read_text(encoding="utf-8")
SCRIPT: Final = files("agent.page").joinpath("page.js").read_text(encoding="utf-8")


def _source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


# Nothing from elsewhere, and of ours only these two texts: markup that got into the page would neither run nor load.
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_source(SCRIPT)}",
        f"style-src {_source(STYLE)}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


def document(page: Page) -> str:
    """The whole of it."""
    head = _join(
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        _element("title", _text(f"GPU Warden: {page.host}")),
        Markup(f"<style>{STYLE}</style>"),
    )
    title = _element("h1", _text("GPU Warden "), _element("span", _text(page.host), id="host"))
    top = _element("header", title, _element("p", _text(page.headline), id="headline", role="status"))
    notes = _element("div", *(_element("p", _text(note.text), class_=note.kind) for note in page.notes), id="notes")
    main = _element("main", *map(_table, page.tables))
    foot = Markup(
        '<footer>read-only · <a href="/metrics">/metrics</a> · <a href="/status.json">/status.json</a></footer>'
    )
    body = _element("body", top, notes, main, foot, Markup(f"<script>{SCRIPT}</script>"))
    return f'<!doctype html><html lang="en">{_element("head", head)}{body}</html>'


def _table(table: Table) -> Markup:
    columns = _element(
        "tr", *(_element("th", _text(cell.text), class_=cell.kind, scope="col") for cell in table.columns)
    )
    rows = (_element("tr", *map(_cell, row)) for row in table.rows)
    drawn = _element("table", _element("thead", columns), _element("tbody", *rows))
    remark = _element("p", _text(table.remark), class_="remark")
    return _element("section", _element("h2", _text(table.title)), _element("div", drawn, class_="scroll"), remark)


def _cell(cell: Cell) -> Markup:
    text = _element("span", _text(cell.text))
    return _element("td", _element("div", _graph(cell.graph), text) if cell.graph else text, class_=cell.kind)


def _graph(graph: Graph) -> Markup:
    box = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "preserveAspectRatio": "none", "role": "img", "aria-label": graph.label}
    level = _element("path", d=graph.level, class_="level") if graph.level else Markup("")
    return _element("svg", level, _element("path", d=graph.line), **box)


def _element(name: str, *children: Markup, **attributes: str) -> Markup:
    return Markup(f"<{name}{_attributes(attributes.items())}>{_join(*children)}</{name}>")


def _attributes(attributes: Iterable[tuple[str, str]]) -> str:
    return "".join(f' {name.rstrip("_")}="{escape(value)}"' for name, value in attributes)


def _text(text: str) -> Markup:
    return Markup(escape(text))


def _join(*parts: Markup) -> Markup:
    return Markup("".join(parts))

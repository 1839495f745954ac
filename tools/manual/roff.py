# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The little of man(7) that the pages need. All text goes through `plain`, so that nothing in it is taken for roff."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Final

_WIDTH: Final = 72  # escapes make lines longer; mandoc asks for 80 at most


def plain(text: str) -> str:
    """Escapes text for roff, in lines of limited length."""
    lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(_escaped, lines))


def _escaped(line: str) -> str:
    escaped = line.replace("\\", r"\e").replace("-", r"\-")
    escaped = "".join(c if c.isascii() else f"\\[u{ord(c):04X}]" for c in escaped)
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def bold(text: str) -> str:
    """Bold, for what is typed literally."""
    return rf"\fB{plain(text)}\fR"


def italic(text: str) -> str:
    """Italic, for placeholders."""
    return rf"\fI{plain(text)}\fR"


def title(name: str, section: int, date: str, source: str, manual: str) -> str:
    """The page's head and foot."""
    return f'.TH "{plain(name.upper())}" "{section}" "{date}" "{plain(source)}" "{plain(manual)}"'


def section(name: str, *parts: str) -> str:
    """A section with its content; nothing where that is empty."""
    return "\n".join([f'.SH "{plain(name.upper())}"', *parts]) if parts else ""


def subsection(name: str, *parts: str) -> str:
    """A subsection; `name` is roff already."""
    return "\n".join([f'.SS "{name}"', *parts])


def paragraphs(texts: Iterable[str]) -> str:
    """Paragraphs of plain text."""
    return "\n.P\n".join(map(plain, texts))


def item(tag: str, text: str) -> str:
    """A term, which is roff already, and its explanation."""
    return f".TP\n{tag}\n{plain(text)}"


def terms(found: Iterable[tuple[str, str]]) -> list[str]:
    """A list of items whose terms are typed literally."""
    return [item(bold(term), text) for term, text in found]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Text output: as wide as the terminal, or 80 columns without one; in ASCII where the encoding is not UTF-8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from agent.core.text import printable

_ASCII: Final = str.maketrans({"–": "-", "→": "to", "…": "~"})


class Printer:
    """Prints text literally: nothing in it is markup or a terminal escape."""

    def __init__(self, out: IO[str]) -> None:
        self._console = Console(file=out, highlight=False, markup=False, width=None if out.isatty() else 80)
        self._utf8 = self._console.encoding.lower().startswith("utf")

    def line(self, text: str = "", style: str = "") -> None:
        """One line, folded where it is too long."""
        self._console.print(self._text(text), style=style)

    def parts(self, *parts: tuple[str, str]) -> None:
        """One line of texts and their styles, never folded: it lines up with the next one."""
        self._console.print(Text.assemble(*((self._shown(text), style) for text, style in parts)), soft_wrap=True)

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Indented rows of a label and a text."""
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in rows:
            table.add_row(self._text(label), self._text(text))
        if rows:
            self._console.print(Padding(table, (0, 0, 0, 2)))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; cells that do not fit are folded."""
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(self._text(cell) for cell in row))
        self._console.print(table)

    def _text(self, text: str) -> Text:
        return Text(self._shown(text))

    def _shown(self, text: str) -> str:
        text = "\n".join(map(printable, text.split("\n")))
        return text if self._utf8 else text.translate(_ASCII).encode("ascii", "backslashreplace").decode()

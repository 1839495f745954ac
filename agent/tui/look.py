# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How somebody wants to see the list: view, tree, order, filter, columns. Pure: each key makes a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from agent.model import Snapshot
from agent.tui import rows
from agent.tui.cells import Glyphs
from agent.tui.columns import Column, fit, header, line
from agent.tui.entries import View, entries
from agent.tui.order import BUSIEST, Line, Order, arranged


@dataclass(frozen=True, slots=True)
class Look:
    """What was chosen. `hidden` are keys of columns."""

    view: View = View.CONTAINER
    tree: bool = False
    order: Order = BUSIEST
    wanted: str = ""
    hidden: frozenset[str] = frozenset()

    def seen(self, view: View) -> Look:
        """Another view, in the order that it shares with this one or else in the usual one."""
        shared = view is not View.PROCESS and self.view is not View.PROCESS
        return replace(self, view=view, order=self.order if shared else BUSIEST)

    def branched(self) -> Look:
        """With the tree, or without it; a tree begins with containers."""
        if self.view is View.PROCESS:
            return replace(self.seen(View.CONTAINER), tree=True)
        return replace(self, tree=not self.tree)

    def sorted_beside(self, step: int, shown: Sequence[Column]) -> Look:
        """By the next column to the right (1) or to the left (-1) of those that are shown."""
        keys = [column.key for column in shown]
        at = keys.index(self.order.column) if self.order.column in keys else 0
        return replace(self, order=Order(keys[(at + step) % len(keys)]))

    def reversed(self) -> Look:
        """The other way round."""
        return replace(self, order=replace(self.order, reverse=not self.order.reverse))


@dataclass(frozen=True, slots=True)
class Listed:
    """A snapshot in the way that somebody wants to see it, for one width."""

    snapshot: Snapshot
    look: Look
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    glyphs: Glyphs

    @classmethod
    def of(cls, snapshot: Snapshot, look: Look, width: int, glyphs: Glyphs) -> Listed:
        """Sorted, filtered and fit to the width."""
        columns = [one for one in rows.columns(snapshot, look.view) if one.key not in look.hidden]
        lines = arranged(entries(snapshot, look.view, tree=look.tree), look.order, look.wanted)
        return cls(snapshot, look, tuple(fit(columns, width)), tuple(lines), glyphs)

    @property
    def header(self) -> Text:
        """The titles of the columns."""
        return header(self.columns, self.glyphs, self.look.order.column, self.look.order.reverse)

    def drawn(self, index: int) -> Text:
        """The n-th line; only those that are on the screen are ever asked for."""
        cells = rows.row(self.lines[index], self.snapshot, self.look.view, self.glyphs)
        return line(self.columns, cells, self.glyphs)

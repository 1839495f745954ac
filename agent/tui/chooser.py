# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which columns are shown: those of the view, each to be ticked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from agent.tui.columns import Column
from agent.tui.widgets import Ticks

ALWAYS: Final = ("name", "command", "tgid")


class Chooser(ModalScreen[frozenset[str]]):
    """Ends with the keys of all that are hidden, those of other views included."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,c,f2,q", "done")]
    CSS = """
    Chooser { align: center middle; }
    Chooser Vertical { width: 34; height: auto; max-height: 90%; border: ascii $foreground; }
    """

    def __init__(self, columns: Sequence[Column], hidden: frozenset[str]) -> None:
        super().__init__()
        self._offered = {column.key: column.title for column in columns if column.key not in ALWAYS}
        self._hidden = hidden

    def compose(self) -> ComposeResult:
        """Columns that are always shown are not offered."""
        frame = Vertical(Ticks(self._offered, self._offered.keys() - self._hidden))
        frame.border_title, frame.border_subtitle = "columns", "Space ticks, Esc ends"
        yield frame

    def on_mount(self) -> None:
        """The choices have the keys."""
        self.query_one(Ticks).focus()

    def action_done(self) -> None:
        """What is not ticked is hidden; what has no room is not shown either."""
        offered = self._offered.keys()
        self.dismiss((self._hidden - offered) | (offered - self.query_one(Ticks).ticked))

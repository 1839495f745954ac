# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which columns are shown: those of the view, each to be ticked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import SelectionList
from textual.widgets.selection_list import Selection

from agent.tui.columns import Column


class Chooser(ModalScreen[frozenset[str]]):
    """Ends with the keys of all that are hidden, those of other views included."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,c,f2,q", "done")]
    CSS = """
    Chooser { align: center middle; }
    Chooser SelectionList { width: 34; height: auto; max-height: 90%; border: round $foreground; }
    """

    def __init__(self, columns: Sequence[Column], hidden: frozenset[str]) -> None:
        super().__init__()
        self._columns, self._hidden = columns, hidden

    def compose(self) -> ComposeResult:
        """Columns that are always shown are not offered."""
        choices = [
            Selection(column.title, column.key, column.key not in self._hidden)
            for column in self._columns
            if column.key not in ("name", "command", "tgid")
        ]
        chosen = SelectionList[str](*choices)
        chosen.border_title = "columns"
        chosen.border_subtitle = "Space ticks, Esc ends"
        yield chosen

    def action_done(self) -> None:
        """What is not ticked is hidden."""
        chosen = self.query_one(SelectionList)
        offered = {chosen.get_option_at_index(index).value for index in range(chosen.option_count)}
        self.dismiss((self._hidden - offered) | (offered - set(chosen.selected)))

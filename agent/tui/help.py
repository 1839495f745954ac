# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The page that says what the keys do."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from agent.tui import keys
from agent.tui.widgets import Lines, Page


class HelpScreen(Screen[None]):
    """Over everything until Escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,h,question_mark,f1", "dismiss"), Binding("q", "dismiss")]

    def compose(self) -> ComposeResult:
        """The page and its keys."""
        yield Page("page")
        yield Lines("foot")

    def on_mount(self) -> None:
        """Fills it in."""
        self.query_one(Page).show(keys.help_page())
        self.query_one("#foot", Lines).show([keys.foot(keys.HELP_PAGE, self.app.size.width)])
        self.query_one(Page).focus()

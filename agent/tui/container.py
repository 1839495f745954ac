# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The page of one container, drawn anew with each tick; the agent is asked for its decisions now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.worker import get_current_worker

from agent.errors import WardenError
from agent.model import ContainerKey
from agent.tui import keys
from agent.tui.page import container_page
from agent.tui.told import Tell, Told, seen
from agent.tui.widgets import Lines, Page

if TYPE_CHECKING:
    from agent.tui.app import Top

ASK_SECONDS: Final = 5.0


class ContainerScreen(Screen[None]):
    """Until Escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,backspace", "dismiss")]

    def __init__(self, top: Top, key: ContainerKey) -> None:
        super().__init__()
        self._top, self._key = top, key
        self._told: Sequence[Told] | str = "asking the agent"
        self._asked = -ASK_SECONDS

    def compose(self) -> ComposeResult:
        """The page and its keys."""
        yield Page("page")
        yield Lines("foot")

    def on_mount(self) -> None:
        """The first drawing."""
        self.query_one(Page).focus()
        self.draw()

    def draw(self) -> None:
        """What is known of it now."""
        top = self._top
        if top.shown is None:
            return
        told = self._decisions(top.setting.tell)
        size, glyphs = (top.size.width, top.size.height), top.setting.glyphs
        page = container_page(top.shown, self._key, top.drawn, told, size, glyphs)
        self.query_one(Page).show([*top.frame.head(top.shown, top.drawn)[:1], *page])
        self.query_one("#foot", Lines).show([keys.foot(keys.PAGE, size[0])])

    def _decisions(self, tell: Tell | None) -> Sequence[Told] | str:
        if tell is None:
            return seen(self._top.drawn, self._key)
        if time.monotonic() - self._asked >= ASK_SECONDS and not self._top.paused:
            self._asked = time.monotonic()
            self.run_worker(lambda: self._ask(tell), thread=True, exclusive=True, group="asking")
        return self._told

    def _ask(self, tell: Tell) -> None:
        worker = get_current_worker()
        told: Sequence[Told] | str
        try:
            told = tell(self._key)
        except WardenError as error:
            told = str(error)
        if not worker.is_cancelled:
            self.app.call_from_thread(self._answered, told)

    def _answered(self, told: Sequence[Told] | str) -> None:
        self._told = told
        self.draw()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What gputop shows over or beside the list: a container's page, the choice of columns, the prompt, and the help.

The container's page is drawn anew with each tick; the agent is asked for its decisions every ASK_SECONDS, on a thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar, Final, Protocol

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.screen import ModalScreen, Screen
from textual.widgets import Input
from textual.worker import get_current_worker

from agent.core.errors import WardenError
from agent.core.model import ContainerKey, Snapshot
from agent.tui import screen
from agent.tui.columns import Column
from agent.tui.container_page import container_page
from agent.tui.history import AskDecisions, DecisionBlock, SnapshotHistory, observed_changes
from agent.tui.live.widgets import Lines, Page, Ticks

ASK_SECONDS: Final = 5.0


class Display(Protocol):
    """What a page over the list shows of the live view: the snapshot on display, and the history up to it."""

    shown: Snapshot | None
    drawn: SnapshotHistory
    paused: bool

    @property
    def frame(self) -> screen.Frame: ...
    @property
    def size(self) -> Size: ...


class ContainerScreen(Screen[None]):
    """The page of one container, until Escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,backspace", "dismiss")]

    def __init__(self, top: Display, key: ContainerKey, ask_decisions: AskDecisions | None) -> None:
        super().__init__()
        self._top, self._key, self._ask_decisions = top, key, ask_decisions
        self._asked_decisions: Sequence[DecisionBlock] | str = "asking the agent"
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
        decisions = self._decisions(self._ask_decisions)
        size, glyphs = (top.size.width, top.size.height), top.frame.glyphs
        page = container_page(top.shown, self._key, top.drawn, decisions, size, glyphs)
        self.query_one(Page).show([*top.frame.head(top.shown, top.drawn)[:1], *page])
        self.query_one("#foot", Lines).show([screen.foot(screen.PAGE, size[0])])

    def _decisions(self, ask_decisions: AskDecisions | None) -> Sequence[DecisionBlock] | str:
        if ask_decisions is None:
            return observed_changes(self._top.drawn, self._key)
        if time.monotonic() - self._asked >= ASK_SECONDS and not self._top.paused:
            self._asked = time.monotonic()
            self.run_worker(lambda: self._ask(ask_decisions), thread=True, exclusive=True, group="asking")
        return self._asked_decisions

    def _ask(self, ask_decisions: AskDecisions) -> None:
        worker = get_current_worker()
        decisions: Sequence[DecisionBlock] | str
        try:
            decisions = ask_decisions(self._key)
        except WardenError as error:
            decisions = str(error)
        if not worker.is_cancelled:
            self.app.call_from_thread(self._answered, decisions)

    def _answered(self, decisions: Sequence[DecisionBlock] | str) -> None:
        self._asked_decisions = decisions
        self.draw()


ALWAYS: Final = ("name", "command", "tgid")


class Chooser(ModalScreen[frozenset[str]]):
    """The columns of the view, each to be ticked. Ends with the keys of all hidden ones, of other views too."""

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


class Prompt(Input):
    """The line for the word to filter by or to search for, while it is open. `what`: its purpose."""

    DEFAULT_CSS = "Prompt { display: none; height: 1; border: none; padding: 0; } Prompt.open { display: block; }"

    def __init__(self) -> None:
        super().__init__(compact=True, select_on_focus=False)
        self.what = ""
        self.cursor_blink = False

    @property
    def is_open(self) -> bool:
        """Whether it has the keys."""
        return bool(self.what)

    def open(self, what: str, word: str) -> None:
        """Takes the keys."""
        self.what, self.placeholder = what, f"{what}: a word, Enter keeps it, Esc takes it back"
        self.value = word
        self.cursor_position = len(word)
        self.add_class("open")
        self.focus()

    def close(self) -> None:
        """Gives the keys back."""
        self.what = ""
        self.remove_class("open")


class HelpScreen(Screen[None]):
    """What the keys do, until Escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,h,question_mark,f1", "dismiss"), Binding("q", "dismiss")]

    def compose(self) -> ComposeResult:
        """The page and its keys."""
        yield Page("page")
        yield Lines("foot")

    def on_mount(self) -> None:
        """Fills it in."""
        self.query_one(Page).show(screen.help_page())
        self.query_one("#foot", Lines).show([screen.foot(screen.HELP_PAGE, self.app.size.width)])
        self.query_one(Page).focus()

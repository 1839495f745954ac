# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""gputop live: devices on top, the list below them, keys at the foot; all that is drawn comes from pure functions.

Snapshots arrive as messages from a feed (agent.tui.live.feed), also while the display is paused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final

from rich.style import Style
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Key
from textual.widgets import Input

from agent.core.model import Snapshot
from agent.core.text import Glyphs
from agent.tui import cells, columns
from agent.tui.history import AskDecisions, SnapshotHistory
from agent.tui.listing import View, found
from agent.tui.live.feed import Failed, Feed, SnapshotReceived
from agent.tui.live.screens import Chooser, ContainerScreen, HelpScreen, Prompt
from agent.tui.live.widgets import Lines, Listing
from agent.tui.screen import Frame
from agent.tui.view import ListOptions, ListTable

VIEWS: Final = {"1": View.CONTAINER, "2": View.PROCESS, "3": View.GPU}
FAR: Final = 1 << 30  # ticks of a recording: to its end
OF_THE_LIST: Final = frozenset(
    ("view", "tree", "sort", "reverse", "filter", "search", "next", "columns", "open", "unfilter")
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What gputop was started with."""

    view: View
    glyphs: Glyphs
    light: bool = False
    replaying: bool = False
    alone: bool = False  # no agent runs
    ask_decisions: AskDecisions | None = None


class Top(App[None]):
    """The program."""

    CSS = "Screen { layout: vertical; overflow: hidden; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"view('{key}')") for key in VIEWS),
        Binding("t", "tree"),
        Binding("comma", "sort(-1)"),
        Binding("full_stop", "sort(1)"),
        Binding("slash", "reverse"),
        Binding("backslash", "filter"),
        Binding("f3", "search"),
        Binding("n", "next"),
        Binding("c,f2", "columns"),
        Binding("p,space", "pause"),
        Binding("left", "seek(-1)"),
        Binding("right", "seek(1)"),
        Binding("home", "end(-1)"),
        Binding("end", "end(1)"),
        Binding("enter", "open"),
        Binding("h,question_mark,f1", "help"),
        Binding("escape", "unfilter"),
        Binding("q,f10", "quit"),
        Binding("ctrl+c", "quit", priority=True),
    ]

    def __init__(self, setting: Setting, feed: Feed) -> None:
        super().__init__(ansi_color=True)
        self.title = "gputop"
        self.setting, self.feed = setting, feed
        self.history, self.list_options = SnapshotHistory(), ListOptions(setting.view)
        self.drawn = self.history  # as it was when the display was paused
        self.latest: Snapshot | None = None
        self.shown: Snapshot | None = None
        self.paused = False
        self.place: str | None = None
        self.failure = self.logged = self.sought = ""

    @property
    def frame(self) -> Frame:
        """What is around the list, now."""
        width, height = self.size
        setting = self.setting
        failure = self.failure or self.logged
        return Frame(width, height, setting.glyphs, setting.alone, self.paused, self.place, failure)

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        background = cells.CURSOR_LIGHT if self.setting.light else cells.CURSOR_DARK
        yield Lines("head")
        yield Listing(Style(reverse=True) if self.no_color else Style(bgcolor=background))
        yield Lines("foot")
        yield Prompt()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The list's keys do nothing while something is over it."""
        return action not in OF_THE_LIST or len(self.screen_stack) == 1

    def on_load(self) -> None:
        """Colours, before anything is drawn."""
        self.theme = "ansi-light" if self.setting.light else "ansi-dark"
        self.console.push_theme(cells.theme(self.setting.light))

    def on_mount(self) -> None:
        """The list has the keys; the first snapshot is on its way."""
        self.query_one(Listing).focus()
        self.feed.start(self)

    def on_resize(self) -> None:
        """Everything anew, once textual knows the size itself: what fits has changed."""
        self.call_later(self.draw)

    def on_snapshot_received(self, message: SnapshotReceived) -> None:
        """Adds it to the history, and shows it unless the display is paused."""
        if message.before is not None:
            self.history = SnapshotHistory(message.before)
        self.history.add(message.snapshot)
        self.latest, self.place, self.failure = message.snapshot, message.place, ""
        if not self.paused or self.setting.replaying:
            self.shown, self.drawn = self.latest, self.history
            self.draw()

    def on_failed(self, message: Failed) -> None:
        """Shows a failure at the foot until the next snapshot, or for good."""
        if message.stays:
            self.logged = message.text
        else:
            self.failure = message.text
        self.draw()

    def on_listing_moved(self) -> None:
        """The foot speaks of the line that the cursor is on."""
        self._draw_foot()

    def draw(self) -> None:
        """The screen that is open, and the list below it, of the snapshot that is shown."""
        if self.shown is None or not self.is_running:
            return
        if isinstance(self.screen, ContainerScreen) and self.screen.is_mounted:
            self.screen.draw()
        self._head.show(self.frame.head(self.shown, self.drawn))
        self._listing.show(ListTable.of(self.shown, self.list_options, self.size.width, self.setting.glyphs))
        self._draw_foot()

    def _draw_foot(self) -> None:
        if self.shown is not None:
            self._foot.show(self.frame.foot(self.shown, self._listing.line, self._remarks()))

    def _remarks(self) -> list[str]:
        """Which part of the list there is to see."""
        first, last, count = self._listing.span
        remarks = [f"{first}-{last} of {count}"] if count > last - first + 1 else []
        if self.list_options.wanted or self._prompt.what == "filter":
            remarks.append(f"filter: {self.list_options.wanted}")
        if self._prompt.what == "search":
            remarks.append("search, F3 for the next")
        if not count:
            remarks.append("nothing matches" if self.list_options.wanted else columns.NOTHING[self.list_options.view])
        return remarks

    @property
    def _listing(self) -> Listing:
        return self.screen_stack[0].query_one(Listing)

    @property
    def _head(self) -> Lines:
        return self.screen_stack[0].query_one("#head", Lines)

    @property
    def _foot(self) -> Lines:
        return self.screen_stack[0].query_one("#foot", Lines)

    @property
    def _prompt(self) -> Prompt:
        return self.screen_stack[0].query_one(Prompt)

    def _show_list(self, options: ListOptions) -> None:
        self.list_options = options
        self.draw()

    def action_view(self, key: str) -> None:
        """Containers, processes or GPUs."""
        self._show_list(self.list_options.of_view(VIEWS[key]))

    def action_tree(self) -> None:
        """With processes and kernels, or without."""
        self._show_list(self.list_options.branched())

    def action_sort(self, step: int) -> None:
        """By the column beside."""
        if table := self._listing.table:
            self._show_list(self.list_options.sorted_beside(step, table.columns))

    def action_reverse(self) -> None:
        """The other way round."""
        self._show_list(self.list_options.reversed())

    def action_unfilter(self) -> None:
        """Everything again."""
        self._show_list(replace(self.list_options, wanted=""))

    def action_filter(self) -> None:
        """Asks for the word that lines must contain."""
        self._prompt.open("filter", self.list_options.wanted)

    def action_search(self) -> None:
        """Asks for the word to go to; while it is asked, goes on to the next line that has it."""
        if self._prompt.what == "search":
            self.action_next()
        else:
            self._prompt.open("search", self.sought)

    def action_next(self) -> None:
        """The next line that has the word."""
        self._find(1)

    def _find(self, step: int) -> None:
        listing = self._listing
        if self.sought and listing.table:
            index = found(listing.table.lines, self.sought, listing.cursor + step)
            listing.action_to(listing.cursor if index is None else index)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filters or searches with each letter."""
        if self._prompt.what == "filter":
            self._show_list(replace(self.list_options, wanted=event.value))
        elif self._prompt.what == "search":
            self.sought = event.value
            self._find(0)

    def on_input_submitted(self) -> None:
        """The word stays."""
        self._prompt.close()
        self._listing.focus()
        self._draw_foot()

    def on_key(self, event: Key) -> None:
        """Escape takes the word back."""
        if self._prompt.is_open and event.key == "escape":
            event.stop()
            event.prevent_default()  # of the binding, which shows everything again
            if self._prompt.what == "filter":
                self.action_unfilter()
            self.on_input_submitted()

    def action_pause(self) -> None:
        """Pauses the display, or goes on with the latest."""
        self.paused = not self.paused
        self.feed.play(not self.paused)
        self.shown, self.drawn = self.latest, self.history.copy() if self.paused else self.history
        self.draw()

    def action_seek(self, step: int) -> None:
        """In a replay: so many ticks on; it stands still then."""
        if self.setting.replaying:
            self.paused = True
            self.feed.play(False)
            self.feed.seek(step)

    def action_end(self, direction: int) -> None:
        """To one end of the list; in a replay, of the recording."""
        if self.setting.replaying:
            self.action_seek(direction * FAR)
        else:
            self._listing.action_to(0 if direction < 0 else -1)

    def action_columns(self) -> None:
        """Which there are, and which are shown."""
        if self.shown is not None:
            self.push_screen(
                Chooser(columns.columns(self.shown, self.list_options.view), self.list_options.hidden), self._chosen
            )

    def _chosen(self, hidden: frozenset[str] | None) -> None:
        if hidden is not None:
            self._show_list(replace(self.list_options, hidden=hidden))

    def action_open(self) -> None:
        """The container of the line that the cursor is on."""
        line = self._listing.line
        if line is not None and line.entry.container is not None:
            self.push_screen(ContainerScreen(self, line.entry.container, self.setting.ask_decisions))

    def action_help(self) -> None:
        """What the keys do."""
        self.push_screen(HelpScreen())

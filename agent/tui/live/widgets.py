# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Lines of text on the screen, and a list of them with a cursor.

They draw only what is visible, and nothing that has not changed: that is what keeps a tick cheap.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from agent.tui.listing import Line
from agent.tui.view import ListTable

WHEEL_LINES = 3


class Lines(Widget):
    """As high as there are lines."""

    DEFAULT_CSS = "Lines { height: auto; }"

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self._lines: Sequence[Text] = ()
        self._top = 0

    def show(self, lines: Sequence[Text]) -> None:
        """Draws these from now on."""
        resized, changed = len(lines) != len(self._lines), lines != self._lines
        self._lines = lines
        if changed:
            self.refresh(layout=resized)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """The number of lines."""
        return len(self._lines)

    def render_line(self, y: int) -> Strip:
        """One line, as wide as the widget."""
        index = y + self._top
        return _strip(self, self._lines[index]) if index < len(self._lines) else Strip.blank(self.size.width)


class Page(Lines, can_focus=True):
    """Lines that fill what room there is; the rest is scrolled to."""

    DEFAULT_CSS = "Page { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)"),
        Binding("down", "move(1)"),
        Binding("pageup", "move(-20)"),
        Binding("pagedown", "move(20)"),
    ]

    def show(self, lines: Sequence[Text]) -> None:
        """Draws these from now on, of which there may be fewer."""
        self._top = self._within(self._top, len(lines))
        super().show(lines)

    def action_move(self, step: int) -> None:
        """Scrolls by so many lines, no further than to the last one."""
        self._top = self._within(self._top + step, len(self._lines))
        self.refresh()

    def _within(self, top: int, count: int) -> int:
        return max(0, min(top, count - self.size.height))

    def on_mouse_scroll_up(self, _: MouseScrollUp) -> None:
        """The wheel."""
        self.action_move(-WHEEL_LINES)

    def on_mouse_scroll_down(self, _: MouseScrollDown) -> None:
        """The wheel."""
        self.action_move(WHEEL_LINES)


class Ticks(Page):
    """Choices, each to be ticked with Space; the cursor is the line that stands out."""

    DEFAULT_CSS = "Ticks { height: auto; max-height: 100%; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("space,enter", "tick")]

    def __init__(self, choices: Mapping[str, str], ticked: Collection[str]) -> None:
        """`choices`: key → title."""
        super().__init__("ticks")
        self._choices, self.ticked = choices, set(ticked)
        self._cursor = 0
        self._draw()

    def action_move(self, step: int) -> None:
        """So many choices down."""
        self._cursor = max(0, min(self._cursor + step, len(self._choices) - 1))
        self._top = max(self._cursor - self.size.height + 1, min(self._top, self._cursor))
        self._draw()

    def action_tick(self) -> None:
        """Chosen, or not."""
        self.ticked ^= {list(self._choices)[self._cursor]}
        self._draw()

    def _draw(self) -> None:
        self.show(
            [
                Text(f" [{'x' if key in self.ticked else ' '}] {title}", "reverse" if number == self._cursor else "")
                for number, (key, title) in enumerate(self._choices.items())
            ]
        )


class Listing(Widget, can_focus=True):
    """The titles and, below them, the lines around the cursor.

    Once it was moved, the cursor stays with its entry from tick to tick.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)"),
        Binding("down", "move(1)"),
        Binding("pageup", "page(-1)"),
        Binding("pagedown", "page(1)"),
    ]
    DEFAULT_CSS = "Listing { height: 1fr; }"

    class Moved(Message):
        """The cursor is on another line."""

    def __init__(self, cursor: Style) -> None:
        super().__init__(id="listing")
        self._cursor_style = cursor
        self.table: ListTable | None = None
        self.cursor = 0
        self._top = 0
        self._moved = False

    @property
    def line(self) -> Line | None:
        """The one that the cursor is on."""
        lines = self.table.lines if self.table else ()
        return lines[self.cursor] if self.cursor < len(lines) else None

    @property
    def span(self) -> tuple[int, int, int]:
        """The first and the last line on the screen, counted from 1, and how many there are."""
        count = len(self.table.lines) if self.table else 0
        return min(self._top + 1, count), min(self._top + self._room, count), count

    def show(self, table: ListTable) -> None:
        """Draws this from now on."""
        line = self.line
        self.table = table
        if line is not None and self._moved:
            same = (index for index, one in enumerate(table.lines) if one.key == line.key)
            self.cursor = next(same, self.cursor)
        self.cursor = min(self.cursor, max(0, len(table.lines) - 1))
        self._follow()
        self.refresh()

    def action_to(self, index: int) -> None:
        """The cursor to the n-th line; -1 is the last one."""
        last = len(self.table.lines) - 1 if self.table else 0
        self.cursor = max(0, last if index < 0 else min(index, last))
        self._moved = True
        self._follow()
        self.refresh()
        self.post_message(self.Moved())

    def action_move(self, step: int) -> None:
        """So many lines down."""
        self.action_to(max(0, self.cursor + step))

    def action_page(self, pages: int) -> None:
        """So many screens down."""
        self.action_move(pages * self._room)

    def on_resize(self) -> None:
        """The cursor stays visible, and the foot says how much is."""
        self._follow()
        self.post_message(self.Moved())

    def on_click(self, event: Click) -> None:
        """The cursor comes."""
        if event.y:
            self.action_to(self._top + event.y - 1)

    def on_mouse_scroll_up(self, _: MouseScrollUp) -> None:
        """The wheel."""
        self.action_move(-WHEEL_LINES)

    def on_mouse_scroll_down(self, _: MouseScrollDown) -> None:
        """The wheel."""
        self.action_move(WHEEL_LINES)

    def render_line(self, y: int) -> Strip:
        """The titles, or the line that is so far down."""
        index = self._top + y - 1
        if self.table is None or index >= len(self.table.lines):
            return Strip.blank(self.size.width)
        if y == 0:
            return _strip(self, self.table.header)
        strip = _strip(self, self.table.drawn(index))
        return strip.apply_style(self._cursor_style) if index == self.cursor and self.has_focus else strip

    @property
    def _room(self) -> int:
        return max(1, self.size.height - 1)

    def _follow(self) -> None:
        count = len(self.table.lines) if self.table else 0
        lowest = max(0, min(self.cursor, count - self._room))
        self._top = max(self.cursor - self._room + 1, min(self._top, lowest))


def _strip(widget: Widget, text: Text) -> Strip:
    spans = Text().append_text(text)  # a text without any loses its own style when it is rendered
    return Strip(spans.render(widget.app.console)).adjust_cell_length(widget.size.width)

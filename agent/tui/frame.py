# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is above and below the list of the live view. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.text import Text

from agent.model import Snapshot
from agent.tui import keys
from agent.tui.cells import Glyphs, printable
from agent.tui.devices import device_lines
from agent.tui.history import History
from agent.tui.order import Line
from agent.tui.screen import footer, title
from agent.tui.throttle import state

FOOT_PART: Final = 8  # of the screen, for what went wrong
MOST_DEVICE_LINES: Final = 4  # of one device


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of the terminal in cells, and what is said beside the snapshot."""

    width: int
    height: int
    glyphs: Glyphs
    alone: bool = False
    paused: bool = False
    place: str | None = None  # in a replay
    failure: str = ""

    def head(self, snapshot: Snapshot, history: History) -> list[Text]:
        """The title and the devices, a third of the screen at the most."""
        remark = Text("PAUSED  " if self.paused else "", style="bold yellow")
        if self.place is not None:
            remark.append(f"replay {self.place}  ", "bold")
        line = title(snapshot, self.glyphs, alone=self.alone, remark=remark)
        return self._cut([line, *self._devices(snapshot, history), Text()])

    def foot(self, snapshot: Snapshot, line: Line | None, remarks: list[str]) -> list[Text]:
        """What there is to say about the line of the cursor, what went wrong, and the keys."""
        said = [*remarks, *_said(snapshot, line)]
        lines = [Text(printable(f" {self.glyphs.dot} ".join(said), self.glyphs), style="dim")]
        lines += footer(snapshot, self.glyphs)[: max(1, self.height // FOOT_PART)]
        if self.failure:
            lines.append(Text(printable(self.failure, self.glyphs), style="bold red"))
        lines.append(keys.foot(keys.FOOT if self.place is None else keys.REPLAY, self.width))
        return self._cut(lines)

    def _devices(self, snapshot: Snapshot, history: History) -> list[Text]:
        """With as many lines for each as a third of the screen has room for."""
        count = max(1, len(snapshot.devices))
        each = max(1, min(MOST_DEVICE_LINES, self.height // 12, self.height // 3 // count))
        lines = device_lines(snapshot, history, self.width, each, self.glyphs)
        left_out = len(lines) - self.height // 3
        if left_out <= 0:
            return lines
        return [*lines[: -left_out - 1], Text(f"and {left_out + 1} more lines of devices: see -o", style="dim")]

    def _cut(self, lines: list[Text]) -> list[Text]:
        for line in lines:
            line.truncate(self.width, overflow=self.glyphs.overflow)
        return lines


def _said(snapshot: Snapshot, line: Line | None) -> list[str]:
    """The state of the container that a line is about, and its reason."""
    container = line.entry.container if line else None
    said = snapshot.enforcement.get(container) if container else None
    if line is None or said is None:
        return []
    parts = [part for part in (state(said, snapshot.enforcing), said.reason) if part]
    parts += [f"{rung} could not be done: {why}" for rung, why in said.troubles.items()]
    names = line.entry.names
    return [f"{names.get('command') or names['name']}: {'; '.join(parts)}"] if parts else []

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A whole screen: title, devices, table, footer; drawn for the width that it is given.

Pure: the same snapshot, view and size give the same screen. Title and footer are those of the live view, too, as is
the list of keys: nvitop's and htop's where they have one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from agent.core.clock import NS_PER_SECOND
from agent.core.model import DeviceReading, Snapshot
from agent.core.text import ASCII, UTF8, Glyphs, state
from agent.tui.cells import printable
from agent.tui.columns import NOTHING, columns, fit, header, line, row
from agent.tui.header import device_lines
from agent.tui.history import SnapshotHistory
from agent.tui.listing import BUSIEST, Line, View, arranged, entries


@dataclass(frozen=True, slots=True)
class Screen:
    """A snapshot as rich draws it. `alone`: no agent runs, so nothing is enforced."""

    snapshot: Snapshot
    view: View
    alone: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = ASCII if options.ascii_only else UTF8
        width, snapshot = options.max_width, self.snapshot
        shown = fit(columns(snapshot, self.view), width)
        lines = arranged(entries(snapshot, self.view), BUSIEST)
        devices = device_lines(snapshot, SnapshotHistory(), width, 1, glyphs)
        yield from _cut([title(snapshot, glyphs, alone=self.alone), *devices, Text()], width, glyphs)
        yield from _cut([header(shown, glyphs)], width, glyphs)
        for one in lines:
            yield line(shown, row(one, snapshot, self.view, glyphs), glyphs)
        nothing = [] if lines else [Text(NOTHING[self.view], style="dim")]
        yield from _cut([*nothing, Text(), *footer(snapshot, glyphs)], width, glyphs)


def render(snapshot: Snapshot, view: View = View.CONTAINER, *, alone: bool = False) -> Screen:
    """Something that a rich console prints."""
    return Screen(snapshot, view, alone)


def _cut(lines: list[Text], width: int, glyphs: Glyphs) -> Iterator[Text]:
    for text in lines:
        text.truncate(width, overflow=glyphs.overflow)
        text.no_wrap = True
        yield text


def title(snapshot: Snapshot, glyphs: Glyphs, *, alone: bool = False, remark: Text | None = None) -> Text:
    """Who speaks, when, whether anything is enforced, and how much there is."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.wall_ns // NS_PER_SECOND))
    state = ("enforcing", "bold green") if snapshot.enforcing else ("observing only", "yellow")
    if alone:
        state = ("no agent: enforcement is off", "yellow")
    counted = (
        (len(snapshot.devices), "GPU"),
        (len(snapshot.containers), "container"),
        (len(snapshot.processes), "process"),
    )
    numbers = [
        f"{number} {word}{'' if number == 1 else 'es' if word == 'process' else 's'}" for number, word in counted
    ]
    dot = f" {glyphs.dot} "
    return Text.assemble(("GPU Warden", "bold"), f"  {at}  ", state, "  ", remark or "", dot.join(numbers))


def footer(snapshot: Snapshot, glyphs: Glyphs) -> list[Text]:
    """What went wrong, if anything did; nothing is lost in silence."""
    lost = [f"{printable(source, glyphs)} {number}" for source, number in sorted(snapshot.lost.items()) if number]
    failed = [f"{printable(h.name, glyphs)}: {printable(h.error, glyphs)}" for h in snapshot.collectors if h.error]
    broken = [probe for probe in snapshot.probes if probe.failed]
    attached = sum(probe.attached for probe in snapshot.probes)
    kept = "what was in force stays" if snapshot.policy_wall_ns is not None else "none is in force"
    lines = [_refused(snapshot.policy_error, kept, glyphs)] if snapshot.policy_error else []
    lines += [Text(f"GPU {r.device.index}: {_xids(r)}", style="red") for r in snapshot.devices if r.xid_counts]
    lines += [Text(f"lost events: {', '.join(lost)}", style="red")] if lost else []
    lines += [Text(f"collector {line}", style="red") for line in failed]
    lines += [
        Text(
            f"probes: {probe.failed} of {probe.attached + probe.failed} failed on {printable(probe.library, glyphs)}",
            "red",
        )
        for probe in broken
    ]
    if not snapshot.probes:
        lines.append(Text("probes: none attached; launches and copies are unknown", style="yellow"))
    elif not broken:
        lines.append(Text(f"probes: {attached} attached in {len(snapshot.probes)} copies of libcuda", style="dim"))
    return lines


def _refused(mistakes: str, kept: str, glyphs: Glyphs) -> Text:
    first, *more = mistakes.splitlines()
    rest = f" (and {len(more)} more)" if more else ""
    return Text(f"policy refused, {kept}: {printable(first, glyphs)}{rest}", style="red")


def _xids(reading: DeviceReading) -> str:
    return ", ".join(f"XID {xid} ({count}x)" for xid, count in sorted(reading.xid_counts.items()))


FOOT: Final = (
    ("h", "help"),
    ("q", "quit"),
    ("123", "view"),
    ("t", "tree"),
    (",./", "sort"),
    ("\\", "filter"),
    ("F3", "search"),
    ("p", "pause"),
    ("Enter", "open"),
    ("c", "columns"),
)

REPLAY: Final = (*FOOT[:2], ("Space", "play"), ("Left/Right", "seek"), ("Home/End", "ends"), *FOOT[2:7])
PAGE: Final = (("Esc", "back"), ("q", "quit"), ("Up/Down", "scroll"))
HELP_PAGE: Final = (("Esc", "back"), ("Up/Down", "scroll"))

HELP: Final = (
    ("1 2 3", "containers, processes, GPUs"),
    ("t", "tree: container, its processes, their kernels"),
    (", .", "sort by the column to the left, to the right"),
    ("/", "reverse the order"),
    ("\\", "filter: only lines with a word; Esc shows all"),
    ("F3", "search: go to a line with a word; F3 or n: next"),
    ("c F2", "choose the columns"),
    ("Enter", "open the container of a line; Esc goes back"),
    ("p Space", "pause the display; recording goes on"),
    ("Up Down PgUp PgDn Home End", "move"),
    ("h ? F1", "this page"),
    ("q F10 Ctrl-C", "quit"),
    ("In a replay:", ""),
    ("p Space", "stand still, or play"),
    ("Left Right Home End", "a tick back, a tick on, the first, the last"),
)

ABOUT: Final = (
    "SM, power: green below 10 %, yellow below 75 %, then red. Memory: 10, 80 %.",
    "A PCIe bar is full at the most of the last minute: NVML has no bound.",
    "~ estimated. SLACK: what is left of the target; below 0 it is missed.",
    "STATE: free, paced, paused for a part of the time, frozen, locked, swapped.",
)


def foot(keys: tuple[tuple[str, str], ...], width: int) -> Text:
    """As many as fit."""
    line = Text(no_wrap=True)
    for key, word in keys:
        if line.cell_len + len(key) + len(word) + 3 > width:
            break
        line.append(f" {key}", "bold").append(f" {word} ", "dim")
    return line


def help_page() -> list[Text]:
    """Everything."""
    lines = [Text.assemble((f"{key:<28}", "bold"), word) for key, word in HELP]
    return [*lines, Text(), *map(Text, ABOUT)]


FOOT_PART: Final = 8  # of the screen, for what went wrong
MOST_DEVICE_LINES: Final = 4  # of one device


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of the terminal in cells, and what is shown beside the snapshot."""

    width: int
    height: int
    glyphs: Glyphs
    alone: bool = False
    paused: bool = False
    place: str | None = None  # in a replay
    failure: str = ""

    def head(self, snapshot: Snapshot, history: SnapshotHistory) -> list[Text]:
        """The title and the devices, a third of the screen at the most."""
        remark = Text("PAUSED  " if self.paused else "", style="bold yellow")
        if self.place is not None:
            remark.append(f"replay {self.place}  ", "bold")
        line = title(snapshot, self.glyphs, alone=self.alone, remark=remark)
        return self._cut([line, *self._devices(snapshot, history), Text()])

    def foot(self, snapshot: Snapshot, line: Line | None, remarks: list[str]) -> list[Text]:
        """What there is to say about the line of the cursor, what went wrong, and the keys."""
        status = [*remarks, *_status(snapshot, line)]
        lines = [Text(printable(f" {self.glyphs.dot} ".join(status), self.glyphs), style="dim")]
        lines += footer(snapshot, self.glyphs)[: max(1, self.height // FOOT_PART)]
        if self.failure:
            lines.append(Text(printable(self.failure, self.glyphs), style="bold red"))
        lines.append(foot(FOOT if self.place is None else REPLAY, self.width))
        return self._cut(lines)

    def _devices(self, snapshot: Snapshot, history: SnapshotHistory) -> list[Text]:
        """With as many lines for each as a third of the screen has room for."""
        count = max(1, len(snapshot.devices))
        each = max(1, min(MOST_DEVICE_LINES, self.height // 12, self.height // 3 // count))
        lines = device_lines(snapshot, history, self.width, each, self.glyphs)
        left_out = len(lines) - self.height // 3
        if left_out <= 0:
            return lines
        return [*lines[: -left_out - 1], Text(f"and {left_out + 1} more lines of devices: see -o", style="dim")]

    def _cut(self, lines: list[Text]) -> list[Text]:
        for one in lines:
            one.truncate(self.width, overflow=self.glyphs.overflow)
        return lines


def _status(snapshot: Snapshot, line: Line | None) -> list[str]:
    """The state of the container that a line is about, and its reason."""
    container = line.entry.container if line else None
    status = snapshot.enforcement.get(container) if container else None
    if line is None or status is None:
        return []
    parts = [part for part in (state(status, snapshot.enforcing), status.reason) if part]
    parts += [f"{rung} could not be done: {why}" for rung, why in status.troubles.items()]
    names = line.entry.names
    return [f"{names.get('command') or names['name']}: {'; '.join(parts)}"] if parts else []

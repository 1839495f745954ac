# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A whole screen: title, devices, table, footer; drawn for the width and height that it is given.

Pure: the same snapshot, view and size give the same screen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from agent.clock import NS_PER_SECOND
from agent.model import DeviceReading, Snapshot
from agent.tui import rows
from agent.tui.cells import ASCII, UTF8, Glyphs, printable
from agent.tui.columns import Row, table
from agent.tui.devices import device_lines


class View(StrEnum):
    """What a row is."""

    CONTAINER = "container"
    PROCESS = "process"
    GPU = "gpu"


VIEWS: Final = {
    View.CONTAINER: (rows.container_columns, rows.by_container, "no container uses a GPU"),
    View.PROCESS: (lambda _: rows.PROCESSES, rows.by_process, "no process uses a GPU"),
    View.GPU: (rows.container_columns, rows.by_gpu, "no GPU found"),
}


@dataclass(frozen=True, slots=True)
class Screen:
    """A snapshot as rich draws it."""

    snapshot: Snapshot
    view: View
    full: bool = False  # it has the terminal to itself: leave out rows rather than the footer

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = ASCII if options.ascii_only else UTF8
        columns, build, nothing = VIEWS[self.view]
        width = options.max_width
        devices = device_lines(self.snapshot.devices, width, glyphs, self.snapshot.health)
        head = [_title(self.snapshot, glyphs), *devices, Text()]
        foot = _footer(self.snapshot, glyphs)
        lines = build(self.snapshot, glyphs)
        room = console.height - len(head) - len(foot) - 2 if self.full else len(lines)
        lines, more = _cut(lines, room)
        yield from _lines(head, width, glyphs)
        yield table(columns(self.snapshot), lines, width, glyphs)
        yield from _lines([*_note(lines, more, nothing), Text(), *foot], width, glyphs)


def render(snapshot: Snapshot, view: View = View.CONTAINER, *, full: bool = False) -> Screen:
    """Something that a rich console prints. `full`: to fit the terminal's height."""
    return Screen(snapshot, view, full)


def _cut(lines: list[Row], room: int) -> tuple[list[Row], int]:
    """As many rows as leave the footer on the screen, and how many that leaves out."""
    if len(lines) <= room:
        return lines, 0
    kept = max(0, room - 1)
    return lines[:kept], len(lines) - kept


def _lines(lines: list[Text], width: int, glyphs: Glyphs) -> Iterator[Text]:
    for line in lines:
        line.truncate(width, overflow=glyphs.overflow)
        line.no_wrap = True
        yield line


def _note(lines: list[Row], more: int, nothing: str) -> list[Text]:
    if more:
        return [Text(f"and {more} more; make the terminal taller", style="dim")]
    return [] if lines else [Text(nothing, style="dim")]


def _title(snapshot: Snapshot, glyphs: Glyphs) -> Text:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.wall_ns // NS_PER_SECOND))
    state = ("enforcing", "bold green") if snapshot.enforcing else ("observing only", "yellow")
    counted = (
        (len(snapshot.devices), "GPU"),
        (len(snapshot.containers), "container"),
        (len(snapshot.processes), "process"),
    )
    numbers = [
        f"{number} {word}{'' if number == 1 else 'es' if word == 'process' else 's'}" for number, word in counted
    ]
    dot = f" {glyphs.dot} "
    return Text.assemble(("GPU Warden", "bold"), f"  {at}  ", state, f"  {dot.join(numbers)}")


def _footer(snapshot: Snapshot, glyphs: Glyphs) -> list[Text]:
    """What went wrong, if anything did; nothing is lost in silence."""
    lost = [f"{printable(source, glyphs)} {number}" for source, number in sorted(snapshot.lost.items()) if number]
    failed = [f"{printable(h.name, glyphs)}: {printable(h.error, glyphs)}" for h in snapshot.collectors if h.error]
    broken = [probe for probe in snapshot.probes if probe.failed]
    attached = sum(probe.attached for probe in snapshot.probes)
    lines = [Text(f"GPU {r.device.index}: {_xids(r)}", style="red") for r in snapshot.devices if r.xid_counts]
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


def _xids(reading: DeviceReading) -> str:
    return ", ".join(f"XID {xid} ({count}x)" for xid, count in sorted(reading.xid_counts.items()))

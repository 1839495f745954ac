# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A whole screen: title, devices, table, footer; drawn for the width that it is given.

Pure: the same snapshot, view and size give the same screen. Title and footer are those of the live view, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from agent.clock import NS_PER_SECOND
from agent.model import DeviceReading, Snapshot
from agent.tui import rows
from agent.tui.cells import ASCII, UTF8, Glyphs, printable
from agent.tui.columns import fit, header, line
from agent.tui.devices import device_lines
from agent.tui.entries import View, entries
from agent.tui.history import History
from agent.tui.order import BUSIEST, arranged


@dataclass(frozen=True, slots=True)
class Screen:
    """A snapshot as rich draws it. `alone`: no agent runs, so nothing is enforced."""

    snapshot: Snapshot
    view: View
    alone: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = ASCII if options.ascii_only else UTF8
        width, snapshot = options.max_width, self.snapshot
        columns = fit(rows.columns(snapshot, self.view), width)
        listed = arranged(entries(snapshot, self.view), BUSIEST)
        devices = device_lines(snapshot, History(), width, 1, glyphs)
        yield from _cut([title(snapshot, glyphs, alone=self.alone), *devices, Text()], width, glyphs)
        yield from _cut([header(columns, glyphs)], width, glyphs)
        for one in listed:
            yield line(columns, rows.row(one, snapshot, self.view, glyphs), glyphs)
        nothing = [] if listed else [Text(rows.NOTHING[self.view], style="dim")]
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

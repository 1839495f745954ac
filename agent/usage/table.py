# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The report on a terminal. Names are shown, never obeyed; times are local; the total stands last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.tui import cells
from agent.usage.amounts import Amounts, Kind
from agent.usage.periods import local
from agent.usage.reading import Group, Report

_FIGURES: Final = ("SM seconds", "GPU hours", "GiB hours", "PCIe tx", "PCIe rx", "launches")
_FAR_OFF: Final = 0.01


def show(
    found: Report, names: Sequence[str], lines: Sequence[tuple[Group, Amounts]], rest: Amounts | None, out: IO[str]
) -> None:
    """Prints it, as wide as the terminal; without one there is room for long names."""
    console = Console(file=out, highlight=False, markup=False, width=None if out.isatty() else 240)
    glyphs = cells.UTF8 if console.encoding.startswith("utf") else cells.ASCII
    console.print(_covered(found))
    if found.first is None:
        console.print("no use was booked in them")
        return
    table = Table(box=box.SIMPLE if not glyphs.ascii else box.ASCII, show_footer=False, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=False, overflow="fold")
    for figure in _FIGURES:
        table.add_column(figure, justify="right", no_wrap=True)
    for group, amounts in lines:
        table.add_row(*_labels(group, names, glyphs), *_figures(amounts, glyphs))
    if rest is not None:
        table.add_row("(others)", *[""] * (len(names) - 1), *_figures(rest, glyphs))
    table.add_section()
    table.add_row("total", *[""] * (len(names) - 1), *_figures(found.total, glyphs))
    console.print(table)
    for note in _notes(found):
        console.print(note)


def _covered(found: Report) -> str:
    since = "the start of the ledger" if found.since == 0 else local(found.since)
    booked = "" if found.first is None or found.last is None else f"; booked: {local(found.first)} to "
    booked += "" if found.last is None else local(found.last + 3600)
    return f"whole hours from {since} to {local(found.until)}{booked}"


def _notes(found: Report) -> list[str]:
    notes = []
    total, devices = found.total.sm_seconds, found.devices.sm_seconds
    if devices and abs(total - devices) > _FAR_OFF * devices:
        notes.append(f"the devices themselves counted {devices:,.1f} SM seconds: some readings were missing")
    if found.dropped_rows:
        notes.append(f"{found.dropped_rows} rows of the oldest hours were dropped: the ledger was full")
    return notes


def _labels(group: Group, names: Sequence[str], glyphs: cells.Glyphs) -> list[Text]:
    shown = [cells.name(_text(group, name), glyphs) for name in names]
    if group.kind is Kind.UNATTRIBUTED:
        first = next((n for n, name in enumerate(names) if name not in ("hour", "gpu", "device")), 0)
        shown[first] = Text("(unattributed)", style="dim")
    return shown


def _text(group: Group, name: str) -> str | None:
    value = getattr(group, name)
    if name == "container" and group.kind is Kind.CONTAINER:
        return str(value or group.key)
    if name == "hour":
        return local(value)
    return None if value is None else str(value)


def _figures(amounts: Amounts, glyphs: cells.Glyphs) -> list[str]:
    return [
        f"{amounts.sm_seconds:,.1f}",
        f"{amounts.sm_seconds / 3600:,.3f}",
        f"{amounts.gib_hours:,.3f}",
        cells.size(amounts.pcie_tx_bytes, glyphs),
        cells.size(amounts.pcie_rx_bytes, glyphs),
        f"{amounts.launches:,}",
    ]

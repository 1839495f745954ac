# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The head of every view: bars of SM, memory, PCIe and power for each device, and the last minute below them.

NVML has no bound of PCIe traffic, so its bar is full at the maximum of the last minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from agent.core.model import DeviceHealth, DeviceReading, Snapshot
from agent.core.text import Glyphs, label, percent, size
from agent.tui.cells import GPU_THRESHOLDS, MEMORY_THRESHOLDS, NO_THRESHOLDS, bar, graph, name
from agent.tui.history import SnapshotHistory

WIDE_FROM: Final = 110  # columns of the terminal from which figures are shown in full
NAME_FROM: Final = 150  # and the model's name
GAP: Final = 2
LONGEST_BAR: Final = 30
_NAME_CELLS: Final = 20
_ALARMING: Final = {"unhealthy": "yellow", "overlimit": "red", "disabled": "bold red"}


@dataclass(frozen=True, slots=True)
class Gauge:
    """One figure of a device: its bar is full at 1; `cells` is what the narrow and the wide form of `text` need."""

    label: str
    text: Callable[[DeviceReading, Glyphs, bool], str]
    cells: tuple[int, int]
    figure: Callable[[DeviceReading], float | None]
    full: Callable[[DeviceReading], float | None]  # None: the most of the last minute
    thresholds: tuple[float, float] = NO_THRESHOLDS


def device_lines(snapshot: Snapshot, history: SnapshotHistory, width: int, each: int, glyphs: Glyphs) -> list[Text]:
    """`each` lines for a device, cut to `width`: bars and, below them, graphs that are `each` − 1 high."""
    lines: list[Text] = []
    for reading in snapshot.devices:
        head = _head(reading, snapshot.health.get(reading.device.uuid), width, glyphs)
        if reading.lost:
            lines.append(Text.assemble(head, ("LOST: does not answer; see dmesg", "bold red")))
            continue
        lines += _gauges(reading, history, head, width, each, glyphs)
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow=glyphs.overflow)
    return lines


def _head(reading: DeviceReading, health: DeviceHealth | None, width: int, glyphs: Glyphs) -> Text:
    parts = [Text(f"GPU {label(reading.device)}", style="bold")]
    if width >= NAME_FROM:
        model = name(reading.device.mig_profile or reading.device.name, glyphs)
        model.truncate(_NAME_CELLS, overflow=glyphs.overflow, pad=True)
        parts.append(model)
    if health and health.state in _ALARMING:
        parts.append(Text(health.state.upper(), style=_ALARMING[health.state]))
    return Text.assemble(Text(" ").join(parts), " " * GAP)


def _gauges(
    reading: DeviceReading, history: SnapshotHistory, head: Text, width: int, each: int, glyphs: Glyphs
) -> list[Text]:
    wide = width >= WIDE_FROM
    needed = sum(len(gauge.label) + 2 + gauge.cells[wide] for gauge in GAUGES) + GAP * (len(GAUGES) - 1)
    cells = max(3, min(LONGEST_BAR, (width - head.cell_len - needed) // len(GAUGES)))
    lines = [Text(), *(Text(" " * head.cell_len) for _ in range(each - 1))]
    lines[0].append_text(head)
    for number, gauge in enumerate(GAUGES):
        block = _block(gauge, reading, history, cells, wide, each, glyphs)
        for line, part in zip(lines, block, strict=True):
            line.append(" " * GAP if number else "").append_text(part)
    return lines


def _block(
    gauge: Gauge, reading: DeviceReading, history: SnapshotHistory, cells: int, wide: bool, each: int, glyphs: Glyphs
) -> list[Text]:
    """A gauge, and its graph as wide as it is."""
    series = history.device(reading.device.uuid, gauge.figure)
    value, full = gauge.figure(reading), gauge.full(reading) or series.most
    ratio = None if value is None else value / full if full else 0.0
    label = "GPU" if gauge is GAUGES[0] and reading.sm_activity_source == "utilization" else gauge.label
    figure = f"{gauge.text(reading, glyphs, wide):<{gauge.cells[wide]}}"
    line = Text.assemble(f"{label:<{len(gauge.label)}} ", bar(ratio, cells, gauge.thresholds, glyphs), f" {figure}")
    if each < 2:
        return [line]
    return [line, *graph(series.columns(line.cell_len), each - 1, full or 0.0, glyphs, gauge.thresholds)]


def _memory(reading: DeviceReading, glyphs: Glyphs, wide: bool) -> str:
    used = size(reading.memory_used_bytes, glyphs)
    return f"{used}/{size(reading.device.memory_total_bytes, glyphs)}" if wide else used


def _pcie_rate(reading: DeviceReading) -> float | None:
    rates = (reading.pcie_tx_bytes_per_second, reading.pcie_rx_bytes_per_second)
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _pcie(reading: DeviceReading, glyphs: Glyphs, wide: bool) -> str:
    if not wide:
        return f"{size(_pcie_rate(reading), glyphs)}/s"
    tx, rx = size(reading.pcie_tx_bytes_per_second, glyphs), size(reading.pcie_rx_bytes_per_second, glyphs)
    return f"{glyphs.up}{tx:>6}/s {glyphs.down}{rx:>6}/s"


def _power(reading: DeviceReading, glyphs: Glyphs, wide: bool) -> str:
    power, limit, degrees = (
        glyphs.missing if figure is None else f"{figure:.0f}"
        for figure in (reading.power_watts, reading.power_limit_watts, reading.temperature_celsius)
    )
    return f"{power}/{limit}W {degrees}C" if wide else f"{power}W"


GAUGES: Final = (
    Gauge(
        "SM ",
        lambda reading, glyphs, _wide: f"{percent(reading.sm_activity_ratio, glyphs)}%",
        (5, 5),
        lambda reading: reading.sm_activity_ratio,
        lambda _: 1.0,
        GPU_THRESHOLDS,
    ),
    Gauge("MEM", _memory, (6, 13), lambda r: r.memory_used_ratio, lambda _: 1.0, MEMORY_THRESHOLDS),
    Gauge("PCIe", _pcie, (8, 19), _pcie_rate, lambda _: None),
    Gauge(
        "PWR",
        _power,
        (4, 12),
        lambda reading: reading.power_watts,
        lambda reading: reading.power_limit_watts,
        GPU_THRESHOLDS,
    ),
)

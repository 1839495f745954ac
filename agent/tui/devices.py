# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One line per device: SM and memory bars, PCIe rates, and health where there is room."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from agent.model import DeviceHealth, DeviceReading, DeviceUuid
from agent.tui.cells import GPU_THRESHOLDS, MEMORY_THRESHOLDS, Glyphs, bar, name, percent, size

_ALARMING = {"unhealthy": "yellow", "overlimit": "red", "disabled": "bold red"}
NAME_FROM, HEALTH_FROM = 96, 130  # columns of the terminal from which there is room for them


def device_lines(
    readings: tuple[DeviceReading, ...], width: int, glyphs: Glyphs, health: Mapping[DeviceUuid, DeviceHealth]
) -> list[Text]:
    """The head of every view, each line cut to `width`. What is not fit for offline work says so."""
    fixed = 65 + (22 if width >= NAME_FROM else 0) + (30 if width >= HEALTH_FROM else 0)
    cells = max(6, min(40, (width - fixed) // 2))
    lines = [_line(reading, width, cells, glyphs, health.get(reading.device.uuid)) for reading in readings]
    for line in lines:
        line.truncate(width, overflow=glyphs.overflow)
    return lines


def memory_ratio(reading: DeviceReading) -> float | None:
    """Used ÷ total, where both are known."""
    used, total = reading.memory_used_bytes, reading.device.memory_total_bytes
    return None if used is None or not total else used / total


def _line(reading: DeviceReading, width: int, cells: int, glyphs: Glyphs, health: DeviceHealth | None) -> Text:
    parts = [Text(f"GPU {reading.device.index}", style="bold")]
    if width >= NAME_FROM:
        model = name(reading.device.name, glyphs)
        model.truncate(20, overflow=glyphs.overflow, pad=True)
        parts.append(model)
    if health and health.state in _ALARMING:
        parts.append(Text(health.state.upper(), style=_ALARMING[health.state]))
    if reading.lost:
        parts.append(Text("LOST: does not answer; see dmesg", style="bold red"))
    else:
        parts += _figures(reading, cells, glyphs)
        parts += [_health(reading, glyphs)] if width >= HEALTH_FROM else []
    return Text("  ").join(parts)


def _figures(reading: DeviceReading, cells: int, glyphs: Glyphs) -> list[Text]:
    ratio, memory = reading.sm_activity_ratio, memory_ratio(reading)
    used, total = size(reading.memory_used_bytes, glyphs), size(reading.device.memory_total_bytes, glyphs)
    tx, rx = size(reading.pcie_tx_bytes_per_second, glyphs), size(reading.pcie_rx_bytes_per_second, glyphs)
    label = "SM" if reading.sm_activity_source != "utilization" else "GPU"
    return [
        Text.assemble(f"{label:<4}", bar(ratio, cells, GPU_THRESHOLDS, glyphs), f" {percent(ratio, glyphs):>4}%"),
        Text.assemble("MEM ", bar(memory, cells, MEMORY_THRESHOLDS, glyphs), f" {used + '/' + total:<13}"),
        Text(f"PCIe {glyphs.up}{tx:>6}/s {glyphs.down}{rx:>6}/s"),
    ]


def _health(reading: DeviceReading, glyphs: Glyphs) -> Text:
    degrees = glyphs.missing if reading.temperature_celsius is None else f"{reading.temperature_celsius:.0f}"
    power, limit = (
        glyphs.missing if watts is None else f"{watts:.0f}"
        for watts in (reading.power_watts, reading.power_limit_watts)
    )
    clock = glyphs.missing if reading.sm_clock_hertz is None else f"{reading.sm_clock_hertz / 1e6:.0f}"
    return Text(f"{degrees:>3} C {power:>4}/{limit} W {clock:>4} MHz")

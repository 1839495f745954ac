# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Figures and names as the cells of a table.

Invariants: what is unknown is a dash, never 0; a name is shown, never obeyed (no markup, no escape sequence, nothing
that reorders or hides text); without UTF-8 everything drawn is ASCII.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rich.text import Text

from agent import names
from agent.model import Device, Provenance

GPU_THRESHOLDS: Final = (0.10, 0.75)  # nvitop's, which people know
MEMORY_THRESHOLDS: Final = (0.10, 0.80)
COLOURS: Final = ("green", "yellow", "red")


@dataclass(frozen=True, slots=True, eq=False)
class Glyphs:
    """What figures are drawn with."""

    missing: str
    full: str
    empty: str
    up: str
    down: str
    dot: str
    overflow: Literal["ellipsis", "crop"]  # rich's ellipsis is no ASCII character
    rising: str
    falling: str
    steps: str  # of a graph, from nothing to a whole cell

    @property
    def ascii(self) -> bool:
        """Whether only ASCII may be written."""
        return self is ASCII


UTF8: Final = Glyphs("–", "█", "░", "↑", "↓", "·", "ellipsis", "▲", "▼", " ▁▂▃▄▅▆▇█")
ASCII: Final = Glyphs("-", "#", ".", "tx", "rx", "|", "crop", "^", "v", " .:-=+*%#")


def label(device: Device) -> str:
    """Which one it is, as NVIDIA's container runtime is told: 0 is a GPU, 0:1 the second MIG instance on it."""
    return str(device.index) if device.mig_index is None else f"{device.index}:{device.mig_index}"


def printable(value: str, glyphs: Glyphs) -> str:
    """The name as this terminal can show it."""
    shown = names.printable(value)
    return shown.encode("ascii", "backslashreplace").decode() if glyphs.ascii else shown


def name(value: str | None, glyphs: Glyphs, style: str = "") -> Text:
    """A name from outside. Text never reads markup."""
    return Text(printable(value, glyphs) if value else glyphs.missing, style=style)


def percent(ratio: float | None, glyphs: Glyphs, provenance: Provenance | None = None) -> str:
    """A share as percent, ~ before what was estimated."""
    if ratio is None:
        return glyphs.missing
    mark = "~" if provenance is Provenance.ESTIMATED else ""
    return f"{mark}{ratio * 100:.1f}" if ratio < 0.9995 else f"{mark}{ratio * 100:.0f}"


def size(value: float | None, glyphs: Glyphs) -> str:
    """Bytes in three digits: 340Mi, 1.2Gi, 45Gi."""
    if value is None:
        return glyphs.missing
    for unit in ("", "Ki", "Mi", "Gi"):
        if abs(value) < 999.5:
            return f"{value:.0f}{unit}" if unit in ("", "Ki") or abs(value) >= 99.95 else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}Ti"


def count(value: float | None, glyphs: Glyphs) -> str:
    """Events per second: 12, 3.4k, 1.2M."""
    if value is None:
        return glyphs.missing
    for unit in ("", "k", "M"):
        if value < 999.5:
            return f"{value:.0f}{unit}" if not unit or value >= 99.95 else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f}G"


def milliseconds(seconds: float | None, glyphs: Glyphs) -> str:
    """Three digits, and no more after the point than they leave: 5.05, 12.3, 140."""
    if seconds is None:
        return glyphs.missing
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def quantile(ratio: float) -> str:
    """p50, p99, p99.9."""
    return f"p{ratio * 100:.6g}"


def bar(ratio: float | None, width: int, thresholds: tuple[float, float], glyphs: Glyphs) -> Text:
    """A bar of `width` cells, coloured by how full it is; empty when unknown."""
    if ratio is None:
        return Text(glyphs.empty * width, style="dim")
    full = min(width, max(0, round(ratio * width)))
    return Text.assemble(
        (glyphs.full * full, colour(ratio, thresholds)),
        (glyphs.empty * (width - full), "dim"),
    )


def colour(ratio: float | None, thresholds: tuple[float, float]) -> str:
    """green, yellow or red; no colour for the unknown."""
    if ratio is None:
        return ""
    return COLOURS[sum(ratio >= threshold for threshold in thresholds)]

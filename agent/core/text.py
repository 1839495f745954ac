# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Text fit for people: names from outside made printable, figures formatted, enforcement states in a word. Pure.

Invariant: what comes out moves no cursor, hides or reorders no text and can be encoded, whatever a container is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from agent.core.model import Device, EnforcementStatus, Provenance

HELD: Final = {
    "freeze": "frozen",
    "lock": "locked",
    "swap": "swapped",
    "evict": "evicted",
}  # rung → state, the mildest first
WHOLE_SHARE: Final = 0.9995
HARDLY: Final = 0.005  # share of time: less is shown as 0 %


def stopped(status: EnforcementStatus) -> float | None:
    """The share of time that the container was stopped."""
    return 1.0 if _held(status) else status.paused_ratio


def state(status: EnforcementStatus, enforcing: bool) -> str | None:
    """The state in a word: free, paced, paused 36% (of the time), frozen. None: the container is not offline."""
    if status.role != "offline":
        return None
    if not enforcing:
        return "free"
    if held := _held(status):
        return held
    if status.paused_ratio is not None and status.paused_ratio >= HARDLY:
        return f"paused {status.paused_ratio * 100:.0f}%"
    return "paced" if status.share_ratio is not None and status.share_ratio < WHOLE_SHARE else "free"


def _held(status: EnforcementStatus) -> str | None:
    """The strongest rung in force, if any: the share of pauses says little beside it."""
    return next((word for rung, word in reversed(HELD.items()) if rung in status.rungs), None)


def printable(text: str, longest: int | None = None) -> str:
    """The text with controls, line breaks, invisible and bidirectional marks and broken bytes written as escapes.

    With `longest`, cut to so many characters, an ellipsis being the last.
    """
    if longest is not None:
        text = text[: longest + 1]
    safe = text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)
    return safe if longest is None or len(safe) <= longest else safe[: longest - 1] + "…"


def joined(*parts: str | None) -> str:
    """The parts that are known, as in namespace/pod/container."""
    return "/".join(part for part in parts if part)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8, kept by surrogateescape
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@dataclass(frozen=True, slots=True, eq=False)
class Glyphs:
    """The characters that figures are drawn with."""

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
    """The device as NVIDIA's container runtime names it: 0 is a GPU, 0:1 the second MIG instance on it."""
    return str(device.index) if device.mig_index is None else f"{device.index}:{device.mig_index}"


def percent(ratio: float | None, glyphs: Glyphs, provenance: Provenance | None = None) -> str:
    """A share in percent, with ~ before an estimate."""
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
    """Milliseconds in three digits: 5.05, 12.3, 140."""
    if seconds is None:
        return glyphs.missing
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def quantile(ratio: float) -> str:
    """p50, p99, p99.9."""
    return f"p{ratio * 100:.6g}"

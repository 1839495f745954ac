# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Durations, sizes and ratios as they are written, to and from base units: ns, bytes, 0–1. Pure.

A number without a unit is refused: `target: 50` would be read as seconds by one person and milliseconds by the next.
Decimal, not float: 0.1s is exactly 100,000,000 ns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from decimal import Decimal

from agent.probes.abi import LINK_QUEUE_NS

DURATION_NS = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}

SIZE_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}

_SLIPS = {  # unit → what is written for it by mistake
    "KiB": "k ki",
    "MiB": "mi mib",
    "GiB": "g gi",
    "TiB": "t ti",
    "ms": "msec millis",
    "s": "sec secs second seconds",
    "m": "min mins minute minutes",
    "h": "hr hour hours",
}

_QUANTITY = re.compile(r"(-?[0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-zµμ%]*)")


def unit_pattern(units: Iterable[str]) -> str:
    """A number and one of the units, as a regular expression of JSON Schema."""
    return rf"^[0-9]{{1,18}}(\.[0-9]{{1,18}})? ?({'|'.join(unit.replace('us', '[uµμ]s') for unit in units)})$"


class UnitError(ValueError):
    """The text is no such quantity: `what` is wrong with it, and what to write `instead`."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what}; {instead}")
        self.what = what
        self.instead = instead


def parse_duration_ns(value: object) -> int:
    """`50ms`, `1.5s`, `200us` → ns. Raises UnitError."""
    return _parse(value, DURATION_NS, "duration", "write a number and one of ns, us, ms, s, m, h, such as 50ms")


def parse_size_bytes(value: object) -> int:
    """`40GiB`, `512MiB`, `10GB` → bytes. Raises UnitError."""
    instead = "write a number and one of KiB, MiB, GiB, TiB, kB, MB, GB, TB, such as 40GiB"
    return _parse(value, SIZE_BYTES, "size", instead)


def parse_ratio(value: object) -> float:
    """`5%` or a number from 0 to 1 → 0–1. Raises UnitError."""
    instead = "write a percentage such as 5% or a number from 0 to 1 such as 0.05"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise UnitError("is not a share", instead)
    if isinstance(value, str):
        number, unit = _split(value, "share", instead)
        if unit != "%":
            raise UnitError("is not a share", instead)
        ratio = float(number / 100)
    else:
        ratio = float(value)
    if not math.isfinite(ratio) or not 0 <= ratio <= 1:
        raise UnitError("is outside 0–100%", instead)
    return ratio


def _parse(value: object, units: dict[str, int], noun: str, instead: str) -> int:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise UnitError(f"is a {noun} without a unit", instead)
    if not isinstance(value, str):
        raise UnitError(f"is not a {noun}", instead)
    number, unit = _split(value, noun, instead)
    if unit not in units:
        what = f"has the unknown unit {unit!r}" if unit else f"is a {noun} without a unit"
        raise UnitError(what, _corrected(value, unit, units, instead))
    base = number * units[unit]
    if base != base.to_integral_value():
        raise UnitError(f"is finer than the smallest {noun} there is", instead)
    return int(base)


def _split(text: str, noun: str, instead: str) -> tuple[Decimal, str]:
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise UnitError(f"is not a {noun}", instead)
    return Decimal(found[1]), found[2].replace("µ", "u").replace("μ", "u")


def _corrected(value: str, unit: str, units: dict[str, int], instead: str) -> str:
    """The same number with the unit that was probably meant: 40Gi → 40GiB, 5sec → 5s."""
    slips = {slip: name for name, all_slips in _SLIPS.items() if name in units for slip in all_slips.split()}
    folded = {name.lower(): name for name in units} | slips
    meant = folded.get(unit.lower()) if unit else None
    return f"write {value[: len(value) - len(unit)].strip()}{meant}" if meant else instead


def format_duration(duration_ns: int) -> str:
    """The shortest exact way to write it: 200000000 → 200ms."""
    return _format(duration_ns, DURATION_NS)


def format_size(size_bytes: int) -> str:
    """The shortest exact way to write it in binary units: 2**30 → 1GiB."""
    return _format(size_bytes, {unit: scale for unit, scale in SIZE_BYTES.items() if unit == "B" or "i" in unit})


def format_ratio(ratio: float) -> str:
    """0.05 → 5%."""
    return f"{ratio * 100:.10g}%"


_LARGE_COPY_BYTES = 64_000_000


def copy_bound(bytes_per_second: int | None) -> str:
    """What an online copy has to wait for at most where copies are paced, by the speed of the link."""
    bound = f"an online copy waits for {LINK_QUEUE_NS / 1e6:g} ms of offline copies at most, and for one whole one"
    if not bytes_per_second:
        return f"{bound} (its bytes / the link's speed)"
    large_ms = _LARGE_COPY_BYTES / bytes_per_second * 1e3
    return f"{bound} (64 MB at {bytes_per_second / 1e9:.3g} GB/s: {large_ms:.2g} ms)"


def _format(value: int, units: dict[str, int]) -> str:
    fitting = [(scale, unit) for unit, scale in units.items() if value % scale == 0 and abs(value) >= scale]
    scale, unit = max(fitting, default=(1, min(units, key=lambda name: units[name])))
    return f"{value // scale}{unit}" if value else f"0{'ms' if units is DURATION_NS else 'B'}"

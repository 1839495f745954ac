# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Amounts of use and the keys under which the usage ledger adds them up; periods of time as people write them.

A row belongs to one UTC hour, one owner and one device. Owners are containers, what no container is known to have
caused (so that the rows of a device add up to the device), and the device itself as the hardware counts it. A period is
written as 24h, 7d, 2026-11-20T10:00, start or now; a time without an offset is local, and a period is widened to whole
hours of UTC. Pure: the present is an argument.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from agent.core.errors import UsageError

SECONDS_PER_HOUR = 3600
GIB = 1 << 30
MOST = 1 << 60  # of an integer in a row: one hour is far less, and two of them are still within SQLite's 63 bits


class AmountKind(StrEnum):
    """The kind of owner."""

    CONTAINER = "container"
    UNATTRIBUTED = "unattributed"
    DEVICE = "device"  # of the whole device: never added to the others

    __hash__ = str.__hash__  # Enum's own is written in Python, and every row of every tick is hashed


class UsageKey(NamedTuple):
    """The owner of a use, and the device; a tuple because one is hashed per container and device in every tick."""

    kind: AmountKind
    owner: str  # the container's key; "" for the other kinds
    device: str  # its UUID


class UsageRow(NamedTuple):
    """The key of one row on disk."""

    hour: int  # UTC, seconds since 1970 at which it began
    use: UsageKey


@dataclass(slots=True)
class Amounts:
    """Sums that only grow. Mutable: they are added to in place, many times a second."""

    sm_seconds: float = 0.0  # 1.0 is one whole device for one second
    memory_byte_seconds: float = 0.0  # memory in use × time
    pcie_tx_bytes: int = 0
    pcie_rx_bytes: int = 0
    launches: int = 0

    def add(self, more: Amounts) -> None:
        """In place."""
        self.sm_seconds += more.sm_seconds
        self.memory_byte_seconds += more.memory_byte_seconds
        self.pcie_tx_bytes += more.pcie_tx_bytes
        self.pcie_rx_bytes += more.pcie_rx_bytes
        self.launches += more.launches

    def cut(self) -> bool:
        """Whether anything was more than a row can have; no more than that is left of it."""
        before = (self.pcie_tx_bytes, self.pcie_rx_bytes, self.launches)
        self.pcie_tx_bytes, self.pcie_rx_bytes, self.launches = (min(one, MOST) for one in before)
        return max(before) > MOST

    @property
    def gib_hours(self) -> float:
        """Memory × time as people count it."""
        return self.memory_byte_seconds / (GIB * SECONDS_PER_HOUR)

    def __bool__(self) -> bool:
        return bool(
            self.sm_seconds or self.memory_byte_seconds or self.pcie_tx_bytes or self.pcie_rx_bytes or self.launches
        )


def hour_of(wall_ns: int) -> int:
    """The hour in which an instant lies."""
    seconds = wall_ns // 1_000_000_000
    return seconds - seconds % SECONDS_PER_HOUR


_AGO = re.compile(r"(\d{1,6})([mhdw])")
_UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_HOW = "write 24h, 7d, 2026-11-20, 2026-11-20T10:00 or start"


def period(since: str, until: str | None, now: datetime) -> tuple[int, int]:
    """[since, until) in seconds since 1970, both on the hour. UsageError says how to write it."""
    first = _hour(_instant("--since", since, now))
    last = _hour(_instant("--until", until or "now", now) + SECONDS_PER_HOUR - (1 if until else 0))
    if last <= first:
        raise UsageError(f"--until {until or 'now'} is not after --since {since}")
    return first, last


def local(hour: int) -> str:
    """An hour's beginning for people: local time with its offset."""
    return datetime.fromtimestamp(hour, UTC).astimezone().strftime("%Y-%m-%d %H:%M %z")


def utc(hour: int) -> str:
    """An hour's beginning for programs: ISO 8601 in UTC."""
    return datetime.fromtimestamp(hour, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _instant(option: str, text: str, now: datetime) -> int:
    if text == "start":
        return 0
    if text == "now":
        return int(now.timestamp())
    try:
        if ago := _AGO.fullmatch(text):
            return int((now - int(ago[1]) * _UNITS[ago[2]]).timestamp())
        return int(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(f"{option} {text}: {_HOW}") from error


def _hour(seconds: int) -> int:
    return max(0, seconds - seconds % SECONDS_PER_HOUR)

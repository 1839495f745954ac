# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the ledger books, and under which key.

A row belongs to one UTC hour, one owner and one device. Owners are containers, what no container is known to have
caused (so that the rows of a device add up to the device), and the device itself as the hardware counts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

SECONDS_PER_HOUR = 3600
GIB = 1 << 30


class Kind(StrEnum):
    """Whose use a row is."""

    CONTAINER = "container"
    UNATTRIBUTED = "unattributed"
    DEVICE = "device"  # of the whole device: never added to the others

    __hash__ = str.__hash__  # Enum's own is written in Python, and every row of every tick is hashed


class Booking(NamedTuple):
    """Whose use of which device; a tuple because one is hashed per container and device in every tick."""

    kind: Kind
    owner: str  # the container's key; "" for the other kinds
    device: str  # its UUID


class Row(NamedTuple):
    """The key of one row on disk."""

    hour: int  # UTC, seconds since 1970 at which it began
    booking: Booking


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

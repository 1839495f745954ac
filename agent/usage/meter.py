# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""From snapshots, whose totals run since the agent started, to what was used between two of them. No I/O, no clock.

Invariant: what a total grew by is given out exactly once. A total never seen before counts from 0. One that fell began
anew, and so did that of a container which was among the ended and then left the snapshot. One that is merely absent
for a while (its device does not answer) goes on where it was. Bounded: beyond `most`, the longest absent is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from agent.clock import NS_PER_SECOND
from agent.model import ContainerUsage, Snapshot, Totals
from agent.usage.amounts import Amounts, Booking, Kind

_MOST = 50_000


class Meter:
    """See the module. `forgotten` counts totals that were dropped for want of room."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._last: OrderedDict[Booking, Totals] = OrderedDict()
        self._ended: dict[str, ContainerUsage] = {}
        self.forgotten = 0

    def read(self, snapshot: Snapshot) -> Iterator[tuple[Booking, Amounts]]:
        """What was used since the previous snapshot, for whoever used anything."""
        seconds = snapshot.interval_ns / NS_PER_SECOND
        self._forget_ended(snapshot)
        for booking, totals, memory_bytes in self._owners(snapshot):
            amounts = self._grown(booking, totals)
            if memory_bytes:
                amounts.memory_byte_seconds = memory_bytes * seconds
            if amounts:
                yield booking, amounts
        while len(self._last) > self._most:
            self._last.popitem(last=False)
            self.forgotten += 1

    def _owners(self, snapshot: Snapshot) -> Iterator[tuple[Booking, Totals, int | None]]:
        for used in snapshot.containers:
            for usage in used.usage:
                yield Booking(Kind.CONTAINER, used.container.key, usage.device), usage.totals, usage.memory_bytes
        for ended in _ended(snapshot):
            if self._ended.get(ended.container.key) is ended:
                continue  # booked when it ended
            self._ended[ended.container.key] = ended
            for usage in ended.usage:
                yield Booking(Kind.CONTAINER, ended.container.key, usage.device), usage.totals, None
        for rest in snapshot.unattributed:
            yield Booking(Kind.UNATTRIBUTED, "", rest.device), rest.totals, rest.memory_bytes
        for reading in snapshot.devices:
            totals = snapshot.device_totals.get(reading.device.uuid, Totals())
            yield Booking(Kind.DEVICE, "", reading.device.uuid), totals, reading.memory_used_bytes

    def _grown(self, booking: Booking, now: Totals) -> Amounts:
        before = self._last.get(booking)
        self._last[booking] = now
        self._last.move_to_end(booking)
        if before is None or _fell(before, now):
            return Amounts(now.sm_seconds, 0.0, now.pcie_tx_bytes, now.pcie_rx_bytes, now.launches)
        return Amounts(
            now.sm_seconds - before.sm_seconds,
            0.0,
            now.pcie_tx_bytes - before.pcie_tx_bytes,
            now.pcie_rx_bytes - before.pcie_rx_bytes,
            now.launches - before.launches,
        )

    def _forget_ended(self, snapshot: Snapshot) -> None:
        """Whoever is no longer kept among the ended has no totals any more, unless it lives again and goes on."""
        if not self._ended:
            return
        kept = {ended.container.key for ended in _ended(snapshot)}
        living = {used.container.key for used in snapshot.containers}
        for key in [key for key in self._ended if key not in kept]:
            ended = self._ended.pop(key)
            for usage in () if key in living else ended.usage:
                self._last.pop(Booking(Kind.CONTAINER, key, usage.device), None)


def _ended(snapshot: Snapshot) -> tuple[ContainerUsage, ...]:
    ended: tuple[ContainerUsage, ...] = snapshot.ended
    return ended


def _fell(before: Totals, now: Totals) -> bool:
    return (
        now.sm_seconds < before.sm_seconds
        or now.launches < before.launches
        or now.pcie_tx_bytes < before.pcie_tx_bytes
        or now.pcie_rx_bytes < before.pcie_rx_bytes
    )

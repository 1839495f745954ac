# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Processes that the kernel stopped at an allocation, and when each may go on. Pure: rooms and times in.

The oldest that fits is resumed first, and none waits beyond the rule's longest hold. What a held call asks for stays
charged in the kernel, so once it is resumed no other call can take its room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from agent.core.model import ProcessId
from agent.probes.abi import GROUP_ALL, PINNED, Held, QuotaKey
from agent.probes.libbpf import Map

SAME_STOP_NS = 50_000_000  # several threads of a process may each run into one stop before it takes hold; as in bpf/
POLL_NS = 10_000_000  # room comes by calls of other processes, which are not reported
_FALLBACK_HOLD_NS = 30_000_000_000
Room = Callable[[int, int], int | None]
"""(group, slot) → bytes left beside what is live and every call under way; None: no limit."""


@dataclass(frozen=True, slots=True)
class HeldAllocation:
    """One thread's allocation that waits. Times are CLOCK_MONOTONIC ns."""

    process: ProcessId
    group: int
    slot: int
    bytes: int
    at_ns: int
    latest_ns: int


@dataclass(slots=True)
class AllocationQueue:
    """The held allocations. `room` counts them as under way; here they are added back."""

    room: Room
    holds: list[HeldAllocation] = field(default_factory=list)
    expired: int = 0  # resumed because they had waited for as long as they may

    def add(self, held: Held) -> None:
        """The kernel stopped a process."""
        longest = held.max_hold_ns or _FALLBACK_HOLD_NS
        self.ran(held.process.id(), held.at_ns)
        self.holds.append(
            HeldAllocation(held.process.id(), held.group, held.slot, held.bytes, held.at_ns, held.at_ns + longest)
        )

    def ran(self, process: ProcessId, at_ns: int) -> None:
        """It called the driver then. What was held well before is over: another writer resumed the process."""
        over_ns = at_ns - SAME_STOP_NS
        self.holds = [hold for hold in self.holds if hold.process != process or hold.at_ns >= over_ns]

    def keeps(self, process: ProcessId) -> bool:
        """Whether it must stay stopped, whatever else it was stopped for."""
        return any(hold.process == process for hold in self.holds)

    def due(self, now_ns: int) -> list[HeldAllocation]:
        """One held allocation of each process that may be resumed now. All of the process's are taken out."""
        ready = []
        for process in dict.fromkeys(hold.process for hold in self.holds):
            mine = [hold for hold in self.holds if hold.process == process]
            late = any(now_ns >= hold.latest_ns for hold in mine)
            if late or self._fit(mine):
                self.expired += late
                ready.append(mine[0])
                self.forget(process)  # from now on the kernel's charge speaks for it
        return ready

    def forget(self, process: ProcessId) -> None:
        """The process was resumed, or has ended."""
        self.holds = [hold for hold in self.holds if hold.process != process]

    def next_ns(self, now_ns: int) -> int | None:
        """When to call `due` again; None while no process is held."""
        return now_ns + POLL_NS if self.holds else None

    def _fit(self, mine: list[HeldAllocation]) -> bool:
        """Whether all that a process waits for fits: it is resumed as a whole."""
        for hold in mine:
            for group in (hold.group, GROUP_ALL):
                left = self.room(group, hold.slot)
                if left is not None and left + self._waiting_bytes(group, hold.slot, hold.process) < 0:
                    return False
        return True

    def _waiting_bytes(self, group: int, slot: int, but: ProcessId) -> int:
        return sum(
            hold.bytes
            for hold in self.holds
            if hold.slot == slot and group in (hold.group, GROUP_ALL) and hold.process != but
        )


def kernel_room(quotas: Map, uses: Map, memory: Map) -> Room:
    """Reads a room as bpf/quota.bpf.c does."""

    def room(group: int, slot: int) -> int | None:
        key = QuotaKey(group, slot)
        quota, use = quotas.get(key), uses.get(key)
        if quota is None:
            return None
        live = quota.other_bytes
        for member in quota.members[: quota.count]:
            value = memory.get(member)
            live += sum(value.live_bytes[:PINNED]) if value is not None else 0
        return int(quota.limit_bytes - live - (use.pending_bytes if use is not None else 0))

    return room

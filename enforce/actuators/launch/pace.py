# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The kernel's gates as the agent reads them: how busy a device's online side is, and what it launches.

The rules of when a request counts as running are those of bpf/pace.bpf.c.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from agent.clock import NS_PER_SECOND
from agent.layout import SLOTS, Gate
from agent.model import DeviceUuid

LONGEST_WAIT_HOLDS = 100  # as in bpf/pace.bpf.c
_WINDOW_NS = 10 * NS_PER_SECOND
_SPAN_NS = NS_PER_SECOND // 4  # a burst is as long as that, or longer


def busy_end_ns(gate: Gate, hold_ns: int) -> int:
    """When the online requests that run count as over, unless more is heard of them."""
    return int(gate.last_online_ns) + hold_ns * (LONGEST_WAIT_HOLDS if gate.in_wait > 0 else 1)


def is_busy(gate: Gate, hold_ns: int, now_ns: int) -> bool:
    """Whether an online request runs on the device."""
    return bool(gate.open > 0 and now_ns < busy_end_ns(gate, hold_ns))


def busy_total_ns(gate: Gate, hold_ns: int, now_ns: int) -> int:
    """Time so far that online requests ran on the device."""
    since, total = int(gate.busy_since_ns), int(gate.busy_total_ns)
    if gate.open <= 0 or not since:
        return total
    return total + max(0, min(now_ns, busy_end_ns(gate, hold_ns)) - since)


class GateReader:
    """What each device's gate says. `gates` is shared with the kernel."""

    def __init__(self, gates: Sequence[Gate], hold_ns: int) -> None:
        self._gates, self._hold_ns = gates, hold_ns
        self._points: dict[int, deque[tuple[int, int]]] = {}

    def busy(self, slots: Mapping[DeviceUuid, int], now_ns: int) -> dict[DeviceUuid, float]:
        """Share 0–1 of the time that online requests ran, in the busiest quarter of a second of the last ten seconds.

        What offline work adds to a request is added to all that queue behind it, and those are in bursts. To be called
        once a decision.
        """
        ratios = {device: self._busy(slot, now_ns) for device, slot in slots.items() if slot < SLOTS}
        return {device: ratio for device, ratio in ratios.items() if ratio is not None}

    def blocks(self, slots: Mapping[DeviceUuid, int]) -> dict[DeviceUuid, int]:
        """Blocks of grids that online processes launched, ever."""
        return {device: int(self._gates[slot].online_blocks) for device, slot in slots.items() if slot < SLOTS}

    def _busy(self, slot: int, now_ns: int) -> float | None:
        points = self._points.setdefault(slot, deque())
        points.append((now_ns, busy_total_ns(self._gates[slot], self._hold_ns, now_ns)))
        while len(points) > 2 and points[1][0] <= now_ns - _WINDOW_NS:
            points.popleft()
        return busiest(points)


def busiest(points: Iterable[tuple[int, int]]) -> float | None:
    """Of (time, busy time so far), the oldest first: the greatest share of a span. None: not seen for long enough."""
    most, recent = None, deque[tuple[int, int]]()
    for now_ns, busy_ns in points:
        recent.append((now_ns, busy_ns))
        while len(recent) > 1 and now_ns - recent[1][0] >= _SPAN_NS:
            recent.popleft()
        then_ns, then = recent[0]
        if now_ns - then_ns >= _SPAN_NS:
            most = max(most or 0.0, min(1.0, max(0, busy_ns - then) / (now_ns - then_ns)))
    return most

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How long a process's launches take, from its own waits, without any profiler.

Between two drained waits a process launched work and then waited for it. If it launched without pause, the GPU was
busy from the first launch to the return of the wait (less what online requests took of that time). If it was paced, we
know what we believed to be queued when the wait began. A longer wait: estimates that are too short have let work pile
up since the first launch, by the difference. A shorter one: they are too long, so whatever piled up had drained at each
pause, and only what was queued last was waited for, in proportion. BBR estimates a path's bandwidth in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.model import ProcessId
from agent.samples import Delivered

_KEPT = 24
_LOW_QUANTILE = 0.25
_ENOUGH_PACED = 5
_LARGEST_CUT = 0.3


def is_paced(delivery: Delivered) -> bool:
    """Whether the process was stopped in that stretch, so that elapsed time says nothing about the work."""
    return delivery.pauses > 0 and delivery.charged_ns > 0


def delivered_ns(delivery: Delivered) -> float:
    """GPU time of the work in one delivery, if online requests that ran meanwhile had the device. ns; at least 0."""
    return bounds_ns(delivery)[0]


def bounds_ns(delivery: Delivered) -> tuple[float, float]:
    """The same, least and most: online requests had the device all of their time, or none of it. ns."""
    if not is_paced(delivery):
        return max(0.0, delivery.elapsed_ns - delivery.elapsed_busy_ns), max(0.0, delivery.elapsed_ns)
    run_before = max(0, delivery.elapsed_busy_ns - delivery.waited_busy_ns)  # the queue counts as standing still then
    least = _paced_ns(delivery, max(0, delivery.waited_ns - delivery.waited_busy_ns), delivery.queued_ns)
    return least, _paced_ns(delivery, delivery.waited_ns, max(0, delivery.queued_ns - run_before))


def _paced_ns(delivery: Delivered, waited_ns: int, queued_ns: int) -> float:
    if waited_ns < queued_ns:
        return delivery.charged_ns * max(_LARGEST_CUT, waited_ns / queued_ns)
    return delivery.charged_ns + waited_ns - queued_ns


@dataclass(slots=True)
class LaunchTimes:
    """Mean GPU time per launch of each process, from its last deliveries.

    Contention makes an unpaced delivery longer, never shorter, so a low quantile of those; a paced one is off to both
    sides, so the median of those, and only of them once there are enough. Beside online requests the device may have
    taken turns or not, so a delivery gives two bounds there, and moves the estimate only if that lies beyond them. The
    first estimate is the upper one: who is believed to need less than it does gets more than anybody meant.
    """

    _recent: dict[ProcessId, deque[tuple[bool, float]]] = field(default_factory=dict)
    _told: dict[ProcessId, float] = field(default_factory=dict)

    def tell(self, told: Mapping[ProcessId, float]) -> None:
        """What somebody else makes of it, ns: counts until the process's first delivery."""
        self._told.update(told)

    def observe(self, delivery: Delivered) -> None:
        """Takes one delivery in."""
        if delivery.launches <= 0:
            return
        least, most = (ns / delivery.launches for ns in bounds_ns(delivery))
        known = self._delivered_ns(delivery.process)
        recent = self._recent.setdefault(delivery.process, deque(maxlen=_KEPT))
        recent.append((is_paced(delivery), most if known is None else min(most, max(least, known))))

    def processes(self) -> frozenset[ProcessId]:
        """Everybody that something is kept about."""
        return frozenset(self._recent.keys() | self._told.keys())

    def per_launch_ns(self, process: ProcessId) -> float | None:
        """None before the first delivery, unless somebody told."""
        delivered = self._delivered_ns(process)
        return self._told.get(process) if delivered is None else delivered

    def _delivered_ns(self, process: ProcessId) -> float | None:
        recent = self._recent.get(process)
        if not recent:
            return None
        paced = sorted(value for is_paced, value in recent if is_paced)
        if len(paced) >= _ENOUGH_PACED:
            return paced[len(paced) // 2]
        unpaced = sorted(value for is_paced, value in recent if not is_paced) or paced
        return unpaced[int(len(unpaced) * _LOW_QUANTILE)]

    def forget(self, process: ProcessId) -> None:
        """The process is gone."""
        self._recent.pop(process, None)
        self._told.pop(process, None)

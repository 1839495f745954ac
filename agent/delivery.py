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
from dataclasses import dataclass, field

from agent.model import ProcessId
from agent.samples import Delivered

_KEPT = 24
_LOW_QUANTILE = 0.25
_ENOUGH_PACED = 5
_LARGEST_CUT = 0.3
_OVERLAP = 0.1  # of the time that counts, beside online requests: more, and nobody knows who had the device when


def is_paced(delivery: Delivered) -> bool:
    """Whether the process was stopped in that stretch, so that elapsed time says nothing about the work."""
    return delivery.pauses > 0 and delivery.charged_ns > 0


def delivered_ns(delivery: Delivered) -> float:
    """GPU time of the work in one delivery. ns; at least 0."""
    if not is_paced(delivery):
        return max(0.0, delivery.elapsed_ns - delivery.elapsed_busy_ns)
    waited = max(0, delivery.waited_ns - delivery.waited_busy_ns)
    if waited < delivery.queued_ns:
        return delivery.charged_ns * max(_LARGEST_CUT, waited / delivery.queued_ns)
    return delivery.charged_ns + waited - delivery.queued_ns


def is_blurred(delivery: Delivered) -> bool:
    """Whether online requests ran meanwhile: the device may have taken turns, or not."""
    if is_paced(delivery):
        return delivery.waited_busy_ns > _OVERLAP * delivery.waited_ns
    return delivery.elapsed_busy_ns > _OVERLAP * delivery.elapsed_ns


@dataclass(slots=True)
class LaunchTimes:
    """Mean GPU time per launch of each process, from its last deliveries.

    Contention makes an unpaced delivery longer, never shorter, so a low quantile of those; a paced one is off to both
    sides, so the median of those, and only of them once there are enough.
    """

    _recent: dict[ProcessId, deque[tuple[bool, float]]] = field(default_factory=dict)
    _only_blurred: set[ProcessId] = field(default_factory=set)

    def observe(self, delivery: Delivered) -> None:
        """Takes one delivery in. Blurred ones count only as long as there is nothing better."""
        process, blurred = delivery.process, is_blurred(delivery)
        if delivery.launches <= 0 or (blurred and process in self._recent and process not in self._only_blurred):
            return
        if blurred:
            self._only_blurred.add(process)
        elif process in self._only_blurred:
            self.forget(process)
        recent = self._recent.setdefault(process, deque(maxlen=_KEPT))
        recent.append((is_paced(delivery), delivered_ns(delivery) / delivery.launches))

    def processes(self) -> frozenset[ProcessId]:
        """Everybody that something is kept about."""
        return frozenset(self._recent)

    def per_launch_ns(self, process: ProcessId) -> float | None:
        """None before the first delivery."""
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
        self._only_blurred.discard(process)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What each offline process would use of a device if nothing held it: all of it while it is being stopped, else what it
used lately and some room to grow. Pure bookkeeping: counters in, fractions out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agent.clock import NS_PER_SECOND
from agent.model import ProcessId

_WINDOW_NS = NS_PER_SECOND
_GROWTH, _LEAST = 1.5, 0.05


@dataclass(frozen=True, slots=True)
class Counters:
    """Of one process, ever: estimated GPU time that it launched, ns, and how often it was stopped."""

    charged_ns: int
    pauses: int


@dataclass(slots=True)
class Demand:
    """Keeps a second of counters per process."""

    _points: dict[ProcessId, deque[tuple[int, Counters]]] = field(default_factory=dict)

    def observe(self, now_ns: int, counters: Mapping[ProcessId, Counters]) -> None:
        """Once a decision; whoever is not among them is forgotten."""
        self._points = {process: points for process, points in self._points.items() if process in counters}
        for process, now in counters.items():
            points = self._points.setdefault(process, deque())
            points.append((now_ns, now))
            while len(points) > 2 and points[1][0] <= now_ns - _WINDOW_NS:
                points.popleft()

    def wanted(self, processes: Iterable[ProcessId]) -> dict[ProcessId, float]:
        """Fractions 0–1 of a device; a process that was not seen long enough is left out."""
        return {process: one for process in processes if (one := self._wanted(process)) is not None}

    def _wanted(self, process: ProcessId) -> float | None:
        points = self._points.get(process)
        if points is None or len(points) < 2:
            return None
        (then_ns, then), (now_ns, now) = points[0], points[-1]
        if now.pauses != then.pauses:
            return 1.0
        used = max(0, now.charged_ns - then.charged_ns) / max(1, now_ns - then_ns)
        return min(1.0, _LEAST + _GROWTH * used)

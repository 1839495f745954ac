# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the times of kernels and requests show of moments at which a process was held. Pure; CLOCK_MONOTONIC ns."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from conformance.clients.launcher import Request


@dataclass(frozen=True, slots=True)
class Hold:
    """One interval in which a process was held."""

    asked_ns: int
    still_ns: int  # all of it was seen to stand still
    released_ns: int  # right before it was let go
    running_ns: int  # it was seen to run again


@dataclass(frozen=True, slots=True)
class Timeline:
    """Launches and ends of a `steps` program. Both ascend."""

    launched_ns: Sequence[int]  # when each launch returned
    ended_ns: Sequence[int]  # when each kernel ended, on the device

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Parses a `steps` program's output."""
        return cls(record.get("launched_ns", ()), record.get("ended_ns", ()))

    def drain_ns(self, hold: Hold) -> int:
        """From the asking until the last kernel that ended during the hold; 0: none did."""
        behind = bisect_left(self.ended_ns, hold.released_ns)
        return max(0, self.ended_ns[behind - 1] - hold.asked_ns) if behind else 0

    def drained(self, hold: Hold) -> int:
        """How many kernels ended during the hold."""
        return bisect_left(self.ended_ns, hold.released_ns) - bisect_right(self.ended_ns, hold.asked_ns)

    def launches(self, since_ns: int, until_ns: int) -> int:
        """How many launches returned in between."""
        return bisect_left(self.launched_ns, until_ns) - bisect_right(self.launched_ns, since_ns)

    def resumed_ns(self, hold: Hold) -> int | None:
        """From the release until the next launch has returned; None: there was none."""
        at = bisect_right(self.launched_ns, hold.released_ns)
        return self.launched_ns[at] - hold.released_ns if at < len(self.launched_ns) else None

    def rate(self, since_ns: int, until_ns: int) -> float:
        """Kernels that ended, per second."""
        ended = bisect_left(self.ended_ns, until_ns) - bisect_right(self.ended_ns, since_ns)
        return ended * 1e9 / (until_ns - since_ns)


def latencies_ms(requests: Iterable[Request], since_ns: int, until_ns: int) -> list[float]:
    """Of the requests that arrived in between, those that ended later too."""
    return [one.latency_ns / 1e6 for one in requests if since_ns <= one.arrived_ns < until_ns]


def p90(values: Sequence[float]) -> float | None:
    """By the nearest rank; None of none. Of the hundred requests of a second p99 would be one."""
    ordered = sorted(values)
    return round(ordered[math.ceil(0.9 * len(ordered)) - 1], 4) if ordered else None


def median(values: Sequence[float]) -> float | None:
    """The median; None of an empty list."""
    return round(statistics.median(values), 4) if values else None

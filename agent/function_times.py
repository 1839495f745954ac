# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""GPU time per launch of each function of a process, from its own waits, without any profiler.

A delivery is a stretch between two drained waits: so much was launched, so long it took. Each one moves the durations
of its functions a part of the way towards what it says (normalised least mean squares). Others on the device and a slow
program make a stretch longer, never shorter, so a longer one moves them less than a shorter one: they settle near the
lower edge of what is seen, which is what the work takes by itself.

Those of a program are of all the processes that ever ran it, whose functions are known again by their shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from agent.delivery import delivered_ns
from agent.model import ProcessId
from agent.samples import Delivered

Owner = ProcessId | str  # a process, or all those that run a program
OTHER = 0  # any function that a delivery does not list
_DOWN, _UP = 0.3, 0.08
_MEAN_OF = 200.0  # deliveries
_FIRST = 8  # deliveries that move the durations both ways alike
_KEPT = 32
_MOST_FUNCTIONS = 512  # of one process; more share OTHER


@dataclass(slots=True)
class _Times:
    """One process: ns per launch by function, and the ratio of told to believed of the last deliveries."""

    per_launch: dict[int, float] = field(default_factory=dict)
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    deliveries: int = 0
    elapsed_ns: float = 0.0  # of the last deliveries
    launches: float = 0.0

    def add(self, elapsed_ns: float, launches: int) -> None:
        """A delivery, among the last ones."""
        memory = 1 - 1 / _MEAN_OF
        self.elapsed_ns = self.elapsed_ns * memory + elapsed_ns
        self.launches = self.launches * memory + launches


@dataclass(slots=True)
class FunctionTimes:
    """See the module. Durations are of a device that the process has for itself, with the SMs that it may use."""

    up: float = _UP
    _times: dict[Owner, _Times] = field(default_factory=dict)

    def observe(self, owner: Owner, delivery: Delivered) -> None:
        """Takes one delivery in."""
        told = delivered_ns(delivery)
        if not delivery.launches or told <= 0:
            return
        times = self._times.setdefault(owner, _Times())
        counts = self._counts(times, delivery)
        believed = self._believed(times, counts, told)
        times.ratios.append(told / believed if believed > 0 else 1.0)
        times.deliveries += 1
        times.add(delivery.elapsed_ns, delivery.launches)
        rate = _DOWN if told < believed or times.deliveries <= _FIRST else self.up
        square = sum(n * n for n in counts.values())
        for function, n in counts.items():
            now = times.per_launch[function] + rate * (told - believed) * n / square
            times.per_launch[function] = max(0.0, now)

    def waited_ns(self, owner: Owner) -> float | None:
        """Mean time from launch to drained wait, per launch: with all that others did meanwhile."""
        times = self._times.get(owner)
        return times.elapsed_ns / times.launches if times and times.launches else None

    def per_launch_ns(self, owner: Owner, function: int) -> float | None:
        """None before the owner's first delivery; the owner's mean for a function that was in none."""
        times = self._times.get(owner)
        if times is None or not times.per_launch:
            return None
        known = times.per_launch.get(function)
        if known is None:
            known = times.per_launch.get(OTHER)
        return known if known is not None else sum(times.per_launch.values()) / len(times.per_launch)

    def spread(self, owner: Owner) -> float | None:
        """Half of the middle half of told ÷ believed: how much to doubt the durations. None before the first."""
        times = self._times.get(owner)
        if times is None or not times.ratios:
            return None
        ordered = sorted(times.ratios)
        quarter = len(ordered) // 4
        return (ordered[-1 - quarter] - ordered[quarter]) / 2

    def forget(self, owners: Collection[Owner]) -> None:
        """They are gone."""
        for owner in owners:
            self._times.pop(owner, None)

    @staticmethod
    def _counts(times: _Times, delivery: Delivered) -> dict[int, int]:
        counts: dict[int, int] = {}
        for function, launches in delivery.functions:
            known = function in times.per_launch or len(times.per_launch) < _MOST_FUNCTIONS
            key = function if known else OTHER
            counts[key] = counts.get(key, 0) + launches
        rest = delivery.launches - sum(counts.values())
        if rest > 0:
            counts[OTHER] = counts.get(OTHER, 0) + rest
        return counts

    @staticmethod
    def _believed(times: _Times, counts: Mapping[int, int], told: float) -> float:
        """What was expected; functions that are new begin with an equal share of what is left over."""
        new = [function for function in counts if function not in times.per_launch]
        if new:
            rest = told - sum(times.per_launch[f] * n for f, n in counts.items() if f in times.per_launch)
            each = max(0.0, rest) / sum(counts[f] for f in new)
            times.per_launch.update(dict.fromkeys(new, each))
        return sum(times.per_launch[f] * n for f, n in counts.items())


def observe_all(times: FunctionTimes, deliveries: Iterable[Delivered]) -> None:
    """In the order in which they ended."""
    for delivery in sorted(deliveries, key=lambda one: one.at_ns):
        times.observe(delivery.process, delivery)

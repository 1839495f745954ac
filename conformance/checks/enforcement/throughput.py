# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How much work was done in a span of time, from what a program wrote down at the end of each step. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Point = tuple[int, float]  # CLOCK_MONOTONIC in ns, and how much had been done by then


def read_points(text: str) -> list[Point]:
    """Of a log: a line per step, nanoseconds and amount. A last line that is still being written does not count."""
    whole = text[: text.rfind("\n") + 1]
    return [(int(at), float(amount)) for at, amount in (line.split() for line in whole.splitlines())]


def per_second(points: Sequence[Point], begin_ns: int, end_ns: int) -> float:
    """The mean rate in the span. A step counts by how much of its time lies in it. `points`: one at least, ascending.

    After the last point nothing is known to be done, so nothing counts. ValueError for a span of no length.
    """
    if end_ns <= begin_ns:
        raise ValueError(f"a span from {begin_ns} to {end_ns} has no length")
    return (_amount_at(points, end_ns) - _amount_at(points, begin_ns)) / (end_ns - begin_ns) * 1e9


def since(points: Iterable[Point], begun: Point) -> list[Point]:
    """Those of a program that was idle until `begun`, and has counted on from there."""
    return [begun, *(point for point in points if point[0] > begun[0])]


def _amount_at(points: Sequence[Point], at_ns: int) -> float:
    index = bisect_right(points, at_ns, key=lambda point: point[0])
    if index in (0, len(points)):
        return points[max(0, index - 1)][1]
    (before_ns, before), (after_ns, after) = points[index - 1], points[index]
    return before + (after - before) * (at_ns - before_ns) / (after_ns - before_ns)

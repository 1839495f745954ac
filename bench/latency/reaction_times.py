# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How long reacting took, out of what was recorded. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LEAST_REQUESTS = 20  # of a second's, before their p99 says anything
_SECOND_NS = 1_000_000_000


def gate_reactions_ns(bursts: Iterable[tuple[int, int]], returned_ns: Sequence[int]) -> list[int]:
    """For each burst of the online side (first launch, end of its wait): until the last offline launch came through.

    0: none came through. `returned_ns`: when offline launches returned, ascending; one that is held returns after the
    burst, when it has been let go.
    """
    out = []
    for begun_ns, ended_ns in bursts:
        first, behind = bisect_right(returned_ns, begun_ns), bisect_left(returned_ns, ended_ns)
        out.append(returned_ns[behind - 1] - begun_ns if behind > first else 0)
    return out


def violated_at_ns(requests: Sequence[tuple[int, int]], target_ns: int, quantile: float = 0.99) -> int | None:
    """When the quantile of the last second's latencies was first above the target. `requests`: (end, latency)."""
    for index, (ended_ns, _) in enumerate(requests):
        recent = sorted(latency for ended, latency in requests[: index + 1] if ended > ended_ns - _SECOND_NS)
        if len(recent) >= LEAST_REQUESTS and recent[math.ceil(quantile * len(recent)) - 1] > target_ns:
            return ended_ns
    return None


def tightened_at_ns(decisions: Iterable[Mapping[str, Any]], after_ns: int) -> int | None:
    """When (wall clock) the loop first gave less than before: a smaller share, or a shorter queue."""
    last: Mapping[str, Any] | None = None
    for decision in decisions:
        if last is not None and decision["wall_ns"] >= after_ns and _is_less(decision, last):
            return int(decision["wall_ns"])
        last = decision
    return None


def _is_less(decision: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    same = decision["container"] == before["container"]
    smaller = decision["share_after"] < before["share_after"] or decision["max_queued_ns"] < before["max_queued_ns"]
    return bool(same and smaller)


def rank(values: Sequence[float], quantile: float) -> float:
    """The quantile by the nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]

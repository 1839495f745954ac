# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""By how much two jobs that share a GPU slow each other down.

It is a constant, a measured table, times by resource, or what a predictor expects beside an online service.
A factor is at least 1 and is 1 alone. None means that the two must not or cannot share: unknown pairs are not guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from fleet.model import FleetError, Job, Predictor, Slot, TraceJob
from fleet.simulator.cluster import Slowdown

ANY_KIND: Final = "default"
"""Among the kinds of offline jobs: stands for those that are not listed, or unknown"""


def constant(factor: float) -> Slowdown:
    """All pairs alike. FleetError: under 1, or no number."""
    if not (math.isfinite(factor) and factor >= 1):
        raise FleetError(f"a slowdown of {factor:g}: give a factor of at least 1, such as 1.5")
    return lambda one, other: (factor, factor)


def by_resources(one: TraceJob, other: TraceJob) -> tuple[float, float] | None:
    """From seconds of an iteration by resource: both slow down alike, until no resource is wanted for too long.

    A job alone wants resource r for the part u_r of its time; two at 1/ξ of their speed want (u_r + v_r)/ξ of it, so
    ξ = max(1, max_r (u_r + v_r)). That is fluid sharing without losses: a lower bound of what a real pair shows.
    """
    if one.resource_s is None or other.resource_s is None or len(one.resource_s) != len(other.resource_s):
        return None
    total_one_s, total_other_s = sum(one.resource_s), sum(other.resource_s)
    if total_one_s <= 0 or total_other_s <= 0:
        return None
    wanted = (a / total_one_s + b / total_other_s for a, b in zip(one.resource_s, other.resource_s, strict=True))
    factor = max(1.0, *wanted)
    return factor, factor


def measured(throughputs: Mapping[str, Mapping[str, Any]]) -> Slowdown:
    """From a table job → job → [a, b], throughputs beside each other; "null" has a job's throughput alone.

    A pair that is absent, that has a throughput of 0 (it did not run), or whose jobs have none alone is no pair.
    """

    def slowdown(one: TraceJob, other: TraceJob) -> tuple[float, float] | None:
        if one.kind is None or other.kind is None:
            return None
        both = _beside(throughputs, one.kind, other.kind)
        alone = _alone(throughputs, one.kind), _alone(throughputs, other.kind)
        if both is None or alone[0] is None or alone[1] is None or min(both) <= 0:
            return None
        return max(1.0, alone[0] / both[0]), max(1.0, alone[1] / both[1])

    return slowdown


def _beside(throughputs: Mapping[str, Mapping[str, Any]], one: str, other: str) -> tuple[float, float] | None:
    straight = _numbers(throughputs.get(one, {}).get(other), 2)
    if straight is not None:
        return straight[0], straight[1]
    turned = _numbers(throughputs.get(other, {}).get(one), 2)
    return None if turned is None else (turned[1], turned[0])


def _alone(throughputs: Mapping[str, Mapping[str, Any]], kind: str) -> float | None:
    found = _numbers(throughputs.get(kind, {}).get("null"), 1)
    return None if found is None or found[0] <= 0 else found[0]


def _numbers(value: Any, least: int) -> list[float] | None:
    """Of a number or a list. None: there are fewer, or one is no finite number."""
    values = value if isinstance(value, list) else [value]
    good = [one for one in values if isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one)]
    return [float(one) for one in good] if len(good) == len(values) >= least else None


def read_table(path: Path, gpu_type: str | None = None) -> Slowdown:
    """A file with GPU type → job → job → [a, b]. FleetError: it is none, or which type is meant is not clear."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FleetError(f"cannot read the table of slowdowns {path}: {error}") from error
    if not isinstance(table, dict) or not table:
        raise FleetError(f"{path} has no GPU type → job → job → [a, b]")
    if gpu_type is None and len(table) > 1:
        raise FleetError(f"{path} has several GPU types: add --gpu-type and one of {', '.join(sorted(table))}")
    chosen = gpu_type if gpu_type is not None else next(iter(table))
    if chosen not in table:
        raise FleetError(f"{path} has no GPU type {chosen!r}; it has {', '.join(sorted(table))}")
    rows = table[chosen]
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise FleetError(f"{path}: {chosen!r} is no table job → job → [a, b]")
    return measured(rows)


def predicted(
    predictor: Predictor, services: Mapping[str, Slot], kinds: Mapping[str, Job], online_factor: float = 1.0
) -> Slowdown:
    """By kind: an offline job keeps the throughput that is expected of it beside a service, which gets `online_factor`.

    Two services or two offline jobs never share.
    """

    @cache  # a policy asks for the same few pairs at each decision
    def beside(online: str | None, offline: str | None) -> float | None:
        slot, job = services.get(online or ""), kinds.get(offline or ANY_KIND, kinds.get(ANY_KIND))
        weight = None if slot is None or job is None else predictor.weight(slot, job)
        return None if weight is None or weight.throughput <= 0 else max(1.0, 1 / weight.throughput)

    def slowdown(one: TraceJob, other: TraceJob) -> tuple[float, float] | None:
        if bool(one.online) == bool(other.online):
            return None
        factor = beside(one.kind, other.kind) if one.online else beside(other.kind, one.kind)
        if factor is None:
            return None
        return (online_factor, factor) if one.online else (factor, online_factor)

    return slowdown

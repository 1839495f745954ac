# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The kernel functions on which each container spends most SM time. For people: never a metric's label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.clock import NS_PER_SECOND
from agent.model import DeviceUuid, FunctionUsage

MOST = 20


@dataclass(frozen=True, slots=True)
class FunctionWork:
    """What one function did in a tick in one process. `weight`: its part of the process's SM time, 0–1."""

    device: DeviceUuid
    name: str
    launches: int
    kernels: int
    weight: float | None
    sm_ratio: float | None  # of the whole process
    gpu_ns: float | None


def top_functions(work: Iterable[FunctionWork], seconds: float) -> tuple[FunctionUsage, ...]:
    """Summed over processes by name and device, those with the most SM time first."""
    groups: dict[tuple[str, DeviceUuid], list[FunctionWork]] = {}
    for one in work:
        groups.setdefault((one.name, one.device), []).append(one)
    made = [_sum(name, device, parts, seconds) for (name, device), parts in groups.items()] if seconds else []
    made.sort(key=lambda one: (-(one.sm_ratio or 0.0), -one.launches_per_second, one.name))
    return tuple(made[:MOST])


def weights(gpu_ns: Mapping[int, float | None], launches: Mapping[int, int]) -> dict[int, float | None]:
    """Each function's part of the process's GPU time; None where any duration is unknown."""
    spent = {f: (gpu_ns[f] or 0.0) * n for f, n in launches.items()}
    total = sum(spent.values())
    if not total or any(gpu_ns[f] is None for f, n in launches.items() if n):
        return dict.fromkeys(launches)
    return {f: ns / total for f, ns in spent.items()}


def _sum(name: str, device: DeviceUuid, parts: list[FunctionWork], seconds: float) -> FunctionUsage:
    launches = sum(one.launches for one in parts)
    known = [(one.sm_ratio, one.weight) for one in parts]
    ratios = [ratio * weight for ratio, weight in known if ratio is not None and weight is not None]
    times = [(one.gpu_ns, one.launches) for one in parts if one.gpu_ns is not None and one.launches]
    spent = sum(ns * count for ns, count in times)
    return FunctionUsage(
        name=name,
        device=device,
        launches_per_second=sum(one.kernels for one in parts) / seconds,
        sm_ratio=sum(ratios) if len(ratios) == len(known) else None,
        gpu_seconds_per_launch=spent / sum(count for _, count in times) / NS_PER_SECOND if times else None,
        is_graph=any(one.kernels != one.launches for one in parts) and launches > 0,
    )

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a launch takes in a process that has waited for nothing yet, by the picture of its container. Pure.

The picture's durations are NVML's time of a process over its launches then. That is coarser than the process's own
waits (agent/delivery.py) and two seconds late, but no guess: who queues for minutes before the first wait, or never
waits, is held by what its kernels take.
"""

from __future__ import annotations

from agent.clock import NS_PER_SECOND
from agent.model import ContainerUsage, ProcessId, Snapshot


def launch_ns(snapshot: Snapshot) -> dict[ProcessId, float]:
    """The mean over its container's functions; whoever launched none, or graphs, in the tick is left out."""
    found: dict[ProcessId, float] = {}
    for row in snapshot.containers:
        mean_seconds = _mean_seconds(row)
        if mean_seconds:
            found.update(dict.fromkeys(row.processes, mean_seconds * NS_PER_SECOND))
    return found


def _mean_seconds(row: ContainerUsage) -> float | None:
    launched = [one for one in row.functions if one.launches_per_second]
    if not launched or any(one.is_graph for one in launched):  # kernels are counted there, and launches are held
        return None
    launches = total = 0.0
    for one in launched:
        if one.gpu_seconds_per_launch is None:
            return None
        launches += one.launches_per_second
        total += one.launches_per_second * one.gpu_seconds_per_launch
    return total / launches

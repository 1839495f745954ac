# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Our workloads with a known part of the time and of the SMs, and everything that NVML says of them meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from conformance.checks.nvml import gpm, samples
from conformance.checks.nvml.binding import Gpu, Refused, asked
from conformance.checks.nvml.lists import Listed, is_mps_server, listed, mps_clients
from conformance.clients import workload
from conformance.clients.workload import Pace, Workload
from conformance.host import Host

KERNEL_US = 1000
KERNELS = 5


@dataclass(frozen=True, slots=True)
class Load:
    """An `offline` of our own. `duty_cycle`: the busy share of time that it aims at; `sms`: the share of SMs."""

    name: str
    duty_cycle: float
    sms: float = 1.0
    memory: str = "0"

    def words(self, pace: Pace, sm_count: int) -> list[str]:
        """Its program and options, as a command line."""
        pause = workload.pause_us(pace, KERNELS, KERNEL_US, self.duty_cycle)
        blocks = max(1, round(self.sms * sm_count))
        shape = workload.steps(pace, kernels=KERNELS, kernel_us=KERNEL_US, blocks=blocks, host_us=pause)
        return [*shape, "--memory", self.memory, *([] if pause else ["--never-sync", "--depth", "16"])]


@dataclass(frozen=True, slots=True)
class Observation:
    """`pids` and `busy` (true share of its time with a kernel running) by load name; GPM's averages of the while.

    `ready_us`: CLOCK_REALTIME when the last of them was at work.
    """

    pids: Mapping[str, int]
    busy: Mapping[str, float]
    samples: Mapping[str, samples.Samples]
    gpm: Mapping[int, float] | Refused
    listed: Sequence[Listed]
    mps_clients: frozenset[int]  # pids, as the agent has it
    mps_servers: frozenset[int]  # those in lists or samples
    used_before_bytes: int | None
    used_bytes: int | None  # of the whole device
    ready_us: int
    sm_truth: float | None  # simulated only: SM time of the device ÷ time, of the same while


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds until the first look, and of looking."""

    settle: float
    look: float


def watch(
    host: Host,
    gpu: Gpu,
    pace: Pace,
    loads: Sequence[Load],
    times: Times,
    extra: Mapping[str, str] = MappingProxyType({}),
    afterwards: Callable[[], None] = lambda: None,
) -> Observation:
    """Runs them together and looks; `afterwards` is done while they still run. WorkloadError when one fails."""
    before = used_bytes(gpu)
    with ExitStack() as stack:
        working: dict[str, Workload] = {
            load.name: stack.enter_context(workload.running(host, load.name, load.words(pace, gpu.sm_count), extra))
            for load in loads
        }
        ready_us = time.time_ns() // 1000
        time.sleep(times.settle)
        truth_ns, begun_ns = _sm_ns(host), time.monotonic_ns()
        found, averages = _polled(gpu, times.look)
        grown, elapsed = _sm_ns(host) - truth_ns, time.monotonic_ns() - begun_ns
        lists, clients, used = listed(gpu), mps_clients(gpu), used_bytes(gpu)
        pids_seen = {entry.pid for entry in lists}.union(*(one.pids() for one in found.values()))
        servers = frozenset(pid for pid in pids_seen if is_mps_server(pid))
        afterwards()
        for one in working.values():
            one.require_alive()
        pids = {name: one.pid for name, one in working.items()}
        busy = {name: workload.busy_ratio(one.finish(), pace, KERNEL_US) for name, one in working.items()}
    truth = grown / elapsed if host.simulated else None
    return Observation(pids, busy, found, averages, lists, clients, servers, before, used, ready_us, truth)


def used_bytes(gpu: Gpu) -> int | None:
    """Of the whole device, without what the driver reserves; None where NVML refuses."""
    info = asked(gpu.api, lambda: gpu.api.nvmlDeviceGetMemoryInfo(gpu.handle, gpu.api.nvmlMemory_v2))
    return None if isinstance(info, Refused) else int(info.used)


def _polled(gpu: Gpu, seconds: float) -> tuple[dict[str, samples.Samples], Mapping[int, float] | Refused]:
    try:
        with gpm.window(gpu) as window:
            refused = window.begin()
            found = samples.poll(gpu, seconds)
            return found, refused or window.metrics()
    except gpu.api.NVMLError as error:
        return samples.poll(gpu, seconds), Refused(str(error))


def _sm_ns(host: Host) -> int:
    """What the simulated GPU's first device did so far; 0 on a real one, where it is not known."""
    rows: list[dict[str, Any]] = host.node.truth() if host.simulated else []
    return sum(int(row["sm_ns"]) for row in rows if row["device"] == 0)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A day of ticks in minutes: the estimator alone, fed with what collectors read on a node with churn.

Six processes stay; one comes every eight seconds and lives for forty. The truth is made here: a kernel takes what its
function takes, the device is as busy as all of them together, and NVML says each process's part to within a fifth.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, Final, cast

import psutil

from agent.attribution.engine import AttributionEngine
from agent.attribution.inputs import TickInputs
from agent.collectors.samples import LaunchCount, Probed, ProcessesListed, ProcessMemory, ProcessUtilization, Sample
from agent.containers.gpu_processes import GpuProcess
from agent.core.clock import NS_PER_SECOND
from agent.core.model import (
    Container,
    ContainerKey,
    Device,
    DeviceReading,
    DeviceUuid,
    Process,
    ProcessId,
)
from agent.node.procfs import Procfs
from agent.probes.events import FunctionNames

_GPU: Final = DeviceUuid("GPU-soak")
_STAYING: Final = 6
_EVERY_TICKS, _LIFE_TICKS = 8, 40
_LOOK_TICKS: Final = 900
_MIB: Final = 1 << 20
_MOST_BUSY: Final = 0.95


@dataclass(slots=True)
class _Tenant:
    """A process, and what is true of it."""

    id: ProcessId
    function: int
    kernel_seconds: float
    ratio: float  # of the device, in the mean
    until_tick: float
    launches: int = 0
    true_ratio: float = 0.0


@dataclass(slots=True)
class _Day:
    random: Random
    tenants: list[_Tenant] = field(default_factory=list)
    born: int = 0

    def add(self, until_tick: float, ratio: float) -> None:
        self.born += 1
        kernel_seconds = 10 ** self.random.uniform(-4.3, -2.3)
        number = self.born
        process = ProcessId(1000 + number % 30_000, number)  # pids come back, start times do not
        self.tenants.append(_Tenant(process, 7 + number, kernel_seconds, ratio, until_tick))

    def work(self) -> float:
        """All tenants for a second; how busy the device was."""
        wanted = [tenant.ratio * self.random.uniform(0.7, 1.3) for tenant in self.tenants]
        scale = min(1.0, _MOST_BUSY / sum(wanted)) if sum(wanted) else 1.0
        for tenant, ratio in zip(self.tenants, wanted, strict=True):
            launches = round(ratio * scale / tenant.kernel_seconds)
            tenant.launches += launches
            tenant.true_ratio = launches * tenant.kernel_seconds
        return min(1.0, sum(tenant.true_ratio for tenant in self.tenants))

    def samples(self, activity: float) -> list[Sample]:
        """What collectors say."""
        device = Device(0, _GPU, "simulated", "00000000:01:00.0", 132, 80 << 30)
        reading = DeviceReading(device, sm_activity_ratio=activity, memory_used_bytes=1 << 30)
        found: list[Sample] = [reading, ProcessesListed(_GPU)]
        for tenant in self.tenants:
            found += [
                Probed(tenant.id),
                ProcessMemory(tenant.id.tgid, _GPU, 100 * _MIB),
                ProcessUtilization(tenant.id.tgid, _GPU, tenant.true_ratio * self.random.uniform(0.8, 1.2)),
                LaunchCount(
                    tenant.id, 0, tenant.function, tenant.launches, tenant.launches, tenant.launches * 132, 256
                ),
            ]
        return found


def looks(hours: float, seed: int) -> Iterator[Mapping[str, float]]:
    """One each quarter of an hour of ticks: `engine_mib`, `tick_sm_error`, `tick_us`, `processes_seen`."""
    day = _Day(Random(seed))
    for _ in range(_STAYING):
        day.add(float("inf"), 0.08)
    known: dict[ProcessId, GpuProcess] = {}
    engine: Any = AttributionEngine(
        cast("Any", SimpleNamespace(get=known.get, outside=lambda _: None)), FunctionNames()
    )
    no_proc = Procfs("/nonexistent")
    errors: list[float] = []
    began = time.perf_counter()
    for tick in range(1, int(hours * 3600) + 1):
        gone = {tenant.id for tenant in day.tenants if tenant.until_tick <= tick}
        day.tenants = [tenant for tenant in day.tenants if tenant.id not in gone]
        if tick % _EVERY_TICKS == 0:
            day.add(tick + _LIFE_TICKS, 0.05)
        _register(known, day.tenants, gone)
        samples = day.samples(day.work())
        parts = engine.tick(samples, TickInputs.of(samples, no_proc), NS_PER_SECOND)
        engine.forget(gone)
        engine.unprobed.retain({one.container.key for one in known.values()})
        errors += _errors(day.tenants, parts)
        if tick % _LOOK_TICKS == 0:
            gc.collect()
            yield {
                "engine_mib": psutil.Process().memory_info().rss / _MIB,
                "tick_sm_error": statistics.mean(errors),
                "tick_us": (time.perf_counter() - began) / _LOOK_TICKS * 1e6,
                "processes_seen": day.born,
            }
            errors, began = [], time.perf_counter()


def _register(known: dict[ProcessId, GpuProcess], tenants: Sequence[_Tenant], gone: set[ProcessId]) -> None:
    for process in gone:
        known.pop(process, None)
    for tenant in tenants:
        if tenant.id not in known:
            container = Container(ContainerKey(f"c{tenant.id.start_ticks}"), "c", "docker")
            made = Process(tenant.id, "program", "root", container.key)
            known[tenant.id] = GpuProcess(made, container, (_GPU,), by_environment=(_GPU,))


def _errors(tenants: Sequence[_Tenant], parts: Sequence[Any]) -> list[float]:
    """Of those that stay."""
    usage = parts[0].attribution.usage
    return [
        abs((usage[tenant.id].sm_ratio or 0.0) - tenant.true_ratio)
        for tenant in tenants[:_STAYING]
        if tenant.id in usage
    ]

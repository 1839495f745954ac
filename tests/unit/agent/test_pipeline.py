# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Conservation over random histories: missing readings, lost devices, MIG, reused pids, unreadable processes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.collectors.samples import (
    AllocationCount,
    CopyCount,
    Delivered,
    LaunchCount,
    LiveByAge,
    Probed,
    ProcessMemory,
    ProcessUtilization,
    Sample,
)
from agent.containers import ContainerIndex
from agent.containers.gpu_processes import GpuProcessRegistry, ProcessEvent
from agent.core.errors import GoneError, NvmlError
from agent.core.model import (
    Container,
    ContainerKey,
    Device,
    DeviceReading,
    DeviceUuid,
    ProcessId,
    Snapshot,
    Totals,
    Usage,
)
from agent.node.procfs import Procfs
from agent.pipeline import ContainerLosses, Pipeline

N = TypeVar("N", int, float)
SECOND = 1_000_000_000
GPUS = [Device(n, DeviceUuid(f"GPU-{n}"), "GPU", f"0000:0{n}:00.0", 132, 80 << 30) for n in range(3)]
PARENT = GPUS[2]
SLICES = [Device(2, DeviceUuid(f"MIG-{n}"), "MIG", "0000:02:00.0", 16, 10 << 30, PARENT.uuid) for n in range(2)]
DEVICES = [*GPUS, *SLICES]
EXCESS = {
    "memory_bytes": "memory_excess_bytes",
    "pcie_tx_bytes_per_second": "pcie_tx_excess_bytes_per_second",
    "pcie_rx_bytes_per_second": "pcie_rx_excess_bytes_per_second",
}
PCIE = ("pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second")
FIGURES = {name: name for name in ("memory_bytes", *PCIE)} | {"sm_ratio": "sm_activity_ratio"}
FIGURES["memory_bytes"] = "memory_used_bytes"
SEEN_DEVICES = ("0", "1", "0,1", "2", "MIG-0", "MIG-1", "", None)


@dataclass(slots=True)
class Life:
    """A process: what the probes have counted of it, by ordinal and function."""

    visible: str | None
    probed: bool
    readable: bool
    container: str
    counted: dict[tuple[int | None, int], list[int]] = field(default_factory=dict)
    copied: dict[tuple[int | None, str], int] = field(default_factory=dict)


@dataclass(slots=True)
class World:
    """A node, as /proc, the runtimes, the probes and NVML would report it. `launched` is the truth."""

    random: Random
    alive: dict[int, ProcessId] = field(default_factory=dict)
    lives: dict[ProcessId, Life] = field(default_factory=dict)  # until the pipeline forgets them
    born: int = 0
    launched: int = 0

    # /proc and the runtimes

    def process_id(self, tgid: int) -> ProcessId:
        if tgid not in self.alive:
            raise GoneError(str(tgid))
        return self.alive[tgid]

    def is_alive(self, process: ProcessId) -> bool:
        return self.alive.get(process.tgid) == process

    def require(self, process: ProcessId) -> None:
        if not self.is_alive(process):
            raise GoneError(str(process))

    def _life(self, tgid: int) -> Life:
        life = self.lives[self.process_id(tgid)]
        if not life.readable:
            raise GoneError(str(tgid))
        return life

    def environ(self, tgid: int, names: Collection[str]) -> dict[str, str]:
        visible = self._life(tgid).visible
        return {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    def gpu_minors(self, process: ProcessId) -> None:
        return None

    def command(self, tgid: int) -> str:
        return f"program {tgid}"

    def user(self, tgid: int) -> str:
        return "root"

    def container_of(self, process: ProcessId, names: Iterable[str] = ()) -> Container:
        life = self.lives[process]
        if not (names or (self.is_alive(process) and life.readable)):
            raise GoneError(str(process))
        return Container(ContainerKey(life.container), life.container, "docker")

    # what happens between two ticks

    def pass_on(self, pipeline: Pipeline) -> None:
        """Some are born, some die, and the others may work."""
        r = self.random
        while len(self.alive) < 5 and r.random() < 0.5:
            self._bear(pipeline)
        for process, life in self.lives.items():
            if life.probed and self.is_alive(process):
                self._work(life)
        for process in list(self.alive.values()):
            if r.random() < 0.2:
                self.kill(pipeline, process)

    def _bear(self, pipeline: Pipeline) -> None:
        r = self.random
        free = [tgid for tgid in range(10, 16) if tgid not in self.alive]
        self.born += 1
        process = ProcessId(r.choice(free), self.born)
        self.alive[process.tgid] = process
        life = Life(r.choice(SEEN_DEVICES), r.random() < 0.8, r.random() < 0.9, f"c{r.randrange(4)}")
        self.lives[process] = life
        if life.probed and r.random() < 0.6:
            pipeline.seen(ProcessEvent(process, "program", 0, (f"/docker/{life.container}",)))

    def kill(self, pipeline: Pipeline, process: ProcessId) -> None:
        """A probe sees it, unless it does not."""
        del self.alive[process.tgid]
        if self.random.random() < 0.8:
            pipeline.exited(process)

    def _work(self, life: Life) -> None:
        r = self.random
        for _ in range(r.randrange(3)):
            launches = r.randrange(1, 1000)
            sums = life.counted.setdefault((r.choice((0, 1, None, 7)), r.randrange(1, 4)), [0, 0])
            sums[0] += launches
            sums[1] += launches * r.choice((1, 3))
        if r.random() < 0.5:
            key = (r.choice((0, 1, None)), r.choice(("host_to_device", "device_to_host", "device_to_device")))
            life.copied[key] = life.copied.get(key, 0) + r.randrange(1 << 34)

    # what is seen of it

    def probes(self) -> Iterator[Sample]:
        """As the collectors of the maps."""
        r = self.random
        for process, life in self.lives.items():
            if not life.probed:
                continue
            yield Probed(process)
            for (ordinal, function), (launches, kernels) in life.counted.items():
                yield LaunchCount(process, ordinal, function, launches, kernels, kernels * 64, 128)
            for (ordinal, direction), size in life.copied.items():
                yield CopyCount(process, ordinal, direction, size, 1)
            if r.random() < 0.4:
                live = {"plain": r.randrange(1 << 34), "pinned": r.randrange(1 << 20)}
                yield AllocationCount(process, r.choice((0, 1, None)), live, r.randrange(1 << 35), 0)
                yield LiveByAge(process, 0, (live["plain"], 0, 0, 0))
            for _ in range(r.randrange(2)):
                elapsed = r.randrange(SECOND)
                functions = ((r.randrange(4), r.randrange(1, 50)),)
                yield Delivered(process, r.randrange(SECOND), 50, 0, 0, elapsed, 0, elapsed, 0, 0, functions)

    def nvml(self) -> Iterator[Sample]:
        """As the collector of that name."""
        r = self.random
        for device in DEVICES:
            if r.random() < 0.1:
                continue
            yield self._reading(device)
            if device == PARENT:
                continue
            for tgid in range(10, 16):
                if r.random() < 0.4:
                    yield ProcessMemory(tgid, device.uuid, self._maybe(r.randrange(20 << 30)), r.random() < 0.2)
                    if r.random() < 0.5:
                        yield ProcessUtilization(tgid, device.uuid, r.random())
        if r.random() < 0.1:
            raise NvmlError("the driver is gone")

    def _reading(self, device: Device) -> DeviceReading:
        r = self.random
        if r.random() < 0.15:
            return DeviceReading(device, lost=True)
        tx, rx = self._maybe(r.random() * 1e10), self._maybe(r.random() * 1e10)
        if device.parent:
            tx = rx = None
        if device == PARENT:
            return DeviceReading(device, pcie_tx_bytes_per_second=tx, pcie_rx_bytes_per_second=rx)
        activity, used = self._maybe(r.choice((0.0, r.random()))), self._maybe(r.randrange(80 << 30))
        source = r.choice(("gpm", "utilization"))
        return DeviceReading(device, False, activity, source if activity is not None else None, used, None, tx, rx)

    def _maybe(self, value: N) -> N | None:
        return None if self.random.random() < 0.2 else value


@dataclass(slots=True)
class Source:
    """One collector. `forget` is what takes counts out of the kernel's maps."""

    world: World
    name: str

    def collect(self, now_ns: int) -> Iterable[Sample]:
        return self.world.probes() if self.name == "probes" else self.world.nvml()

    def forget(self, processes: Collection[ProcessId]) -> None:
        if self.name == "probes":
            for process in processes:
                assert not self.world.is_alive(process)
                life = self.world.lives.pop(process)
                self.world.launched += sum(kernels for _, kernels in life.counted.values())


@dataclass(slots=True)
class Index:
    """Which container a process is in."""

    world: World

    def container_of(self, process: ProcessId, names: Iterable[str] = ()) -> Container:
        return self.world.container_of(process, names)

    def forget(self, processes: Iterable[ProcessId]) -> None:
        """Nothing is kept."""


def pipeline_of(world: World) -> Pipeline:
    members = GpuProcessRegistry(cast(ContainerIndex, Index(world)), lambda: DEVICES, cast(Procfs, world))
    return Pipeline([Source(world, "probes"), Source(world, "nvml")], members, None)


def rows(snapshot: Snapshot, device: DeviceUuid) -> list[Usage]:
    return [usage for one in snapshot.containers for usage in one.usage if usage.device == device]


def assert_it_adds_up(snapshot: Snapshot) -> None:
    rest = {one.device: one for one in snapshot.unattributed}
    assert rest.keys() == {reading.device.uuid for reading in snapshot.devices}
    for reading in snapshot.devices:
        device = reading.device.uuid
        slices = [d.device.uuid for d in snapshot.devices if d.device.parent == device]
        for name, of_device in FIGURES.items():
            whole, left = getattr(reading, of_device), getattr(rest[device], name)
            if whole is None:
                assert left is None, f"{name} of {device}: the device's is unknown"
                continue
            on = [device, *slices] if name in PCIE else [device]
            parts = [getattr(usage, name) for one in on for usage in rows(snapshot, one)]
            known = sum(part for part in parts if part is not None)
            excess = getattr(rest[device], EXCESS[name]) if name in EXCESS else 0
            assert math.isclose(known + left, whole + excess, rel_tol=1e-9, abs_tol=1e-9), (name, device, parts, left)


def assert_nothing_is_negative(snapshot: Snapshot) -> None:
    parts = [usage for one in snapshot.containers for usage in one.usage]
    parts += [usage for process in snapshot.processes for usage in process.usage]
    for part in (*parts, *snapshot.unattributed):
        figures = [getattr(part, name) for name in FIGURES]
        assert all(figure is None or figure >= 0 for figure in figures), part
    for reading in snapshot.devices:
        of_device = sum(usage.sm_ratio or 0.0 for usage in rows(snapshot, reading.device.uuid))
        assert of_device <= 1 + 1e-9, f"more than all of {reading.device.uuid}"


def assert_unknown_is_absent(snapshot: Snapshot, probed: Collection[ProcessId]) -> None:
    for one in snapshot.processes:
        if one.process.id not in probed:
            for usage in one.usage:
                assert usage.launches_per_second is None
                assert usage.pcie_tx_bytes_per_second is usage.pcie_rx_bytes_per_second is None
    for reading, rest in zip(snapshot.devices, snapshot.unattributed, strict=True):
        if reading.lost:
            assert all(getattr(rest, name) is None for name in FIGURES)


def totals_of(snapshot: Snapshot) -> dict[tuple[str, DeviceUuid], Totals]:
    found = {("device", device): totals for device, totals in snapshot.device_totals.items()}
    found |= {("rest", one.device): one.totals for one in snapshot.unattributed}
    for one in (*snapshot.containers, *snapshot.ended):
        found |= {(one.container.key, usage.device): usage.totals for usage in one.usage}
    return found


def assert_none_fell(before: dict[tuple[str, DeviceUuid], Totals], now: dict[tuple[str, DeviceUuid], Totals]) -> None:
    for owner, totals in now.items():
        known = before.get(owner, Totals())
        for name in ("sm_seconds", "launches", "pcie_tx_bytes", "pcie_rx_bytes"):
            assert getattr(totals, name) >= getattr(known, name), (owner, known, totals)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=True), st.integers(1, 12))  # a history is too long to be drawn choice by choice
def test_whatever_is_missing_the_parts_add_up_and_no_launch_is_lost_uncounted(random: Random, ticks: int) -> None:
    world = World(random)
    pipeline = pipeline_of(world)
    now, known = pipeline.tick(0).at_ns, dict[tuple[str, DeviceUuid], Totals]()
    for _ in range(ticks):
        now += random.choice((SECOND, 100_000_000, 7_123_456_789))
        world.pass_on(pipeline)
        probed = {process for process, life in world.lives.items() if life.probed}
        snapshot = pipeline.tick(now)
        assert_it_adds_up(snapshot)
        assert_nothing_is_negative(snapshot)
        assert_unknown_is_absent(snapshot, probed)
        assert_none_fell(known, totals_of(snapshot))
        known |= totals_of(snapshot)
    for process in list(world.alive.values()):
        world.kill(pipeline, process)
    for _ in range(31):  # some died unseen
        now += SECOND
        snapshot = pipeline.tick(now)
    assert not world.alive
    assert not pipeline.members.all()
    ended = totals_of(snapshot)
    assert {owner for owner in known if owner[0] not in ("device", "rest")} <= ended.keys()
    assert_none_fell(known, ended)
    booked = sum(usage.totals.launches for one in snapshot.ended for usage in one.usage)
    lost = sum(count for name, count in snapshot.lost.items() if name.startswith("launches:"))
    assert booked + lost == world.launched


def test_losses_of_a_containers_cgroups_add_up_and_nothing_is_kept_of_those_that_are_gone() -> None:
    web = Container(ContainerKey("unit:web"), "web", "systemd")
    members = SimpleNamespace(refused_of={web.key: 2}, get=lambda _: SimpleNamespace(container=web))
    tenants = SimpleNamespace(owners={ProcessId(1, 1): 71, ProcessId(2, 1): 72}, lost={})
    losses = ContainerLosses(cast(Any, members), cast(Any, tenants))
    tenants.lost = {
        71: {"launch": 3, "thread": 1},
        72: {"launch": 4},
    }  # restarted: one unit, two cgroups
    assert losses.by_container() == {web.key: {"member": 2, "launch": 7, "thread": 1}}
    tenants.owners, tenants.lost = {}, {72: {"launch": 4}}
    assert losses.by_container() == {web.key: {"member": 2, "launch": 4}}
    assert set(losses._names) == {72}

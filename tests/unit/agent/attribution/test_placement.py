# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A claim counts where NVML lists its process, on the device that the driver reported, NVML shows or it assumes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.attribution.engine import AttributionEngine, DeviceTick
from agent.attribution.inputs import TickInputs, bare_uuid
from agent.attribution.placement import fitted, ordinals_by_evidence
from agent.collectors.samples import (
    AllocationCount,
    CopyCount,
    LaunchCount,
    OrdinalUuid,
    Probed,
    ProcessesListed,
    ProcessMemory,
    ProcessUtilization,
    Sample,
)
from agent.containers.gpu_processes import GpuProcess
from agent.core.model import Container, ContainerKey, DeviceReading, DeviceUuid, Process, ProcessId, Provenance
from agent.node.procfs import Procfs
from agent.probes.events import FunctionNames
from tests.support.snapshots import GPU_0, GPU_1, device

LIAR, HONEST = ProcessId(10, 1), ProcessId(11, 1)
SECOND, MIB, GIB = 1_000_000_000, 1 << 20, 1 << 30
USED = 300 * MIB
NOBODY = Procfs("/nonexistent")
DEVICES = [GPU_0, GPU_1, DeviceUuid("GPU-2")]


class Node:
    """An engine, and a registry of processes that assume both GPUs."""

    def __init__(self, command: str = "program") -> None:
        self.assumed: tuple[DeviceUuid, ...] = (GPU_0, GPU_1)
        self.commands = {LIAR: command}
        self.engine = AttributionEngine(
            cast("Any", SimpleNamespace(get=self.member, outside=lambda _: None)), FunctionNames()
        )
        self.launches = 0

    def member(self, process: ProcessId) -> GpuProcess:
        container = Container(ContainerKey(f"c{process.tgid}"), "c", "docker")
        made = Process(process, self.commands.get(process, "program"), "root", container.key)
        return GpuProcess(made, container, self.assumed, by_environment=self.assumed)

    def tick(self, *samples: Sample, listing: Sequence[DeviceUuid] = (GPU_0, GPU_1)) -> dict[DeviceUuid, DeviceTick]:
        """One second."""
        readings = [
            DeviceReading(
                device(index, uuid),
                sm_activity_ratio=0.5,
                memory_used_bytes=USED,
                pcie_tx_bytes_per_second=1e6,
                pcie_rx_bytes_per_second=1e6,
            )
            for index, uuid in enumerate((GPU_0, GPU_1))
        ]
        everything = [*readings, *map(ProcessesListed, listing), Probed(LIAR), Probed(HONEST), *samples]
        parts = self.engine.tick(everything, TickInputs.of(everything, NOBODY), SECOND)
        return {part.attribution.reading.device.uuid: part for part in parts}

    def claims(self, process: ProcessId, ordinal: int = 0) -> list[Sample]:
        """100 launches, 1 GiB of copies and 2 GiB of memory."""
        self.launches += 100
        return [
            LaunchCount(process, ordinal, 7, self.launches, self.launches, self.launches * 64, 128),
            CopyCount(process, ordinal, "host_to_device", self.launches * GIB // 100, self.launches),
            AllocationCount(process, ordinal, {"plain": 2 * GIB}, 2 * GIB, 0),
        ]

    @property
    def refused(self) -> int:
        return self.engine.lost()["claims:unlisted"]


def listed(process: ProcessId, on: DeviceUuid, size: int | None = USED) -> ProcessMemory:
    return ProcessMemory(process.tgid, on, size)


def work_of(part: DeviceTick, process: ProcessId) -> Any:
    return next((one for one in part.work if one.process == process), None)


def test_what_nvml_does_not_list_raises_no_figure_of_a_device_and_takes_nobodys_share() -> None:
    node, alone = Node(), Node()
    for _ in range(5):
        honest = [listed(HONEST, GPU_0), *node.claims(HONEST)]
        part = node.tick(*honest, *node.claims(LIAR))[GPU_0]
        expected = alone.tick(*honest)[GPU_0]
        assert part.attribution.reading.memory_used_bytes == USED
        assert part.attribution.usage[HONEST].memory_bytes == USED
        assert part.attribution.reading.pcie_rx_bytes_per_second == (
            expected.attribution.reading.pcie_rx_bytes_per_second
        )
    assert work_of(part, LIAR) is None
    assert node.refused >= 2
    assert part.attribution.usage[HONEST].sm_ratio == pytest.approx(expected.attribution.usage[HONEST].sm_ratio)


def test_a_newcomers_launches_count_for_a_moment_and_its_memory_never() -> None:
    node = Node()
    for expected in (100, 100, None):
        part = node.tick(listed(HONEST, GPU_0), *node.claims(LIAR))[GPU_0]
        work = work_of(part, LIAR)
        assert (work.launches if work else None) == expected
        assert part.attribution.reading.memory_used_bytes == USED
        assert work is None or (work.memory_bytes is None and not work.memory_by_kind)


def test_what_a_process_claims_that_sees_no_device_is_refused_as_well() -> None:
    node = Node()
    node.assumed = ()
    for _ in range(5):
        parts = node.tick(*node.claims(LIAR))
        assert all(work_of(part, LIAR) is None for part in parts.values())
    assert node.refused >= 2


def test_the_last_tick_of_a_process_that_was_listed_counts() -> None:
    node = Node()
    for _ in range(5):
        node.tick(listed(LIAR, GPU_0), *node.claims(LIAR))
    assert work_of(node.tick(*node.claims(LIAR))[GPU_0], LIAR).launches == 100
    assert node.refused == 0


@pytest.mark.parametrize("reason", ["no list", "an MPS server alone", "pids of another namespace"])
def test_where_nvml_cannot_say_claims_count_within_what_the_device_has_in_use(reason: str) -> None:
    node = Node("/usr/bin/nvidia-cuda-mps-server -f" if reason == "an MPS server alone" else "program")
    listing = () if reason == "no list" else (GPU_0, GPU_1)
    other = {
        "an MPS server alone": [listed(LIAR, GPU_0, 100 * MIB)],
        "pids of another namespace": [listed(ProcessId(3, 1), GPU_0)],
    }
    for _ in range(5):
        part = node.tick(*other.get(reason, []), *node.claims(HONEST), listing=listing)[GPU_0]
        assert work_of(part, HONEST).launches == 100
        known = 100 * MIB if reason == "an MPS server alone" else 0
        assert work_of(part, HONEST).memory_bytes == USED - known
        assert part.attribution.reading.memory_used_bytes == USED
    assert node.refused == 0


def test_while_nvml_is_away_nothing_is_refused() -> None:
    node = Node()
    for _ in range(5):
        samples: list[Sample] = [Probed(HONEST), *node.claims(HONEST)]
        node.engine.tick(samples, TickInputs.of(samples, NOBODY), SECOND)
    assert node.refused == 0


def test_a_process_that_chose_its_device_itself_is_on_the_one_where_nvml_lists_it() -> None:
    node = Node()
    parts = node.tick(listed(HONEST, GPU_1), *node.claims(HONEST, 0))
    assert work_of(parts[GPU_1], HONEST).launches == 100
    assert work_of(parts[GPU_0], HONEST) is None
    assert node.engine.ordinals() == {HONEST: (GPU_1,)}
    parts = node.tick(listed(HONEST, GPU_1))  # idle, and still there
    assert node.engine.ordinals() == {HONEST: (GPU_1,)}


def test_what_the_driver_reported_comes_first() -> None:
    node = Node()
    reported = OrdinalUuid(HONEST, 0, bytes.fromhex(bare_uuid(GPU_1)))
    both = [listed(HONEST, GPU_0), listed(HONEST, GPU_1)]
    parts = node.tick(*both, reported, *node.claims(HONEST, 0))
    assert work_of(parts[GPU_1], HONEST).launches == 100
    assert node.engine.ordinals() == {HONEST: (GPU_1,)}


def test_another_program_in_the_same_process_is_assumed_anew() -> None:
    node = Node()
    node.tick(listed(HONEST, GPU_1), *node.claims(HONEST, 0))
    node.assumed = (GPU_0,)
    node.tick()
    assert node.engine.ordinals() == {}


@pytest.mark.parametrize(
    ("reported", "used", "on", "expected"),
    [
        ({}, {0, 1}, [0, 1], (0, 1, 2)),  # nothing speaks against what is assumed
        ({}, {1}, [1], (0, 1, 2)),
        ({}, {0}, [1], (1,)),
        ({}, {0, 1}, [1, 2], (1, 2)),
        ({}, {0, 1}, [2], (0, 1)),  # it may be either: what was assumed stays
        ({0: 2}, {0, 1}, [0, 2], (2, 0)),
        ({1: 0}, set(), [], (None, 0)),
        ({}, {0}, [], (0, 1, 2)),  # not listed yet
        ({}, {5}, [1], (None, None, None, None, None, 1)),
    ],
)
def test_evidence_decides_between_devices(
    reported: dict[int, int], used: set[int], on: list[int], expected: tuple[int | None, ...]
) -> None:
    known = tuple(DEVICES)
    found = ordinals_by_evidence(known, {o: DEVICES[d] for o, d in reported.items()}, used, [DEVICES[d] for d in on])
    assert found == tuple(None if number is None else DEVICES[number] for number in expected)


numbers = st.integers(0, 2)


@given(
    st.lists(st.sampled_from([*DEVICES, None]), max_size=4),
    st.dictionaries(numbers, st.sampled_from(DEVICES)),
    st.sets(numbers),
    st.sets(st.sampled_from(DEVICES)),
)
def test_the_same_evidence_gives_the_same_devices_again_and_the_driver_is_believed(
    known: list[DeviceUuid | None], reported: dict[int, DeviceUuid], used: set[int], on: set[DeviceUuid]
) -> None:
    listed_on = sorted(on)
    found = ordinals_by_evidence(tuple(known), reported, used, listed_on)
    assert all(found[ordinal] == uuid for ordinal, uuid in reported.items())
    assert ordinals_by_evidence(found, reported, used, listed_on) == found
    if len(on) == len(used) == 1 and not reported:
        assert found[next(iter(used))] in on


@given(st.dictionaries(st.integers(1, 20), st.integers(0, 1 << 50)), st.integers(-5, 1 << 50))
def test_claims_never_exceed_what_there_is_and_small_ones_come_first(claims: dict[int, int], limit: int) -> None:
    by_process = {ProcessId(number, 1): size for number, size in claims.items()}
    found = fitted(by_process, limit)
    assert sum(found.values()) <= max(0, limit)
    assert all(found[process] <= size for process, size in by_process.items())
    if by_process:
        part = max(0, limit) // len(by_process)
        assert all(found[process] == size for process, size in by_process.items() if size <= part)


def test_where_a_process_works_on_devices_that_are_not_known_it_has_what_nvml_says() -> None:
    node = Node()
    node.assumed = ()
    for _ in range(8):
        node.launches += 100
        unplaced = LaunchCount(HONEST, None, 7, node.launches, node.launches, node.launches * 64, 128)
        where = [listed(HONEST, GPU_0), listed(ProcessId(99, 1), GPU_0), listed(HONEST, GPU_1)]
        used = [ProcessUtilization(HONEST.tgid, GPU_0, 0.3), ProcessUtilization(HONEST.tgid, GPU_1, 0.1)]
        parts = node.tick(*where, *used, unplaced)
    shared, alone = (parts[uuid].attribution.usage[HONEST] for uuid in (GPU_0, GPU_1))
    assert 0 < (shared.sm_ratio or 0.0) <= 0.5
    assert (shared.sm_error_ratio or 0.0) > 0.05
    assert (alone.sm_ratio, alone.sm_provenance) == (0.5, Provenance.MEASURED)
    assert work_of(parts[GPU_0], HONEST).launches is None  # unknown, not none

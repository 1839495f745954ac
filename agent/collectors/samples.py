# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What collectors yield. Counts are cumulative since the process was first seen; readers take differences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from agent.core.model import DeviceReading, DeviceUuid, ProcessId

AGES_SECONDS: Final = (60, 600, 3600)


@dataclass(frozen=True, slots=True)
class Probed:
    """The probes see this process: what it has no sample for, it did not do."""

    process: ProcessId


@dataclass(frozen=True, slots=True)
class CountedSince:
    """When launches were read, and when the time before: a busy machine is late with either. ns, CLOCK_MONOTONIC."""

    at_ns: int
    before_ns: int


@dataclass(frozen=True, slots=True)
class LaunchCount:
    """Launches of one function by one process; given when they changed.

    `ordinal` is the process's own device number, None: not known. A graph is a function whose launches are several
    kernels each.
    """

    process: ProcessId
    ordinal: int | None
    function: int
    launches: int
    kernels: int
    blocks: int
    threads_per_block: int
    waves: int = 0  # how often the SMs were filled; 0: not known
    wave_sms: int = 0  # Σ SMs that each wave kept busy


@dataclass(frozen=True, slots=True)
class OrdinalUuid:
    """The device behind an ordinal of the process, by the driver's answer. `uuid` is 16 bytes."""

    process: ProcessId
    ordinal: int
    uuid: bytes


@dataclass(frozen=True, slots=True)
class OrdinalBusId:
    """The ordinal of the process at a PCI address, by the driver's answer. `text`: the address as it was asked for."""

    process: ProcessId
    ordinal: int
    text: str


@dataclass(frozen=True, slots=True)
class AllocationCount:
    """Live memory by the calls that succeeded since the probes were attached. `pinned` is host memory."""

    process: ProcessId
    ordinal: int | None
    live_bytes: Mapping[str, int]  # by kind (agent.probes.abi.MEMORY_KINDS)
    peak_bytes: int
    failures: int


@dataclass(frozen=True, slots=True)
class LiveByAge:
    """Live device memory by how long ago it was allocated: bytes younger than each of AGES_SECONDS, and the rest."""

    process: ProcessId
    ordinal: int | None
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyCount:
    """Bytes copied in one direction (agent.probes.abi.COPY_DIRECTIONS)."""

    process: ProcessId
    ordinal: int | None
    direction: str
    bytes: int
    calls: int


class Delivered(NamedTuple):
    """Work launched between two drained waits, and how long it took. Fields as struct delivery of bpf/wait.h."""

    process: ProcessId
    at_ns: int
    launches: int
    charged_ns: int
    queued_ns: int
    waited_ns: int
    waited_busy_ns: int
    elapsed_ns: int
    elapsed_busy_ns: int
    pauses: int
    functions: tuple[tuple[int, int], ...] = ()  # (function, launches), at most 8


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """NVML's bytes of one process on one device; None where NVML has no value."""

    tgid: int
    device: DeviceUuid
    bytes: int | None
    is_mps: bool = False  # a client of MPS: its kernels run beside others


@dataclass(frozen=True, slots=True)
class ProcessesListed:
    """NVML listed a device's processes, so one that it has no ProcessMemory for is not there."""

    device: DeviceUuid


@dataclass(frozen=True, slots=True)
class ProcessUtilization:
    """NVML's smUtil: the share of *time* in which the process had work on the device."""

    tgid: int
    device: DeviceUuid
    ratio: float


Sample = (
    Probed
    | CountedSince
    | LaunchCount
    | OrdinalUuid
    | OrdinalBusId
    | AllocationCount
    | LiveByAge
    | CopyCount
    | Delivered
    | ProcessMemory
    | ProcessesListed
    | ProcessUtilization
    | DeviceReading
)


class Collector(Protocol):
    """A source of samples. One file each; listed in `agent.collectors.BUILTIN`."""

    name: str

    def collect(self, now_ns: int) -> Iterable[Sample]:
        """All current samples. Raises only when nothing at all could be read."""
        ...

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Drops what is kept about processes that ended and are accounted for."""
        ...

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What collectors hand over. Counts are cumulative since the process was first seen; readers take differences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from agent.model import DeviceReading, DeviceUuid, ProcessId


@dataclass(frozen=True, slots=True)
class LaunchCount:
    """Launches of one function by one process. `ordinal` is the process's own device number; None: not known."""

    process: ProcessId
    ordinal: int | None
    function: int
    launches: int
    blocks: int
    threads_per_block: int


@dataclass(frozen=True, slots=True)
class AllocationCount:
    """Live device memory by the calls that succeeded since the probes were there."""

    process: ProcessId
    ordinal: int | None
    live_bytes: int
    peak_bytes: int
    failures: int


@dataclass(frozen=True, slots=True)
class CopyCount:
    """Bytes copied in one direction (agent.layout.COPY_DIRECTIONS)."""

    process: ProcessId
    ordinal: int | None
    direction: str
    bytes: int
    calls: int


@dataclass(frozen=True, slots=True)
class Delivered:
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


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """NVML's bytes of one process on one device; None where NVML does not say."""

    tgid: int
    device: DeviceUuid
    bytes: int | None


@dataclass(frozen=True, slots=True)
class ProcessUtilization:
    """NVML's smUtil: the share of *time* in which the process had work on the device."""

    tgid: int
    device: DeviceUuid
    ratio: float


Sample = LaunchCount | AllocationCount | CopyCount | Delivered | ProcessMemory | ProcessUtilization | DeviceReading


class Collector(Protocol):
    """A source of samples. One file each; listed in `agent.collectors.BUILTIN`."""

    name: str

    def collect(self, now_ns: int) -> Iterable[Sample]:
        """Everything known now. Raises only when nothing at all could be read."""
        ...

    def forget(self, process: ProcessId) -> None:
        """The process is gone and accounted for: drop what is kept about it."""
        ...

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""From cumulative samples to the work of one tick: differences per process and device.

Keeps the previous count of everything, so its size follows the kernel's maps, which are bounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from agent.durations import Function
from agent.model import DeviceUuid, ProcessId
from agent.samples import AllocationCount, CopyCount, LaunchCount, Sample

Owner = tuple[ProcessId, DeviceUuid]
ResolveDevice = Callable[[ProcessId, int | None], DeviceUuid | None]


@dataclass(slots=True)
class Counted:
    """One process's counted work on one device in a tick."""

    launches: dict[int, int] = field(default_factory=dict)  # by function
    groups: dict[int, tuple[float, int]] = field(default_factory=dict)  # function → (blocks per launch, threads each)
    pcie_tx_bytes: int = 0
    pcie_rx_bytes: int = 0
    live_bytes: int | None = None

    def functions(self, process: ProcessId) -> Mapping[Function, int]:
        """Launches by (process, function)."""
        return {(process, function): count for function, count in self.launches.items()}


class Tally:
    """Turns each tick's samples into differences."""

    def __init__(self) -> None:
        self._launches: dict[tuple[ProcessId, int | None, int], tuple[int, int]] = {}
        self._copies: dict[tuple[ProcessId, int | None, str], int] = {}
        self.unplaced = 0  # launches whose device nobody can tell

    def tick(self, samples: Iterable[Sample], resolve: ResolveDevice) -> dict[Owner, Counted]:
        """The work since the previous call."""
        work: dict[Owner, Counted] = defaultdict(Counted)
        for sample in samples:
            if isinstance(sample, LaunchCount):
                self._launch(sample, resolve(sample.process, sample.ordinal), work)
            elif isinstance(sample, CopyCount):
                self._copy(sample, resolve(sample.process, sample.ordinal), work)
            elif isinstance(sample, AllocationCount):
                device = resolve(sample.process, sample.ordinal)
                if device is not None:
                    counted = work[sample.process, device]
                    counted.live_bytes = (counted.live_bytes or 0) + sample.live_bytes
        return dict(work)

    def forget(self, process: ProcessId) -> None:
        """The process is gone."""
        self._launches = {key: value for key, value in self._launches.items() if key[0] != process}
        self._copies = {key: value for key, value in self._copies.items() if key[0] != process}

    def _launch(self, sample: LaunchCount, device: DeviceUuid | None, work: dict[Owner, Counted]) -> None:
        key = (sample.process, sample.ordinal, sample.function)
        launches, blocks = self._launches.get(key, (0, 0))
        self._launches[key] = (sample.launches, sample.blocks)
        new = sample.launches - launches
        if new <= 0:
            if device is not None:
                work[sample.process, device].launches.setdefault(sample.function, 0)
            return
        if device is None:
            self.unplaced += new
            return
        counted = work[sample.process, device]
        counted.launches[sample.function] = counted.launches.get(sample.function, 0) + new
        counted.groups[sample.function] = ((sample.blocks - blocks) / new, sample.threads_per_block)

    def _copy(self, sample: CopyCount, device: DeviceUuid | None, work: dict[Owner, Counted]) -> None:
        key = (sample.process, sample.ordinal, sample.direction)
        new = sample.bytes - self._copies.get(key, 0)
        self._copies[key] = sample.bytes
        if device is None or new <= 0:
            return
        counted = work[sample.process, device]
        if sample.direction == "device_to_host":
            counted.pcie_tx_bytes += new
        elif sample.direction == "host_to_device":
            counted.pcie_rx_bytes += new

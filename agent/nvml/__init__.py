# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""NVML at the edge: devices, readings, processes. The only package that imports the binding (pynvml).

Invariants: an unreadable figure is None; a lost GPU hides only itself and is found again by its UUID; a driver that is
unloaded and loaded again is taken up again. Nothing here raises after `open` has succeeded: failures are counted in
`errors`, and `problem` says in one line why NVML as a whole is away. Used from one thread.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from agent import clock
from agent.clock import NS_PER_SECOND
from agent.errors import SetupError
from agent.model import Device, DeviceReading, DeviceUuid
from agent.nvml import library
from agent.nvml.calls import Calls, DeviceLostError, NvmlDownError
from agent.nvml.device import Gpu, describe
from agent.nvml.mig import Split
from agent.nvml.pcie import PcieThroughput
from agent.nvml.xid import XidEvents

T = TypeVar("T")

RETRY_ALL_LOST_NS: Final = 5 * NS_PER_SECOND
RETRY_SOME_LOST_NS: Final = 60 * NS_PER_SECOND  # starting anew disturbs the readings of the healthy ones for a tick


class Nvml:
    """A session with the driver that survives the driver."""

    def __init__(
        self,
        api: Any = None,
        monotonic_ns: Callable[[], int] = clock.monotonic_ns,
        wall_ns: Callable[[], int] = clock.wall_ns,
    ) -> None:
        self._calls = Calls(library.binding() if api is None else api)
        self._monotonic_ns, self._wall_ns = monotonic_ns, wall_ns
        self._gpus: dict[DeviceUuid, Gpu] = {}
        self._splits: dict[DeviceUuid, Split] = {}
        self._xids = XidEvents(self._calls)
        self._throughput = PcieThroughput(self._calls)
        self._up = False
        self._count: int | None = None  # devices at the last complete scan; None asks for another one
        self._missing = False  # NVML counts a device that it gives no handle for
        self._started_ns = 0
        self.problem: str | None = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def errors(self) -> Counter[str]:
        """How often each "call:error" happened since the start."""
        return self._calls.errors

    def open(self) -> None:
        """Start NVML. SetupError with the cure when that fails."""
        if not self._up and not self._start():
            raise SetupError(self.problem)

    def close(self) -> None:
        """Give everything back to the driver."""
        self._release()
        if self._up:
            self._quietly(lambda: self._calls.try_call("", "nvmlShutdown"))
        self._up = False

    def devices(self) -> tuple[Device, ...]:
        """Every GPU seen so far, lost ones too, in NVML's order, the MIG instances of each behind it.

        Starts NVML again where that is needed.
        """
        self._revive()
        if self._up:
            self._attempt(self._scan)
        now_ns = self._monotonic_ns()
        for gpu in self._gpus.values():
            if not gpu.lost:
                self._ask(gpu, lambda it: self._splits[it.device.uuid].walk(now_ns))
        return tuple(gpu.device for gpu in self._known())

    def read(self, device: Device) -> DeviceReading:
        """One tick of one device; `lost` when it is gone."""
        gpu = self._get(device)
        reading = self._ask(gpu, lambda it: it.read(self._throughput, self._monotonic_ns(), self._wall_ns() // 1000))
        if self._up:
            self._attempt(lambda: self._xids.poll(self._wall_ns()))
        return replace(
            reading or DeviceReading(device, lost=True),
            xid_counts=dict(self._xids.counts.get(device.uuid, {})),
            xid_last_seen_wall_ns=dict(self._xids.last_seen_wall_ns.get(device.uuid, {})),
        )

    def processes(self, device: Device) -> list[tuple[int, int | None]]:
        """(tgid, used bytes) of each process on the device; empty for a lost one. Host pids."""
        return self._ask(self._get(device), lambda it: it.processes()) or []

    def mps_clients(self, device: Device) -> frozenset[int]:
        """tgids of those of the last `processes` that share the device's SMs as MPS clients."""
        gpu = self._get(device)
        return gpu.mps_clients if gpu else frozenset()

    def process_utilization(self, device: Device, listed: Collection[int] | None = None) -> dict[int, float]:
        """tgid → share of time with its kernels running, since the previous call. `listed`: tgids of `processes`."""
        tgids = {tgid for tgid, _ in self.processes(device)} if listed is None else listed
        wall_us = self._wall_ns() // 1000
        return self._ask(self._get(device), lambda it: it.process_utilization(tgids, wall_us)) or {}

    def _known(self) -> list[Gpu]:
        found: list[Gpu] = []
        for gpu in sorted(self._gpus.values(), key=lambda gpu: (gpu.device.index, gpu.device.uuid)):
            found += [gpu, *self._splits[gpu.device.uuid].instances()]
        return found

    def _get(self, device: Device) -> Gpu | None:
        if device.parent is None:
            return self._gpus.get(device.uuid)
        split = self._splits.get(device.parent)
        return None if split is None else split.instance(device.uuid)

    def _ask(self, gpu: Gpu | None, question: Callable[[Gpu], T]) -> T | None:
        if gpu is None or not self._up:
            return None
        try:
            if gpu.lost and not self._find(gpu):
                return None
            return question(gpu)
        except DeviceLostError:
            self._quietly(gpu.lose)
        except NvmlDownError:
            self._go_down()
        return None

    def _find(self, gpu: Gpu) -> bool:
        if gpu.find() and gpu.reports_xids:
            self._xids.register(gpu.device.uuid, gpu.handle)
        return not gpu.lost

    def _scan(self) -> None:
        count = self._calls.try_call("", "nvmlDeviceGetCount")
        if count is None or count == self._count:
            return
        found = [self._meet(index) for index in range(count)]
        self._missing = not all(found)
        self._count = None if self._missing else count

    def _meet(self, index: int) -> bool:
        try:
            handle = self._calls.try_call("", "nvmlDeviceGetHandleByIndex", index)
            uuid = None if handle is None else self._calls.try_call("", "nvmlDeviceGetUUID", handle)
            if uuid is None:
                return False
            device = describe(self._calls, index, uuid, handle)
            gpu = self._gpus.get(device.uuid)
            if gpu is None:
                gpu = self._gpus[device.uuid] = Gpu(self._calls, device, handle)
                self._splits[device.uuid] = Split(self._calls, gpu)
            gpu.device, gpu.handle = device, handle
            self._xids.register(uuid, handle)
        except DeviceLostError:
            return False
        return True

    def _revive(self) -> None:
        lost = [gpu.lost for gpu in self._gpus.values()]
        if self._up and not any(lost) and not self._missing:
            return
        wait = RETRY_SOME_LOST_NS if self._up and not all(lost) else RETRY_ALL_LOST_NS
        if self._started_ns == 0 or self._monotonic_ns() - self._started_ns >= wait:
            self.close()
            self._start()

    def _start(self) -> bool:
        self._started_ns = self._monotonic_ns()
        api = self._calls.api
        try:
            library.start(api)
        except api.NVMLError as error:
            self.problem = library.explain(api, error)
            self._calls.count("nvmlInit", error)
            return False
        self._up, self._count, self._missing, self.problem = True, None, False, None
        return True

    def _go_down(self) -> None:
        """The driver is gone below us. Shutting down is what makes a later start take effect."""
        self._release()
        self._quietly(lambda: self._calls.try_call("", "nvmlShutdown"))
        self._up, self.problem = False, "the NVIDIA driver went away: waiting for it to be loaded again"

    def _release(self) -> None:
        self._throughput.close()
        self._quietly(self._xids.close)
        for gpu in self._known():
            self._quietly(gpu.lose)
        self._calls.forget("")

    def _attempt(self, action: Callable[[], object]) -> None:
        """Ask what concerns no single device; what goes wrong is already counted."""
        try:
            action()
        except DeviceLostError:
            return
        except NvmlDownError:
            self._go_down()

    @staticmethod
    def _quietly(action: Callable[[], object]) -> None:
        """Give something back to a driver that may be gone; a refusal is already counted and changes nothing."""
        with contextlib.suppress(DeviceLostError, NvmlDownError):
            action()

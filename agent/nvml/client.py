# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""NVML at the edge: devices, readings, processes. The only package that imports the binding (pynvml).

Invariants: an unreadable figure is None; a lost GPU hides only itself and is found again by its UUID; a driver that is
unloaded and loaded again is used again. Nothing here raises after `open` has succeeded: failures are counted in
`errors`, and `problem` is one line about why NVML as a whole is unavailable. Used from one thread.

Also owns the choice of the library file. The binding only asks the dynamic linker for "libnvidia-ml.so.1"; drivers that
are installed elsewhere (GPU operator, GKE, WSL) are found by loading the file by path first: then its soname resolves.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from agent.core import clock
from agent.core.clock import NS_PER_SECOND
from agent.core.errors import SetupError
from agent.core.model import Device, DeviceReading, DeviceUuid
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
        self._calls = Calls(binding() if api is None else api)
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

    def free_bytes(self, device: Device) -> int | None:
        """What can still be allocated on the device; None where NVML does not say."""
        return self._ask(self._get(device), lambda it: it.free_bytes())

    def lists_processes(self, device: Device) -> bool:
        """Whether the last `processes` is all of them: False where NVML could not say."""
        gpu = self._get(device)
        return gpu is not None and gpu.lists_processes

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
            start(api)
        except api.NVMLError as error:
            self.problem = explain(api, error)
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


SONAME: Final = "libnvidia-ml.so.1"

ELSEWHERE: Final = (
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/nvidia/driver/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/home/kubernetes/bin/nvidia/lib64",
    "/usr/lib/wsl/lib",
)


def binding() -> Any:
    """The module that binds NVML. SetupError when it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise SetupError("the Python package nvidia-ml-py is missing: pip install nvidia-ml-py") from error


def start(api: Any) -> None:
    """Initialise NVML, looking beside the linker's path too. Raises the binding's NVMLError."""
    try:
        api.nvmlInit()
    except api.NVMLError as error:
        if error.value != api.NVML_ERROR_LIBRARY_NOT_FOUND or not _load_from_elsewhere():
            raise
        api.nvmlInit()


def explain(api: Any, error: Any) -> str:
    """One line for an error of `start`: what is wrong and what to do."""
    value = error.value
    if value == api.NVML_ERROR_LIBRARY_NOT_FOUND:
        path = os.environ.get("LD_LIBRARY_PATH") or "unset"
        return (
            f"{SONAME} not found (looked in the linker cache, LD_LIBRARY_PATH={path}, {', '.join(ELSEWHERE)}): "
            "install the NVIDIA driver, or in a container ask for it (NVIDIA_DRIVER_CAPABILITIES=utility)"
        )
    cures = {
        api.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel driver is not loaded: run 'modprobe nvidia', see dmesg",
        api.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA library and kernel driver differ in version, as after an "
        "upgrade: reload the kernel driver or reboot, then restart this program",
        api.NVML_ERROR_NO_PERMISSION: "no permission to open the NVIDIA devices: run as root",
        api.NVML_ERROR_GPU_IS_LOST: "every GPU has fallen off the bus: see dmesg for the XID, reset or reboot",
    }
    return cures.get(value, f"NVML does not start ({error}): check 'nvidia-smi' and dmesg")


def _load_from_elsewhere() -> bool:
    for folder in ELSEWHERE:
        try:
            ctypes.CDLL(f"{folder}/{SONAME}", mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False

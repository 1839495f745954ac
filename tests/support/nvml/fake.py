# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The binding's module, as an object: the real constants, structures and errors, and functions that a test decides."""
# ruff: noqa: N802, N815  the functions are named as NVML names them

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

from agent.core.model import DeviceReading
from agent.nvml.client import Nvml
from tests.support.clocks import SetClock

MIB = 1 << 20
SECOND = 1_000_000_000
INSTANCES = 10  # handles: generation, position + 1 of an instance (0: the GPU), GPU


@dataclass
class FakeGpu:
    uuid: str
    lost: bool = False
    gpm: bool = True
    sm_percent: float = 50.0
    link: tuple[int, int] | None = (5, 16)  # generation, lanes
    utilization: int = 40
    samples: list[tuple[int, int]] = field(default_factory=list)
    used: int = 10 * MIB
    fields: tuple[int, int] | None = (0, 0)
    field_type: int = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
    throughput: tuple[int, int] = (100, 200)
    compute: list[tuple[int, int | None]] = field(default_factory=list)
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    mps: list[tuple[int, int | None]] = field(default_factory=list)
    process_samples: list[tuple[int, int, int]] = field(default_factory=list)  # pid, µs, smUtil
    mig: bool | None = None  # None: this GPU knows no MIG
    instances: list[FakeInstance | None] = field(default_factory=list)  # by position, with gaps


@dataclass
class FakeInstance(FakeGpu):
    slices: tuple[int, int] = (3, 3)  # of the GPU instance, of the compute instance
    number: int = 1  # of the GPU instance
    name: str = "Fake H200 MIG 3g.71gb"


class FakeNvml:
    """`refuse[name] = code` makes a call fail; `calls` counts them."""

    def __init__(self, *gpus: FakeGpu) -> None:
        for name, value in vars(pynvml).items():
            if not inspect.isfunction(value) and not name.startswith("__"):
                setattr(self, name, value)
        self.gpus = list(gpus)
        self.loaded = True
        self.initialised = False
        self.generation = 0
        self.refuse: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self.xids: list[tuple[FakeGpu, int]] = []
        self.samples: list[Any] = []  # allocated and not given back; they go with the driver
        self.asked_since: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        try:
            function = object.__getattribute__(self, "_" + name)
        except AttributeError:
            return lambda *arguments: self._fail(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            if name != "nvmlInit" and not self.initialised:
                self._fail(pynvml.NVML_ERROR_UNINITIALIZED)
            if not self.loaded:
                self._fail(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
            if name in self.refuse:
                self._fail(self.refuse[name])
            return function(*arguments)

        return call

    @staticmethod
    def _fail(code: int) -> Any:
        raise pynvml.NVMLError(code)

    def _gpu(self, handle: int) -> FakeGpu:
        generation, index = divmod(handle, 100)
        if generation != self.generation:
            self._fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        gpu = self.gpus[index % INSTANCES]
        if gpu.lost:
            self._fail(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu if index < INSTANCES else self._instance(gpu, index // INSTANCES - 1)

    def _instance(self, gpu: FakeGpu, position: int) -> FakeInstance:
        found = gpu.instances[position] if gpu.mig and position < len(gpu.instances) else None
        if found is None:
            self._fail(pynvml.NVML_ERROR_NOT_FOUND)
        assert found
        return found

    def _known_instance(self, handle: int) -> FakeInstance:
        gpu = self._gpu(handle)
        if not isinstance(gpu, FakeInstance):
            self._fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        assert isinstance(gpu, FakeInstance)
        return gpu

    def _handle(self, gpu: FakeGpu) -> int:
        return self.generation * 100 + self.gpus.index(gpu)

    def _nvmlInit(self) -> None:
        self.initialised = True
        self.generation += 1

    def _nvmlShutdown(self) -> None:
        self.initialised = False

    def _nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.gpus[index].lost:
            self._fail(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.generation * 100 + index

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return self._handle(gpu)
            for position, instance in enumerate(gpu.instances if gpu.mig else ()):
                if instance is not None and instance.uuid == uuid:
                    return self._handle(gpu) + (position + 1) * INSTANCES
        return int(self._fail(pynvml.NVML_ERROR_NOT_FOUND))

    def _nvmlDeviceGetUUID(self, handle: int) -> str:
        return self._gpu(handle).uuid

    def _nvmlDeviceGetName(self, handle: int) -> str:
        gpu = self._gpu(handle)
        return gpu.name if isinstance(gpu, FakeInstance) else "Fake H200"

    def _nvmlDeviceGetMinorNumber(self, handle: int) -> int:
        return self.gpus.index(self._gpu(handle))

    def _nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return (self._gpu(handle).link or self._fail(pynvml.NVML_ERROR_NOT_SUPPORTED))[0]

    def _nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return (self._gpu(handle).link or self._fail(pynvml.NVML_ERROR_NOT_SUPPORTED))[1]

    def _nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        mode = self._gpu(handle).mig
        if mode is None:
            self._fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(bool(mode))] * 2

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7 if self._gpu(handle).mig else 0

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, position: int) -> int:
        gpu = self._gpu(handle)
        if not gpu.mig:
            self._fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._instance(gpu, position)
        return handle + (position + 1) * INSTANCES

    def _nvmlDeviceGetAttributes(self, handle: int) -> Any:
        instance = self._known_instance(handle)
        whole, part = instance.slices
        return SimpleNamespace(
            multiprocessorCount=16 * part,
            gpuInstanceSliceCount=whole,
            computeInstanceSliceCount=part,
            memorySizeMB=whole * 18 * 1024,
        )

    def _nvmlDeviceGetGpuInstanceId(self, handle: int) -> int:
        return self._known_instance(handle).number

    def _nvmlGpmMigSampleGet(self, handle: int, number: int, sample: Any) -> Any:
        for instance in self._gpu(handle).instances:
            if instance is not None and instance.number == number:
                self._gpm_percent = instance.sm_percent
                return sample
        return self._fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{self.gpus.index(self._gpu(handle)):02X}:00.0".encode())

    def _nvmlDeviceGetNumGpuCores(self, handle: int) -> int:
        self._gpu(handle)
        return 16896

    def _nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        self._gpu(handle)
        return 9, 0

    def _nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        used = self._gpu(handle).used
        return SimpleNamespace(total=1000 * MIB, used=used, reserved=MIB)

    def _nvmlGpmQueryDeviceSupport(self, handle: int) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self._gpu(handle).gpm))

    def _nvmlGpmSampleAlloc(self) -> Any:
        sample = pynvml.c_nvmlGpmSample_t()
        self.samples.append(sample)
        return sample

    def _nvmlGpmSampleFree(self, sample: Any) -> None:
        self.samples = [one for one in self.samples if one is not sample]

    def _nvmlGpmSampleGet(self, handle: int, sample: Any) -> Any:
        self._gpm_percent = self._gpu(handle).sm_percent
        return sample

    def _nvmlGpmMetricsGet(self, request: Any) -> Any:
        for index, value in enumerate((self._gpm_percent, 3.0, 5.0, 25.0)):
            request.metrics[index].value = value
            request.metrics[index].nvmlReturn = 0
        return request

    def _nvmlDeviceGetSamples(self, handle: int, kind: int, since: int) -> Any:
        new = [(stamp, value) for stamp, value in self._gpu(handle).samples if stamp > since]
        if not new:
            self._fail(pynvml.NVML_ERROR_NOT_FOUND)
        return 1, [SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=value)) for at, value in new]

    def _nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        gpu = self._gpu(handle)
        if gpu.mig:
            self._fail(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=gpu.utilization)

    def _nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> Any:
        gpu = self._gpu(handle)
        if gpu.fields is None:
            unsupported = SimpleNamespace(nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED)
            return [unsupported for _ in fields]
        member = "uiVal" if gpu.field_type == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT else "ullVal"
        return [
            SimpleNamespace(nvmlReturn=0, valueType=gpu.field_type, value=SimpleNamespace(**{member: value}))
            for value in gpu.fields
        ]

    def _nvmlDeviceGetPcieThroughput(self, handle: int, direction: int) -> int:
        return self._gpu(handle).throughput[direction]

    def _nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        self._gpu(handle)
        return 1980

    def _nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._gpu(handle)
        return 512_300

    def _nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        self._gpu(handle)
        return 700_000

    def _nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._gpu(handle)
        return 61

    def _processes(self, listed: list[tuple[int, int | None]]) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in listed]

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, handle: int) -> list[Any]:
        return self._processes(self._gpu(handle).compute)

    def _nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: int) -> list[Any]:
        return self._processes(self._gpu(handle).graphics)

    def _nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: int) -> list[Any]:
        return self._processes(self._gpu(handle).mps)

    def _nvmlDeviceGetProcessesUtilizationInfo(self, handle: int, since: int) -> list[Any]:
        self.asked_since.append(since)
        samples = self._gpu(handle).process_samples
        if not samples:
            self._fail(pynvml.NVML_ERROR_NOT_FOUND)
        return [SimpleNamespace(pid=pid, timeStamp=stamp, smUtil=percent) for pid, stamp, percent in samples]

    _nvmlDeviceGetProcessUtilization = _nvmlDeviceGetProcessesUtilizationInfo

    def _nvmlEventSetCreate(self) -> int:
        return 7

    def _nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: int) -> None:
        self._gpu(handle)

    def _nvmlEventSetWait(self, events: int, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "a tick never waits"
        if not self.xids:
            self._fail(pynvml.NVML_ERROR_TIMEOUT)
        gpu, xid = self.xids.pop(0)
        kind = pynvml.nvmlEventTypeXidCriticalError
        return SimpleNamespace(device=self._handle(gpu), eventType=kind, eventData=xid)

    def _nvmlEventSetFree(self, events: int) -> None:
        pass


def session(*gpus: FakeGpu) -> tuple[Nvml, FakeNvml, SetClock]:
    """An open session with these GPUs."""
    api, clock = FakeNvml(*gpus), SetClock(1_000 * SECOND)
    nvml = Nvml(api, monotonic_ns=clock, wall_ns=clock)
    nvml.open()
    return nvml, api, clock


def tick(nvml: Nvml, clock: SetClock, seconds: float = 1.0) -> list[DeviceReading]:
    """One reading of each device, so many seconds later."""
    clock.now_ns += int(seconds * SECOND)
    return [nvml.read(device) for device in nvml.devices()]

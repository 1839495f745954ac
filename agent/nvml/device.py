# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One GPU: its constant properties, and one reading of the variable ones.

Invariant: a figure that cannot be read is None, and none of them keeps the others from being read. A lost GPU is found
again by its UUID, since handles and indices do not survive.

Also the processes on a device, and each one's utilisation as NVML reports it. Process lists are merged: each process
is listed once. Utilisation samples pass three checks (at most 100 %, newer than the last one seen of this device,
process still listed), because NVML sometimes returns stale and impossible ones. A process without a sample is unknown,
not idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from agent.core.model import Device, DeviceReading, DeviceUuid
from agent.nvml.calls import Calls, DeviceLostError
from agent.nvml.gpm import Gpm, GpmReading
from agent.nvml.pcie import PcieCounters, PcieRates, PcieThroughput, link_bytes_per_second

LISTS: Final = tuple(
    tuple(f"nvmlDeviceGet{kind}RunningProcesses_{version}" for version in ("v3", "v2"))
    for kind in ("Compute", "Graphics", "MPSCompute")
)

UTILIZATION: Final = ("nvmlDeviceGetProcessesUtilizationInfo", "nvmlDeviceGetProcessUtilization")
FIRST_LOOK_US: Final = 1_000_000  # 0 would return the driver's whole buffer: several minutes
AHEAD_US: Final = 5_000_000  # a timestamp further ahead of the clock than this would silence a device for good


@dataclass(frozen=True, slots=True)
class Running:
    """(tgid, used bytes) of each process on a device. `complete`: NVML answered for every list that it has."""

    processes: list[tuple[int, int | None]] = field(default_factory=list)
    mps_clients: frozenset[int] = frozenset()
    complete: bool = False


def running(calls: Calls, owner: str, handle: Any) -> Running:
    """The processes in any of the three lists. One in two lists has the same bytes in both."""
    failures = calls.errors.total()
    merged: dict[int, int | None] = {}
    tgids: set[int] = set()
    for names in LISTS:
        tgids = set()
        for process in calls.first(owner, names, handle) or ():
            tgid, used = int(process.pid), process.usedGpuMemory
            known = merged.get(tgid)
            merged[tgid] = known if used is None else max(int(used), known or 0)
            tgids.add(tgid)
    answered = calls.errors.total() == failures and any(calls.supports(owner, name) for name in LISTS[0])
    return Running(list(merged.items()), frozenset(tgids), answered)  # the last list is that of MPS


class UtilizationSamples:
    """The utilisation samples of one device."""

    def __init__(self, calls: Calls, owner: str) -> None:
        self._calls, self._owner = calls, owner
        self._last_seen_us: int | None = None

    def read(self, handle: Any, listed: Collection[int], wall_us: int) -> dict[int, float]:
        """tgid → share of time with a kernel of it running (0–1, mean of the new samples). Sums can pass 1."""
        since = wall_us - FIRST_LOOK_US if self._last_seen_us is None else self._last_seen_us
        samples = self._calls.first(self._owner, UTILIZATION, handle, since) or ()
        found: defaultdict[int, list[int]] = defaultdict(list)
        newest = since
        for sample in samples:
            stamp, percent = int(sample.timeStamp), int(sample.smUtil)
            if not since < stamp <= wall_us + AHEAD_US or percent > 100:
                self._calls.errors[f"{UTILIZATION[0]}:implausible_sample"] += 1
                continue
            newest = max(newest, stamp)
            if sample.pid in listed:
                found[int(sample.pid)].append(percent)
        self._last_seen_us = newest
        return {tgid: sum(values) / len(values) / 100 for tgid, values in found.items()}


MHZ: Final = 1_000_000
# Cores per SM by compute capability (CUDA programming guide, "arithmetic instructions"); newer ones have 128 so far.
CORES_PER_SM: Final = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}


class Gpu:
    """State that readings of one device need between ticks."""

    reports_xids: ClassVar[bool] = True

    def __init__(self, calls: Calls, device: Device, handle: Any) -> None:
        self._calls, self.device, self.handle = calls, device, handle
        self._utilization = UtilizationSamples(calls, device.uuid)
        self._running = Running()
        self._split = False  # in MIG mode: SM activity, memory and processes are those of its instances
        self._gpm = Gpm(calls, device.uuid)
        self._pcie = PcieCounters(calls, device.uuid)
        self._samples_since_us: int | None = None

    @property
    def lost(self) -> bool:
        """True while the device has no valid handle."""
        return self.handle is None

    def lose(self) -> None:
        """Forget what was only true of the handle. The device stays known."""
        self.handle = None
        self._gpm.close()
        self._pcie = PcieCounters(self._calls, self.device.uuid)
        self._calls.forget(self.device.uuid)

    def become_split(self, split: bool) -> bool:
        """Sets whether MIG mode is on. True when that is a change: other calls are supported then."""
        if split == self._split:
            return False
        self._split = split
        self._gpm.close()
        self._calls.forget(self.device.uuid)
        return True

    def find(self) -> bool:
        """Look for a lost device by its UUID."""
        try:
            self.handle = self._calls.try_call("", "nvmlDeviceGetHandleByUUID", str(self.device.uuid))
            if self.handle is not None:  # a handle is also given for a GPU that is still gone: ask it something
                self._calls.try_call(self.device.uuid, "nvmlDeviceGetMemoryInfo", self.handle)
        except DeviceLostError:
            self.handle = None
        return self.handle is not None

    def read(self, throughput: PcieThroughput, now_ns: int, wall_us: int) -> DeviceReading:
        """One tick of this device. Raises DeviceLostError or NvmlDownError."""
        gpm = None if self._split else self._gpm.read(self.handle, now_ns)
        activity, source = (None, None) if self._split else self._activity(gpm, wall_us)
        used, reserved = (None, None) if self._split else self._memory()
        rates = self._rates(gpm, throughput, now_ns)
        api = self._calls.api
        limit = self._first(("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit"))
        temperature = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
        return DeviceReading(
            device=self.device,
            sm_activity_ratio=activity,
            sm_activity_source=source,
            memory_used_bytes=used,
            memory_reserved_bytes=reserved,
            pcie_tx_bytes_per_second=rates.tx,
            pcie_rx_bytes_per_second=rates.rx,
            dram_activity_ratio=None if gpm is None else gpm.dram_activity_ratio,
            sm_clock_hertz=_scaled(self._first(("nvmlDeviceGetClockInfo",), api.NVML_CLOCK_SM), MHZ),
            power_watts=_scaled(self._first(("nvmlDeviceGetPowerUsage",)), 1e-3),
            power_limit_watts=_scaled(limit, 1e-3),
            temperature_celsius=_scaled(self._first(temperature, api.NVML_TEMPERATURE_GPU), 1),
        )

    def processes(self) -> list[tuple[int, int | None]]:
        """(tgid, used bytes) of each process. Raises DeviceLostError or NvmlDownError."""
        self._running = Running()
        if not self._split:
            self._running = running(self._calls, self.device.uuid, self.handle)
        return self._running.processes

    @property
    def mps_clients(self) -> frozenset[int]:
        """tgids of the MPS clients among the last `processes`."""
        return self._running.mps_clients

    @property
    def lists_processes(self) -> bool:
        """Whether the last `processes` is complete."""
        return self._running.complete

    def process_utilization(self, listed: Collection[int], wall_us: int) -> dict[int, float]:
        """tgid → share of time since the previous call. Raises DeviceLostError or NvmlDownError."""
        return {} if self._split else self._utilization.read(self.handle, listed, wall_us)

    def _first(self, names: tuple[str, ...], *arguments: Any) -> Any | None:
        return self._calls.first(self.device.uuid, names, self.handle, *arguments)

    def _activity(self, gpm: GpmReading | None, wall_us: int) -> tuple[float | None, str | None]:
        if self._gpm.supported(self.handle):  # never mixed with utilisation, which means something else
            ratio = None if gpm is None else gpm.sm_activity_ratio
            return ratio, None if ratio is None else "gpm"
        ratio = self._utilization_samples(wall_us)
        if ratio is None:
            rates = self._first(("nvmlDeviceGetUtilizationRates",))
            ratio = None if rates is None or rates.gpu > 100 else rates.gpu / 100
        return ratio, None if ratio is None else "utilization"

    def _utilization_samples(self, wall_us: int) -> float | None:
        since, self._samples_since_us = self._samples_since_us, wall_us
        if since is None:
            return None
        kind = self._calls.api.NVML_GPU_UTILIZATION_SAMPLES
        answer = self._first(("nvmlDeviceGetSamples",), kind, since)
        samples = () if answer is None else answer[1]
        values = [s.sampleValue.uiVal for s in samples if s.timeStamp > since and s.sampleValue.uiVal <= 100]
        return sum(values) / len(values) / 100 if values else None

    def free_bytes(self) -> int | None:
        """What can still be allocated. Raises DeviceLostError or NvmlDownError."""
        info = None if self._split else self._memory_info_v2() or self._memory_info_v1()
        return None if info is None else int(info.free)

    def _memory(self) -> tuple[int | None, int | None]:
        info = self._memory_info_v2()
        if info is not None:
            return int(info.used), int(info.reserved)
        info = self._memory_info_v1()
        return (None, None) if info is None else (int(info.used), None)  # v1 counts the reserved bytes as used

    def _memory_info_v2(self) -> Any | None:
        return self._first(("nvmlDeviceGetMemoryInfo",), self._calls.api.nvmlMemory_v2)

    def _memory_info_v1(self) -> Any | None:
        return self._calls.try_call(f"{self.device.uuid}/v1", "nvmlDeviceGetMemoryInfo", self.handle)

    def _rates(self, gpm: GpmReading | None, throughput: PcieThroughput, now_ns: int) -> PcieRates:
        counted = self._pcie.read(self.handle, now_ns)
        if counted is not None and not (self._pcie.narrow and gpm is not None):
            return counted
        if gpm is not None and gpm.pcie_tx_bytes_per_second is not None:
            return PcieRates(gpm.pcie_tx_bytes_per_second, gpm.pcie_rx_bytes_per_second)
        if counted is not None or (not self._split and self._gpm.supported(self.handle)):
            return counted or PcieRates()
        return throughput.read(self.device.uuid, self.handle) or PcieRates()


def describe(calls: Calls, index: int, uuid: str, handle: Any) -> Device:
    """The constant properties of a device. Raises DeviceLostError or NvmlDownError."""
    pci = calls.try_call(uuid, "nvmlDeviceGetPciInfo", handle)
    memory = calls.try_call(uuid, "nvmlDeviceGetMemoryInfo", handle)
    return Device(
        index=index,
        uuid=DeviceUuid(uuid),
        name=as_text(calls.try_call(uuid, "nvmlDeviceGetName", handle)) or "unknown GPU",
        pci_bus_id=as_text(None if pci is None else pci.busId) or "",
        sm_count=_sm_count(calls, uuid, handle),
        memory_total_bytes=None if memory is None else int(memory.total),
        minor=calls.try_call(uuid, "nvmlDeviceGetMinorNumber", handle),
        pcie_bytes_per_second=link_bytes_per_second(calls, uuid, handle),
    )


def _sm_count(calls: Calls, uuid: str, handle: Any) -> int | None:
    cores = calls.try_call(uuid, "nvmlDeviceGetNumGpuCores", handle)
    capability = calls.try_call(uuid, "nvmlDeviceGetCudaComputeCapability", handle)
    return None if cores is None or capability is None else int(cores) // CORES_PER_SM.get(tuple(capability), 128)


def as_text(value: Any) -> str | None:
    """Older bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _scaled(value: Any | None, factor: float) -> float | None:
    return None if value is None else float(value) * factor

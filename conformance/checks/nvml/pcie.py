# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every source of PCIe traffic, read while one of our workloads copies a known number of bytes in a second.

The cumulative counters may be of 32 bits, which a fast link fills in less than 100 ms. So they are looked at far more
often than that, and what they grew by is reckoned from look to look, as the agent does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from agent.nvml.pcie import FIELDS, counter_delta
from conformance.checks.nvml import gpm
from conformance.checks.nvml.binding import Gpu, Refused, asked
from conformance.checks.nvml.cost import milliseconds
from conformance.clients import workload as spin_workload
from conformance.clients.workload import Pace
from conformance.host import Host

COPY_BYTES: Final = 32 << 20
REQUESTS_PER_SECOND: Final = 100.0
MIB: Final = 1 << 20
_MOST_REQUESTS: Final = 6000
LOOK_SECONDS: Final = 0.02
_THROUGHPUT_LOOKS: Final = 5
_COST_LOOKS: Final = 10

SOURCES: Final = (
    "nvmlDeviceGetPcieThroughput, TX",
    "nvmlDeviceGetPcieThroughput, RX",
    "field values 197 and 198",
    "GPM, sample and metrics",
)
TO_DEVICE, FROM_DEVICE = "to the device", "from the device"


@dataclass(frozen=True, slots=True)
class FieldReadings:
    """The readings of a field. `bits`: of the type that NVML gives it; `seconds`: since the first reading."""

    values: tuple[int, ...]
    bits: int
    seconds: float

    def grown(self) -> int | None:
        """By how many bytes, however often it wrapped; None where it went back in another way."""
        deltas = [counter_delta(before, after, self.bits) for before, after in pairwise(self.values)]
        known = [delta for delta in deltas if delta is not None]
        return sum(known) if len(known) == len(deltas) else None

    def wraps(self) -> int:
        """How often it began anew."""
        return sum(after < before for before, after in pairwise(self.values))


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Bytes per second by each source, in the direction in which was copied; Refused where it has none.

    `field`, `other_way`: the cumulative fields of this direction and of the other one.
    """

    direction: str
    true: float
    field: FieldReadings | Refused
    other_way: FieldReadings | Refused
    gpm: float | Refused
    throughput: float | Refused


def copied(host: Host, gpu: Gpu, pace: Pace, direction: str, settle: float, seconds: float) -> CopyRates:
    """Copies from pinned host memory or to it, and watches. WorkloadError when the workload fails."""
    words = _to_device(pace) if direction == TO_DEVICE else _from_device(pace, host.folder)
    index = 1 if direction == TO_DEVICE else 0  # TX, RX: of the device
    with spin_workload.running(host, f"copies-{index}", words) as workload:
        time.sleep(settle)
        try:
            with gpm.window(gpu) as window:
                refused = window.begin()
                counters = _watched(gpu, seconds)
                averages = refused or window.metrics()
        except gpu.api.NVMLError as error:
            counters, averages = _watched(gpu, seconds), Refused(str(error))
        throughput = _throughput(gpu, index)
        workload.require_alive()
        summary = workload.finish()
    return CopyRates(
        direction,
        _true_rate(summary),
        counters[index],
        counters[1 - index],
        _of_gpm(averages, (gpm.PCIE_TX, gpm.PCIE_RX)[index]),
        throughput,
    )


def costs(gpu: Gpu) -> Mapping[str, float | Refused]:
    """ms of one reading by each source."""
    api, handle = gpu.api, gpu.handle
    asks: tuple[Callable[[], object], ...] = (
        lambda: api.nvmlDeviceGetPcieThroughput(handle, api.NVML_PCIE_UTIL_TX_BYTES),
        lambda: api.nvmlDeviceGetPcieThroughput(handle, api.NVML_PCIE_UTIL_RX_BYTES),
        lambda: api.nvmlDeviceGetFieldValues(handle, list(FIELDS)),
    )
    found = [asked(api, partial(milliseconds, ask, _COST_LOOKS)) for ask in asks]
    return dict(zip(SOURCES, [*found, asked(api, partial(_gpm_cost, gpu))], strict=True))


def _to_device(pace: Pace) -> list[str]:
    return [*spin_workload.steps(pace, kernels=1, kernel_us=20, blocks=1), "--copy-bytes", str(COPY_BYTES)]


def _from_device(pace: Pace, folder: Path) -> list[str]:
    """At even intervals: random ones would make more bytes in one second than in the next."""
    trace = folder / "arrivals"
    trace.write_text("".join(f"{count / REQUESTS_PER_SECOND:.3f}\n" for count in range(_MOST_REQUESTS)))
    shape = ["--kernels", "1", "--kernel-us", "20", "--blocks", "1", "--copy-bytes", str(COPY_BYTES), *pace.options]
    return ["online", "--trace", str(trace), *shape, "--seconds", "600", "--start-now"]


def _true_rate(summary: Mapping[str, Any]) -> float:
    copied_bytes = summary["copied_bytes"] if "copied_bytes" in summary else summary["requests"] * COPY_BYTES
    return float(copied_bytes) / float(summary["elapsed_seconds"])


def _watched(gpu: Gpu, seconds: float) -> tuple[FieldReadings, FieldReadings] | tuple[Refused, Refused]:
    """TX and RX, looked at again and again."""
    values: list[tuple[int, int]] = []
    begun = time.monotonic()
    while True:
        answer = _fields(gpu)
        elapsed = time.monotonic() - begun
        if isinstance(answer, Refused):
            time.sleep(max(0.0, seconds - elapsed))  # GPM measures meanwhile
            return answer, answer
        if not values:
            begun, elapsed = begun + elapsed, 0.0
        values.append((_scalar(gpu.api, answer[0]), _scalar(gpu.api, answer[1])))
        if elapsed >= seconds:
            tx, rx = zip(*values, strict=True)
            return FieldReadings(tx, _bits(gpu.api, answer[0]), elapsed), FieldReadings(
                rx, _bits(gpu.api, answer[1]), elapsed
            )
        time.sleep(LOOK_SECONDS)


def _fields(gpu: Gpu) -> Sequence[Any] | Refused:
    """The counters' fields as NVML gives them, unless it refuses one."""
    answer = asked(gpu.api, lambda: gpu.api.nvmlDeviceGetFieldValues(gpu.handle, list(FIELDS)))
    if isinstance(answer, Refused):
        return answer
    refused = next((one.nvmlReturn for one in answer if one.nvmlReturn), 0)
    return Refused(str(gpu.api.NVMLError(refused)), int(refused)) if refused else list(answer)


def _bits(api: Any, one: Any) -> int:
    return 32 if one.valueType == api.NVML_VALUE_TYPE_UNSIGNED_INT else 64


def _scalar(api: Any, one: Any) -> int:
    return int(one.value.uiVal if _bits(api, one) == 32 else one.value.ullVal)


def _of_gpm(averages: Mapping[int, float] | Refused, metric: int) -> float | Refused:
    if isinstance(averages, Refused):
        return averages
    return averages[metric] * MIB if metric in averages else Refused(f"GPM has no metric {metric}")


def _throughput(gpu: Gpu, index: int) -> float | Refused:
    """Bytes per second; NVML says KB/s."""
    kind = (gpu.api.NVML_PCIE_UTIL_TX_BYTES, gpu.api.NVML_PCIE_UTIL_RX_BYTES)[index]

    def mean() -> float:
        return fmean(gpu.api.nvmlDeviceGetPcieThroughput(gpu.handle, kind) * 1e3 for _ in range(_THROUGHPUT_LOOKS))

    return asked(gpu.api, mean)


def _gpm_cost(gpu: Gpu) -> float:
    with gpm.window(gpu) as window:
        window.begin()
        time.sleep(0.2)
        return milliseconds(window.metrics, _COST_LOOKS)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every source of PCIe traffic, read while one of our workloads copies a known number of bytes in a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from agent.nvml.pcie import FIELDS
from gpu import spin
from gpu.here import Here
from gpu.nvml import gpm
from gpu.nvml.binding import Gpu, Refused, asked
from gpu.nvml.cost import milliseconds
from gpu.spin import Pace

COPY_BYTES: Final = 32 << 20
REQUESTS_PER_SECOND: Final = 100.0
MIB: Final = 1 << 20
_MOST_REQUESTS: Final = 6000
_STEP_SECONDS: Final = 0.1
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
class Copied:
    """Bytes per second by each source, in the direction in which was copied; Refused where it has none.

    `counters`: what the cumulative field said each time; `other_way`: by the other direction's field.
    """

    direction: str
    true: float
    field: float | Refused
    other_way: float | Refused
    gpm: float | Refused
    throughput: float | Refused
    counters: tuple[int, ...]


def copied(here: Here, gpu: Gpu, pace: Pace, direction: str, settle: float, seconds: float) -> Copied:
    """Copies from pinned host memory or to it, and watches. WorkloadError when the workload fails."""
    words = _to_device(pace) if direction == TO_DEVICE else _from_device(pace, here.folder)
    index = 1 if direction == TO_DEVICE else 0  # TX, RX: of the device
    with spin.running(here, f"copies-{index}", words) as workload:
        time.sleep(settle)
        try:
            with gpm.window(gpu) as window:
                refused = window.begin()
                begun, values = time.monotonic(), _watched(gpu, seconds)
                elapsed = time.monotonic() - begun
                averages = refused or window.metrics()
        except gpu.api.NVMLError as error:
            begun, values = time.monotonic(), _watched(gpu, seconds)
            elapsed, averages = time.monotonic() - begun, Refused(str(error))
        throughput = _throughput(gpu, index)
        workload.require_alive()
        summary = workload.finish()
    return Copied(
        direction,
        _true_rate(summary),
        _rate(values, index, elapsed),
        _rate(values, 1 - index, elapsed),
        _of_gpm(averages, (gpm.PCIE_TX, gpm.PCIE_RX)[index]),
        throughput,
        () if isinstance(values, Refused) else tuple(value[index] for value in values),
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


def cumulative(counters: tuple[int, ...]) -> bool:
    """Whether they only grow, and do. A rate, or bytes since the last look, would go up and down."""
    pairs = list(pairwise(counters))
    return len(pairs) > 1 and all(after > before for before, after in pairs)


def _to_device(pace: Pace) -> list[str]:
    return [*spin.steps(pace, kernels=1, kernel_us=20, blocks=1), "--copy-bytes", str(COPY_BYTES)]


def _from_device(pace: Pace, folder: Path) -> list[str]:
    """At even intervals: random ones would make more bytes in one second than in the next."""
    trace = folder / "arrivals"
    trace.write_text("".join(f"{count / REQUESTS_PER_SECOND:.3f}\n" for count in range(_MOST_REQUESTS)))
    shape = ["--kernels", "1", "--kernel-us", "20", "--blocks", "1", "--copy-bytes", str(COPY_BYTES), *pace.options]
    return ["online", "--trace", str(trace), *shape, "--seconds", "600", "--start-now"]


def _true_rate(summary: Mapping[str, Any]) -> float:
    copied_bytes = summary["copied_bytes"] if "copied_bytes" in summary else summary["requests"] * COPY_BYTES
    return float(copied_bytes) / float(summary["elapsed_seconds"])


def _watched(gpu: Gpu, seconds: float) -> list[tuple[int, int]] | Refused:
    """(TX, RX) again and again."""
    values: list[tuple[int, int]] = []
    deadline = time.monotonic() + seconds
    while True:
        answer = asked(gpu.api, lambda: gpu.api.nvmlDeviceGetFieldValues(gpu.handle, list(FIELDS)))
        if isinstance(answer, Refused):
            time.sleep(max(0.0, deadline - time.monotonic()))  # GPM measures meanwhile
            return answer
        if refused := next((one.nvmlReturn for one in answer if one.nvmlReturn), 0):
            time.sleep(max(0.0, deadline - time.monotonic()))
            return Refused(str(gpu.api.NVMLError(refused)), int(refused))
        tx, rx = (_scalar(gpu.api, one) for one in answer)
        values.append((tx, rx))
        if time.monotonic() >= deadline:
            return values
        time.sleep(_STEP_SECONDS)


def _scalar(api: Any, one: Any) -> int:
    narrow = one.valueType == api.NVML_VALUE_TYPE_UNSIGNED_INT
    return int(one.value.uiVal if narrow else one.value.ullVal)


def _rate(values: list[tuple[int, int]] | Refused, index: int, elapsed: float) -> float | Refused:
    return values if isinstance(values, Refused) else (values[-1][index] - values[0][index]) / elapsed


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

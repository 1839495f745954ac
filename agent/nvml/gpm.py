# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""SM and memory activity and PCIe rates from GPM (Hopper and later): the difference of two samples.

Invariant: samples that are compared are at least 100 ms apart, as NVML asks; a call in between repeats the last figure.
The samples belong to the driver and are given back by `close`, before NVML is shut down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from agent.nvml.calls import Calls

SHORTEST_NS: Final = 100_000_000
MIB: Final = 1 << 20
PCIE_TX, PCIE_RX = 20, 21  # NVML_GPM_METRIC_PCIE_{TX,RX}_PER_SEC, MiB/s
DRAM: Final = 10  # NVML_GPM_METRIC_DRAM_BW_UTIL, percent


@dataclass(frozen=True, slots=True)
class GpmReading:
    """Averages over the time between two samples."""

    sm_activity_ratio: float | None
    pcie_tx_bytes_per_second: float | None
    pcie_rx_bytes_per_second: float | None
    dram_activity_ratio: float | None = None


class Gpm:
    """The GPM samples of one device, or of one instance of a GPU in MIG mode."""

    def __init__(self, calls: Calls, owner: str, instance: int | None = None) -> None:
        self._calls, self._owner = calls, owner
        self._instance = instance  # of a GPU in MIG mode; the handle is the GPU's all the same
        self._samples: list[Any] = []
        self._taken_ns: int | None = None
        self._last: GpmReading | None = None
        self._checked = False

    def supported(self, handle: Any) -> bool:
        """Whether this device has GPM; asked once."""
        if not self._checked:
            self._checked = True
            answer = self._calls.try_call(self._owner, "nvmlGpmQueryDeviceSupport", handle)
            if answer is None or not answer.isSupportedDevice:
                self._calls.refuse(self._owner, self._get)
        return self._calls.supports(self._owner, self._get)

    def read(self, handle: Any, now_ns: int) -> GpmReading | None:
        """Averages since the previous call; None on the first one and where GPM is missing."""
        if not self.supported(handle) or not self._allocate():
            return None
        if self._taken_ns is None:
            self._take(0, handle, now_ns)
            return None
        if now_ns - self._taken_ns < SHORTEST_NS:
            return self._last
        self._last = self._compare() if self._take(1, handle, now_ns) else None
        self._samples.reverse()
        return self._last

    def close(self) -> None:
        """Give the samples back to the driver."""
        samples, self._samples = self._samples, []
        self._taken_ns, self._last, self._checked = None, None, False
        for sample in samples:
            self._calls.try_call("", "nvmlGpmSampleFree", sample)

    def _allocate(self) -> bool:
        while len(self._samples) < 2:
            sample = self._calls.try_call(self._owner, "nvmlGpmSampleAlloc")
            if sample is None:
                return False
            self._samples.append(sample)
        return True

    def _take(self, slot: int, handle: Any, now_ns: int) -> bool:
        taken = self._sample(handle, self._samples[slot])
        self._taken_ns = None if taken is None else now_ns
        return taken is not None

    def _sample(self, handle: Any, sample: Any) -> Any | None:
        if self._instance is None:
            return self._calls.try_call(self._owner, self._get, handle, sample)
        return self._calls.try_call(self._owner, self._get, handle, self._instance, sample)

    @property
    def _get(self) -> str:
        return "nvmlGpmSampleGet" if self._instance is None else "nvmlGpmMigSampleGet"

    def _compare(self) -> GpmReading | None:
        api = self._calls.api
        request = api.c_nvmlGpmMetricsGet_t()
        request.version = api.NVML_GPM_METRICS_GET_VERSION
        request.sample1, request.sample2 = self._samples
        wanted = (api.NVML_GPM_METRIC_SM_UTIL, PCIE_TX, PCIE_RX, DRAM)
        request.numMetrics = len(wanted)
        for index, metric in enumerate(wanted):
            request.metrics[index].metricId = metric
        answer = self._calls.try_call(self._owner, "nvmlGpmMetricsGet", request)
        if answer is None:
            return None
        activity, tx, rx, dram = (self._value(answer.metrics[index]) for index in range(len(wanted)))
        return GpmReading(self._ratio(activity), _times(tx, MIB), _times(rx, MIB), self._ratio(dram))

    def _value(self, metric: Any) -> float | None:
        if metric.nvmlReturn == 0 and math.isfinite(metric.value) and metric.value >= 0:
            return float(metric.value)
        self._calls.errors[f"nvmlGpmMetricsGet:metric_{metric.metricId}"] += 1
        return None

    def _ratio(self, percent: float | None) -> float | None:
        if percent is None or percent <= 100.5:  # the two samples are not latched together: a little over is rounding
            return None if percent is None else min(percent / 100, 1.0)
        self._calls.errors["nvmlGpmMetricsGet:over_100_percent"] += 1
        return None


def _times(value: float | None, factor: int) -> float | None:
    return None if value is None else value * factor

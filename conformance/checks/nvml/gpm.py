# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""GPM's averages over a while: two samples of a device, and the difference. The samples belong to the driver."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from conformance.checks.nvml.binding import Gpu, Refused, asked

GRAPHICS_UTIL: Final = 1
SM_UTIL: Final = 2
SM_OCCUPANCY: Final = 3
PCIE_TX: Final = 20  # MiB/s, from the device
PCIE_RX: Final = 21
METRICS: Final = (GRAPHICS_UTIL, SM_UTIL, SM_OCCUPANCY, PCIE_TX, PCIE_RX)


@dataclass(slots=True)
class Window:
    """Begun when it is made; `metrics` ends it, as often as one likes."""

    gpu: Gpu
    _samples: tuple[Any, Any]

    def begin(self) -> Refused | None:
        """From now on. At least 100 ms must lie between this and `metrics`, as NVML asks."""
        answer = asked(self.gpu.api, lambda: self.gpu.api.nvmlGpmSampleGet(self.gpu.handle, self._samples[0]))
        return answer if isinstance(answer, Refused) else None

    def metrics(self) -> Mapping[int, float] | Refused:
        """Metric → its average since `begin`, as NVML gives it (per cent, MiB/s), without those that it refuses."""
        return asked(self.gpu.api, self._compared)

    def _compared(self) -> dict[int, float]:
        api = self.gpu.api
        api.nvmlGpmSampleGet(self.gpu.handle, self._samples[1])
        request = api.c_nvmlGpmMetricsGet_t()
        request.version = api.NVML_GPM_METRICS_GET_VERSION
        request.sample1, request.sample2 = self._samples
        request.numMetrics = len(METRICS)
        for index, metric in enumerate(METRICS):
            request.metrics[index].metricId = metric
        answers = api.nvmlGpmMetricsGet(request).metrics
        return {
            metric: float(answers[index].value)
            for index, metric in enumerate(METRICS)
            if answers[index].nvmlReturn == 0 and math.isfinite(answers[index].value)
        }


def supported(gpu: Gpu) -> bool | Refused:
    """Whether the device has GPM."""
    return asked(gpu.api, lambda: bool(gpu.api.nvmlGpmQueryDeviceSupport(gpu.handle).isSupportedDevice))


@contextmanager
def window(gpu: Gpu) -> Iterator[Window]:
    """The two samples, given back afterwards. NVMLError where there can be none."""
    samples = (gpu.api.nvmlGpmSampleAlloc(), gpu.api.nvmlGpmSampleAlloc())
    try:
        yield Window(gpu, samples)
    finally:
        for sample in samples:
            gpu.api.nvmlGpmSampleFree(sample)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The demo's figures. Pure: measurements in, figures out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

WARM_UP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the online workload's log."""

    arrival_s: float
    latency_s: float
    service_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The object that `--json` writes. Ratios are to the same workload alone; None: not measured."""

    gpu: str
    online_p99_ms: dict[str, float]
    offline_throughput_ratio: dict[str, float]
    left_over_ratio: float
    attribution_error_ratio: float | None
    launches_missed: int | None
    pauses: int
    online_p50_ms: dict[str, float]
    requests: int
    stolen_ratio: float  # of the CPUs' time, by the hypervisor: the simulated GPU is a program, and late without them

    def to_json(self) -> dict[str, object]:
        """As a JSON object."""
        return asdict(self)


def parse_log(text: str) -> list[Request]:
    """The requests of a log, whose lines are: arrival latency service, in seconds."""
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [Request(float(row[0]), float(row[1]), float(row[2])) for row in rows]


def settled(requests: Sequence[Request]) -> list[Request]:
    """Without those of the warm-up, which is cut off in every phase alike."""
    return [request for request in requests if request.arrival_s >= WARM_UP_SECONDS]


def quantile_ms(requests: Sequence[Request], quantile: float) -> float:
    """Latency from the scheduled arrival, by the nearest-rank method."""
    ordered = sorted(request.latency_s for request in requests)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] * 1e3


def busy_ratio(requests: Sequence[Request], seconds: float) -> float:
    """Share of the time in which a request was on the GPU."""
    return sum(request.service_s for request in requests) / seconds


def mean_error(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Mean of |attributed − true| over ticks and containers."""
    return sum(abs(seen - true) for seen, true in pairs) / len(pairs) if pairs else None

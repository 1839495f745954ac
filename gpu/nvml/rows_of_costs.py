# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows out of PCIe counters, and out of what the agent's calls cost. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from gpu.nvml.binding import Refused
from gpu.nvml.cost import Cost
from gpu.nvml.pcie import LOOK_SECONDS, TO_DEVICE, Copied, Counter
from gpu.nvml.rows_of_samples import NVML, SM_WITHIN
from gpu.parts import holds, measured, near
from gpu.row import Row, skipped

_LEAST_RATIO: Final = 0.95
_MOST_HEADERS: Final = 1.35  # of PCIe packets, for each byte that they carry
_THROUGHPUT_MS: Final = 20.0  # as the field notes have it


def of_copies(copied: Copied) -> Iterator[Row]:
    """Every source of PCIe bytes against what was copied."""
    field, metric = (198, 21) if copied.direction == TO_DEVICE else (197, 20)
    where = f"PCIe {copied.direction}"
    note = f"{copied.true / 1e9:.2f} GB/s were copied; packets have headers, so a little over 1 is as it should be"
    sources = (
        (f"{where}: field {field} ÷ copied", _rate(copied.field)),
        (f"{where}: GPM {metric} ÷ copied", copied.gpm),
        (f"{where}: nvmlDeviceGetPcieThroughput ÷ copied", copied.throughput),
    )
    for what, rate in sources:
        yield skipped(NVML, what, rate.why) if isinstance(rate, Refused) else _ratio(what, rate / copied.true, note)
    other = _rate(copied.other_way)
    if not isinstance(other, Refused):
        yield measured(NVML, f"{where}: the other direction's field ÷ copied", other / copied.true, "ratio")
    yield _cumulative(f"{where}: field {field} is cumulative", copied.field)


def _rate(field: Counter | Refused) -> float | Refused:
    """Bytes per second."""
    if isinstance(field, Refused):
        return field
    grown = field.grown()
    return Refused("it went back, and not by a wrap") if grown is None else grown / field.seconds


def _cumulative(what: str, field: Counter | Refused) -> Row:
    """A rate, or bytes since the last look, would go up and down. The agent takes one of 64 bits for one that lasts."""
    if isinstance(field, Refused):
        return skipped(NVML, what, field.why)
    grows, wraps = bool(field.grown()), field.wraps()
    looks = (
        f"{len(field.values)} looks, one each {LOOK_SECONDS * 1e3:.0f} ms, from {field.values[0]} to {field.values[-1]}"
    )
    told = f"wrapped {wraps} times, and NVML gives it {field.bits} bits" if grows and wraps else ""
    lasts = not wraps or field.bits == 32
    return holds(NVML, what, grows and lasts, grows, True, "; ".join(filter(None, (looks, told))))


def of_cost(cost: Cost, truth: float | None) -> Iterator[Row]:
    """The agent's tick, call by call; and its activity of the device where the truth is known."""
    yield measured(NVML, "agent: cost of a tick", cost.tick_ms, "ms", note="all that its NVML collector asks")
    for name, ms in cost.calls_ms.items():
        yield measured(NVML, f"agent: cost of {name}", ms, "ms", note=f"{cost.per_tick[name]:g} in a tick")
    told = ", ".join(f"{name} ({times})" for name, times in sorted(cost.errors.items())) or "none"
    yield holds(NVML, "agent: calls that NVML refuses", not cost.errors, len(cost.errors), 0, told)
    ratios = [one.sm_activity_ratio for one in cost.readings if one.sm_activity_ratio is not None]
    sources = ", ".join(sorted({one.sm_activity_source or "nothing" for one in cost.readings}))
    if truth is not None:
        mean = sum(ratios) / len(ratios) if ratios else None
        yield near(NVML, "agent: SM activity of the device", mean, truth, SM_WITHIN, note=f"from {sources}")


def _ratio(what: str, ratio: float, note: str) -> Row:
    fits = _LEAST_RATIO <= ratio <= _MOST_HEADERS
    return holds(NVML, what, fits, round(ratio, 4), 1.0, note)


def of_sources(costs: Mapping[str, float | Refused]) -> Iterator[Row]:
    """What one reading of each source of PCIe bytes takes."""
    for name, ms in costs.items():
        what = f"cost of {name}"
        if isinstance(ms, Refused):
            yield skipped(NVML, what, ms.why)
        else:
            yield measured(NVML, what, ms, "ms", _THROUGHPUT_MS if "Throughput" in name else None)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Online services that hold GPUs for the whole simulation, and what the predictor is to know of offline jobs.

A file {"services": [{kind, load, gap_s, slack_s, free_bytes, …}], "offline": {kind: {memory_bytes, kernel_s}}}: the
names are those of Slot and Job, so that a plan and a simulation are given the same facts. Each service is a job of
infinite length on one GPU; which offline job may join it, and at what speed, the predictor says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fleet.model import FleetError, Job, Predictor, Slot, TraceJob
from fleet.simulator.cluster import Slowdown
from fleet.simulator.slowdown import ANY_KIND, predicted

_FORM: Final = (
    '{"services": [{"kind": "bert", "count": 4, "load": 0.5, "gap_s": 0.02, "slack_s": 0.01, "free_bytes": 4e10}], '
    '"offline": {"default": {"memory_bytes": 1e10, "kernel_s": 0.001}}}'
)


@dataclass(frozen=True, slots=True)
class Services:
    """What a file held."""

    slots: Mapping[str, Slot]
    """Label of a service → its GPU as a plan sees it; services of one entry are alike"""
    counts: Mapping[str, int]
    """Label → services"""
    offline: Mapping[str, Job]
    """Kind of an offline job → what is known of it"""

    def jobs(self, submit_s: float) -> list[TraceJob]:
        """One for each service."""
        return [
            TraceJob(f"{label}/{place}", submit_s, 1, math.inf, kind=label, online=True)
            for label, count in self.counts.items()
            for place in range(count)
        ]

    def slowdown(self, predictor: Predictor) -> Slowdown:
        """Of an offline job beside a service."""
        return predicted(predictor, self.slots, self.offline)


def read_services(path: Path) -> Services:
    """FleetError: it is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        entries, offline = found["services"], found["offline"]
        slots = {f"{entry['kind']}#{place}": _slot(entry) for place, entry in enumerate(entries)}
        counts = {label: _count(entry) for label, entry in zip(slots, entries, strict=True)}
        kinds = {kind: _job(kind, entry) for kind, entry in offline.items()}
    except OSError as error:
        raise FleetError(f"cannot read the services {path}: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FleetError(
            f"{path} describes no services ({type(error).__name__}: {error}); it has to be as {_FORM}"
        ) from error
    if not slots or not kinds:
        raise FleetError(f"{path} has no service, or no kind of offline job; {ANY_KIND!r} stands for all other kinds")
    return Services(slots, counts, kinds)


def _slot(entry: Mapping[str, Any]) -> Slot:
    return Slot(
        node="simulated",
        gpu="simulated",
        model=str(entry.get("model", "unknown")),
        online=str(entry["kind"]),
        load=_number(entry["load"]),
        gap_s=_number(entry["gap_s"]),
        slack_s=_number(entry["slack_s"]),
        free_bytes=int(_number(entry["free_bytes"])),
        spatial=None if entry.get("spatial") is None else _number(entry["spatial"]),
    )


def _job(kind: str, entry: Mapping[str, Any]) -> Job:
    kernel_s = entry.get("kernel_s")
    return Job(kind, kind, int(_number(entry["memory_bytes"])), None if kernel_s is None else _number(kernel_s))


def _count(entry: Mapping[str, Any]) -> int:
    count = entry.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"a count of {count!r}")
    return count


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no number of at least 0")
    return float(value)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Ticks of a real GPU, as the agent's samples were, with what each tenant really did: played to an estimator.

Recorded on an H200 (docs/on-a-real-gpu.md), by the item attribution. A tenant's truth is its kernels × their time
alone, PyTorch's is CUPTI's of its steps alone.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from agent.attribution.engine import AttributionEngine
from agent.attribution.inputs import TickInputs
from agent.collectors import samples
from agent.collectors.samples import Sample
from agent.containers.gpu_processes import GpuProcess
from agent.core.errors import GoneError
from agent.core.model import ContainerKey, ProcessId
from agent.probes.events import FunctionNames
from bench.attribution.shares import ContainerSecond, interpolate

_FIXTURES = Path(__file__).parents[1] / "fixtures"


@dataclass(slots=True)
class _Registry:
    """The processes that were known then, for an engine and for TickInputs."""

    members: dict[ProcessId, GpuProcess]
    listed: dict[int, ProcessId]

    def get(self, process: ProcessId) -> GpuProcess | None:
        return self.members.get(process)

    def outside(self, process: ProcessId) -> ContainerKey | None:
        return None

    def process_id(self, tgid: int) -> ProcessId:
        if tgid not in self.listed:
            raise GoneError(f"process {tgid} has ended")
        return self.listed[tgid]


def play(name: str) -> dict[tuple[str, str], list[ContainerSecond]]:
    """(scene, tenant) → its ticks, by an engine that starts with the recording."""
    recording = json.loads(lzma.decompress((_FIXTURES / f"{name}.json.xz").read_bytes()))
    found: dict[tuple[str, str], list[ContainerSecond]] = {}
    for at_ns, interval_ns, shares in _ticks(recording["ticks"]):
        for scene in recording["scenes"]:
            if scene["begin_ns"] < at_ns - interval_ns / 2 < scene["end_ns"]:
                for tenant in scene["tenants"]:
                    second = _second(tenant["grown"], shares.get(tenant["tgid"]), at_ns, interval_ns)
                    found.setdefault((scene["name"], tenant["name"]), []).append(second)
    return found


def _second(
    grown: Sequence[tuple[int, float]], said: tuple[float, float | None] | None, at_ns: int, interval_ns: int
) -> ContainerSecond:
    true = (interpolate(grown, at_ns) - interpolate(grown, at_ns - interval_ns)) / interval_ns
    return ContainerSecond(true, *(said or (0.0, 0.0)))


_Shares = Mapping[int, tuple[float, float | None]]


def _ticks(recorded: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, _Shares]]:
    registry = _Registry({}, {})
    engine: Any = AttributionEngine(registry, FunctionNames())  # type: ignore[arg-type]
    known: set[ProcessId] = set()
    for one in recorded:
        registry.listed = {tgid: ProcessId(*words) for tgid, words in one["listed"]}
        for member in one["members"]:
            process = _adapter(GpuProcess).validate_python(member)
            registry.members[process.process.id] = process
        seen: list[Sample] = [_adapter(getattr(samples, kind)).validate_python(value) for kind, value in one["samples"]]
        inputs = TickInputs.of(seen, registry)  # type: ignore[arg-type]
        parts = engine.tick(seen, inputs, one["interval_ns"])
        gone = known - inputs.processes
        engine.forget(gone)
        known = (known | inputs.processes) - gone
        usage = ((p.tgid, u) for part in parts for p, u in part.attribution.usage.items())
        yield (
            one["at_ns"],
            one["interval_ns"],
            {tgid: (u.sm_ratio or 0.0, u.sm_error_ratio) for tgid, u in usage},
        )


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)

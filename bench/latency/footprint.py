# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The second half of `python -m bench scale`: what the agent and its guardian cost while they enforce.

Every process launches ten times a second, one container in eight is online, the others may be paused beside it; the
last row is of processes that hold contexts and do nothing. CPU time is of one core, over SECONDS in which nobody asks
the agent anything; then /metrics is fetched, and the times that ticks and decisions took are read once a tick.

dcgm-exporter, which reads counters of devices and neither attributes nor enforces, is reported to take 0.3 to 0.9 % of
a core; it cannot run here.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.latency.scale_stage import Load, Stage, cpu_seconds, open_stage

SECONDS: Final = 20.0
_WARM_UP_SECONDS: Final = 15.0  # after the last process began: durations are learned, the law has found its share
_SCRAPES: Final = 5
_TICKS: Final = 15
_MIB: Final = 1 << 20
POLICY: Final = """\
version: 1
enforce: true
online:
  - name: services
    match: {cgroup: "*[19]"}
    slo: {signal: gpu_wait, quantile: 0.99, target: 100ms, window: 10s}
offline:
  - name: jobs
    match: {cgroup: "*[02-8a-f]"}
"""


@dataclass(frozen=True, slots=True)
class Size:
    """A node. `works`: its processes launch all the time. The aims: the agent's part of a core, its RSS in MiB."""

    containers: int
    processes: int
    gpus: int
    works: bool
    most_agent_ratio: float
    most_rss_mib: float


SIZES: Final = (
    Size(2, 2, 1, True, 0.015, 60),
    Size(100, 200, 8, True, 0.015, 60),
    Size(100, 1000, 16, True, 0.03, 90),
    Size(100, 1000, 16, False, 0.003, 90),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What one of them cost."""

    containers: int
    processes: int
    gpus: int
    works: bool
    agent_core_ratio: float
    guardian_core_ratio: float
    rss_mib: float
    pss_mib: float
    tick_ms: float
    decision_ms: float
    decision_p99_ms: float  # of _TICKS decisions: the slowest
    scrape_ms: float
    stops_per_second: float
    lost: dict[str, int]


def rows(sizes: tuple[Size, ...] = SIZES) -> Iterator[Row]:
    """One after another, each on a node and with an agent of its own."""
    for size in sizes:
        load = Load("", size.processes, size.containers, 1, 2, hold=True, work=size.works)
        with (
            tempfile.TemporaryDirectory(prefix="gpuwarden-footprint-") as folder,
            open_stage(Path(folder), size.gpus, POLICY) as stage,
            stage.load(load),
        ):
            yield _measured(stage, size)


def _measured(stage: Stage, size: Size) -> Row:
    guardian = stage.child("enforce.recovery.guardian")
    time.sleep(_WARM_UP_SECONDS)
    lost, stops = stage.snapshot().lost, _stops(stage)
    before = cpu_seconds(stage.agent.pid), cpu_seconds(guardian), time.monotonic()
    time.sleep(SECONDS)  # the time that is measured
    after = cpu_seconds(stage.agent.pid), cpu_seconds(guardian), time.monotonic()
    seconds = after[2] - before[2]
    stopped, now_lost = _stops(stage) - stops, stage.snapshot().lost
    rss_bytes, pss_bytes = stage.memory_bytes()
    ticks, decisions = _times(stage)
    return Row(
        size.containers,
        size.processes,
        size.gpus,
        size.works,
        agent_core_ratio=round((after[0] - before[0]) / seconds, 4),
        guardian_core_ratio=round((after[1] - before[1]) / seconds, 4),
        rss_mib=round(rss_bytes / _MIB, 1),
        pss_mib=round(pss_bytes / _MIB, 1),
        tick_ms=round(statistics.median(ticks) * 1e3, 1),
        decision_ms=round(statistics.median(decisions) * 1e3, 2),
        decision_p99_ms=round(max(decisions) * 1e3, 2),
        scrape_ms=round(statistics.median(_scrape_seconds(stage.port) for _ in range(_SCRAPES)) * 1e3, 1),
        stops_per_second=round(stopped / seconds, 1),
        lost={name: count - lost.get(name, 0) for name, count in now_lost.items() if count != lost.get(name, 0)},
    )


def _stops(stage: Stage) -> int:
    return sum(one.pauses_total for one in stage.snapshot().enforcement.values())


def _times(stage: Stage) -> tuple[list[float], list[float]]:
    """Seconds of ticks and of decisions, as the agent's snapshots say."""
    ticks, decisions = [], []
    for _ in range(_TICKS):
        time.sleep(1)
        snapshot = stage.snapshot()
        ticks.append(snapshot.tick_seconds or 0.0)
        decisions.append(snapshot.decision_seconds or 0.0)
    return ticks, decisions


def _scrape_seconds(port: int) -> float:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept-Encoding": "gzip"})
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
    return time.monotonic() - began


def show(row: Row, size: Size) -> bool:
    """Prints it beside what is aimed for. Whether it is reached, with nothing lost."""
    reached = row.agent_core_ratio <= size.most_agent_ratio and row.rss_mib <= size.most_rss_mib and not row.lost
    print(
        f"{row.containers} containers, {row.processes} processes, {row.gpus} GPUs{'' if row.works else ', idle'}: "
        f"agent {row.agent_core_ratio:.1%} of a core (aim {size.most_agent_ratio:.1%}), guardian "
        f"{row.guardian_core_ratio:.1%} at {row.stops_per_second:g} stops/s, RSS {row.rss_mib:g} MiB "
        f"(aim {size.most_rss_mib:g}), PSS {row.pss_mib:g} MiB, tick {row.tick_ms:g} ms, "
        f"decision {row.decision_ms:g} ms (slowest {row.decision_p99_ms:g}), scrape {row.scrape_ms:g} ms, "
        f"lost {row.lost or 'nothing'}",
        flush=True,
    )
    return reached


def document(found: list[Row]) -> list[dict[str, object]]:
    """The rows, for --json."""
    return [asdict(row) for row in found]

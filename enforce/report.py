# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What enforcement tells the agent's readers: per container its role, latency, share, and how much it was paused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent.layout import ProcessKey
from agent.libbpf import Map
from agent.model import ContainerKey, Enforcement, ProcessId
from enforce.decide import Decided
from enforce.demand import Counters
from enforce.memory.told import MemoryStance
from enforce.model import Reading
from enforce.policy.model import OfflineRule, OnlineRule
from enforce.roster import Seat, processes_of
from enforce.signals.requests import Counted
from enforce.standing import NOWHERE, Standing

_WINDOW_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Paused:
    """A container's stops: how many ever, how long ever, the share of the last second, and those others ended.

    Time is the mean over its processes: eight that are stopped a tenth of the time stand for a tenth, not for eight.
    """

    pauses: int
    seconds: float
    ratio: float | None
    foreign: int = 0


class PauseMeter:
    """Sums what the kernel and the guardian wrote per process; a dead process's part stays in its container's sum.

    What they were stopped between two readings is divided by how many they are at the second. Nothing ever goes down,
    whatever happens to a process's record.
    """

    def __init__(self, paces: Map, resumes: Map) -> None:
        self._paces, self._resumes = paces, resumes
        self.counters: dict[ProcessId, Counters] = {}  # of whoever was charged, at the last reading
        self._last: dict[ProcessId, tuple[int, int, int]] = {}
        self._sums: dict[ContainerKey, tuple[int, float, int]] = {}
        self._history: dict[ContainerKey, list[tuple[int, float]]] = {}

    def read(self, here: Mapping[ContainerKey, Seat], now_ns: int) -> dict[ContainerKey, Paused]:
        """Takes one reading of everybody."""
        self._sums = {key: sums for key, sums in self._sums.items() if key in here}
        self._history = {key: points for key, points in self._history.items() if key in here}
        alive = {process for seat in here.values() for process in processes_of(seat)}
        self.counters = {}
        for process in [process for process in self._last if process not in alive]:
            del self._last[process]
            self._paces.delete(ProcessKey.of(process))
            self._resumes.delete(ProcessKey.of(process))
        return {key: self._container(key, seat, now_ns) for key, seat in here.items()}

    def _container(self, key: ContainerKey, seat: Seat, now_ns: int) -> Paused:
        pauses, paused_ns, foreign = self._sums.get(key, (0, 0.0, 0))
        processes = processes_of(seat)
        for process in processes:
            before = self._last.get(process, (0, 0, 0))
            now = self._last[process] = self._process(process, now_ns)
            more = [max(0, after - earlier) for earlier, after in zip(before, now, strict=True)]
            pauses, paused_ns, foreign = pauses + more[0], paused_ns + more[1] / len(processes), foreign + more[2]
        self._sums[key] = (pauses, paused_ns, foreign)
        history = self._history.setdefault(key, [])
        history.append((now_ns, paused_ns))
        while len(history) > 2 and history[1][0] <= now_ns - _WINDOW_NS:
            history.pop(0)
        elapsed = now_ns - history[0][0]
        ratio = min(1.0, (paused_ns - history[0][1]) / elapsed) if elapsed > 0 else None
        return Paused(pauses, paused_ns / 1e9, ratio, foreign)

    def _process(self, process: ProcessId, now_ns: int) -> tuple[int, int, int]:
        """Pauses and paused ns so far, the stop that it is in included, and how many of them others ended."""
        key = ProcessKey.of(process)
        pace, resume = self._paces.get(key), self._resumes.get(key)
        if pace is not None:
            self.counters[process] = Counters(pace.charged_ns, pace.pauses)
        pauses = pace.pauses if pace else 0
        if resume is None:
            return (pauses, 0, 0)
        going_on = max(0, now_ns - resume.stopped_at_ns) if resume.stopped_at_ns else 0
        return (pauses, resume.paused_ns + going_on, resume.foreign)


def report(
    here: Mapping[ContainerKey, Seat],
    readings: Mapping[ContainerKey, Reading],
    decided: Decided,
    paused: Mapping[ContainerKey, Paused],
    standing: Mapping[ContainerKey, Standing],
    memory: Mapping[ContainerKey, MemoryStance] | None = None,
    counted: Mapping[ContainerKey, Counted | None] | None = None,
) -> dict[ContainerKey, Enforcement]:
    """One entry per container on a GPU."""
    verdicts = {verdict.seat.container.key: verdict for verdict in decided.verdicts}
    out = {}
    for key, seat in here.items():
        rule, reading, verdict = seat.classification.rule, readings.get(key), verdicts.get(key)
        slo = rule.slo if isinstance(rule, OnlineRule) else None
        latency = (reading.latency_ns or reading.recent_ns) if reading else None
        offline = isinstance(rule, OfflineRule)
        stance = memory.get(key) if memory else None
        requests = counted.get(key) if counted else None
        out[key] = Enforcement(
            role=seat.classification.role.value,
            rule=rule.name if rule else None,
            latency_seconds=latency / 1e9 if latency is not None else None,
            latency_quantile=slo.quantile if slo else None,
            target_seconds=slo.target_ns / 1e9 if slo else None,
            requests_total=requests.requests if requests else None,
            slow_requests_total=requests.slow if requests else None,
            share_ratio=verdict.share.ratio if verdict else (1.0 if offline else None),
            paused_ratio=paused[key].ratio if offline else None,
            pauses_total=paused[key].pauses,
            paused_seconds_total=paused[key].seconds,
            foreign_resumes_total=paused[key].foreign,
            reason=_reason(seat, verdict.share.reason if verdict else None),
            memory_quota_bytes=stance.quota_bytes if stance else None,
            allocations_denied_total=stance.denied if stance else 0,
            allocations_held_total=stance.held if stance else 0,
            rungs=standing.get(key, NOWHERE).rungs,
            troubles=standing.get(key, NOWHERE).troubles,
        )
    return out


def _reason(seat: Seat, decided: str | None) -> str | None:
    if seat.classification.amiss:
        return seat.classification.reason
    return decided or ("no online container on its GPUs" if isinstance(seat.classification.rule, OfflineRule) else None)

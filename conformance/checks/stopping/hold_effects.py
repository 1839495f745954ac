# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about one way to hold a process: what its own work, and a second client of the GPU, have of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from conformance.checks.stopping.holds import HoldTarget, held
from conformance.checks.stopping.timeline import Hold, Timeline, latencies_ms, median, p90
from conformance.clients import launcher
from conformance.clients.launcher import Client, Online, Request
from conformance.host import Host
from conformance.report.model import Row, Verdict, judged

KERNEL_US: Final = 3000
QUEUE: Final = 16
QUEUED_MS: Final = KERNEL_US * QUEUE / 1000
ONLINE: Final = ("--rate", "100", "--kernels", "10", "--kernel-us", "100", "--blocks", "64", "--seed", "3")
_HELD_SECONDS: Final = 0.15  # more than what is queued takes
_BETWEEN_SECONDS: Final = 0.15
_LATE_RATIO, _LATE_MS = 1.5, 15.0  # as long as this the draining may take beyond what is queued
_NOTICED_RATIO, _NOTICED_MS = 1.25, 0.3  # by as much as this a second client may be slower beside a held one
_UNTOLD: Final = "contents are not looked at: the simulated GPU's memory has none"
STILL: Final = "{brake}: stands still after"
DRAINS: Final = "{brake}: queued kernels drain"
LAUNCHES: Final = "{brake}: launches while held"
RESUMES: Final = "{brake}: next launch after the release"
TRIP: Final = "{brake}: hold and release, round trip"
RIGHT: Final = "{brake}: runs on, results right"
BESIDE_HELD: Final = "{brake}: p90 of another client beside a held one"
BESIDE_DRAINING: Final = "{brake}: slowest request of another client while the queue drains"
WHATS: Final = (STILL, DRAINS, LAUNCHES, RESUMES, TRIP, RIGHT, BESIDE_HELD, BESIDE_DRAINING)

# What holds a program that was started, and what comes before its command.
Maker = Callable[[], AbstractContextManager[tuple[Sequence[str], Callable[[int], HoldTarget]]]]


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often and how long."""

    holds: int
    trips: int
    seconds: float  # of each phase beside the online workload

    @classmethod
    def of(cls, host: Host) -> Repeats:
        """How often: seldom in a quick run."""
        return cls(1, 2, 0.3) if host.quick else cls(6, 10, 1.0)


@dataclass(frozen=True, slots=True)
class HoldMethod:
    """One way to hold. `online`: arguments of the online workload; `alone_ms`: its p90 without an offline workload."""

    item: str
    name: str
    host: Host
    make: Maker
    online: Sequence[str]
    alone_ms: float | None
    extra: Mapping[str, str] | None = None  # in the environment of the clients

    def whats(self) -> list[str]:
        """Names of all its rows."""
        return [what.format(brake=self.name) for what in WHATS]

    def rows(self) -> Iterator[Row]:
        """First the held program by itself, then beside another."""
        repeats = Repeats.of(self.host)
        with self.make() as (prefix, brake_of):
            worker = worker_of(self.host, prefix, self.extra)
            try:
                brake = brake_of(worker.tgid)
                time.sleep(_BETWEEN_SECONDS)
                holds = [self._hold(brake) for _ in range(repeats.holds)]
                trips = [held(brake, 0) for _ in range(repeats.trips)]
                time.sleep(_BETWEEN_SECONDS)
                record = worker.finish()
            finally:
                worker.end()
            yield from self._own(record, holds, trips)
            yield from self._beside(prefix, brake_of, repeats.seconds)

    def _hold(self, brake: HoldTarget) -> Hold:
        found = held(brake, _HELD_SECONDS)
        time.sleep(_BETWEEN_SECONDS)
        return found

    def _own(self, record: Mapping[str, Any], holds: Sequence[Hold], trips: Sequence[Hold]) -> Iterator[Row]:
        line = Timeline.of(record)
        yield self._row(STILL, Verdict.MEASURED, median([us(one.still_ns - one.asked_ns) for one in holds]), "µs")
        drains = [line.drain_ns(hold) / 1e6 for hold in holds]
        counts = [line.drained(hold) for hold in holds]
        holds_good = max(drains) <= QUEUED_MS * _LATE_RATIO + _LATE_MS and min(counts) > QUEUE // 2
        note = f"{min(counts)} to {max(counts)} kernels ended after the asking; {max(drains):.1f} ms at most"
        yield self._row(DRAINS, judged(holds_good), median(drains), "ms", QUEUED_MS, note)
        slipped = sum(line.launches(hold.still_ns, hold.released_ns) for hold in holds)
        yield self._row(LAUNCHES, judged(slipped == 0), slipped, "", 0, f"over {len(holds)} holds")
        resumed = [us(found) for hold in holds if (found := line.resumed_ns(hold)) is not None]
        yield self._row(RESUMES, judged(len(resumed) == len(holds)), median(resumed), "µs")
        turns = [us(one.running_ns - one.asked_ns) for one in trips]
        most = f"{max(turns):.0f} µs at most, of {len(trips)}"
        yield self._row(TRIP, Verdict.MEASURED, median(turns), "µs", note=most)
        yield self._right(record)

    def _right(self, record: Mapping[str, Any]) -> Row:
        fine = record["error"] is None and (self.host.simulated or record["wrong"] == 0)
        note = record["error"] or ("" if fine else f"{record['wrong']} numbers are wrong")
        return self._row(RIGHT, judged(fine), fine, "", True, note or (_UNTOLD if self.host.simulated else ""))

    def _beside(self, prefix: Sequence[str], brake_of: Callable[[int], HoldTarget], seconds: float) -> Iterator[Row]:
        worker = worker_of(self.host, prefix, self.extra)
        try:
            online = Online(self.host, self.online, self.extra)
            online.go()
            brake = brake_of(worker.tgid)
            time.sleep(seconds)
            hold = held(brake, seconds + QUEUED_MS / 1000)
            time.sleep(_BETWEEN_SECONDS)
            found = online.finish()
        finally:
            worker.end()
        yield from self._noticed(found, hold, seconds)

    def _noticed(self, found: Sequence[Request], hold: Hold, seconds: float) -> Iterator[Row]:
        running = p90(latencies_ms(found, hold.asked_ns - round(seconds * 1e9), hold.asked_ns))
        drained_ns = hold.asked_ns + round(QUEUED_MS * 1e6 * _LATE_RATIO + _LATE_MS * 1e6)
        beside = p90(latencies_ms(found, drained_ns, hold.released_ns))
        note = f"beside a running one {running:.2f} ms" if running is not None else ""
        yield self._row(BESIDE_HELD, self._unnoticed(beside), beside, "ms", self.alone_ms, note)
        draining = max(latencies_ms(found, hold.asked_ns, drained_ns), default=None)
        yield self._row(BESIDE_DRAINING, Verdict.MEASURED, draining, "ms", running, "beside: p90 while it ran")

    def _unnoticed(self, beside: float | None) -> Verdict:
        if beside is None or self.alone_ms is None:
            return Verdict.FAILED
        return judged(beside <= self.alone_ms * _NOTICED_RATIO + _NOTICED_MS)

    def _row(
        self,
        what: str,
        verdict: Verdict,
        figure: float | bool | None,
        unit: str,
        baseline: float | bool | None = None,
        note: str = "",
    ) -> Row:
        named = what.format(brake=self.name)
        return Row(item=self.item, what=named, verdict=verdict, figure=figure, unit=unit, baseline=baseline, note=note)


def worker_of(host: Host, prefix: Sequence[str] = (), extra: Mapping[str, str] | None = None, *more: str) -> Client:
    """Kernels without end; always as many queued."""
    command = launcher.own(host, "steps", "--kernel-us", str(KERNEL_US), "--queue", str(QUEUE), *more)
    return launcher.start(host, [*prefix, *command], {**launcher.importing(), **(extra or {})})


def pace(host: Host) -> tuple[str, ...]:
    """The device's, as options: measured now, while it is idle."""
    worker = worker_of(host)
    worker.end()
    return worker.pace


def alone_ms(
    host: Host, arguments: Sequence[str], seconds: float, extra: Mapping[str, str] | None = None
) -> float | None:
    """The online workload's p90 without an offline workload."""
    online = Online(host, arguments, extra)
    online.go()
    begun = time.monotonic_ns()
    time.sleep(seconds)
    return p90(latencies_ms(online.finish(), begun, begun + round(seconds * 1e9)))


def us(ns: float) -> float:
    """Microseconds, from ns."""
    return ns / 1e3

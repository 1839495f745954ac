# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One phase: the online side, the offline side beside it, a while to settle, then what is measured.

A request counts by when it was to arrive. Where the online side cannot keep up, the offline side stays for a while
after the last arrival and then ends, so that the rest is served: such latencies are lower bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from agent.core.errors import SetupError
from bench.enforcement.callers import calling
from bench.enforcement.figures import Phase
from tools.harness.arrivals import phase_arrivals, write_trace
from tools.harness.node import Node
from tools.harness.quiet import Stolen
from tools.harness.stage import PATIENCE_SECONDS, Stage, Workload
from tools.harness.wait import poll, until

_KNOWN_SPEED: Final = ("--iterations-per-us", "100")  # the simulated GPU goes by the time that it is given
_OVERTIME_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """What runs in a phase. No online arguments: the offline side alone."""

    online: Sequence[str]
    offline: Sequence[Sequence[str]]
    settling: Sequence[float] = ()
    measured: Sequence[float] = ()
    extra: Mapping[str, str] = field(default_factory=dict)  # environment of the offline side
    port: int | None = None  # where the online side serves HTTP
    by_http: bool = False  # its requests come in over HTTP, instead of from its own clock


@dataclass(frozen=True, slots=True)
class _Truth:
    """SM time so far, by process."""

    at_ns: int
    sm_ns: Mapping[int, int]

    def ratio_since(self, before: _Truth, workloads: Sequence[Workload]) -> float:
        """Share of the device's time that these workloads took since then."""
        tgids = [workload.process.pid for workload in workloads]
        spent = sum(self.sm_ns.get(tgid, 0) - before.sm_ns.get(tgid, 0) for tgid in tgids)
        return spent / (self.at_ns - before.at_ns)


def measure(
    stage: Stage[Node],
    load: Load,
    settle_seconds: float,
    seconds: float,
    read: Callable[[], float | None] = lambda: None,
) -> Phase:
    """Runs it. `read`: the signal's latency, asked for once at the end of what is measured."""
    with ExitStack() as stack:
        online = _start_online(stage, load, settle_seconds, seconds) if load.online else None
        offline = [stage.start("offline", [*one, *_KNOWN_SPEED, "--seconds", "0"], load.extra) for one in load.offline]
        stack.callback(stage.end)
        begun = time.monotonic()
        if online:
            stage.go(online)
            if load.by_http:
                arrivals = phase_arrivals(load.settling, load.measured, settle_seconds)
                stack.enter_context(calling(arrivals, load.port or 0, stage.folder, stage.cpus))
        _sleep_until(begun + settle_seconds)
        before, stolen = _truth(stage), Stolen.now()
        _sleep_until(begun + settle_seconds + seconds)
        after, signal_ns, stolen_ratio = _truth(stage), read(), stolen.ratio()
        for workload in offline:
            workload.require_alive()
        requests = _finish(stage, offline, settle_seconds) if online else ()
        return Phase(
            tuple(latency_s for latency_s, _ in requests),
            after.ratio_since(before, [online] if online else []),
            after.ratio_since(before, offline),
            stolen_ratio,
            sum(service_s for _, service_s in requests) / seconds,
            signal_ns,
        )


def _start_online(stage: Stage[Node], load: Load, settle_seconds: float, seconds: float) -> Workload:
    trace, log = stage.folder / "arrivals", stage.folder / "requests.log"
    log.unlink(missing_ok=True)
    write_trace(phase_arrivals(load.settling, load.measured, settle_seconds), trace)
    source = ["--rate", "0"] if load.by_http else ["--trace", str(trace)]
    port = ["--port", str(load.port)] if load.port is not None else []
    lasting = ["--seconds", str(settle_seconds + seconds + PATIENCE_SECONDS), "--drain-seconds", "1000"]
    sinks = ["--log", str(log), "--json", str(stage.folder / "online.json")]
    return stage.start("online", [*load.online, *source, *port, *_KNOWN_SPEED, *lasting, *sinks])


def _finish(stage: Stage[Node], offline: Sequence[Workload], settle_seconds: float) -> tuple[tuple[float, float], ...]:
    """Latency and time of service of the measured requests, once all are served."""
    log, wanted = stage.folder / "requests.log", len((stage.folder / "arrivals").read_text().splitlines())

    def served() -> bool:
        return log.read_bytes().count(b"\n") >= wanted

    if not poll(served, _OVERTIME_SECONDS):
        stage.end(offline)
    until(served, "the online service to serve what has arrived", error=SetupError)
    rows = [line.split() for line in log.read_text().splitlines()]
    return tuple((float(row[1]), float(row[2])) for row in rows if float(row[0]) >= settle_seconds)


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def _truth(stage: Stage[Node]) -> _Truth:
    before = time.monotonic_ns()
    rows = stage.node.truth()
    return _Truth((before + time.monotonic_ns()) // 2, {row["pid"]: row["sm_ns"] for row in rows})

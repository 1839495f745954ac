# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The four phases, in order, and what is measured in each."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from agent.core.errors import WardenError
from sim.demo import shapes
from sim.demo.figures import WARM_UP_SECONDS, Figures, Request, busy_ratio, mean_error, parse_log, quantile_ms, settled
from sim.demo.screen import Screen
from sim.demo.stage import Stage, agent, simulated_gpu
from sim.demo.watch import Watch
from tools.harness.containers import Container
from tools.harness.quiet import Stolen
from tools.harness.wait import poll

_WATCHED_ALONE_SECONDS = 6.0
_OFFLINE_ALONE_SECONDS = 12.0
_GRACE_SECONDS = 60.0  # an overloaded online side needs time to work its queue off
_LAST_TICKS_SECONDS = 2.5
_UNKNOWN_SECONDS = 1.0  # a target, before one is known


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one phase measured."""

    requests: list[Request]
    kernels_per_second: float | None


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Those of the measured phases: each side by itself, then both."""

    online: Outcome
    offline: Outcome
    uncontrolled: Outcome
    controlled: Outcome


def run(stage: Stage, seconds: float, screen: Screen) -> Figures:
    """Runs all phases. Everything that was started is gone in the end, also after an error."""
    stolen = Stolen.now()
    with simulated_gpu(stage):
        watch = Watch(stage, screen.show)
        screen.phase("online alone", "the baseline: no agent, no probe")
        online = _phase(stage, None, online_seconds=seconds)
        screen.phase("offline alone", "the baseline: no agent, no probe")
        offline = _phase(stage, None, offline_seconds=min(seconds, _OFFLINE_ALONE_SECONDS))
        policy = stage.folder / "policy.yaml"
        shapes.write_policy(policy, _UNKNOWN_SECONDS, enforce=False)
        screen.phase("the agent starts", "attaching probes to libcuda")
        with agent(stage, policy) as process:
            screen.phase("online alone, watched", "what watching costs")
            _phase(stage, watch, online_seconds=min(seconds, _WATCHED_ALONE_SECONDS))
            alone_seconds = watch.latency_seconds.get("chat")
            if alone_seconds is None:
                raise WardenError("the agent has read no latency of the online container: give more --seconds")
            screen.phase("offline alone, watched", "")
            _phase(stage, watch, offline_seconds=min(seconds, _WATCHED_ALONE_SECONDS))
            screen.phase("both, uncontrolled", "enforce: false")
            uncontrolled = _phase(stage, watch, online_seconds=seconds, offline_seconds=seconds)
            shapes.write_policy(policy, shapes.TARGET_RATIO * alone_seconds, enforce=True)
            process.send_signal(signal.SIGHUP)
            screen.phase("both, under GPU Warden", "enforce: true")
            controlled = _phase(stage, watch, online_seconds=seconds, offline_seconds=seconds)
        truth = {row["pid"]: row["launches"] for row in stage.truth()}
        screen.end()
    return _figures(seconds, Outcomes(online, offline, uncontrolled, controlled), watch, truth, stolen.ratio())


def _phase(stage: Stage, watch: Watch | None, *, online_seconds: float = 0.0, offline_seconds: float = 0.0) -> Outcome:
    log, summary = stage.folder / "online.log", stage.folder / "offline.json"
    for path in (log, summary):
        path.unlink(missing_ok=True)
    with ExitStack() as stack:
        running: list[Container] = []
        if offline_seconds:
            pace = (*shapes.OFFLINE_PACE, "--seconds", str(offline_seconds), "--json", str(summary))
            running.append(stack.enter_context(stage.container("training", "offline", (*shapes.OFFLINE, *pace))))
        if online_seconds:
            rest = ("--start-now", "--seconds", str(online_seconds), "--seed", "7", "--log", str(log))
            sink = ("--json", str(stage.folder / "online.json"))
            running.append(stack.enter_context(stage.container("chat", "online", (*shapes.ONLINE, *rest, *sink))))
        _wait(running, watch, max(online_seconds, offline_seconds) + _GRACE_SECONDS)
        if watch:  # the tick in which the ended processes are booked
            watch.until(lambda: False, _LAST_TICKS_SECONDS)
        _check(running, log if online_seconds else None, summary if offline_seconds else None)
    requests = parse_log(log.read_text()) if online_seconds else []
    rate = float(json.loads(summary.read_text())["kernels_per_second"]) if offline_seconds else None
    return Outcome(requests, rate)


def _wait(running: list[Container], watch: Watch | None, seconds: float) -> None:
    def done() -> bool:
        return not any(container.alive() for container in running)

    if watch:
        watch.until(done, seconds)
    else:
        poll(done, seconds, 0.05)


def _check(running: list[Container], *expected: Path | None) -> None:
    for path in expected:
        if path is not None and not (path.exists() and path.stat().st_size):
            errors = "; ".join(container.errors().strip() for container in running)
            raise WardenError(f"a workload of the demo wrote no {path.name}: {errors or 'it did not end in time'}")


def _figures(seconds: float, measured: Outcomes, watch: Watch, truth: dict[int, int], stolen_ratio: float) -> Figures:
    online = measured.online
    phases = {"alone": online, "uncontrolled": measured.uncontrolled, "controlled": measured.controlled}
    alone = measured.offline.kernels_per_second or float("nan")
    launched = {key: sum(truth.get(tgid, 0) for tgid in tgids) for key, tgids in watch.members.items()}
    return Figures(
        gpu="simulated",
        online_p99_ms={name: round(quantile_ms(settled(o.requests), 0.99), 3) for name, o in phases.items()},
        online_p50_ms={name: round(quantile_ms(settled(o.requests), 0.5), 3) for name, o in phases.items()},
        offline_throughput_ratio={
            name: round((phases[name].kernels_per_second or 0.0) / alone, 4) for name in ("uncontrolled", "controlled")
        },
        left_over_ratio=round(1 - busy_ratio(settled(online.requests), seconds - WARM_UP_SECONDS), 4),
        attribution_error_ratio=mean_error(watch.pairs),
        launches_missed=sum(abs(launched[key] - count) for key, count in watch.launches.items()),
        pauses=sum(watch.pauses.values()),
        requests=len(settled(online.requests)),
        stolen_ratio=round(stolen_ratio, 4),
    )

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about launches that the agent's programs in the kernel hold: a fixed share, the gate, and the agent's end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from conformance.checks.stopping.agent import AgentProcess, running_agent
from conformance.checks.stopping.cgroups import ControlGroup, control_groups
from conformance.checks.stopping.holds import StuckError, is_stopped
from conformance.checks.stopping.timeline import Timeline, median, p90
from conformance.clients import launcher
from conformance.clients.launcher import Client, Online
from conformance.host import Host, Unavailable
from conformance.report.model import Row, Verdict, judged, skipped
from tools.harness.wait import until

SHARE: Final = "agent, law fixed: offline rate with a share of 50 %, of the rate before"
SHARE_OFTEN: Final = "agent, law fixed: the same for work that waits after every 10 ms of it"
GATE: Final = "agent, gate: last offline launch let through after an online request began"
TERM: Final = "agent ended by SIGTERM: the stopped offline process runs after"
KILL: Final = "agent ended by SIGKILL: the stopped offline process runs after"
STAYS: Final = "agent gone: how often the offline process was seen stopped afterwards"
WHATS: Final = (SHARE, SHARE_OFTEN, GATE, TERM, KILL, STAYS)
_PROMISED_MS: Final = 100.0
_SHARE, _OFF = 0.5, 0.12
_SETTLED_SECONDS: Final = 0.4  # stopped for so long: it is not one of the short stops under the policy before
_LEARNED_SECONDS: Final = 1.0  # how long a launch takes, and what the processes want
_PATIENCE_SECONDS: Final = 20.0
_LIGHT: Final = ("--rate", "20", "--kernels", "5", "--kernel-us", "100", "--blocks", "64")
_NEVER_RESTS: Final = ("--rate", "10", "--kernels", "40", "--kernel-us", "5000", "--blocks", "64")
_BURSTS: Final = ("--rate", "60", "--kernels", "6", "--kernel-us", "500", "--blocks", "64", "--seed", "5")

_POLICY: Final = """\
version: 1
enforce: {enforce}
online:
  - name: service
    match: {{cgroup: "{online}*"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 1s, window: 10s}}
offline:
  - name: batch
    match: {{cgroup: "{offline}*"}}
    law: {law}
    limits: {{max_pause: {max_pause}, floor: 0%}}
    ladder: [{ladder}]
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """Both containers, the device's pace as options, and how long each measurement lasts."""

    host: Host
    groups: Mapping[str, ControlGroup]
    pace: Sequence[str]
    seconds: float

    def policy(self, law: str, ladder: str, enforce: bool = True, max_pause: str = "200ms") -> str:
        """The policy's YAML."""
        return _POLICY.format(
            enforce=str(enforce).lower(),
            online=self.groups["online"].path,
            offline=self.groups["offline"].path,
            law=law,
            ladder=ladder,
            max_pause=max_pause,
        )

    @contextmanager
    def offline(self, kernel_us: int, queue: int, *more: str) -> Iterator[Client]:
        """Kernels without end."""
        options = ("--kernel-us", str(kernel_us), "--queue", str(queue), *self.pace, *more)
        command = launcher.own(self.host, "steps", *options)
        made = launcher.start(self.host, [*self.groups["offline"].entering, *command], launcher.importing())
        try:
            yield made
        finally:
            made.end()

    @contextmanager
    def online(self, arguments: Sequence[str]) -> Iterator[Online]:
        """Requests from now on."""
        made = Online(self.host, (*arguments, *self.pace), prefix=self.groups["online"].entering)
        try:
            made.go()
            yield made
        finally:
            self.host.end(made.process)


def rows(item: str, host: Host, pace: Sequence[str]) -> Iterator[Row]:
    """Two agents: one ends by SIGKILL, one by SIGTERM."""
    if host.bpf is not None:
        raise Unavailable(host.bpf)
    with _groups() as groups:
        stage = Stage(host, groups, pace, 0.5 if host.quick else 1.5)
        watching = stage.policy("headroom", "pace", enforce=False)
        with running_agent(host, "warden-killed", watching) as agent:
            yield _gate(item, stage, agent)
            kill_ms, seen = _ended(stage, agent, signal.SIGKILL)
            verdict = judged(kill_ms <= _PROMISED_MS)
            yield Row(item=item, what=KILL, verdict=verdict, figure=kill_ms, unit="ms", baseline=_PROMISED_MS)
            yield Row(item=item, what=STAYS, verdict=judged(seen == 0), figure=seen, baseline=0)
        if host.quick:
            yield from (skipped(item, what, "left out with --quick") for what in (SHARE, SHARE_OFTEN, TERM))
        else:
            with running_agent(host, "warden", watching) as agent:
                yield _share(item, stage, agent, SHARE, 500, 100)
                yield _share(item, stage, agent, SHARE_OFTEN, 1000, 10)
                term_ms, _ = _ended(stage, agent, signal.SIGTERM)
                yield Row(item=item, what=TERM, verdict=Verdict.MEASURED, figure=term_ms, unit="ms")


@contextmanager
def _groups() -> Iterator[Mapping[str, ControlGroup]]:
    """Cgroups of both sides, in v2 where it is mounted, else in v1."""
    names = ("online", "offline")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(control_groups(2, names))
        except Unavailable:
            made = stack.enter_context(control_groups(1, names))
        yield made


def _share(item: str, stage: Stage, agent: AgentProcess, what: str, kernel_us: int, launches: int) -> Row:
    """Both rates beside the same light online load. The work is waited for after so many launches."""
    with stage.online(_LIGHT), stage.offline(kernel_us, launches, "--drain", str(launches)) as offline:
        agent.wait_for(2)
        before = _window(stage.seconds)
        agent.take(stage.policy(f"fixed\n    share: {_SHARE}", "pace"))
        time.sleep(_LEARNED_SECONDS)
        after = _window(stage.seconds)
        agent.take(stage.policy("headroom", "pace", enforce=False))
        line = Timeline.of(offline.finish())
    full, given = line.rate(*before), line.rate(*after)
    if not full:
        raise StuckError("the offline program launched nothing before the policy came")
    ratio = round(given / full, 3)
    note = f"{full:.0f} kernels a second before, {given:.0f} afterwards"
    verdict = judged(abs(ratio - _SHARE) <= _OFF)
    return Row(item=item, what=what, verdict=verdict, figure=ratio, unit="ratio", baseline=_SHARE, note=note)


def _gate(item: str, stage: Stage, agent: AgentProcess) -> Row:
    """Bursts of an online program beside one that launches all the time."""
    from bench.latency.reaction_times import gate_reactions_ns

    with stage.online(_BURSTS) as online, stage.offline(50, 8) as offline:
        agent.wait_for(2)
        agent.take(stage.policy("headroom", "gate"))
        time.sleep(0.5)
        since, until_ns = _window(stage.seconds * 2)
        found = online.finish()
        agent.take(stage.policy("headroom", "gate", enforce=False))
        record = offline.finish()
    bursts = [(one.begun_ns, one.ended_ns) for one in found if since <= one.begun_ns and one.ended_ns < until_ns]
    reactions = [ns / 1e3 for ns in gate_reactions_ns(bursts, record["launched_ns"])]
    passed = sum(reaction > 0 for reaction in reactions)
    note = f"{len(bursts)} requests, in {passed} of which any came through; p90 {p90(reactions) or 0:.0f} µs"
    verdict = Verdict.MEASURED if reactions else Verdict.FAILED
    return Row(item=item, what=GATE, verdict=verdict, figure=median(reactions), unit="µs", note=note)


def _ended(stage: Stage, agent: AgentProcess, number: signal.Signals) -> tuple[float, int]:
    """ms from the signal until the offline process, stopped by the gate for 10 s, runs; how often it stopped again."""
    with stage.online(_NEVER_RESTS), stage.offline(500, 8) as offline:
        agent.take(stage.policy("headroom", "gate", max_pause="10s"))
        _until_stopped(offline.tgid)
        begun = time.monotonic_ns()
        agent.process.send_signal(number)
        ms = (_while(lambda: is_stopped(offline.tgid), _PATIENCE_SECONDS) - begun) / 1e6
        until(agent.has_ended, "the agent to end", _PATIENCE_SECONDS, error=StuckError)
        seen, ends = 0, time.monotonic() + stage.seconds
        while time.monotonic() < ends:
            seen += is_stopped(offline.tgid)
            time.sleep(0.001)
        line, now = Timeline.of(offline.finish()), time.monotonic_ns()
    if not line.launches(begun, now):
        raise StuckError("the offline program launched nothing after the agent's end")
    return round(ms, 3), seen


def _until_stopped(tgid: int) -> None:
    """For a while, so that it is the stop of the policy that was just taken."""
    since = time.monotonic()

    def settled() -> bool:
        nonlocal since
        if not is_stopped(tgid):
            since = time.monotonic()
        return time.monotonic() - since > _SETTLED_SECONDS

    until(settled, "the offline process to be stopped for a while", _PATIENCE_SECONDS, 0.001, StuckError)


def _while(holds: Callable[[], bool], seconds: float) -> int:
    """When it was last seen so: a slow look can only make it shorter. StuckError after so many seconds."""
    last = time.monotonic_ns()
    deadline = last + round(seconds * 1e9)
    while holds():
        last = time.monotonic_ns()
        if last > deadline:
            raise StuckError(f"the offline process was still stopped after {seconds:g} s")
    return last


def _window(seconds: float) -> tuple[int, int]:
    since = time.monotonic_ns()
    time.sleep(seconds)
    return since, time.monotonic_ns()

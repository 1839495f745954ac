# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What becomes of a signal's troubles: a reason in the decision, a count for the rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agent.core.model import Container, ContainerKey, DeviceUuid, Snapshot
from enforce.controller.decision import Decisions, ShareDecision
from enforce.loop import with_troubles
from enforce.model import OnlineOn, Reading, Share
from enforce.policy.load import parse
from enforce.policy.model import ContainerFacts, OfflineRule, OnlineRule, PrometheusSource, Slo, UprobeSource
from enforce.signals.registry import by_rule
from enforce.workloads import Workload

POLICY = parse(
    """\
version: 1
online:
  - name: chat
    match: {pod: a}
    slo: {signal: prometheus, url: "http://h/m", metric: m, quantile: 0.99, target: 50ms, window: 10s}
  - name: twin
    match: {pod: b}
    slo: {signal: prometheus, url: "http://h/m", metric: m, quantile: 0.9, target: 90ms, window: 10s}
  - name: ranker
    match: {pod: c}
    slo: {signal: uprobe, binary: /b, symbol: f, quantile: 0.99, target: 50ms, window: 10s}
  - name: plain
    match: {pod: d}
    slo: {signal: gpu_wait, quantile: 0.99, target: 50ms, window: 10s}
offline:
  - {name: batch, match: {pod: z}}
""",
    "p",
)
CHAT = ContainerKey("runc:chat")
READING = Reading(0, 0.99, 1e6, 30, None, None, 0)


@dataclass(slots=True)
class Mute:
    """A signal that knows why it has nothing to say, or does not."""

    why: str | None
    name: str = "prometheus"

    def read(self, snapshot: Snapshot, container: ContainerKey, slo: Slo, now_ns: int) -> Reading | None:
        return None

    def trouble(self, container: ContainerKey) -> str | None:
        return self.why if container == CHAT else None

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        return None


def reason_with(why: str | None, reading: Reading | None) -> str:
    online, offline = POLICY.online[0], POLICY.offline[0]
    assert isinstance(online, OnlineRule)
    assert isinstance(offline, OfflineRule)
    container = Container(ContainerKey("runc:z"), "z", "runc")
    workload = Workload(container, POLICY.classify(ContainerFacts(container)), (), frozenset())
    ruler = OnlineOn(CHAT, DeviceUuid("GPU-0"), online.slo, reading)
    undecided = ShareDecision(workload, offline, ruler, Share(1.0, 1, "no reading: holding"), None)
    (decision,) = with_troubles(Decisions((undecided,), {}), {"prometheus": Mute(why)}).shares
    return decision.share.reason


def test_a_decision_without_a_reading_has_the_reason_why_there_is_none() -> None:
    assert reason_with("h was not answered in time", None) == (
        "no reading: holding (signal prometheus: h was not answered in time)"
    )


def test_a_decision_with_a_reading_or_after_mere_silence_has_the_laws_reason_alone() -> None:
    assert reason_with("h was not answered in time", READING) == "no reading: holding"
    assert reason_with(None, None) == "no reading: holding"


def test_failures_are_counted_for_each_rule_that_has_that_source() -> None:
    page, function = PrometheusSource("http://h/m", "m"), UprobeSource("/b", symbol="f")
    elsewhere = PrometheusSource("http://other/m", "m")
    assert by_rule(POLICY, {(page, "timeout"): 3, (function, "refused"): 1, (elsewhere, "status"): 9}) == {
        "chat:prometheus:timeout": 3,
        "twin:prometheus:timeout": 3,
        "ranker:uprobe:refused": 1,
    }

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is recorded at each decision, and its effect one SLO window later."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.core.model import Container, ContainerKey, DeviceUuid, EnforcementStatus
from enforce.audit import log_reader, text
from enforce.audit.decision_log import DecisionLog
from enforce.audit.history import DecisionHistory
from enforce.audit.model import SecondQuantile
from enforce.audit.recorder import MOST_WAITING, DecisionRecorder, Effects
from enforce.audit.status import ContainerFigures, Paused, statuses
from enforce.controller.decision import DecisionInputs, Decisions, ShareDecision
from enforce.model import OnlineOn, Reading, Share
from enforce.policy.load import parse
from enforce.policy.model import Classification, Role
from enforce.workloads import Workload
from gpuwarden.plan import Planned, cells, document, notes, show
from tests.support.decisions import BASE, NS, at

POLICY = parse(
    """
version: 1
online: [{name: chat, match: {container: chat}, slo: {signal: gpu_wait, quantile: 0.99, target: 50ms, window: 10s}}]
offline: [{name: training, match: {container: train}, law: headroom, ladder: [gate, pace, freeze]}]
""",
    "policy.yaml",
)
GPU = DeviceUuid("GPU-1")
CHAT = Container(ContainerKey("docker:chat"), "chat", "docker")
TRAIN = Container(ContainerKey("docker:train"), "train", "docker", pod="train-0", namespace="batch")
WORKLOADS = {
    CHAT.key: Workload(CHAT, Classification(Role.ONLINE, POLICY.online[0], "rule chat"), (), frozenset({GPU})),
    TRAIN.key: Workload(TRAIN, Classification(Role.OFFLINE, POLICY.offline[0], "rule training"), (), frozenset({GPU})),
}


def reading(latency_ns: float | None) -> Reading:
    return Reading(0, 0.99, latency_ns, 120, None, None, 0)


def decided(latency_ns: float, share: float, queued_ns: int, reason: str) -> Decisions:
    ruler = OnlineOn(CHAT.key, GPU, POLICY.online[0].slo, reading(latency_ns))
    share_ = Share(share, queued_ns, reason)
    return Decisions((ShareDecision(WORKLOADS[TRAIN.key], POLICY.offline[0], ruler, share_, None),), {})


class Recorded:
    """A recorder, and the lines that it has written when it is closed."""

    def __init__(self, folder: Path, **of: Any) -> None:
        self.path = folder / "decisions"
        self.log = DecisionLog(str(self.path))
        self.history = DecisionHistory(now=lambda: (11 * NS, 0))  # the machine may have been up for more than an hour
        self.recorder = DecisionRecorder(self.log, self.history, acts=True, **of)

    def at(self, seconds: float, latency_ns: float, share: float, queued_ns: int, reason: str, stopped: float) -> None:
        paused = {TRAIN.key: Paused(int(stopped), stopped, None)}
        readings = {CHAT.key: reading(latency_ns)}
        now_ns = int(seconds * NS)
        self.recorder.record(WORKLOADS, decided(latency_ns, share, queued_ns, reason), readings, paused, now_ns)

    def lines(self) -> list[dict[str, Any]]:
        self.log.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def test_a_decision_has_what_was_before_its_ruler_and_its_rungs(tmp_path: Path) -> None:
    recorded = Recorded(
        tmp_path, in_force=lambda _key: frozenset({"freeze"}), troubles=lambda _key: {"evict": "no grace"}
    )
    recorded.at(0, 40e6, 1.0, 2_000_000, "slack 20%: waiting to grow", 0.0)
    recorded.at(0.1, 58e6, 0.7, 1_000_000, "target missed by 16%: smaller share", 0.0)
    first, second = recorded.lines()
    assert (first["kind"], first["share_before"], first["max_queued_before_ns"]) == ("decision", None, None)
    assert (second["share_before"], second["share_after"]) == (1.0, 0.7)
    assert (second["max_queued_before_ns"], second["max_queued_ns"]) == (2_000_000, 1_000_000)
    assert (second["ruler"], second["ruler_name"]) == (CHAT.key, "chat")
    assert (second["name"], second["pod"], second["namespace"]) == ("train", "train-0", "batch")
    assert second["rungs"] == ["gate", "pace", "freeze"]
    assert second["troubles"] == {"evict": "no grace"}


def test_one_window_later_a_line_has_the_effect_of_the_decision(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.at(0, 58e6, 0.7, 1_000_000, "target missed by 16%: smaller share", 1.0)
    recorded.at(9.9, 50e6, 0.7, 1_000_000, "target missed by 16%: smaller share", 3.0)
    recorded.at(10.0, 43e6, 0.8, 1_000_000, "slack 14%: larger share", 3.5)
    lines = recorded.lines()
    (effect,) = [line for line in lines if line["kind"] == "effect"]
    decision = lines[0]
    assert (effect["container"], effect["decision_wall_ns"]) == (decision["container"], decision["wall_ns"])
    assert (effect["latency_ns"], effect["slack_ratio"], effect["samples"]) == (43e6, 0.14, 120)
    assert (effect["window_ns"], effect["share"], effect["paused_ratio"]) == (10 * NS, 0.8, 0.25)
    story = recorded.history.explain(TRAIN.key).story
    assert story is not None
    brought = story.intervals[0].brought
    assert brought is not None
    assert (brought.latency_before_ns, brought.latency_ns) == (58e6, 43e6)


def test_when_all_containers_are_gone_meanwhile_the_effect_is_unknown_and_not_zero(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.at(0, 58e6, 0.7, 1_000_000, "target missed by 16%: smaller share", 1.0)
    recorded.recorder.record({}, Decisions((), {}), {}, {}, 11 * NS)
    effect = recorded.lines()[-1]
    assert effect["kind"] == "effect"
    assert effect["latency_ns"] is effect["slack_ratio"] is effect["share"] is effect["paused_ratio"] is None


def test_what_is_done_for_another_cause_than_latency_is_logged_too(tmp_path: Path) -> None:
    why = ["memory: 41 GiB of 40 GiB: held at its next allocation"]
    recorded = Recorded(tmp_path, in_force=lambda _key: frozenset({"hold"}), reasons=lambda _key: why)
    recorded.recorder.record(WORKLOADS, Decisions((), {}), {}, {}, 0)
    recorded.recorder.record(WORKLOADS, Decisions((), {}), {}, {}, NS)
    (line,) = recorded.lines()
    assert (line["container"], line["ruler"], line["rungs"], line["reason"]) == (TRAIN.key, "", ["hold"], why[0])
    story = recorded.history.explain(TRAIN.key).story
    assert story is not None
    (block,) = text.blocks(story, None)
    assert ("by", "hold; rule training, law headroom") in block.rows
    assert "share" not in block.head


def test_other_reasons_stand_beside_the_laws(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, reasons=lambda _key: ("GPU-1 is unhealthy: no new work",))
    recorded.at(0, 40e6, 1.0, 2_000_000, "slack 20%: waiting to grow", 0.0)
    (line,) = recorded.lines()
    assert line["reason"] == "slack 20%: waiting to grow; GPU-1 is unhealthy: no new work"


def test_effects_that_wait_are_bounded_and_what_found_no_room_is_counted() -> None:
    effects = Effects()
    for n in range(MOST_WAITING + 5):
        effects.expect(replace(BASE, container=f"docker:{n}"), POLICY.online[0].slo, n)
    assert effects.skipped == 5
    assert len(effects.due(10 * NS + MOST_WAITING)) == MOST_WAITING
    assert effects.due(1 << 62) == []


def test_a_plan_is_a_line_for_people_with_what_stands_in_the_way_and_one_for_programs() -> None:
    decisions = decided(58e6, 0.35, 1_000_000, "target missed by 16%: smaller share")
    inputs = DecisionInputs(WORKLOADS, {CHAT.key: reading(58e6)}, {})
    figures = ContainerFigures({key: Paused(0, 0.0, None) for key in WORKLOADS})
    found = statuses(inputs, decisions, figures)
    rungs = {"gate": None, "pace": None, "freeze": "its cgroup holds other processes"}
    decision = at(0, latency_ns=58e6, slack_ratio=-0.16, share_after=0.35, max_queued_ns=1_000_000)
    train = Planned(TRAIN.key, "train", found[TRAIN.key], decision, rungs)
    chat = Planned(CHAT.key, "chat", found[CHAT.key], None, {})
    assert cells(train) == ("train", "offline", "training", "server", "58 ms / 50 ms", "-16 %", "35 %", "1 ms")
    assert cells(chat) == ("chat", "online", "chat", "–", "58 ms / 50 ms", "-16 %", "–", "–")
    assert notes(train) == [
        "why: target missed by 16%: smaller share",
        "ladder: gate, pace",
        "freeze cannot: its cgroup holds other processes",
    ]
    out = io.StringIO()
    show([chat, train], False, out)
    assert "the policy has `enforce: false`" in out.getvalue()
    assert max(map(len, out.getvalue().split("\n"))) <= 80
    line = json.loads(json.dumps(document(train)))
    assert (line["container"], line["role"], line["share_ratio"]) == ("train", "offline", 0.35)
    assert (line["decision"]["max_queued_ns"], line["ladder"]["freeze"]) == (1_000_000, rungs["freeze"])


ALSO = replace(
    POLICY.online[0].slo, also=replace(POLICY.online[0].slo, quantile=0.5, target_ns=8_000_000)
)  # beside p99 within 50 ms


def decided_by(p99_ns: float, p50_ns: float, binding: float) -> Decisions:
    both = replace(reading(p99_ns), also=replace(reading(p50_ns), quantile=0.5))
    share = Share(0.7, 500_000, "target missed by 16%: smaller share", quantile=binding)
    ruler = OnlineOn(CHAT.key, GPU, ALSO, both)
    return Decisions((ShareDecision(WORKLOADS[TRAIN.key], POLICY.offline[0], ruler, share, None),), {})


def test_of_two_quantiles_the_one_that_bound_is_recorded_as_such_and_the_other_beside_it(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    online = replace(POLICY.online[0], slo=ALSO)
    workloads = {**WORKLOADS, CHAT.key: Workload(CHAT, Classification(Role.ONLINE, online), (), frozenset({GPU}))}
    for seconds, binding in ((0, 0.5), (1, 0.5), (2, 0.99), (12, 0.99)):
        decisions = decided_by(31e6, 9.3e6, binding)
        readings = {CHAT.key: decisions.shares[0].ruler.reading}
        recorded.recorder.record(workloads, decisions, readings, {}, seconds * NS)
    story, kept = (recorded.history.explain(key).story for key in (TRAIN.key, CHAT.key))
    first, changed, effect, *_ = recorded.lines()
    assert (first["quantile"], first["latency_ns"], first["target_ns"]) == (0.5, 9.3e6, 8_000_000)
    assert first["slack_ratio"] == -0.1625
    assert first["other"] == {"quantile": 0.99, "latency_ns": 31e6, "target_ns": 50_000_000, "slack_ratio": 0.38}
    assert (changed["quantile"], changed["other"]["quantile"]) == (0.99, 0.5)
    assert (effect["kind"], effect["latency_ns"], effect["target_ns"]) == ("effect", 9.3e6, 8_000_000)
    assert story is not None
    assert kept is not None
    told = [row for block in text.blocks(story, None) for row in block.rows if row[0] == "for"]
    assert [line for _, line in told] == [
        "chat on GPU-1: p50 within 8 ms; it was up to 9.3 ms, over it for 2.0 s",
        "chat on GPU-1: p99 within 50 ms; it was up to 31 ms",
    ]
    rows = text.blocks(kept, None)[0].rows
    assert rows == (("was", "p99 31 ms, promised 50 ms by gpu_wait"), ("and", "p50 9.3 ms, promised 8 ms"))
    assert "missed for" in text.blocks(kept, None)[0].head
    assert [one.name for one in kept.slowed] == ["train"]


def test_a_decision_log_gives_back_both_quantiles(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.recorder.record(WORKLOADS, decided_by(31e6, 9.3e6, 0.5), {}, {}, 0)
    line = recorded.lines()[0]
    history, bad = log_reader.read(recorded.path, line["wall_ns"] + NS)
    story = history.explain(CHAT.key).story
    assert bad == 0
    assert story is not None
    (kept,) = story.kept
    assert (kept.quantile, kept.latency_high_ns) == (0.99, 31e6)
    assert kept.also == SecondQuantile(0.5, 8_000_000, 9.3e6, 9.3e6)
    assert kept.missed_seconds == 1.0
    assert [one.name for one in story.slowed] == ["train"]


def test_a_plan_names_the_quantile_that_would_bind(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.recorder.record(WORKLOADS, decided_by(31e6, 9.3e6, 0.5), {}, {}, 0)
    decision = recorded.recorder._last[TRAIN.key]
    planned = Planned(TRAIN.key, "train", EnforcementStatus("offline", "training"), decision, {})
    assert "9.3 ms / 8 ms at p50" in cells(planned)
    assert document(planned)["decision"]["other"]["quantile"] == 0.99  # type: ignore[index]

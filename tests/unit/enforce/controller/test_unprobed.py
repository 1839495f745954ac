# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is asked for containers whose work is not seen: by their rule, and only where an online one is in need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, ContainerUsage, DeviceUuid, Snapshot
from enforce.actuators.ladder import EVICT_AFTER_NS
from enforce.controller.decision import NO_DECISIONS, DecisionInputs
from enforce.controller.escalation import NEED_HOLD_NS, UNSEEN, Escalation, UnprobedRungs
from enforce.model import Reading
from enforce.policy.model import Limits, Match, OfflineRule, OnlineRule, Role, Slo
from enforce.workloads import Workload
from tests.support.decisions import GPU, workload_of

JOB, CHAT = ContainerKey("c:job"), ContainerKey("c:chat")
TARGET_NS = 50_000_000
ONLINE = OnlineRule("chat", Match(), Slo("gpu_wait", 0.99, TARGET_NS, 10 * NS_PER_SECOND, 20))
LIMITS = Limits(None, 0.05, 1, None)
UNSEEN_JOB = {GPU: True}


def rule(unprobed: str) -> OfflineRule:
    return OfflineRule("job", Match(), "headroom", None, 1.0, LIMITS, ("gate", "pace"), unprobed)


def inputs(
    unprobed: str, *, latency_ns: float | None = None, requests: int = 0, busy: float | None = None
) -> DecisionInputs:
    reading = Reading(1, 0.99, latency_ns, requests, latency_ns, latency_ns, requests)
    workloads: dict[ContainerKey, Workload] = {
        JOB: workload_of(JOB, Role.OFFLINE, rule(unprobed)),
        CHAT: workload_of(CHAT, Role.ONLINE, ONLINE),
    }
    return DecisionInputs(workloads, {CHAT: reading}, {}, busy={} if busy is None else {GPU: busy})


def snapshot(unprobed: dict[DeviceUuid, bool], key: ContainerKey = JOB) -> Snapshot:
    container = workload_of(key, Role.UNMATCHED, None).container
    return Snapshot(0, 0, NS_PER_SECOND, containers=(ContainerUsage(container, (), (), unprobed=unprobed),))


@pytest.mark.parametrize("need", [{"latency_ns": 2.0 * TARGET_NS}, {"requests": 1}, {"busy": 0.1}])
def test_it_is_frozen_while_an_online_container_misses_its_target_or_has_requests(need: dict[str, float]) -> None:
    rungs = UnprobedRungs()
    assert rungs.step(snapshot(UNSEEN_JOB), inputs("freeze"), 0) == {}
    assert rungs.step(snapshot(UNSEEN_JOB), inputs("freeze", **need), 1) == {JOB: {"freeze": UNSEEN}}  # type: ignore[arg-type]
    assert rungs.step(snapshot(UNSEEN_JOB), inputs("freeze"), NEED_HOLD_NS) == {JOB: {"freeze": UNSEEN}}
    assert rungs.step(snapshot(UNSEEN_JOB), inputs("freeze"), 1 + NEED_HOLD_NS) == {}


@pytest.mark.parametrize("unprobed", [{}, {GPU: False}, {DeviceUuid("GPU-1"): True}])
def test_one_that_is_seen_or_unknown_or_unseen_elsewhere_is_left_alone(unprobed: dict[DeviceUuid, bool]) -> None:
    assert UnprobedRungs().step(snapshot(unprobed), inputs("freeze", busy=1.0), 0) == {}


def test_it_is_evicted_after_the_ladders_patience_and_not_while_the_need_was_interrupted() -> None:
    rungs, busy = UnprobedRungs(), inputs("evict", busy=1.0)
    for second in range(EVICT_AFTER_NS // NS_PER_SECOND):
        assert rungs.step(snapshot(UNSEEN_JOB), busy, second * NS_PER_SECOND) == {}
    assert rungs.step(snapshot(UNSEEN_JOB), busy, EVICT_AFTER_NS) == {JOB: {"evict": UNSEEN}}
    assert rungs.step(snapshot(UNSEEN_JOB), inputs("evict"), EVICT_AFTER_NS + NEED_HOLD_NS) == {}
    assert rungs.step(snapshot(UNSEEN_JOB), busy, EVICT_AFTER_NS + NEED_HOLD_NS + 1) == {}


@pytest.mark.parametrize(("unprobed", "lines"), [("report", 1), ("ignore", 0), ("freeze", 1)])
def test_it_is_logged_once_unless_its_rule_ignores_it(
    unprobed: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    rungs = UnprobedRungs()
    for now in range(3):
        asked = rungs.step(snapshot(UNSEEN_JOB), inputs(unprobed, busy=1.0), now)
        assert bool(asked) is (unprobed == "freeze")
    assert [record.message for record in caplog.records if "unprobed" in record.message][1:] == []
    assert len(caplog.records) == lines


def test_an_online_container_that_works_unseen_is_never_acted_upon() -> None:
    assert UnprobedRungs().step(snapshot(UNSEEN_JOB, CHAT), inputs("freeze", busy=1.0), 0) == {}


def test_the_rung_need_not_be_in_the_ladder_and_is_allowed_to_no_other_container() -> None:
    class Able:
        name = "freeze"

        def obstacle(self, _: object) -> None:
            return None

    workloads = inputs("freeze").workloads
    escalation = Escalation({"freeze": Able()}, None)  # type: ignore[dict-item]
    escalation.step(workloads, NO_DECISIONS, 0, [{JOB: {"freeze": "for memory"}}])
    assert escalation.status(JOB).rungs == ()
    escalation.step(workloads, NO_DECISIONS, 0, (), {JOB: {"freeze": UNSEEN}, CHAT: {"freeze": UNSEEN}})
    assert escalation.status(JOB).reasons == {"freeze": UNSEEN}
    assert escalation.status(CHAT).rungs == ()
    listed = replace(rule("freeze"), ladder=("freeze", "swap", "evict"))
    escalation = Escalation({"freeze": Able(), "swap": Able()}, None)  # type: ignore[dict-item]
    both = {JOB: workload_of(JOB, Role.OFFLINE, listed)}
    escalation.step(both, NO_DECISIONS, 0, [{JOB: {"swap": "for memory"}}], {JOB: {"freeze": UNSEEN}})
    assert escalation.status(JOB).rungs == ("swap",)  # of two steps the stronger

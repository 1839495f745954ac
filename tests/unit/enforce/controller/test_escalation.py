# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who is wished what: offline containers only, beside an online one, and only what their rule lists."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agent.core.model import ContainerKey
from agent.node.procfs import Procfs
from enforce.actuators.executor import RungExecutor
from enforce.actuators.ladder import CLIMB_AFTER_NS, EVICT_AFTER_NS, HOLD_NS
from enforce.actuators.undo import UNDO
from enforce.controller.decision import Decisions, ShareDecision
from enforce.controller.escalation import Escalation
from enforce.ledger.entries import LedgerEntry, UndoOutcome
from enforce.ledger.ledger import Ledger, read
from enforce.model import OnlineOn, Share, Subject
from enforce.policy.model import Limits, Match, OfflineRule, OnlineRule, Role, Slo
from enforce.workloads import Workload
from tests.support.decisions import GPU, workload_of

SLO = Slo("gpu_wait", 0.99, 5_000_000, 10_000_000_000, 20)
TRAINING, CHAT = ContainerKey("c:training"), ContainerKey("c:chat")


class Mark:
    """A rung that does nothing."""

    def __init__(self, name: str) -> None:
        self.name, self.obstacle_now, self.subjects = name, None, list[ContainerKey]()

    def obstacle(self, subject: Subject) -> str | None:
        return self.obstacle_now

    def intents(self, subject: Subject) -> Sequence[LedgerEntry]:
        return ()

    def apply(self, subject: Subject) -> None:
        self.subjects.append(subject.container.key)


def offline(*ladder: str) -> OfflineRule:
    return OfflineRule("training", Match(), "headroom", None, 1.0, Limits(None, 0.05, 1, None), ladder)


def decided(training: Workload, rule: OfflineRule, exhausted: bool) -> Decisions:
    ruler = OnlineOn(CHAT, GPU, SLO, None)
    return Decisions((ShareDecision(training, rule, ruler, Share(0.05, 1, "target missed", exhausted), None),), {})


@pytest.fixture
def marks() -> dict[str, Mark]:
    return {name: Mark(name) for name in ("freeze", "evict", "mps", "swap")}


@pytest.fixture
def rungs(marks: dict[str, Mark], tmp_path: Path) -> Iterator[RungExecutor]:
    rungs = RungExecutor(marks, Ledger(tmp_path / "ledger"))
    yield rungs
    rungs.release_all()


def climb(escalation: Escalation, ladder: tuple[str, ...], *spans: tuple[bool, int]) -> tuple[str, ...]:
    """Where a container stands after so long with the share exhausted or not."""
    rule = offline(*ladder)
    training = workload_of(TRAINING, Role.OFFLINE, rule)
    now = 0
    for exhausted, span_ns in spans:
        end = now + span_ns
        while now < end:
            now += 100_000_000
            escalation.step({TRAINING: training}, decided(training, rule, exhausted), now)
    return escalation.status(TRAINING).rungs


def test_without_enforcing_the_status_has_what_would_be_done(marks: dict[str, Mark]) -> None:
    escalation = Escalation(marks, None)
    ladder = ("gate", "pace", "freeze", "evict")
    assert climb(escalation, ladder, (True, CLIMB_AFTER_NS // 2)) == ()
    assert climb(Escalation(marks, None), ladder, (True, 2 * CLIMB_AFTER_NS)) == ("freeze",)
    assert climb(Escalation(marks, None), ladder, (True, CLIMB_AFTER_NS + EVICT_AFTER_NS + 10**9)) == ("evict",)
    assert climb(Escalation(marks, None), ladder, (True, 2 * CLIMB_AFTER_NS), (False, 2 * HOLD_NS)) == ()
    assert not any(mark.subjects for mark in marks.values())


def test_a_rule_without_the_rung_is_never_given_it(marks: dict[str, Mark]) -> None:
    assert climb(Escalation(marks, None), ("gate", "pace"), (True, 100 * CLIMB_AFTER_NS)) == ()


def test_mps_is_wished_from_the_start_beside_an_online_container(marks: dict[str, Mark]) -> None:
    escalation = Escalation(marks, None)
    assert climb(escalation, ("pace", "mps"), (False, 10**9)) == ("mps",)
    rule = offline("pace", "mps")
    escalation.step({TRAINING: workload_of(TRAINING, Role.OFFLINE, rule)}, Decisions((), {}), 2 * 10**9)
    assert escalation.status(TRAINING).rungs == ()


def test_a_rung_with_an_obstacle_is_skipped_and_reported(marks: dict[str, Mark]) -> None:
    marks["freeze"].obstacle_now = "it has no cgroup of its own"  # type: ignore[assignment]
    escalation = Escalation(marks, None)
    span = EVICT_AFTER_NS + 10 * CLIMB_AFTER_NS
    assert climb(escalation, ("freeze", "evict"), (True, span)) == ("evict",)
    escalation = Escalation(marks, None)
    assert climb(escalation, ("freeze",), (True, 2 * CLIMB_AFTER_NS)) == ()
    assert escalation.status(TRAINING).troubles == {"freeze": "it has no cgroup of its own"}


@pytest.mark.parametrize("limit_bytes", [1 << 30, None])
def test_without_return_probes_a_memory_limit_reports_that_nothing_is_denied_or_held(
    marks: dict[str, Mark], limit_bytes: int | None
) -> None:
    rule = replace(offline("deny", "hold", "evict"), limits=Limits(limit_bytes, 0.05, 1, None))
    escalation = Escalation(marks, None, "return probes are off: why")
    escalation.step({TRAINING: workload_of(TRAINING, Role.OFFLINE, rule)}, Decisions((), {}), 0)
    expected = {"deny": "return probes are off: why", "hold": "return probes are off: why"}
    assert escalation.status(TRAINING).troubles == (expected if limit_bytes else {})


def test_only_offline_containers_are_ever_acted_upon(rungs: RungExecutor, marks: dict[str, Mark]) -> None:
    escalation = Escalation(marks, rungs)
    online = OnlineRule("chat", Match(), SLO)
    here = {
        CHAT: workload_of(CHAT, Role.ONLINE, online),
        ContainerKey("c:safe"): workload_of(ContainerKey("c:safe"), Role.PROTECTED, None),
        ContainerKey("c:strange"): workload_of(ContainerKey("c:strange"), Role.UNMATCHED, None),
        TRAINING: workload_of(TRAINING, Role.OFFLINE, offline("swap", "evict")),
    }
    wish = {key: {"swap": "short of memory", "freeze": "x", "mps": "x"} for key in here}
    escalation.step(here, Decisions((), {}), 1, [wish, {key: {"evict": "the device is broken"} for key in here}])
    escalation.release()
    assert {key for mark in marks.values() for key in mark.subjects} <= {TRAINING}
    escalation.step(here, Decisions((), {}), 2, [wish])
    assert [escalation.status(key).reasons for key in here] == [{}, {}, {}, {"swap": "short of memory"}]


def test_of_two_wishes_the_stronger_step_is_taken(marks: dict[str, Mark]) -> None:
    escalation = Escalation(marks, None)
    here = {TRAINING: workload_of(TRAINING, Role.OFFLINE, offline("swap", "evict", "freeze"))}
    wishes = [{TRAINING: {"swap": "short of memory"}}, {TRAINING: {"evict": "the device is broken", "freeze": "x"}}]
    escalation.step(here, Decisions((), {}), 1, wishes)
    assert escalation.status(TRAINING).reasons == {"evict": "the device is broken"}


def test_letting_go_waits_for_no_undoing_and_releasing_does(
    marks: dict[str, Mark], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, begun, applied = threading.Event(), threading.Event(), threading.Event()

    def give_back(_entry: LedgerEntry, _proc: Procfs) -> UndoOutcome:
        begun.set()
        assert room.wait(30)
        return UndoOutcome.RESUMED

    swap, path = marks["swap"], tmp_path / "swaps"
    monkeypatch.setitem(UNDO, "swap", replace(UNDO["swap"], undo=give_back))
    monkeypatch.setattr(swap, "intents", lambda subject: [LedgerEntry.at("swap", "/x", subject.container.key, 0)])
    monkeypatch.setattr(swap, "apply", lambda _: applied.set())
    escalation = Escalation(marks, RungExecutor(marks, Ledger(path)))
    here = {TRAINING: workload_of(TRAINING, Role.OFFLINE, offline("swap"))}
    escalation.step(here, Decisions((), {}), 1, [{TRAINING: {"swap": "short of memory"}}])
    assert applied.wait(30)
    ends = time.monotonic() + 30
    while not begun.wait(0.01):  # what is still being climbed is undone by a later call
        assert time.monotonic() < ends
        escalation.begin_release()
    assert escalation.status(TRAINING).rungs == ("swap",)
    assert escalation.status(TRAINING).reasons == {}
    room.set()
    escalation.release()
    assert escalation.status(TRAINING).rungs == ()
    assert read(path) == []


def undone(escalation: Escalation, ladder: tuple[str, ...], *foreign: int) -> tuple[str, ...]:
    """Where a container stands after one such count of foreign resumes each second."""
    rule = offline(*ladder)
    training = workload_of(TRAINING, Role.OFFLINE, rule)
    for second, count in enumerate(foreign, start=1):
        escalation.look({TRAINING: count}, second * 10**9)
        escalation.step({TRAINING: training}, decided(training, rule, exhausted=False), second * 10**9)
    return escalation.status(TRAINING).rungs


def test_a_container_whose_stops_others_keep_ending_is_frozen_if_its_ladder_lists_that(marks: dict[str, Mark]) -> None:
    ladder = ("gate", "pace", "freeze", "evict")
    assert undone(Escalation(marks, None), ladder, 0, 1, 559) == ("freeze",)
    assert undone(Escalation(marks, None), ("gate", "pace", "evict"), 0, 1, 559) == ()


def test_one_foreign_resume_or_many_at_once_freeze_nothing(marks: dict[str, Mark]) -> None:
    assert undone(Escalation(marks, None), ("pace", "freeze"), 0, 80, 80, 80) == ()
    assert undone(Escalation(marks, None), ("pace", "freeze"), 0, 1, *[1] * 30, 2) == ()


def test_after_a_minute_without_foreign_resumes_it_is_stopped_at_its_launches_again(marks: dict[str, Mark]) -> None:
    ladder = ("pace", "freeze")
    assert undone(Escalation(marks, None), ladder, 0, 1, 2, *[2] * 59) == ("freeze",)
    assert undone(Escalation(marks, None), ladder, 0, 1, 2, *[2] * 61) == ()
    assert undone(Escalation(marks, None), ladder, 0, 1, 2, *[2] * 50, *[3] * 50) == ("freeze",)


def test_where_freezing_is_impossible_that_is_reported(marks: dict[str, Mark]) -> None:
    marks["freeze"].obstacle_now = "it has no cgroup of its own"  # type: ignore[assignment]
    escalation = Escalation(marks, None)
    assert undone(escalation, ("pace", "freeze"), 0, 1, 2) == ()
    assert escalation.status(TRAINING).troubles == {"freeze": "it has no cgroup of its own"}


def test_without_an_online_container_nothing_is_frozen_for_undone_stops(marks: dict[str, Mark]) -> None:
    escalation, rule = Escalation(marks, None), offline("pace", "freeze")
    assert undone(escalation, ("pace", "freeze"), 0, 1, 2) == ("freeze",)
    escalation.step({TRAINING: workload_of(TRAINING, Role.OFFLINE, rule)}, Decisions((), {}), 4 * 10**9)
    assert escalation.status(TRAINING).rungs == ()

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who is wished what: offline containers only, beside an online one, and only what their rule lists."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agent.members import Member
from agent.model import Container, ContainerKey, DeviceUuid, Process, ProcessId
from agent.procfs import Procfs
from enforce import undoing
from enforce.climber import Climber
from enforce.decide import Decided, Verdict
from enforce.entries import Entry
from enforce.ladder import CLIMB_AFTER_NS, EVICT_AFTER_NS, HOLD_NS
from enforce.ledger import Ledger, read
from enforce.model import OnlineOn, Share, Subject
from enforce.outcome import Outcome
from enforce.policy.model import Classification, Limits, Match, OfflineRule, OnlineRule, Role, Slo
from enforce.roster import Seat
from enforce.rungs import Rungs

GPU = DeviceUuid("GPU-0")
SLO = Slo("gpu_wait", 0.99, 5_000_000, 10_000_000_000, 20)
TRAINING, CHAT = ContainerKey("c:training"), ContainerKey("c:chat")


class Mark:
    """A rung that does nothing."""

    def __init__(self, name: str) -> None:
        self.name, self.obstacle_now, self.subjects = name, None, list[ContainerKey]()

    def obstacle(self, subject: Subject) -> str | None:
        return self.obstacle_now

    def intents(self, subject: Subject) -> Sequence[Entry]:
        return ()

    def apply(self, subject: Subject) -> None:
        self.subjects.append(subject.container.key)


def offline(*ladder: str) -> OfflineRule:
    return OfflineRule("training", Match(), "headroom", None, 1.0, Limits(None, 0.05, 1, None), ladder)


def seat(key: ContainerKey, role: Role, rule: OfflineRule | OnlineRule | None) -> Seat:
    container = Container(key, key[2:], "runc")
    member = Member(Process(ProcessId(len(key), 1), "x", "u", key), container, (GPU,))
    return Seat(container, Classification(role, rule), (member,), frozenset({GPU}))


def decided(training: Seat, rule: OfflineRule, exhausted: bool) -> Decided:
    ruler = OnlineOn(CHAT, GPU, SLO, None)
    return Decided((Verdict(training, rule, ruler, Share(0.05, 1, "target missed", exhausted), None),), {})


@pytest.fixture
def marks() -> dict[str, Mark]:
    return {name: Mark(name) for name in ("freeze", "evict", "mps", "swap")}


@pytest.fixture
def rungs(marks: dict[str, Mark], tmp_path: Path) -> Iterator[Rungs]:
    rungs = Rungs(marks, Ledger(tmp_path / "ledger"))
    yield rungs
    rungs.release_all()


def climb(climber: Climber, ladder: tuple[str, ...], *spans: tuple[bool, int]) -> tuple[str, ...]:
    """Where a container stands after so long with the share exhausted or not."""
    rule = offline(*ladder)
    training = seat(TRAINING, Role.OFFLINE, rule)
    now = 0
    for exhausted, span_ns in spans:
        end = now + span_ns
        while now < end:
            now += 100_000_000
            climber.step({TRAINING: training}, decided(training, rule, exhausted), now)
    return climber.standing(TRAINING).rungs


def test_without_enforcing_it_says_what_would_be_done(marks: dict[str, Mark]) -> None:
    climber = Climber(marks, None)
    ladder = ("gate", "pace", "freeze", "evict")
    assert climb(climber, ladder, (True, CLIMB_AFTER_NS // 2)) == ()
    assert climb(Climber(marks, None), ladder, (True, 2 * CLIMB_AFTER_NS)) == ("freeze",)
    assert climb(Climber(marks, None), ladder, (True, CLIMB_AFTER_NS + EVICT_AFTER_NS + 10**9)) == ("evict",)
    assert climb(Climber(marks, None), ladder, (True, 2 * CLIMB_AFTER_NS), (False, 2 * HOLD_NS)) == ()
    assert not any(mark.subjects for mark in marks.values())


def test_a_rule_without_the_rung_is_never_given_it(marks: dict[str, Mark]) -> None:
    assert climb(Climber(marks, None), ("gate", "pace"), (True, 100 * CLIMB_AFTER_NS)) == ()


def test_mps_is_wished_from_the_start_beside_an_online_container(marks: dict[str, Mark]) -> None:
    climber = Climber(marks, None)
    assert climb(climber, ("pace", "mps"), (False, 10**9)) == ("mps",)
    rule = offline("pace", "mps")
    climber.step({TRAINING: seat(TRAINING, Role.OFFLINE, rule)}, Decided((), {}), 2 * 10**9)
    assert climber.standing(TRAINING).rungs == ()


def test_what_cannot_be_done_is_passed_over_and_said(marks: dict[str, Mark]) -> None:
    marks["freeze"].obstacle_now = "it has no cgroup of its own"  # type: ignore[assignment]
    climber = Climber(marks, None)
    span = EVICT_AFTER_NS + 10 * CLIMB_AFTER_NS
    assert climb(climber, ("freeze", "evict"), (True, span)) == ("evict",)
    climber = Climber(marks, None)
    assert climb(climber, ("freeze",), (True, 2 * CLIMB_AFTER_NS)) == ()
    assert climber.standing(TRAINING).troubles == {"freeze": "it has no cgroup of its own"}


def test_nobody_but_offline_containers_is_ever_touched(rungs: Rungs, marks: dict[str, Mark]) -> None:
    climber = Climber(marks, rungs)
    online = OnlineRule("chat", Match(), SLO)
    here = {
        CHAT: seat(CHAT, Role.ONLINE, online),
        ContainerKey("c:safe"): seat(ContainerKey("c:safe"), Role.PROTECTED, None),
        ContainerKey("c:strange"): seat(ContainerKey("c:strange"), Role.UNMATCHED, None),
        TRAINING: seat(TRAINING, Role.OFFLINE, offline("swap", "evict")),
    }
    wish = {key: {"swap": "short of memory", "freeze": "x", "mps": "x"} for key in here}
    climber.step(here, Decided((), {}), 1, [wish, {key: {"evict": "the device is broken"} for key in here}])
    climber.release()
    assert {key for mark in marks.values() for key in mark.subjects} <= {TRAINING}
    climber.step(here, Decided((), {}), 2, [wish])
    assert [climber.standing(key).reasons for key in here] == [{}, {}, {}, {"swap": "short of memory"}]


def test_of_two_wishes_the_stronger_step_is_taken(marks: dict[str, Mark]) -> None:
    climber = Climber(marks, None)
    here = {TRAINING: seat(TRAINING, Role.OFFLINE, offline("swap", "evict", "freeze"))}
    wishes = [{TRAINING: {"swap": "short of memory"}}, {TRAINING: {"evict": "the device is broken", "freeze": "x"}}]
    climber.step(here, Decided((), {}), 1, wishes)
    assert climber.standing(TRAINING).reasons == {"evict": "the device is broken"}


def test_letting_go_waits_for_no_undoing_and_releasing_does(
    marks: dict[str, Mark], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, begun, applied = threading.Event(), threading.Event(), threading.Event()

    def give_back(_entry: Entry, _proc: Procfs) -> Outcome:
        begun.set()
        assert room.wait(30)
        return Outcome.RESUMED

    swap, path = marks["swap"], tmp_path / "swaps"
    monkeypatch.setitem(undoing.UNDO, "swap", give_back)
    monkeypatch.setattr(swap, "intents", lambda subject: [Entry.at("swap", "/x", subject.container.key, 0)])
    monkeypatch.setattr(swap, "apply", lambda _: applied.set())
    climber = Climber(marks, Rungs(marks, Ledger(path)))
    here = {TRAINING: seat(TRAINING, Role.OFFLINE, offline("swap"))}
    climber.step(here, Decided((), {}), 1, [{TRAINING: {"swap": "short of memory"}}])
    assert applied.wait(30)
    ends = time.monotonic() + 30
    while not begun.wait(0.01):  # what is still being climbed is undone by a later call
        assert time.monotonic() < ends
        climber.let_go()
    assert climber.standing(TRAINING).rungs == ("swap",)
    assert climber.standing(TRAINING).reasons == {}
    room.set()
    climber.release()
    assert climber.standing(TRAINING).rungs == ()
    assert read(path) == []

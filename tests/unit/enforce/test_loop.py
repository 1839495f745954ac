# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""When the loop decides, and what counts as a decision that was completed: by that a hanging agent is detected."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.core.model import ContainerKey, EnforcementStatus
from agent.pipeline import EnforcementReport, Pipeline
from enforce.controller.decision import DecisionInputs
from enforce.loop import LONGEST_REST_NS, DecisionContext, Loop, deciding
from enforce.model import Reading
from tests.support.snapshots import rich_snapshot as snapshot
from tools.harness.wait import poll

PATIENCE_SECONDS = 30.0


def idle_loop(escalation: object) -> Loop:
    """A loop that has nothing to decide about."""
    controls = SimpleNamespace(memory=SimpleNamespace(release=lambda: None), escalation=escalation, actuation=None)
    policy = SimpleNamespace(tuning=SimpleNamespace(decide_interval_ns=1_000_000))
    nothing = cast(Any, None)
    return Loop(cast(Any, policy), Pipeline([], nothing, None), nothing, cast(Any, controls), nothing)


def test_only_a_decision_that_was_completed_moves_the_time_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, going_on, done = threading.Event(), threading.Event(), threading.Event()
    seen: list[int] = []  # the time of the last decision as each step began
    while_released: list[int | None] = []
    escalation = SimpleNamespace(begin_release=lambda: None)
    loop = idle_loop(escalation)
    escalation.release = lambda: while_released.append(loop.pipeline.enforcement.decided_ns)

    def fail() -> None:
        raise ZeroDivisionError

    def hang() -> None:
        hanging.set()
        assert going_on.wait(PATIENCE_SECONDS)

    acts: list[Callable[[], object]] = [lambda: None, fail, lambda: None, hang, done.set]

    def step(_: Loop) -> EnforcementReport:
        decided_ns = loop.pipeline.enforcement.decided_ns
        assert decided_ns is not None
        if acts:
            seen.append(decided_ns)
            acts.pop(0)()
        return loop.pipeline.enforcement

    monkeypatch.setattr(Loop, "step", step)
    with deciding(loop, "test-loop"):
        assert hanging.wait(PATIENCE_SECONDS)
        assert loop.failures == 1
        assert loop.pipeline.enforcement.decided_ns == seen[3], "it stands still while a decision hangs"
        going_on.set()
        assert done.wait(PATIENCE_SECONDS)
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}
    assert seen[0] < seen[1] == seen[2] < seen[3] < seen[4]
    assert while_released == [None], "however long releasing takes, it is no decision that hangs"


def test_a_part_that_cannot_be_released_keeps_no_other_one_held() -> None:
    released: list[str] = []

    def fail() -> None:
        raise OSError

    escalation = SimpleNamespace(
        begin_release=lambda: released.append("rungs"), release=lambda: released.append("waited")
    )
    loop = idle_loop(escalation)
    cast(Any, loop.controls).memory.release = fail
    loop.begin()
    loop.end()
    assert released == ["rungs", "waited"]
    assert loop.failures == 1


class Stages:
    """The stages of a loop, as fakes. `context` is what they make of every decision."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = idle_loop(SimpleNamespace())
        cast(Any, self.loop.policy).tuning.decide_interval_ns = 100_000_000
        self.changing: tuple[object, ...] = ()
        self.readings: dict[ContainerKey, Reading] = {}
        self.report = EnforcementReport()
        self.decided, self.work_ns = 0, 0
        self.loop.inputs = cast(Any, SimpleNamespace(changing=lambda: self.changing))
        for stage in ("_decide", "_actuate"):
            monkeypatch.setattr(Loop, stage, lambda _, context: context)
        monkeypatch.setattr(Loop, "_observe", lambda _, context: self._observed(context))
        monkeypatch.setattr(Loop, "_record", lambda _, context: self.report)
        self.tick()

    def tick(self) -> None:
        self.loop.pipeline.snapshot = snapshot()

    def _observed(self, context: DecisionContext) -> DecisionContext:
        self.decided += 1
        work_until_ns = time.thread_time_ns() + self.work_ns
        while time.thread_time_ns() < work_until_ns:
            pass
        return replace(context, inputs=DecisionInputs({}, self.readings, {}))

    def decisions_in(self, steps: int) -> int:
        before = self.decided
        for _ in range(steps):
            self.loop.step()
        return self.decided - before


def test_a_decision_that_would_only_repeat_the_last_one_waits_for_the_next_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = Stages(monkeypatch)
    assert it.decisions_in(5) == 1
    it.tick()
    assert it.decisions_in(5) == 1
    it.changing = ("a process came",)
    assert it.decisions_in(5) == 1


def test_while_an_online_container_has_a_latency_or_a_rung_is_in_force_every_step_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = Stages(monkeypatch)
    it.readings = {ContainerKey("chat"): Reading(1, 0.99, 2.0, 30, 2.0, 2.0, 30)}
    assert it.decisions_in(5) == 5
    it.readings = {}
    it.report = EnforcementReport(
        containers={ContainerKey("job"): EnforcementStatus(role="offline", rungs=("freeze",))}
    )
    assert it.decisions_in(5) == 5


def test_long_decisions_are_followed_by_a_rest_which_a_new_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Stages(monkeypatch)
    it.readings = {ContainerKey("chat"): Reading(1, 0.99, 2.0, 30, 2.0, 2.0, 30)}
    it.work_ns = 1_000_000_000 // 20
    assert it.decisions_in(5) == 1
    it.changing = ("a process came",)
    assert it.decisions_in(5) == 1
    assert poll(lambda: it.decisions_in(1) == 1, 10 * LONGEST_REST_NS / 1e9), "it decides again, whatever came"


def test_after_a_decision_that_failed_the_next_step_decides_again(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Stages(monkeypatch)
    assert it.decisions_in(2) == 1
    with monkeypatch.context() as broken:
        broken.setattr(Loop, "_record", lambda *_: 1 / 0)
        it.tick()
        with pytest.raises(ZeroDivisionError):
            it.loop.step()
    assert it.decisions_in(2) == 1

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What counts as a decision that was completed: by that the service manager detects an agent that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.pipeline import EnforcementReport, Pipeline
from enforce.loop import Loop, deciding

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

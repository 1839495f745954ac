# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What counts as a decision that was completed: by that the service manager knows an agent that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from enforce.loop import Loop

PATIENCE_SECONDS = 30.0


def undecided(climber: object) -> Loop:
    """A loop with nobody to decide about."""
    loop = cast(Any, object.__new__(Loop))
    loop.policy = SimpleNamespace(tuning=SimpleNamespace(decide_interval_ns=1_000_000))
    loop.memory, loop.pipeline = SimpleNamespace(release=lambda: None), SimpleNamespace(decided_ns=None)
    loop.hands, loop.climber, loop.failures = None, climber, 0
    return cast(Loop, loop)


def test_only_a_decision_that_was_completed_moves_the_time_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, going_on, ending = threading.Event(), threading.Event(), threading.Event()
    seen: list[int] = []  # when each step began
    while_released: list[int | None] = []
    climber = SimpleNamespace(let_go=lambda: None)
    loop = undecided(climber)
    climber.release = lambda: while_released.append(loop.pipeline.decided_ns)

    def fail() -> None:
        raise ZeroDivisionError

    def hang() -> None:
        hanging.set()
        assert going_on.wait(PATIENCE_SECONDS)

    acts: list[Callable[[], object]] = [lambda: None, fail, lambda: None, hang, ending.set]

    def step(_: Loop) -> None:
        assert loop.pipeline.decided_ns is not None
        seen.append(loop.pipeline.decided_ns)
        acts.pop(0)()

    monkeypatch.setattr(Loop, "step", step)
    thread = threading.Thread(target=loop.run, args=(ending,))
    thread.start()
    assert hanging.wait(PATIENCE_SECONDS)
    assert loop.failures == 1
    assert loop.pipeline.decided_ns == seen[3], "it stands still while a decision hangs"
    going_on.set()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert seen[0] < seen[1] == seen[2] < seen[3] < seen[4]
    assert while_released == [None], "releasing takes the time it takes"

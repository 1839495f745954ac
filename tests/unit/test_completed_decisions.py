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


def undecided() -> Loop:
    """A loop with nobody to decide about."""
    nothing = SimpleNamespace(release=lambda: None, let_go=lambda: None)
    loop = cast(Any, object.__new__(Loop))
    loop.policy = SimpleNamespace(tuning=SimpleNamespace(decide_interval_ns=1_000_000))
    loop.hands, loop.memory, loop.climber, loop.decided, loop.failures = None, nothing, nothing, 0, 0
    return cast(Loop, loop)


def test_a_decision_that_fails_or_hangs_was_not_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, going_on, ending = threading.Event(), threading.Event(), threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    def hang() -> None:
        hanging.set()
        assert going_on.wait(PATIENCE_SECONDS)

    acts: list[Callable[[], object]] = [lambda: None, fail, lambda: None, hang, ending.set]
    monkeypatch.setattr(Loop, "step", lambda _: acts.pop(0)())
    loop = undecided()
    thread = threading.Thread(target=loop.run, args=(ending,))
    thread.start()
    assert hanging.wait(PATIENCE_SECONDS)
    assert (loop.decided, loop.failures) == (2, 1)
    going_on.set()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert (loop.decided, loop.failures) == (4, 1)

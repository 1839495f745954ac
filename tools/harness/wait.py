# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Polling a condition until it holds or a deadline has passed: how tests, benches, the demo and the tools wait.

No wait is without end. What was awaited, for how long, and what the condition last returned are in the error of
`until`, so that a failure on a busy machine explains itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS: Final = 60.0
STEP_SECONDS: Final = 0.02
_FIRST_STEP_SECONDS: Final = 0.001
_SHOWN_CHARACTERS: Final = 500


def until(
    condition: Callable[[], T | None],
    what: str | Callable[[], str],
    seconds: float = PATIENCE_SECONDS,
    step_seconds: float = STEP_SECONDS,
    error: Callable[[str], Exception] = TimeoutError,
) -> T:
    """The first true value that the condition returns; raises `error` when there is none within `seconds`.

    `what` names what is awaited; a function is called only for the error, so it can add a log or a state. An exception
    of the condition ends the wait at once.
    """
    value = poll(condition, seconds, step_seconds)
    if not value:
        raise error(_explained(what if isinstance(what, str) else what(), seconds, value))
    return value


def poll(condition: Callable[[], T | None], seconds: float, step_seconds: float = STEP_SECONDS) -> T | None:
    """The same where it may stay false: then the last value is returned.

    The pauses between two looks double from 1 ms to `step_seconds`.
    """
    deadline, pause = time.monotonic() + seconds, min(_FIRST_STEP_SECONDS, step_seconds)
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, step_seconds)
    return value


def _explained(what: str, seconds: float, last: object) -> str:
    """The message; a plain False or None says nothing, and is left out."""
    state = "" if last is None or last is False else f"; the last value was {last!r:.{_SHOWN_CHARACTERS}}"
    return f"waited {seconds:g} s in vain for {what}{state}"

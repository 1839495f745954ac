# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""From "the last snapshot" to "each snapshot once": whoever asks and whoever observes keep time on their own.

Without this a tick is shown twice or missed whenever the two clocks drift past each other, and the very first tick,
which has no rates yet, would be all that --once ever shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from agent.clock import NS_PER_SECOND
from agent.errors import SetupError
from agent.model import Snapshot

POLL_SECONDS: Final = 0.05
FIRST_SECONDS: Final = 10.0  # a slow machine's first two ticks

Latest = Callable[[], Snapshot | None]


class Stopped(Exception):  # noqa: N818  an event, not an error
    """Whoever waited does not want the snapshot any more."""


def fresh(
    latest: Latest,
    interval: float,
    first: float = FIRST_SECONDS,
    now: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] = time.sleep,
) -> Callable[[], Snapshot]:
    """A source that waits for a snapshot with rates that it has not given yet, and does not ask before one is due.

    For the first one it waits `first` seconds, and takes one without rates then. After one more `interval` without a
    new one it gives the old one again: an agent that is stuck shows by the time in the title. SetupError when there is
    no snapshot at all; Stopped when `wait` returns true.
    """
    shown: Snapshot | None = None

    def next_snapshot() -> Snapshot:
        nonlocal shown
        begun = now()
        give_up = begun + (first if shown is None else interval)
        if shown is not None and (early := (shown.at_ns + shown.interval_ns) / NS_PER_SECOND - begun) > 0:
            _wait(min(early, interval))
        while True:
            snapshot = latest()
            if snapshot is not None and snapshot.interval_ns > 0 and (shown is None or snapshot.at_ns != shown.at_ns):
                break
            if now() >= give_up:
                break
            _wait(POLL_SECONDS)
        if snapshot is None:
            raise SetupError("the agent has stopped giving snapshots: see its log, or start gputop again")
        shown = snapshot
        return snapshot

    def _wait(seconds: float) -> None:
        if wait(seconds):
            raise Stopped

    return next_snapshot

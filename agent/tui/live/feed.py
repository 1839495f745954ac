# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Snapshots for the live view: from a thread that waits for each new one, or from a recording that can be sought.

A failure is reported and retried at the next tick: an agent that is replaced comes back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, Protocol

from textual.message import Message
from textual.message_pump import MessagePump

from agent.core.errors import WardenError
from agent.core.model import Snapshot
from agent.core.worker import Worker
from agent.tui.history import KEPT_NS, SnapshotTick
from agent.tui.plain import Stopped
from agent.tui.recording import Recording, Source

MOST_REPLAYED: Final = 600  # ticks of the minute before the one that is sought


class SnapshotReceived(Message):
    """A new snapshot. `before`: the history begins anew, with these; None: it goes on."""

    def __init__(
        self, snapshot: Snapshot, before: Sequence[SnapshotTick] | None = None, place: str | None = None
    ) -> None:
        super().__init__()
        self.snapshot, self.before, self.place = snapshot, before, place


class Failed(Message):
    """A failure, in a line. `stays`: it stays on the screen when the next snapshot comes."""

    def __init__(self, text: str, *, stays: bool = False) -> None:
        super().__init__()
        self.text, self.stays = text, stays


class Feed(Protocol):
    """Posts `SnapshotReceived` and `Failed`."""

    def start(self, top: MessagePump) -> None:
        """From now on."""
        ...

    def seek(self, step: int) -> None:
        """So many ticks on, or back, where it can."""
        ...

    def play(self, playing: bool) -> None:
        """Goes on or stands still, where it can."""
        ...


class LiveFeed:
    """Live snapshots: they can neither be sought nor stopped."""

    def __init__(self, first: Snapshot, source: Source, interval: float, ending: threading.Event) -> None:
        """`ending` is what the source waits with; `stop` sets it."""
        self._first, self._source, self._interval, self._ending = first, source, interval, ending
        self._due = 0.0
        self._top: MessagePump | None = None
        self._worker = Worker("feed", self._step, failed="a snapshot", first_seconds=interval, retry_seconds=interval)

    def start(self, top: MessagePump) -> None:
        """Posts the first one, and then one each interval."""
        self._top = top
        top.post_message(SnapshotReceived(self._first))
        self._due = time.monotonic() + self._interval
        self._worker.start()

    def seek(self, step: int) -> None:
        """There is no way to."""

    def play(self, playing: bool) -> None:
        """It goes on either way."""

    def stop(self) -> None:
        """Nothing is posted or recorded afterwards."""
        self._worker.stop()
        self._ending.set()
        self._worker.close()

    def _step(self) -> float | None:
        """One snapshot. Ticks that were missed are not made up for."""
        assert self._top is not None
        try:
            self._top.post_message(SnapshotReceived(self._source()))
        except Stopped:
            return None
        except WardenError as error:
            self._top.post_message(Failed(str(error)))
        now = time.monotonic()
        self._due = max(self._due + self._interval, now)
        return self._due - now


class ReplayFeed:
    """A recording, tick after tick; it stops at its end."""

    def __init__(self, recording: Recording, narrow: Callable[[Snapshot], Snapshot], interval: float) -> None:
        self._recording, self._narrow, self._interval = recording, narrow, interval
        self._tick = lru_cache(MOST_REPLAYED)(lambda index: SnapshotTick.of(self._snapshot(index)))
        self._index, self._playing = 0, True
        self._top: MessagePump | None = None

    def start(self, top: MessagePump) -> None:
        """From the first tick."""
        self._top = top
        self.seek(0)
        top.set_interval(self._interval, self._advance)

    def seek(self, step: int) -> None:
        """No further than to the ends."""
        before, last = self._index, len(self._recording) - 1
        self._index = max(0, min(last, before + step))
        place = f"{self._index + 1}/{last + 1}"
        assert self._top is not None
        try:
            snapshot = self._snapshot(self._index)
        except WardenError as error:
            self._top.post_message(Failed(str(error)))
            return
        ticks = None if step == 1 else self._minute(self._index, snapshot.at_ns)
        self._top.post_message(SnapshotReceived(snapshot, ticks, place))

    def play(self, playing: bool) -> None:
        """Goes on, or not."""
        self._playing = playing

    def _advance(self) -> None:
        if self._playing and self._index < len(self._recording) - 1:
            self.seek(1)

    def _minute(self, index: int, at_ns: int) -> list[SnapshotTick]:
        """Those before this tick that its graphs are made of, as far back as they can be read."""
        found: list[SnapshotTick] = []
        for before in range(index - 1, max(-1, index - MOST_REPLAYED), -1):
            try:
                tick = self._tick(before)
            except WardenError:
                break
            if not at_ns - KEPT_NS < tick.at_ns <= (found[-1].at_ns if found else at_ns):
                break
            found.append(tick)
        return found[::-1]

    def _snapshot(self, index: int) -> Snapshot:
        return self._narrow(self._recording[index])

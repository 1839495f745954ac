# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The decision log: one line of JSON for each decision that changed something, and now and then for one that did not.

A line's `kind` is "decision", "effect" for what a decision led to one SLO window later, or "memory" for what was
denied, held, swapped out or evicted because of memory. Lines go to a file that never grows beyond its bound, to
standard output, or nowhere. A file has one predecessor, `.1`, so a log takes at most twice its bound on the disk; a
file that another program moves or removes (logrotate) is opened anew.

Invariant: the loop hands a line over and goes on. A thread of its own writes, so that neither a full disk nor a
terminal or pipe that is not read can hold up a release, or the end of the agent. What could not be written is counted.

The handlers of `logging` are not used: a handler that hangs in a write holds its lock, and `logging.shutdown`, which
runs at exit, waits for the lock of every handler, as QueueListener.stop waits for its thread: an unread pipe would keep
the agent from ending. They also follow symbolic links, which must not be where root writes into a directory of others.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from agent.core.clock import NS_PER_SECOND
from agent.core.worker import Worker
from enforce.memory.accounts import MemoryDecision

_STDOUT = 1
MOST_FILE_BYTES = 16 << 20
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Sink(Protocol):
    """Takes whole lines."""

    def write(self, line: bytes) -> None:
        """Writes all of the line. Raises OSError."""
        ...

    def close(self) -> None:
        """Ends; no more lines."""
        ...


def sink_of(destination: str, most_bytes: int) -> Sink:
    """A path, "-" for standard output, "" for nowhere."""
    if not destination:
        return Nowhere()
    return StandardOutput() if destination == "-" else RotatedFile(destination, most_bytes)


class Nowhere:
    """Drops every line."""

    def write(self, line: bytes) -> None:
        """Drops it."""

    def close(self) -> None:
        """Nothing to do."""


class StandardOutput:
    """File descriptor 1, not sys.stdout: a thread that hangs in that would block the interpreter's exit."""

    def write(self, line: bytes) -> None:
        """Writes the line at once."""
        _write_all(_STDOUT, line)

    def close(self) -> None:
        """Leaves standard output open."""


class RotatedFile:
    """Opened at the first line: a path that cannot be written costs lines, not the agent."""

    def __init__(self, path: str, most_bytes: int) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._fd: int | None = None

    def write(self, line: bytes) -> None:
        """Writes the line, after a rotation where it would not fit."""
        fd = self._current()
        if os.fstat(fd).st_size + len(line) > self._most_bytes:
            os.replace(self._path, f"{self._path}.1")
            fd = self._reopened()
        _write_all(fd, line)

    def close(self) -> None:
        """Closes the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _current(self) -> int:
        if self._fd is None:
            return self._reopened()
        try:
            at_path, ours = os.stat(self._path, follow_symlinks=False), os.fstat(self._fd)
        except FileNotFoundError:
            return self._reopened()
        return self._fd if (at_path.st_dev, at_path.st_ino) == (ours.st_dev, ours.st_ino) else self._reopened()

    def _reopened(self) -> int:
        self.close()
        self._fd = os.open(self._path, _FLAGS, 0o640)
        return self._fd


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


AT_LEAST_EACH_NS = 10 * NS_PER_SECOND
MOST_CONTAINERS = 4096
MOST_WAITING_LINES = 1024
_SHARE_STEP = 0.005  # smaller moves are logged with the next line
_QUEUED_STEP = 0.05  # of max_queued_ns
_NUMBERS = re.compile(r"[-+]?\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class OfQuantile:
    """What was read by one quantile of an SLO."""

    quantile: float
    latency_ns: float | None
    target_ns: int
    slack_ratio: float | None


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """What was read, what was decided, why, and whether it was done: the fields of a line. None: unknown.

    `latency_ns`, `quantile`, `target_ns` and `slack_ratio` are of the SLO's quantile that bound the decision.
    """

    wall_ns: int
    container: str
    device: str
    rule: str
    law: str
    latency_ns: float | None
    samples: int
    quantile: float
    target_ns: int
    slack_ratio: float | None  # (target − latency) ÷ target
    share_before: float | None
    share_after: float
    max_queued_ns: int
    reason: str
    acted: bool
    max_queued_before_ns: int | None = None
    name: str = ""  # of the container
    pod: str | None = None
    namespace: str | None = None
    ruler: str = ""  # key of the online container that it is held for
    ruler_name: str = ""
    rungs: tuple[str, ...] = ()  # of the ladder, in force
    troubles: Mapping[str, str] = field(default_factory=dict)  # rung → why it could not be done
    pauses: int = 0  # since the agent first saw the container
    paused_seconds: float = 0.0  # the mean over its processes
    other: OfQuantile | None = None  # of the SLO, which did not bind; None: there is no other

    def by_quantile(self) -> tuple[OfQuantile, OfQuantile | None]:
        """What was read by the SLO's quantiles, the higher one first, whichever of them bound."""
        binding, other = OfQuantile(self.quantile, self.latency_ns, self.target_ns, self.slack_ratio), self.other
        return (other, binding) if other is not None and other.quantile > self.quantile else (binding, other)


@dataclass(slots=True)
class _LastLine:
    """The last decision of a container that got a line, and how many decisions since were equal to it."""

    decision: DecisionRecord | MemoryDecision
    repeated: int = 0


class DecisionLog:
    """Writes to `destination`: a file, "-" for standard output, "" for nowhere. `write` neither blocks nor raises."""

    def __init__(self, destination: str, most_bytes: int = MOST_FILE_BYTES, each_ns: int = AT_LEAST_EACH_NS) -> None:
        self.dropped = 0  # lines that found the queue full
        self.errors = 0  # lines that could not be written
        self._each_ns = each_ns
        self._last: OrderedDict[tuple[str, str, str], _LastLine] = OrderedDict()
        self._lines: queue.Queue[bytes] = queue.Queue(MOST_WAITING_LINES)
        self._closing, self._drained = threading.Event(), threading.Event()
        self._sink = sink_of(destination, most_bytes)
        self._worker = Worker("decisions", self._write_queued, failed="writing decisions")
        self._worker.start()

    def write(self, decision: DecisionRecord | MemoryDecision) -> bool:
        """Logs a line, unless the container's last line is recent and equal. Whether there will be a line."""
        about = decision.act if isinstance(decision, MemoryDecision) else ""
        key = (decision.container, decision.device, about)
        last = self._last.get(key)
        if last is not None and not self._is_due(last.decision, decision):
            last.repeated += 1
            return False
        if not self._put(to_line(decision, last.repeated if last is not None else 0)):
            return False
        self._last[key] = _LastLine(decision)
        self._last.move_to_end(key)
        while len(self._last) > MOST_CONTAINERS:
            self._last.popitem(last=False)
        return True

    def write_effect(self, line: bytes) -> None:
        """Logs the effect of a decision that has a line."""
        self._put(line)

    def close(self, within_seconds: float = 1.0) -> None:
        """Writes what is queued, for so long at most."""
        self._closing.set()
        self._worker.wake()
        if self._drained.wait(within_seconds):
            self._worker.close()
        else:
            self._worker.stop()  # not waited for: it hangs in a write

    def _put(self, line: bytes) -> bool:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1
            return False
        self._worker.wake()
        return True

    def _is_due(self, before: DecisionRecord | MemoryDecision, now: DecisionRecord | MemoryDecision) -> bool:
        elapsed_ns = now.wall_ns - before.wall_ns  # negative after the clock was set back: then it is unknown
        return not 0 <= elapsed_ns < self._each_ns or differs(before, now)

    def _write_queued(self) -> None:
        while not self._lines.empty():
            try:
                self._sink.write(self._lines.get_nowait())
            except OSError:
                self.errors += 1
        if self._closing.is_set() and not self._drained.is_set():
            self._sink.close()
            self._drained.set()


def differs(before: DecisionRecord | MemoryDecision, now: DecisionRecord | MemoryDecision) -> bool:
    """Whether the decision changed, and not only the figures behind it."""
    if isinstance(before, MemoryDecision) or isinstance(now, MemoryDecision):
        return (before.rule, before.acted, plain(before.reason)) != (now.rule, now.acted, plain(now.reason))
    if _frame(before) != _frame(now):
        return True
    if abs(before.share_after - now.share_after) >= _SHARE_STEP:
        return True
    if abs(before.max_queued_ns - now.max_queued_ns) > _QUEUED_STEP * max(before.max_queued_ns, now.max_queued_ns):
        return True
    return plain(before.reason) != plain(now.reason)


def plain(reason: str) -> str:
    """The reason without its figures: two decisions with the same are equal."""
    return _NUMBERS.sub("#", reason)


def to_line(decision: DecisionRecord | MemoryDecision, repeated: int) -> bytes:
    """One line of JSON. `repeated`: decisions since the container's last line that were equal to it."""
    kind = "memory" if isinstance(decision, MemoryDecision) else "decision"
    return as_line({"kind": kind, **asdict(decision), "repeated": repeated})


def as_line(record: dict[str, Any]) -> bytes:
    """One line of strict JSON: inf and nan are null."""
    return json.dumps(_strict(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _strict(inner) for name, inner in value.items()}
    if isinstance(value, float):
        return round(value, 6) if value == value and abs(value) != float("inf") else None
    return value


def _frame(decision: DecisionRecord) -> tuple[object, ...]:
    return (decision.rule, decision.law, decision.acted, decision.target_ns, decision.rungs, set(decision.troubles))

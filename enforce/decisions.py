# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The decision log: one line of JSON for each decision that changed something, and now and then for one that did not.

A line's `kind` is "decision", "effect" for what a decision had brought one SLO window later, or "memory" for what was
denied, held, swapped out or evicted for memory's sake.
The loop hands a decision over and goes on: a thread of its own writes, so that neither a full disk nor a terminal that
nobody reads can hold up a release. What could not be written is counted.
"""

from __future__ import annotations

import json
import queue
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agent.clock import NS_PER_SECOND
from enforce.memory.told import MemoryDecision
from enforce.sinks import MOST_FILE_BYTES, Sink, sink_of

AT_LEAST_EACH_NS = 10 * NS_PER_SECOND
MOST_CONTAINERS = 4096
MOST_WAITING_LINES = 1024
_SHARE_STEP = 0.005  # smaller moves are told together with the next line
_QUEUED_STEP = 0.05  # of max_queued_ns
_NUMBERS = re.compile(r"[-+]?\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Decision:
    """What was read, what was decided, why, and whether anything was done about it. None: unknown."""

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
    name: str = ""  # of the container, as people call it
    pod: str | None = None
    namespace: str | None = None
    ruler: str = ""  # key of the online container that it is held for
    ruler_name: str = ""
    rungs: tuple[str, ...] = ()  # of the ladder, in force
    troubles: Mapping[str, str] = field(default_factory=dict)  # rung → why it could not be done
    pauses: int = 0  # since the agent first saw the container
    paused_seconds: float = 0.0  # the mean over its processes


@dataclass(slots=True)
class _Told:
    """The last decision of a container that got a line, and how many since were like it."""

    decision: Decision | MemoryDecision
    repeated: int = 0


class DecisionLog:
    """Writes to `destination`: a file, "-" for standard output, "" for nowhere. `write` neither blocks nor raises."""

    def __init__(self, destination: str, most_bytes: int = MOST_FILE_BYTES, each_ns: int = AT_LEAST_EACH_NS) -> None:
        self.dropped = 0  # lines that found the queue full
        self.errors = 0  # lines that could not be written
        self._each_ns = each_ns
        self._told: OrderedDict[tuple[str, str, str], _Told] = OrderedDict()
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING_LINES)
        self._sink = sink_of(destination, most_bytes)
        self._thread = threading.Thread(target=self._drain, args=(self._sink,), name="decisions", daemon=True)
        self._thread.start()

    def write(self, decision: Decision | MemoryDecision) -> bool:
        """One line, unless it says the same as the container's last one and that is recent. Whether it is told."""
        about = decision.act if isinstance(decision, MemoryDecision) else ""
        key = (decision.container, decision.device, about)
        told = self._told.get(key)
        if told is not None and not self._is_due(told.decision, decision):
            told.repeated += 1
            return False
        if not self._put(to_line(decision, told.repeated if told is not None else 0)):
            return False
        self._told[key] = _Told(decision)
        self._told.move_to_end(key)
        while len(self._told) > MOST_CONTAINERS:
            self._told.popitem(last=False)
        return True

    def follow(self, line: bytes) -> None:
        """A line about what an earlier one brought."""
        self._put(line)

    def close(self, within_seconds: float = 1.0) -> None:
        """Writes what is waiting, for so long at most."""
        try:
            self._lines.put(None, timeout=within_seconds)
        except queue.Full:
            return
        self._thread.join(within_seconds)

    def _put(self, line: bytes) -> bool:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def _is_due(self, before: Decision | MemoryDecision, now: Decision | MemoryDecision) -> bool:
        elapsed_ns = now.wall_ns - before.wall_ns  # negative after the clock was set back: then nobody knows
        return not 0 <= elapsed_ns < self._each_ns or differs(before, now)

    def _drain(self, sink: Sink) -> None:
        while (line := self._lines.get()) is not None:
            try:
                sink.write(line)
            except OSError:
                self.errors += 1
        sink.close()


def differs(before: Decision | MemoryDecision, now: Decision | MemoryDecision) -> bool:
    """Whether the decision is another one: not just other figures behind the same one."""
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
    """The reason without its figures: what makes two decisions the same one."""
    return _NUMBERS.sub("#", reason)


def to_line(decision: Decision | MemoryDecision, repeated: int) -> bytes:
    """One line of JSON. `repeated`: decisions since the container's last line that said the same as it."""
    kind = "memory" if isinstance(decision, MemoryDecision) else "decision"
    return as_line({"kind": kind, **asdict(decision), "repeated": repeated})


def as_line(record: dict[str, Any]) -> bytes:
    """One line of strict JSON: what is no number is null."""
    for name, value in record.items():
        if isinstance(value, float):
            record[name] = round(value, 6) if value == value and abs(value) != float("inf") else None
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _frame(decision: Decision) -> tuple[object, ...]:
    return (decision.rule, decision.law, decision.acted, decision.target_ns, decision.rungs, set(decision.troubles))

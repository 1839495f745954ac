# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One socket to the outside: opened when it appears, asked within a time limit, left alone for a while when it fails.

Whatever the other side does, a question ends in an outcome, and each outcome is counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.containers.breaker import Breaker
from agent.containers.sources import Socket
from agent.errors import SourceError, SourceTimeoutError

_log = logging.getLogger(__name__)
LIMIT_NS = NS_PER_SECOND


class Outcome(StrEnum):
    """How a question ended. The last two: it was not asked."""

    FOUND = "found"
    UNKNOWN = "unknown"
    TIMEOUT = "timeout"
    ERROR = "error"
    ABSENT = "absent"
    HELD_BACK = "held_back"


COUNTED = (Outcome.FOUND, Outcome.UNKNOWN, Outcome.TIMEOUT, Outcome.ERROR)


class Closable(Protocol):
    """What listens at the other end."""

    def close(self) -> None:
        """Ends a question that is under way; from any thread."""


S = TypeVar("S", bound=Closable)
T = TypeVar("T")


class Asked(Generic[S]):
    """One socket. `ask` belongs to one thread; `close` and `counts` to anybody."""

    def __init__(
        self, socket: Socket, open_source: Callable[[str], S], limit_ns: int, clock: Callable[[], int] = monotonic_ns
    ) -> None:
        self.socket, self._clock = socket, clock
        self._open_source, self._limit_ns = open_source, limit_ns
        self._breaker = Breaker()
        self._lock = threading.Lock()
        self._source: S | None = None
        self._closed = False
        self._counts = dict.fromkeys(COUNTED, 0)

    def ask(self, question: Callable[[S, int], T | None]) -> tuple[Outcome, T | None]:
        """The answer, if there is one. `question` gets the source and the time until which it may take."""
        if not self.socket.present():
            return Outcome.ABSENT, None
        if not self._breaker.allows(self._clock()):
            return Outcome.HELD_BACK, None
        outcome, answer = self._asked(question)
        self._counts[outcome] += 1
        if outcome in (Outcome.FOUND, Outcome.UNKNOWN):
            self._breaker.succeeded()
        else:
            self._breaker.failed(self._clock())
        return outcome, answer

    def counts(self) -> Mapping[Outcome, int]:
        """How often a question ended how."""
        return self._counts

    def close(self) -> None:
        """For good."""
        with self._lock:
            self._closed = True
            source, self._source = self._source, None
        if source is not None:
            source.close()

    def _asked(self, question: Callable[[S, int], T | None]) -> tuple[Outcome, T | None]:
        try:
            answer = question(self._opened(), monotonic_ns() + self._limit_ns)
        except SourceTimeoutError as error:
            return self._complained(Outcome.TIMEOUT, error), None
        except SourceError as error:
            return self._complained(Outcome.ERROR, error), None
        except Exception:  # noqa: BLE001  # the answer is from outside: nothing in it may end the thread
            _log.exception("%s gave an answer that nobody thought of", self.socket.path)
            return Outcome.ERROR, None
        return (Outcome.UNKNOWN if answer is None else Outcome.FOUND), answer

    def _complained(self, outcome: Outcome, error: SourceError) -> Outcome:
        """Once per series of failures: a socket may stay broken for days."""
        level = logging.DEBUG if self._breaker.failures or self._closed else logging.WARNING
        _log.log(level, "containers keep their short names for now: %s", error)
        return outcome

    def _opened(self) -> S:
        with self._lock:
            if self._closed:
                raise SourceError(f"{self.socket.path}: closed")
            if self._source is None:
                self._source = self._open_source(self.socket.path)
            return self._source

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Containers by the names that people gave them, asked for in a thread of its own.

Invariant: who asks never waits and never fails. A container is handed out as its cgroup tells it until its names are
known, and under them from then on; key, id, runtime and cgroup stay. All requests to the outside are made one after the
other by the one thread, each within a second, so no socket has two requests at a time and a runtime that hangs costs us
a second per back-off.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.containers.answers import Names, bounded
from agent.containers.asking import LIMIT_NS, Asked, Outcome
from agent.containers.holdings import Held, Holdings
from agent.containers.remembered import MOST, Remembered
from agent.containers.sources import BUILTIN, KINDS, KUBELET, Socket, Source
from agent.model import Container, ContainerKey

_log = logging.getLogger(__name__)
_ASKABLE = re.compile(r"[0-9a-f]{64}")  # what runtimes that can be asked call their containers
_GRACE_SECONDS = 1.0


class Naming:
    """A context manager: inside it the thread runs. The other methods are for any thread.

    `clock`: by which is waited between questions; how long one takes is always by the real one.
    """

    def __init__(
        self,
        sockets: Iterable[Socket] = BUILTIN,
        limit_ns: int = LIMIT_NS,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        sockets = tuple(sockets)
        self._clock = clock
        self._asked = tuple(Asked(it, KINDS[it.kind].open, limit_ns, clock) for it in sockets if it.kind in KINDS)
        self._holdings = Holdings([it for it in sockets if it.kind == KUBELET], limit_ns, clock)
        self._everybody: tuple[Asked[Any], ...] = (*self._asked, *self._holdings.asked)
        self._remembered = Remembered()
        self._waiting: OrderedDict[ContainerKey, Container] = OrderedDict()
        self._refused = 0
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="naming", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Within a second, whatever the other sides do."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for asked in self._everybody:
            asked.close()
        self._thread.join(_GRACE_SECONDS)
        if self._thread.is_alive():
            _log.warning("a container runtime's socket hangs so that it cannot even be closed; leaving it behind")

    def named(self, container: Container) -> Container:
        """Under its names if they are known by now; asks for them if not."""
        if not _ASKABLE.fullmatch(container.id):
            return container
        with self._changed:
            known = self._remembered.named(container)
            if known is not None:
                return known
            if container.key not in self._waiting and self._remembered.due(container, self._clock()):
                self._queue(container)
        return container

    def held(self) -> Held | None:
        """Which containers each device was given to; None while no kubelet says so."""
        return self._holdings.held()

    def counts(self) -> Mapping[tuple[str, str], int]:
        """(source, outcome) → how often, since the start."""
        total: Counter[tuple[str, str]] = Counter()
        for asked in self._everybody:
            total.update({(asked.socket.kind, str(outcome)): n for outcome, n in asked.counts().items() if n})
        if self._refused:
            total["queue", "refused"] = self._refused
        return total

    def _queue(self, container: Container) -> None:
        if len(self._waiting) >= MOST:
            self._refused += 1
            return
        self._waiting[container.key] = container
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            self._holdings.poll()
            with self._changed:
                while not (self._ending or self._waiting) and (left_ns := self._holdings.due_ns - self._clock()) > 0:
                    self._changed.wait(left_ns / NS_PER_SECOND)
                if self._ending:
                    return
                container = next(iter(self._waiting.values()), None)
            if container is not None:
                self._settle(container, *self._look_up(container))

    def _settle(self, container: Container, names: Names | None, everybody_asked: bool) -> None:
        with self._changed:
            self._waiting.pop(container.key, None)
            if names is None:
                self._remembered.miss(container, self._clock(), everybody_asked)
            else:
                self._remembered.learn(container, names)

    def _look_up(self, container: Container) -> tuple[Names | None, bool]:
        """Its names, and whether everybody who is there was asked and answered."""
        everybody = True
        for asked in self._likeliest_first(container):
            if self._ending:
                return None, False
            outcome, names = asked.ask(lambda source, deadline_ns: _bounded(source.look_up(container, deadline_ns)))
            if names is not None:
                return names, True
            everybody = everybody and outcome in (Outcome.UNKNOWN, Outcome.ABSENT)
        return None, everybody

    def _likeliest_first(self, container: Container) -> list[Asked[Source]]:
        return sorted(self._asked, key=lambda it: container.runtime not in KINDS[it.socket.kind].runtimes)


def _bounded(names: Names | None) -> Names | None:
    return bounded(names) if names else None

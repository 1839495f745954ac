# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which containers' names are known, and which need not be asked for again yet. Bounded; time is an argument.

What was asked for longest ago is dropped first. Nobody's name is not asked for again for 10 s, then twice as long each
time, to 5 min; when somebody who might know could not be asked, every 10 s.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from agent.clock import NS_PER_SECOND
from agent.containers.answers import Names, applied
from agent.model import Container, ContainerKey

MOST = 4096
FIRST_WAIT_NS, LONGEST_WAIT_NS = 10 * NS_PER_SECOND, 300 * NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class _Unknown:
    due_ns: int
    wait_ns: int


class Remembered:
    """Not thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._named: OrderedDict[ContainerKey, tuple[Names, Container]] = OrderedDict()
        self._unknown: OrderedDict[ContainerKey, _Unknown] = OrderedDict()

    def named(self, container: Container) -> Container | None:
        """Under its names; the same object each time, as long as its cgroup is the same."""
        known = self._named.get(container.key)
        if known is None:
            return None
        self._named.move_to_end(container.key)
        names, ours = known
        if ours.cgroup != container.cgroup:
            ours = applied(names, container)
            self._named[container.key] = (names, ours)
        return ours

    def due(self, container: Container, now_ns: int) -> bool:
        """Whether it may be asked for."""
        unknown = self._unknown.get(container.key)
        return unknown is None or now_ns >= unknown.due_ns

    def learn(self, container: Container, names: Names) -> None:
        """It was found."""
        self._unknown.pop(container.key, None)
        self._named[container.key] = (names, applied(names, container))
        if len(self._named) > self._most:
            self._named.popitem(last=False)

    def miss(self, container: Container, now_ns: int, everybody_asked: bool) -> None:
        """It was not."""
        before = self._unknown.pop(container.key, None)
        grown_ns = min(2 * before.wait_ns, LONGEST_WAIT_NS) if before and everybody_asked else FIRST_WAIT_NS
        self._unknown[container.key] = _Unknown(now_ns + grown_ns, grown_ns)
        if len(self._unknown) > self._most:
            self._unknown.popitem(last=False)

    def __len__(self) -> int:
        return len(self._named) + len(self._unknown)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The kernel side of a signal that follows processes: what its probes offer, and when they are loaded.

Invariant: the probes are there only while something is watched, and any thread may read their counts meanwhile; what
they counted is kept when they go.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Generic, Protocol, TypeVar

from agent.core.errors import WardenError
from agent.core.model import ProcessId
from enforce.signals.latency_window import Buckets

_log = logging.getLogger(__name__)
S = TypeVar("S")  # what is watched in a container: a function, a port
S_contra = TypeVar("S_contra", contravariant=True)


class ProcessProbes(Protocol[S_contra]):
    """The kernel side of a signal: what followed processes do is counted under the number of a watch.

    Belongs to the follower's thread, but for `buckets`, `tallies` and `point`.
    """

    def begin(self, number: int, source: S_contra) -> None:
        """Counts under this number from now on, from zero. OSError when there is no room."""
        ...

    def end(self, number: int) -> None:
        """Drops the number, and unfollows its processes."""
        ...

    def buckets(self, number: int) -> Buckets | None:
        """The cumulative histogram of a number."""
        ...

    def point(self, number: int, slots: int) -> None:
        """The gates of these slots, as the bits of a number, count a number's requests from their arrival.

        By any thread. Nothing where arrivals are not seen.
        """
        ...

    def followed(self) -> Mapping[int, int]:
        """tgid → number, as the kernel has it."""
        ...

    def follow(self, number: int, source: S_contra, process: ProcessId) -> None:
        """Counts what the process does. GoneError, ProbeError, SetupError, OSError."""
        ...

    def unfollow(self, tgid: int) -> None:
        """The process counts no more."""
        ...

    def drop_changed(self) -> Collection[int]:
        """Unfollows processes whose program is being written over; their tgids."""
        ...

    def drop_unused(self) -> None:
        """Ends a round: what no followed process needs can go."""
        ...

    def changes_fd(self) -> int | None:
        """Readable when `drop_changed` has something to do."""
        ...

    def tallies(self) -> dict[str, int]:
        """What was seen or missed, by name, since it was loaded."""
        ...

    def details(self, number: int) -> dict[str, int]:
        """What was seen of a watch beside its latencies, as "kind:name" → count or ns."""
        ...

    def close(self) -> None:
        """Detaches everything."""
        ...


class KernelSide(Generic[S]):
    """The probes while they are loaded, why they are not, and what was counted before they were unloaded."""

    def __init__(self, signal: str, load: Callable[[], ProcessProbes[S]], retry_ns: int) -> None:
        """`retry_ns`: a failed load is repeated after so long."""
        self._signal, self._load, self._every_ns = signal, load, retry_ns
        self._lock = threading.Lock()  # over `probes`, which any thread may read and the follower's may close
        self._retry_ns = 0
        self._counted: Counter[str] = Counter()
        self.probes: ProcessProbes[S] | None = None
        self.problem: str | None = None

    def load(self, now_ns: int) -> None:
        """Loads the probes unless they are, or it is too early to retry. WardenError; it is logged once."""
        if self.probes is not None or now_ns < self._retry_ns:
            return
        self._retry_ns = now_ns + self._every_ns
        try:
            probes = self._load()
        except WardenError as error:
            if self.problem != str(error):
                _log.error("the signal %s has no data: %s", self._signal, error)
            self.problem = str(error)
            raise
        with self._lock:
            self.probes, self.problem = probes, None

    def unload(self) -> None:
        """Detaches everything."""
        with self._lock:
            probes, self.probes = self.probes, None
            if probes is not None:
                self._counted.update(probes.tallies())
        if probes is not None:
            self._retry_ns = 0
            probes.close()

    def buckets(self, number: int) -> Buckets | None:
        """The cumulative histogram of a number."""
        with self._lock:
            return self.probes.buckets(number) if self.probes is not None else None

    def point(self, number: int, slots: int) -> None:
        """As `ProcessProbes.point`."""
        with self._lock:
            if self.probes is not None:
                self.probes.point(number, slots)

    def details(self, number: int) -> dict[str, int]:
        """What was seen of a number beside its latencies; empty while nothing is loaded."""
        with self._lock:
            return self.probes.details(number) if self.probes is not None else {}

    def tallies(self) -> dict[str, int]:
        """Since the first load."""
        with self._lock:
            now = self.probes.tallies() if self.probes is not None else {}
            return {name: now.get(name, 0) + self._counted[name] for name in {**self._counted, **now}}

    def changes_fds(self) -> list[int]:
        """See `ProcessProbes.changes_fd`. For the follower's thread."""
        changes = self.probes.changes_fd() if self.probes is not None else None
        return [changes] if changes is not None else []

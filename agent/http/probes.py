# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The probes on system calls: loaded and attached while the object lives, and told whom to look at.

Invariant: a call of a process that is not in the map `http_wanted` costs one look-up, and nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Self

from agent import layout
from agent.errors import ProbeError
from agent.http.layout import MAPS, MIRRORS, TALLIES, Follower, Process, Watch
from agent.layout import U32, Latency
from agent.libbpf import BpfObject, Map

# Whoever ends a connection or makes a process first: what has begun is then never left behind.
_PROGRAMS = ("http_state_changes", "http_process_exits", "http_process_forks", "http_call_returns")


class HttpProbes:
    """A context manager: leaving it takes the probes away."""

    def __init__(self, object_path: Path) -> None:
        self.bpf = BpfObject(object_path)
        try:
            layout.check(self.bpf, MIRRORS)
            self._wanted, self._watches = self._map("http_wanted"), self._map("http_watches")
            self._latencies, self._tallies = self._map("http_latencies"), self._map("http_tallies")
            for program in _PROGRAMS:
                self.bpf.attach(program)
        except ProbeError:
            self.bpf.close()
            raise

    def watch(self, place: int, epoch: int, port: int, path: str) -> None:
        """Gives a place to a container; its latencies begin at none."""
        self._watches.put(U32(place), Watch())
        self._latencies.put(U32(place), Latency())
        self._watches.put(U32(place), Watch.of(epoch, port, path))

    def unwatch(self, place: int) -> None:
        """Takes it back; what its processes do is no longer looked at."""
        self._watches.put(U32(place), Watch())
        self._unfollow(tgid for tgid, found in self.followed().items() if found == place)

    def followed(self) -> dict[int, int]:
        """Who is looked at now, children that the kernel added included: tgid → place."""
        return {key.tgid: value.watch for key, value in self._wanted.items()}

    def follow(self, place: int, epoch: int, tgids: Iterable[int], followed: Iterable[int]) -> int:
        """Exactly these from now on; `followed`: who was before they were listed. How many had no room."""
        wanted, before = set(tgids), set(followed)
        refused = 0
        for tgid in wanted - before:
            try:
                self._wanted.put(Process(tgid), Follower(place, epoch))
            except OSError:
                refused += 1
        self._unfollow(before - wanted)
        return refused

    def _unfollow(self, tgids: Iterable[int]) -> None:
        for tgid in tgids:
            self._wanted.delete(Process(tgid))

    def buckets(self, place: int) -> bytes:
        """The cumulative histogram of a place: LATENCY_BUCKETS of 32 bits."""
        found = self._latencies.get(U32(place))
        return bytes(found.buckets) if found is not None else bytes(Latency.buckets.size)

    def latencies(self, place: int) -> Latency:
        """The same with the sum."""
        return self._latencies.get(U32(place)) or Latency()

    def tallies(self) -> dict[str, int]:
        """What was seen, and why requests are missing, since the probes were attached."""
        return dict(zip(TALLIES, self._tallies.per_cpu_array(len(TALLIES)), strict=True))

    def _map(self, name: str) -> Map:
        return self.bpf.map(name, *MAPS[name])

    def close(self) -> None:
        """Detaches everything."""
        self.bpf.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

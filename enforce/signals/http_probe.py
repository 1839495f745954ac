# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The probes on system calls that see HTTP/1 requests: bpf/http.bpf.c loaded, attached and read.

Invariants: a call of a process that is not in the map `http_wanted` costs one look-up, and nothing of it is kept; the
object is loaded only while a container is watched, as it costs every system call of the node.
"""

from __future__ import annotations

import ctypes as c
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from agent.core.errors import ProbeError
from agent.core.model import ProcessId
from agent.probes import abi
from agent.probes.abi import S64, SLOTS, U32, U64, Gate, Latency
from agent.probes.libbpf import BpfObject, Map
from enforce.signals.latency_window import Buckets

WATCHES, LONGEST_PATH, CONNECTIONS = 64, 64, 1024
CLASS_NAMES = ("unknown", "1xx", "2xx", "3xx", "4xx", "5xx")
PARTS = ("receive", "head", "first_byte", "service")  # of a request: struct http_counts says from where to where
COUNTED = (2, 3)  # whose requests are latencies, unless the policy says otherwise

TALLIES = (
    "answered",
    "elsewhere",
    "other_status",
    "foreign",
    "unanswered",
    "unseen",
    "unreadable",
    "unframed",
    "long",
    "deep",
    "no_connection",
    "evicted",
    "no_process",
)

LOSSES = TALLIES[4:]


@dataclass(frozen=True, slots=True)
class WatchedPort:
    """Requests to a port of a container whose target begins with `path`; "": all.

    `statuses`: the first digits of those that are latencies; the others are counted only.
    """

    port: int
    path: str = ""
    annotated: bool = field(default=False, compare=False)  # its pod's own SLO, not the policy file's
    statuses: tuple[int, ...] = COUNTED


class Watch(c.Structure):
    """struct http_watch: what to look for in one container."""

    _fields_ = [
        ("epoch", U32),
        ("port", c.c_uint16),
        ("path_length", c.c_uint16),
        ("path", c.c_uint8 * LONGEST_PATH),
        ("classes", U32),
        ("slots", U32),
    ]

    @classmethod
    def of(cls, epoch: int, source: WatchedPort) -> Watch:
        """What belongs to the number `epoch`."""
        text = source.path.encode("utf-8", "surrogateescape")[:LONGEST_PATH]
        classes = sum(1 << one for one in source.statuses)
        return cls(epoch, source.port, len(text), (c.c_uint8 * LONGEST_PATH)(*text), classes)


class Counts(c.Structure):
    """struct http_counts: what one place saw."""

    _fields_ = [
        ("tallies", U64 * len(TALLIES)),
        ("classes", U64 * len(CLASS_NAMES)),
        ("receive_ns", U64),
        ("head_ns", U64),
        ("first_byte_ns", U64),
        ("service_ns", U64),
        ("cursor", U64),
        ("children", S64),
    ]


class WantedProcess(c.Structure):
    """Key of the map `http_wanted`."""

    _fields_ = [("tgid", U32)]


class Follower(c.Structure):
    """struct http_follower: a process whose calls are looked at."""

    _fields_ = [("watch", U32), ("epoch", U32), ("is_child", U32)]


MIRRORS: dict[str, type[c.Structure]] = {
    "http_watch": Watch,
    "http_counts": Counts,
    "http_follower": Follower,
    "latency": Latency,
}

MAPS: dict[str, tuple[Any, Any]] = {
    "http_wanted": (WantedProcess, Follower),
    "http_watches": (U32, Watch),
    "http_latencies": (U32, Latency),
    "http_counts": (U32, Counts),
    "http_tallies": (U32, U64),
}

SHARED = ("gates", "pauses", "controls")  # with the object that paces launches

# The ends of connections and the forks first: what has begun is then never left behind.
_PROGRAMS = ("http_state_changes", "http_process_exits", "http_process_forks", "http_call_returns")


class HttpProbes:
    """Counts by place, of which there are WATCHES. A context manager: leaving it detaches the probes.

    `shared`: the maps SHARED of the object that paces launches, whose gates count the requests.
    """

    def __init__(self, object_path: Path, shared: Mapping[str, int] = MappingProxyType({})) -> None:
        self.bpf = BpfObject(object_path, shared=shared)
        self._gates: Sequence[Gate] = ()
        self._lock = threading.Lock()  # over writing `http_watches`
        try:
            abi.check(self.bpf, MIRRORS)
            self._gates = self.bpf.map("gates", U32, Gate).share(SLOTS)
            self._forget_requests()  # of an object before
            self._wanted, self._watches = self._map("http_wanted"), self._map("http_watches")
            self._latencies, self._tallies = self._map("http_latencies"), self._map("http_tallies")
            self._counts = self._map("http_counts")
            for program in _PROGRAMS:
                self.bpf.attach(program)
            with suppress(ProbeError):  # Linux < 6.3: no gate trusts the signal
                self.bpf.attach("http_bytes_arrive")
        except ProbeError:
            self.bpf.close()
            raise

    def watch(self, place: int, epoch: int, source: WatchedPort) -> None:
        """Gives a place to a container; its latencies begin at none."""
        with self._lock:
            self._watches.put(U32(place), Watch())
            self._latencies.put(U32(place), Latency())
            self._counts.put(U32(place), Counts())
            self._watches.put(U32(place), Watch.of(epoch, source))

    def point(self, place: int, slots: int) -> None:
        """The gates that count its requests: bit n for the slot n. By any thread."""
        with self._lock:
            watch = self._watches.get(U32(place))
            if watch is not None and watch.epoch:
                watch.slots = slots
                self._watches.put(U32(place), watch)

    def unwatch(self, place: int) -> None:
        """Frees a place; the calls of its processes are no longer looked at.

        What is in service there counts at its gates until its connections end, which only keeps the delays.
        """
        with self._lock:
            self._watches.put(U32(place), Watch())
        for tgid, found in self.followed().items():
            if found == place:
                self.unfollow(tgid)

    def followed(self) -> dict[int, int]:
        """The processes that are looked at, children that the kernel added included: tgid → place."""
        return {key.tgid: value.watch for key, value in self._wanted.items()}

    def follow(self, place: int, epoch: int, tgid: int) -> None:
        """Counts the requests of a process at a place. OSError when there are too many processes."""
        known = self._wanted.get(WantedProcess(tgid))
        is_same = known is not None and (known.watch, known.epoch) == (place, epoch)
        self._wanted.put(WantedProcess(tgid), Follower(place, epoch, known.is_child if known and is_same else 0))

    def unfollow(self, tgid: int) -> None:
        """Its calls are no longer looked at."""
        self._wanted.delete(WantedProcess(tgid))

    def buckets(self, place: int) -> bytes:
        """The cumulative histogram of a place: LATENCY_BUCKETS of 32 bits."""
        found = self._latencies.get(U32(place))
        return bytes(found.buckets) if found is not None else bytes(Latency.buckets.size)

    def latencies(self, place: int) -> Latency:
        """The same with the sum."""
        return self._latencies.get(U32(place)) or Latency()

    def counts(self, place: int) -> Counts:
        """What a place saw."""
        return self._counts.get(U32(place)) or Counts()

    def tallies(self) -> dict[str, int]:
        """What was seen, and why requests are missing, since the probes were attached."""
        return dict(zip(TALLIES, self._tallies.per_cpu_array(len(TALLIES)), strict=True))

    def _map(self, name: str) -> Map:
        return self.bpf.map(name, *MAPS[name])

    def close(self) -> None:
        """Detaches everything."""
        self.bpf.close()
        self._forget_requests()

    def _forget_requests(self) -> None:
        for gate in self._gates:
            gate.served = gate.trust = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def details_of(counts: Counts) -> dict[str, int]:
    """ "status:CLASS" → answers, "ns:PART" → sum over the requests that have a latency, "lost:REASON" → requests."""
    answers = {f"status:{name}": counts.classes[one] for one, name in enumerate(CLASS_NAMES)}
    parts = {f"ns:{part}": int(getattr(counts, f"{part}_ns")) for part in PARTS}
    lost = {f"lost:{name}": counts.tallies[TALLIES.index(name)] for name in LOSSES}
    return answers | parts | lost


class HttpProcessProbes:
    """`ProcessProbes` of the signal http (enforce.signals.process_probes): the number of a watch is its place's epoch.

    A process that is forked between two rounds is added by the kernel itself.
    """

    def __init__(self, probes: HttpProbes) -> None:
        self._probes = probes
        self._places: dict[int, int] = {}  # by number

    def begin(self, number: int, source: WatchedPort) -> None:
        """Takes a free place, of which the follower admits no more than there are."""
        place = min(set(range(WATCHES)) - set(self._places.values()))
        self._probes.watch(place, number, source)
        self._places[number] = place

    def end(self, number: int) -> None:
        """Frees its place."""
        place = self._places.pop(number, None)
        if place is not None:
            self._probes.unwatch(place)

    def buckets(self, number: int) -> Buckets | None:
        """The cumulative histogram."""
        place = self._places.get(number)
        return self._probes.buckets(place) if place is not None else None

    def point(self, number: int, slots: int) -> None:
        """The gates that count its requests, as the bits of a number."""
        place = self._places.get(number)
        if place is not None:
            self._probes.point(place, slots)

    def followed(self) -> dict[int, int]:
        """tgid → number; 0 where a place is not in use any more."""
        numbers = {place: number for number, place in self._places.items()}
        return {tgid: numbers.get(place, 0) for tgid, place in self._probes.followed().items()}

    def follow(self, number: int, source: WatchedPort, process: ProcessId) -> None:
        """Counts its requests."""
        self._probes.follow(self._places[number], number, process.tgid)

    def unfollow(self, tgid: int) -> None:
        """Its requests count no more."""
        self._probes.unfollow(tgid)

    def drop_changed(self) -> Collection[int]:
        """Nothing: no probe is in a program."""
        return ()

    def drop_unused(self) -> None:
        """Nothing: the probes serve all processes."""

    def changes_fd(self) -> int | None:
        """None."""
        return None

    def details(self, number: int) -> dict[str, int]:
        """Answers by class, times of requests, and losses, of one place."""
        place = self._places.get(number)
        return details_of(self._probes.counts(place)) if place is not None else {}

    def tallies(self) -> dict[str, int]:
        """What was seen, and why requests are missing."""
        return self._probes.tallies()

    def close(self) -> None:
        """Detaches everything."""
        self._probes.close()

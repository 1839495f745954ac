# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The signal `http` turns a container's histogram into readings, and asks for it anew each time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from agent.http.watching import Wish
from agent.layout import LATENCY_BUCKETS
from agent.model import Container, ContainerKey, ContainerUsage, Snapshot
from enforce.histogram import middle_ns
from enforce.policy.model import HttpSource, Slo
from enforce.signals.http import Http
from enforce.signals.requests import Requests

S = 1_000_000_000
CHAT = Container(ContainerKey("docker:chat"), "chat", "docker", cgroup="/docker/chat")
SNAPSHOT = Snapshot(0, 0, S, containers=(ContainerUsage(CHAT, (), ()),))
SLO = Slo("http", 0.5, 50_000_000, 10 * S, 20, HttpSource(8000, "/v1/"))


@dataclass
class Pretended:
    """Counts what it is told."""

    counted: tuple[int, bytes] | None = None
    wishes: list[tuple[Wish, int]] = field(default_factory=list)
    forgotten: list[ContainerKey] = field(default_factory=list)

    def want(self, wish: Wish, now_ns: int) -> None:
        self.wishes.append((wish, now_ns))

    def forget(self, container: ContainerKey) -> None:
        self.forgotten.append(container)

    def trouble(self, container: ContainerKey) -> str | None:
        return f"nobody looks at {container}"

    def buckets(self, container: ContainerKey) -> tuple[int, bytes] | None:
        return self.counted if container == CHAT.key else None


def histogram(**buckets: int) -> bytes:
    """Counts by bucket: `b100=5`."""
    return b"".join(buckets.get(f"b{bucket}", 0).to_bytes(4, "little") for bucket in range(LATENCY_BUCKETS))


def test_it_wishes_for_the_port_and_path_at_every_reading() -> None:
    watching = Pretended()
    signal = Http(watching, Requests(), [SLO])
    assert signal.read(SNAPSHOT, CHAT.key, SLO, 7) is None
    assert signal.read(SNAPSHOT, CHAT.key, SLO, 8) is None
    assert watching.wishes == [(Wish(CHAT, 8000, "/v1/"), 7), (Wish(CHAT, 8000, "/v1/"), 8)]


def test_a_promise_that_the_policy_file_does_not_make_is_the_pods_own_whatever_it_says() -> None:
    watching = Pretended()
    signal = Http(watching, Requests(), [SLO])
    signal.read(SNAPSHOT, CHAT.key, replace(SLO), 7)
    signal.read(SNAPSHOT, CHAT.key, SLO, 8)
    assert [wish.annotated for wish, _ in watching.wishes] == [True, False]


def test_requests_since_it_was_watched_are_a_reading() -> None:
    watching = Pretended()
    signal = Http(watching, Requests(), [SLO])
    signal.read(SNAPSHOT, CHAT.key, SLO, S)
    watching.counted = (1, histogram(b100=30))
    reading = signal.read(SNAPSHOT, CHAT.key, SLO, 2 * S)
    assert reading is not None
    assert (reading.samples, reading.latency_ns) == (30, middle_ns(100))


def test_a_place_that_begins_anew_adds_to_what_was_there() -> None:
    watching = Pretended((1, histogram()))
    signal = Http(watching, Requests(), [SLO])
    signal.read(SNAPSHOT, CHAT.key, SLO, S)
    watching.counted = (1, histogram(b100=30))
    signal.read(SNAPSHOT, CHAT.key, SLO, 2 * S)
    watching.counted = (2, histogram(b100=40))
    reading = signal.read(SNAPSHOT, CHAT.key, SLO, 3 * S)
    assert reading is not None
    assert reading.samples == 70


def test_silence_is_no_reading_once_the_window_is_over() -> None:
    watching = Pretended((1, histogram()))
    signal = Http(watching, Requests(), [SLO])
    signal.read(SNAPSHOT, CHAT.key, SLO, S)
    watching.counted = (1, histogram(b100=30))
    assert signal.read(SNAPSHOT, CHAT.key, SLO, 2 * S) is not None
    watching.counted = None
    assert signal.read(SNAPSHOT, CHAT.key, SLO, 3 * S) is not None
    assert signal.read(SNAPSHOT, CHAT.key, SLO, 30 * S) is None


def test_a_container_that_no_snapshot_has_shown_is_not_wished_for() -> None:
    watching = Pretended()
    assert Http(watching, Requests(), [SLO]).read(SNAPSHOT, ContainerKey("docker:other"), SLO, S) is None
    assert not watching.wishes


def test_a_container_that_is_gone_is_forgotten() -> None:
    watching = Pretended((1, histogram(b100=30)))
    signal = Http(watching, Requests(), [SLO])
    signal.read(SNAPSHOT, CHAT.key, SLO, S)
    signal.forget([CHAT.key])
    assert watching.forgotten == [CHAT.key]
    assert signal.read(Snapshot(0, 0, S), CHAT.key, SLO, 2 * S) is None


def test_it_says_what_keeps_the_probes_from_counting() -> None:
    assert Http(Pretended(), Requests(), [SLO]).trouble(CHAT.key) == "nobody looks at docker:chat"

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The signal `http` turns a container's histogram into readings, and asks for it again each time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from agent.core.model import Container, ContainerKey, ContainerUsage, Snapshot
from agent.probes.abi import LATENCY_BUCKETS, middle_ns
from enforce.policy.model import HttpSource, Slo
from enforce.signals.http import Http
from enforce.signals.http_probe import WatchedPort
from enforce.signals.latency_window import Requests

S = 1_000_000_000
CHAT = Container(ContainerKey("docker:chat"), "chat", "docker", cgroup="/docker/chat")
SNAPSHOT = Snapshot(0, 0, S, containers=(ContainerUsage(CHAT, (), ()),))
SLO = Slo("http", 0.5, 50_000_000, 10 * S, 20, HttpSource(8000, "/v1/"))


@dataclass
class Pretended:
    """Counts what a test sets, under `number`."""

    counted: tuple[int, bytes] | None = None
    watched: list[tuple[Container, WatchedPort, int]] = field(default_factory=list)
    forgotten: list[ContainerKey] = field(default_factory=list)
    problem: str | None = None
    foreign: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    pointed: dict[ContainerKey, int] = field(default_factory=dict)

    def point(self, container: ContainerKey, slots: int) -> None:
        self.pointed[container] = slots

    def watch(self, container: Container, source: WatchedPort, now_ns: int) -> int | None:
        self.watched.append((container, source, now_ns))
        return self.counted[0] if self.counted else None

    def forget(self, container: ContainerKey) -> None:
        self.forgotten.append(container)

    def trouble(self, container: ContainerKey) -> str | None:
        return self.problem

    def buckets(self, number: int) -> bytes | None:
        return self.counted[1] if self.counted and self.counted[0] == number else None

    def details(self, number: int) -> dict[str, int]:
        return self.seen

    def tallies(self) -> dict[str, int]:
        return {"foreign": self.foreign}


def histogram(**buckets: int) -> bytes:
    """Counts by bucket: `b100=5`."""
    return b"".join(buckets.get(f"b{bucket}", 0).to_bytes(4, "little") for bucket in range(LATENCY_BUCKETS))


def test_it_asks_for_the_port_and_path_at_every_reading() -> None:
    counter = Pretended()
    signal = Http(counter, Requests(), [SLO])
    assert signal.read(SNAPSHOT, CHAT.key, SLO, 7) is None
    assert signal.read(SNAPSHOT, CHAT.key, SLO, 8) is None
    assert counter.watched == [(CHAT, WatchedPort(8000, "/v1/"), 7), (CHAT, WatchedPort(8000, "/v1/"), 8)]


def test_an_objective_that_is_not_in_the_policy_file_is_the_pods_own_even_if_it_equals_one() -> None:
    counter = Pretended()
    signal = Http(counter, Requests(), [SLO])
    signal.read(SNAPSHOT, CHAT.key, replace(SLO), 7)
    signal.read(SNAPSHOT, CHAT.key, SLO, 8)
    assert [port.annotated for _, port, _ in counter.watched] == [True, False]


def test_requests_since_it_was_watched_are_a_reading() -> None:
    counter = Pretended()
    signal = Http(counter, Requests(), [SLO])
    signal.read(SNAPSHOT, CHAT.key, SLO, S)
    counter.counted = (1, histogram(b100=30))
    reading = signal.read(SNAPSHOT, CHAT.key, SLO, 2 * S)
    assert reading is not None
    assert (reading.samples, reading.latency_ns) == (30, middle_ns(100))


def test_a_place_that_restarts_from_zero_adds_to_what_was_there() -> None:
    counter = Pretended((1, histogram()))
    signal = Http(counter, Requests(), [SLO])
    signal.read(SNAPSHOT, CHAT.key, SLO, S)
    counter.counted = (1, histogram(b100=30))
    signal.read(SNAPSHOT, CHAT.key, SLO, 2 * S)
    counter.counted = (2, histogram(b100=40))
    reading = signal.read(SNAPSHOT, CHAT.key, SLO, 3 * S)
    assert reading is not None
    assert reading.samples == 70


def test_silence_is_no_reading_once_the_window_is_over() -> None:
    counter = Pretended((1, histogram()))
    signal = Http(counter, Requests(), [SLO])
    signal.read(SNAPSHOT, CHAT.key, SLO, S)
    counter.counted = (1, histogram(b100=30))
    assert signal.read(SNAPSHOT, CHAT.key, SLO, 2 * S) is not None
    counter.counted = None
    assert signal.read(SNAPSHOT, CHAT.key, SLO, 3 * S) is not None
    assert signal.read(SNAPSHOT, CHAT.key, SLO, 30 * S) is None


def test_a_container_that_no_snapshot_has_shown_is_not_asked_for() -> None:
    counter = Pretended()
    assert Http(counter, Requests(), [SLO]).read(SNAPSHOT, ContainerKey("docker:other"), SLO, S) is None
    assert not counter.watched


def test_a_container_that_is_gone_is_forgotten() -> None:
    counter = Pretended((1, histogram(b100=30)))
    signal = Http(counter, Requests(), [SLO])
    signal.read(SNAPSHOT, CHAT.key, SLO, S)
    signal.forget([CHAT.key])
    assert counter.forgotten == [CHAT.key]
    assert signal.read(Snapshot(0, 0, S), CHAT.key, SLO, 2 * S) is None


def test_what_keeps_the_probes_from_counting_is_reported() -> None:
    assert Http(Pretended(problem="not loaded"), Requests(), [SLO]).trouble(CHAT.key) == "not loaded"


def test_a_service_that_only_answers_with_errors_has_no_reading_and_says_why() -> None:
    counter = Pretended((1, histogram()), seen={"status:4xx": 300, "status:2xx": 0, "ns:service": 0})
    requests = Requests()
    signal = Http(counter, requests, [SLO])
    assert [signal.read(SNAPSHOT, CHAT.key, SLO, now * S) for now in range(1, 4)] == [None] * 3
    assert signal.trouble(CHAT.key) == "no answer has a status that slo.status counts: 300 4xx"
    counted = requests.of(CHAT.key)
    assert counted is not None
    assert (counted.requests, counted.details["status:4xx"]) == (0, 300)


def test_the_statuses_of_the_objective_are_watched() -> None:
    counter = Pretended()
    slo = replace(SLO, source=HttpSource(8000, "/v1/", (2, 5)))
    Http(counter, Requests(), [slo]).read(SNAPSHOT, CHAT.key, slo, 7)
    assert counter.watched[0][1].statuses == (2, 5)


def test_connections_that_are_not_http_1_are_a_trouble_of_their_own() -> None:
    assert Http(Pretended(), Requests(), [SLO]).trouble(CHAT.key) is None
    assert "3 connections spoke something else" in (Http(Pretended(foreign=3), Requests(), []).trouble(CHAT.key) or "")


def test_the_gates_of_its_devices_are_named_by_the_bits_of_a_number() -> None:
    counter = Pretended()
    Http(counter, Requests(), [SLO]).announce(CHAT.key, [0, 3, 3])
    assert counter.pointed == {CHAT.key: 0b1001}

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a service manager reads on its socket, played by a socket of ours; and that the agent never waits for it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.core.model import Snapshot
from agent.exporters.liveness import Notifier
from tests.support.snapshots import rich_snapshot

PING = "WATCHDOG=1"
SECOND_NS = 1_000_000_000


@dataclass(slots=True)
class Manager:
    """Listens like systemd."""

    listening: socket.socket
    address: str
    made: list[Notifier] = field(default_factory=list)

    def notifier(self, watchdog_us: int = 30_000_000, decided_ns: Callable[[], int | None] = lambda: None) -> Notifier:
        self.made.append(Notifier(self.address, watchdog_us, decided_ns))
        return self.made[-1]

    def heard(self) -> list[list[str]]:
        """The lines of each message so far."""
        messages = []
        while True:
            try:
                messages.append(self.listening.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return messages

    def pings(self) -> int:
        return sum(PING in message for message in self.heard())


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    name = f"/gpuwarden-test-{os.getpid()}-{time.monotonic_ns()}"
    address = str(tmp_path / "notify") if request.param == "path" else f"@{name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as listening:
        listening.bind(address.replace("@", "\0", 1))
        manager = Manager(listening, address)
        yield manager
        for notifier in manager.made:
            notifier.close()


@pytest.fixture
def tick() -> Snapshot:
    return rich_snapshot()


def test_ready_reloading_ready_stopping_in_that_order(manager: Manager) -> None:
    notifier = manager.notifier()
    notifier.ready(SECOND_NS)
    with notifier.reloading():
        [[ready], [reloading, at]] = manager.heard()
    notifier.stopping()
    assert (ready, reloading) == ("READY=1", "RELOADING=1")
    name, _, microseconds = at.partition("=")
    assert name == "MONOTONIC_USEC"
    assert 0 <= time.monotonic_ns() // 1000 - int(microseconds) < 60_000_000
    assert manager.heard() == [["READY=1"], ["STOPPING=1"]]


def test_a_reload_that_fails_is_over_too(manager: Manager) -> None:
    with pytest.raises(KeyError), manager.notifier().reloading():
        raise KeyError
    assert manager.heard()[-1] == ["READY=1"]


def test_each_complete_tick_is_a_ping_and_the_status_is_sent_once(manager: Manager, tick: Snapshot) -> None:
    notifier = manager.notifier()
    for _ in range(3):
        notifier.tick(tick)
    first, *others = manager.heard()
    assert first[0] == PING
    assert first[1].startswith("STATUS=")
    assert f"{len(tick.containers)} containers on " in first[1]
    assert others == [[PING], [PING]]


def test_a_decision_that_hangs_starves_the_watchdog_and_one_that_is_completed_feeds_it(
    manager: Manager, tick: Snapshot
) -> None:
    decided: list[int | None] = [7]
    notifier = manager.notifier(decided_ns=lambda: decided[0])
    notifier.tick(tick)
    assert manager.pings() == 1
    for _ in range(3):
        notifier.tick(tick)
    assert manager.pings() == 0
    decided[0] = 8
    notifier.tick(tick)
    assert manager.pings() == 1
    decided[0] = None  # no policy any more: ticks are all there is
    notifier.tick(tick)
    notifier.tick(tick)
    assert manager.pings() == 2


def test_without_a_watchdog_there_are_no_pings(manager: Manager, tick: Snapshot) -> None:
    manager.notifier(watchdog_us=0).tick(tick)
    [message] = manager.heard()
    assert PING not in message


@pytest.mark.parametrize(("interval_seconds", "asked_us"), [(1, None), (7, None), (60, 240_000_000)])
def test_an_agent_that_ticks_rarely_asks_for_more_patience(
    manager: Manager, interval_seconds: int, asked_us: int | None
) -> None:
    manager.notifier(watchdog_us=30_000_000).ready(interval_seconds * SECOND_NS)
    asked = [f"WATCHDOG_USEC={asked_us}"] if asked_us else []
    assert manager.heard() == [["READY=1", *asked]]


def test_a_manager_that_does_not_read_blocks_nothing_and_gets_later_what_it_missed(
    manager: Manager, tick: Snapshot
) -> None:
    notifier = manager.notifier()
    began = time.monotonic()
    while not notifier.failures:
        notifier.tick(tick)
        assert time.monotonic() - began < 30, "its queue has no bound"
    notifier.ready(SECOND_NS)
    assert notifier.failures == 2
    manager.heard()
    notifier.tick(tick)
    assert manager.heard() == [["READY=1", PING]]


def test_a_manager_that_is_gone_blocks_nothing(manager: Manager, tick: Snapshot) -> None:
    notifier = manager.notifier()
    manager.listening.close()
    for _ in range(100):
        notifier.ready(SECOND_NS)
        notifier.tick(tick)
    assert notifier.failures == 200


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "relative", "@"])
def test_without_a_listener_nothing_is_sent_and_nothing_fails(address: str, tick: Snapshot) -> None:
    with closing(Notifier(address, 1)) as notifier:
        notifier.ready(SECOND_NS)
        with notifier.reloading():
            notifier.tick(tick)
        notifier.stopping()
        assert (notifier.failures == 0) == (address != "@")


def test_the_managers_variables_are_for_the_agent_and_not_for_its_children() -> None:
    mine = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "5000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    with closing(Notifier.of(mine, lambda: None)) as notifier:
        assert mine == {"HOME": "/"}
        assert notifier._watchdog_us == 5_000_000
    another = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"}
    with closing(Notifier.of(another, lambda: None)) as notifier:
        assert notifier._watchdog_us == 0

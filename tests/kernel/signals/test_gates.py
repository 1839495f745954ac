# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The gates of a container's devices know of its HTTP requests before they launch, and when none is left."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from agent.core.clock import monotonic_ns
from agent.node import preflight
from agent.node.preflight import kernel_version
from agent.probes.abi import (
    HASTY_ALWAYS,
    PAUSE_FREE,
    ROLE_OFFLINE,
    ROLE_ONLINE,
    RULE_GATE,
    SLOT_NONE,
    SLOTS,
    TRUST_LOST,
    TRUST_LOST_IDLE,
    TRUST_MOST,
    TRUSTED,
    Gate,
    ProcessKey,
    Rule,
)
from agent.probes.libcuda import LibcudaProbes
from enforce.signals.http_probe import SHARED, HttpProbes, WatchedPort
from tests.kernel.signals.http_service import GET, OK, PATIENCE_SECONDS, asking, exactly, listening, talk
from tests.support.programs.driver import Driver, records, resume_until_done

PLACE, EPOCH = 3, 7
DEVICES = 0b101
ARRIVALS = pytest.mark.skipif(kernel_version(os.uname().release) < (6, 3), reason="not seen before Linux 6.3")
LONG_AGO, TO_COME = -(10**12), 10**12
FOR_EVER = 1 << 63
SHAPE = "launch:1x1x1:32x1x1"


@pytest.fixture(scope="module")
def probes(own_probes: LibcudaProbes) -> Iterator[HttpProbes]:
    """They tell the gates of the object that paces launches."""
    shared = {name: own_probes.bpf.map_fd(name) for name in SHARED}
    with HttpProbes(preflight.bpf_object().with_name("http.bpf.o"), shared) as probes:
        yield probes


@pytest.fixture
def gates(own_probes: LibcudaProbes) -> Iterator[Sequence[Gate]]:
    """All open; no test leaves a request behind."""
    gates: Sequence[Gate] = own_probes.map("gates").share(SLOTS)
    for gate in gates:
        gate.trust = 0
    yield gates
    assert [gate.served for gate in gates] == [0] * SLOTS


def watch(probes: HttpProbes, listener: socket.socket) -> None:
    probes.watch(PLACE, EPOCH, WatchedPort(listener.getsockname()[1]))
    probes.point(PLACE, DEVICES)
    probes.follow(PLACE, EPOCH, os.getpid())


def served(gates: Sequence[Gate]) -> list[int]:
    """Of the first four devices."""
    return [gate.served for gate in gates[:4]]


def test_a_request_is_known_from_its_first_byte_to_its_answers_last(probes: HttpProbes, gates: Sequence[Gate]) -> None:
    seen, began_ns = [], monotonic_ns()

    def serve(connection: socket.socket) -> None:
        exactly(connection, GET[:10])
        seen.append(served(gates))
        exactly(connection, GET[10:])
        seen.append(served(gates))
        connection.sendall(OK[:-1])
        seen.append(served(gates))
        connection.sendall(OK[-1:])
        seen.append(served(gates))

    with listening() as listener:
        watch(probes, listener)
        talk(listener, serve, asking())
    assert seen == [[1, 0, 1, 0], [1, 0, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert began_ns < gates[0].served_ns < monotonic_ns()


def test_requests_that_wait_for_each_other_are_all_in_service(probes: HttpProbes, gates: Sequence[Gate]) -> None:
    seen = []

    def serve(connection: socket.socket) -> None:
        exactly(connection, GET * 3)
        for _ in range(3):
            seen.append(gates[0].served)
            connection.sendall(OK)
        seen.append(gates[0].served)

    def ask(client: socket.socket) -> None:
        client.sendall(GET * 3)
        exactly(client, OK * 3)

    with listening() as listener:
        watch(probes, listener)
        talk(listener, serve, ask)
    assert seen == [3, 2, 1, 0]


@ARRIVALS
def test_a_request_that_no_thread_has_read_yet_counts_from_its_arrival(
    probes: HttpProbes, gates: Sequence[Gate]
) -> None:
    seen = []

    def serve(connection: socket.socket) -> None:
        exactly(connection, GET)
        connection.sendall(OK)
        connection.recv(1, socket.MSG_PEEK)  # the next one is there
        seen.append(served(gates))
        exactly(connection, GET[:10])
        seen.append(served(gates))
        exactly(connection, GET[10:])
        connection.sendall(OK)
        seen.append(served(gates))

    with listening() as listener:
        watch(probes, listener)
        talk(listener, serve, asking(times=2))
    assert seen == [[1, 0, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]]


@ARRIVALS
def test_a_request_that_came_before_its_connection_was_accepted_takes_trust_away(
    probes: HttpProbes, gates: Sequence[Gate]
) -> None:
    with listening() as listener:
        watch(probes, listener)
        gates[0].trust, gates[0].last_online_ns = TRUST_MOST, 1 << 62  # they launch
        with socket.create_connection(listener.getsockname()[:2], timeout=PATIENCE_SECONDS) as client:
            client.sendall(GET)
            with listener.accept()[0] as connection:
                connection.settimeout(PATIENCE_SECONDS)
                exactly(connection, GET)
                connection.sendall(OK)
                assert gates[0].trust == TRUST_MOST - TRUST_LOST
                client.sendall(GET)
                exactly(connection, GET)
                connection.sendall(OK)
                assert gates[0].trust == TRUST_MOST - TRUST_LOST
            exactly(client, OK * 2)
    gates[0].last_online_ns = 0


@ARRIVALS
def test_requests_that_launch_nothing_take_trust_away(probes: HttpProbes, gates: Sequence[Gate]) -> None:
    def serve(connection: socket.socket) -> None:
        for _ in range(5):
            exactly(connection, GET)
            connection.sendall(OK)

    with listening() as listener:
        watch(probes, listener)
        gates[0].trust = gates[2].trust = TRUST_MOST
        gates[2].last_online_ns = 1 << 62  # there they launch
        try:
            talk(listener, serve, asking(times=5))
        finally:
            gates[2].last_online_ns = 0
        lost = {TRUST_LOST, 0}  # the first one may have come before its connection was accepted
        assert TRUST_MOST - gates[0].trust - 5 * TRUST_LOST_IDLE in lost
        assert TRUST_MOST - gates[2].trust in lost


@pytest.mark.parametrize(("idle_since_ns", "hasty"), [(TO_COME, True), (LONG_AGO, False)])
def test_clients_that_ask_again_at_once_are_known_as_such(
    probes: HttpProbes, gates: Sequence[Gate], idle_since_ns: int, *, hasty: bool
) -> None:
    def serve(connection: socket.socket) -> None:
        for _ in range(100):
            exactly(connection, GET)
            connection.sendall(OK)

    def ask(client: socket.socket) -> None:
        for _ in range(100):
            gates[0].idle_ns = monotonic_ns() + idle_since_ns
            client.sendall(GET)
            exactly(client, OK)

    with listening() as listener:
        watch(probes, listener)
        gates[0].hasty = HASTY_ALWAYS // 2
        talk(listener, serve, ask)
    assert (gates[0].hasty > HASTY_ALWAYS // 2) == hasty


def test_a_body_that_comes_after_its_head_leaves_no_request_behind(probes: HttpProbes, gates: Sequence[Gate]) -> None:
    head, seen = b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n", []

    def serve(connection: socket.socket) -> None:
        for _ in range(2):
            exactly(connection, head)
            exactly(connection, b"hello")
            seen.append(served(gates))
            connection.sendall(OK)
            seen.append(served(gates))

    def ask(client: socket.socket) -> None:
        for _ in range(2):
            client.sendall(head)
            client.sendall(b"hello")
            exactly(client, OK)

    with listening() as listener:
        watch(probes, listener)
        talk(listener, serve, ask)
    assert seen == [[1, 0, 1, 0], [0, 0, 0, 0]] * 2


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("end", [lambda connection: connection.close(), reset], ids=["closed", "reset"])
def test_a_request_whose_connection_ends_is_in_service_no_more(
    probes: HttpProbes, gates: Sequence[Gate], end: Callable[[socket.socket], None]
) -> None:
    seen = []

    def serve(connection: socket.socket) -> None:
        exactly(connection, GET)
        seen.append(served(gates))
        end(connection)

    with listening() as listener:
        watch(probes, listener)
        talk(listener, serve, lambda client: client.sendall(GET))
    assert seen == [[1, 0, 1, 0]]


def test_a_container_that_is_on_another_device_tells_that_ones_gate_with_the_next_byte(
    probes: HttpProbes, gates: Sequence[Gate]
) -> None:
    seen = []

    def serve(connection: socket.socket) -> None:
        exactly(connection, GET)
        probes.point(PLACE, 0b1000)
        connection.sendall(OK[:-1])
        seen.append(served(gates))
        connection.sendall(OK[-1:])

    with listening() as listener:
        watch(probes, listener)
        talk(listener, serve, asking())
    assert seen == [[0, 0, 0, 1]]


def test_probes_that_go_leave_no_request_and_no_trust_behind(own_probes: LibcudaProbes) -> None:
    shared = {name: own_probes.bpf.map_fd(name) for name in SHARED}
    gates: Sequence[Gate] = own_probes.map("gates").share(SLOTS)
    seen = []

    def serve(connection: socket.socket) -> None:
        exactly(connection, GET)
        seen.append(gates[0].served)
        stack.close()
        seen.append(gates[0].served)
        connection.sendall(OK)

    with ExitStack() as stack, listening() as listener:
        probes = stack.enter_context(HttpProbes(preflight.bpf_object().with_name("http.bpf.o"), shared))
        gates[0].trust = TRUST_MOST
        watch(probes, listener)
        talk(listener, serve, asking())
    assert seen == [1, 0]
    assert gates[0].trust == 0


@pytest.mark.parametrize(
    ("before", "in_service", "after"),
    [(5, 1, 6), (TRUST_MOST, 1, TRUST_MOST), (TRUST_MOST, 0, TRUST_MOST - TRUST_LOST), (3, 0, 0)],
)
def test_trust_grows_with_each_request_that_was_seen_before_it_launched(
    driver: Driver, own_probes: LibcudaProbes, gates: Sequence[Gate], before: int, in_service: int, after: int
) -> None:
    with driver.start(SHAPE, "sync") as driven:
        own_probes.map("rules").put(ProcessKey.of(driven.process), rule(ROLE_ONLINE))
        gates[0].trust, gates[0].served = before, in_service
        driven.begin()
        driven.finish()
        gates[0].served = 0
    assert gates[0].trust == after


def rule(role: int) -> Rule:
    """On the first device."""
    made = Rule(role=role, flags=RULE_GATE, rate_ppm=1_000_000, max_queued_ns=FOR_EVER, launch_ns=1)
    made.slots[:] = [0] + [SLOT_NONE] * (len(made.slots) - 1)
    made.slot_unknown = 0
    return made


@pytest.mark.parametrize(
    ("trust", "in_service", "since_ns", "stops"),
    [(TRUSTED, 1, TO_COME, 1), (TRUSTED, 1, LONG_AGO, 0), (TRUSTED, 0, TO_COME, 0), (TRUSTED - 1, 1, TO_COME, 0)],
)
def test_a_request_that_was_just_read_stops_offline_launches_where_all_are_seen(
    driver: Driver,
    own_probes: LibcudaProbes,
    gates: Sequence[Gate],
    *,
    trust: int,
    in_service: int,
    since_ns: int,
    stops: int,
) -> None:
    with driver.start(SHAPE) as driven:
        key = ProcessKey.of(driven.process)
        own_probes.map("rules").put(key, rule(ROLE_OFFLINE))
        own_probes.map("controls").share(1)[0].lease_until_ns = FOR_EVER
        gates[0].trust, gates[0].served, gates[0].served_ns = trust, in_service, monotonic_ns() + since_ns
        driven.begin()
        resume_until_done(driven)
        gates[0].served = 0
        pace = own_probes.map("paces").get(key)
    assert pace is not None
    assert pace.gate_pauses == stops


def test_the_guardian_is_woken_when_the_last_request_is_answered_and_another_process_waits(
    probes: HttpProbes, own_probes: LibcudaProbes, gates: Sequence[Gate]
) -> None:
    records(own_probes)  # of before
    found = []

    def serve(connection: socket.socket) -> None:
        exactly(connection, GET * 2)
        for _ in range(2):
            connection.sendall(OK)
            found.append([(wake.kind, wake.slot) for wake in records(own_probes)])

    def ask(client: socket.socket) -> None:
        client.sendall(GET * 2)
        exactly(client, OK * 2)

    gates[2].waiting, gates[2].free_posted, gates[2].trust = 1, 0, TRUST_MOST
    try:
        with listening() as listener:
            watch(probes, listener)
            talk(listener, serve, ask)
    finally:
        gates[2].waiting = gates[2].free_posted = 0
    assert found == [[], [(PAUSE_FREE, 2)]]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Each HTTP/1 request that a server answers is one latency, by its system calls alone."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from agent.core.clock import monotonic_ns
from agent.node import preflight
from enforce.signals.http_probe import HttpProbes
from tests.kernel.signals.http_service import GET, OK, Act, Service, Times, asking, exactly, listening, once, talk

_PLACES = itertools.count(1)
_DELAY_SECONDS = 0.004  # servers and clients sleep so long by design: the probes measure it
HEAD = b"HEAD / HTTP/1.1\r\n\r\n"
LONG = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture(scope="module")
def probes() -> Iterator[HttpProbes]:
    with HttpProbes(preflight.bpf_object().with_name("http.bpf.o")) as probes:
        yield probes


@pytest.fixture
def service(probes: HttpProbes) -> Iterator[Service]:
    number = next(_PLACES)
    yield Service(probes, number % 64, number)
    probes.unwatch(number % 64)


def test_requests_on_one_connection_are_one_latency_each(service: Service) -> None:
    times = Times()

    def serve(connection: socket.socket) -> None:
        for _ in range(5):
            exactly(connection, GET)
            times.read += monotonic_ns()
            time.sleep(_DELAY_SECONDS)
            times.answering += monotonic_ns()
            connection.sendall(OK)
            times.answered += monotonic_ns()

    def ask(client: socket.socket) -> None:
        for _ in range(5):
            times.asked += monotonic_ns()
            client.sendall(GET)
            exactly(client, OK)

    service.talk(serve, ask)
    assert service.found.count == 5
    assert times.hold(service.found.sum_ns)
    assert service.tallies == {"answered": 5}


def test_three_requests_in_one_segment_begin_together_and_end_one_after_the_other(service: Service) -> None:
    times = Times()

    def serve(connection: socket.socket) -> None:
        exactly(connection, GET * 3)
        times.read += 3 * monotonic_ns()
        for _ in range(3):
            time.sleep(_DELAY_SECONDS)
            times.answering += monotonic_ns()
            connection.sendall(OK)
            times.answered += monotonic_ns()

    def ask(client: socket.socket) -> None:
        times.asked += 3 * monotonic_ns()
        client.sendall(GET * 3)
        exactly(client, OK * 3)

    service.talk(serve, ask)
    assert service.found.count == 3
    assert times.hold(service.found.sum_ns)
    assert service.found.sum_ns >= (1 + 2 + 3) * int(_DELAY_SECONDS * 1e9)


def test_a_request_begins_at_its_last_of_five_reads_and_ends_at_the_last_of_fifty_writes(service: Service) -> None:
    times = Times()
    parts = [GET[at : at + 6] for at in range(0, len(GET), 6)]
    assert len(parts) >= 5

    def serve(connection: socket.socket) -> None:
        for part in parts:
            exactly(connection, part)
            times.read = monotonic_ns()
            connection.recv(1, socket.MSG_PEEK) if part is not parts[-1] else None
        connection.sendall(LONG)
        for _ in range(49):
            connection.sendall(bytes(20))
        time.sleep(_DELAY_SECONDS)
        times.answering = monotonic_ns()
        connection.sendall(bytes(20))
        times.answered = monotonic_ns()

    def ask(client: socket.socket) -> None:
        for part in parts:
            time.sleep(_DELAY_SECONDS)
            times.asked = monotonic_ns()
            client.sendall(part)
        exactly(client, LONG + bytes(1000))

    service.talk(serve, ask)
    assert service.found.count == 1
    assert times.hold(service.found.sum_ns)


ANSWERS = {
    "chunked": (
        GET,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n",
    ),
    "chunked with a trailer": (
        GET,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n1\r\n0\r\n0\r\nA: b\r\n\r\n",
    ),
    "no body to HEAD": (HEAD, b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"),
    "204": (GET, b"HTTP/1.1 204 No Content\r\n\r\n"),
    "304": (GET, b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1000\r\n\r\n"),
    "404": (GET, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
    "500": (GET, b"HTTP/1.1 500 Oh\r\nContent-Type: text/plain\r\nContent-Length: 3\r\n\r\nno!"),
    "HTTP/1.0": (b"GET / HTTP/1.0\r\n\r\n", b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx"),
    "early hints": (GET, b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK),
    "a body that looks like an answer": (GET, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(OK) + OK),
    "to a body": (b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(GET) + GET, OK),
    "to chunks": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", OK),
}


@pytest.mark.parametrize(("request_", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_every_kind_of_answer_ends_its_request(service: Service, request_: bytes, answer: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        for _ in range(3):
            exactly(connection, request_)
            for at in range(0, len(answer), 7):
                connection.sendall(answer[at : at + 7])

    service.talk(serve, asking(answer, request_, times=3))
    assert service.tallies == {"answered": 3}
    assert service.found.count == 3


def test_an_interim_answer_ends_nothing(service: Service) -> None:
    begun = b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"

    def serve(connection: socket.socket) -> None:
        exactly(connection, begun)
        connection.sendall(interim)
        time.sleep(_DELAY_SECONDS)
        exactly(connection, b"body")
        connection.sendall(OK)

    def ask(client: socket.socket) -> None:
        client.sendall(begun)
        exactly(client, interim)
        client.sendall(b"body")
        exactly(client, OK)

    service.talk(serve, ask)
    assert service.tallies == {"answered": 1}
    counts = service.probes.counts(service.place)
    assert counts.head_ns >= int(_DELAY_SECONDS * 1e9)
    assert counts.head_ns - counts.service_ns == pytest.approx(counts.receive_ns, rel=0.2)
    assert counts.service_ns == service.found.sum_ns


FOREIGN = {
    "a TLS client hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "random bytes": bytes((17 * n * n + 3) % 251 for n in range(500)),
    "zeros": bytes(100),
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_http_counts_as_a_foreign_connection(service: Service, data: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        for _ in range(3):
            exactly(connection, data)
            connection.sendall(data + GET + OK)

    service.talk(serve, asking(data + GET + OK, data, times=3))
    assert service.tallies == {"foreign": 1}
    assert service.found.count == 0


def test_frames_after_an_upgrade_are_no_requests(service: Service) -> None:
    request = b"GET /chat HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    answer = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"

    def serve(connection: socket.socket) -> None:
        once(answer, request)(connection)
        for _ in range(3):
            once()(connection)

    def ask(client: socket.socket) -> None:
        asking(answer, request)(client)
        asking(times=3)(client)

    service.talk(serve, ask)
    assert service.tallies == {"answered": 1}


def test_a_client_that_has_sent_all_is_answered(service: Service) -> None:
    def ask(client: socket.socket) -> None:
        client.sendall(GET)
        client.shutdown(socket.SHUT_WR)
        exactly(client, OK)

    def serve(connection: socket.socket) -> None:
        exactly(connection, GET)
        assert connection.recv(1) == b""
        connection.sendall(OK)

    service.talk(serve, ask)
    assert service.tallies == {"answered": 1}


def _write_on_and_on(connection: socket.socket) -> None:
    while True:
        connection.sendall(bytes(10))


def test_a_request_whose_client_goes_away_meanwhile_is_unanswered(service: Service) -> None:
    gone = threading.Event()

    def ask(client: socket.socket) -> None:
        client.sendall(GET)
        exactly(client, LONG[:10])
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close is a reset
        client.close()
        gone.set()

    def serve(connection: socket.socket) -> None:
        exactly(connection, GET)
        connection.sendall(LONG)
        assert gone.wait(60)
        with pytest.raises(ConnectionError):
            _write_on_and_on(connection)

    service.talk(serve, ask)
    assert service.tallies == {"unanswered": 1}
    assert service.found.count == 0


def test_an_answer_without_a_length_ends_with_its_last_write(service: Service) -> None:
    times = Times()

    def serve(connection: socket.socket) -> None:
        exactly(connection, GET)
        times.read = monotonic_ns()
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        time.sleep(_DELAY_SECONDS)
        times.answering = monotonic_ns()
        connection.sendall(b"the end")
        times.answered = monotonic_ns()
        time.sleep(_DELAY_SECONDS)

    def ask(client: socket.socket) -> None:
        times.asked = monotonic_ns()
        client.sendall(GET)
        exactly(client, b"HTTP/1.1 200 OK\r\n\r\nthe end")
        assert client.recv(1) == b""

    service.talk(serve, ask)
    assert service.tallies == {"answered": 1}
    assert times.hold(service.found.sum_ns)


def _receive_vector(connection: socket.socket, most: int) -> bytes:
    first, second, third = bytearray(3), bytearray(1), bytearray(most)
    count = os.readv(connection.fileno(), [first, second, third])
    return bytes(first + second + third)[:count]


def _receive_message(connection: socket.socket, most: int) -> bytes:
    first, second = bytearray(5), bytearray(most)
    count = connection.recvmsg_into([first, second])[0]
    return bytes(first + second)[:count]


RECEIVES: dict[str, Callable[[socket.socket, int], bytes]] = {
    "read": lambda connection, most: os.read(connection.fileno(), most),
    "recvfrom": lambda connection, most: connection.recv(most),
    "readv": _receive_vector,
    "recvmsg": _receive_message,
}


def _send_pieces(send: Callable[[socket.socket, list[bytes]], int]) -> Act:
    def sending(connection: socket.socket) -> None:
        pieces = [LONG[:9], b"", LONG[9:30], LONG[30:] + bytes(500), *([bytes(10)] * 50)]
        assert send(connection, pieces) == len(LONG) + 1000

    return sending


def _send_file(connection: socket.socket) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(1000))
        file.flush()
        connection.sendall(LONG, socket.MSG_MORE)
        assert os.sendfile(connection.fileno(), file.fileno(), 0, 1000) == 1000


def _send_spliced(connection: socket.socket) -> None:
    reading, writing = os.pipe()
    os.write(writing, bytes(1000))
    connection.sendall(LONG)
    assert os.splice(reading, connection.fileno(), 1000) == 1000
    os.close(reading)
    os.close(writing)


SENDS: dict[str, Act] = {
    "write": lambda connection: os.write(connection.fileno(), LONG + bytes(1000)),
    "sendto": lambda connection: connection.sendall(LONG + bytes(1000)),
    "writev": _send_pieces(lambda connection, pieces: os.writev(connection.fileno(), pieces)),
    "sendmsg": _send_pieces(lambda connection, pieces: connection.sendmsg(pieces)),
    "sendfile": _send_file,
    "splice": _send_spliced,
}


@pytest.mark.parametrize("receive", RECEIVES)
@pytest.mark.parametrize("send", SENDS)
def test_every_call_that_moves_bytes_is_seen(service: Service, receive: str, send: str) -> None:
    def serve(connection: socket.socket) -> None:
        connection.setblocking(True)
        for _ in range(2):
            got = b""
            while len(got) < len(GET):
                got += RECEIVES[receive](connection, len(GET) - len(got))
            SENDS[send](connection)

    service.talk(serve, asking(LONG + bytes(1000), times=2))
    assert service.tallies == {"answered": 2}


def test_ipv6_is_seen(service: Service) -> None:
    service.talk(once(), asking(), family=socket.AF_INET6)
    assert service.tallies == {"answered": 1}


def test_an_answer_may_come_from_another_thread_and_another_descriptor(service: Service) -> None:
    def serve(connection: socket.socket) -> None:
        exactly(connection, GET)
        copy = os.dup(connection.fileno())
        thread = threading.Thread(target=os.write, args=(copy, OK))
        thread.start()
        thread.join()
        os.close(copy)

    service.talk(serve, asking())
    assert service.tallies == {"answered": 1}


def test_only_the_wanted_port_and_path_count(service: Service) -> None:
    chat = b"POST /v1/chat HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi"
    health = b"GET /v1-health HTTP/1.1\r\n\r\n"

    def serve(connection: socket.socket) -> None:
        once(request=chat)(connection)
        once(request=health)(connection)

    def ask(client: socket.socket) -> None:
        asking(request=chat)(client)
        asking(request=health)(client)

    service.talk(serve, ask, path="/v1/")
    with listening() as other:
        talk(other, once(), asking())
    assert service.tallies == {"answered": 1, "elsewhere": 1}
    assert service.found.count == 1


def test_a_request_to_another_server_is_none_of_ours(service: Service) -> None:
    with listening() as watched, listening() as elsewhere:
        service.watch(watched.getsockname()[1])
        talk(watched, lambda _: talk(elsewhere, once(), asking()), lambda client: client.recv(1))
    assert not service.tallies


def test_a_header_that_is_too_long_to_look_through_ends_with_the_last_write_before_the_next(service: Service) -> None:
    long = b"GET / HTTP/1.1\r\nCookie: " + b"x" * 600 + b"\r\n\r\n"
    endless = b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000 + b"Content-Length: 0\r\n\r\n"

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        for _ in range(2):
            exactly(connection, long)
            connection.sendall(endless)

    service.talk(serve, asking(endless, long, times=2))
    assert service.tallies.pop("long") >= 2
    assert service.tallies["answered"] == service.found.count == 2


def test_a_connection_from_before_counts_from_its_next_request_on(service: Service) -> None:
    late = threading.Barrier(2, timeout=60)

    def serve(connection: socket.socket) -> None:
        exactly(connection, b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nbo")
        late.wait()
        late.wait()
        exactly(connection, b"dy")
        connection.sendall(OK)
        once()(connection)

    def ask(client: socket.socket) -> None:
        client.sendall(b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nbo")
        late.wait()
        service.watch(client.getpeername()[1])
        late.wait()
        client.sendall(b"dy")
        exactly(client, OK)
        asking()(client)

    with listening() as listener:
        talk(listener, serve, ask)
    assert service.tallies == {"unseen": 1, "answered": 1}


def test_nothing_is_counted_once_it_is_not_watched_any_more(service: Service) -> None:
    with listening() as listener:
        service.watch(listener.getsockname()[1])
        talk(listener, once(), asking())
        service.probes.unwatch(service.place)
        talk(listener, once(), asking())
    assert service.tallies == {"answered": 1}
    assert os.getpid() not in service.probes.followed()

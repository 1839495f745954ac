# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where HTTP/1 requests and their answers end, however the bytes are cut."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.programs.http_bytes import Connection, build


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    return build(tmp_path_factory.mktemp("http"))


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its whole answer, interim ones included."""

    request: bytes
    answer: bytes


def _chunked(body: bytes, sizes: Sequence[int], trailer: bool) -> bytes:
    chunks, at = b"", 0
    for size in sizes:
        part = body[at : at + size]
        at += size
        if part:
            chunks += b"%X;why=not\r\n%s\r\n" % (len(part), part)
    if rest := body[at:]:
        chunks += b"%x\r\n%s\r\n" % (len(rest), rest)
    return chunks + b"0\r\n" + (b"Expires: never\r\n" if trailer else b"") + b"\r\n"


_BODIES = st.binary(max_size=200) | st.sampled_from(
    [b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"0\r\n\r\n"]
)
_SIZES = st.lists(st.integers(1, 40), max_size=6)
_NOISE = st.sampled_from(
    [
        b"",
        b"Host: h\r\n",
        b"Content-Type: text/plain\r\n",
        b"Contents: 7\r\n",
        b"Transfer: chunked\r\n",
        b"C:\r\n",
        b"T\r\n",
    ]
)
_LENGTH = st.sampled_from([b"Content-Length", b"content-length", b"CONTENT-LENGTH"])


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Header lines that say how long a body is, the end of the header, and the body."""
    body, noise = draw(_BODIES), draw(_NOISE)
    if draw(st.booleans()):
        name = draw(st.sampled_from([b"Transfer-Encoding: chunked", b"transfer-encoding:\tgzip, Chunked"]))
        return noise + name + b"\r\n" + noise + b"\r\n" + _chunked(body, draw(_SIZES), draw(st.booleans()))
    return noise + draw(_LENGTH) + b": %d\r\n" % len(body) + noise + b"\r\n" + body


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    """Any request, and any answer that states where it ends."""
    method = draw(st.sampled_from([b"GET", b"POST", b"HEAD", b"OPTIONS", b"M-SEARCH"]))
    target = draw(st.sampled_from([b"/", b"*", b"/a?b=c%20d" * 20, b"http://host/path"]))
    blank = draw(st.sampled_from([b"", b"\r\n"]))
    start = blank + method + b" " + target + b" HTTP/1.1\r\n"
    request = start + (draw(bodies()) if method == b"POST" else draw(_NOISE) + b"\r\n")
    interim = draw(
        st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"])
    )
    status = draw(st.sampled_from([b"200 OK", b"404", b"500 Oh no", b"204 None", b"304 Same"]))
    line = b"HTTP/1.1 " + status + b"\r\n"
    if method == b"HEAD" or status[:3] in (b"204", b"304"):
        return Exchange(request, interim + line + b"Content-Length: 77\r\n\r\n")
    return Exchange(request, interim + line + draw(bodies()))


def _pieces(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Cut into parts of these sizes, over and over."""
    parts: list[bytes] = []
    at = 0
    while at < len(data):
        size = sizes[len(parts) % len(sizes)]
        parts.append(data[at : at + size])
        at += size
    return parts


_CUTS = st.lists(st.integers(1, 90), min_size=1, max_size=8)


@given(st.lists(exchanges(), min_size=1, max_size=6), _CUTS, _CUTS)
def test_each_request_is_one_latency_however_it_is_cut(
    library: c.CDLL, all_of_them: list[Exchange], read_sizes: list[int], write_sizes: list[int]
) -> None:
    connection, wanted = Connection(library), []
    for exchange in all_of_them:
        begun = max(connection.read(piece) for piece in _pieces(exchange.request, read_sizes))
        ended = max(connection.write(piece) for piece in _pieces(exchange.answer, write_sizes))
        wanted.append((begun, ended))
    assert connection.latencies == wanted
    assert connection.tallies == {"answered": len(wanted)}


@given(st.lists(exchanges(), min_size=1, max_size=30), _CUTS, _CUTS)
def test_pipelined_requests_are_answered_in_their_order(
    library: c.CDLL, all_of_them: list[Exchange], read_sizes: list[int], write_sizes: list[int]
) -> None:
    connection, begun, at, total = Connection(library), [], 0, 0
    ends = []
    for exchange in all_of_them:
        total += len(exchange.request)
        ends.append(total)
    for piece in _pieces(b"".join(exchange.request for exchange in all_of_them), read_sizes):
        call = connection.read(piece)
        begun += [call for end in ends if at < end <= at + len(piece)]
        at += len(piece)
    ended, at, total = [], 0, 0
    ends = []
    for exchange in all_of_them:
        total += len(exchange.answer)
        ends.append(total)
    for piece in _pieces(b"".join(exchange.answer for exchange in all_of_them), write_sizes):
        call = connection.write(piece)
        ended += [call for end in ends if at < end <= at + len(piece)]
        at += len(piece)
    assert connection.latencies == list(zip(begun, ended, strict=True))
    assert connection.tallies == {"answered": len(all_of_them)}


_SIDES = st.lists(st.tuples(st.booleans(), st.binary(max_size=60)), max_size=30)


@given(_SIDES, st.booleans())
def test_what_is_not_http_is_no_request(library: c.CDLL, calls: list[tuple[bool, bytes]], fresh: bool) -> None:
    connection = Connection(library, fresh=fresh)
    for is_read, data in calls:
        plain = data.replace(b"HTTP", b"ftp")
        (connection.read if is_read else connection.write)(plain)
    connection.end()
    assert not connection.latencies


_FRAGMENTS = st.sampled_from(
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"Content-Length: 5\r\n",
        b"\r\n",
        b"12345",
        b"HEAD /",
        b"5\r\n",
    ]
) | st.binary(max_size=12)


@given(st.lists(st.tuples(st.booleans(), st.lists(_FRAGMENTS, max_size=5)), max_size=30), st.booleans())
def test_there_are_no_more_latencies_than_requests_and_answers(
    library: c.CDLL, calls: list[tuple[bool, list[bytes]]], fresh: bool
) -> None:
    connection = Connection(library, fresh=fresh)
    for is_read, parts in calls:
        (connection.read if is_read else connection.write)(b"".join(parts))
    connection.end()
    read = b"".join(b"".join(parts) for is_read, parts in calls if is_read)
    assert len(connection.latencies) <= read.count(b" HTTP/1.")
    assert all(begun <= ended for begun, ended in connection.latencies)


FOREIGN = {
    "a TLS client hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "HTTP/0.9": b"GET /\r\n",
    "a mail client": b"EHLO example\r\n",
    "RTSP": b"OPTIONS * RTSP/1.0\r\n\r\n",
    "zeros": bytes(64),
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_protocol_is_recognised_by_its_first_bytes(library: c.CDLL, data: bytes) -> None:
    connection = Connection(library)
    connection.read(data)
    connection.write(data)
    connection.read(b"GET / HTTP/1.1\r\n\r\n")
    connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    connection.end()
    assert connection.tallies == {"foreign": 1}


def test_an_answer_in_another_protocol_is_none(library: c.CDLL) -> None:
    connection = Connection(library)
    connection.read(b"GET / HTTP/1.1\r\n\r\n")
    connection.write(b"GET / HTTP/1.1\r\n\r\n")  # an echo
    connection.end()
    assert connection.tallies == {"foreign": 1}


def test_a_client_that_sends_its_head_slowly_makes_no_answer_slow(library: c.CDLL) -> None:
    connection = Connection(library)
    for byte in b"GET / HTTP/1.1\r\nHost: h\r\n\r\n":
        connection.now += 100
        head = connection.read(bytes([byte]))
    assert connection.latencies == []
    answered = connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert connection.latencies == [(head, answered)]


def test_a_body_that_comes_after_the_answer_has_begun_moves_no_beginning(library: c.CDLL) -> None:
    connection = Connection(library)
    head = connection.read(b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nha")
    first = connection.write(b"HTTP/1.1 413 Too much\r\nContent-")
    connection.read(b"lf")
    answered = connection.write(b"Length: 0\r\n\r\n")
    assert connection.latencies == [(head, answered)]
    assert connection.answers == [(first, 4)]


def test_the_first_byte_and_the_status_are_those_of_the_final_answer(library: c.CDLL) -> None:
    connection = Connection(library)
    connection.read(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
    connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = connection.read(b"body")
    first = connection.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\n")
    last = connection.write(b"no")
    assert connection.latencies == [(body, last)]
    assert connection.answers == [(first, 5)]


def test_the_status_of_an_answer_that_is_not_looked_at_is_unknown(library: c.CDLL) -> None:
    connection = Connection(library)
    connection.read(b"GET /1 HTTP/1.1\r\n\r\n")
    connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    connection.read(b"GET /2 HTTP/1.1\r\n\r\n\0")  # what follows is no request, so nothing is looked at
    connection.write(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
    connection.end()
    assert [status for _, status in connection.answers] == [2, 0]


def test_after_an_upgrade_nothing_is_looked_at(library: c.CDLL) -> None:
    connection = Connection(library)
    connection.read(b"GET /chat HTTP/1.1\r\nUpgrade: websocket\r\n\r\n")
    connection.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
    connection.read(b"GET / HTTP/1.1\r\n\r\n")
    connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    connection.end()
    assert connection.tallies == {"answered": 1}


def test_a_tunnel_is_not_looked_into(library: c.CDLL) -> None:
    connection = Connection(library)
    connection.read(b"CONNECT host:80 HTTP/1.1\r\n\r\n")
    connection.write(b"HTTP/1.1 200 OK\r\n\r\n")
    connection.read(b"GET / HTTP/1.1\r\n\r\n")
    connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert connection.tallies == {"answered": 1}


def test_an_answer_without_a_length_ends_with_its_last_write(library: c.CDLL) -> None:
    connection = Connection(library)
    begun = connection.read(b"GET / HTTP/1.0\r\n\r\n")
    connection.write(b"HTTP/1.0 200 OK\r\n\r\n")
    ended = connection.write(b"the end")
    assert not connection.latencies
    connection.end()
    assert connection.latencies == [(begun, ended)]


def test_a_request_without_an_answer_is_counted_as_that(library: c.CDLL) -> None:
    connection = Connection(library)
    connection.read(b"GET / HTTP/1.1\r\n\r\n" * 2)
    connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
    connection.end()
    assert connection.tallies == {"unanswered": 2}


def test_more_pipelined_requests_than_are_kept_are_counted_as_lost(library: c.CDLL) -> None:
    connection = Connection(library)
    connection.read(b"GET / HTTP/1.1\r\n\r\n" * 33)
    assert connection.tallies == {"deep": 1}


def test_a_connection_that_was_not_seen_from_its_beginning_is_understood_from_the_next_request_on(
    library: c.CDLL,
) -> None:
    connection = Connection(library, fresh=False)
    connection.read(b"the rest of a body")
    connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    begun = connection.read(b"GET / HTTP/1.1\r\n\r\n")
    ended = connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert connection.latencies == [(begun, ended)]
    assert connection.tallies == {"unseen": 1, "answered": 1}


def test_a_server_that_breaks_its_framing_is_understood_from_the_next_request_on(library: c.CDLL) -> None:
    connection = Connection(library)
    request, answer = b"HEAD / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
    first = connection.read(request), connection.write(answer + b"no"), "the body that HEAD must not have"
    second = connection.read(request), connection.write(answer)
    assert connection.latencies == [first[:2], second]
    assert connection.tallies == {"answered": 2, "unframed": 1}


@pytest.mark.parametrize(("path", "target", "counts"), [
    ("/v1", "/v1/chat", True),
    ("/v1", "/v1", True),
    ("/v1", "/v2/chat", False),
    ("/v1", "/v", False),
    ("/" + "x" * 63, "/" + "x" * 80, True),
    ("/" + "x" * 63, "/" + "x" * 62 + "y", False),
])  # fmt: skip
def test_requests_for_other_paths_do_not_count(library: c.CDLL, path: str, target: str, counts: bool) -> None:
    connection = Connection(library, path=path)
    connection.read(b"GET %s HTTP/1.1\r\n\r\n" % target.encode())
    connection.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert connection.tallies == {"answered" if counts else "elsewhere": 1}

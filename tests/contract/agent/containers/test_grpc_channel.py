# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Calls of gRPC over h2, against a real gRPC server and against what is none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded
from hypothesis import given
from hypothesis import strategies as st

from agent.containers.grpc_channel import GrpcChannel, UnansweredError, message
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import SourceError, SourceTimeoutError
from tests.support.pretenders import Behaviour, answering, hang, listening, serving
from tools.harness.wait import until

METHOD = "/test.Names/List"


def soon() -> int:
    return monotonic_ns() + 20 * NS_PER_SECOND


def named(*names: str) -> bytes:
    return bytes(message("ListNamespacesResponse")(namespaces=[{"name": name} for name in names]).SerializeToString())


def names(channel: GrpcChannel) -> list[str]:
    answer = channel.call(METHOD, message("Empty")(), "ListNamespacesResponse", soon())
    return [one.name for one in answer.namespaces]


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[GrpcChannel]:
    with closing(GrpcChannel(str(tmp_path / "s"))) as channel:
        yield channel


def test_a_server_that_was_restarted_is_found_again_by_the_next_call(channel: GrpcChannel, tmp_path: Path) -> None:
    for name in "before", "after":
        answer = named(name)
        with serving(tmp_path / "s", {METHOD: lambda _: answer}):  # noqa: B023  # served in this round alone
            assert [names(channel), names(channel)] == [[name], [name]]


def test_an_answer_of_many_frames_arrives_whole(channel: GrpcChannel, tmp_path: Path) -> None:
    many = [f"{number:0500}" for number in range(2000)]  # 1,004,000 bytes: beyond HTTP/2's first window
    with serving(tmp_path / "s", {METHOD: lambda _: named(*many)}):
        assert names(channel) == many


def test_a_method_that_the_server_lacks_is_told_apart_from_a_failure(channel: GrpcChannel, tmp_path: Path) -> None:
    with serving(tmp_path / "s", {}), pytest.raises(UnansweredError) as raised:
        names(channel)
    assert raised.value.code == "UNIMPLEMENTED"


def test_a_failure_says_what_the_server_says(channel: GrpcChannel, tmp_path: Path) -> None:
    def fail(_: bytes) -> bytes:
        raise RuntimeError("50 % of the disk")

    with serving(tmp_path / "s", {METHOD: fail}), pytest.raises(SourceError, match=r"UNKNOWN: .*50 % of the disk"):
        names(channel)


def test_a_call_has_an_end_when_its_time_is_over(channel: GrpcChannel, tmp_path: Path) -> None:
    with listening(tmp_path / "s", hang), pytest.raises(SourceTimeoutError):
        channel.call(METHOD, message("Empty")(), "Empty", monotonic_ns() + NS_PER_SECOND // 20)


def test_closing_from_another_thread_ends_a_call(channel: GrpcChannel, tmp_path: Path) -> None:
    raised: list[SourceError] = []

    def call() -> None:
        try:
            names(channel)
        except SourceError as error:
            raised.append(error)

    with listening(tmp_path / "s", hang) as met:
        thread = threading.Thread(target=call)
        thread.start()
        until(lambda: bool(met), "a connection")
        channel.close()
        thread.join()
    assert "closed" in str(raised[0])


def replying(headers: list[tuple[str, str]], body: bytes, trailers: list[tuple[str, str]]) -> Behaviour:
    """A server of HTTP/2 that answers any request so."""

    def reply(connected: socket.socket) -> None:
        http = H2Connection(H2Configuration(client_side=False))
        http.initiate_connection()
        connected.sendall(http.data_to_send())
        while received := connected.recv(1 << 16):
            for event in http.receive_data(received):
                if isinstance(event, StreamEnded):
                    http.send_headers(event.stream_id, headers)
                    http.send_data(event.stream_id, body)
                    http.send_headers(event.stream_id, trailers, end_stream=True)
            connected.sendall(http.data_to_send())

    return reply


GOOD = [(":status", "200"), ("content-type", "application/grpc")]
DONE = [("grpc-status", "0")]
MESSAGE = b"\0\0\0\0\0"  # one without fields


@pytest.mark.parametrize(
    ("headers", "body", "trailers", "why"),
    [
        ([(":status", "404")], b"", [("x", "y")], "HTTP status 404"),
        (GOOD, MESSAGE, [("x", "y")], "gRPC status None"),
        (GOOD, MESSAGE, [("grpc-status", "99")], "gRPC status '99'"),
        (GOOD, b"", DONE, "without a message"),
        (GOOD, b"\1" + MESSAGE[1:], DONE, "one plain message"),
        (GOOD, MESSAGE * 2, DONE, "one plain message"),
        (GOOD, MESSAGE[:-1] + b"\7", DONE, "one plain message"),
        (GOOD, b"\0\0\0\0\2\xff\xff", DONE, "ListNamespacesResponse|pars"),
    ],
)
def test_what_is_no_answer_of_grpc_is_an_error(
    channel: GrpcChannel,
    tmp_path: Path,
    headers: list[tuple[str, str]],
    body: bytes,
    trailers: list[tuple[str, str]],
    why: str,
) -> None:
    with listening(tmp_path / "s", replying(headers, body, trailers)), pytest.raises(SourceError, match=why):
        names(channel)


FRAMES = st.lists(
    st.builds(
        lambda kind, flags, stream, payload: (
            len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
        ),
        st.integers(0, 12),
        st.integers(0, 255),
        st.integers(0, 3),
        st.binary(max_size=60),
    ),
    max_size=8,
).map(b"".join)


@given(st.binary(max_size=200) | FRAMES)
def test_whatever_a_server_sends_is_an_answer_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, sent: bytes
) -> None:
    path = tmp_path_factory.mktemp("grpc") / "s"
    with listening(path, answering(sent)), closing(GrpcChannel(str(path))) as channel, pytest.raises(SourceError):
        names(channel)

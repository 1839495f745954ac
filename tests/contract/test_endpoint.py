# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's socket, with real clients: kind, greedy, stuck and gone."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent import endpoint
from agent.endpoint import Endpoint, ask, fetch
from agent.errors import SetupError
from agent.model import Snapshot
from tests.unit.snapshots import rich_snapshot


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "agent.sock"


@pytest.fixture
def served(path: Path) -> Iterator[Endpoint]:
    snapshot = rich_snapshot()
    made = Endpoint(lambda: snapshot, path)
    yield made
    made.close()


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(str(path))
    return connection


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_client_gets_the_last_snapshot(served: Endpoint, path: Path) -> None:
    assert fetch(path) == rich_snapshot()
    assert fetch(path) == rich_snapshot()


def test_only_its_owner_and_group_may_ask(served: Endpoint, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755


def test_without_an_agent_there_is_nothing(path: Path) -> None:
    assert fetch(path) is None


def test_before_the_first_snapshot_the_client_waits_for_it(path: Path) -> None:
    asked: list[None] = []

    def later() -> Snapshot | None:
        asked.append(None)
        return rich_snapshot() if len(asked) > 2 else None

    served = Endpoint(later, path)
    try:
        assert fetch(path, timeout=10) == rich_snapshot()
    finally:
        served.close()


def test_a_socket_file_of_a_dead_agent_is_replaced(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    assert fetch(path) is None
    served = Endpoint(rich_snapshot, path)
    assert fetch(path) is not None
    served.close()


def test_a_second_agent_is_refused_and_the_first_goes_on(served: Endpoint, path: Path) -> None:
    with pytest.raises(SetupError, match="stop it first"):
        Endpoint(rich_snapshot, path)
    assert fetch(path) is not None


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(SetupError, match="no socket"):
        Endpoint(rich_snapshot, path)
    assert path.read_text() == "precious"


def test_closing_removes_the_socket_but_not_a_successors(path: Path) -> None:
    first = Endpoint(rich_snapshot, path)
    path.unlink()
    second = Endpoint(rich_snapshot, path)
    first.close()
    assert fetch(path) is not None
    second.close()
    assert not path.exists()


def test_a_stuck_client_stalls_nobody_and_is_cut_off(
    served: Endpoint, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "DEADLINE_SECONDS", 0.2)
    silent = connect(path)
    assert fetch(path) is not None
    eventually(lambda: served.dropped == 1)
    assert silent.recv(1) == b""
    silent.close()


def test_a_client_that_does_not_read_its_answer_stalls_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "DEADLINE_SECONDS", 0.5)
    monkeypatch.setattr(endpoint, "dumps", lambda _: "1" * (16 << 20))
    snapshot = rich_snapshot()
    served = Endpoint(lambda: snapshot, path)
    lazy, other = connect(path), connect(path)
    lazy.sendall(endpoint.REQUEST)
    other.sendall(endpoint.REQUEST)
    with other.makefile("rb") as stream:
        assert len(stream.readline()) == (16 << 20) + 1
    eventually(lambda: served.dropped == 1)
    lazy.close()
    other.close()
    served.close()


def test_no_more_than_a_few_clients_are_kept(served: Endpoint, path: Path) -> None:
    crowd = [connect(path) for _ in range(endpoint.MOST_CLIENTS)]
    eventually(lambda: len(served._clients) == endpoint.MOST_CLIENTS)
    turned_away = connect(path)
    assert turned_away.recv(1) == b""
    for client in [*crowd, turned_away]:
        client.close()
    eventually(lambda: not served._clients)
    assert fetch(path) is not None


@pytest.mark.parametrize("request_line", [b"hello\n", b"snapshop\n", b"GET / HTTP/1.1\r\n"])
def test_another_request_is_hung_up_on(served: Endpoint, path: Path, request_line: bytes) -> None:
    with connect(path) as client:
        client.sendall(request_line)
        with contextlib.suppress(ConnectionResetError):  # it had not read everything that we sent
            assert client.recv(1) == b""
    assert fetch(path) is not None


def echo(argument: str) -> str:
    if argument == "fail":
        raise ValueError(argument)
    return json.dumps({"asked": argument})


def test_other_words_are_answered_by_whoever_offers_them(path: Path) -> None:
    served = Endpoint(rich_snapshot, path, {"explain": echo, "explore": lambda _: "1"})
    try:
        assert ask(path, "explain") == b'{"asked": ""}\n'
        assert ask(path, "explain", "a b/c") == b'{"asked": "a b/c"}\n'
        assert ask(path, "explore") == b"1\n"
        with connect(path) as slow:
            for byte in b"explain x\n":
                slow.sendall(bytes([byte]))
            with slow.makefile("rb") as stream:
                assert stream.readline() == b'{"asked": "x"}\n'
        for word, argument in (("expl", ""), ("explains", "x"), ("snapshot", "x"), ("explain", "x\ny")):
            with pytest.raises(SetupError, match="hung up"):
                ask(path, word, argument)
        assert fetch(path) is not None
    finally:
        served.close()


def test_an_answer_that_fails_is_counted_and_the_others_go_on(path: Path) -> None:
    served = Endpoint(rich_snapshot, path, {"explain": echo})
    try:
        with pytest.raises(SetupError, match="hung up"):
            ask(path, "explain", "fail")
        assert served.failed == 1
        assert ask(path, "explain", "x") is not None
        assert fetch(path) is not None
    finally:
        served.close()


def test_a_request_without_end_is_cut_off(served: Endpoint, path: Path) -> None:
    with connect(path) as endless, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        endless.sendall(b"explain " + b"x" * (2 * endpoint.LONGEST_REQUEST_BYTES))
        assert endless.recv(1) == b""
    assert fetch(path) is not None


def test_without_an_agent_nobody_is_asked(path: Path) -> None:
    assert ask(path, "explain") is None


def test_a_request_may_come_in_pieces_and_a_client_may_go_in_the_middle(served: Endpoint, path: Path) -> None:
    with connect(path) as gone:
        gone.sendall(b"snap")
    with connect(path) as slow:
        for byte in endpoint.REQUEST:
            slow.sendall(bytes([byte]))
        with slow.makefile("rb") as stream:
            assert stream.readline().endswith(b"}\n")


def test_an_agent_that_hangs_up_is_an_error_and_not_absence(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(str(path))
        mute.listen(1)
        with pytest.raises(SetupError, match="does not answer"):
            fetch(path, timeout=0.2)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_whoever_may_not_ask_is_told_what_to_do(served: Endpoint, path: Path) -> None:
    for folder in path.parents:
        if folder.stat().st_uid == 0 and folder != Path("/tmp") and "pytest" in str(folder):
            folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            fetch(path)
        except SetupError as error:
            os._exit(0 if "run as root" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's socket, with real clients: kind, greedy, stuck and gone."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent import endpoint
from agent.doors import MOST_CLIENTS, Door, doors, place
from agent.endpoint import Endpoint, ask, fetch
from agent.errors import SetupError
from agent.model import Snapshot
from tests.unit.snapshots import rich_snapshot

GROUP = 4242  # of whoever; none of that name is needed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "agent.sock"


@pytest.fixture
def served(path: Path) -> Iterator[Endpoint]:
    snapshot = rich_snapshot()
    made = Endpoint(lambda: snapshot, [Door(path)])
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


def test_only_its_owner_may_ask(served: Endpoint, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755


def test_without_an_agent_there_is_nothing(path: Path) -> None:
    assert fetch(path) is None


def test_before_the_first_snapshot_the_client_waits_for_it(path: Path) -> None:
    asked: list[None] = []

    def later() -> Snapshot | None:
        asked.append(None)
        return rich_snapshot() if len(asked) > 2 else None

    served = Endpoint(later, [Door(path)])
    try:
        assert fetch(path, timeout=10) == rich_snapshot()
    finally:
        served.close()


def test_a_socket_file_of_a_dead_agent_is_replaced(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    assert fetch(path) is None
    served = Endpoint(rich_snapshot, [Door(path)])
    assert fetch(path) is not None
    served.close()


def test_a_second_agent_is_refused_and_the_first_goes_on(served: Endpoint, path: Path) -> None:
    with pytest.raises(SetupError, match="stop it first"):
        Endpoint(rich_snapshot, [Door(path)])
    assert fetch(path) is not None


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(SetupError, match="no socket"):
        Endpoint(rich_snapshot, [Door(path)])
    assert path.read_text() == "precious"


def test_closing_removes_the_socket_but_not_a_successors(path: Path) -> None:
    first = Endpoint(rich_snapshot, [Door(path)])
    path.unlink()
    second = Endpoint(rich_snapshot, [Door(path)])
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
    served = Endpoint(lambda: snapshot, [Door(path)])
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
    crowd = [connect(path) for _ in range(MOST_CLIENTS)]
    eventually(lambda: len(served._clients) == MOST_CLIENTS)
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
    served = Endpoint(rich_snapshot, [Door(path, {"explain": echo, "explore": lambda _: "1"})])
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
    served = Endpoint(rich_snapshot, [Door(path, {"explain": echo})])
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


@dataclass(slots=True)
class Both:
    """The agent's two doors, and orders that the test carries out."""

    endpoint: Endpoint
    orders: Path
    questions: Path
    waiting: list[tuple[str, Callable[[str], None]]]

    def carry_out(self, line: str) -> None:
        eventually(lambda: bool(self.waiting))
        self.waiting.pop(0)[1](line)


@pytest.fixture
def anybodys() -> Iterator[Path]:
    """A folder that others may enter: pytest closes its own to them whenever somebody starts it."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def both(anybodys: Path) -> Iterator[Both]:
    snapshot, waiting = rich_snapshot(), list[tuple[str, Callable[[str], None]]]()
    opened = doors(anybodys, {"explain": echo}, {"reload": lambda word, tell: waiting.append((word, tell))}, GROUP)
    made = Endpoint(lambda: snapshot, opened)
    yield Both(made, opened[0].path, opened[1].path, waiting)
    made.close()
    assert not list(anybodys.iterdir())


def answer_to(path: Path, word: str) -> Future[bytes | None]:
    """Of an agent that takes its time."""
    answered: Future[bytes | None] = Future()
    threading.Thread(target=lambda: answered.set_result(ask(path, word, timeout=20)), daemon=True).start()
    return answered


def test_who_may_read_may_not_order(both: Both) -> None:
    for path in (both.orders, both.questions):
        assert fetch(path) is not None
        assert ask(path, "explain", "x") == b'{"asked": "x"}\n'
    with pytest.raises(SetupError, match="hung up"):
        ask(both.questions, "reload")
    assert not both.waiting


def test_an_order_is_answered_when_it_was_carried_out_and_holds_up_nobody(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "DEADLINE_SECONDS", 0.3)
    first, second = answer_to(both.orders, "reload"), answer_to(both.orders, "reload")
    eventually(lambda: len(both.waiting) == 2)
    assert fetch(both.orders) is not None
    time.sleep(0.5)
    assert not first.done(), "longer than others may take"
    both.carry_out("1")
    both.carry_out("2")
    assert {first.result(10), second.result(10)} == {b"1\n", b"2\n"}


def test_who_does_not_wait_for_its_order_is_forgotten(both: Both) -> None:
    with connect(both.orders) as impatient:
        impatient.sendall(b"reload\n")
        eventually(lambda: bool(both.waiting))
    eventually(lambda: not both.endpoint._clients)
    both.carry_out("1")
    assert fetch(both.orders) is not None


def test_an_agent_that_ends_answers_no_order(tmp_path: Path) -> None:
    waiting = list[Callable[[str], None]]()
    path = tmp_path / "agent.sock"
    ending = Endpoint(rich_snapshot, [Door(path, orders={"reload": lambda _, tell: waiting.append(tell)})])
    with connect(path) as client:
        client.sendall(b"reload\n")
        eventually(lambda: bool(waiting))
        ending.close()
        assert client.recv(1) == b""
    waiting[0]("too late")


def test_a_crowd_of_readers_keeps_nobody_from_giving_orders(both: Both) -> None:
    crowd = [connect(both.questions) for _ in range(MOST_CLIENTS)]
    eventually(lambda: len(both.endpoint._clients) == MOST_CLIENTS)
    with connect(both.questions) as turned_away:
        assert turned_away.recv(1) == b""
    assert fetch(both.orders) is not None
    order = answer_to(both.orders, "reload")
    both.carry_out("1")
    assert order.result(10) == b"1\n"
    for client in crowd:
        client.close()


def test_a_second_door_that_cannot_be_opened_closes_the_first(tmp_path: Path) -> None:
    (tmp_path / "read.sock").write_text("precious")
    with pytest.raises(SetupError, match="no socket"):
        Endpoint(rich_snapshot, doors(tmp_path, {}, {}, None))
    assert [path.name for path in tmp_path.iterdir()] == ["read.sock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_each_door_is_whose_it_is_to_be(both: Both, anybodys: Path) -> None:
    found = {path.name: (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) for path in anybodys.iterdir()}
    assert found == {"agent.sock": (0o600, os.getegid()), "read.sock": (0o660, GROUP)}


def test_without_the_group_both_are_the_owners(tmp_path: Path) -> None:
    made = Endpoint(rich_snapshot, doors(tmp_path, {}, {}, None))
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    made.close()


AS_SOMEBODY = """\
import os, sys
import agent.main, agent.tui.top, agent.tui.plain, agent.observer
os.setgroups([int(group) for group in sys.argv[1].split(",") if group]); os.setgid(65534); os.setuid(65534)
agent.main.gputop(["--once", "--by-container", "--socket", sys.argv[2]])
"""


def gputop_as_somebody(groups: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Once everything is imported: the checkout may lie where nobody else can read."""
    command = [sys.executable, "-c", AS_SOMEBODY, groups, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_gputop_works_without_root_for_the_group_and_for_nobody_else(both: Both) -> None:
    shown = gputop_as_somebody(str(GROUP), both.questions)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "trainer" in shown.stdout
    for groups, path in ((str(GROUP), both.orders), ("", both.questions)):
        refused = gputop_as_somebody(groups, path)
        assert refused.returncode == 3
        assert "read.sock is for members of the group gpuwarden" in refused.stderr


def test_root_asks_where_orders_are_taken_and_others_where_questions_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for user, name in ((0, "agent.sock"), (1000, "read.sock")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert place() == Path("/run/gpuwarden") / name

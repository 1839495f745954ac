# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's API on its UNIX sockets, with real clients: ours, curl, greedy, stuck and gone."""

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

from agent.core.errors import SetupError, WardenError
from agent.core.model import Snapshot
from agent.core.snapshot_json import loads
from agent.exporters.api import routes
from agent.exporters.api.client import EXPLAIN, RELOAD, SNAPSHOT, ask, fetch, place
from agent.exporters.api.routes import Api, json_answer
from agent.exporters.web.handler import MAX_REQUEST_BYTES, Order, Reply
from agent.exporters.web.server import MAX_CLIENTS
from agent.node.http_client import Response
from tests.support.serving import ApiServer, never
from tests.support.snapshots import rich_snapshot
from tools.harness.wait import until

GROUP = 4242  # no group of that number is needed
REQUEST = b"GET /v1/snapshot HTTP/1.0\r\n\r\n"


def echo(container: str) -> str:
    if container == "none":
        raise WardenError("nothing is known about none")
    if container == "fail":
        raise ValueError(container)
    return json.dumps({"asked": container})


def an_api(get_snapshot: Callable[[], Snapshot | None] = rich_snapshot, reload: Order = never) -> Api:
    return Api(get_snapshot, echo, reload)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "agent.sock"


@pytest.fixture
def served(folder: Path) -> Iterator[ApiServer]:
    snapshot = rich_snapshot()
    with ApiServer(folder, an_api(lambda: snapshot)) as made:
        yield made


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(60)
    connection.connect(str(path))
    return connection


def is_cut_off(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def rest(connection: socket.socket) -> bytes:
    """Everything until the agent hangs up."""
    with connection.makefile("rb") as stream, contextlib.suppress(ConnectionResetError):
        return stream.read()
    return b""


def clients(served: ApiServer) -> int:
    return len(served.server._clients)


def until_accepted(served: ApiServer, count: int) -> None:
    """Or one of them is cut off already."""
    until(lambda: clients(served) + served.server.dropped == count, f"{count} clients to be accepted")


def test_a_client_gets_the_last_snapshot(served: ApiServer, path: Path) -> None:
    assert fetch(path) == rich_snapshot()
    assert fetch(path) == rich_snapshot()


def test_curl_gets_snapshot_and_explanations_and_carries_out_an_order(tmp_path: Path) -> None:
    def curl(*arguments: str) -> tuple[str, str]:
        command = ["curl", "--silent", "--show-error", "--write-out", r"\n%{http_code}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        body, _, status = done.stdout.rpartition("\n")
        return status, body

    snapshot = rich_snapshot()
    api = an_api(lambda: snapshot, lambda reply: reply(json_answer("1")))
    with ApiServer(tmp_path, api) as served:
        reading = ("--unix-socket", str(served.reading))
        status, body = curl(*reading, "http://localhost/v1/snapshot")
        assert (status, loads(body)) == ("200", snapshot)
        assert curl(*reading, "http://localhost/v1/explain") == ("200", '{"asked": ""}\n')
        assert curl(*reading, "http://localhost/v1/explain/shop%20a/b%25") == ("200", '{"asked": "shop a/b%"}\n')
        assert curl("--unix-socket", str(served.orders), "-X", "POST", "http://localhost/v1/reload") == ("200", "1\n")


@pytest.mark.parametrize(
    ("request_line", "status", "expected"),
    [
        (b"GET /v1/snapshots HTTP/1.1", b"404 Not Found", b"there is /v1/snapshot, /v1/explain"),
        (b"GET / HTTP/1.1", b"404 Not Found", b"unknown path"),
        (b"GET /v1/explain/ HTTP/1.1", b"404 Not Found", b"unknown path"),
        (b"GET /v1/explain/none HTTP/1.1", b"404 Not Found", b"nothing is known about none"),
        (b"POST /v1/snapshot HTTP/1.1", b"405 Method Not Allowed", b"Allow: GET, HEAD\r\n"),
        (b"DELETE /v1/explain/x HTTP/1.1", b"405 Method Not Allowed", b"Allow: GET, HEAD\r\n"),
        (b"GET /v1/reload HTTP/1.1", b"405 Method Not Allowed", b"Allow: POST\r\n"),
        (b"snapshot", b"400 Bad Request", b"ask in HTTP/1.0 or HTTP/1.1"),
        (b"explain x", b"400 Bad Request", b"ask in HTTP/1.0 or HTTP/1.1"),
        (b"GET /v1/snapshot", b"505 HTTP Version Not Supported", b"ask in HTTP/1.0 or HTTP/1.1"),
        (b"GET /v1/snapshot HTTP/3.0", b"505 HTTP Version Not Supported", b"ask in HTTP/1.0 or HTTP/1.1"),
    ],
)
def test_another_request_is_refused_in_one_line(
    served: ApiServer, path: Path, request_line: bytes, status: bytes, expected: bytes
) -> None:
    with connect(path) as client:
        client.sendall(request_line + b"\r\n\r\n")
        answer = rest(client)
    assert answer.startswith(b"HTTP/1.0 " + status + b"\r\n")
    assert expected in answer
    body = answer.partition(b"\r\n\r\n")[2]
    assert body.count(b"\n") == 1
    assert fetch(path) is not None


def test_head_gets_the_headers_alone(served: ApiServer, path: Path) -> None:
    with connect(path) as client:
        client.sendall(REQUEST.replace(b"GET", b"HEAD"))
        head, _, body = rest(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n")
    assert body == b""


def test_only_its_owner_may_ask(served: ApiServer, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755


def test_without_an_agent_there_is_nothing(path: Path) -> None:
    assert fetch(path) is None


def test_before_the_first_snapshot_the_client_waits_for_it(folder: Path) -> None:
    asked: list[None] = []

    def later() -> Snapshot | None:
        asked.append(None)
        return rich_snapshot() if len(asked) > 2 else None

    with ApiServer(folder, an_api(later)) as served:
        assert fetch(served.orders, timeout=60) == rich_snapshot()


def test_without_a_first_snapshot_others_are_asked_to_try_again(folder: Path) -> None:
    with ApiServer(folder, an_api(lambda: None)) as served:
        assert fetch(served.orders, timeout=5) is None
        with connect(served.orders) as client:
            client.sendall(REQUEST)
            answer = rest(client)
    assert answer.startswith(b"HTTP/1.0 503 Service Unavailable\r\n")
    assert b"\r\nRetry-After: 1\r\n" in answer


def test_a_socket_file_of_a_dead_agent_is_replaced(folder: Path, path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    assert fetch(path) is None
    with ApiServer(folder, an_api()):
        assert fetch(path) is not None


def test_a_second_agent_is_refused_and_the_first_goes_on(served: ApiServer, folder: Path, path: Path) -> None:
    with pytest.raises(SetupError, match="stop it first"):
        ApiServer(folder, an_api())
    assert fetch(path) is not None


def test_a_file_that_is_no_socket_is_left_alone(folder: Path, path: Path) -> None:
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(SetupError, match="no socket"):
        ApiServer(folder, an_api())
    assert path.read_text() == "precious"


def test_closing_removes_the_socket_but_not_a_successors(folder: Path, path: Path) -> None:
    first = ApiServer(folder, an_api())
    path.unlink()
    first.reading.unlink()
    second = ApiServer(folder, an_api())
    first.close()
    assert fetch(path) is not None
    second.close()
    assert not path.exists()


def test_a_stuck_client_stalls_no_other_and_is_cut_off(folder: Path) -> None:
    with ApiServer(folder, an_api(), deadline_seconds=0.2) as served, connect(served.orders) as silent:
        until_accepted(served, 1)
        served.listeners[0].deadline_seconds = 60.0  # of the next client
        assert fetch(served.orders) is not None
        until(lambda: served.server.dropped == 1, "a dropped client")
        assert silent.recv(1) == b""


def test_a_client_that_does_not_read_its_answer_stalls_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "dumps", lambda _: "1" * (16 << 20))
    snapshot = rich_snapshot()
    with ApiServer(folder, an_api(lambda: snapshot), deadline_seconds=1.0) as served, connect(served.orders) as lazy:
        lazy.sendall(REQUEST)
        until_accepted(served, 1)
        served.listeners[0].deadline_seconds = 60.0  # of the next client
        answer = ask(served.orders, SNAPSHOT, timeout=60)
        assert answer is not None
        assert len(answer.body) == (16 << 20) + 1
        until(lambda: served.server.dropped == 1, "a dropped client")


def test_no_more_than_a_few_clients_are_kept_and_silent_ones_make_room(served: ApiServer, path: Path) -> None:
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connect(path)) for _ in range(MAX_CLIENTS)]
        until(lambda: clients(served) == MAX_CLIENTS, "all clients to be connected")
        stack.enter_context(connect(path))
        assert is_cut_off(crowd[0])
        until(lambda: clients(served) == MAX_CLIENTS, "all clients to be connected")
        assert fetch(path) is not None
    until(lambda: clients(served) == 0, "all clients to be gone")
    assert fetch(path) is not None


def test_a_request_may_come_in_pieces_and_a_client_may_go_in_the_middle(served: ApiServer, path: Path) -> None:
    with connect(path) as gone:
        gone.sendall(b"GET /v1/sn")
    with connect(path) as slow:
        for byte in b"GET /v1/explain/x HTTP/1.1\r\nHost: localhost\r\n\r\n":
            slow.sendall(bytes([byte]))
        assert rest(slow).endswith(b'\r\n\r\n{"asked": "x"}\n')


def test_explain_answers_about_all_and_about_one(served: ApiServer, path: Path) -> None:
    assert ask(path, EXPLAIN) == Response(200, b'{"asked": ""}\n')
    assert ask(path, f"{EXPLAIN}/a%20b%2Fc%C3%A9%0A") == Response(
        200, json.dumps({"asked": "a b/cé\n"}).encode() + b"\n"
    )
    with pytest.raises(SetupError, match="status 404: nothing is known about none"):
        ask(path, f"{EXPLAIN}/none")


def test_an_answer_that_fails_is_counted_and_the_others_go_on(
    served: ApiServer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with pytest.raises(SetupError, match="status 500: internal error: see the agent's log"):
            ask(path, f"{EXPLAIN}/fail")
    until(lambda: served.server.failed == 2, "two failures")
    assert [record.message for record in caplog.records] == ["a request failed; further ones are only counted"]
    assert ask(path, f"{EXPLAIN}/x") is not None
    assert fetch(path) is not None


@pytest.mark.parametrize("endless", [b"GET /v1/explain/" + b"x" * 65536, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000])
def test_a_request_without_end_is_cut_off(served: ApiServer, path: Path, endless: bytes) -> None:
    assert len(endless) > 2 * MAX_REQUEST_BYTES
    with connect(path) as client:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(endless)
        assert rest(client).startswith((b"HTTP/1.0 431 ", b"HTTP/1.0 400 ")) or is_cut_off(client)
    assert fetch(path) is not None


def test_without_an_agent_nothing_is_asked(path: Path) -> None:
    assert ask(path, EXPLAIN) is None


def test_an_agent_that_is_silent_is_an_error_and_not_absence(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(str(path))
        mute.listen(1)
        with pytest.raises(SetupError, match="does not answer"):
            fetch(path, timeout=0.2)


def test_an_agent_of_an_older_release_is_an_error_that_names_it(path: Path) -> None:
    """It spoke lines: it hangs up on the first byte that begins no word of its own."""
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as older:
        older.bind(str(path))
        older.listen(1)

        def hang_up() -> None:
            with older.accept()[0] as connection:
                assert not b"snapshot\n".startswith(connection.recv(1))

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(SetupError, match="of an older release, which does not speak HTTP"):
            fetch(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_user_who_may_not_connect_is_refused_with_what_to_do(served: ApiServer, path: Path) -> None:
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
    """The agent's two sockets, and orders that the test carries out."""

    served: ApiServer
    waiting: list[Reply]

    @property
    def orders(self) -> Path:
        return self.served.orders

    @property
    def reading(self) -> Path:
        return self.served.reading

    def carry_out(self, document: str) -> None:
        until(lambda: bool(self.waiting), "the order")
        self.waiting.pop(0)(json_answer(document))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others may enter: pytest makes its own directories private to the user that starts it."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def both(open_folder: Path) -> Iterator[Both]:
    snapshot, waiting = rich_snapshot(), list[Reply]()
    with ApiServer(open_folder, an_api(lambda: snapshot, waiting.append), GROUP) as made:
        yield Both(made, waiting)
    assert not list(open_folder.iterdir())


def answer_to(path: Path) -> Future[Response | None]:
    """Of an agent that takes its time to reload."""
    answered: Future[Response | None] = Future()
    asking = threading.Thread(
        target=lambda: answered.set_result(ask(path, RELOAD, method="POST", timeout=60)), daemon=True
    )
    asking.start()
    return answered


def test_a_client_that_may_read_may_not_order(both: Both) -> None:
    for path in (both.orders, both.reading):
        assert fetch(path) is not None
        assert ask(path, f"{EXPLAIN}/x") == Response(200, b'{"asked": "x"}\n')
    with pytest.raises(SetupError, match=r"status 403: orders are taken on agent\.sock, as root"):
        ask(both.reading, RELOAD, method="POST")
    assert not both.waiting


def test_an_order_is_answered_when_it_was_carried_out_and_holds_up_no_other(both: Both) -> None:
    first, second = answer_to(both.orders), answer_to(both.orders)
    until(lambda: len(both.waiting) == 2, "two orders")
    assert fetch(both.orders) is not None
    time.sleep(both.served.listeners[0].deadline_seconds + 1)
    assert not first.done(), "longer than others may take"
    both.carry_out("1")
    both.carry_out("2")
    assert {first.result(60), second.result(60)} == {Response(200, b"1\n"), Response(200, b"2\n")}


def test_a_client_that_does_not_wait_for_its_order_is_dropped(both: Both) -> None:
    with connect(both.orders) as impatient:
        impatient.sendall(b"POST /v1/reload HTTP/1.1\r\n\r\n")
        until(lambda: bool(both.waiting), "the order")
    until(lambda: clients(both.served) == 0, "the client to be forgotten")
    both.carry_out("1")
    assert fetch(both.orders) is not None


def test_an_agent_that_ends_answers_no_order(tmp_path: Path) -> None:
    waiting = list[Reply]()
    ending = ApiServer(tmp_path, an_api(reload=waiting.append))
    with connect(ending.orders) as client:
        client.sendall(b"POST /v1/reload HTTP/1.1\r\n\r\n")
        until(lambda: bool(waiting), "the order")
        ending.close()
        assert client.recv(1) == b""
    waiting[0](json_answer("too late"))
    until(lambda: clients(ending) == 0, "the client to be gone")


def test_a_crowd_of_readers_does_not_keep_orders_out(both: Both) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_CLIENTS):
            stack.enter_context(connect(both.reading))
        assert fetch(both.orders) is not None
        order = answer_to(both.orders)
        both.carry_out("1")
        assert order.result(60) == Response(200, b"1\n")


def test_a_second_socket_that_cannot_be_opened_closes_the_first(tmp_path: Path) -> None:
    (tmp_path / "read.sock").write_text("precious")
    with pytest.raises(SetupError, match="no socket"):
        ApiServer(tmp_path, an_api())
    assert [path.name for path in tmp_path.iterdir()] == ["read.sock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_each_socket_is_whose_it_is_to_be(both: Both, open_folder: Path) -> None:
    found = {path.name: (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) for path in open_folder.iterdir()}
    assert found == {"agent.sock": (0o600, os.getegid()), "read.sock": (0o660, GROUP)}


def test_without_the_group_both_are_the_owners(tmp_path: Path) -> None:
    with ApiServer(tmp_path, an_api()):
        assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


AS_ANOTHER_USER = """\
import os, sys
import gpuwarden.main, gpuwarden.top, agent.tui.plain, agent.observer
os.setgroups([int(group) for group in sys.argv[1].split(",") if group]); os.setgid(65534); os.setuid(65534)
gpuwarden.main.gputop(["--once", "--by-container", "--socket", sys.argv[2]])
"""


def gputop_as_another_user(groups: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Once everything is imported: the checkout may lie where other users cannot read."""
    command = [sys.executable, "-c", AS_ANOTHER_USER, groups, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_gputop_works_without_root_for_the_group_and_for_no_other_user(both: Both) -> None:
    shown = gputop_as_another_user(str(GROUP), both.reading)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "trainer" in shown.stdout
    for groups, path in ((str(GROUP), both.orders), ("", both.reading)):
        refused = gputop_as_another_user(groups, path)
        assert refused.returncode == 3
        assert "read.sock is for members of the group gpuwarden" in refused.stderr


def test_root_asks_where_orders_are_taken_and_others_where_questions_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for user, name in ((0, "agent.sock"), (1000, "read.sock")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert place() == Path("/run/gpuwarden") / name

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's port: what is served there, to whom, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import http.client
import itertools
import json
import os
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import NoReturn

import pytest

from agent.core.errors import SetupError
from agent.exporters.liveness import Health
from agent.exporters.prometheus import collector
from agent.exporters.status_page import routes as site
from agent.exporters.status_page.history import Ring
from agent.exporters.status_page.routes import Site
from agent.exporters.web import server as web
from agent.exporters.web.auth import AccessRules, Guard, Passwords
from agent.exporters.web.handler import OwnNames
from gpuwarden.run import _warn_of_open_access as warn_of_open_access
from tests.support.serving import TcpServer
from tests.support.snapshots import rich_snapshot


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    ring = Ring()
    ring.note(rich_snapshot())
    site = Site(rich_snapshot, ring, list)
    with TcpServer({"/metrics": OwnNames().guarded(collector.application(rich_snapshot)), **site.routes()}) as server:
        yield server.port


def connected(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(source, 0))


def is_cut_off(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def seconds_until_cut_off(dripping: socket.socket) -> float:
    """Of a client that sends a byte now and then, and never all of its request."""
    began = time.monotonic()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for letter in itertools.islice(itertools.cycle(b"GET / HTTP/1.1\r\nHost: "), 200):
            dripping.sendall(bytes([letter]))
            time.sleep(0.05)
    return time.monotonic() - began


def ask(
    port: int, path: str, method: str = "GET", host: str | None = None, source: str = "127.0.0.1"
) -> tuple[int, dict[str, str], bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10, source_address=(source, 0))) as connection:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics"])
def test_get_and_head_agree_and_nothing_else_is_allowed(port: int, path: str) -> None:
    status, headers, body = ask(port, path)
    assert (status, int(headers["content-length"])) == (200, len(body))
    head_status, head_headers, nothing = ask(port, path, "HEAD")
    assert (head_status, head_headers.keys(), nothing) == (200, headers.keys(), b"")
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        status, headers, _ = ask(port, path, method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/favicon.ico", "/metrics/", "/..", "/status.json/x"])
def test_there_is_nothing_else(port: int, path: str) -> None:
    assert ask(port, path)[0] == 404


@pytest.mark.parametrize("sent", [b"/\xc3\xa9", b"/%C3%A9", b"/%c3\xa9"])
def test_a_page_gets_the_bytes_of_its_path_percent_encoded_or_not(sent: bytes) -> None:
    page = site.Site(rich_snapshot, Ring(), list).routes()["/status.json"]
    with TcpServer({"/\u00c3\u00a9": page}) as server, closing(connected(server.port)) as connection:  # as WSGI has it
        connection.sendall(b"GET " + sent + b" HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.0 200"


def test_the_metrics_are_where_they_were(port: int) -> None:
    _, headers, body = ask(port, "/metrics")
    assert headers["content-type"].startswith("text/plain; version=")
    assert b"gpuwarden_container_sm_ratio" in body


@pytest.mark.parametrize("path", ["/", "/status.json"])
def test_no_other_origin_may_read_frame_or_guess_it(port: int, path: str) -> None:
    _, headers, _ = ask(port, path)
    assert not any(name.startswith("access-control-") for name in headers)
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"
    assert "set-cookie" not in headers


def test_the_page_is_the_same_for_every_reader_and_its_figures_are_json(port: int) -> None:
    _, headers, body = ask(port, "/")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert body == site.PAGE.document.encode()
    figures = json.loads(ask(port, "/status.json")[2])
    assert [table["title"] for table in figures["tables"]] == [
        *("Devices", "Latency promises", "Containers", "Recent decisions")
    ]
    assert figures["box"] == "0 0 120 24"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:9837", "[::1]:9837", "10.1.2.3", "localhost:80", "LOCALHOST"])
def test_a_request_by_address_or_for_localhost_is_answered(port: int, host: str) -> None:
    assert ask(port, "/", host=host)[0] == 200


def test_the_machines_own_name_is_answered(port: int) -> None:
    assert ask(port, "/", host=f"{socket.gethostname()}:9837")[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:9837", "[", "x@y", ""]
)
def test_a_name_that_was_made_to_point_here_is_refused(port: int, host: str) -> None:
    for path in ("/", "/status.json"):
        status, _, body = ask(port, path, host=host)
        assert (status, body.startswith(b"ask for this page by address")) == (421, True)
    status, _, body = ask(port, "/metrics", host=host)
    assert (status, b"--web-host" in body) == (421, True)


@pytest.mark.parametrize("host", ["metrics.example", "METRICS.example:9837", "metrics.example."])
def test_a_name_that_was_given_is_answered(host: str) -> None:
    assert OwnNames(["metrics.example"]).has(host)
    assert not OwnNames().has(host)


def test_on_loopback_a_client_is_a_user_and_a_cgroup_whatever_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = []
        for source in ("127.0.0.1", "127.9.8.7"):
            with socket.create_connection(server.getsockname(), source_address=(source, 0)):
                accepted, address = server.accept()
                with accepted:
                    names.append(web.client_name(accepted, address))
    assert names[0] == names[1]
    assert re.fullmatch(rf"loopback {os.getuid()} \d+", names[0])


@pytest.mark.parametrize("address", ["10.0.0.7", "fe80::1%eth0"])
def test_elsewhere_a_client_is_an_address(address: str) -> None:
    with socket.socket() as unused:
        assert web.client_name(unused, (address, 1)) == address


def test_where_the_kernel_says_nothing_all_of_loopback_is_one_client() -> None:
    with socket.socket() as unconnected:
        assert web.client_name(unconnected, ("127.0.0.2", 1)) == "loopback"


def test_a_taken_port_is_reported_in_one_line_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"127.0.0.1:{port}.*choose another") as caught:
            TcpServer({}, port=port)
    assert "\n" not in str(caught.value)


def test_the_port_is_free_again_after_closing() -> None:
    server = TcpServer({})
    server.close()
    TcpServer({}, port=server.port).close()


def test_closing_does_not_wait_until_the_server_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_CHECK_SECONDS", 60)
    server = TcpServer({})
    assert ask(server.port, "/")[0] == 404
    with connected(server.port):
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 30


def test_the_figures_are_computed_once_for_all_simultaneous_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "FRESH_SECONDS", 60.0)
    drawings = map(str, itertools.count())
    monkeypatch.setattr(site, "_document", lambda _: next(drawings))
    with TcpServer(Site(rich_snapshot, Ring(), list).routes()) as server:
        answers = [ask(server.port, "/status.json")[2] for _ in range(3)]
    assert answers == 3 * [b"0"]


def test_silent_and_dripping_clients_take_few_threads_and_no_more_than_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web, "TCP_SECONDS", 0.5)
    others = threading.active_count()
    with TcpServer({}) as server, ExitStack() as stack:
        silent = [stack.enter_context(connected(server.port)) for _ in range(100)]
        dripping = stack.enter_context(connected(server.port))
        assert is_cut_off(silent[0]), "it made room for later clients"
        assert threading.active_count() <= others + 1 + web.MAX_THREADS
        assert seconds_until_cut_off(dripping) < 5
        assert all(is_cut_off(one) for one in silent)
        while threading.active_count() > others + 1:
            time.sleep(0.01)
        assert ask(server.port, "/")[0] == 404


@pytest.mark.parametrize("addresses", [1, 4, 50])
def test_a_client_is_answered_however_many_others_are_silent(addresses: int) -> None:
    with TcpServer({}) as server, ExitStack() as stack:
        for number in range(2 * web.MAX_CLIENTS):
            stack.enter_context(connected(server.port, f"127.0.1.{number % addresses + 1}"))
        for source in ("127.0.0.1", "127.0.1.1"):
            assert ask(server.port, "/", source=source)[0] == 404


def test_a_client_that_reads_no_answers_shuts_out_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "client_name", lambda _connection, address: str(address[0]))  # the test has only loopback
    answering, over = threading.Semaphore(0), threading.Event()

    def endless(_environ: object, _start: object) -> list[bytes]:
        answering.release()
        over.wait(60)
        raise OSError("the client is gone")

    with TcpServer({"/endless": endless}) as server, ExitStack() as stack:
        stack.callback(over.set)
        for address in range(1, web.MAX_CLIENTS // web.MAX_OF_ONE_ADDRESS + 1):
            for _ in range(web.MAX_OF_ONE_ADDRESS):
                reader = stack.enter_context(connected(server.port, f"127.0.1.{address}"))
                reader.sendall(b"GET /endless HTTP/1.1\r\n\r\n")
                assert answering.acquire(timeout=10)
        assert is_cut_off(stack.enter_context(connected(server.port, "127.0.1.1"))), "that many are not for one"
        assert ask(server.port, "/")[0] == 404


def test_without_descriptors_it_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    enough = threading.Event()

    def accept(_: object) -> NoReturn:
        tried.append(time.monotonic())
        if len(tried) == 5:
            enough.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    with TcpServer({}) as server, connected(server.port):
        assert enough.wait(10)
    assert tried[4] - tried[0] >= 4 * 0.01


def test_the_resolver_is_not_asked_for_our_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def slowly(name: str) -> tuple[str, list[str], list[str]]:
        asked.append(name)
        return name, [], []

    monkeypatch.setattr(socket, "gethostbyaddr", slowly)
    TcpServer({}).close()
    assert not asked


@pytest.mark.parametrize(("address", "host"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_its_url_can_be_asked(address: str, host: str) -> None:
    with TcpServer({"/metrics": collector.application(rich_snapshot)}, address=address) as server:
        assert server.url == f"http://{host}:{server.port}"
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
            assert answer.status == 200


def test_a_client_that_leaves_in_the_middle_costs_nothing(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", port)) as rude:
        rude.sendall(b"GET /status.json HTTP/1.1\r\nHost: localh")
    assert ask(port, "/")[0] == 200
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("address", "terms", "warns"),
    [
        ("127.0.0.1", AccessRules(), False),
        ("::1", AccessRules(), False),
        ("0.0.0.0", AccessRules(), True),
        ("::", AccessRules(), True),
        ("0.0.0.0", AccessRules(passwords=Passwords({"alice": "$2b$04$" + "." * 53})), False),
    ],
)
def test_a_port_that_is_open_to_all_is_warned_of(
    address: str, terms: AccessRules, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with TcpServer({}, guard=Guard(lambda: terms), address=address) as server:
        warn_of_open_access(server.listener)
    assert [record.getMessage().startswith(f"{server.url} is served to every client") for record in caplog.records] == [
        True
    ] * warns


def test_a_client_that_may_not_see_the_pages_may_still_ask_for_liveness() -> None:
    routes = {"/metrics": collector.application(rich_snapshot)}
    alive = Health(rich_snapshot, lambda: None, 1, lambda: rich_snapshot().at_ns).routes()
    guard = Guard(lambda: AccessRules(passwords=Passwords({"alice": "$2b$04$" + "." * 53})))
    with TcpServer(routes, alive, guard) as server:
        for path, status in (("/livez", 200), ("/readyz", 200), ("/metrics", 401), ("/", 401), ("/%6Civez", 200)):
            for method in ("GET", "HEAD"):
                assert ask(server.port, path, method)[0] == status
        assert ask(server.port, "/livez")[2] == b"ok\n"

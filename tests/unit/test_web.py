# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's port: what is served there, to whom, and what is refused."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from agent import web
from agent.errors import SetupError
from agent.exporters import prometheus
from agent.page.ring import Ring
from agent.page.site import Site
from tests.unit.snapshots import rich_snapshot


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    ring = Ring()
    ring.note(rich_snapshot())
    site = Site(rich_snapshot, ring, list)
    with web.serve("127.0.0.1", 0, {"/metrics": prometheus.application(rich_snapshot), **site.routes()}) as server:
        yield server.port


def ask(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
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


def test_the_page_and_its_refreshment_say_the_same(port: int) -> None:
    _, headers, body = ask(port, "/")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    said = json.loads(ask(port, "/status.json")[2])
    for table in said["tables"]:
        assert f"<h2>{table['title']}</h2>" in body.decode()
    assert said["box"] in body.decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:9837", "[::1]:9837", "10.1.2.3", "localhost:80", "LOCALHOST"])
def test_whoever_asks_by_address_or_as_localhost_is_answered(port: int, host: str) -> None:
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
    assert ask(port, "/metrics", host=host)[0] == 200, "scrapers use whatever name they have"


def test_a_taken_port_is_one_line_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"127.0.0.1:{port}.*choose another") as caught:
            web.serve("127.0.0.1", port, {})
    assert "\n" not in str(caught.value)


def test_the_port_is_free_again_after_closing() -> None:
    server = web.serve("127.0.0.1", 0, {})
    server.close()
    web.serve("127.0.0.1", server.port, {}).close()


def test_a_client_that_leaves_in_the_middle_costs_nobody_anything(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", port)) as rude:
        rude.sendall(b"GET /status.json HTTP/1.1\r\nHost: localh")
    assert ask(port, "/")[0] == 200
    assert capfd.readouterr().err == ""

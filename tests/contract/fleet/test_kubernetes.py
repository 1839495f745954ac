# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The client against an API server over HTTP: pages, watches, refusals, and servers that do not behave."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.fleet.api_server import ApiServer, Cluster, RefusedError
from fleet.model import FleetError
from fleet.sources.kubernetes import (
    Access,
    AwayError,
    ConflictError,
    GoneError,
    KubernetesApi,
    MissingError,
    access,
)
from fleet.sources.kubernetes import (
    RefusedError as ApiRefusedError,
)


@contextmanager
def serving(server: ApiServer) -> Iterator[ApiServer]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.stopped = True
        server.shutdown()
        server.server_close()
        thread.join()


_SILENCE_S = 60.0


@contextmanager
def raw(answer: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """A server that sends this byte by byte to the client that connects, with pauses, and never ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def serve() -> None:
            connected, _ = listener.accept()
            with connected:
                for byte in answer:
                    if stop.wait(pause_s):
                        return
                    connected.sendall(bytes([byte]))
                stop.wait(_SILENCE_S)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            thread.join()


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with serving(ApiServer(Cluster())) as found:
        yield found


CLIENTS: list[KubernetesApi] = []


def client(url: str, timeout_s: float = 5.0) -> KubernetesApi:
    CLIENTS.append(KubernetesApi(Access(url), timeout_s))
    return CLIENTS[-1]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while CLIENTS:
        CLIENTS.pop().close()


def test_pods_are_listed_page_by_page(server: ApiServer) -> None:
    for at in range(1201):
        server.cluster.add(f"p{at}", {})
    listing = client(server.url).list_pods()
    assert len({pod["metadata"]["name"] for pod in listing.pods}) == 1201
    assert listing.version == str(server.cluster.version)


def test_a_watch_brings_what_changed_since_the_list(server: ApiServer) -> None:
    api = client(server.url)
    version = api.list_pods().version
    server.cluster.add("p", {})
    server.cluster.patch("batch/p", {"annotations": {"a": "1"}})
    server.cluster.delete("batch/p")
    assert [change.kind for change in api.watch_pods(version, 1.0)] == ["ADDED", "MODIFIED", "DELETED"]


def test_a_watch_from_a_forgotten_version_is_gone_at_once_or_on_the_way(server: ApiServer) -> None:
    server.cluster.add("p", {})
    server.cluster.forget()
    with pytest.raises(GoneError):
        list(client(server.url).watch_pods("0", 1.0))
    changes = client(server.url).watch_pods(str(server.cluster.version), 5.0)

    def lose() -> None:
        server.cluster.add("q", {})
        server.cluster.forget()

    threading.Timer(0.2, lose).start()
    with pytest.raises(GoneError):
        list(changes)


def test_annotations_are_merged_and_none_takes_one_off(server: ApiServer) -> None:
    pod = server.cluster.add("p", {"keep": "1", "drop": "1"})
    metadata = {"uid": pod["metadata"]["uid"], "annotations": {"new": "2", "drop": None}}
    assert client(server.url).annotate("batch", "p", metadata)["metadata"]["annotations"] == {"keep": "1", "new": "2"}


def test_refusals_say_what_they_are(server: ApiServer) -> None:
    api, pod = client(server.url), server.cluster.add("p", {})
    uid = pod["metadata"]["uid"]
    with pytest.raises(MissingError):
        api.pod("batch", "none")
    with pytest.raises(ConflictError):
        api.annotate("batch", "p", {"uid": "another"})
    api.bind("batch", "p", uid, "n1")
    with pytest.raises(ConflictError, match="already assigned to node n1"):
        api.bind("batch", "p", uid, "n2")


def test_what_is_forbidden_points_to_the_role(server: ApiServer) -> None:
    def refuse(_method: str, _path: str) -> None:
        raise RefusedError(403, "no")

    server.fault = refuse
    with pytest.raises(ApiRefusedError, match="role"):
        client(server.url).list_pods()


def test_of_a_server_that_fails_it_is_unknown_whether_it_wrote(server: ApiServer) -> None:
    def fail(_method: str, _path: str) -> None:
        raise RefusedError(504, "timeout")

    server.fault = fail
    with pytest.raises(AwayError):
        client(server.url).annotate("batch", "p", {})


def test_a_connection_that_the_server_closed_meanwhile_is_made_anew(server: ApiServer) -> None:
    with serving(ApiServer(server.cluster)) as first:
        api = client(first.url)
        server.cluster.add("p", {})
        api.pod("batch", "p")
        port = first.server_address[1]
    with serving(ApiServer(server.cluster, int(port))):
        assert api.pod("batch", "p")["metadata"]["name"] == "p"


def test_nobody_there_is_an_error_that_names_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    with pytest.raises(AwayError, match=url):
        client(url).list_pods()


@pytest.mark.parametrize(
    ("answer", "pause_s"),
    [
        (b"", 0.0),
        (b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 1000, 0.02),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 999, 0.02),
    ],
    ids=["says nothing", "drips a header", "drips a body"],
)
def test_no_call_outlives_its_deadline(answer: bytes, pause_s: float) -> None:
    with raw(answer, pause_s) as url:
        begun_s = time.monotonic()
        with pytest.raises(AwayError):
            client(url, 0.5).pod("batch", "p")
        assert time.monotonic() - begun_s < _SILENCE_S / 2


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'{"items": 3}', b"\x00"])
def test_what_is_no_list_of_pods_is_an_error(body: bytes) -> None:
    with raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) as url, pytest.raises(AwayError):
        client(url, 2.0).list_pods()


def test_in_a_pod_the_service_account_is_used(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    found = access(None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}, tmp_path)
    assert found == Access("https://10.0.0.1:6443", tmp_path / "token", tmp_path / "ca.crt")


def test_outside_of_a_pod_a_url_is_needed(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="--kubernetes URL"):
        access(None, {}, tmp_path)
    with pytest.raises(FleetError, match="kubectl proxy"):
        access("127.0.0.1:8001", {}, tmp_path)

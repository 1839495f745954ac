# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A runtime's socket that is missing, hangs or lies: no caller waits for it or believes it, and it is tried again."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cri_api.v1 import api_pb2 as v1
from cri_api.v1alpha2 import api_pb2 as v1alpha2

from agent.containers.cri import Cri
from agent.containers.identity import identify
from agent.containers.naming import Naming
from agent.containers.runtimes import KINDS, KUBELET, Socket
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import SourceError
from agent.core.model import Container
from tests.support.clocks import AheadClock
from tests.support.pretenders import Methods, answering, dripping, endlessly, hang, listening, ok, serving
from tools.harness.wait import until

SHORT_NS = NS_PER_SECOND // 5
LONG_NS = 3600 * NS_PER_SECOND
MINUTE_NS = 60 * NS_PER_SECOND
KINDS_OF_SOCKETS = pytest.mark.parametrize("kind", sorted(KINDS))


def docker_container() -> Container:
    return identify(f"/docker/{secrets.token_hex(32)}")


def inspected(container_id: str, **more: object) -> bytes:
    return ok(
        json.dumps({"Id": container_id, "Name": "/web", "Config": {"Image": "nginx", "Labels": {}}, **more}).encode()
    )


def outcome_of(kind: str, path: Path, limit_ns: int = SHORT_NS) -> dict[tuple[str, str], int]:
    """What became of one question that has no answer."""
    it = docker_container()
    with Naming([Socket(kind, str(path))], limit_ns) as naming:
        assert naming.named(it) is it
        until(lambda: bool(naming.counts()), "a counted question")
        assert naming.named(it) is it
        return dict(naming.counts())


@KINDS_OF_SOCKETS
def test_a_socket_that_hangs_is_a_timeout(tmp_path: Path, kind: str) -> None:
    with listening(tmp_path / "s", hang):
        assert outcome_of(kind, tmp_path / "s") == {(kind, "timeout"): 1}


@KINDS_OF_SOCKETS
def test_a_service_that_is_closed_ends_its_thread_even_while_a_socket_hangs(tmp_path: Path, kind: str) -> None:
    with listening(tmp_path / "s", hang) as met:
        with Naming([Socket(kind, str(tmp_path / "s"))], LONG_NS) as naming:
            naming.named(docker_container())
            until(lambda: bool(met), "a connection")
        assert not naming._worker.alive


def test_a_kubelet_that_hangs_holds_up_neither_names_nor_the_end(tmp_path: Path) -> None:
    with listening(tmp_path / "s", hang) as met:
        with Naming([Socket(KUBELET, str(tmp_path / "s"))], LONG_NS) as naming:
            until(lambda: bool(met), "a connection")
            assert naming.holders() is None
        assert not naming._worker.alive


@KINDS_OF_SOCKETS
@pytest.mark.parametrize("response", [b"", b"garbage\r\n\r\n", secrets.token_bytes(5000), b"\0" * 5000])
def test_garbage_is_an_error(tmp_path: Path, kind: str, response: bytes) -> None:
    with listening(tmp_path / "s", answering(response)):
        assert outcome_of(kind, tmp_path / "s", LONG_NS) == {(kind, "error"): 1}


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"null", b"17", b'"text"', b"[" * 200_000, b'{"Id": 7}', b"{}", b"\xff\xfe", b'{"Config": 3}']
)
def test_an_answer_that_is_no_container_is_an_error(tmp_path: Path, body: bytes) -> None:
    with listening(tmp_path / "s", answering(ok(body))):
        assert outcome_of("docker", tmp_path / "s", LONG_NS) == {("docker", "error"): 1}


def test_another_containers_answer_is_not_believed(tmp_path: Path) -> None:
    with listening(tmp_path / "s", answering(inspected(docker_container().id))):
        assert outcome_of("docker", tmp_path / "s", LONG_NS) == {("docker", "error"): 1}


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]
)
def test_an_endless_answer_is_cut_off(tmp_path: Path, head: bytes) -> None:
    with listening(tmp_path / "s", endlessly(head, b"1000\r\n" + b"x" * 0x1000 + b"\r\n")):
        assert outcome_of("docker", tmp_path / "s", LONG_NS) == {("docker", "error"): 1}


def test_endless_headers_are_cut_off(tmp_path: Path) -> None:
    with listening(tmp_path / "s", endlessly(b"HTTP/1.1 200 OK\r\n", b"X-More: yes\r\n")):
        assert outcome_of("docker", tmp_path / "s", LONG_NS) == {("docker", "error"): 1}


@pytest.mark.parametrize("response", [b"HTTP/1.1 200 OK\r\n", b"x"])
def test_an_answer_that_drips_is_a_timeout(tmp_path: Path, response: bytes) -> None:
    over = threading.Event()
    with listening(tmp_path / "s", dripping(response, over)):
        try:
            assert outcome_of("docker", tmp_path / "s") == {("docker", "timeout"): 1}
        finally:
            over.set()  # else its server's threads outlive the test


def test_a_file_that_is_no_socket_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("")
    assert not Socket("docker", str(tmp_path / "s")).present()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a socket to another user")
def test_a_socket_of_another_user_is_not_asked(tmp_path: Path) -> None:
    it = docker_container()
    with listening(tmp_path / "s", answering(inspected(it.id))) as met:
        os.chown(tmp_path / "s", 1000, 1000)
        with Naming([Socket("docker", str(tmp_path / "s"))], LONG_NS) as naming:
            naming.named(it)
            until(lambda: not naming._waiting, "all questions to be answered")
            assert naming.named(it) is it
        assert not met


def test_a_socket_without_a_listener_is_an_error(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
    for kind in KINDS:
        assert outcome_of(kind, tmp_path / "s", LONG_NS) == {(kind, "error"): 1}


@KINDS_OF_SOCKETS
def test_a_socket_that_fails_is_left_alone_for_a_while(tmp_path: Path, kind: str) -> None:
    clock = AheadClock()
    with (
        listening(tmp_path / "s", answering(b"")),
        Naming([Socket(kind, str(tmp_path / "s"))], LONG_NS, clock) as naming,
    ):
        first = docker_container()
        naming.named(first)
        until(lambda: naming.counts() == {(kind, "error"): 1}, "a counted error")
        for _ in range(100):
            naming.named(docker_container())
        until(lambda: not naming._waiting, "all questions to be answered")
        clock.ahead_ns += MINUTE_NS
        naming.named(first)
        until(lambda: naming.counts() == {(kind, "error"): 2}, "a counted error")


def test_what_a_broken_socket_kept_from_us_is_asked_for_again_every_ten_seconds(tmp_path: Path) -> None:
    clock, it = AheadClock(), docker_container()
    path = tmp_path / "s"
    with listening(path, answering(b"")), Naming([Socket("docker", str(path))], LONG_NS, clock) as naming:
        for times in range(1, 5):
            naming.named(it)
            until(lambda times=times: naming.counts() == {("docker", "error"): times}, "a counted error")  # type: ignore[misc]
            until(lambda: not naming._waiting, "all questions to be answered")
            clock.ahead_ns += 10 * NS_PER_SECOND


def test_what_a_broken_socket_kept_from_us_is_learnt_when_it_works_again(tmp_path: Path) -> None:
    clock, it = AheadClock(), docker_container()
    with Naming([Socket("docker", str(tmp_path / "s"))], LONG_NS, clock) as naming:
        with listening(tmp_path / "s", answering(b"")):
            naming.named(it)
            until(lambda: naming.counts() == {("docker", "error"): 1}, "a counted error")
        clock.ahead_ns += MINUTE_NS
        with listening(tmp_path / "s", answering(inspected(it.id))):
            until(lambda: naming.named(it) is not it, "a name")
        assert naming.named(it).name == "web"


def test_a_socket_that_appears_later_is_found(tmp_path: Path) -> None:
    clock, it = AheadClock(), docker_container()
    with Naming([Socket("docker", str(tmp_path / "s"))], LONG_NS, clock) as naming:
        naming.named(it)
        until(lambda: not naming._waiting, "all questions to be answered")
        clock.ahead_ns += MINUTE_NS
        with listening(tmp_path / "s", answering(inspected(it.id))):
            until(lambda: naming.named(it) is not it, "a name")


def test_a_socket_is_asked_one_thing_at_a_time(tmp_path: Path) -> None:
    under_way: list[str] = []
    at_once: list[int] = []

    def watch(connected: socket.socket) -> None:
        asked = connected.recv(1 << 16).split()[1].decode().split("/")[2]
        under_way.append(asked)
        connected.settimeout(0.002)
        with contextlib.suppress(TimeoutError):  # long enough for another question to come in
            connected.recv(1)
        at_once.append(len(under_way))
        under_way.remove(asked)
        connected.sendall(inspected(asked))

    containers = [docker_container() for _ in range(50)]
    with listening(tmp_path / "s", watch), Naming([Socket("docker", str(tmp_path / "s"))], LONG_NS) as naming:
        until(lambda: all(naming.named(it) is not it for it in containers), "a name")
    assert at_once == [1] * 50


def test_docker_under_kubernetes_tells_of_pods(tmp_path: Path) -> None:
    it = identify(f"/kubepods/pod8dbc5577-d0e2-4706-8787-57d52c03ddf2/{secrets.token_hex(32)}")
    labels = {"container.name": "server", "pod.name": "chat-0", "pod.namespace": "serving"}
    config = {"Image": "nginx", "Labels": {f"io.kubernetes.{key}": value for key, value in labels.items()}}
    response = inspected(it.id, Name="/k8s_server_chat-0_serving_8dbc5577_0", Config=config)
    with (
        listening(tmp_path / "s", answering(response)),
        Naming([Socket("docker", str(tmp_path / "s"))], LONG_NS) as naming,
    ):
        until(lambda: naming.named(it) is not it, "a name")
        named = naming.named(it)
    assert (named.name, named.pod, named.namespace) == ("server", "chat-0", "serving")


def test_a_container_of_many_and_long_labels_is_kept_within_bounds(tmp_path: Path) -> None:
    it = docker_container()
    labels = {f"label-{number:05}": "long" * 500 for number in range(400)} | {"\x1b[2J": "\u202e", "x" * 999: ""}
    response = inspected(it.id, Name="/" + "n" * 5000, Config={"Image": "i" * 5000, "Labels": labels})
    with (
        listening(tmp_path / "s", answering(response)),
        Naming([Socket("docker", str(tmp_path / "s"))], LONG_NS) as naming,
    ):
        until(lambda: naming.named(it) is not it, "a name")
        named = naming.named(it)
    assert len(named.name) <= 253
    assert named.image is not None
    assert len(named.image) <= 256
    assert 0 < len(named.labels) <= 64
    assert all(key.isprintable() and value.isprintable() for key, value in named.labels.items())
    assert sum(len(key) + len(value) for key, value in named.labels.items()) <= 16_384


def always(response: bytes) -> Callable[[bytes], bytes]:
    return lambda _: response


def cri_methods(version: str, container: bytes, pod: bytes, status: bytes) -> Methods:
    methods = {"ListContainers": container, "ListPodSandbox": pod, "ContainerStatus": status}
    return {f"/{version}.RuntimeService/{name}": always(response) for name, response in methods.items()}


def cri_answers(api: Any, container_id: str, pod_id: str = "pod1") -> tuple[bytes, bytes, bytes]:
    """What a sound server answers to ListContainers, ListPodSandbox and ContainerStatus."""
    metadata = api.ContainerMetadata(name="server")
    container = api.Container(id=container_id, pod_sandbox_id="pod1", metadata=metadata)
    pod = api.PodSandbox(id=pod_id, metadata=api.PodSandboxMetadata(name="chat-0", namespace="serving"))
    status = api.ContainerStatus(id=container_id, image=api.ImageSpec(image="nginx:1"))
    answers = (
        api.ListContainersResponse(containers=[container]),
        api.ListPodSandboxResponse(items=[pod]),
        api.ContainerStatusResponse(status=status),
    )
    first, second, third = (answer.SerializeToString() for answer in answers)
    return first, second, third


@pytest.mark.parametrize(("version", "api"), [("runtime.v1", v1), ("runtime.v1alpha2", v1alpha2)])
def test_both_versions_of_cri_are_understood(tmp_path: Path, version: str, api: Any) -> None:
    it = docker_container()
    methods = cri_methods(version, *cri_answers(api, it.id))
    with serving(tmp_path / "s", methods), Naming([Socket("cri", str(tmp_path / "s"))], LONG_NS) as naming:
        until(lambda: naming.named(it) is not it, "a name")
        named = naming.named(it)
    assert (named.name, named.pod, named.namespace, named.image) == ("server", "chat-0", "serving", "nginx:1")


def test_a_runtime_that_was_restarted_is_found_again(tmp_path: Path) -> None:
    clock = AheadClock()
    with Naming([Socket("cri", str(tmp_path / "s"))], LONG_NS, clock) as naming:
        for _ in range(3):
            it = docker_container()
            with serving(tmp_path / "s", cri_methods("runtime.v1", *cri_answers(v1, it.id))):
                naming.named(it)
                until(lambda: not naming._waiting, "all questions to be answered")
                clock.ahead_ns += MINUTE_NS  # the connection to the one before may have been the first to be tried
                until(lambda it=it: naming.named(it) is not it, "a name")  # type: ignore[misc]


def test_a_server_without_cri_knows_no_container(tmp_path: Path) -> None:
    with serving(tmp_path / "s", {}):
        assert outcome_of("cri", tmp_path / "s", LONG_NS) == {("cri", "unknown"): 1}
        assert outcome_of("containerd", tmp_path / "s", LONG_NS) == {("containerd", "unknown"): 1}


STRANGER = cri_answers(v1, "b" * 64)


@pytest.mark.parametrize(
    "response",
    [STRANGER, (b"\xff\xff\xff", b"", b"")],
)
def test_a_cri_server_that_lies_is_not_believed(tmp_path: Path, response: tuple[bytes, bytes, bytes]) -> None:
    with serving(tmp_path / "s", cri_methods("runtime.v1", *response)):
        assert outcome_of("cri", tmp_path / "s", LONG_NS) == {("cri", "error"): 1}


def test_a_container_in_a_pod_that_is_another_or_none_is_not_believed(tmp_path: Path) -> None:
    it = docker_container()
    sound = cri_answers(v1, it.id)
    for pod, complaint in ((b"", "a pod that does not exist"), (cri_answers(v1, it.id, "pod2")[1], "about another")):
        methods = cri_methods("runtime.v1", sound[0], pod, sound[2])
        with (
            serving(tmp_path / "s", methods),
            contextlib.closing(Cri(str(tmp_path / "s"))) as cri,
            pytest.raises(SourceError, match=complaint),
        ):
            cri.look_up(it, monotonic_ns() + LONG_NS)


def test_an_answer_of_cri_that_is_too_long_is_not_taken(tmp_path: Path) -> None:
    it = docker_container()
    sound = cri_answers(v1, it.id)
    long = v1.ListContainersResponse.FromString(sound[0])
    long.containers[0].labels["long"] = "x" * (1 << 20)
    with (
        serving(tmp_path / "s", cri_methods("runtime.v1", long.SerializeToString(), *sound[1:])),
        contextlib.closing(Cri(str(tmp_path / "s"))) as cri,
        pytest.raises(SourceError, match="more than 1048576 bytes"),
    ):
        cri.look_up(it, monotonic_ns() + LONG_NS)


def test_a_cri_server_that_hangs_in_a_call_is_a_timeout(tmp_path: Path) -> None:
    over = threading.Event()

    def wait(_: bytes) -> bytes:
        over.wait()
        return b""

    with serving(tmp_path / "s", {"/runtime.v1.RuntimeService/ListContainers": wait}):
        try:
            assert outcome_of("cri", tmp_path / "s") == {("cri", "timeout"): 1}
        finally:
            over.set()  # else its server's threads outlive the test


def test_a_cri_server_that_gives_up_first_is_a_timeout(tmp_path: Path) -> None:
    def give_up(_: bytes) -> bytes:
        raise TimeoutError

    with serving(tmp_path / "s", {"/runtime.v1.RuntimeService/ListContainers": give_up}):
        assert outcome_of("cri", tmp_path / "s", LONG_NS) == {("cri", "timeout"): 1}

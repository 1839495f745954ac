# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A real dockerd, spoken to over its socket alone."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.containers import ContainerIndex, identify
from agent.containers.naming import Naming
from agent.containers.runtimes import Socket
from agent.core.clock import NS_PER_SECOND
from agent.node.procfs import Procfs
from tests.support.daemons import dockerd, swept
from tools.harness import cgroups
from tools.harness.containers.busybox_image import write_image
from tools.harness.wait import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="dockerd needs root")
IMAGE = "localhost/test:1"
COMPOSE = {"com.docker.compose.project": "shop", "com.docker.compose.service": "ranking"}


class Docker(http.client.HTTPConnection):
    """Its API."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))

    def do(self, method: str, target: str, body: object = None) -> Any:
        """What it answers, read."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        kind = "application/x-tar" if isinstance(body, bytes) else "application/json"
        self.request(method, target, data, {"Content-Type": kind})
        with self.getresponse() as response:
            answer = response.read()
        self.close()
        assert response.status < 300, answer
        return json.loads(answer) if answer and kind == "application/json" else None


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("docker")
    with swept("/docker"), dockerd(folder) as path:
        write_image(folder / "image.tar", IMAGE)
        Docker(path).do("POST", "/images/load", (folder / "image.tar").read_bytes())
        yield path


@pytest.fixture
def container(path: Path) -> Iterator[str]:
    docker = Docker(path)
    wanted = {"Image": IMAGE, "Labels": COMPOSE, "HostConfig": {"NetworkMode": "host"}}
    full_id = docker.do("POST", "/containers/create?name=shop-ranking-1", wanted)["Id"]
    try:
        docker.do("POST", f"/containers/{full_id}/start")
        yield full_id
    finally:
        docker.do("DELETE", f"/containers/{full_id}?force=1")


def test_a_container_gets_the_name_that_docker_gave_it(path: Path, container: str) -> None:
    tgid = Docker(path).do("GET", f"/containers/{container}/json")["State"]["Pid"]
    before = ContainerIndex().container_of(Procfs().process_id(tgid))
    assert (before.runtime, before.id, before.name) == ("docker", container, container[:12])
    with Naming([Socket("docker", str(path))], 10 * NS_PER_SECOND) as naming:
        until(lambda: naming.named(before) is not before, "a name")
        it = naming.named(before)
        assert (it.name, it.image, it.pod) == ("shop-ranking-1", IMAGE, None)
        assert dict(it.labels) == COMPOSE
        assert (it.key, it.id, it.cgroup) == (before.key, container, f"/docker/{container}")
        assert naming.counts() == {("docker", "found"): 1}


def test_a_cgroup_that_only_claims_the_id_gets_no_name_and_docker_says_where_the_container_is(
    path: Path, container: str
) -> None:
    claim = f"/gpuwarden-claims/docker-{container}.scope"
    with cgroups.own(claim), Naming([Socket("docker", str(path))], 10 * NS_PER_SECOND) as naming:
        it = identify(claim)
        assert it.id == container
        until(lambda: naming.named(it) is it and naming.placed(), "the answer")
        assert naming.placed() == {it.key: f"/docker/{container}"}
        assert naming.counts()["docker", "elsewhere"] == 1
        assert naming.named(it) is it
        real = identify(f"/docker/{container}")
        assert real.key == it.key
        until(lambda: naming.named(real).name == "shop-ranking-1", "the name of the one that runs there")
        assert naming.named(it) is it

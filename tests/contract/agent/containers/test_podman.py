# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A real Podman and its service, which speaks Docker's API."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.containers import ContainerIndex
from agent.containers.naming import Naming
from agent.containers.runtimes import Socket
from agent.core.clock import NS_PER_SECOND
from agent.core.model import Container
from agent.node.procfs import Procfs
from tests.support.daemons import Podman, emptied, swept
from tools.harness.containers.busybox_image import write_image
from tools.harness.wait import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="podman with real cgroups needs root")
IMAGE = "localhost/test:1"


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    folder = Path(tempfile.mkdtemp(prefix="podman-"))  # its own names below it may have 50 characters
    with swept("/libpod_parent"), emptied(folder):
        podman = Podman(folder)
        write_image(folder / "image.tar", IMAGE, {"org.opencontainers.image.title": "test"})
        podman.run("load", "--input", folder / "image.tar")
        yield podman
        podman.run("rm", "--all", "--force", "--time", "0")


def ran(podman: Podman, *arguments: str) -> Container:
    """A new container, as its cgroup tells it."""
    full_id = podman.run("run", "--detach", "--network", "host", *arguments, IMAGE).strip()
    tgid = int(podman.run("inspect", "--format", "{{.State.Pid}}", full_id))
    it = ContainerIndex().container_of(Procfs().process_id(tgid))
    assert (it.runtime, it.id, it.name) == ("podman", full_id, full_id[:12])
    return it


def test_a_container_gets_the_name_that_podman_gave_it(podman: Podman) -> None:
    before = ran(podman, "--name", "trainer", "--label", "team=vision")
    with podman.service() as path, Naming([Socket("podman", str(path))], 10 * NS_PER_SECOND) as naming:
        until(lambda: naming.named(before) is not before, "a name")
        it = naming.named(before)
    assert (it.name, it.image, it.pod) == ("trainer", IMAGE, None)
    assert dict(it.labels) == {"org.opencontainers.image.title": "test", "team": "vision"}
    assert (it.key, it.id, it.cgroup) == (before.key, before.id, before.cgroup)


def test_a_plain_container_cannot_pass_itself_off_as_a_pods(podman: Podman) -> None:
    before = ran(podman, "--label", "io.kubernetes.pod.namespace=serving", "--label", "io.kubernetes.pod.name=chat-0")
    with podman.service() as path, Naming([Socket("podman", str(path))], 10 * NS_PER_SECOND) as naming:
        until(lambda: naming.named(before) is not before, "a name")
        it = naming.named(before)
    assert (it.pod, it.namespace) == (None, None)
    assert not any(label.startswith("io.kubernetes.") for label in it.labels)


def test_without_the_service_it_keeps_its_short_id(podman: Podman) -> None:
    before = ran(podman)
    with Naming([Socket("podman", str(podman.folder / "none.sock"))]) as naming:
        assert naming.named(before) is before
        assert naming.counts() == {}

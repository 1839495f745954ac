# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A real containerd with its CRI plugin, and pods that this file makes as the kubelet would."""

from __future__ import annotations

import os
import secrets
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cri_api.v1 import api_pb2 as cri
from cri_api.v1 import api_pb2_grpc as rpc

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.containers import ContainerIndex
from agent.containers.containerd import Containerd
from agent.containers.cri import Cri
from agent.containers.identity import POD_UID, identify
from agent.containers.naming import Naming
from agent.containers.sources import Socket
from agent.model import Container
from agent.procfs import Procfs
from tests.contract.daemons import containerd, swept, wait_until
from tests.contract.image import write_image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="containerd with real cgroups needs root")
IMAGE = "localhost/test:1"
UID = str(uuid.uuid4())
PARENT = f"/kubepods/besteffort/pod{UID}"
LABELS = {
    "app": "chat",
    "io.kubernetes.pod.name": "chat-0",
    "io.kubernetes.pod.namespace": "serving",
    "io.kubernetes.pod.uid": UID,
}


@dataclass(frozen=True, slots=True)
class Pod:
    """One that runs."""

    socket: Path
    sandbox_id: str
    container_id: str
    tgid: int
    runtime: Any


@pytest.fixture(scope="module")
def runtime_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("containerd")
    with containerd(folder) as path:
        archive = folder / "image.tar"
        write_image(archive, IMAGE)
        ctr(path, "k8s.io", "image", "import", archive)
        ctr(path, "default", "image", "import", archive)
        yield path


@pytest.fixture(scope="module")
def pod(runtime_socket: Path) -> Iterator[Pod]:
    with (
        swept(PARENT),
        grpc.insecure_channel(f"unix:{runtime_socket}", options=[("grpc.default_authority", "localhost")]) as channel,
    ):
        runtime = rpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        sandbox_id = runtime.RunPodSandbox(cri.RunPodSandboxRequest(config=sandbox_config()), timeout=30).pod_sandbox_id
        try:
            yield started(runtime, runtime_socket, sandbox_id, "server")
        finally:
            runtime.StopPodSandbox(cri.StopPodSandboxRequest(pod_sandbox_id=sandbox_id), timeout=30)
            runtime.RemovePodSandbox(cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox_id), timeout=30)


def sandbox_config() -> Any:
    shared = cri.NamespaceOption(network=cri.NODE, pid=cri.CONTAINER)  # the node's network needs no CNI
    return cri.PodSandboxConfig(
        metadata=cri.PodSandboxMetadata(name="chat-0", uid=UID, namespace="serving"),
        labels=LABELS,
        linux=cri.LinuxPodSandboxConfig(
            cgroup_parent=PARENT, security_context=cri.LinuxSandboxSecurityContext(namespace_options=shared)
        ),
    )


def started(runtime: Any, path: Path, sandbox_id: str, name: str) -> Pod:
    config = cri.ContainerConfig(
        metadata=cri.ContainerMetadata(name=name),
        image=cri.ImageSpec(image=IMAGE),
        command=["sleep", "1000"],
        labels={"io.kubernetes.container.name": name},
        linux=cri.LinuxContainerConfig(),
    )
    request = cri.CreateContainerRequest(pod_sandbox_id=sandbox_id, config=config, sandbox_config=sandbox_config())
    container_id = runtime.CreateContainer(request, timeout=30).container_id
    runtime.StartContainer(cri.StartContainerRequest(container_id=container_id), timeout=30)
    tasks = ctr(path, "k8s.io", "task", "list").splitlines()
    [tgid] = [int(line.split()[1]) for line in tasks if line.startswith(container_id)]
    return Pod(path, sandbox_id, container_id, tgid, runtime)


def ctr(path: Path, namespace: str, *arguments: str | Path) -> str:
    command = ["ctr", "--address", path, "--namespace", namespace, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def soon() -> int:
    return monotonic_ns() + 5 * NS_PER_SECOND


def by_cgroup(tgid: int) -> Container:
    return ContainerIndex().container_of(Procfs().process_id(tgid))


def test_a_pods_container_gets_the_names_that_kubernetes_gave_it(pod: Pod) -> None:
    before = by_cgroup(pod.tgid)
    assert (before.runtime, before.name, before.pod) == ("containerd", pod.container_id[:12], None)
    with Naming([Socket("cri", str(pod.socket))], limit_ns=5 * NS_PER_SECOND) as naming:
        assert naming.named(before) is before
        wait_until(lambda: naming.named(before) is not before)
        it = naming.named(before)
        assert (it.name, it.pod, it.namespace, it.image) == ("server", "chat-0", "serving", IMAGE)
        assert (it.labels["app"], it.labels[POD_UID]) == ("chat", UID)
        assert it.labels["io.kubernetes.container.name"] == "server"
        assert (it.key, it.id, it.cgroup) == (before.key, pod.container_id, f"{PARENT}/{pod.container_id}")
        assert naming.counts() == {("cri", "found"): 1}


def test_a_container_that_ended_still_has_its_names(pod: Pod) -> None:
    extra = started(pod.runtime, pod.socket, pod.sandbox_id, "batch")
    it = by_cgroup(extra.tgid)
    pod.runtime.StopContainer(cri.StopContainerRequest(container_id=extra.container_id, timeout=0), timeout=30)
    names = Cri(str(pod.socket)).look_up(it, soon())
    assert names
    assert (names.name, names.pod) == ("batch", "chat-0")


def test_nobody_by_that_id_is_unknown(pod: Pod) -> None:
    stranger = identify(f"/kubepods/pod{UID}/{secrets.token_hex(32)}")
    assert Cri(str(pod.socket)).look_up(stranger, soon()) is None
    assert Containerd(str(pod.socket)).look_up(stranger, soon()) is None


def test_part_of_an_id_is_nobody(pod: Pod) -> None:
    part = Container(by_cgroup(pod.tgid).key, "part", "containerd", pod.container_id[:40])
    with pytest.raises(Exception, match="told about another"):
        Cri(str(pod.socket)).look_up(part, soon())


def test_a_container_that_containerd_runs_without_kubernetes_gets_its_names(runtime_socket: Path) -> None:
    full_id = secrets.token_hex(32)
    cgroup = f"/system.slice/nerdctl-{full_id}.scope"
    labels = ["--label", "nerdctl/name=trainer", "--label", "team=vision"]
    ctr(runtime_socket, "default", "run", "-d", "--snapshotter", "native", "--cgroup", cgroup, *labels, IMAGE, full_id)
    try:
        it = identify(cgroup)
        with Naming([Socket("cri", str(runtime_socket)), Socket("containerd", str(runtime_socket))]) as naming:
            wait_until(lambda: naming.named(it) is not it)
            named = naming.named(it)
        assert (named.name, named.image, named.labels["team"]) == ("trainer", IMAGE, "vision")
        assert (named.pod, named.namespace) == (None, None)
    finally:
        ctr(runtime_socket, "default", "task", "kill", "-s", "KILL", full_id)
        wait_until(lambda: "STOPPED" in ctr(runtime_socket, "default", "task", "list"))
        ctr(runtime_socket, "default", "container", "delete", full_id)

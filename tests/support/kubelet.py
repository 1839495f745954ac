# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Pods in a real containerd, made over its CRI socket as the kubelet makes them."""

from __future__ import annotations

import contextlib
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cri_api.v1 import api_pb2 as cri
from cri_api.v1 import api_pb2_grpc as rpc

from tests.support.daemons import containerd, swept
from tools.harness.containers.busybox_image import write_image

IMAGE = "localhost/test:1"
_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that runs; `config` is what it was made of."""

    config: Any
    sandbox_id: str
    cgroup: str


@dataclass(frozen=True, slots=True)
class Kubelet:
    """The kubelet's part: pods are run in this containerd through its CRI socket."""

    socket: Path
    runtime: Any = field(repr=False)

    @contextlib.contextmanager
    def pod(
        self,
        name: str,
        namespace: str,
        labels: Mapping[str, str],
        annotations: Mapping[str, str] | None = None,
        *,
        host_pid: bool = False,
        logs: Path | None = None,
    ) -> Iterator[Pod]:
        """Inside it the pod runs; then it is removed with all that is in it. `logs`: the folder of its log files."""
        uid = str(uuid.uuid4())
        cgroup = f"/kubepods/besteffort/pod{uid}"
        config = _sandbox(name, namespace, uid, cgroup, labels, annotations or {}, host_pid)
        config.log_directory = str(logs or "")
        with swept(cgroup):
            request = cri.RunPodSandboxRequest(config=config)
            sandbox_id = self.runtime.RunPodSandbox(request, timeout=_SECONDS).pod_sandbox_id
            try:
                yield Pod(config, sandbox_id, cgroup)
            finally:
                self.runtime.StopPodSandbox(cri.StopPodSandboxRequest(pod_sandbox_id=sandbox_id), timeout=_SECONDS)
                self.runtime.RemovePodSandbox(cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox_id), timeout=_SECONDS)

    def run(
        self,
        pod: Pod,
        name: str,
        command: Sequence[str] = ("sleep", "1000"),
        environment: Mapping[str, str] | None = None,
        mounts: Mapping[str, bool] | None = None,
    ) -> str:
        """Starts a container; returns its id. `mounts`: folders of the host, at the same place, → whether read-only."""
        config = cri.ContainerConfig(
            metadata=cri.ContainerMetadata(name=name),
            image=cri.ImageSpec(image=IMAGE),
            command=command,
            envs=[cri.KeyValue(key=key, value=value) for key, value in (environment or {}).items()],
            mounts=[cri.Mount(host_path=at, container_path=at, readonly=ro) for at, ro in (mounts or {}).items()],
            labels={"io.kubernetes.container.name": name},
            linux=cri.LinuxContainerConfig(),
        )
        return self.start(pod, config)

    def start(self, pod: Pod, config: Any) -> str:
        """Starts a container, a cri.ContainerConfig; returns its id."""
        request = cri.CreateContainerRequest(pod_sandbox_id=pod.sandbox_id, config=config, sandbox_config=pod.config)
        container_id = self.runtime.CreateContainer(request, timeout=_SECONDS).container_id
        self.runtime.StartContainer(cri.StartContainerRequest(container_id=container_id), timeout=_SECONDS)
        return str(container_id)

    def stop(self, container_id: str, grace_seconds: int = 0) -> int:
        """Ends it, with SIGKILL once the grace is over; what is known about it stays. Returns its exit code."""
        request = cri.StopContainerRequest(container_id=container_id, timeout=grace_seconds)
        self.runtime.StopContainer(request, timeout=_SECONDS + grace_seconds)
        return int(self.status(container_id).exit_code)

    def status(self, container_id: str) -> Any:
        """A cri.ContainerStatus."""
        request = cri.ContainerStatusRequest(container_id=container_id)
        return self.runtime.ContainerStatus(request, timeout=_SECONDS).status

    def execute(self, container_id: str, *command: str) -> str:
        """What a command prints that is run in it, as `kubectl exec` does."""
        request = cri.ExecSyncRequest(container_id=container_id, cmd=command, timeout=_SECONDS)
        done = self.runtime.ExecSync(request, timeout=_SECONDS)
        assert done.exit_code == 0, (done.stdout + done.stderr).decode(errors="replace")
        return str(done.stdout.decode())

    def tgid(self, container_id: str) -> int:
        """Of its first process."""
        tasks = self.ctr("k8s.io", "task", "list").splitlines()
        [tgid] = [int(line.split()[1]) for line in tasks if line.startswith(container_id)]
        return tgid

    def ctr(self, namespace: str, *arguments: str | Path) -> str:
        """containerd's own command; what it printed."""
        command = ["ctr", "--address", self.socket, "--namespace", namespace, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout


@contextlib.contextmanager
def running_kubelet(folder: Path, snapshotter: str = "native", runc: str | Path = "runc") -> Iterator[Kubelet]:
    """With a containerd and an image, in that folder; leave the block, and they are gone."""
    options = [("grpc.default_authority", "localhost")]
    with (
        containerd(folder, snapshotter=snapshotter, runc=runc) as path,
        grpc.insecure_channel(f"unix:{path}", options=options) as channel,
    ):
        kubelet = Kubelet(path, rpc.RuntimeServiceStub(channel))  # type: ignore[no-untyped-call]
        write_image(folder / "image.tar", IMAGE)
        for namespace in ("k8s.io", "default"):
            kubelet.ctr(namespace, "image", "import", folder / "image.tar")
        yield kubelet


def _sandbox(
    name: str,
    namespace: str,
    uid: str,
    cgroup: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    host_pid: bool,
) -> Any:
    pid = cri.NODE if host_pid else cri.CONTAINER
    shared = cri.NamespaceOption(network=cri.NODE, pid=pid)  # the node's network needs no CNI
    of_the_kubelet = {"name": name, "namespace": namespace, "uid": uid}
    return cri.PodSandboxConfig(
        metadata=cri.PodSandboxMetadata(name=name, uid=uid, namespace=namespace),
        labels={**labels, **{f"io.kubernetes.pod.{key}": value for key, value in of_the_kubelet.items()}},
        annotations=annotations,
        linux=cri.LinuxPodSandboxConfig(
            cgroup_parent=cgroup, security_context=cri.LinuxSandboxSecurityContext(namespace_options=shared)
        ),
    )

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Real container runtimes for tests: each in a folder and on a socket of its own, gone without a trace afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tools.harness import cgroups
from tools.harness.wait import until

CONTAINERD = """
version = 2
root = "{folder}/root"
state = "{folder}/state"
oom_score = 0
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs"{disabled}]
[grpc]
  address = "{folder}/containerd.sock"
[ttrpc]
  address = "{folder}/containerd.sock.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "localhost/test:1"
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{folder}/cni/bin"
    conf_dir = "{folder}/cni/conf"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
"""
DOCKERD = (
    "--bridge=none",
    "--iptables=false",
    "--ip-forward=false",
    "--oom-score-adjust=0",
    "--default-ulimit=nofile=20000:20000",
    "--exec-opt=native.cgroupdriver=cgroupfs",
    "--storage-driver=vfs",
)
PODMAN = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
"""


@contextlib.contextmanager
def running(command: Sequence[str | Path], folder: Path, ready: Callable[[], bool], **more: str) -> Iterator[None]:
    """While it runs; `more`: variables of its environment. Its output is in `folder`/log."""
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env={**os.environ, **more})
    try:
        until(lambda: process.poll() is not None or ready(), f"{command[0]} to be ready")
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def containerd(
    folder: Path, cri: bool = True, snapshotter: str = "native", runc: str | Path = "runc"
) -> Iterator[Path]:
    """The socket of a containerd."""
    config, path = folder / "config.toml", folder / "containerd.sock"
    disabled = "" if cri else ', "io.containerd.grpc.v1.cri"'
    config.write_text(CONTAINERD.format(folder=folder, disabled=disabled, snapshotter=snapshotter, runc=runc))
    with emptied(folder), running(["containerd", "--config", config], folder, lambda: answers(path)):
        yield path


@contextlib.contextmanager
def dockerd(folder: Path) -> Iterator[Path]:
    """The socket of a dockerd, with a containerd of its own."""
    path = folder / "docker.sock"
    (folder / "containerd").mkdir()
    places = [f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
    with emptied(folder), containerd(folder / "containerd", cri=False) as runtime:
        command = ["dockerd", *DOCKERD, *places, f"--host=unix://{path}", f"--containerd={runtime}"]
        with running(command, folder, lambda: answers(path)):
            yield path


class Podman:
    """Its containers, images and socket are in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = folder / "containers.conf"
        config.write_text(PODMAN)
        self._environment = {"CONTAINERS_CONF": str(config)}
        places = ("--root", folder / "root", "--runroot", folder / "run", "--tmpdir", folder / "tmp")
        self._command = [*map(str, ("podman", *places, "--storage-driver", "vfs"))]

    def run(self, *arguments: str | Path) -> str:
        """One command; what it printed."""
        environment = {**os.environ, **self._environment}
        command = [*map(str, self._command), *map(str, arguments)]
        return subprocess.run(
            command, check=True, env=environment, text=True, stdout=subprocess.PIPE, timeout=60
        ).stdout

    @contextlib.contextmanager
    def service(self) -> Iterator[Path]:
        """The socket of its API."""
        path = self.folder / "podman.sock"
        command = [*self._command, "system", "service", "-t", "0", f"unix://{path}"]
        with running(command, self.folder, lambda: answers(path), **self._environment):
            yield path


def answers(path: Path) -> bool:
    """Whether connections to this socket are accepted."""
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.connect(str(path))
        return True
    return False


@contextlib.contextmanager
def swept(cgroup: str) -> Iterator[None]:
    """What is made at that path and above it is gone afterwards."""
    made = cgroups.missing(cgroup)
    try:
        yield
    finally:
        cgroups.empty(cgroup)
        assert not cgroups.remove(cgroup, made)


@contextlib.contextmanager
def emptied(folder: Path) -> Iterator[None]:
    """What was mounted below it is unmounted afterwards, and the folder is empty: images take space."""
    try:
        yield
    finally:
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in reversed([mount for mount in mounts if mount.startswith(f"{folder}/")]):
            subprocess.run(["umount", "-l", mount], check=True)
        shutil.rmtree(folder)

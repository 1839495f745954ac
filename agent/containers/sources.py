# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who can be asked for names, and where they usually listen.

A kind of source is a file beside this one and a line in `KINDS`; it is imported when its socket is first found, as
gRPC costs ~25 MiB that a node without such a runtime need not pay.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent.containers.answers import Names
from agent.errors import UsageError
from agent.model import Container


class Source(Protocol):
    """Something that knows containers by their ids."""

    def look_up(self, container: Container, deadline_ns: int) -> Names | None:
        """Its names; None when there is no such container. SourceError, SourceTimeoutError."""

    def close(self) -> None:
        """Ends a look-up that is under way; from any thread."""


def _engine(path: str) -> Source:
    from agent.containers.engine import Engine

    return Engine(path)


def _cri(path: str) -> Source:
    from agent.containers.cri import Cri

    return Cri(path)


def _containerd(path: str) -> Source:
    from agent.containers.containerd import Containerd

    return Containerd(path)


@dataclass(frozen=True, slots=True)
class Kind:
    """`runtimes`: whose containers it knows, so that it is asked first for those."""

    open: Callable[[str], Source]
    runtimes: frozenset[str]


KINDS: Mapping[str, Kind] = {
    "docker": Kind(_engine, frozenset({"docker"})),
    "podman": Kind(_engine, frozenset({"podman"})),
    "cri": Kind(_cri, frozenset({"containerd", "cri-o"})),
    "containerd": Kind(_containerd, frozenset({"containerd"})),
}


KUBELET = "kubelet"  # is asked which pod holds which device, not for names


@dataclass(frozen=True, slots=True)
class Socket:
    """A source that may be there."""

    kind: str  # one of KINDS, or KUBELET
    path: str

    def present(self) -> bool:
        """Whether there is a socket now, and root's (or ours): what other users' say about containers means nothing."""
        try:
            found = Path(self.path).stat()
        except OSError:
            return False
        return stat.S_ISSOCK(found.st_mode) and found.st_uid in (0, os.geteuid())


_CONTAINERD_PATHS = (
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
)
BUILTIN = (
    Socket("docker", "/run/docker.sock"),
    Socket("podman", "/run/podman/podman.sock"),
    Socket("cri", "/run/crio/crio.sock"),
    *(Socket("cri", path) for path in _CONTAINERD_PATHS),
    *(Socket("containerd", path) for path in _CONTAINERD_PATHS),
    Socket(KUBELET, "/var/lib/kubelet/pod-resources/kubelet.sock"),
)


def sockets(extra: Iterable[str]) -> tuple[Socket, ...]:
    """The usual ones and, before them, those that were asked for as KIND=PATH. UsageError says how to write it."""
    return (*map(_socket, extra), *BUILTIN)


def _socket(text: str) -> Socket:
    kind, _, path = text.partition("=")
    kinds = (*KINDS, KUBELET)
    if kind not in kinds or not path.startswith("/"):
        raise UsageError(f"{text}: write KIND=/PATH/TO/SOCKET, KIND being one of {', '.join(kinds)}")
    return Socket(kind, path)

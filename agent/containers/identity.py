# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A cgroup path → the container that it means.

The innermost container wins (Docker in Docker, Podman in Slurm), and a container wins over any systemd unit, inside or
around it. What a path cannot tell (names, images) the runtimes' sockets add later; here the name is the short id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agent.containers.patterns import MONITOR, Found, container_at, pod_uid
from agent.model import HOST, Container, ContainerKey
from agent.names import printable

POD_UID = "io.kubernetes.pod.uid"  # the label that the kubelet itself uses
_SHORT_ID = 12
_LONGEST_NAME = 128
_HEX_ID = re.compile(r"[0-9a-f]{64}")
_UNIT = re.compile(r".+\.(service|scope)")


def identify(path: str, init_path: str = "/") -> Container:
    """Total: every path means some container, systemd unit, or the host. `init_path` is where PID 1 lives."""
    if path == init_path:
        return Container(HOST, "host", "host", cgroup="/")
    parts = _parts(path)
    if innermost := _innermost(parts):
        found, end = innermost
        return _container(found, parts[:end])
    for end in range(len(parts), 0, -1):
        if _UNIT.fullmatch(parts[end - 1]):
            return _unit(parts[:end])
    if parts and not parts[-1].endswith(".slice") and not MONITOR.fullmatch(parts[-1]):
        return _container(Found("runc", parts[-1]), parts)
    return Container(HOST, "host", "host", cgroup="/")


def names_container(path: str) -> bool:
    """Whether some part of the path is a name that only a container runtime gives."""
    return _innermost(_parts(path)) is not None


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _innermost(parts: Sequence[str]) -> tuple[Found, int] | None:
    """The deepest container, and how many parts its own path has."""
    for end in range(len(parts), 0, -1):
        if found := container_at(parts[:end]):
            return found, end
    return None


def _container(found: Found, parts: Sequence[str]) -> Container:
    cgroup = "/" + "/".join(parts)
    # A hash names one container wherever it lies; other names repeat (two LXC hosts' "web", one nested in the other).
    unique = found.id if _HEX_ID.fullmatch(found.id) else cgroup
    short = found.id[:_SHORT_ID] if _HEX_ID.fullmatch(found.id) else found.name or found.id
    pod = next((uid for part in reversed(parts) if (uid := pod_uid(part))), None)
    return Container(
        key=ContainerKey(f"{found.runtime}:{unique}"),
        name=printable(short, _LONGEST_NAME),
        runtime=found.runtime,
        id=found.id,
        labels={POD_UID: pod} if pod else {},
        cgroup=cgroup,
    )


def _unit(parts: Sequence[str]) -> Container:
    cgroup = "/" + "/".join(parts)
    name = printable(parts[-1], _LONGEST_NAME)
    return Container(ContainerKey(f"systemd:{cgroup}"), name, "systemd", cgroup=cgroup)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""/proc/PID/cgroup → the one path that says where a process belongs.

With cgroup v2 there is one line. With v1 there is one per controller, and hybrid hosts have both, of which either may
say nothing: old systemd keeps containers in v1 only (the v2 line then names containerd's own unit), a v1 host without
systemd leaves most lines at "/". So what looks like a container wins over what does not. Source: cgroups(7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from agent.containers.identity import names_container
from agent.proctext import strip_deleted

_SYSTEMD = "name=systemd"


def parse_cgroup(text: str) -> str:
    """The path below the hierarchy's root, "/" where nothing says more."""
    unified, legacy = _paths(text)
    candidates = [unified, *sorted(legacy.values(), key=len, reverse=True)]
    for path in candidates:
        if names_container(path):
            return path
    if unified != "/":
        return unified
    if _SYSTEMD in legacy:
        return legacy[_SYSTEMD]
    # Without systemd a runtime joins every controller; a path in just one of them is somebody's resource limit.
    most_common = Counter(legacy.values()).most_common(1)
    return most_common[0][0] if most_common else "/"


def told_path(paths: Iterable[str]) -> str:
    """The same for paths that the kernel told, the v2 one first."""
    normal = [_normal(path) for path in paths]
    telling = (path for path in normal if names_container(path))
    return next(telling, None) or next((path for path in normal if path != "/"), "/")


def _paths(text: str) -> tuple[str, dict[str, str]]:
    """The v2 path, and the v1 paths by controllers."""
    unified, legacy = "/", {}
    for line in text.split("\n"):
        hierarchy, _, rest = line.partition(":")
        controllers, separator, raw = rest.partition(":")
        if not separator or not hierarchy.isdecimal():
            continue
        path = _normal(raw)
        if controllers:
            legacy[controllers] = path
        else:
            unified = path
    return unified, legacy


def _normal(raw: str) -> str:
    """Seen out of another cgroup namespace a path begins with "/..": what follows is what counts."""
    path, _ = strip_deleted(raw)
    return "/" + "/".join(part for part in path.split("/") if part not in ("", ".", ".."))

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Control groups that look like a container's, made for a while. Whatever is in them ends, and they are removed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conformance.host import Unavailable

_ENTER: Final = 'echo $$ >"$0/cgroup.procs" && exec "$@"'  # in there from its first instruction


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One group. `path` is below the hierarchy's root, `version` that of the hierarchy."""

    version: int
    root: Path
    path: str

    @property
    def folder(self) -> Path:
        """Its directory."""
        return self.root / self.path.lstrip("/")

    @property
    def entering(self) -> list[str]:
        """What a command begins with, so that it runs in the cgroup."""
        return ["sh", "-c", _ENTER, str(self.folder)]


@contextmanager
def control_groups(version: int, names: Sequence[str]) -> Iterator[dict[str, ControlGroup]]:
    """A group for each name, in the hierarchy that freezes. Unavailable where there is none, or none can be made."""
    from tools.harness import cgroups

    if os.geteuid() != 0:
        raise Unavailable("making control groups needs root")
    mounted = cgroups.mount_if_none()
    try:
        root = _root(version)
        top = f"/gpuwarden-gpu-{os.getpid()}-{secrets.token_hex(3)}"
        made = {name: ControlGroup(version, root, f"{top}/{name}/docker/{secrets.token_hex(32)}") for name in names}
        try:
            _make(made.values())
            yield made
        finally:
            cgroups.empty(top)
            cgroups.remove(top, ())
    finally:
        if mounted:
            cgroups.unmount()


def _make(found: Iterable[ControlGroup]) -> None:
    for box in found:
        try:
            box.folder.mkdir(parents=True)
        except OSError as error:
            raise Unavailable(f"no control group can be made in {box.root} ({error.strerror})") from error


def _root(version: int) -> Path:
    from agent.node.cgroups import hierarchies, own_mounts

    found = {each.version: each.point for each in hierarchies(own_mounts()) if each.has_freezer}
    if version not in found:
        raise Unavailable(f"no freezer of cgroup v{version} is mounted here")
    return Path(found[version])

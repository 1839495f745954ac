# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The OCI bundle of a container: an almost empty root that borrows the host's programs, read-only.

With an image (`overlay_lower`) the root is an overlay on it, as Docker and containerd mount it: several containers then
share one lower layer, so one file on disk. Source: OCI runtime specification 1.0.2.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SETTINGS = (
    "alternatives",
    "group",
    "hosts",
    "ld.so.cache",
    "localtime",
    "nsswitch.conf",
    "passwd",
    "resolv.conf",
    "ssl",
)
_CAPABILITIES = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"]
_NAMESPACES = ("pid", "mount", "uts", "ipc")  # the network stays the host's: scrapes need no bridge


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the host inside the container; `target` None: at the same path."""

    source: Path
    target: Path | None = None
    read_only: bool = True


def write_bundle(
    folder: Path,
    args: Sequence[str],
    env: Mapping[str, str],
    cgroup_path: str,
    mounts: Sequence[Mount],
    overlay_lower: Path | None,
) -> None:
    """Makes `folder`/rootfs and `folder`/config.json, and mounts the overlay when there is an image."""
    rootfs = folder / "rootfs"
    rootfs.mkdir()
    if overlay_lower is not None:
        _mount_overlay(folder, overlay_lower, rootfs)
    borrowed = [mount for mount in _host_programs(rootfs) if mount.source.exists()]
    config = _config(args, env, cgroup_path, [*borrowed, *mounts])
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def unmount_root(folder: Path) -> None:
    """Undoes the overlay mount; nothing to do where there is none."""
    rootfs = folder / "rootfs"
    while os.path.ismount(rootfs):
        subprocess.run(["umount", "--lazy", rootfs], check=True)


def _mount_overlay(folder: Path, lower: Path, rootfs: Path) -> None:
    upper, work = folder / "upper", folder / "work"
    upper.mkdir()
    work.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "gpuwarden", rootfs], check=True)


def _host_programs(rootfs: Path) -> list[Mount]:
    """/usr and its companions as the host has them (links where it has links), and the few settings programs need."""
    mounts = []
    for name in _PROGRAMS:
        host, ours = Path("/", name), rootfs / name
        if host.is_symlink():
            if not os.path.lexists(ours):
                ours.symlink_to(os.readlink(host))
        else:
            mounts.append(Mount(host))
    return [*mounts, *(Mount(Path("/etc", name)) for name in _SETTINGS)]


def _config(args: Sequence[str], env: Mapping[str, str], cgroup_path: str, mounts: Sequence[Mount]) -> dict[str, Any]:
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", **env}
    sets = ("bounding", "effective", "permitted")
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(args),
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(sets, _CAPABILITIES),
        },
        "root": {"path": "rootfs", "readonly": False},
        "hostname": "container",
        "mounts": [*_kernel_mounts(), *(_bind(mount) for mount in mounts)],
        "linux": {
            "cgroupsPath": cgroup_path,
            "resources": {},
            "namespaces": [{"type": kind} for kind in _NAMESPACES],
        },
    }


def _kernel_mounts() -> list[dict[str, Any]]:
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "mode=1777"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]},
    ]


def _bind(mount: Mount) -> dict[str, Any]:
    return {
        "destination": str(mount.target or mount.source),
        "type": "none",
        "source": str(mount.source.resolve()),
        "options": ["rbind", "rprivate", "ro" if mount.read_only else "rw"],
    }

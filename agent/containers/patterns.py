# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How each runtime names its cgroups: the part of a path that a container's id is in, in context.

A runtime is a line in the tables below. Monitors (conmon, lxc.monitor) live beside their containers and are none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ID = r"[0-9a-f]{64}"
_PREFIXES = {  # what stands before "-<id>" → runtime
    "docker": "docker",
    "cri-containerd": "containerd",
    "nerdctl": "containerd",
    "crio": "cri-o",
    "libpod": "podman",
    "libpod-payload": "podman",  # podman run --cgroups=split
}
_PREFIXED = re.compile(rf"({'|'.join(_PREFIXES)})-({_ID})(\.scope)?")
# The systemd driver's notation, taken literally by a runtime that was told to use cgroupfs.
_LITERAL = re.compile(rf"[^:]+:({'|'.join(_PREFIXES)}):({_ID})")
_BARE = re.compile(_ID)
_BARE_PARENTS = {"docker": "docker", "ecs": "docker", "moby": "docker", "k8s.io": "containerd"}
_POD = re.compile(r"(?:kubepods[^:]*-)?pod([0-9a-fA-F]{8}(?:[-_]?[0-9a-fA-F]{4}){3}[-_]?[0-9a-fA-F]{12})(?:\.slice.*)?")
_LXC = re.compile(r"lxc\.payload\.(.+)")
_LXC_PARENTS = {"lxc", "lxc.payload"}
_SLURM_JOB = re.compile(r"job_(\d+)")
_SLURM_ROOT = re.compile(r"slurm(_.+)?|(.+_)?slurmstepd\.scope")
MONITOR = re.compile(r"(.+-)?conmon(-.+)?|lxc\.monitor\..+")


@dataclass(frozen=True, slots=True)
class Found:
    """A container's runtime and full id; `name` where people know it by another."""

    runtime: str
    id: str
    name: str = ""


def container_at(parts: Sequence[str]) -> Found | None:
    """The container whose own cgroup is this path; None for what lies above, below or outside of containers."""
    last, above = parts[-1], parts[:-1]
    if named := _PREFIXED.fullmatch(last) or _LITERAL.fullmatch(last):
        return Found(_PREFIXES[named[1]], named[2])
    if _BARE.fullmatch(last):
        return Found(_runtime_of_bare(above), last)
    if lxc := _LXC.fullmatch(last):
        return Found("lxc", lxc[1])
    if above and above[-1] in _LXC_PARENTS:
        return Found("lxc", last)
    job = _SLURM_JOB.fullmatch(last)
    if job and any(_SLURM_ROOT.fullmatch(part) for part in above):
        return Found("slurm", job[1], last)
    return None


def pod_uid(part: str) -> str | None:
    """The uid in a pod's cgroup name, as Kubernetes writes it; systemd's form has "_" for "-", static pods a hash."""
    pod = _POD.fullmatch(part)
    return pod[1].replace("_", "-") if pod else None


def _runtime_of_bare(above: Sequence[str]) -> str:
    """A bare id below a pod is what the kubelet's runtime makes, and since 1.24 that is never Docker itself."""
    if above and pod_uid(above[-1]):
        return "containerd"
    for part in reversed(above[-2:]):  # ECS puts a task between
        if part in _BARE_PARENTS:
            return _BARE_PARENTS[part]
    return "runc"

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A process's cgroup → its container, by path alone, and the names that a runtime adds to it later.

The one path that shows where a process belongs: with cgroup v2 there is one line in /proc/PID/cgroup; with v1 there is
one per controller, and hybrid hosts have both, of which either may say nothing. So what looks like a container wins
over what does not. Source: cgroups(7). How each runtime names its cgroups is a line in the tables below. The innermost
container wins (Docker in Docker, Podman in Slurm), and a container wins over any systemd unit, inside or around it.

Names, labels and annotations as a runtime reports them are bounded and printable (at most ~28 KiB), and change neither
the key nor anything else that comes from the cgroup. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent.core.model import HOST, Container, ContainerKey
from agent.core.text import printable
from agent.node.proc_parse import strip_deleted

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
# The systemd driver's notation, taken literally by a runtime that is configured to use cgroupfs.
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
class CgroupMatch:
    """A container's runtime and full id; `name` where it is known by another."""

    runtime: str
    id: str
    name: str = ""


def container_at(parts: Sequence[str]) -> CgroupMatch | None:
    """The container whose own cgroup is this path; None for what lies above, below or outside of containers."""
    last, above = parts[-1], parts[:-1]
    if named := _PREFIXED.fullmatch(last) or _LITERAL.fullmatch(last):
        return CgroupMatch(_PREFIXES[named[1]], named[2])
    if _BARE.fullmatch(last):
        return CgroupMatch(_runtime_of_bare(above), last)
    if lxc := _LXC.fullmatch(last):
        return CgroupMatch("lxc", lxc[1])
    if above and above[-1] in _LXC_PARENTS:
        return CgroupMatch("lxc", last)
    job = _SLURM_JOB.fullmatch(last)
    if job and any(_SLURM_ROOT.fullmatch(part) for part in above):
        return CgroupMatch("slurm", job[1], last)
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
        return _container(CgroupMatch("runc", parts[-1]), parts)
    return Container(HOST, "host", "host", cgroup="/")


def names_container(path: str) -> bool:
    """Whether some part of the path is a name that only a container runtime gives."""
    return _innermost(_parts(path)) is not None


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _innermost(parts: Sequence[str]) -> tuple[CgroupMatch, int] | None:
    """The deepest container, and how many parts its own path has."""
    for end in range(len(parts), 0, -1):
        if found := container_at(parts[:end]):
            return found, end
    return None


def _container(found: CgroupMatch, parts: Sequence[str]) -> Container:
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


_SYSTEMD = "name=systemd"


def parse_cgroup(text: str) -> str:
    """The path below the hierarchy's root, "/" where no line has more."""
    unified, legacy = _paths(text)
    candidates = [unified, *sorted(legacy.values(), key=len, reverse=True)]
    for path in candidates:
        if names_container(path):
            return path
    if unified != "/":
        return unified
    if _SYSTEMD in legacy:
        return legacy[_SYSTEMD]
    # Without systemd a runtime joins every controller; a path in just one of them is a mere resource limit.
    most_common = Counter(legacy.values()).most_common(1)
    return most_common[0][0] if most_common else "/"


def reported_path(paths: Iterable[str]) -> str:
    """The same for paths that the probes reported, the v2 one first."""
    normal = [_normal(path) for path in paths]
    naming = (path for path in normal if names_container(path))
    return next(naming, None) or next((path for path in normal if path != "/"), "/")


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


CONTAINER_NAME = "io.kubernetes.container.name"  # the labels that the kubelet gives, to the runtime, each container
POD_NAME = "io.kubernetes.pod.name"
POD_NAMESPACE = "io.kubernetes.pod.namespace"
_OURS = "gpuwarden.io/"  # of a pod's annotations, these are kept
_KUBELETS = "io.kubernetes."
_MOST_ANNOTATIONS = 16
_MOST_LABELS, _LONGEST_LABEL, _MOST_LABEL_CHARACTERS = 64, 256, 16_384
LONGEST_NAME = 253  # of a pod; Docker's and Podman's have no limit of their own


@dataclass(frozen=True, slots=True)
class Names:
    """What a runtime knows of a container. Empty and None: unknown."""

    name: str = ""
    pod: str | None = None
    namespace: str | None = None
    image: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


def bounded(names: Names) -> Names:
    """The same within our limits, as printable text."""
    return Names(
        printable(names.name, LONGEST_NAME),
        _text(names.pod, LONGEST_NAME),
        _text(names.namespace, LONGEST_NAME),
        _text(names.image, _LONGEST_LABEL),
        _labels(names.labels),
        _labels({key: value for key, value in names.annotations.items() if key.startswith(_OURS)}, _MOST_ANNOTATIONS),
    )


def own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels of a container outside of pods, without the kubelet's: a user could give it those, too."""
    return {key: value for key, value in labels.items() if not key.startswith(_KUBELETS)}


def applied(names: Names, container: Container) -> Container:
    """The container with its names. Labels that come from its cgroup win."""
    return dataclasses.replace(
        container,
        name=names.name or container.name,
        pod=names.pod,
        namespace=names.namespace,
        image=names.image,
        labels={**names.labels, **container.labels},
        annotations=names.annotations,
    )


def _text(text: str | None, longest: int) -> str | None:
    return printable(text, longest) if text else None


def _labels(labels: Mapping[str, str], most: int = _MOST_LABELS) -> dict[str, str]:
    """The first of them by name: the same ones each time. A name that is too long is no name; a value is cut."""
    kept: dict[str, str] = {}
    left = _MOST_LABEL_CHARACTERS
    for key in sorted(labels):
        if not key or len(key) > _LONGEST_LABEL:
            continue
        name, value = printable(key), printable(labels[key], _LONGEST_LABEL)
        left -= len(name) + len(value)
        if left < 0 or len(kept) >= most:
            break
        kept[name] = value
    return kept

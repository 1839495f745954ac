# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A process's cgroup → its container, by path alone, and the names that a runtime adds to it later.

The one path that shows where a process belongs: with cgroup v2 there is one line in /proc/PID/cgroup; with v1 there is
one per controller, and hybrid hosts have both, of which either may say nothing. So what looks like a container wins
over what does not. Source: cgroups(7). How each runtime names its cgroups is a line in the tables below.

A user who may make cgroups may give them any name, so a name counts only where a runtime of the node puts it. The
outermost container wins: what one makes inside its own cgroup, Docker in Docker included, is its own. A name below a
systemd unit counts only if the unit is a runtime's. Below a user's slice, and below a directory that a user owns, it is
a container of that user (rootless Podman), with another key than the same name of root's has.

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
_PODMAN_ROOT = "libpod_parent"  # below it a bare id is a pod's
# Units below which a runtime or a job manager makes the cgroups of others. Only root can start one of these names.
_RUNTIME_UNIT = re.compile(
    r"((k3s|k0s|rke2)(-?(agent|server|worker|controller))?|kubelet|containerd|crio|docker|podman|snap\.(microk8s|docker)\..+)"
    r"\.service|(.+_)?slurmstepd\.scope"
)
_SPLIT = re.compile(rf"libpod-payload-{_ID}")  # podman run --cgroups=split: directly below the unit that ran it
_USER = re.compile(r"user-(\d{1,10})\.slice|user@(\d{1,10})\.service")
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
    if _BARE.fullmatch(last) and tuple(above[-1:]) != (_PODMAN_ROOT,):
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
_HOST = Container(HOST, "host", "host", cgroup="/")


def identify(path: str, init_path: str = "/", owner_uid: int | None = None) -> Container:
    """Total: every path means some container, systemd unit, or the host. `init_path` is where PID 1 lives.

    `owner_uid`: the user who owns a directory above the cgroup, None where they are all root's or unknown.
    """
    if path == init_path:
        return _HOST
    parts = _parts(path)
    found, end = _outermost(parts, _depth_of_node(parts, init_path))
    if found is not None:
        return _container(found, parts[:end], _user_above(parts[: end - 1], owner_uid))
    if end:
        return _unit(parts[:end], _user_above(parts[:end], owner_uid))
    if parts and not parts[-1].endswith(".slice") and not MONITOR.fullmatch(parts[-1]):
        return _container(CgroupMatch("runc", parts[-1]), parts, _user_above(parts[:-1], owner_uid))
    return _HOST


def is_hash(container_id: str) -> bool:
    """Whether it is an id that Docker, Podman, containerd or CRI-O generated: unique everywhere, and never reused."""
    return _HEX_ID.fullmatch(container_id) is not None


def owns_all_below(container: Container) -> bool:
    """Whether every cgroup below its own is its. Below a unit or a plain one a runtime may have others."""
    return is_hash(container.id) or container.runtime in ("lxc", "slurm")


def refused(container: Container) -> Container:
    """A cgroup whose name claims an id that another one has: what it is by its path alone."""
    name = printable(container.cgroup.rpartition("/")[2], _LONGEST_NAME)
    key = ContainerKey(f"refused:{container.cgroup}")
    return Container(key, name, "runc", cgroup=container.cgroup, uid=container.uid)


def names_container(path: str) -> bool:
    """Whether some part of the path is a name that only a container runtime gives, in a place where it gives it."""
    return _outermost(_parts(path), 0)[0] is not None


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _outermost(parts: Sequence[str], above: int) -> tuple[CgroupMatch | None, int]:
    """The first container below the node's own `above` parts, or else the unit (None), and how many parts it has.

    0 parts: neither. A unit ends the search unless a runtime makes cgroups below it, or a user's manager does.
    """
    unit = 0
    for end in range(above + 1, len(parts) + 1):
        if found := container_at(parts[:end]):
            return found, end
        if not _UNIT.fullmatch(parts[end - 1]):
            continue
        in_manager = bool(unit) and _USER.fullmatch(parts[unit - 1]) is not None
        unit = end if not unit or in_manager else unit
        if _stops(parts, end, above):
            break
    return None, unit


def _stops(parts: Sequence[str], end: int, above: int) -> bool:
    """Whether no name below this unit is a runtime's."""
    if any(_USER.fullmatch(part) for part in parts[above:end]):
        return parts[end - 1].startswith("session-")  # else all of it is the user's, and marked as such
    return not _RUNTIME_UNIT.fullmatch(parts[end - 1]) and not (end < len(parts) and _SPLIT.fullmatch(parts[end]))


def _depth_of_node(parts: Sequence[str], init_path: str) -> int:
    """How many parts of the path lie above the node itself: some where the node is a container (kind, LXD)."""
    node = _parts(init_path)
    if node and node[-1] == "init.scope":
        node.pop()
    return len(node) if parts[: len(node)] == node else 0


def _user_above(parts: Sequence[str], owner_uid: int | None) -> int | None:
    named = (match for part in parts if (match := _USER.fullmatch(part)))
    first = next(named, None)
    return int(first[1] or first[2]) if first else owner_uid or None


def _container(found: CgroupMatch, parts: Sequence[str], uid: int | None) -> Container:
    cgroup = "/" + "/".join(parts)
    generated = is_hash(found.id)
    # A hash names one container wherever it lies; other names repeat (two LXC hosts' "web", one nested in the other).
    unique = cgroup if not generated else found.id if uid is None else f"{uid}/{found.id}"
    short = found.id[:_SHORT_ID] if generated else found.name or found.id
    pods = [pod for part in reversed(parts) if (pod := pod_uid(part))] if uid is None else []
    return Container(
        key=ContainerKey(f"{found.runtime}:{unique}"),
        name=printable(short, _LONGEST_NAME) + ("" if uid is None else f"@{uid}"),
        runtime=found.runtime,
        id=found.id,
        labels={POD_UID: pods[0]} if pods else {},
        cgroup=cgroup,
        uid=uid,
    )


def _unit(parts: Sequence[str], uid: int | None) -> Container:
    cgroup = "/" + "/".join(parts)
    name = printable(parts[-1], _LONGEST_NAME)
    return Container(ContainerKey(f"systemd:{cgroup}"), name, "systemd", cgroup=cgroup, uid=uid)


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
_MOST_PIDS = 1 << 22  # the kernel's PID_MAX_LIMIT
_MOST_ANNOTATIONS = 16
_MOST_LABELS, _LONGEST_LABEL, _MOST_LABEL_CHARACTERS = 64, 256, 16_384
LONGEST_NAME = 253  # of a pod; Docker's and Podman's have no limit of their own


@dataclass(frozen=True, slots=True)
class Names:
    """What a runtime knows of a container. Empty and None: unknown. `tgid`: its first process, 0 where none runs."""

    name: str = ""
    pod: str | None = None
    namespace: str | None = None
    image: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    tgid: int | None = None


def bounded(names: Names) -> Names:
    """The same within our limits, as printable text."""
    return Names(
        printable(names.name, LONGEST_NAME),
        _text(names.pod, LONGEST_NAME),
        _text(names.namespace, LONGEST_NAME),
        _text(names.image, _LONGEST_LABEL),
        _labels(names.labels),
        _labels({key: value for key, value in names.annotations.items() if key.startswith(_OURS)}, _MOST_ANNOTATIONS),
        names.tgid,
    )


def first_process(of: object, key: str) -> int | None:
    """A pid out of a runtime's answer; None where it tells none."""
    found = of.get(key) if isinstance(of, dict) else None
    return found if type(found) is int and 0 <= found < _MOST_PIDS else None  # true is an int, too


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

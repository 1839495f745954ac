# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which capabilities the agent needs, which call needs each, and what is lost without.

The one list: the unit, the DaemonSet and docs/capabilities.md are checked against it. Invariant: what is missing is
said by its name before anything is tried, and only what nothing works without ends the agent.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC = Path("/proc/self")
_ALL_IDS = ["0", "0", "4294967295"]  # the first user namespace: only there do capabilities count for us
_HIGHEST_NICE = 40  # of RLIMIT_NICE: nice -20. Source: setrlimit(2)
UPROBE_MULTI: Final = (6, 6)  # of Linux: the links that need no CAP_SYS_ADMIN (commit 89ae89f53d20)


@dataclass(frozen=True, slots=True)
class Capability:
    """`call`: what needs it. `lost`: what becomes of that without it. `stands_in`: what the kernel takes in its place.

    `required`: without it nothing works.
    """

    name: str
    bit: int
    call: str
    lost: str
    required: bool = False
    stands_in: str = ""


_BPF = Capability(
    "CAP_BPF",
    39,
    "bpf(2): loading programs, making and reading their tables",
    "nothing is seen",
    required=True,
    stands_in="CAP_SYS_ADMIN",
)
_PERFMON = Capability(
    "CAP_PERFMON",
    38,
    "bpf(2): programs that trace, and attaching them to functions and tracepoints",
    "nothing is seen",
    required=True,
    stands_in="CAP_SYS_ADMIN",
)
_ATTACHING = Capability(
    "CAP_SYS_ADMIN",
    21,
    "perf_event_open(2): uprobes before Linux 6.6",
    "nothing is seen",
    required=True,
)
_MARKING = Capability(
    "CAP_SYS_ADMIN",
    21,
    "setxattr(2): the mark trusted.gpuwarden, by which a cgroup that we froze is known; "
    "setns(2), from inside a container: the node's cgroup namespace",
    "the rung `freeze` is passed over",
)
_MAPPED = Capability(
    "CAP_CHECKPOINT_RESTORE",
    40,
    "open(2) of /proc/PID/map_files: a libcuda that was deleted while it runs",
    "such a library gets no probes, so its processes are known from NVML alone",
    stands_in="CAP_SYS_ADMIN",
)
_PTRACE = Capability(
    "CAP_SYS_PTRACE",
    19,
    "open(2) of /proc/PID/root, maps, exe, environ and ns",
    "containers' own copies of libcuda get no probes, and MPS daemons are not found",
)
_READING = Capability(
    "CAP_DAC_READ_SEARCH",
    2,
    "open(2) of other users' /proc/PID/environ and map_files, and of libraries in closed folders",
    "such libraries get no probes, and other users' MPS settings are not known",
)
_SIGNALLING = Capability(
    "CAP_KILL",
    5,
    "pidfd_send_signal(2): SIGCONT, SIGTERM and SIGKILL to other users' processes",
    "nothing is enforced, as whoever is stopped could not be resumed: decisions are only told",
)
_PRIORITY = Capability(
    "CAP_SYS_NICE",
    23,
    "setpriority(2): the guardian before all others",
    "resuming may be late where the CPUs are busy",
    stands_in="a limit of -20 for nice (LimitNICE=)",
)

CAPABILITIES: Final = (_BPF, _PERFMON, _ATTACHING, _MARKING, _MAPPED, _PTRACE, _READING, _SIGNALLING, _PRIORITY)
# What to grant: without CAP_SYS_ADMIN the kernel has to be new enough, and `freeze` is lost.
ANY_KERNEL: Final = ("CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_KILL", "CAP_SYS_NICE")
SINCE_6_6: Final = (
    "CAP_BPF",
    "CAP_PERFMON",
    "CAP_CHECKPOINT_RESTORE",
    "CAP_SYS_PTRACE",
    "CAP_DAC_READ_SEARCH",
    "CAP_KILL",
    "CAP_SYS_NICE",
)
CURE: Final = "run with sudo, or see docs/capabilities.md"


def missing(held: Collection[str], kernel: tuple[int, int], nice_limit: int = 0) -> tuple[Capability, ...]:
    """Those that are not held and would be of use on that kernel. `nice_limit`: RLIMIT_NICE."""
    not_asked = {_MARKING if kernel < UPROBE_MULTI else _ATTACHING}
    if nice_limit >= _HIGHEST_NICE or nice_limit == resource.RLIM_INFINITY:
        not_asked.add(_PRIORITY)
    if "CAP_SYS_ADMIN" not in held and kernel < UPROBE_MULTI:
        not_asked |= {_BPF, _PERFMON, _MAPPED}  # it is all that has to be given
    wanted = [one for one in CAPABILITIES if one not in not_asked]
    return tuple(one for one in wanted if one.name not in held and one.stands_in not in held)


def missing_here(kernel: tuple[int, int]) -> tuple[Capability, ...]:
    """The same for this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return missing(held(), kernel, soft)


def held(proc: Path = _PROC) -> frozenset[str]:
    """Those of ours that are in effect now. In a user namespace none is: probes and other users are not in it."""
    if (proc / "uid_map").read_text().split() != _ALL_IDS:
        return frozenset()
    (mask,) = re.findall(r"^CapEff:\s*([0-9a-f]+)$", (proc / "status").read_text(), re.MULTILINE)
    return frozenset(one.name for one in CAPABILITIES if int(mask, 16) >> one.bit & 1)


def holds(name: str) -> bool:
    """Whether this process has it."""
    return name in held()


def line(capability: Capability) -> str:
    """What people read about one that is missing."""
    return f"{capability.name} is missing, for {capability.call}: {capability.lost}; {CURE}"


def refusal(lacking: Collection[Capability]) -> str | None:
    """Why nothing works here; None where something does."""
    required = [one for one in lacking if one.required]
    if not required:
        return None
    names = " and ".join(one.name for one in required)
    calls = "; ".join(one.call for one in required)
    return f"{names} {'is' if len(required) == 1 else 'are'} missing, for {calls}: nothing works without; {CURE}"

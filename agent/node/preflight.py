# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What this machine must have before anything starts: kernel, BTF, capabilities, PID namespace, BPF object.

CAPABILITIES is the one list of the capabilities that the agent needs, which call needs each, and what is lost without:
the unit, the DaemonSet and docs/capabilities.md are checked against it. Invariant: each missing requirement is named in
one line, with what to do, before anything is tried; only those without which nothing works end the agent.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.core.errors import SetupError

_PROC = Path("/proc/self")
_ALL_IDS = ["0", "0", "4294967295"]  # the initial user namespace: only there do capabilities count for probes
_HIGHEST_NICE = 40  # of RLIMIT_NICE: nice -20. Source: setrlimit(2)
UPROBE_MULTI: Final = (6, 6)  # of Linux: the links that need no CAP_SYS_ADMIN (commit 89ae89f53d20)


@dataclass(frozen=True, slots=True)
class Capability:
    """`call`: what needs it. `lost`: the consequence of its absence. `required`: without it nothing works.

    `substitute`: what the kernel accepts in its place.
    """

    name: str
    bit: int
    call: str
    lost: str
    required: bool = False
    substitute: str = ""


_BPF = Capability(
    "CAP_BPF",
    39,
    "bpf(2): loading programs, making and reading their tables",
    "nothing is seen",
    required=True,
    substitute="CAP_SYS_ADMIN",
)

_PERFMON = Capability(
    "CAP_PERFMON",
    38,
    "bpf(2): programs that trace, and attaching them to functions and tracepoints",
    "nothing is seen",
    required=True,
    substitute="CAP_SYS_ADMIN",
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
    "setxattr(2): the mark trusted.gpuwarden on a cgroup that the agent froze; "
    "setns(2), from inside a container: the node's cgroup namespace",
    "the rung `freeze` is skipped",
)

_MAPPED = Capability(
    "CAP_CHECKPOINT_RESTORE",
    40,
    "open(2) of /proc/PID/map_files: a libcuda that was deleted while it runs",
    "such a library gets no probes, so its processes are known from NVML alone",
    substitute="CAP_SYS_ADMIN",
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
    "nothing is enforced, as a stopped process could not be resumed: decisions are only reported",
)

_PRIORITY = Capability(
    "CAP_SYS_NICE",
    23,
    "setpriority(2): the guardian runs before all others",
    "resuming may be late where the CPUs are busy",
    substitute="a limit of -20 for nice (LimitNICE=)",
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
    """The capabilities that are not held and would be of use on that kernel. `nice_limit`: RLIMIT_NICE."""
    unneeded = {_MARKING if kernel < UPROBE_MULTI else _ATTACHING}
    if nice_limit >= _HIGHEST_NICE or nice_limit == resource.RLIM_INFINITY:
        unneeded.add(_PRIORITY)
    if "CAP_SYS_ADMIN" not in held and kernel < UPROBE_MULTI:
        unneeded |= {_BPF, _PERFMON, _MAPPED}  # CAP_SYS_ADMIN is all that has to be granted
    wanted = [one for one in CAPABILITIES if one not in unneeded]
    return tuple(one for one in wanted if one.name not in held and one.substitute not in held)


def missing_here(kernel: tuple[int, int]) -> tuple[Capability, ...]:
    """`missing` for this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return missing(held(), kernel, soft)


def held(proc: Path = _PROC) -> frozenset[str]:
    """The capabilities out of CAPABILITIES that are in effect. None in another user namespace than the initial one:

    probes and other users' processes are outside of it.
    """
    if (proc / "uid_map").read_text().split() != _ALL_IDS:
        return frozenset()
    (mask,) = re.findall(r"^CapEff:\s*([0-9a-f]+)$", (proc / "status").read_text(), re.MULTILINE)
    return frozenset(one.name for one in CAPABILITIES if int(mask, 16) >> one.bit & 1)


def holds(name: str) -> bool:
    """Whether this process has the capability of that name."""
    return name in held()


def line(capability: Capability) -> str:
    """The line about a missing capability: what for, the consequence, what to do."""
    return f"{capability.name} is missing, for {capability.call}: {capability.lost}; {CURE}"


def refusal(lacking: Collection[Capability]) -> str | None:
    """Why nothing works without the missing capabilities; None if something does."""
    required = [one for one in lacking if one.required]
    if not required:
        return None
    names = " and ".join(one.name for one in required)
    calls = "; ".join(one.call for one in required)
    return f"{names} {'is' if len(required) == 1 else 'are'} missing, for {calls}: nothing works without; {CURE}"


OLDEST_KERNEL = (5, 15)  # bpf_get_attach_cookie
_BTF = Path("/sys/kernel/btf/vmlinux")
_NODES_PIDS = 0xEFFFFFFC  # inode of the first PID namespace. Source: the kernel's include/linux/proc_ns.h

OTHER_PIDS = (
    "this is not the node's own PID namespace, so probes and NVML use other process numbers: most are not found; "
    "run the agent on the node itself, or in its PID namespace (hostPID: true, --pid=host)"
)


def require_probes(lacking: Collection[Capability], release: str, btf: Path = _BTF) -> None:
    """SetupError unless probes can work: the capabilities, and what `require_kernel` asks for."""
    why = refusal(lacking)
    if why is not None:
        raise SetupError(why)
    require_kernel(release, btf)


def require_kernel(release: str, btf: Path = _BTF) -> None:
    """SetupError unless the kernel is new enough and has its types (BTF)."""
    if kernel_version(release) < OLDEST_KERNEL:
        needed = ".".join(map(str, OLDEST_KERNEL))
        raise SetupError(f"Linux {release} is too old: probes need {needed} or later; upgrade the kernel")
    if not btf.exists():
        raise SetupError(
            f"{btf} is missing: the kernel was built without CONFIG_DEBUG_INFO_BTF, or /sys is not mounted; "
            "mount it, or use a distribution kernel (all current ones have BTF)"
        )


def require_this_machine() -> None:
    """`require_probes` for this process and the running kernel."""
    require_probes(lacking_here(), platform.release())


def has_the_nodes_pids() -> bool:
    """Whether the kernel and the driver use the same process numbers as our /proc."""
    return os.stat("/proc/self/ns/pid").st_ino == _NODES_PIDS


def lacking_here() -> tuple[Capability, ...]:
    """The capabilities that this process would need on this kernel and does not have."""
    return missing_here(kernel_version(platform.release()))


def kernel_version(release: str) -> tuple[int, int]:
    """ "6.1.0-18-amd64" → (6, 1); (0, 0) for a text that is not a release."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def bpf_object() -> Path:
    """The compiled programs: beside the source, in the wheel, or where a package installed them. SetupError."""
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / "bpf" / "build" / "gpuwarden.bpf.o"
    candidates = [
        Path(os.environ.get("GPUWARDEN_BPF_OBJECT", beside)),
        beside,
        package / "bpf" / "gpuwarden.bpf.o",
        Path("/usr/lib/gpuwarden/gpuwarden.bpf.o"),
    ]
    for path in candidates:
        if path.is_file():
            return path
    raise SetupError(f"no BPF object found (looked at {', '.join(map(str, candidates))}): run `make bpf`, or reinstall")

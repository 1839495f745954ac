# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What this machine must have before anything starts: each lack is one line that says what to do."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection
from pathlib import Path

from agent import capabilities
from agent.capabilities import Capability
from agent.errors import SetupError

OLDEST_KERNEL = (5, 15)  # bpf_get_attach_cookie
_BTF = Path("/sys/kernel/btf/vmlinux")
_NODES_PIDS = 0xEFFFFFFC  # inode of the first PID namespace. Source: the kernel's include/linux/proc_ns.h
OTHER_PIDS = (
    "this is not the node's own PID namespace, so probes and NVML name processes by other numbers: most are not found; "
    "run the agent on the node itself, or in its PID namespace (hostPID: true, --pid=host)"
)


def require_probes(lacking: Collection[Capability], release: str, btf: Path = _BTF) -> None:
    """SetupError unless probes can work: the capabilities, a kernel that is new enough, its types."""
    refusal = capabilities.refusal(lacking)
    if refusal is not None:
        raise SetupError(refusal)
    if kernel_version(release) < OLDEST_KERNEL:
        needed = ".".join(map(str, OLDEST_KERNEL))
        raise SetupError(f"Linux {release} is too old: probes need {needed} or later; upgrade the kernel")
    if not btf.exists():
        raise SetupError(
            f"{btf} is missing: the kernel was built without CONFIG_DEBUG_INFO_BTF, or /sys is not mounted; "
            "mount it, or use a distribution kernel (all current ones have BTF)"
        )


def require_this_machine() -> None:
    """The same for here and now."""
    require_probes(lacking_here(), platform.release())


def has_the_nodes_pids() -> bool:
    """Whether the numbers that the kernel and the driver have for processes are those of our /proc."""
    return os.stat("/proc/self/ns/pid").st_ino == _NODES_PIDS


def lacking_here() -> tuple[Capability, ...]:
    """The capabilities that this process would need on this kernel and does not have."""
    return capabilities.missing_here(kernel_version(platform.release()))


def kernel_version(release: str) -> tuple[int, int]:
    """ "6.1.0-18-amd64" → (6, 1); (0, 0) for what is no release."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def bpf_object() -> Path:
    """Where the compiled programs are: beside the source, in the wheel, or where a package put them."""
    here = Path(__file__).resolve().parent
    beside = here.parent / "bpf" / "build" / "gpuwarden.bpf.o"
    candidates = [
        Path(os.environ.get("GPUWARDEN_BPF_OBJECT", beside)),
        beside,
        here / "bpf" / "gpuwarden.bpf.o",
        Path("/usr/lib/gpuwarden/gpuwarden.bpf.o"),
    ]
    for path in candidates:
        if path.is_file():
            return path
    raise SetupError(f"no BPF object found (looked at {', '.join(map(str, candidates))}): run `make bpf`, or reinstall")

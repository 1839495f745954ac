# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""NVML's three lists of running processes: who is in which, with how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from agent.nvml.calls import Calls
from agent.nvml.device import LISTS, running
from conformance.checks.nvml.binding import Gpu, Refused, asked

NAMES: Final = ("compute", "graphics", "MPS compute")  # in the order of the agent's LISTS
MPS_SERVER: Final = "nvidia-cuda-mps-server"


@dataclass(frozen=True, slots=True)
class Listed:
    """A process in one list; `used_bytes` None where NVML does not say."""

    list: str
    pid: int
    used_bytes: int | None


def listed(gpu: Gpu) -> tuple[Listed, ...]:
    """All entries of all lists that this driver has, in the newest version that it has, as the agent asks."""
    found: list[Listed] = []
    for name, versions in zip(NAMES, LISTS, strict=True):
        for version in versions:
            entries = asked(gpu.api, partial(_entries, gpu, version))
            if not isinstance(entries, Refused):
                found += [Listed(name, pid, used) for pid, used in entries]
                break
    return tuple(found)


def _entries(gpu: Gpu, call: str) -> list[tuple[int, int | None]]:
    entries = getattr(gpu.api, call)(gpu.handle)
    return [(int(one.pid), None if one.usedGpuMemory is None else int(one.usedGpuMemory)) for one in entries]


def mps_clients(gpu: Gpu) -> frozenset[int]:
    """The processes that the agent takes for MPS clients, by its own code."""
    return running(Calls(gpu.api), "", gpu.handle).mps_clients


def lists_of(found: Sequence[Listed], pid: int) -> str:
    """ "compute", "compute + MPS compute", "none"."""
    return " + ".join(name for name in NAMES if any(e.pid == pid and e.list == name for e in found)) or "none"


def bytes_of(found: Sequence[Listed], pid: int) -> int | None:
    """The most that any list says."""
    return max((e.used_bytes for e in found if e.pid == pid and e.used_bytes is not None), default=None)


def program_of(pid: int) -> str:
    """The first word of its command line; "" when it is gone, or of another PID namespace."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def is_mps_server(pid: int) -> bool:
    """As the agent tells it: by the last part of its program's name."""
    return program_of(pid).split(" ")[0].rpartition("/")[2] == MPS_SERVER

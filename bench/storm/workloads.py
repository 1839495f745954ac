# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What runs beside the agent in a storm, and what can be seen of each process from outside.

An online service that always misses its target, so that offline work is held by every rung of its ladder; one offline
workload for each rung; and those that no rule names. What is seen of them is the kernel's: the state in /proc/PID/stat,
the cgroup's freezer, and what the program itself has done.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from tools.harness import cgroups
from tools.harness.node import BUILD, Node, compile_client
from tools.harness.stage import Stage

MAX_PAUSE_SECONDS: Final = 2.0
# Requests of 2 ms, whose target is less: whatever is done to offline work, it is missed.
_SERVING: Final = ("--rate", "50", "--kernels", "4", "--kernel-us", "500", "--seconds", "86400", "--start-now")
_TRAINING: Final = ("--kernels", "20", "--kernel-us", "500", "--seconds", "0", "--iterations-per-us", "100")
_SHORT_STEPS: Final = ("--kernels", "1", "--kernel-us", "200", "--seconds", "0", "--iterations-per-us", "100")
_PIECES, _PIECE_MIB, _QUOTA_MIB = 24, 16, 192
_HEAD: Final = """\
version: 1
enforce: true
online:
  - name: service
    match: {{cgroup: "{path}/online/*"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: {target}, window: 2s}}
offline:
"""
_RULE: Final = """\
  - name: {name}
    match: {{cgroup: "{path}/{name}/*"}}
    limits: {{max_pause: 2s, floor: {floor}{memory}}}
    ladder: [{ladder}]
"""


class Standing(StrEnum):
    """Why a process does not run."""

    STOPPED = "stopped"
    FROZEN = "frozen"
    LOCKED = "locked"  # it does no step
    LIMITED = "limited"  # it is refused memory


@dataclass(frozen=True, slots=True)
class Rung:
    """An offline rule, and how many workloads are in it."""

    name: str
    ladder: str
    workloads: int = 1
    floor: str = "0%"
    memory: str = ""


RUNGS: Final = (
    Rung("gated", "gate, pace", workloads=2),
    Rung("frozen", "freeze", floor="20%"),
    Rung("climbing", "gate, pace, freeze", floor="20%"),
    Rung("locked", "lock"),
    Rung("saved", "swap"),
    Rung("holding", "hold", memory=f", memory: {_QUOTA_MIB}MiB, max_hold: 1h"),
    Rung("denied", "deny", memory=f", memory: {_QUOTA_MIB}MiB"),
)
UNNAMED: Final = "unnamed"  # cgroups that no rule matches


def policy(path: str, target: str) -> str:
    """The whole policy; `path`: of the cgroups around the workloads."""
    rules = (
        _RULE.format(name=rung.name, path=path, floor=rung.floor, memory=rung.memory, ladder=rung.ladder)
        for rung in RUNGS
    )
    return _HEAD.format(path=path, target=target) + "".join(rules)


def _never() -> int:
    return 0


@dataclass(slots=True)
class Watched:
    """A process, and open files that say what it does. `progress` grows while it works."""

    role: str
    process: subprocess.Popen[bytes]
    cgroup: str
    progress: Callable[[], int] = _never
    _stat: int = field(init=False)
    _freezers: list[tuple[int, bytes]] = field(init=False)

    def __post_init__(self) -> None:
        self._stat = os.open(f"/proc/{self.tgid}/stat", os.O_RDONLY)
        self._freezers = [
            (os.open(folder / name, os.O_RDONLY), sign)
            for folder in (cgroups.folders(self.cgroup) if self.cgroup else ())
            for name, sign in (("cgroup.freeze", b"1"), ("cgroup.events", b"frozen 1"), ("freezer.state", b"FR"))
            if (folder / name).exists()
        ]

    @property
    def tgid(self) -> int:
        """Of its process."""
        return self.process.pid

    @property
    def name(self) -> str:
        """Its role and process."""
        return f"{self.role} {self.tgid}"

    def state(self) -> str:
        """The letter in /proc/PID/stat; "" when it has ended."""
        try:
            return os.pread(self._stat, 512, 0).rpartition(b")")[2][1:2].decode()
        except ProcessLookupError:
            return ""

    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self.state() in ("", "Z", "X")

    def standing(self) -> Standing | None:
        """Whether it is stopped, or frozen or about to be."""
        if any(sign in os.pread(fd, 256, 0) for fd, sign in self._freezers):
            return Standing.FROZEN
        return Standing.STOPPED if self.state() in ("T", "t") else None

    def close(self) -> None:
        """Closes the files."""
        for fd in (self._stat, *(fd for fd, _ in self._freezers)):
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Workloads:
    """All of them. `untouchable`: the service and those that no rule names, to which nothing may ever be done."""

    offline: list[Watched]
    untouchable: list[Watched]

    @property
    def slow(self) -> list[Watched]:
        """Those whose release is seen by what they do: locked, saved or refused memory."""
        return [one for one in self.offline if one.role in ("locked", "saved", "denied")]

    def close(self) -> None:
        """Closes what is open."""
        for one in (*self.offline, *self.untouchable):
            one.close()


def compiled(folder: Path) -> Path:
    """Compiles allocations.c."""
    return compile_client(Path(__file__).with_name("allocations.c"), folder / "allocations", "-O1")


def start_all(stage: Stage[Node], bystander: subprocess.Popen[bytes]) -> Workloads:
    """Starts one after another. `bystander`: a process without a GPU, in no container."""
    service = stage.start("online", _SERVING)
    stranger = stage.run(UNNAMED, [str(BUILD / "bin" / "offline"), *_TRAINING])
    untouchable = [
        Watched("online", service.process, service.cgroup),
        Watched(UNNAMED, stranger.process, stranger.cgroup),
        Watched("bystander", bystander, ""),
    ]
    program = compiled(stage.folder)
    offline = [_start(stage, rung.name, program, n) for rung in RUNGS for n in range(rung.workloads)]
    return Workloads(offline, untouchable)


def _start(stage: Stage[Node], role: str, allocations: Path, number: int) -> Watched:
    file = stage.folder / f"{role}-{number}.progress"
    if role in ("holding", "denied"):
        started = stage.run(role, [str(allocations), str(file), str(_PIECES), str(_PIECE_MIB)])
        return Watched(role, started.process, started.cgroup, lambda: whole_rounds(file))
    steps = _SHORT_STEPS if role in ("locked", "saved") else _TRAINING
    memory = ("--memory", "64MiB") if role == "saved" else ()
    started = stage.run(role, [str(BUILD / "bin" / "offline"), *steps, *memory, "--log", str(file)])
    return Watched(role, started.process, started.cgroup, lambda: file.stat().st_size)


def whole_rounds(file: Path) -> int:
    """How often allocations.c got all that it wanted."""
    whole, _ = struct.unpack("QQ", file.read_bytes())
    return int(whole)

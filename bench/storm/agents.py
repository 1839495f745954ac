# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agents of a storm, one after another on one run directory, and the processes that recover beside each.

The run directory is a file system of its own, so that it can be filled. An agent is reached through a pidfd or while it
is this process's child, so that no signal meets another process.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.core.errors import SetupError, WardenError
from agent.exporters.api.client import AGENT_SOCK, fetch
from bench.enforcement.agent import write_policy
from bench.storm.acts import Blow, Victims
from bench.storm.workloads import policy
from tools.harness import agents
from tools.harness.wait import poll, until

_RUN_DIR_BYTES: Final = "4m"
_TARGETS: Final = ("1ms", "2ms")  # neither can be met
_CLOSED: Final = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
_MEMORY_V1: Final = Path("/sys/fs/cgroup/memory")
_ASKED_SECONDS: Final = 0.5
_NO_MEMORY_BYTES: Final = 1 << 20
_NO_DESCRIPTORS: Final = 3
_ENDS_WITHIN_SECONDS: Final = 120.0


@dataclass(slots=True)
class Agents:
    """Those of one run directory, the oldest first. `dying`: those that were killed, which may take seconds to end."""

    folder: Path
    path: str  # of the cgroups around all workloads
    environment: dict[str, str]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    dying: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started: int = 0
    _target: int = 0

    @property
    def run_dir(self) -> Path:
        """Theirs."""
        return self.folder / "run"

    @property
    def ledger(self) -> Path:
        """Theirs."""
        return self.run_dir / "ledger.jsonl"

    def start(self, *, closed: bool) -> subprocess.Popen[bytes]:
        """Starts one, and does not wait for it. `closed`: it has no stdin, stdout and stderr."""
        self.write_policy()
        where = ["--run-dir", self.run_dir, "--usage", "off", "--decisions", self.folder / "decisions.jsonl"]
        command = agents.command(*where, "--policy", self.folder / "policy.yaml")
        log = self.folder / f"agent-{self.started:04}.log"
        self.started += 1
        self.running.append(agents.start([*(_CLOSED if closed else ()), *command], log, self.environment))
        return self.running[-1]

    def write_policy(self) -> None:
        """As it is now."""
        write_policy(self.folder / "policy.yaml", policy(self.path, _TARGETS[self._target]))

    def reload(self) -> None:
        """Another policy, and SIGHUP."""
        self._target = 1 - self._target
        self.write_policy()
        for one in self.alive():
            one.send_signal(signal.SIGHUP)

    def alive(self) -> list[subprocess.Popen[bytes]]:
        """Those that run. Others are forgotten."""
        self.running = [one for one in self.running if one.poll() is None]
        return self.running

    def answers(self) -> bool:
        """Whether one does."""
        with suppress(WardenError):
            return fetch(self.run_dir / AGENT_SOCK, timeout=_ASKED_SECONDS) is not None
        return False

    def count_out(self, tgids: Sequence[int]) -> None:
        """These were killed."""
        self.dying += [one for one in self.running if one.pid in tgids]
        self.running = [one for one in self.running if one.pid not in tgids]

    def end(self) -> list[int]:
        """SIGTERM to all; the exit codes of those that were not killed."""
        for one in self.dying:
            one.wait(timeout=_ENDS_WITHIN_SECONDS)
        self.dying = []
        ending = self.alive()
        for one in ending:
            one.terminate()
        codes = [_code_of(one) for one in ending]
        self.running = []
        return codes

    def kill(self) -> None:
        """Kills what does not go on by itself, so that another one can start."""
        tgids = [one.pid for one in self.alive()]
        with opened([*tgids, *self.recovering()]) as pidfds:
            send(pidfds, signal.SIGKILL)
        self.count_out(tgids)

    def recovering(self) -> list[int]:
        """Guardians and backstops, whatever their parents."""
        return [*agents.guardians(self.run_dir), *agents.backstops(self.run_dir)]

    def victims(self, victims: Victims, draw: float) -> list[int]:
        """The pids, as of now. `draw`: which agent where there are two."""
        alive = [one.pid for one in self.alive()]
        chosen = alive[int(draw * len(alive)) :][:1]
        guardians, backstops = agents.guardians(self.run_dir), agents.backstops(self.run_dir)
        return {
            Victims.AGENT: chosen,
            Victims.GUARDIAN: guardians,
            Victims.BOTH: [*alive, *guardians][:: 1 if draw < 0.5 else -1],
            Victims.BACKSTOP: backstops,
            Victims.ALL: [*backstops, *alive, *guardians],
        }[victims]


def _code_of(ending: subprocess.Popen[bytes]) -> int:
    """Of one that was asked to end; one that does not is killed."""
    try:
        return ending.wait(timeout=_ENDS_WITHIN_SECONDS)
    except subprocess.TimeoutExpired:
        ending.kill()
        return ending.wait()


@contextmanager
def run_directory(folder: Path) -> Iterator[None]:
    """Mounts it, for the block."""
    folder.mkdir()
    options = f"size={_RUN_DIR_BYTES},mode=755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "gpuwarden-storm", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """The file system of the folder has no room, for the block."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def no_descriptors(tgids: Sequence[int]) -> Iterator[None]:
    """These processes can open nothing, for the block."""
    before = {}
    for tgid in tgids:
        with suppress(ProcessLookupError):
            before[tgid] = resource.prlimit(tgid, resource.RLIMIT_NOFILE)
            resource.prlimit(tgid, resource.RLIMIT_NOFILE, (_NO_DESCRIPTORS, before[tgid][1]))
    try:
        yield
    finally:
        for tgid, limits in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(tgid, resource.RLIMIT_NOFILE, limits)


@contextmanager
def opened(tgids: Sequence[int]) -> Iterator[list[int]]:
    """Their pidfds: what ends meanwhile is signalled no more."""
    pidfds = []
    for tgid in tgids:
        with suppress(ProcessLookupError):
            pidfds.append(os.pidfd_open(tgid))
    try:
        yield pidfds
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def send(pidfds: Sequence[int], number: signal.Signals) -> None:
    """To each of them."""
    for pidfd in pidfds:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)


def blow(kind: Blow, pidfds: Sequence[int], tgids: Sequence[int], cgroup: Path | None) -> Callable[[], float]:
    """What is to be done to the processes; it returns when that was. `cgroup`: of `short_memory`."""

    def strike() -> float:
        if kind is Blow.OOM and cgroup is not None:
            for tgid in tgids:
                with suppress(ProcessLookupError):
                    (cgroup / "cgroup.procs").write_text(str(tgid))
            poll(lambda: _has_ended(pidfds[0]), 20.0, 0.001)
            return time.monotonic()
        began = time.monotonic()
        send(pidfds, signal.SIGSTOP if kind is Blow.STOP else signal.SIGKILL)
        return began

    return strike


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


@contextmanager
def short_memory() -> Iterator[Path]:
    """A cgroup in which the kernel kills what takes memory. SetupError where there is no memory controller."""
    root, settings = _memory_controller()
    cgroup = root / f"gpuwarden-storm-memory-{os.getpid()}"
    cgroup.mkdir()
    try:
        for name, value in settings.items():
            (cgroup / name).write_text(value)
        yield cgroup
    finally:
        until(lambda: not (cgroup / "cgroup.procs").read_text(), "the processes without memory to end")
        _remove(cgroup)


def _remove(cgroup: Path) -> None:
    def removed() -> bool:
        with suppress(OSError):  # what the last process of it had is being freed
            cgroup.rmdir()
        return not cgroup.exists()

    until(removed, "the memory cgroup to be removed")


def _memory_controller() -> tuple[Path, dict[str, str]]:
    if (_MEMORY_V1 / "memory.limit_in_bytes").exists():
        # Pages that it has stay where they were charged: what it takes from now on is too much soon.
        limits = {"memory.swappiness": "0", "memory.move_charge_at_immigrate": "0"}
        return _MEMORY_V1, {**limits, "memory.limit_in_bytes": str(_NO_MEMORY_BYTES)}
    root = Path("/sys/fs/cgroup")
    with suppress(OSError):
        if "memory" in (root / "cgroup.subtree_control").read_text().split():
            return root, {"memory.max": str(_NO_MEMORY_BYTES), "memory.swap.max": "0"}
    raise SetupError("no memory controller of cgroups: it is not enabled at the root")

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Control groups that look like Docker's, for programs that then are containers to the agent; and the agent itself.

Nothing of it is left afterwards: the groups are emptied and removed, and so is a hierarchy that had to be mounted.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Final

from conformance.host import Host, Unavailable
from conformance.machine_state import ROOT

_ENTER: Final = 'echo $$ >"$0/cgroup.procs" && exec "$@"'  # the program is in it from its first instruction
_READY_SECONDS: Final = 30.0
_END_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Makes containers below one cgroup."""

    place: Path  # in the file system

    def container(self) -> tuple[str, list[str]]:
        """A new one: its id, and what a command begins with that is to run in it."""
        name, folder = self._made()
        return name, ["sh", "-c", _ENTER, str(folder)]

    def adopt(self, pid: int) -> str:
        """A new one, and a process that runs already moves into it. Its id."""
        name, folder = self._made()
        (folder / "cgroup.procs").write_text(str(pid))
        return name

    def _made(self) -> tuple[str, Path]:
        name = uuid.uuid4().hex * 2
        folder = self.place / name
        folder.mkdir(parents=True)
        return name, folder


@contextmanager
def cgroups() -> Iterator[Cgroups]:
    """Unavailable without root or a hierarchy that can be written."""
    from tools.harness.cgroups import own

    if os.geteuid() != 0:
        raise Unavailable("control groups of our own need root")
    with ExitStack() as stack:
        try:
            place = stack.enter_context(own(f"/gpuwarden-gpu-{os.getpid()}/docker"))
        except (OSError, IndexError, subprocess.CalledProcessError) as error:
            raise Unavailable(f"no control groups can be made here: {error}") from error
        yield Cgroups(place)


@contextmanager
def agent(host: Host) -> Iterator[Path]:
    """`gpuwarden run`, ready, as people run it; yields the socket on which it answers. Unavailable: not here."""
    from agent.core.errors import SetupError
    from tools.harness import agents

    if host.bpf is not None:
        raise Unavailable(f"the agent needs BPF and uprobes: {host.bpf}")
    try:
        agents.require_no_policy()
    except SetupError as error:
        raise Unavailable(str(error)) from error
    run_dir = host.folder / "agent"
    run_dir.mkdir()
    log = run_dir / "log"
    words = ["--run-dir", run_dir, "--usage", "off", "--decisions", os.devnull]
    library = [] if host.libcuda is None else ["--libcuda", host.libcuda]
    command = agents.command(*words, *library, isolated=host.simulated)  # others may simulate GPUs on this machine
    object_file = {"GPUWARDEN_BPF_OBJECT": str(host.bpf_objects / "gpuwarden.bpf.o")}
    with log.open("w") as output:
        process = host.start(command, object_file, cwd=ROOT, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        agents.wait_until_ready(process, log, _READY_SECONDS)
        yield run_dir / "agent.sock"
    finally:
        _end(host, process)


def _end(host: Host, process: Popen[str]) -> None:
    """It takes its probes away first, which lasts where each is detached by itself."""
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        host.end(process)
        return
    host.end(process)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where the two sides run: in cgroups that look like containers, which is all that the agent knows of one, or, where
no cgroup is to be had, as plain processes that no policy can name."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from conformance.host import Host
from tools.harness import cgroups
from tools.harness.stage import Cpus, GpuNode, Stage, open_stage


@dataclass(frozen=True, slots=True)
class Machine:
    """This one, as a stage's programs and the agent on it see it."""

    environment: Mapping[str, str]


@contextmanager
def item_stage(host: Host) -> Iterator[tuple[Stage[GpuNode], str | None]]:
    """A stage, and why it has no containers, where it has none. Everything on it is gone after the block."""
    with ExitStack() as stack:
        machine, cpus = _set(host)
        try:
            made: Stage[GpuNode] = stack.enter_context(open_stage(machine, host.folder, cpus))
            lacking = _refusal(made.path)
        except (OSError, IndexError, subprocess.SubprocessError) as error:
            lacking = f"no cgroup can be made: {error}"
        if lacking:
            made = stack.enter_context(bare(host))
        yield made, lacking


@contextmanager
def bare(host: Host) -> Iterator[Stage[GpuNode]]:
    """A stage without containers."""
    machine, cpus = _set(host)
    made: Stage[GpuNode] = Stage(machine, host.folder, cpus, "")
    try:
        yield made
    finally:
        made.end()


def _set(host: Host) -> tuple[Machine, Cpus]:
    """This machine, and who runs where."""
    objects = {"GPUWARDEN_BPF_OBJECT": str(host.bpf_objects / "gpuwarden.bpf.o")}
    cpus = Cpus.split(host.simulated)  # what the simulated GPU needs is not to be mistaken for what it does
    if host.node is not None:
        cpus.bind(host.node.server_tgid, online=True)
    return Machine({**host.environment, **objects}), cpus


def _refusal(path: str) -> str | None:
    """Why no process enters a fresh cgroup below this one."""
    probe = cgroups.hierarchy() / f"{path}/probe".lstrip("/")
    probe.mkdir()
    try:
        done = subprocess.run(
            ["sh", "-c", 'echo $$ >"$0/cgroup.procs"', str(probe)], capture_output=True, text=True, timeout=10
        )
    finally:
        cgroups.remove(f"{path}/probe", ())
    return f"no process can be put into a cgroup: {done.stderr.strip()}" if done.returncode else None

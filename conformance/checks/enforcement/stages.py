# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where the two sides run: in cgroups that look like containers, which is all that the agent knows of one, or, where
no cgroup is to be had, as plain processes that no policy can name."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench import cgroups
from bench.enforcement_stage import Cpus, Place, Stage, stage
from gpu.here import Here


@dataclass(frozen=True, slots=True)
class Machine:
    """This one, as a stage's programs and the agent on it see it."""

    environment: Mapping[str, str]


@contextmanager
def standing(here: Here) -> Iterator[tuple[Stage[Place], str | None]]:
    """A stage, and why it has no containers, where it has none. Everything on it is gone after the block."""
    with ExitStack() as stack:
        machine, cpus = _set(here)
        try:
            made: Stage[Place] = stack.enter_context(stage(machine, here.folder, cpus))
            lacking = _refusal(made.path)
        except (OSError, IndexError, subprocess.SubprocessError) as error:
            lacking = f"no cgroup can be made: {error}"
        if lacking:
            made = stack.enter_context(bare(here))
        yield made, lacking


@contextmanager
def bare(here: Here) -> Iterator[Stage[Place]]:
    """A stage without containers."""
    machine, cpus = _set(here)
    made: Stage[Place] = Stage(machine, here.folder, cpus, "")
    try:
        yield made
    finally:
        made.end()


def _set(here: Here) -> tuple[Machine, Cpus]:
    """This machine, and who runs where."""
    objects = {"GPUWARDEN_BPF_OBJECT": str(here.bpf_objects / "gpuwarden.bpf.o")}
    cpus = Cpus.split(here.simulated)  # what the simulated GPU needs is not to be mistaken for what it does
    if here.node is not None:
        cpus.bind(here.node.server_tgid, online=True)
    return Machine({**here.environment, **objects}), cpus


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

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How far from the truth each container's share, launches, bytes and memory are, by the agent and by NVML alone.

The truth: on the simulated GPU its own, on a real one kernels × their time alone (our workloads) and what CUPTI says of
each step, times steps (PyTorch).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from conformance.clients import workload
from conformance.host import Host, Unavailable
from conformance.report.model import Row, failed, part, skipped

if TYPE_CHECKING:
    from conformance.checks.attribution.scene import SceneResult, Stage
    from conformance.checks.attribution.stage import Cgroups
    from conformance.checks.attribution.tenants import Tenant

TITLE: Final = "attribution: shares, launches, bytes and memory of containers, against the truth"
SECONDS: Final = 90
LEAST_SECONDS: Final = 47
WHAT: Final = (
    "the agent",
    "{scene}: can be looked at",
    "{scene}: totals can be looked at",
    "{scene}: {mean or worst} error of a container's share, {agent, NVML alone, equal split}",
    "{scene}: share of {container}, agent",
    "{scene}: worst error of kernels × time against the simulated GPU's truth",
    "{scene}: launches of {container} that the agent missed",
    "{scene}: bytes that {container} copied {to or from} the device, agent ÷ own",
    "{scene}: bytes of {container} by NVML beyond what it allocated",
    "{scene}: bytes of {container} by the probes beyond what it allocated",
    "PyTorch alone: {SM time, time with a kernel} by CUPTI",
    "PyTorch alone: share of the device, agent",
    "PyTorch alone: kernels that the agent missed",
    "PyTorch alone: bytes copied {to or from} the device, agent ÷ CUPTI",
    "PyTorch alone: bytes by NVML beyond what its allocator holds",
    "PyTorch alone: bytes by the probes ÷ what its allocator holds",
    "PyTorch beside a container: steps in a second",
    "PyTorch beside a container: {as of any other scene}",
)
_ITEM: Final = "attribution"
UNDER_MPS: Final = "three with room, MPS"


def rows(host: Host) -> Iterator[Row]:
    """Unavailable without NVML or a GPU; WorkloadError when our kernels do not run."""
    from conformance.checks.attribution import scene
    from conformance.checks.attribution.pytorch import PyTorch
    from conformance.checks.attribution.recorder import recording
    from conformance.checks.nvml.binding import first_gpu

    with ExitStack() as stack:
        gpu = stack.enter_context(first_gpu(host))
        torch = stack.enter_context(PyTorch.importing(host))  # takes seconds, in which the rest goes on
        pace = workload.pace_of(host, gpu.sm_count, 0.5 if host.quick else 2.2)
        cgroups, socket, without = _agent(host, stack)
        why = None if without is None else without.note
        if without is not None:
            yield without
        recorder = stack.enter_context(recording(host, socket))
        times = scene.Times(1.5, 2.0) if host.quick else scene.Times(4.0, 5.0)
        stage = scene.Stage(host, recorder, cgroups, pace, gpu.sm_count, times)
        yield from _scenes(stage, why, alone=torch.process is None)
        yield from torch.rows(stage, why)


def _agent(host: Host, stack: ExitStack) -> tuple[Cgroups | None, Path | None, Row | None]:
    """Where containers are made and the agent's socket; or the row that says why there is none."""
    from conformance.checks.attribution.stage import agent, cgroups

    try:
        groups = stack.enter_context(cgroups())
        return groups, stack.enter_context(agent(host)), None
    except Unavailable as why:
        return None, None, skipped(_ITEM, "the agent", str(why))
    except RuntimeError as how:
        return None, None, failed(_ITEM, "the agent", str(how))


def _scenes(stage: Stage, why: str | None, alone: bool) -> Iterator[Row]:
    """`alone`: also one tenant with the device to itself, which else PyTorch is."""
    from conformance.checks.attribution.tenants import ALONE, CROWDED, WITH_ROOM

    scenes: list[tuple[str, Sequence[Tenant]]] = [("three with room", WITH_ROOM)]
    if not stage.host.quick:
        scenes += [("one that takes the rest", CROWDED), *([("one alone", ALONE)] if alone else [])]
    over: list[SceneResult] = []
    for name, tenants in scenes:
        yield from part(_ITEM, (f"{name}: can be looked at",), partial(_scene, stage, name, tenants, why, over))
    yield from part(_ITEM, (f"{UNDER_MPS}: can be looked at",), partial(_under_mps, stage, why, over))
    for one in over if why is None else ():
        yield from part(_ITEM, (f"{one.name}: totals can be looked at",), partial(_totals, stage, one))


def _under_mps(stage: Stage, why: str | None, over: list[SceneResult]) -> Iterator[Row]:
    """The same three as clients of a daemon: where they have room, each has what it would have alone."""
    from conformance.checks.attribution.tenants import WITH_ROOM

    with stage.host.mps() as clients:
        yield from _scene(replace(stage, extra=clients), UNDER_MPS, WITH_ROOM, why, over)


def _scene(
    stage: Stage, name: str, tenants: Sequence[Tenant], why: str | None, over: list[SceneResult]
) -> Iterator[Row]:
    from conformance.checks.attribution import rows as out_of
    from conformance.checks.attribution.scene import play, with_truth

    one = play(stage, name, tenants)
    over.append(one)
    true = one
    if stage.host.simulated:
        true = with_truth(one, stage.recorder.true_samples())
        yield out_of.of_reckoning(one, true)
    yield from out_of.of_shares(true, stage.recorder.nvml_ended(), why)
    if why is None:
        yield from out_of.of_memory(one)


def _totals(stage: Stage, one: SceneResult) -> Iterator[Row]:
    from conformance.checks.attribution import rows as out_of
    from conformance.checks.attribution.scene import at_the_end

    yield from out_of.of_totals(one, at_the_end(stage.recorder, one))

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The modes of the item enforcement that need the agent, which watches first: the targets are multiples of what its
signal reads then. It exists only meanwhile, so that nothing else is measured with probes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from agent.core.errors import PolicyError, SetupError
from bench.enforcement.agent import Agent, Promise, agent
from bench.enforcement.figures import nearest_rank
from bench.enforcement.modes import Mode
from conformance.checks.enforcement.phases import Phase, Times, few, play
from conformance.checks.enforcement.scene import EXPECTED_ERRORS, NO_TIME, Scene
from conformance.checks.enforcement.shares import Figure, believed, p99_lower, within
from conformance.clients.online import Batch, Service
from conformance.report.model import Row
from tools.harness.stage import GpuNode, Stage

SIGNAL: Final = "gpu_wait"
TGS_SAMPLE_SECONDS: Final = 0.3  # 2 in the bench; here a phase has some seconds to settle
STARTING_SECONDS: Final = 4.0
_TGS_NOTE: Final = f"tgs looks every {TGS_SAMPLE_SECONDS:g} s here, and every 5 s as published"
_SEEN: Final = "watching: p99 of gpu_wait to the service's own"
_WATCHING_SETTLE_SECONDS: Final = 0.5
_TRIES: Final = 3
_SEES_RIGHT_FACTOR: Final = 1.25  # a quantile of a histogram is off by its buckets


def law_rows(scene: Scene, modes: Sequence[Mode], service: Service, batch: Batch, reserve: float) -> Iterator[Row]:
    """What each of these laws gives to either side. `reserve`: seconds that all but the first leave for others."""
    watching = Times(_WATCHING_SETTLE_SECONDS, scene.plain.measured)
    if scene.left() < STARTING_SECONDS + scene.cost(watching) + scene.cost(scene.law):
        yield from scene.without(modes, NO_TIME)
        return
    pending = list(modes)
    try:
        with agent(_own_stage(scene), _promise(scene, None, 1e9), isolated=scene.host.simulated) as warden:
            signal_ns = yield from _watch(scene, watching, service, warden)
            while pending:
                if pending != list(modes) and scene.left() - reserve < scene.cost(scene.law):
                    yield from scene.without(pending, NO_TIME)
                    break
                yield from _under(scene, pending[0], service, batch, warden, signal_ns)
                pending.pop(0)
    except EXPECTED_ERRORS as error:
        yield from scene.broken(pending, error)
    lower = p99_lower(scene.p99_ratios, "headroom@1.1", "tgs", _TGS_NOTE)
    if lower:
        yield scene.row("headroom@1.1 keeps p99 lower than tgs", lower, "ratio")


def _own_stage(scene: Scene) -> Stage[GpuNode]:
    """The scene's, with a folder for this pair's agent."""
    folder = scene.folder / "laws"
    folder.mkdir(parents=True)
    return replace(scene.stage, folder=folder)


def _promise(scene: Scene, mode: Mode | None, signal_ns: float) -> Promise:
    """The policy of a mode; without one, of watching."""
    target_ns = signal_ns * (mode.target_ratio if mode else 1.0)
    law = mode.law if mode and mode.law else "headroom"
    return Promise(law, SIGNAL, 0, target_ns, scene.plain.measured, tgs_sample_seconds=TGS_SAMPLE_SECONDS)


def _watch(scene: Scene, times: Times, service: Service, warden: Agent) -> Generator[Row, None, float]:
    """The service alone, with probes; returns its p99 in ns as the signal reads it."""
    assert scene.alone
    for _ in range(_TRIES):  # a short phase may be over before the agent knows the container
        phase = play(service, None, scene.arrivals(service), times, warden.latency_ns)
        signal_ns = phase.signal_ns
        if signal_ns is not None:
            yield from _watched_rows(scene, scene.alone.phase, phase, signal_ns)
            return signal_ns
    raise SetupError(f"the signal {SIGNAL} reads nothing of the service")


def _watched_rows(scene: Scene, alone: Phase, watched: Phase, signal_ns: float) -> Iterator[Row]:
    """What it costs to be watched, and whether the signal reads what the service says."""
    ratio = watched.quantile_s(0.99) / alone.quantile_s(0.99)
    yield scene.measured(
        "watching: p99 to alone", ratio, "ratio", f"with the agent's probes in place; {few(len(watched.latencies_s))}"
    )
    seen = signal_ns / 1e9 / nearest_rank(watched.services_s, 0.99)
    note = f"the signal reads {signal_ns / 1e6:.3f} ms, from the first launch to the return of the wait"
    verdict = believed(within(seen, 1.0, _SEES_RIGHT_FACTOR), watched)
    yield scene.row(_SEEN, Figure(_SEEN, seen, verdict, 1.0, f"{note}; {few(len(watched.latencies_s))}"), "ratio")


def _under(scene: Scene, mode: Mode, service: Service, batch: Batch, warden: Agent, signal_ns: float) -> Iterator[Row]:
    refused = warden.take(_promise(scene, mode, signal_ns))
    if refused:
        yield from scene.broken([mode], PolicyError([refused]))
        return
    release = partial(warden.take, _promise(scene, None, signal_ns), enforce=False)
    yield from scene.mode_rows(mode, play(service, batch, scene.arrivals(service), scene.law, release=release))

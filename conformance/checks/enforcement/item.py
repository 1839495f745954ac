# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The enforcement bench on real kernels: what a service and the work beside it get from each way of sharing a GPU.

Latencies are the service's own, from the moment at which a request was to arrive. A phase lasts until 2,000 requests
have come; a p99 of fewer is a figure without a verdict. Few pairs are measured well rather than many badly: what does
not fit into the time is a row that says so, the later pairs and laws first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Final

from bench.enforcement.modes import Mode, mode_of
from conformance.checks.enforcement.pairs import ALL, Pair
from conformance.checks.enforcement.phases import Times, alone_per_second, few, play
from conformance.checks.enforcement.scene import EXPECTED_ERRORS, ITEM, NO_TIME, Scene, reason
from conformance.checks.enforcement.shares import MEASURES, AloneFigures
from conformance.checks.enforcement.stages import item_stage
from conformance.checks.enforcement.under_laws import law_rows
from conformance.clients.online import Batch, Service, prepare
from conformance.host import Host, Unavailable
from conformance.report.model import Row, failed, skipped

TITLE: Final = "enforcement on real kernels"
SECONDS: Final = 200
LEAST_SECONDS: Final = 45
ALONE: Final = "alone: p99"
WHAT: Final = (
    f"{{pair}}: {ALONE}",
    "{pair}: alone: busy",
    "{pair}: alone: offline steps",
    "{pair}: watching: p99 to alone",
    "{pair}: watching: p99 of gpu_wait to the service's own",
    "{pair}: headroom@1.1 keeps p99 lower than tgs",
    *(f"{{pair}}: {{mode}}: {measure}" for measure in MEASURES),
)
_UNCONTROLLED: Final = mode_of("timeslice")
_LAWS: Final = tuple(mode_of(name) for name in ("headroom@1.1", "tgs", "headroom@1.5"))
_MPS: Final = tuple(mode_of(name) for name in ("mps", "mps_priority"))
_PRIORITY: Final = {"CUDA_MPS_CLIENT_PRIORITY": "1"}  # below normal
_CLOSING_SECONDS: Final = 12.0  # of the item's limit, to end everything
_MPS_STARTING_SECONDS: Final = 3.0
_OFFLINE_ALONE_SECONDS: Final = 2.0  # of steps, not of a quantile
_LEAST_PHASES: Final = 4  # both alone, beside each other, and to start them


@dataclass(frozen=True, slots=True)
class Plan:
    """The pairs and modes that are measured, and for how long."""

    pairs: Sequence[Pair]
    laws: Sequence[Mode]
    mps: Sequence[Mode]
    plain: Times
    law: Times
    longest: float
    seconds: float

    @classmethod
    def of(cls, host: Host) -> Plan:
        """Quick: one pair, uncontrolled and under the stricter law."""
        if host.quick:
            own = [pair for pair in ALL if not pair.torch]
            return cls(own[:1], _LAWS[:1], (), Times(0.1, 0.8), Times(0.6, 0.8), 0.8, 30.0)
        seconds = min(SECONDS, host.seconds) - _CLOSING_SECONDS
        return cls(ALL, _LAWS, _MPS, Times(0.7, 4.0), Times(6.0, 4.0), 8.0, seconds)


def rows(host: Host) -> Iterator[Row]:
    """Every pair, one after another."""
    plan = Plan.of(host)
    ends = time.monotonic() + plan.seconds
    with item_stage(host) as (stage, no_containers):
        lacking = {pair.name: _lacking(host, pair) for pair in plan.pairs}
        for pair in plan.pairs:
            if why := lacking[pair.name]:
                yield skipped(ITEM, f"{pair.name}: {ALONE}", why)
                continue
            now = time.monotonic()
            part = min(pair.seconds, ends - now)
            if part < _LEAST_PHASES * plan.plain.whole:
                yield skipped(ITEM, f"{pair.name}: {ALONE}", NO_TIME)
                continue
            scene = Scene(host, stage, pair, plan.plain, plan.law, plan.longest, now + part)
            try:
                yield from _pair_rows(scene, plan, host.bpf or no_containers)
            finally:
                stage.end()


def _lacking(host: Host, pair: Pair) -> str | None:
    """Why the pair cannot be had."""
    if not pair.torch:
        return None
    if host.simulated:
        return "PyTorch's kernels need a real GPU"
    return None if host.has("torch") else f"{host.python} has no torch"


def _pair_rows(scene: Scene, plan: Plan, no_laws: str | None) -> Iterator[Row]:
    service, batch = scene.sides()
    try:
        service.measure()
        batch.measure()
        before = time.monotonic()
        prepare(service, batch)
        scene.start_seconds, scene.size = time.monotonic() - before, batch.facts().get("size")
        yield from _alone_rows(scene, service, batch)
    except EXPECTED_ERRORS as error:
        yield failed(ITEM, f"{scene.pair.name}: {ALONE}", reason(error))
        return
    try:
        uncontrolled = play(service, batch, scene.arrivals(service), scene.plain)
        yield from scene.mode_rows(_UNCONTROLLED, uncontrolled)
    except EXPECTED_ERRORS as error:
        yield from scene.broken([_UNCONTROLLED], error)
        service.end()
        batch.end()
    if no_laws:
        yield from scene.without(plan.laws, no_laws)
    else:
        yield from law_rows(scene, plan.laws, service, batch, _mps_seconds(scene) if plan.mps else 0.0)
    service.end()
    batch.end()
    if plan.mps:
        yield from _mps_rows(scene, plan.mps)


def _alone_rows(scene: Scene, service: Service, batch: Batch) -> Iterator[Row]:
    phase = play(service, None, scene.arrivals(service), scene.plain)
    offline = min(scene.plain.measured, _OFFLINE_ALONE_SECONDS)
    steps = alone_per_second(batch, Times(scene.plain.settle, offline))
    if steps <= 0:
        raise ValueError("the offline side made no step by itself")
    scene.alone = AloneFigures(phase, steps)
    facts = "".join(f", {name} {value}" for name, value in service.facts().items() if name != "service_seconds")
    note = f"{few(len(phase.latencies_s))}; each is served in {median(phase.services_s) * 1e3:.3f} ms (median){facts}"
    yield scene.measured(ALONE, phase.quantile_s(0.99) * 1e3, "ms", note)
    yield scene.measured("alone: busy", phase.busy_ratio, "ratio", "of the time, some request is being served")
    kernel_seconds = batch.facts().get("step_kernel_seconds")
    spent = "" if kernel_seconds is None else f"{steps * kernel_seconds:.3f} s of kernels in a second"
    yield scene.measured("alone: offline steps", steps, "1/s", spent)


def _mps_seconds(scene: Scene) -> float:
    """Seconds that the modes with MPS take."""
    return _MPS_STARTING_SECONDS + 2 * (scene.start_seconds + scene.cost(scene.plain))


def _mps_rows(scene: Scene, modes: Sequence[Mode]) -> Iterator[Row]:
    pending = list(modes)
    if scene.left() < _mps_seconds(scene):
        yield from scene.without(pending, NO_TIME)
        return
    try:
        with scene.host.mps() as clients, ExitStack() as stack:
            service, _ = scene.sides(clients, clients)
            stack.callback(service.end)  # before the daemon
            while pending:
                _, batch = scene.sides(clients, {**clients, **(_PRIORITY if pending[0].priority else {})})
                try:
                    prepare(service, batch)
                    phase = play(service, batch, scene.arrivals(service), scene.plain)
                finally:
                    batch.end()
                yield from scene.mode_rows(pending.pop(0), phase)
    except Unavailable as error:
        yield from scene.without(pending, str(error))
    except EXPECTED_ERRORS as error:
        yield from scene.broken(pending, error)

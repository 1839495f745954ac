# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The loop: ten times a second read, decide, write what changed, say why.

It is the only place that catches everything; then it releases every throttle before it goes on. Nothing is written
before it is in the ledger, and nothing at all with `enforce: false`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.clock import monotonic_ns
from agent.collectors.deliveries import Deliveries
from agent.delivery import LaunchTimes
from agent.members import Members
from agent.model import ContainerKey, DeviceUuid, ProcessId, Snapshot
from agent.pipeline import Pipeline
from enforce import pictured
from enforce.amiss import tell
from enforce.climber import Climber, leaving
from enforce.decide import Decided, Seen, decide
from enforce.demand import Demand
from enforce.explainer import Explainer
from enforce.gates import GateReader
from enforce.health import HealthView
from enforce.holds import Holds
from enforce.memory.bounds import Bounds
from enforce.memory.keeper import Keeper, Kept
from enforce.model import Reading, Signal
from enforce.planner import changes
from enforce.policy.model import OnlineRule, Policy, Role
from enforce.report import PauseMeter, report
from enforce.roster import Seat, seats
from enforce.rungs import Rungs
from enforce.signalling import with_troubles
from enforce.signals.requests import Requests
from enforce.slots import assign
from enforce.supervisor import Supervisor
from enforce.sysmonitor import SysMonitor, published
from enforce.toolbox import Toolbox

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hands:
    """What acting needs; there are none with `enforce: false`."""

    supervisor: Supervisor
    holds: Holds
    bounds: Bounds
    rungs: Rungs


@dataclass(slots=True)
class Loop:
    """Everything that one decision needs. `run` is the thread."""

    policy: Policy
    pipeline: Pipeline
    members: Members
    signals: dict[str, Signal]
    requests: Requests
    deliveries: Deliveries
    hands: Hands | None
    tools: Toolbox
    climber: Climber
    explainer: Explainer
    meter: PauseMeter
    gates: GateReader
    memory: Keeper
    health: SysMonitor
    _demand: Demand = field(default_factory=Demand)
    _launch_times: LaunchTimes = field(default_factory=LaunchTimes)
    _pictured_ns: int | None = None  # of the snapshot that was looked at last for what launches take
    _states: dict[ContainerKey, Any] = field(default_factory=dict)
    _shares: dict[ContainerKey, float] = field(default_factory=dict)  # as they were decided last
    _present: frozenset[ContainerKey] = frozenset()
    _amiss: dict[ContainerKey, str] = field(default_factory=dict)  # what was logged about those that are here
    _slots: dict[DeviceUuid, int] = field(default_factory=dict)
    _slotless: int = 0  # devices beyond the kernel's slots: not controlled
    failures: int = 0
    unread: int = 0  # latencies, for a fault of ours

    def run(self, ending: threading.Event) -> None:
        """Decides until `ending` is set, then releases everything."""
        self.pipeline.decided_ns = monotonic_ns()
        try:
            while not ending.wait(self.policy.tuning.decide_interval_ns / 1e9):
                self._guarded(self._decide)
        finally:
            self.pipeline.decided_ns = None  # releasing takes the time it takes
            self._release()
            self._guarded(self.climber.release)

    def _decide(self) -> None:
        self.step()
        self.pipeline.decided_ns = monotonic_ns()

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001
            self.failures += 1
            _log.exception("a decision failed: releasing everything")
            self._release()

    def _release(self) -> None:
        """Each on its own: what one cannot release must not keep another one held."""
        for act in (
            *((self.hands.holds.release_all,) if self.hands else ()),
            self.memory.release,
            self.climber.let_go,
        ):
            try:
                act()
            except Exception:  # noqa: BLE001
                self.failures += 1
                _log.exception("releasing failed; the guardian and `gpuwarden release` can still do it")

    def losses(self) -> dict[str, int]:
        """What went otherwise than meant, or was not told: for Snapshot.lost."""
        bounds = self.hands.bounds.losses() if self.hands else {}
        own = {"loop:failed": self.failures, "loop:unread": self.unread, "loop:no_slot": self._slotless}
        return {**own, **self.explainer.losses(), **bounds, **self.climber.losses(), **self.tools.losses()}

    def step(self) -> None:
        """One decision."""
        now = monotonic_ns()
        if self.hands:
            self.hands.supervisor.beat()
        snapshot = self.pipeline.snapshot
        if snapshot is None:
            return
        here = seats(self.policy, self.members.all(), snapshot)
        for signal in self.signals.values():
            signal.forget(self._present - here.keys())
        self.requests.forget(self._present - here.keys())
        self._present = frozenset(here)
        self._amiss = tell(here, self._amiss)
        readings = {key: reading for key, seat in here.items() if (reading := self._read(seat, now)) is not None}
        self._slots = assign(self._slots, [reading.device.uuid for reading in snapshot.devices])
        self._slotless = len(snapshot.devices) - len(self._slots)
        lost = {reading.device.uuid for reading in snapshot.devices if reading.lost}
        slots = {device: slot for device, slot in self._slots.items() if device not in lost}
        health = self.health.look(snapshot, self.policy)
        seen = self._seen(snapshot, here, readings, slots, health, now)
        decided = with_troubles(decide(seen, self._states, self.policy.tuning, now), self.signals)
        self._states = {verdict.seat.container.key: verdict.state for verdict in decided.verdicts}
        self._shares = {verdict.seat.container.key: verdict.share.ratio for verdict in decided.verdicts}
        if self.hands:
            self.hands.holds.perform(changes(decided.levels, self.hands.holds.in_force()))
        kept = self.memory.step(snapshot, here, slots, now)
        faults = self.tools.look(here, snapshot)
        self.climber.step(here, decided, now, (kept.wishes, leaving(here, health), faults))
        self._publish(here, readings, decided, kept, now)
        self.pipeline.device_health = published(health, now)

    def _seen(
        self,
        snapshot: Snapshot,
        here: Mapping[ContainerKey, Seat],
        readings: Mapping[ContainerKey, Reading],
        slots: Mapping[DeviceUuid, int],
        health: Mapping[DeviceUuid, HealthView],
        now_ns: int,
    ) -> Seen:
        self._demand.observe(now_ns, self.meter.counters)
        return Seen(
            seats=here,
            readings=readings,
            slots=slots,
            launch_ns=self._launch_ns(snapshot, now_ns),
            wanted=self._demand.wanted(self.meter.counters),
            busy=self.gates.busy(slots, now_ns),
            blocks=self.gates.blocks(slots),
            health=health,
            shares=self._shares,
            launching=_launching(snapshot),
        )

    def _publish(
        self,
        here: Mapping[ContainerKey, Seat],
        readings: Mapping[ContainerKey, Reading],
        decided: Decided,
        kept: Kept,
        now_ns: int,
    ) -> None:
        paused = self.meter.read(here, now_ns)
        self.explainer.tell(here, decided, readings, paused, now_ns)
        for told in kept.told:
            self.explainer.tell_memory(told)
        standing = {key: self.climber.standing(key) for key in here}
        counted = {key: self.requests.of(key) for key in here}
        self.pipeline.enforcement = report(here, readings, decided, paused, standing, kept.stances, counted)

    def _read(self, seat: Seat, now_ns: int) -> Reading | None:
        rule = seat.classification.rule
        snapshot = self.pipeline.snapshot
        if seat.classification.role is not Role.ONLINE or not isinstance(rule, OnlineRule) or snapshot is None:
            return None
        try:
            return self.signals[rule.slo.signal].read(snapshot, seat.container.key, rule.slo, now_ns)
        except Exception:  # noqa: BLE001  # what one container says must not end the decisions about the others
            self.unread += 1
            if self.unread & (self.unread - 1) == 0:  # the first, second, fourth, … time
                _log.exception("%s: its latency could not be read", seat.container.name)
            return None

    def _launch_ns(self, snapshot: Snapshot, now_ns: int) -> dict[ProcessId, float]:
        if snapshot.at_ns != self._pictured_ns:  # ten decisions see one
            self._pictured_ns = snapshot.at_ns
            self._launch_times.tell(pictured.launch_ns(snapshot))
        for delivery in self.deliveries.collect(now_ns):
            self._launch_times.observe(delivery)
        alive = {member.process.id for member in self.members.all()}
        for process in self._launch_times.processes() - alive:
            self._launch_times.forget(process)
        return {p: ns for p in alive if (ns := self._launch_times.per_launch_ns(p)) is not None}


def _launching(snapshot: Snapshot) -> dict[ProcessId, frozenset[DeviceUuid]]:
    """Where each process launched work in the last tick; memory says less: all ranks of a job have some on each."""
    return {
        row.process.id: devices
        for row in snapshot.processes
        if (devices := frozenset(usage.device for usage in row.usage if usage.launches_per_second))
    }

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`mps`: limits for the MPS clients that an offline container starts from now on. Running clients keep what they have.

The limits are a percentage of the SMs (what the online side leaves), pinned memory (the rule's quota) and low priority.
With protocol 2 a limit reaches every later client of the daemon, online ones too, and a client keeps what it got until
it ends. So nothing is set while a container that may not be limited reaches the daemon with a process that is not
connected yet; limits are put back when such a process is seen; one that connected all the same is reported. With
protocol 3 limits are set on namespaces that only such offline containers reach.

Limits are set once per climb, all of them at once, and then only checked: so the ledger entry of the climb names
everything that is to be put back. Once another writer sets a daemon's limits, they are left alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent.core.clock import NS_PER_SECOND, monotonic_ns, wall_ns
from agent.core.errors import WardenError
from agent.core.model import ContainerKey, DeviceUuid, ProcessId, Snapshot
from agent.node.procfs import Procfs
from enforce.actuators.mps import limits
from enforce.actuators.mps.limits import OnlineActivity
from enforce.actuators.mps.model import MpsClient, MpsControl, MpsError, Scope
from enforce.actuators.mps.restore import LimitChange, put_back, take_back, to_place
from enforce.actuators.mps.survey import (
    RUNG,
    MpsEndpoint,
    MpsState,
    MpsSurvey,
    bystander,
    endpoint_of,
    may_be_limited,
    obstacle_to_limits,
    scopes_of,
)
from enforce.ledger.entries import LedgerEntry
from enforce.model import Subject
from enforce.workloads import Workload, processes_of

_log = logging.getLogger(__name__)
CLAIMED_NS = 30 * NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class HeldLimits:
    """The limits of one daemon, and the container they were set for. `known`: processes that were connected before."""

    container: ContainerKey
    control: MpsControl
    changes: tuple[LimitChange, ...]
    known: frozenset[ProcessId]

    def reaches(self, client: MpsClient) -> bool:
        """Whether one of the limits is for a client like this."""
        own = (Scope(client.server, client.space), Scope(""))
        return any(change.setting.scope in own for change in self.changes)


class Mps:
    """A rung. `look` is to be called at every decision, also while the rung is not wanted."""

    name = RUNG

    def __init__(self, proc: Procfs, survey: MpsSurvey | None = None) -> None:
        self._survey = survey or MpsSurvey(proc)
        self._activity = OnlineActivity()
        self._workloads: Mapping[ContainerKey, Workload] = {}
        self._memory_bytes: dict[DeviceUuid, int] = {}
        self._plans: dict[ContainerKey, HeldLimits] = {}
        self._held: dict[ProcessId, HeldLimits] = {}  # by daemon
        self._claimed: dict[ProcessId, tuple[ContainerKey, int]] = {}  # daemons that are being limited: for whom, until
        self._claiming = threading.Lock()
        self._foreign: set[ProcessId] = set()  # daemons whose limits another writer sets too
        self._caught: set[ProcessId] = set()
        self.foreign_writes = 0
        self._survey.listeners.append(self.watch)

    def losses(self) -> dict[str, int]:
        """Processes limited by mistake, foreign writes, surveys that failed: for Snapshot.lost."""
        return {"mps:caught": len(self._caught), "mps:foreign": self.foreign_writes, "mps:look": self._survey.failures}

    def look(self, workloads: Mapping[ContainerKey, Workload], snapshot: Snapshot) -> None:
        """Learns what the online side uses, and has MPS surveyed where a rule lists this rung. Does not block."""
        self._workloads = workloads
        sizes = {reading.device.uuid: reading.device.memory_total_bytes for reading in snapshot.devices}
        self._memory_bytes = {uuid: size for uuid, size in sizes.items() if size}
        self._activity.observe(workloads, snapshot)
        if self._held or any(may_be_limited(workload) for workload in workloads.values()):
            self._survey.refresh(process for workload in workloads.values() for process in processes_of(workload))

    def obstacle(self, subject: Subject) -> str | None:
        """See Rung. From the last survey."""
        state = self._survey.state
        return self._obstacle(subject, state) if state else "MPS has not been surveyed yet; tried again in a moment"

    def _obstacle(self, subject: Subject, state: MpsState) -> str | None:
        endpoint = endpoint_of(subject, state)
        daemon = endpoint.daemon.process if endpoint else None
        held = self._held.get(daemon) if daemon else None
        if held and held.container != subject.container.key:
            return self._is_limited_for(held.container)
        if daemon in self._foreign:
            return "another writer has changed the limits of the MPS daemon: they are left alone until it is restarted"
        if why := obstacle_to_limits(subject, state, self._workloads):
            return why
        known = held or limits.percent(subject, self._activity) is not None
        return None if known else "what the online side uses is not known yet"

    def intents(self, subject: Subject) -> Sequence[LedgerEntry]:
        """See Rung. Asks the daemon what is set now. Nothing is added to what is in force."""
        state = self._survey.state
        endpoint = endpoint_of(subject, state) if state else None
        if state is None or endpoint is None or endpoint.control is None:
            raise MpsError("the MPS control daemon has gone since it was looked at")
        daemon, key = endpoint.daemon.process, subject.container.key
        self._claim(daemon, key)
        entries: list[LedgerEntry] = []
        try:
            if why := self._obstacle(subject, state):
                raise MpsError(why)
            entries = self._plan(subject, endpoint, endpoint.control)
        finally:
            if not entries:
                self._unclaim(daemon, key)
        return entries

    def _plan(self, subject: Subject, endpoint: MpsEndpoint, control: MpsControl) -> list[LedgerEntry]:
        key, held = subject.container.key, self._held.get(endpoint.daemon.process)
        if held and any(change.is_ours(held.control.get(change.setting)) for change in held.changes):
            self._plans[key] = replace(held, changes=())
            return []
        changes = self._changes(subject, endpoint, control)
        known = frozenset(process for process, _ in endpoint.connected)
        self._plans[key] = HeldLimits(key, control, changes, known)
        return [_entry(key, endpoint, changes)] if changes else []

    def _changes(self, subject: Subject, endpoint: MpsEndpoint, control: MpsControl) -> tuple[LimitChange, ...]:
        (scope,) = scopes_of(subject, endpoint)
        wanted = {
            "percentage": limits.percent(subject, self._activity),
            "memory": limits.quota(scope, endpoint, self._workloads),
            "priority": "1",
        }
        return tuple(limits.changes(endpoint, control, scope, subject, wanted, self._memory_bytes))

    def apply(self, subject: Subject) -> None:
        """See Rung."""
        held = self._plans.pop(subject.container.key)
        if not held.changes:
            return
        daemon = held.control.daemon.process
        try:
            for number, change in enumerate(held.changes, 1):
                try:
                    held.control.put(change.setting, change.ours)
                except MpsError:
                    _take_back(held.control, held.changes[:number])
                    raise
            self._held[daemon] = held
        finally:
            self._unclaim(daemon, held.container)
        what = ", ".join(f"{change.setting.what} {change.ours}" for change in held.changes)
        _log.info("%s: MPS: %s, for clients that connect later; others keep theirs", subject.container.name, what)

    def _claim(self, daemon: ProcessId, key: ContainerKey) -> None:
        """One container at a time: another's would be taken for what was set before, and put back as that. MpsError.

        Until its limits are set or failed, or for CLAIMED_NS, should it never come to that.
        """
        now = monotonic_ns()
        with self._claiming:
            holder, until_ns = self._claimed.get(daemon, (key, 0))
            if holder != key and now < until_ns:
                raise MpsError(self._is_limited_for(holder))
            self._claimed[daemon] = key, now + CLAIMED_NS

    def _unclaim(self, daemon: ProcessId, key: ContainerKey) -> None:
        with self._claiming:
            if self._claimed.get(daemon, ("", 0))[0] == key:
                del self._claimed[daemon]

    def watch(self, state: MpsState) -> None:
        """Checks in the surveying thread whether what was set is still in force and still ours."""
        endpoints = {endpoint.daemon.process: endpoint for endpoint in state.endpoints}
        self._foreign.intersection_update(endpoints)
        for daemon, held in list(self._held.items()):
            endpoint = endpoints.get(daemon)
            try:
                if endpoint is None or not self._keeps(endpoint, held):
                    self._held.pop(daemon, None)  # the daemon ended, or the limits are put back, or another writer's
            except WardenError as error:
                _log.warning("MPS limits of %s: %s", self._name(held.container), error)

    def _keeps(self, endpoint: MpsEndpoint, held: HeldLimits) -> bool:
        """Whether the limits stay. Puts them back where they would reach a container that may not be limited."""
        if endpoint.error:
            return True
        now = [(change, held.control.get(change.setting)) for change in held.changes]
        for change, value in now:
            if not (change.is_undone(value) or change.is_ours(value)):
                self.foreign_writes += 1
                self._foreign.add(endpoint.daemon.process)
                _log.warning("MPS: another writer has set %s to %s: left alone", change.setting.what, value or "none")
                return False
        self._report_caught(endpoint, held)
        scopes = frozenset(change.setting.scope for change in held.changes if change.setting.scope.server)
        other = bystander(endpoint, scopes or frozenset(endpoint.scopes), self._workloads)
        if other:
            _log.warning("MPS: %s is about to connect: the limits are put back", other)
            for change in held.changes:
                put_back(held.control, change)
        return not other and any(change.is_ours(value) for change, value in now)

    def _report_caught(self, endpoint: MpsEndpoint, held: HeldLimits) -> None:
        safe = {p for workload in self._workloads.values() if may_be_limited(workload) for p in processes_of(workload)}
        for process, client in endpoint.connected:
            if held.reaches(client) and process not in held.known | safe | self._caught:
                self._caught.add(process)
                _log.warning("MPS: process %d connected while others were limited: it has their limit", process.tgid)

    def _is_limited_for(self, holder: ContainerKey) -> str:
        return f"the MPS daemon is limited for {self._name(holder)} already, which reaches its clients too"

    def _name(self, key: ContainerKey) -> str:
        workload = self._workloads.get(key)
        return workload.container.name if workload else str(key)


def _take_back(control: MpsControl, changes: Sequence[LimitChange]) -> None:
    """After one of them failed. The ledger has them all, for where the daemon answers no more."""
    for change in changes:
        try:
            take_back(control, change)
        except MpsError as error:
            _log.warning("MPS: %s is not put back yet: %s", change.setting.what, error)


def _entry(key: ContainerKey, endpoint: MpsEndpoint, changes: tuple[LimitChange, ...]) -> LedgerEntry:
    """Each time that limits are set is an act of its own: what they were before may differ."""
    at_ns = wall_ns()
    entry = LedgerEntry.of(RUNG, endpoint.daemon.process, key, at_ns, to_place(changes, endpoint.daemon.pipe))
    return replace(entry, id=f"{entry.id}:{at_ns}")

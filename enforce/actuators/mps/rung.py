# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`mps`: limits for the MPS clients that an offline container starts from now on: a percentage of the SMs (what the
online side leaves), pinned memory (the rule's quota), and low priority. Clients that run already keep what they have.

With protocol 2 a limit reaches every later client of the daemon, online ones too, and a client keeps what it got until
it ends. So nothing is set while a container that is not to be limited reaches the daemon with a process that is not
connected yet; what is set is put back when such a process is seen; one that was caught all the same is reported. With
protocol 3 limits are set on namespaces that only such offline containers reach, so they are nobody else's.

Limits are set once per climb, all of them at once, and then only looked after: so the ledger entry of the climb names
everything that is to be put back. A daemon whose limits somebody else sets too is left to him.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent.clock import wall_ns
from agent.errors import WardenError
from agent.model import ContainerKey, DeviceUuid, ProcessId, Snapshot
from agent.procfs import Procfs
from enforce.activity import OnlineActivity
from enforce.entries import Entry
from enforce.model import Subject
from enforce.mps import limits, standing
from enforce.mps.model import Client, Control, MpsError, Scope
from enforce.mps.restoring import Change, put_back, to_place
from enforce.mps.survey import Picture, Place, Survey
from enforce.roster import Seat, processes_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """What is in force on one daemon, and for whom it was set. `known`: processes that were connected before."""

    container: ContainerKey
    control: Control
    changes: tuple[Change, ...]
    known: frozenset[ProcessId]

    def reaches(self, client: Client) -> bool:
        """Whether one of the limits is for a client like this."""
        own = (Scope(client.server, client.space), Scope(""))
        return any(change.setting.scope in own for change in self.changes)


class Mps:
    """A rung. `look` is to be called at every decision, also while the rung is not wanted."""

    name = standing.RUNG

    def __init__(self, proc: Procfs, survey: Survey | None = None) -> None:
        self._survey = survey or Survey(proc)
        self._activity = OnlineActivity()
        self._seats: Mapping[ContainerKey, Seat] = {}
        self._memory_bytes: dict[DeviceUuid, int] = {}
        self._plans: dict[ContainerKey, Held] = {}
        self._held: dict[ProcessId, Held] = {}  # by daemon
        self._foreign: set[ProcessId] = set()  # daemons whose limits somebody else sets too
        self._caught: set[ProcessId] = set()
        self.foreign_writes = 0
        self._survey.listeners.append(self.watch)

    def losses(self) -> dict[str, int]:
        """What went otherwise than meant: for Snapshot.lost."""
        return {"mps:caught": len(self._caught), "mps:foreign": self.foreign_writes, "mps:look": self._survey.failures}

    def look(self, seats: Mapping[ContainerKey, Seat], snapshot: Snapshot) -> None:
        """Learns what the online side uses, and has MPS looked at where a rule lists this rung. Does not block."""
        self._seats = seats
        sizes = {reading.device.uuid: reading.device.memory_total_bytes for reading in snapshot.devices}
        self._memory_bytes = {uuid: size for uuid, size in sizes.items() if size}
        self._activity.observe(seats, snapshot)
        if self._held or any(standing.is_limited(seat) for seat in seats.values()):
            self._survey.poke(process for seat in seats.values() for process in processes_of(seat))

    def obstacle(self, subject: Subject) -> str | None:
        """See Rung. From the last look at MPS."""
        picture = self._survey.picture
        return (
            self._obstacle(subject, picture) if picture else "MPS has not been looked at yet; asked again in a moment"
        )

    def _obstacle(self, subject: Subject, picture: Picture) -> str | None:
        place = standing.place_of(subject, picture)
        daemon = place.daemon.process if place else None
        held = self._held.get(daemon) if daemon else None
        if held and held.container != subject.container.key:
            return f"the MPS daemon is limited for {self._name(held.container)} already, which reaches its clients too"
        if daemon in self._foreign:
            return "somebody else has changed the limits of the MPS daemon: they are left alone until it is restarted"
        if why := standing.obstacle(subject, picture, self._seats):
            return why
        known = held or limits.percent(subject, self._activity) is not None
        return None if known else "what the online side uses is not known yet"

    def intents(self, subject: Subject) -> Sequence[Entry]:
        """See Rung. Asks the daemon what is set now. Nothing is added to what is in force."""
        picture = self._survey.picture
        place = standing.place_of(subject, picture) if picture else None
        if picture is None or place is None or place.control is None:
            raise MpsError("the MPS control daemon has gone since it was looked at")
        if why := self._obstacle(subject, picture):
            raise MpsError(why)
        key, held = subject.container.key, self._held.get(place.daemon.process)
        if held and any(held.control.get(change.setting) == change.ours for change in held.changes):
            self._plans[key] = replace(held, changes=())
            return []
        changes = self._changes(subject, place, place.control)
        self._plans[key] = Held(key, place.control, changes, frozenset(process for process, _ in place.connected))
        return [_entry(key, place, changes)] if changes else []

    def _changes(self, subject: Subject, place: Place, control: Control) -> tuple[Change, ...]:
        (scope,) = standing.scopes_of(subject, place)
        wanted = {
            "percentage": limits.percent(subject, self._activity),
            "memory": limits.quota(scope, place, self._seats),
            "priority": "1",
        }
        return tuple(limits.changes(place, control, scope, subject, wanted, self._memory_bytes))

    def apply(self, subject: Subject) -> None:
        """See Rung."""
        held = self._plans.pop(subject.container.key)
        if not held.changes:
            return
        for change in held.changes:
            held.control.put(change.setting, change.ours)
        self._held[held.control.daemon.process] = held
        what = ", ".join(f"{change.setting.what} {change.ours}" for change in held.changes)
        _log.info("%s: MPS: %s, for clients that connect later; others keep theirs", subject.container.name, what)

    def watch(self, picture: Picture) -> None:
        """Looks whether what was set is still ours to keep, in the surveying thread."""
        places = {place.daemon.process: place for place in picture.places}
        self._foreign.intersection_update(places)
        for daemon, held in list(self._held.items()):
            place = places.get(daemon)
            try:
                if place is None or not self._keeps(place, held):
                    self._held.pop(daemon, None)  # the daemon ended, or the limits are put back, or another's
            except WardenError as error:
                _log.warning("MPS limits of %s: %s", self._name(held.container), error)

    def _keeps(self, place: Place, held: Held) -> bool:
        """Puts the limits back where they would reach the wrong one."""
        if place.error:
            return True
        now = [(change, held.control.get(change.setting)) for change in held.changes]
        for change, value in now:
            if value not in (change.before, change.back, change.ours):
                self.foreign_writes += 1
                self._foreign.add(place.daemon.process)
                _log.warning("MPS: somebody else has set %s to %s: left alone", change.setting.what, value or "none")
                return False
        self._report_caught(place, held)
        scopes = frozenset(change.setting.scope for change in held.changes if change.setting.scope.server)
        other = standing.bystander(place, scopes or frozenset(place.scopes), self._seats)
        if other:
            _log.warning("MPS: %s is about to connect: the limits are put back", other)
            for change in held.changes:
                put_back(held.control, change)
        return not other and any(value == change.ours for change, value in now)

    def _report_caught(self, place: Place, held: Held) -> None:
        safe = {p for seat in self._seats.values() if standing.is_limited(seat) for p in processes_of(seat)}
        for process, client in place.connected:
            if held.reaches(client) and process not in held.known | safe | self._caught:
                self._caught.add(process)
                _log.warning("MPS: process %d connected while others were limited: it has their limit", process.tgid)

    def _name(self, key: ContainerKey) -> str:
        seat = self._seats.get(key)
        return seat.container.name if seat else str(key)


def _entry(key: ContainerKey, place: Place, changes: tuple[Change, ...]) -> Entry:
    """Each time that limits are set is an act of its own: what they were before may differ."""
    at_ns = wall_ns()
    entry = Entry.of(standing.RUNG, place.daemon.process, key, at_ns, to_place(changes, place.daemon.pipe))
    return replace(entry, id=f"{entry.id}:{at_ns}")

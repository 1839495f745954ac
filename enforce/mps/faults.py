# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Watches MPS servers for faults, and carries out what `enforce.mishaps` decides.

Asking offline containers to go is left to the ladder (`wanted`, for those whose rule lists evict); ending a server is
done here, in the surveying thread, on a picture that is a moment old and only after asking again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from agent.clock import NS_PER_SECOND
from agent.errors import WardenError
from agent.model import ContainerKey, DeviceUuid, ProcessId, Snapshot
from enforce.mishaps import GRACE_NS, Party, Response, Scene, Trouble, respond
from enforce.mps.model import Client, Control, Server
from enforce.mps.survey import Picture, Place, Survey
from enforce.policy.model import OfflineRule
from enforce.roster import Seat, processes_of
from enforce.xids import Reach, reach_of

_log = logging.getLogger(__name__)
_EVICT = "evict"
RECENT_NS = 60 * NS_PER_SECOND  # an XID this long ago may be what the fault is about
Key = tuple[ProcessId, str]  # daemon, server


class Faults:
    """Owns what is known of each server's trouble. `look` and `wanted` are for the deciding thread.

    A container that still launches work is well, whatever else speaks against it.
    """

    def __init__(self, survey: Survey, grace_ns: int = GRACE_NS) -> None:
        self._survey, self._grace_ns = survey, grace_ns
        self._seats: Mapping[ContainerKey, Seat] = {}
        self._xids: dict[DeviceUuid, Mapping[int, int]] = {}
        self._struck: dict[tuple[DeviceUuid, Reach], int] = {}  # when such an XID came last
        self._lost: frozenset[DeviceUuid] = frozenset()
        self._working: frozenset[ContainerKey] = frozenset()
        self._troubles: dict[Key, Trouble] = {}
        self.wanted: Mapping[ContainerKey, str] = {}  # whom to ask to go, and why
        self.ended = 0
        survey.listeners.append(self.watch)

    def losses(self) -> dict[str, int]:
        """For Snapshot.lost."""
        return {"mps:server_ended": self.ended}

    def look(self, seats: Mapping[ContainerKey, Seat], snapshot: Snapshot) -> None:
        """Takes in XIDs, and has MPS looked at where a rule lists evict. Does not block."""
        self._seats = seats
        for reading in snapshot.devices:
            uuid = reading.device.uuid
            before = self._xids.get(uuid, reading.xid_counts)  # those counted before the first look are old
            for xid, count in reading.xid_counts.items():
                if count > before.get(xid, 0):
                    self._struck[uuid, reach_of(xid)] = snapshot.at_ns
            self._xids[uuid] = reading.xid_counts
        self._lost = frozenset(reading.device.uuid for reading in snapshot.devices if reading.lost)
        self._working = frozenset(
            row.container.key
            for row in snapshot.containers
            if any(usage.launches_per_second or usage.sm_ratio for usage in row.usage)
        )
        if self._troubles or any(_may_stop(seat) for seat in seats.values()):
            self._survey.poke(process for seat in seats.values() for process in processes_of(seat))

    def watch(self, picture: Picture) -> None:
        """Decides for each server, in the surveying thread."""
        wanted: dict[ContainerKey, str] = {}
        troubles: dict[Key, Trouble] = {}
        for place in picture.places:
            for server in place.servers:
                key = (place.daemon.process, server.name)
                trouble, response = self._respond(place, server, self._troubles.get(key), picture.at_ns)
                if trouble:
                    troubles[key] = trouble
                wanted |= dict.fromkeys(response.stop, response.reason)
        self._troubles, self.wanted = troubles, wanted

    def _respond(
        self, place: Place, server: Server, trouble: Trouble | None, now_ns: int
    ) -> tuple[Trouble | None, Response]:
        control = place.control
        if control is None or not server.faulted:
            return None, Response()
        after, response = respond(trouble, self._scene(place, control, server, now_ns), now_ns, self._grace_ns)
        if trouble is None or response.end_server:
            _log.warning("%s (server %s of daemon %d)", response.reason, server.name, place.daemon.process.tgid)
        if response.end_server:
            self._end(control, server)
        return after, response

    def _end(self, control: Control, server: Server) -> None:
        try:
            if any(now.name == server.name and now.faulted for now in control.servers()):
                control.shut_down(server)
                self.ended += 1
                _log.warning("MPS server %s ended; what supervises MPS here has to start it again", server.name)
        except WardenError as error:
            _log.warning("MPS server %s could not be ended: %s", server.name, error)

    def _scene(self, place: Place, control: Control, server: Server, now_ns: int) -> Scene:
        where: dict[int, frozenset[DeviceUuid]] = {}
        for uuid, tgids in place.device_clients:
            for tgid in tgids:
                where[tgid] = where.get(tgid, frozenset()) | {uuid}
        parties = tuple((client, self._party(client, place, where.get(client.tgid))) for client in place.clients)
        own = tuple(party for client, party in parties if client.server == server.name)
        all_of_daemon = tuple(party for _, party in parties)
        endangered = own if control.protocol == 3 else all_of_daemon
        return Scene(server.faulted, self._broken(place, now_ns), own, endangered)

    def _broken(self, place: Place, now_ns: int) -> frozenset[DeviceUuid]:
        """Where all is lost: devices that are gone or broken, and the one that the fault must be about."""
        devices = frozenset(uuid for uuid, _ in place.ordinals)
        fatal = {uuid for uuid in devices if uuid in self._lost or self._is_recent(uuid, Reach.FATAL, now_ns)}
        struck = {uuid for uuid in devices if self._is_recent(uuid, Reach.APPLICATION, now_ns)}
        suspects = fatal | struck or devices
        return frozenset(fatal | (suspects if len(suspects) == 1 else set()))

    def _party(self, client: Client, place: Place, devices: frozenset[DeviceUuid] | None) -> Party:
        process = next((process for process, other in place.connected if other == client), None)
        for seat in self._seats.values():
            if process in processes_of(seat):
                key = seat.container.key
                return Party(client.tgid, key, _may_stop(seat), None if key in self._working else devices)
        return Party(client.tgid, None, False, devices)

    def _is_recent(self, device: DeviceUuid, reach: Reach, now_ns: int) -> bool:
        at_ns = self._struck.get((device, reach))
        return at_ns is not None and now_ns - at_ns < RECENT_NS


def _may_stop(seat: Seat) -> bool:
    rule = seat.classification.rule
    return isinstance(rule, OfflineRule) and _EVICT in rule.ladder

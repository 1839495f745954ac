# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is done when an MPS server has met a fatal error, after MuxFlow's mixed error handling.

A fault of one client reaches every client of the server on that device, and the server takes no new work there until
they have ended. So the offline clients are evicted first (SIGTERM lets them release their contexts; a kill can hang the
others), and only if that did not help is the server ended, and only if everything that it would take along is lost
anyway. Invariant: a server is never ended while a client is connected that is not known to be lost.

`respond` is pure. `FaultMonitor` carries it out: evicting is left to the ladder (`wanted`, for containers whose rule
lists evict); a server is ended in the surveying thread, on a state that is a moment old, and only after asking again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from agent.core.clock import NS_PER_SECOND
from agent.core.errors import WardenError
from agent.core.model import ContainerKey, DeviceUuid, ProcessId, Snapshot
from agent.nvml.xid import XidSeverity, severity_of
from enforce.actuators.mps.model import MpsClient, MpsControl, MpsServer
from enforce.actuators.mps.survey import MpsEndpoint, MpsState, MpsSurvey
from enforce.policy.model import OfflineRule
from enforce.workloads import Workload, processes_of

GRACE_NS = 30 * NS_PER_SECOND  # for clients that were asked to end, and for the server to recover by itself


@dataclass(frozen=True, slots=True)
class ClientState:
    """One client as it is now. `may_stop`: of an offline container whose rule lists evict."""

    tgid: int
    container: ContainerKey | None  # None: unknown
    may_stop: bool
    devices: frozenset[DeviceUuid] | None  # None: unknown


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server as it is now. `endangered`: every client that ending it would end, perhaps other servers' too."""

    faulted: bool
    broken: frozenset[DeviceUuid]  # devices on which every context of this server is lost
    clients: tuple[ClientState, ...]
    endangered: tuple[ClientState, ...]


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """A fault that is not over."""

    since_ns: int
    server_ended: bool = False


@dataclass(frozen=True, slots=True)
class FaultResponse:
    """What to do: which containers to evict, whether to end the server, and why."""

    stop: frozenset[ContainerKey] = frozenset()
    end_server: bool = False
    reason: str = ""


def respond(
    record: FaultRecord | None, server: ServerState, now_ns: int, grace_ns: int = GRACE_NS
) -> tuple[FaultRecord | None, FaultResponse]:
    """For one look at the server. None: it has no fault."""
    if not server.faulted:
        return None, FaultResponse()
    record = record or FaultRecord(now_ns)
    stop = frozenset(client.container for client in server.clients if client.may_stop and client.container is not None)
    waited = now_ns - record.since_ns >= grace_ns
    if not waited or record.server_ended:
        return record, FaultResponse(stop, reason="MPS server fault: offline clients are asked to go")
    safe = [client for client in server.endangered if not is_lost(client, server.broken)]
    if safe:
        reason = f"MPS server fault: not ended, process {safe[0].tgid} may still be well"
        return record, FaultResponse(stop, reason=reason)
    return replace(record, server_ended=True), FaultResponse(stop, True, "MPS server fault: all is lost there, ended")


def is_lost(client: ClientState, broken: Collection[DeviceUuid]) -> bool:
    """Whether all of its contexts are known to be lost."""
    return bool(client.devices) and client.devices is not None and client.devices <= frozenset(broken)


_log = logging.getLogger(__name__)
_EVICT = "evict"
RECENT_NS = 60 * NS_PER_SECOND  # an XID this long ago may be what the fault is about
Key = tuple[ProcessId, str]  # daemon, server


class FaultMonitor:
    """Owns the record of each server's fault. `look` and `wanted` are for the deciding thread.

    A container that still launches work is well, whatever the XIDs say.
    """

    def __init__(self, survey: MpsSurvey, grace_ns: int = GRACE_NS) -> None:
        self._survey, self._grace_ns = survey, grace_ns
        self._workloads: Mapping[ContainerKey, Workload] = {}
        self._xids: dict[DeviceUuid, Mapping[int, int]] = {}
        self._last_xid_ns: dict[tuple[DeviceUuid, XidSeverity], int] = {}
        self._lost: frozenset[DeviceUuid] = frozenset()
        self._working: frozenset[ContainerKey] = frozenset()
        self._records: dict[Key, FaultRecord] = {}
        self.wanted: Mapping[ContainerKey, str] = {}  # which containers to evict, and why
        self.ended = 0
        survey.listeners.append(self.watch)

    def losses(self) -> dict[str, int]:
        """For Snapshot.lost."""
        return {"mps:server_ended": self.ended}

    def look(self, workloads: Mapping[ContainerKey, Workload], snapshot: Snapshot) -> None:
        """Takes in XIDs, and has MPS surveyed where a rule lists evict. Does not block."""
        self._workloads = workloads
        for reading in snapshot.devices:
            uuid = reading.device.uuid
            before = self._xids.get(uuid, reading.xid_counts)  # those counted before the first look are old
            for xid, count in reading.xid_counts.items():
                if count > before.get(xid, 0):
                    self._last_xid_ns[uuid, severity_of(xid)] = snapshot.at_ns
            self._xids[uuid] = reading.xid_counts
        self._lost = frozenset(reading.device.uuid for reading in snapshot.devices if reading.lost)
        self._working = frozenset(
            row.container.key
            for row in snapshot.containers
            if any(usage.launches_per_second or usage.sm_ratio for usage in row.usage)
        )
        if self._records or any(_may_stop(workload) for workload in workloads.values()):
            self._survey.refresh(process for workload in workloads.values() for process in processes_of(workload))

    def watch(self, state: MpsState) -> None:
        """Decides for each server, in the surveying thread."""
        wanted: dict[ContainerKey, str] = {}
        records: dict[Key, FaultRecord] = {}
        for endpoint in state.endpoints:
            for server in endpoint.servers:
                key = (endpoint.daemon.process, server.name)
                record, response = self._respond(endpoint, server, self._records.get(key), state.at_ns)
                if record:
                    records[key] = record
                wanted |= dict.fromkeys(response.stop, response.reason)
        self._records, self.wanted = records, wanted

    def _respond(
        self, endpoint: MpsEndpoint, server: MpsServer, record: FaultRecord | None, now_ns: int
    ) -> tuple[FaultRecord | None, FaultResponse]:
        control = endpoint.control
        if control is None or not server.faulted:
            return None, FaultResponse()
        after, response = respond(record, self._server_state(endpoint, control, server, now_ns), now_ns, self._grace_ns)
        if record is None or response.end_server:
            _log.warning("%s (server %s of daemon %d)", response.reason, server.name, endpoint.daemon.process.tgid)
        if response.end_server and not self._end(control, server, endpoint.clients):
            return record, response  # judged anew at the next look
        return after, response

    def _end(self, control: MpsControl, server: MpsServer, judged: Collection[MpsClient]) -> bool:
        """False where a client has connected that was not judged."""
        try:
            if any(now.name == server.name and now.faulted for now in control.servers()):
                newer = set(control.clients()) - set(judged)
                if control.protocol == 3:  # only this server's end with it
                    newer = {client for client in newer if client.server == server.name}
                if newer:
                    _log.warning(
                        "MPS server %s is not ended: process %d has connected",
                        server.name,
                        min(one.tgid for one in newer),
                    )
                    return False
                control.shut_down(server)
                self.ended += 1
                _log.warning("MPS server %s ended; what supervises MPS here has to start it again", server.name)
        except WardenError as error:
            _log.warning("MPS server %s could not be ended: %s", server.name, error)
        return True

    def _server_state(self, endpoint: MpsEndpoint, control: MpsControl, server: MpsServer, now_ns: int) -> ServerState:
        where: dict[int, frozenset[DeviceUuid]] = {}
        for uuid, tgids in endpoint.device_clients:
            for tgid in tgids:
                where[tgid] = where.get(tgid, frozenset()) | {uuid}
        clients = tuple(
            (client.server, self._client_state(client, endpoint, where.get(client.tgid))) for client in endpoint.clients
        )
        own = tuple(client for name, client in clients if name == server.name)
        broken, fatal = self._broken(endpoint, now_ns), self._fatal(endpoint, now_ns)
        faulted = {other.name for other in endpoint.servers if other.faulted}
        # The fault's device is lost to this server's clients; to a healthy server's only if it is to everything.
        all_of_daemon = tuple(
            client if name in faulted or is_lost(client, fatal) else replace(client, devices=None)
            for name, client in clients
        )
        endangered = own if control.protocol == 3 else all_of_daemon
        return ServerState(server.faulted, broken, own, endangered)

    def _fatal(self, endpoint: MpsEndpoint, now_ns: int) -> frozenset[DeviceUuid]:
        """Devices that are lost or broken, whatever the server."""
        devices = (uuid for uuid, _ in endpoint.ordinals)
        return frozenset(
            uuid for uuid in devices if uuid in self._lost or self._is_recent(uuid, XidSeverity.FATAL, now_ns)
        )

    def _broken(self, endpoint: MpsEndpoint, now_ns: int) -> frozenset[DeviceUuid]:
        """Devices on which all is lost: those that are lost or broken, and the one that the fault must be about."""
        devices = frozenset(uuid for uuid, _ in endpoint.ordinals)
        fatal = self._fatal(endpoint, now_ns)
        application = {uuid for uuid in devices if self._is_recent(uuid, XidSeverity.APPLICATION, now_ns)}
        suspects = fatal | application or devices
        return frozenset(fatal | (suspects if len(suspects) == 1 else set()))

    def _client_state(
        self, client: MpsClient, endpoint: MpsEndpoint, devices: frozenset[DeviceUuid] | None
    ) -> ClientState:
        process = next((process for process, other in endpoint.connected if other == client), None)
        for workload in self._workloads.values():
            if process in processes_of(workload):
                key = workload.container.key
                return ClientState(client.tgid, key, _may_stop(workload), None if key in self._working else devices)
        return ClientState(client.tgid, None, False, devices)

    def _is_recent(self, device: DeviceUuid, severity: XidSeverity, now_ns: int) -> bool:
        at_ns = self._last_xid_ns.get((device, severity))
        return at_ns is not None and now_ns - at_ns < RECENT_NS


def _may_stop(workload: Workload) -> bool:
    rule = workload.classification.rule
    return isinstance(rule, OfflineRule) and _EVICT in rule.ladder

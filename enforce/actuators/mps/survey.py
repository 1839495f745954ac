# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The state of MPS: daemons, servers, clients, and which known processes reach which daemon.

Asking takes time and a daemon may hang, so a background job surveys, and the deciding thread reads the last state. A
daemon that does not answer is in the state too, with its error. The functions below `MpsSurvey` say which daemon a
container's clients go to, and which other containers a limit there would reach; they are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import GoneError, SetupError
from agent.core.model import ContainerKey, DeviceUuid, ProcessId
from agent.core.worker import BackgroundJob
from agent.node.procfs import Procfs
from enforce.actuators.mps.clients import seen_as
from enforce.actuators.mps.daemons import daemons, reaches
from enforce.actuators.mps.model import Daemon, MpsClient, MpsControl, MpsError, MpsServer, Scope
from enforce.actuators.mps.protocol3 import connect
from enforce.model import Subject
from enforce.policy.model import OfflineRule
from enforce.workloads import Workload, processes_of

EACH_NS = 2 * NS_PER_SECOND
TIMEOUT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class MpsEndpoint:
    """One daemon as it was found. `reached`: known processes → the scopes that their next context would be in."""

    daemon: Daemon
    error: str | None = None
    control: MpsControl | None = None
    servers: tuple[MpsServer, ...] = ()
    clients: tuple[MpsClient, ...] = ()
    scopes: tuple[Scope, ...] = ()
    ordinals: tuple[tuple[DeviceUuid, int], ...] = ()
    device_clients: tuple[tuple[DeviceUuid, tuple[int, ...]], ...] = ()  # pids as the daemon sees them
    reached: tuple[tuple[ProcessId, frozenset[Scope]], ...] = ()
    connected: tuple[tuple[ProcessId, MpsClient], ...] = ()


@dataclass(frozen=True, slots=True)
class MpsState:
    """All daemons, at one time."""

    at_ns: int
    endpoints: tuple[MpsEndpoint, ...] = ()


class MpsSurvey:
    """Owns the last state. `refresh` and `state` are for the deciding thread."""

    def __init__(self, proc: Procfs, each_ns: int = EACH_NS) -> None:
        self._proc, self._each_ns = proc, each_ns
        self._job = BackgroundJob("mps-survey", self._survey, failed="a survey of MPS")
        self._processes: tuple[ProcessId, ...] = ()
        self.state: MpsState | None = None
        self.listeners: list[Callable[[MpsState], None]] = []  # called by the surveying thread

    @property
    def failures(self) -> int:
        """Surveys that failed."""
        return self._job.failures

    def refresh(self, processes: Iterable[ProcessId]) -> None:
        """Begins a survey, if none is under way and the last one is old. `processes`: those to look for."""
        if self._job.running:
            return
        if self.state is not None and monotonic_ns() - self.state.at_ns < self._each_ns:
            return
        self._processes = tuple(processes)
        self._job.start()

    def _survey(self) -> None:
        self.state = state = survey(self._proc, self._processes, monotonic_ns())
        for listener in self.listeners:
            listener(state)


def survey(proc: Procfs, processes: tuple[ProcessId, ...], at_ns: int) -> MpsState:
    """Asks every daemon now. Blocks for as long as they take."""
    return MpsState(at_ns, tuple(_endpoint(daemon, proc, processes) for daemon in daemons(proc)))


def _endpoint(daemon: Daemon, proc: Procfs, processes: tuple[ProcessId, ...]) -> MpsEndpoint:
    if daemon.contested:
        return MpsEndpoint(daemon, f"MPS is left alone: {daemon.contested_error}")
    try:
        control = connect(daemon, TIMEOUT_SECONDS)
        clients, scopes = control.clients(), control.scopes()
        connected = tuple(_connected(clients, daemon, proc, processes))
        return MpsEndpoint(
            daemon,
            None,
            control,
            control.servers(),
            clients,
            scopes,
            tuple(control.devices().items()),
            tuple(control.device_clients().items()),
            tuple((process, _reached(process, control, scopes, proc)) for process in processes),
            connected,
        )
    except MpsError as error:
        return MpsEndpoint(daemon, str(error))


def _connected(
    clients: tuple[MpsClient, ...], daemon: Daemon, proc: Procfs, processes: tuple[ProcessId, ...]
) -> Iterable[tuple[ProcessId, MpsClient]]:
    by_tgid = {client.tgid: client for client in clients}
    for process in processes:
        try:
            tgid = seen_as(process, daemon, proc)
        except (GoneError, SetupError):
            continue
        if tgid in by_tgid:
            yield process, by_tgid[tgid]


def _reached(process: ProcessId, control: MpsControl, scopes: tuple[Scope, ...], proc: Procfs) -> frozenset[Scope]:
    try:
        if control.protocol == 2:
            return frozenset(scopes) if reaches(process, control.daemon, proc) else frozenset()
        return frozenset(scope for scope in scopes if _in_namespace(process, control.daemon, scope, proc))
    except (GoneError, SetupError):
        return frozenset()


def _in_namespace(process: ProcessId, daemon: Daemon, scope: Scope, proc: Procfs) -> bool:
    own = [f"/{scope.server}/{scope.space}"]
    if scope.space == "default":
        own += [f"/{scope.server}", ""]
    return any(reaches(process, daemon, proc, below) for below in own)


RUNG = "mps"
Workloads = Mapping[ContainerKey, Workload]


def may_be_limited(workload: Workload) -> bool:
    """Whether the policy lets this container's clients be limited."""
    rule = workload.classification.rule
    return isinstance(rule, OfflineRule) and RUNG in rule.ladder


def endpoint_of(subject: Subject, state: MpsState) -> MpsEndpoint | None:
    """The daemon that the container's processes are connected to, or would connect to; None: no daemon."""
    mine = set(subject.processes)
    for endpoint in state.endpoints:
        if any(process in mine for process, _ in endpoint.connected):
            return endpoint
    for endpoint in state.endpoints:
        if any(process in mine and scopes for process, scopes in endpoint.reached):
            return endpoint
    return None


def scopes_of(subject: Subject, endpoint: MpsEndpoint) -> frozenset[Scope]:
    """Where its clients are; while it has none, where they could go."""
    mine = set(subject.processes)
    now = {Scope(client.server, client.space) for process, client in endpoint.connected if process in mine}
    could = (scope for process, scopes in endpoint.reached if process in mine for scope in scopes)
    return frozenset(now) or frozenset(could)


def bystander(endpoint: MpsEndpoint, scopes: frozenset[Scope], workloads: Workloads) -> str | None:
    """A container that may not be limited, but would be as soon as it connects.

    In a namespace (protocol 3) it need not be there at all; with protocol 2 its clients of now are safe.
    """
    apart = endpoint.control is not None and endpoint.control.protocol == 3
    connected = {process for process, _ in endpoint.connected}
    reached = dict(endpoint.reached)
    for workload in workloads.values():
        for process in processes_of(workload) if not may_be_limited(workload) else ():
            if (apart or process not in connected) and reached.get(process, frozenset()) & scopes:
                return workload.container.name
    return None


def obstacle_to_limits(subject: Subject, state: MpsState, workloads: Workloads) -> str | None:
    """Why no limit may be set for the container's clients, as a sentence for people."""
    if not state.endpoints:
        return "no MPS control daemon runs here: start nvidia-cuda-mps-control -d, or take mps out of the ladder"
    endpoint = endpoint_of(subject, state)
    if endpoint is None:
        errors = [endpoint.error for endpoint in state.endpoints if endpoint.error]
        return errors[0] if errors else "its processes reach none of the MPS control daemons that run here"
    scopes = scopes_of(subject, endpoint)
    if len(scopes) != 1:
        servers = ", ".join(sorted({scope.server for scope in scopes}))
        return f"several users' MPS servers ({servers}): not known which its next client goes to"
    other = bystander(endpoint, scopes, workloads)
    if other is None:
        return None
    if endpoint.control is not None and endpoint.control.protocol == 3:
        return f"{other} is in the same MPS namespace: give offline containers one of their own"
    return f"{other} reaches the MPS daemon and is not connected yet: it would be limited too"

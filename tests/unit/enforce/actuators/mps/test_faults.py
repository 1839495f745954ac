# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Faults of MPS servers: offline clients are asked first, and a server never ends while a client may be well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from agent.containers.gpu_processes import GpuProcess
from agent.core.model import (
    Container,
    ContainerKey,
    ContainerUsage,
    Device,
    DeviceReading,
    DeviceUuid,
    Process,
    ProcessId,
    Snapshot,
    Usage,
)
from agent.node.procfs import Procfs
from enforce.actuators.mps.faults import GRACE_NS, ClientState, FaultMonitor, FaultRecord, ServerState, is_lost, respond
from enforce.actuators.mps.model import Daemon, MpsClient, MpsServer
from enforce.actuators.mps.survey import MpsEndpoint, MpsState, MpsSurvey
from enforce.policy.load import parse
from enforce.workloads import Workload, workloads_of

GPU_0, GPU_1 = DeviceUuid("GPU-0"), DeviceUuid("GPU-1")
BATCH = ContainerKey("batch")
clients = st.builds(
    ClientState,
    st.integers(1, 5),
    st.none() | st.sampled_from([BATCH, ContainerKey("chat")]),
    st.booleans(),
    st.none() | st.frozensets(st.sampled_from([GPU_0, GPU_1])),
)
groups = st.lists(clients, max_size=4).map(tuple)
servers = st.builds(ServerState, st.booleans(), st.frozensets(st.sampled_from([GPU_0, GPU_1])), groups, groups)


@given(st.lists(st.tuples(servers, st.integers(0, 2 * GRACE_NS)), max_size=20))
def test_a_server_never_ends_while_a_client_is_not_known_to_be_lost(steps: list[tuple[ServerState, int]]) -> None:
    record: FaultRecord | None = None
    now = 0
    for server, pause_ns in steps:
        now += pause_ns
        before = record
        record, response = respond(record, server, now)
        if response.end_server:
            assert server.faulted
            assert all(is_lost(client, server.broken) for client in server.endangered)
            assert before is not None
            assert now - before.since_ns >= GRACE_NS
            assert not before.server_ended
        for container in response.stop:
            assert any(client.container == container and client.may_stop for client in server.clients)
        if not server.faulted:
            assert record is None
            assert not response.stop


def test_offline_clients_are_asked_first_and_the_server_ends_once_after_the_grace() -> None:
    client = ClientState(1, BATCH, True, frozenset({GPU_0}))
    server = ServerState(True, frozenset({GPU_0}), (client,), (client,))
    record, response = respond(None, server, 0)
    assert set(response.stop) == {BATCH}
    assert not response.end_server
    record, response = respond(record, server, GRACE_NS)
    assert response.end_server
    assert not respond(record, server, 3 * GRACE_NS)[1].end_server


def test_a_client_on_another_device_keeps_the_server_alive() -> None:
    online = ClientState(2, ContainerKey("chat"), False, frozenset({GPU_0, GPU_1}))
    server = ServerState(True, frozenset({GPU_0}), (), (online,))
    response = respond(FaultRecord(0), server, 10 * GRACE_NS)[1]
    assert not response.end_server
    assert "process 2 may still be well" in response.reason


POLICY = """
version: 1
online: [{name: chat, match: {container: chat}, slo: {signal: gpu_wait, quantile: 0.9, target: 5ms, window: 1s}}]
offline: [{name: batch, match: {container: batch}, ladder: [pace, evict]}]
"""
BATCH_CLIENT, CHAT_CLIENT = MpsClient(10, "7"), MpsClient(20, "7")
DAEMON = Daemon(ProcessId(5, 1), "/run/mps", "nvidia-cuda-mps-control")


@dataclass
class Control:
    """A daemon whose server 7 has met a fault; `others` are well."""

    faulted: bool = True
    ended: list[str] = field(default_factory=list)
    protocol: int = 2
    others: tuple[MpsServer, ...] = ()
    connected: tuple[MpsClient, ...] = (BATCH_CLIENT, CHAT_CLIENT)

    def servers(self) -> tuple[MpsServer, ...]:
        return (MpsServer("7", 7, "FAULT" if self.faulted else "ACTIVE"), *self.others)

    def clients(self) -> tuple[MpsClient, ...]:
        return self.connected

    def shut_down(self, server: MpsServer) -> None:
        self.ended.append(server.name)


class Stage:
    """Two containers, two devices, and a daemon; `watch` is one look."""

    def __init__(self) -> None:
        self.survey = MpsSurvey(Procfs("/nonexistent"))
        self.faults = FaultMonitor(self.survey)
        self.control = Control()
        self.readings = {uuid: DeviceReading(Device(0, uuid, "GPU", "0", 1, 1)) for uuid in (GPU_0, GPU_1)}
        self.on: dict[DeviceUuid, tuple[int, ...]] = {GPU_0: (10, 20)}
        self.at_ns = 0
        self.working: tuple[str, ...] = ()
        self.clients = (BATCH_CLIENT, CHAT_CLIENT)
        self.faults.look({}, self.snapshot())  # before anything happens

    def xid(self, device: DeviceUuid, xid: int) -> None:
        self.readings[device] = replace(self.readings[device], xid_counts={xid: 1})

    def workloads_of(self) -> dict[ContainerKey, Workload]:
        members = []
        for name, tgid in (("batch", 10), ("chat", 20)):
            container = Container(ContainerKey(name), name, "docker")
            members.append(GpuProcess(Process(ProcessId(tgid, 1), name, "root", container.key), container, ()))
        return workloads_of(parse(POLICY, "p"), members, Snapshot(0, 0, 0))

    def rows(self) -> tuple[ContainerUsage, ...]:
        usage = Usage(GPU_0, None, None, None, None, None, 100.0)
        return tuple(
            ContainerUsage(Container(ContainerKey(name), name, "docker"), (usage,), ()) for name in self.working
        )

    def snapshot(self) -> Snapshot:
        return Snapshot(self.at_ns, 0, 0, tuple(self.readings.values()), self.rows())

    def watch(self, seconds: int) -> Mapping[ContainerKey, str]:
        self.at_ns += seconds * 10**9
        here = self.workloads_of()
        self.survey.state = MpsState(1 << 62)  # so new that no survey begins
        self.faults.look(here, self.snapshot())
        connected = tuple((ProcessId(client.tgid, 1), client) for client in self.clients)
        place = MpsEndpoint(
            DAEMON,
            None,
            cast(Any, self.control),
            self.control.servers(),
            self.clients,
            ordinals=((GPU_0, 0), (GPU_1, 1)),
            device_clients=tuple(self.on.items()),
            connected=connected,
        )
        self.faults.watch(MpsState(self.at_ns, (place,)))
        return self.faults.wanted


def test_after_a_fault_offline_containers_are_to_go_and_the_server_ends_when_all_on_its_device_is_lost() -> None:
    stage = Stage()
    stage.xid(GPU_0, 31)
    assert set(stage.watch(1)) == {BATCH}
    assert stage.control.ended == []
    stage.watch(40)
    assert stage.control.ended == ["7"]
    assert stage.faults.losses() == {"mps:server_ended": 1}
    stage.control.faulted = False
    assert stage.watch(1) == {}


def test_an_online_client_that_still_works_keeps_the_server() -> None:
    stage = Stage()
    stage.xid(GPU_0, 31)
    stage.working = ("chat",)
    for _ in range(3):
        assert set(stage.watch(40)) == {BATCH}
    assert stage.control.ended == []


def test_an_online_client_on_another_device_keeps_the_server() -> None:
    stage = Stage()
    stage.on = {GPU_0: (10,), GPU_1: (20,)}
    stage.xid(GPU_0, 31)
    stage.watch(1)
    stage.watch(40)
    assert stage.control.ended == []


def test_where_two_devices_met_errors_it_is_unknown_which_the_fault_is_about() -> None:
    stage = Stage()
    stage.xid(GPU_0, 31)
    stage.xid(GPU_1, 31)
    stage.watch(1)
    stage.watch(40)
    assert stage.control.ended == []


def test_an_xid_from_before_the_first_look_is_not_what_a_fault_is_about() -> None:
    stage = Stage()
    stage.xid(GPU_1, 31)
    stage.faults = FaultMonitor(stage.survey)  # as for another policy
    stage.faults.look({}, stage.snapshot())
    stage.xid(GPU_0, 31)
    stage.watch(1)
    stage.watch(40)
    assert stage.control.ended == ["7"]


def test_a_lost_device_speaks_for_itself() -> None:
    stage = Stage()
    stage.on = {GPU_0: (10,), GPU_1: (20,)}
    stage.readings = {uuid: replace(reading, lost=True) for uuid, reading in stage.readings.items()}
    stage.watch(1)
    stage.watch(40)
    assert stage.control.ended == ["7"]


def test_an_idle_client_of_a_healthy_server_keeps_the_daemon_though_it_is_on_the_same_device() -> None:
    stage = Stage()
    stage.control.others = (MpsServer("8", 8, "ACTIVE"),)
    stage.clients = stage.control.connected = (BATCH_CLIENT, MpsClient(20, "8"))
    stage.xid(GPU_0, 31)
    stage.watch(1)
    stage.watch(40)
    assert stage.control.ended == []
    stage.readings[GPU_0] = replace(stage.readings[GPU_0], lost=True)  # then it is lost to every server
    stage.watch(1)
    assert stage.control.ended == ["7"]


def test_a_client_that_connected_since_the_look_keeps_the_server_until_it_was_looked_at() -> None:
    stage = Stage()
    stage.xid(GPU_0, 31)
    stage.watch(1)
    stage.control.connected = (BATCH_CLIENT, CHAT_CLIENT, MpsClient(30, "7"))
    stage.watch(40)
    assert stage.control.ended == []
    stage.control.connected = (BATCH_CLIENT, CHAT_CLIENT)  # it has gone
    stage.watch(1)
    assert stage.control.ended == ["7"]


def test_a_server_that_came_back_meanwhile_is_not_ended() -> None:
    stage = Stage()
    stage.xid(GPU_0, 31)
    stage.watch(1)
    asked = iter([(MpsServer("7", 7, "FAULT"),), (MpsServer("7", 7, "ACTIVE"),)])
    stage.control.servers = lambda: next(asked)  # type: ignore[method-assign]
    stage.watch(40)
    assert stage.control.ended == []

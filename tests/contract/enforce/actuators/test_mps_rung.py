# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The rung `mps` against simulated daemons of four drivers: only later clients are limited; everything is put back."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.containers.gpu_processes import GpuProcess
from agent.core.errors import GoneError
from agent.core.model import (
    Container,
    ContainerKey,
    ContainerUsage,
    Device,
    DeviceReading,
    DeviceUuid,
    Process,
    Provenance,
    Snapshot,
    Usage,
)
from agent.node.procfs import Procfs
from enforce.actuators.executor import RungExecutor
from enforce.actuators.mps.restore import restore
from enforce.actuators.mps.rung import Mps
from enforce.actuators.mps.survey import MpsSurvey
from enforce.actuators.undo import release_all
from enforce.ledger.entries import UndoOutcome
from enforce.ledger.ledger import Ledger, read
from enforce.model import Subject
from enforce.policy.load import parse
from enforce.policy.model import OfflineRule, Policy
from enforce.workloads import Workload, workloads_of
from tools.harness.node import Node, simulated_node
from tools.harness.wait import until

PROC = Procfs()
PATIENCE_SECONDS = 60.0
POLICY = """
version: 1
enforce: true
online: [{name: chat, match: {container: online}, slo: {signal: gpu_wait, quantile: 0.9, target: 5ms, window: 1s}}]
offline:
  - {name: batch, match: {container: "offline*"}, limits: {memory: 2GiB}, ladder: [pace, mps]}
"""


class Stage:
    """A node with MPS, the containers on it, and the rung that looks at them."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.node, self.ledger_path = node, folder / "ledger.jsonl"
        self.policy: Policy = parse(POLICY, "p")
        self.device = DeviceUuid(str(node.status()[0]["uuid"]))
        self.members: list[GpuProcess] = []
        self.mps = Mps(PROC, MpsSurvey(PROC, each_ns=50_000_000))
        self.ledger = Ledger(self.ledger_path)
        self.rungs = RungExecutor({"mps": self.mps}, self.ledger)
        self.now_ns = 0

    def start(self, name: str, *arguments: str, mps: bool = True) -> subprocess.Popen[str]:
        """A container with one client of the GPU."""
        extra = {} if mps else {"CUDA_MPS_PIPE_DIRECTORY": str(self.node.folder / "no-mps")}
        options = ["--seconds", "0", "--kernel-us", "100", "--kernels", "10", *arguments]
        client = self.node.start("offline", options, extra)
        assert client.stdout
        assert client.stdout.readline() == "ready\n"
        self.join(name, client.pid)
        return client

    def idle(self) -> subprocess.Popen[str]:
        """A process that has the daemon's pipe in its environment and does not connect: it waits for commands."""
        return self.node.start("nvidia-cuda-mps-control")

    def join(self, name: str, tgid: int) -> None:
        container = Container(ContainerKey(name), name, "docker")
        process = Process(PROC.process_id(tgid), name, "root", container.key)
        self.members.append(GpuProcess(process, container, (self.device,)))

    def workloads_of(self) -> dict[ContainerKey, Workload]:
        return workloads_of(self.policy, self.members, Snapshot(0, 0, 0))

    def look(self, online_ratio: float = 0.6) -> None:
        """As each decision does."""
        self.now_ns += 1_000_000_000
        container = Container(ContainerKey("online"), "online", "docker")
        usage = Usage(self.device, online_ratio, Provenance.MEASURED, None, None, None, None)
        reading = DeviceReading(Device(0, self.device, "GPU", "00:01", 132, 80 << 30))
        rows = (ContainerUsage(container, (usage,), ()),)
        self.mps.look(self.workloads_of(), Snapshot(self.now_ns, 0, 0, (reading,), rows))

    def subject(self, name: str = "offline") -> Subject:
        seat = self.workloads_of()[ContainerKey(name)]
        rule = seat.classification.rule
        assert isinstance(rule, OfflineRule)
        processes = tuple(member.process.id for member in seat.members)
        return Subject(seat.container, processes, frozenset({self.device}), rule)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Looks at the MPS servers, as each decision does, until the condition holds."""

        def met() -> bool:
            if condition():
                return True
            self.look()
            return False

        until(met, what)

    def want(self, *names: str) -> None:
        """Until the rungs are where they are wanted."""
        obstacle(self)  # it has been looked at: what fails is tried again after seconds only
        key = ContainerKey("offline")
        wanted = {key: (self.subject(), frozenset(names))}

        def there() -> bool:
            self.rungs.want(wanted)
            return self.rungs.in_force(key) == frozenset(names)

        self.until(there, f"the rungs {names} in force")

    def answer(self, command: str) -> str:
        (server,) = self.node.mps_control("get_server_list").stdout.split()
        return self.node.mps_control(command.replace("SERVER", server)).stdout.strip()

    def limits(self) -> tuple[str, str, str]:
        return (
            self.answer("get_active_thread_percentage SERVER"),
            self.answer("get_device_pinned_mem_limit SERVER 0"),
            self.answer("get_default_client_priority"),
        )


@pytest.fixture(params=["535", "550", "555", "580"])
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """With the daemon of each driver."""
    monkeypatch.setenv("GPUSIM_MPS_VERSION", request.param)
    with simulated_node(tmp_path / "gpu") as node, node.mps_daemon():
        for name, value in node.environment.items():
            monkeypatch.setenv(name, value)
        stage = Stage(node, tmp_path)
        yield stage
        stage.rungs.release_all()


def test_later_clients_get_what_the_online_side_leaves_and_release_puts_everything_back(stage: Stage) -> None:
    stage.start("online")
    stage.start("offline")
    for _ in range(20):
        stage.look(online_ratio=0.6)
    stage.want("mps")
    assert stage.limits() == ("40.0", "2G", "1")
    assert stage.answer("get_default_active_thread_percentage") == "100.0"
    (entry,) = read(stage.ledger_path)
    assert entry.act == "mps"
    stage.want()
    assert stage.limits() == ("100.0", "80G", "0")
    assert read(stage.ledger_path) == []


def test_a_quota_that_is_no_whole_gibibyte_is_set_and_put_back(stage: Stage) -> None:
    (batch,) = stage.policy.offline
    limits = replace(batch.limits, memory_bytes=1536 << 20)
    stage.policy = replace(stage.policy, offline=(replace(batch, limits=limits),))
    stage.start("online")
    stage.start("offline")
    for _ in range(20):
        stage.look()
    stage.want("mps")
    assert stage.limits() == ("40.0", "1G", "1")
    assert stage.mps.losses()["mps:foreign"] == 0
    stage.want()
    assert stage.limits() == ("100.0", "80G", "0")
    assert read(stage.ledger_path) == []


def test_a_crash_leaves_in_the_ledger_all_that_undoing_needs(stage: Stage) -> None:
    stage.start("online")
    stage.start("offline")
    for _ in range(20):
        stage.look()
    stage.want("mps")
    (released,) = release_all(stage.ledger_path)
    assert released.outcome is UndoOutcome.RESTORED
    assert stage.limits() == ("100.0", "80G", "0")
    assert read(stage.ledger_path) == []


def test_that_a_false_daemon_has_ended_undoes_nothing_while_its_pipe_is_served(stage: Stage) -> None:
    stage.start("online")
    stage.start("offline")
    for _ in range(20):
        stage.look()
    stage.want("mps")
    (entry,) = read(stage.ledger_path)
    with subprocess.Popen(["true"]) as ended:
        false = PROC.process_id(ended.pid)
    with pytest.raises(GoneError):  # nothing is known of another pipe
        restore(replace(entry, process=false, place=entry.place.replace('"pipe":[', '"pipe":[1')), PROC)
    assert restore(replace(entry, process=false), PROC) is UndoOutcome.RESTORED
    assert stage.limits() == ("100.0", "80G", "0")


def test_what_another_writer_set_meanwhile_stays(stage: Stage) -> None:
    stage.start("online")
    stage.start("offline")
    for _ in range(20):
        stage.look()
    stage.want("mps")
    stage.answer("set_active_thread_percentage SERVER 70")
    stage.until(lambda: stage.mps.losses()["mps:foreign"] == 1, "a foreign setting")
    (released,) = release_all(stage.ledger_path)
    assert released.outcome is UndoOutcome.FOREIGN
    assert stage.limits() == ("70.0", "80G", "0")


def test_limits_that_are_as_strict_already_are_left_as_they_are(stage: Stage) -> None:
    stage.start("online", mps=False)
    stage.start("offline")
    stage.answer("set_active_thread_percentage SERVER 20")
    for _ in range(20):
        stage.look()
    stage.want("mps")
    assert stage.limits() == ("20.0", "2G", "1")
    stage.want()
    assert stage.limits() == ("20.0", "80G", "0")


def obstacle(stage: Stage, name: str = "offline") -> str:
    """Once MPS has been looked at."""
    stage.until(lambda: "not been surveyed" not in (stage.mps.obstacle(stage.subject(name)) or ""), "a look")
    return stage.mps.obstacle(stage.subject(name)) or ""


def test_nothing_is_set_while_an_online_process_could_still_connect(stage: Stage) -> None:
    stage.start("offline")
    stage.join("online", stage.idle().pid)
    assert "online reaches the MPS daemon and is not connected yet" in obstacle(stage)


def test_limits_are_put_back_when_an_online_process_comes(stage: Stage) -> None:
    stage.start("online", mps=False)
    stage.start("offline")
    for _ in range(20):
        stage.look()
    stage.want("mps")
    assert stage.limits()[2] == "1"
    stage.join("online", stage.idle().pid)
    stage.until(lambda: stage.limits() == ("100.0", "80G", "0"), "the limits of before")
    assert stage.mps.losses()["mps:caught"] == 0


def test_an_online_client_that_was_caught_is_reported(stage: Stage) -> None:
    stage.start("online", mps=False)
    stage.start("offline")
    for _ in range(20):
        stage.look()
    stage.want("mps")
    stage.start("online")
    stage.until(lambda: stage.mps.losses()["mps:caught"] == 1, "a caught client")


def test_a_container_that_does_not_go_through_mps_is_an_obstacle(stage: Stage) -> None:
    stage.start("offline", mps=False)
    assert "reach none of the MPS control daemons" in obstacle(stage)


def test_one_daemon_is_limited_for_one_container_at_a_time(stage: Stage) -> None:
    stage.start("online", mps=False)
    stage.start("offline")
    stage.start("offline-2")
    for _ in range(20):
        stage.look()
    stage.want("mps")
    assert "limited for offline already" in obstacle(stage, "offline-2")
    stage.want()
    stage.until(lambda: stage.mps.obstacle(stage.subject("offline-2")) is None, "no obstacle")


def test_an_offline_rule_without_the_rung_is_a_bystander_too(stage: Stage) -> None:
    text = POLICY.replace("ladder: [pace, mps]", "ladder: [pace]")
    stage.start("offline")
    stage.join("offline-2", stage.idle().pid)
    (batch,) = stage.policy.offline
    other = replace(parse(text, "p").offline[0], name="other", match=replace(batch.match, container=("offline-2",)))
    mine = replace(batch, match=replace(batch.match, container=("offline",)))
    stage.policy = replace(stage.policy, offline=(mine, other))
    assert "offline-2 reaches the MPS daemon" in obstacle(stage)

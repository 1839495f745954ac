# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One decision for many containers: which one rules, which are held, and how the share is split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.containers.gpu_processes import GpuProcess
from agent.core.model import Container, ContainerKey, DeviceUuid, Process, ProcessId
from enforce.controller.decision import DecisionInputs, Decisions, decide
from enforce.controller.inputs import Counters, Demand
from enforce.model import FULL, CopyLevel, Level, Reading
from enforce.policy.matching import Match
from enforce.policy.model import Classification, Limits, OfflineRule, OnlineRule, Role, Slo, Tuning
from enforce.workloads import Workload

MS = 1_000_000
TUNING = Tuning(100 * MS, 20 * MS, MS // 5, 2000 * MS, 5000 * MS)
SLO = Slo("gpu_wait", 0.99, 10 * MS, 10_000 * MS, 20)
FIXED = OfflineRule("batch", Match(), "fixed", 0.8, 1.0, Limits(None, 0.05, 200 * MS, 4 * MS), ladder=("gate", "pace"))
GPU_0, GPU_1 = DeviceUuid("GPU-0"), DeviceUuid("GPU-1")
SLOTS = {GPU_0: 0, GPU_1: 1}


@dataclass
class Stage:
    """Containers on devices, and what is read of them."""

    workloads: dict[ContainerKey, Workload]
    readings: dict[ContainerKey, Reading | None]
    wanted: dict[ProcessId, float]
    launching: dict[ProcessId, frozenset[DeviceUuid]]
    next_tgid: int = 100

    def put(self, name: str, role: Role, rule: Any, devices: set[DeviceUuid], processes: int = 1) -> list[ProcessId]:
        key = ContainerKey(name)
        ids = [ProcessId(self.next_tgid + number, 1) for number in range(processes)]
        self.next_tgid += processes
        container = Container(key, name, "docker")
        members = tuple(GpuProcess(Process(one, "python", "root", key), container, (GPU_0, GPU_1)) for one in ids)
        self.workloads[key] = Workload(container, Classification(role, rule), members, frozenset(devices))
        return ids

    def online(self, name: str, devices: set[DeviceUuid], latency_ns: float | None, target_ns: int = 10 * MS) -> None:
        self.put(name, Role.ONLINE, OnlineRule(name, Match(), replace(SLO, target_ns=target_ns)), devices)
        reading = Reading(0, 0.99, latency_ns, 500, latency_ns, latency_ns, 100) if latency_ns else None
        self.readings[ContainerKey(name)] = reading

    def offline(self, name: str, devices: set[DeviceUuid], processes: int = 1, **changed: Any) -> list[ProcessId]:
        return self.put(name, Role.OFFLINE, replace(FIXED, name=name, **changed), devices, processes)

    def decide(self) -> Decisions:
        seen = DecisionInputs(self.workloads, self.readings, SLOTS, wanted=self.wanted, launching=self.launching)
        return decide(seen, {}, TUNING, 0)

    def levels(self) -> dict[ProcessId, Level]:
        return {target.process: level for target, level in self.decide().levels.items() if not level.online}


@pytest.fixture
def stage() -> Stage:
    return Stage({}, {}, {}, {})


def test_the_online_container_with_the_least_slack_rules_its_device(stage: Stage) -> None:
    stage.online("calm", {GPU_0}, 2 * MS)
    stage.online("tight", {GPU_0}, 9 * MS)
    stage.online("elsewhere", {GPU_1}, 30 * MS)
    stage.offline("batch", {GPU_0})
    (decision,) = stage.decide().shares
    assert decision.ruler.container == "tight"


def test_of_several_the_container_with_the_least_slack_in_either_quantile_rules(stage: Stage) -> None:
    stage.online("tight", {GPU_0}, 9 * MS)
    stage.online("median", {GPU_0}, 2 * MS)
    key, also = ContainerKey("median"), replace(SLO, quantile=0.5, target_ns=MS)
    rule, reading = OnlineRule("median", Match(), replace(SLO, also=also)), stage.readings[key]
    assert reading is not None
    stage.put("median", Role.ONLINE, rule, {GPU_0})
    second = replace(reading, quantile=0.5, recent_ns=0.95 * MS)
    stage.readings[key] = replace(reading, also=second)
    stage.offline("batch", {GPU_0}, law="headroom", share_ratio=None)
    (decision,) = stage.decide().shares
    assert decision.ruler.container == "median"
    assert decision.share.quantile == 0.5
    binding, other = decision.by_quantile()
    assert (binding.slo, binding.reading) == (also, second)
    assert (other.slo, other.reading) == (SLO, reading)


def test_an_offline_container_alone_on_its_device_is_not_held(stage: Stage) -> None:
    stage.online("chat", {GPU_0}, 2 * MS)
    stage.offline("batch", {GPU_1})
    assert stage.levels() == {}


def test_a_container_on_several_devices_is_held_for_the_strictest_of_them(stage: Stage) -> None:
    stage.online("calm", {GPU_0}, 2 * MS)
    stage.online("tight", {GPU_1}, 9 * MS)
    (spanning,) = stage.offline("spanning", {GPU_0, GPU_1})
    (alone,) = stage.offline("beside", {GPU_1})
    (decision, _) = stage.decide().shares
    assert decision.ruler.container == "tight"
    assert stage.levels()[spanning].share_ratio == pytest.approx(stage.levels()[alone].share_ratio) == 0.4


def test_shares_and_queues_are_split_by_weight(stage: Stage) -> None:
    stage.online("chat", {GPU_0}, 2 * MS)
    (heavy,), (light,) = stage.offline("heavy", {GPU_0}, weight=3.0), stage.offline("light", {GPU_0}, weight=1.0)
    levels = stage.levels()
    assert levels[heavy].share_ratio == pytest.approx(0.6)
    assert levels[light].share_ratio == pytest.approx(0.2)
    assert levels[heavy].max_queued_ns == 3 * MS


def test_what_one_container_does_not_want_the_other_has(stage: Stage) -> None:
    stage.online("chat", {GPU_0}, 2 * MS)
    (idle,), (busy,) = stage.offline("idle", {GPU_0}), stage.offline("busy", {GPU_0})
    stage.wanted[idle] = 0.08
    levels = stage.levels()
    assert levels[idle].share_ratio == pytest.approx(0.08)
    assert levels[busy].share_ratio == pytest.approx(0.72)


def test_processes_of_a_container_split_its_part(stage: Stage) -> None:
    stage.online("chat", {GPU_0}, 2 * MS)
    first, second = stage.offline("batch", {GPU_0}, processes=2)
    assert stage.levels()[first].share_ratio == stage.levels()[second].share_ratio == pytest.approx(0.4)


def test_a_rank_on_each_device_has_its_devices_whole_share(stage: Stage) -> None:
    stage.online("chat-0", {GPU_0}, 2 * MS)
    stage.online("chat-1", {GPU_1}, 2 * MS)
    ranks = stage.offline("job", {GPU_0, GPU_1}, processes=2)
    stage.launching = {ranks[0]: frozenset({GPU_0}), ranks[1]: frozenset({GPU_1})}
    assert [stage.levels()[rank].share_ratio for rank in ranks] == pytest.approx([0.8, 0.8])


def test_the_floor_is_the_containers_and_its_processes_share_it(stage: Stage) -> None:
    stage.online("chat", {GPU_0}, 20 * MS)
    workers = stage.offline("batch", {GPU_0}, processes=10, share_ratio=0.05)
    levels = [stage.levels()[worker] for worker in workers]
    assert sum(level.share_ratio for level in levels) == pytest.approx(0.05)
    assert sum(level.floor_ratio for level in levels) == pytest.approx(0.05)


def test_no_container_gets_less_than_the_floor(stage: Stage) -> None:
    stage.online("chat", {GPU_0}, 2 * MS)
    tgids = [stage.offline(f"batch-{n}", {GPU_0})[0] for n in range(40)]
    assert {stage.levels()[one].share_ratio for one in tgids} == {0.05}


def test_law_off_leaves_its_container_alone(stage: Stage) -> None:
    stage.online("chat", {GPU_0}, 20 * MS)
    (free,) = stage.offline("free", {GPU_0}, law="off")
    assert stage.levels()[free] == FULL


def test_unmatched_and_protected_containers_get_no_level(stage: Stage) -> None:
    stage.online("chat", {GPU_0}, 20 * MS)
    stage.put("unknown", Role.UNMATCHED, None, {GPU_0})
    stage.put("kept", Role.PROTECTED, None, {GPU_0})
    assert stage.levels() == {}


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 4), st.floats(0, 1)), min_size=1, max_size=6),
    st.booleans(),
)
def test_all_together_have_no_more_than_the_share_but_for_the_floors(
    batches: list[tuple[float, int, float]], both: bool
) -> None:
    stage = Stage({}, {}, {}, {})
    stage.online("chat", {GPU_0}, 2 * MS)
    for number, (weight, processes, wanted) in enumerate(batches):
        devices = {GPU_0, GPU_1} if both and number % 2 else {GPU_0}
        for one in stage.offline(f"batch-{number}", devices, processes, weight=weight):
            stage.wanted[one] = wanted
    levels = stage.levels().values()
    assert sum(level.share_ratio for level in levels) <= 0.8 + 0.05 * len(batches) + 1e-6
    assert sum(level.max_queued_ns for level in levels) <= 4 * MS


def test_a_process_that_is_stopped_wants_everything_and_one_that_is_not_what_it_uses() -> None:
    demand, stopped, free, new = Demand(), ProcessId(1, 1), ProcessId(2, 1), ProcessId(3, 1)
    demand.observe(0, {stopped: Counters(0, 0), free: Counters(0, 5)})
    demand.observe(1000 * MS, {stopped: Counters(1, 1), free: Counters(200 * MS, 5), new: Counters(0, 0)})
    assert demand.wanted([stopped, free, new]) == pytest.approx({stopped: 1.0, free: 0.35})


def test_a_process_that_is_gone_is_dropped() -> None:
    demand, gone = Demand(), ProcessId(1, 1)
    for now in (0, 100 * MS):
        demand.observe(now, {gone: Counters(now, 0)})
    demand.observe(200 * MS, {})
    assert demand.wanted([gone]) == {}


def paced(stage: Stage, *names: str) -> dict[ProcessId, Level]:
    """The levels of all processes where the copies of these containers are paced."""
    groups = {ContainerKey(name): number for number, name in enumerate(names, 1)}
    seen = DecisionInputs(stage.workloads, stage.readings, SLOTS, copy_groups=groups)
    return {target.process: level for target, level in decide(seen, {}, TUNING, 0).levels.items()}


def test_copies_are_paced_beside_an_online_container_and_it_is_waited_for(stage: Stage) -> None:
    stage.online("chat", {GPU_0}, 2 * MS)
    (beside,), (elsewhere,) = stage.offline("batch", {GPU_0}, weight=4.0), stage.offline("etl", {GPU_1})
    levels = paced(stage, "batch", "etl")
    assert [level.copies for level in levels.values() if level.online] == [CopyLevel()]
    assert levels[beside].copies == CopyLevel(1, 4000, beside_online=True)
    assert levels[beside].pace
    assert levels[elsewhere] == replace(FULL, copies=CopyLevel(2, 1000), max_pause_ns=200 * MS)
    assert levels[elsewhere].slows


def test_all_processes_of_a_container_are_paced_as_one_and_no_other_containers_are(stage: Stage) -> None:
    several, (other,) = stage.offline("batch", {GPU_0}, processes=3), stage.offline("free", {GPU_0}, law="off")
    levels = paced(stage, "batch")
    assert {levels[process].copies for process in several} == {CopyLevel(1, 1000)}
    assert other not in levels


def test_where_copies_are_not_paced_no_level_says_so(stage: Stage) -> None:
    stage.online("chat", {GPU_0}, 2 * MS)
    stage.offline("batch", {GPU_0})
    assert all(level.copies is None for level in paced(stage).values())

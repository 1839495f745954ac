# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How long a container was stopped: the mean over its processes, even as they start, end or are counted again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from agent.containers.gpu_processes import GpuProcess
from agent.core.model import Container, ContainerKey, Device, DeviceReading, DeviceUuid, Process, ProcessId
from agent.probes.abi import Pace, ProcessKey, Resume
from enforce.audit.status import ContainerFigures, Paused, PauseMeter, described_copies, statuses
from enforce.controller.decision import NO_DECISIONS, DecisionInputs
from enforce.model import Reading
from enforce.policy.matching import Match
from enforce.policy.model import Classification, Limits, OfflineRule, OnlineRule, Pcie, Role, Slo
from enforce.workloads import Workload

SECOND_NS = 1_000_000_000
STEP_NS = SECOND_NS // 10  # as often as is decided
KEY = ContainerKey("c:training")
CONTAINER = Container(KEY, "training", "runc")


class Records:
    """A map of the kernel's, by process."""

    def __init__(self) -> None:
        self.of: dict[ProcessId, Any] = {}

    def get_all(self, keys: Collection[ProcessKey]) -> dict[bytes, Any]:
        return {bytes(key): self.of[key.id()] for key in keys if key.id() in self.of}

    def delete(self, key: ProcessKey) -> None:
        self.of.pop(key.id(), None)

    def items(self) -> list[tuple[ProcessKey, Any]]:
        return [(ProcessKey.of(process), value) for process, value in self.of.items()]


class Training:
    """A container whose processes are stopped for a part of each step, and what the meter makes of that."""

    def __init__(self) -> None:
        self.paces, self.resumes = Records(), Records()
        maps: Any = (self.paces, self.resumes)
        self.meter = PauseMeter(*maps)
        self.now_ns = 50 * SECOND_NS

    def step(self, ratios: dict[int, float], seconds: float = 0.1) -> Paused:
        """`ratios`: by pid, the part of each step in which it was stopped, once; the last step's figures."""
        for _ in range(round(seconds * SECOND_NS / STEP_NS)):
            self.now_ns += STEP_NS
            for tgid, ratio in ratios.items():
                pace, resume = self._records(tgid)
                pace.pauses += 1
                resume.paused_ns += round(ratio * STEP_NS)
            paused = self.read(*ratios)
        return paused

    def read(self, *tgids: int) -> Paused:
        members = tuple(GpuProcess(Process(ProcessId(tgid, 1), "x", "u", KEY), CONTAINER, ()) for tgid in tgids)
        workload = Workload(CONTAINER, Classification(Role.OFFLINE, None), members, frozenset())
        return self.meter.read({KEY: workload}, self.now_ns)[KEY]

    def stop(self, tgid: int) -> None:
        """It stays stopped."""
        self._records(tgid)[1].stopped_at_ns = self.now_ns

    def stopped_at_copies(self, tgid: int, times: int, paused_ns: int) -> None:
        """So many of its stops, and so much of their time, were at copies."""
        pace, resume = self._records(tgid)
        pace.copy_pauses += times
        resume.copy_paused_ns += paused_ns

    def _records(self, tgid: int) -> tuple[Pace, Resume]:
        process = ProcessId(tgid, 1)
        return self.paces.of.setdefault(process, Pace()), self.resumes.of.setdefault(process, Resume())


@pytest.fixture
def training() -> Training:
    return Training()


def test_one_process_that_is_stopped_for_a_part_of_the_time(training: Training) -> None:
    paused = training.step({1: 0.15}, seconds=2)
    assert (paused.pauses, paused.seconds, paused.ratio) == pytest.approx((20, 0.3, 0.15))


def test_eight_ranks_that_are_each_stopped_for_a_part_of_the_time_are_stopped_for_that_part(training: Training) -> None:
    paused = training.step(dict.fromkeys(range(1, 9), 0.15), seconds=2)
    assert (paused.pauses, paused.seconds, paused.ratio) == pytest.approx((160, 0.3, 0.15))


def test_one_of_two_that_stays_stopped_is_half_of_the_container(training: Training) -> None:
    training.step({1: 0.0, 2: 0.0})
    training.stop(1)
    paused = training.step({1: 0.0, 2: 0.0}, seconds=2)
    assert (paused.seconds, paused.ratio) == pytest.approx((1.0, 0.5))


def test_when_one_ends_the_time_is_the_others(training: Training) -> None:
    before = training.step({1: 0.2, 2: 0.6}, seconds=2)
    after = training.step({1: 0.2})
    assert (before.ratio, before.seconds) == pytest.approx((0.4, 0.8))
    assert after.seconds == pytest.approx(0.82)
    assert training.step({1: 0.2}, seconds=1).ratio == pytest.approx(0.2)
    assert list(training.resumes.of) == [ProcessId(1, 1)]


def test_when_one_joins_it_counts_from_then_on(training: Training) -> None:
    before = training.step({1: 0.2}, seconds=2)
    after = training.step({1: 0.2, 2: 0.6}, seconds=2)
    assert (before.seconds, after.seconds) == pytest.approx((0.4, 1.2))
    assert after.ratio == pytest.approx(0.4)


def test_a_container_without_a_process_was_stopped_for_what_it_was_stopped_before(training: Training) -> None:
    assert training.read() == Paused(0, 0.0, None)
    before = training.step({1: 0.5}, seconds=2)
    training.now_ns += 2 * SECOND_NS
    assert training.read() == Paused(before.pauses, before.seconds, 0.0)


def test_stops_at_copies_are_counted_apart_and_are_no_demand_for_launches(training: Training) -> None:
    training.step({1: 0.2, 2: 0.2}, seconds=1)
    training.stopped_at_copies(1, 4, SECOND_NS // 2)
    paused = training.step({1: 0.2, 2: 0.2}, seconds=1)
    assert (paused.pauses, paused.copy_pauses) == (40, 4)
    assert (paused.seconds, paused.copy_seconds) == pytest.approx((0.4, 0.25))
    assert training.meter.counters[ProcessId(1, 1)].pauses == 16
    assert training.read().copy_pauses == 4  # the processes have ended


@pytest.mark.parametrize(
    ("link", "said"),
    [
        (63_000_000_000, "copies paced with weight 2: an online copy waits for 0.5 ms"),
        (None, "not paced, as NVML does not say"),
    ],
)
def test_how_copies_are_paced_is_said_with_the_bound(link: int | None, said: str) -> None:
    gpu = Device(0, DeviceUuid("GPU-0"), "x", "", None, None, pcie_bytes_per_second=link)
    rule = OfflineRule("batch", Match(), "headroom", None, 2.0, Limits(None, 0.05, 1, None), ladder=("pace",))
    workload = Workload(CONTAINER, Classification(Role.OFFLINE, rule), (), frozenset({gpu.uuid}))
    inputs = DecisionInputs({KEY: workload}, {}, {}, copy_groups={KEY: 1})
    assert said in described_copies(inputs, Pcie(pace=True), [DeviceReading(gpu)])[KEY]


def test_nothing_decreases_when_another_process_ends_a_stop_or_a_record_is_lost(training: Training) -> None:
    training.step({1: 0.5}, seconds=1)
    training.stop(1)
    stopped = training.step({1: 0.0}, seconds=1)
    training.stop(1)  # again, with nothing charged for the stop before
    resumed = training.step({1: 0.0})
    assert (stopped.seconds, resumed.seconds) == pytest.approx((1.5, 1.5))
    training.paces.of.clear()
    training.resumes.of.clear()
    lost = training.read(1)
    assert (lost.pauses, lost.seconds) == (resumed.pauses, resumed.seconds)
    assert training.step({1: 0.5}).seconds == pytest.approx(1.55)


@pytest.mark.parametrize(("latency_ns", "slack"), [(40e6, 0.2), (60e6, -0.2), (None, None)])
def test_the_status_carries_the_slack_of_the_latency_that_it_shows(
    latency_ns: float | None, slack: float | None
) -> None:
    rule = OnlineRule("chat", Match(), Slo("gpu_wait", 0.99, 50_000_000, 10 * SECOND_NS, 20))
    workload = Workload(CONTAINER, Classification(Role.ONLINE, rule), (), frozenset())
    readings: dict[ContainerKey, Reading | None] = {KEY: Reading(0, 0.99, latency_ns, 100, None, None, 0)}
    inputs = DecisionInputs({KEY: workload}, readings, {})
    status = statuses(inputs, NO_DECISIONS, ContainerFigures({KEY: Paused(0, 0.0, None)}))[KEY]
    assert status.slack_ratio == (None if slack is None else pytest.approx(slack))


def test_of_two_quantiles_the_status_has_both_and_the_slack_of_the_one_nearer_to_its_target() -> None:
    also = Slo("gpu_wait", 0.5, 8_000_000, 10 * SECOND_NS, 20)
    rule = OnlineRule("chat", Match(), replace(also, quantile=0.99, target_ns=50_000_000, also=also))
    workload = Workload(CONTAINER, Classification(Role.ONLINE, rule), (), frozenset())
    second = Reading(0, 0.5, 10e6, 100, None, None, 0)
    inputs = DecisionInputs({KEY: workload}, {KEY: replace(second, quantile=0.99, latency_ns=30e6, also=second)}, {})
    status = statuses(inputs, NO_DECISIONS, ContainerFigures({KEY: Paused(0, 0.0, None)}))[KEY]
    assert (status.latency_quantile, status.latency_seconds, status.target_seconds) == (0.99, 0.03, 0.05)
    assert (status.also_quantile, status.also_latency_seconds, status.also_target_seconds) == (0.5, 0.01, 0.008)
    assert status.slack_ratio == pytest.approx(-0.25)


def test_records_that_descendants_make_for_a_process_that_ended_do_not_stay(training: Training) -> None:
    training.step({1: 0.2})
    for tgid in range(100, 200):
        training.stop(tgid)
    for _ in range(300):
        training.read(1)
    assert list(training.paces.of) == list(training.resumes.of) == [ProcessId(1, 1)]

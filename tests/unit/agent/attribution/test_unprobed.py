# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which containers work without launches that the probes see, by invented ticks of one second."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agent.attribution.unprobed import Launched, ProcessTick, UnprobedWork
from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, DeviceUuid, ProcessId

GPU, OTHER_GPU = DeviceUuid("GPU-0"), DeviceUuid("GPU-1")
JOB, NEIGHBOUR = ContainerKey("c:job"), ContainerKey("c:neighbour")
ONE, TWO = ProcessId(10, 1), ProcessId(11, 1)
MS = 1_000_000
DETECTION_TICKS = 3
ratios = st.floats(0.02, 1.0)


def tick(
    ratio: float | None,
    *launched: Launched,
    process: ProcessId = ONE,
    container: ContainerKey = JOB,
    device: DeviceUuid = GPU,
) -> ProcessTick:
    return ProcessTick(process, container, device, None if ratio is None else ratio * NS_PER_SECOND, launched)


def after(*seconds: Sequence[ProcessTick]) -> UnprobedWork:
    work = UnprobedWork()
    for ticks in seconds:
        work.observe(ticks, NS_PER_SECOND)
    return work


@given(ratios)
def test_work_without_any_launch_is_named_after_three_seconds_and_not_before(ratio: float) -> None:
    assert after(*[[tick(ratio)]] * (DETECTION_TICKS - 1)).of(JOB) == {}
    assert after(*[[tick(ratio)]] * DETECTION_TICKS).of(JOB) == {GPU: True}


@given(ratios, st.floats(0.01 * MS, 900 * MS), st.integers(3, 30))
def test_launches_that_take_as_long_as_nvml_says_are_never_named(ratio: float, each_ns: float, seconds: int) -> None:
    work, owed_ns = UnprobedWork(), 0.0
    for _ in range(seconds):
        owed_ns += ratio * NS_PER_SECOND
        launches = max(1, round(owed_ns / each_ns))
        owed_ns -= launches * each_ns
        work.observe([tick(ratio, Launched(launches, launches, each_ns))], NS_PER_SECOND)
    assert work.of(JOB) == {GPU: False}


@given(ratios, st.integers(1, 1000), st.integers(3, 30))
def test_launches_that_were_never_waited_for_are_not_named(ratio: float, launches: int, seconds: int) -> None:
    assert after(*[[tick(ratio, Launched(launches, launches, None))]] * seconds).of(JOB) == {GPU: False}


def test_a_kernel_of_ten_seconds_that_was_waited_for_before_is_not_named() -> None:
    long = [tick(1.0, Launched(1, 1, 10.0 * NS_PER_SECOND)), *[tick(1.0)] * 9]
    assert after(*([one] for one in long * 3)).of(JOB) == {GPU: False}


@given(st.integers(0, 100))
def test_a_hundred_tiny_launches_a_second_do_not_explain_a_busy_device(decoys: int) -> None:
    assert after(*[[tick(1.0, Launched(decoys, decoys, 5_000.0))]] * 6).of(JOB) == {GPU: True}


def test_launches_before_the_work_explain_two_seconds_of_it_at_most() -> None:
    burst = [tick(None, Launched(100_000, 100_000, 5_000.0))]
    assert after(burst, *[[tick(1.0)]] * 6).of(JOB) == {GPU: True}


def test_a_busy_neighbour_process_of_the_container_hides_nothing() -> None:
    honest = tick(1.0, Launched(1000, 1000, MS), process=TWO)
    assert after(*[[tick(0.1), honest]] * 3).of(JOB) == {GPU: True}
    processes = [tick(0.9, process=ProcessId(100 + n, 1)) for n in range(3)]
    assert after(*([one, honest] for one in processes)).of(JOB) == {GPU: True}  # each lives for a second


def test_another_container_and_another_device_are_not_named_with_it() -> None:
    honest = Launched(1000, 1000, MS)
    seen = (tick(1.0, honest, process=TWO, container=NEIGHBOUR), tick(1.0, honest, device=OTHER_GPU))
    work = after(*[[tick(1.0), *seen]] * 3)
    assert work.of(JOB) == {GPU: True, OTHER_GPU: False}
    assert work.of(NEIGHBOUR) == {GPU: False}


@given(st.lists(st.sampled_from([None, 0.0, 0.019]), max_size=30))
def test_idleness_is_no_evidence(idle: list[float | None]) -> None:
    assert after(*([tick(ratio)] for ratio in idle)).of(JOB) == {}
    unseen = [[tick(1.0)]] * 3
    assert after(*unseen, *([tick(ratio)] for ratio in idle)).of(JOB) == {GPU: True}


def test_work_with_launches_that_explain_it_ends_the_state() -> None:
    honest = [tick(1.0, Launched(1000, 1000, MS))]
    work = after(*[[tick(1.0)]] * 3, honest)
    assert work.of(JOB) == {GPU: True}
    for _ in range(3):
        work.observe(honest, NS_PER_SECOND)
    assert work.of(JOB) == {GPU: False}


def test_the_time_until_a_newcomer_is_probed_is_forgiven() -> None:
    honest = [tick(1.0, Launched(1000, 1000, MS))]
    work = UnprobedWork()
    for second in ([tick(1.0)], *[honest] * 5):
        work.observe(second, NS_PER_SECOND)
        assert work.of(JOB) in ({}, {GPU: False})


@given(st.lists(st.tuples(ratios, st.integers(0, 5), st.booleans()), max_size=40))
def test_what_is_kept_is_bounded_by_the_processes_and_containers(history: list[tuple[float, int, bool]]) -> None:
    work = UnprobedWork()
    for ratio, launches, is_waited in history:
        work.observe([tick(ratio, Launched(launches, launches, MS if is_waited else None))], NS_PER_SECOND)
    assert set(work.of(JOB)) <= {GPU}
    work.forget([ONE])
    work.retain(set())
    work.observe([], NS_PER_SECOND)
    assert work == UnprobedWork(_now_ns=(1 + len(history)) * NS_PER_SECOND)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""SM time per process, out of launches, deliveries, NVML's shares of time and the device's activity."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from agent.attribution.counters import FunctionLaunches
from agent.attribution.durations import FunctionTimes
from agent.attribution.process_work import ProcessWork, TickWork, Unseen
from agent.attribution.sm_time import Estimate, SmTime
from agent.collectors.samples import Delivered
from agent.core.model import ProcessId
from tests.support.kernel_records import A

B, C = ProcessId(11, 1), ProcessId(12, 1)
SECOND = 1_000_000_000
FULL = 132  # blocks: one on every SM


def launched(count: int, blocks: int = FULL) -> FunctionLaunches:
    return FunctionLaunches(count, count, count * blocks, 1024)


def tick(
    activity: float | None,
    work: Mapping[ProcessId, Mapping[int, FunctionLaunches]],
    busy: Mapping[ProcessId, float] | None = None,
    limits: Mapping[ProcessId, float] | None = None,
    *,
    programs: Mapping[ProcessId, str] | None = None,
    deliveries: Sequence[Delivered] = (),
) -> TickWork:
    busy_ns = {process: ratio * SECOND for process, ratio in (busy or {}).items()}
    return TickWork(
        interval_ns=SECOND,
        counted_ns=SECOND,
        activity_ns=None if activity is None else activity * SECOND,
        is_share_of_sms=True,
        sm_count=132,
        work=work,
        busy_ns=busy_ns,
        sm_limits=limits or {},
        programs=programs or {},
        deliveries={process: [one for one in deliveries if one.process == process] for process in work},
    )


def waited(process: ProcessId, launches: int, elapsed_ns: int, function: int = 1) -> Delivered:
    return Delivered(process, 0, launches, 0, 0, elapsed_ns, 0, elapsed_ns, 0, 0, ((function, launches),))


def learned(*deliveries: Delivered) -> FunctionTimes:
    """The durations after twenty of each."""
    times = FunctionTimes()
    for delivery in deliveries * 20:
        times.observe(delivery.process, delivery)
    return times


def ratio(estimates: Mapping[ProcessId, Estimate], process: ProcessId) -> float:
    sm_ns = estimates[process].sm_ns
    assert sm_ns is not None
    return sm_ns / SECOND


def test_durations_of_functions_are_learned_from_waits() -> None:
    device = SmTime(learned(waited(A, 10, 10_000_000)))
    for _ in range(5):
        estimates = device.observe(tick(0.2, {A: {1: launched(200)}}))
    assert ratio(estimates, A) == pytest.approx(0.2, rel=0.02)
    assert device.gpu_ns(A, 1) == pytest.approx(1_000_000, rel=0.05)


def test_a_small_grid_keeps_only_its_blocks_busy() -> None:
    times = learned(waited(A, 10, 10_000_000))
    estimates = SmTime(times).observe(tick(None, {A: {1: launched(500, blocks=33)}}))
    assert ratio(estimates, A) == pytest.approx(0.125, rel=0.05)


def test_a_share_of_the_sms_under_mps_is_the_most_that_a_grid_takes() -> None:
    times = learned(waited(A, 10, 10_000_000))
    estimates = SmTime(times).observe(tick(None, {A: {1: launched(500, blocks=10 * FULL)}}, limits={A: 0.25}))
    assert ratio(estimates, A) == pytest.approx(0.125, rel=0.05)


def test_kernels_of_a_graph_that_differ_keep_busy_what_each_does() -> None:
    times = learned(waited(A, 1, 1_000_000))
    graph = FunctionLaunches(100, 200, 100 * (1 + 3 * FULL), 2048, waves=400, wave_sms=100 * (1 + 3 * FULL))
    estimates = SmTime(times).observe(tick(None, {A: {1: graph}}))
    assert ratio(estimates, A) == pytest.approx(0.1 * (1 + 3 * FULL) / (4 * FULL), rel=0.02)


def stretched() -> FunctionTimes:
    """Of two that take turns: A's deliveries seem four times as long as its work, B's twice."""
    return learned(waited(A, 10, 40_000_000), waited(B, 10, 20_000_000))


def polls(rng: random.Random, shares: Mapping[ProcessId, float]) -> dict[ProcessId, float]:
    """NVML's second: each of five samples has all of the device's utilisation, and credits one process with it."""
    busy = sum(shares.values())
    found = rng.choices(list(shares), list(shares.values()), k=5)
    return {process: busy * found.count(process) / 5 for process in shares if process in found}


def test_nvml_corrects_waits_under_contention() -> None:
    device = SmTime(stretched())
    for _ in range(30):
        work = {A: {1: launched(250)}, B: {1: launched(700)}}
        estimates = device.observe(tick(0.95, work, busy={A: 0.25, B: 0.7}, programs={A: "a", B: "b"}))
    assert ratio(estimates, A) == pytest.approx(0.25, abs=0.03)
    assert ratio(estimates, B) == pytest.approx(0.70, abs=0.03)


@pytest.mark.parametrize("seed", range(3))
def test_a_second_of_nvml_is_taken_for_the_poll_that_it_is(seed: int) -> None:
    rng, errors, within = random.Random(seed), [], 0
    device = SmTime(stretched())
    for second in range(200):
        work = {A: {1: launched(250)}, B: {1: launched(700)}}
        estimates = device.observe(tick(0.95, work, busy=polls(rng, {A: 0.25, B: 0.7})))
        if second >= 40:
            errors.append(abs(ratio(estimates, A) - 0.25))
            within += errors[-1] <= (estimates[A].error_ns or 0.0) / SECOND
    assert sum(errors) / len(errors) < 0.06  # that of NVML's second is 0.15
    assert within / len(errors) >= 0.8


def test_what_was_seen_while_a_process_was_alone_outweighs_polls() -> None:
    rng, times = random.Random(1), learned(waited(A, 10, 20_000_000))
    device = SmTime(times)
    for _ in range(10):
        device.observe(tick(0.25, {A: {1: launched(250)}}, busy={A: 0.25}))
    estimates = device.observe(tick(0.95, {A: {1: launched(250)}, B: {1: launched(700)}}, busy={B: 0.95}))
    assert ratio(estimates, A) == pytest.approx(0.25, abs=0.03)
    for _ in range(10):
        busy = polls(rng, {A: 0.25, B: 0.7})
        estimates = device.observe(tick(0.95, {A: {1: launched(250)}, B: {1: launched(700)}}, busy=busy))
    assert ratio(estimates, A) == pytest.approx(0.25, abs=0.05)


def test_waits_that_find_the_device_done_say_nothing_of_how_long_it_took() -> None:
    device = SmTime(learned(Delivered(A, 0, 10, 0, 0, 1000, 0, 40_000_000, 0, 0, ((1, 10),))))
    for _ in range(5):
        estimates = device.observe(tick(0.25, {A: {1: launched(250)}}, busy={A: 0.25}))
    assert ratio(estimates, A) == pytest.approx(0.25, abs=0.01)


def test_work_that_no_probe_sees_is_not_taken_for_that_of_others() -> None:
    device = SmTime(learned(waited(A, 10, 10_000_000), waited(B, 10, 10_000_000)))
    for _ in range(40):
        work = {A: {1: launched(150)}, B: {1: launched(100)}}
        estimates = device.observe(tick(0.45, work), Unseen())
    assert ratio(estimates, A) == pytest.approx(0.15, abs=0.02)
    assert ratio(estimates, B) == pytest.approx(0.10, abs=0.02)


def test_work_that_no_probe_sees_has_what_nvml_credits_it_with_and_the_others_leave() -> None:
    rng, found = random.Random(2), []
    device = SmTime(learned(waited(A, 10, 10_000_000), waited(B, 10, 10_000_000)))
    for second in range(120):
        credited = polls(rng, {A: 0.15, B: 0.10, C: 0.6})
        work = {A: {1: launched(150)}, B: {1: launched(100)}}
        busy = {process: credited[process] for process in (A, B) if process in credited}
        unseen = Unseen({C: credited.get(C, 0.0) * SECOND}, sum(credited.values()) * SECOND)
        estimates = device.observe(tick(0.55, work, busy), unseen)
        if second >= 20:
            found.append(estimates[C])
    assert sum((one.sm_ns or 0.0) / SECOND for one in found) / len(found) == pytest.approx(0.3, abs=0.05)
    assert ratio(estimates, A) == pytest.approx(0.15, abs=0.03)
    assert all(abs((one.sm_ns or 0.0) / SECOND - 0.3) <= (one.error_ns or 0.0) / SECOND for one in found)


def test_a_process_that_is_only_not_seen_yet_takes_nothing_from_others() -> None:
    device = SmTime(learned(waited(A, 10, 10_000_000)))
    for _ in range(10):
        device.observe(tick(0.15, {A: {1: launched(150)}}))
    first = device.observe(tick(0.75, {A: {1: launched(150)}}), Unseen({B: 0.9 * SECOND}, 0.9 * SECOND))
    then = device.observe(tick(0.75, {A: {1: launched(150)}, B: {2: launched(600)}}))
    assert B not in first
    assert ratio(then, A) == pytest.approx(0.15, abs=0.02)


def test_its_own_waits_tell_more_of_a_process_than_those_of_its_program() -> None:
    rng = random.Random(4)
    times = learned(waited(A, 10, 10_000_000), waited(B, 10, 2_000_000))
    device = SmTime(times)
    for _ in range(60):  # equal grids, so that the program's functions are one
        seen = [waited(A, 10, 10_000_000), *[waited(B, 10, 2_000_000)] * 5]
        work = {A: {1: launched(300)}, B: {1: launched(1500)}}
        busy = polls(rng, {A: 0.3, B: 0.3})
        estimates = device.observe(tick(0.6, work, busy, programs={A: "job", B: "job"}, deliveries=seen))
    assert ratio(estimates, A) == pytest.approx(0.3, abs=0.05)
    assert ratio(estimates, B) == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("burst", [0.05, 0.2])
@pytest.mark.parametrize("pause", [0.0, 0.1, 0.4])
def test_what_runs_in_another_tick_than_it_was_launched_in_is_within_the_bound(burst: float, pause: float) -> None:
    """Bursts that are launched at once, run, and are waited for; then a pause: ticks begin at any time."""
    rng, period = random.Random(6), burst + pause

    def ahead(at: float) -> float:
        """Launched by then, and not run yet."""
        return max(0.0, burst - at % period)

    starts = [rng.uniform(0, 1000 * period) for _ in range(5000)]
    off = [ahead(at) - ahead(at + rng.uniform(0.5, 1.5)) for at in starts]
    seen = (sum(one * one for one in off) / len(off)) ** 0.5
    work = ProcessWork(A, {}, open_ns=burst / period * SECOND, burst_ns=burst * SECOND)
    assert work.border_sigma_ns(SECOND) / SECOND == pytest.approx(seen, rel=0.1)


def test_a_process_that_never_waits_gets_what_the_others_leave() -> None:
    rng, times = random.Random(3), learned(waited(A, 10, 5_000_000))
    device = SmTime(times)
    for _ in range(40):
        a, b = rng.randrange(200, 800), rng.randrange(100, 300)
        activity = (a * 500_000 + b * 2_000_000) / SECOND
        estimates = device.observe(tick(activity, {A: {1: launched(a)}, B: {7: launched(b)}}))
    assert ratio(estimates, B) == pytest.approx(b * 2_000_000 / SECOND, rel=0.05)
    assert device.gpu_ns(B, 7) == pytest.approx(2_000_000, rel=0.05)


def test_durations_that_drift_are_followed() -> None:
    rng, device = random.Random(4), SmTime(FunctionTimes())
    for step in range(80):
        a, b = rng.randrange(200, 600), rng.randrange(100, 300)
        each = 500_000 * (1 + step / 40)
        estimates = device.observe(
            tick((a * each + b * 1_000_000) / SECOND, {A: {1: launched(a)}, B: {2: launched(b)}})
        )
    assert ratio(estimates, A) == pytest.approx(a * each / SECOND, rel=0.1)


def test_side_by_side_what_processes_seem_to_do_is_cut_to_what_there_was() -> None:
    device = SmTime(learned(waited(A, 10, 20_000_000), waited(B, 10, 20_000_000)))
    for _ in range(10):
        estimates = device.observe(tick(1.0, {A: {1: launched(500)}, B: {1: launched(500)}}))
    assert ratio(estimates, A) + ratio(estimates, B) == pytest.approx(1.0, abs=0.02)


def test_the_error_is_larger_for_the_less_certain_process() -> None:
    device = SmTime(learned(waited(A, 10, 10_000_000)))
    for _ in range(10):  # always the same mix: nothing distinguishes B's functions
        estimates = device.observe(tick(0.5, {A: {1: launched(200)}, B: {1: launched(10), 2: launched(10)}}))
    a, b = estimates[A].error_ns, estimates[B].error_ns
    assert a is not None
    assert b is None or b > a


def test_without_any_reading_only_waits_count_and_a_process_without_any_is_unknown() -> None:
    times = FunctionTimes()
    times.observe(A, waited(A, 10, 10_000_000))
    device = SmTime(times)
    estimates = device.observe(tick(None, {A: {1: launched(100)}, C: {1: launched(5)}}))
    assert ratio(estimates, A) == pytest.approx(0.1)
    assert estimates[C].error_ns is None


def test_the_forgotten_leave_nothing() -> None:
    device = SmTime(FunctionTimes())
    device.observe(tick(0.5, {A: {1: launched(10)}}))
    device.forget([A])
    assert device.gpu_ns(A, 1) is None


def test_processes_that_take_turns_are_not_taken_for_side_by_side() -> None:
    times = FunctionTimes()
    device = SmTime(times)
    for _ in range(10):  # together a little more than there was: the time that switching takes
        work = {A: {1: launched(9000)}, B: {1: launched(100)}}
        estimates = device.observe(tick(0.9, work, busy={A: 0.5, B: 0.5}))
    assert ratio(estimates, A) == pytest.approx(0.45, abs=0.01)
    assert ratio(estimates, B) == pytest.approx(0.45, abs=0.01)


def test_a_new_process_has_the_durations_of_those_that_ran_its_program_before() -> None:
    times = FunctionTimes()
    device = SmTime(times)
    for n in range(10):  # ever new ones with handles of their own, and others make three of four waits longer
        process = ProcessId(100 + n, 1)
        seen = [waited(process, 10, 10_000_000 * (1 if k % 4 == 0 else 4), function=n) for k in range(40)]
        for one in seen:
            times.observe(process, one)
        device.observe(tick(None, {process: {n: launched(100)}}, programs={process: "train"}, deliveries=seen))
    newest = {ProcessId(200, 1): {77: launched(100)}}
    estimates = device.observe(tick(None, newest, programs={ProcessId(200, 1): "train"}))
    assert 0.1 <= ratio(estimates, ProcessId(200, 1)) < 0.16  # near the lower edge, far below the mean


def test_a_process_that_waits_its_turn_is_not_taken_to_have_worked_all_that_time() -> None:
    times = FunctionTimes()
    device = SmTime(times)
    for process in (A, B):  # each always has work, so each has half of the device; no wait was ever undisturbed
        times.observe(process, waited(process, 10, 20_000_000))
    estimates = device.observe(tick(1.0, {A: {1: launched(500)}, B: {1: launched(500)}}))
    assert ratio(estimates, A) == pytest.approx(0.5, rel=0.05)
    assert ratio(estimates, B) == pytest.approx(0.5, rel=0.05)


def test_the_first_tick_which_has_no_length_teaches_nothing() -> None:
    first = replace(tick(0.5, {A: {1: launched(250)}}, busy={A: 0.25}), interval_ns=0, counted_ns=0)
    SmTime(stretched()).observe(first)


def test_of_many_processes_each_has_an_estimate_with_an_error_and_none_is_left_uncorrected() -> None:
    rng = random.Random(5)
    many = [ProcessId(1000 + n, 1) for n in range(60)]
    device = SmTime(learned(*(waited(process, 10, 20_000_000) for process in many)))
    for _ in range(30):
        work = {process: {1: launched(rng.randrange(5, 15))} for process in many}
        total = sum(functions[1].launches for functions in work.values()) * 1_000_000
        estimates = device.observe(tick(total / SECOND, work, busy=polls(rng, dict.fromkeys(many, 0.01))))
    assert sum(ratio(estimates, process) for process in many) == pytest.approx(total / SECOND, rel=0.05)
    assert all(ratio(estimates, p) == pytest.approx(work[p][1].launches / 1000, rel=0.4) for p in many)
    assert all(one.error_ns for one in estimates.values())

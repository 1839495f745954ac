# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What was in the last while, out of counters that only grow, whatever becomes of the processes that count."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.model import ContainerKey
from enforce.policy.model import Slo
from enforce.signals.latency_window import Counted, Requests, Sliding, Window, Windows, low_quantile
from tests.support.kernel_records import Recorded

S = 1_000_000_000
MS = 1_000_000
TICK = S // 10
SLO = Slo("gpu_wait", 0.9, 50 * MS, 10 * S, 20)

latencies = st.lists(st.integers(1 << 10, 1 << 36), max_size=30)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), latencies, st.booleans()), min_size=1, max_size=60), st.floats(0.5, 0.99))
def test_a_quantile_is_within_three_percent_of_the_window_whichever_processes_come_and_go(
    ticks: list[tuple[int, list[int], bool]], quantile: float
) -> None:
    slo = Slo("gpu_wait", quantile, 50 * MS, 2 * S, 1)
    window, counters = Window(slo.window_ns), {key: Recorded(start=(1 << 32) - 2) for key in range(3)}
    window.take({key: counter.buckets for key, counter in counters.items()}, 0)
    unseen: list[int] = []
    seen: list[tuple[int, int]] = []
    for tick, (key, values, shown) in enumerate(ticks, 1):
        counters[key].add(values)
        unseen += values
        if not shown:  # not asked, or they did not answer: the next look shows it all
            continue
        seen += [(tick * TICK, value) for value in unseen]
        unseen = []
        window.take({key: counter.buckets for key, counter in counters.items()}, tick * TICK)
        inside = sorted(value for at, value in seen if at > tick * TICK - slo.window_ns)
        reading = window.reading(slo, tick * TICK)
        assert (reading.samples if reading else 0) == len(inside)
        if inside:
            assert reading is not None
            assert reading.latency_ns is not None
            truth = inside[max(0, math.ceil(round(quantile * len(inside), 9)) - 1)]
            assert abs(reading.latency_ns - truth) / truth <= 0.03


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), latencies), min_size=1, max_size=40))
def test_no_window_ever_holds_less_than_nothing_however_counters_are_set_back(ticks: list[list[int] | None]) -> None:
    window, counter = Window(3 * S), Recorded()
    for tick, values in enumerate(ticks):
        if values is None:
            counter = Recorded()
        else:
            counter.add(values)
        window.take({"one": counter.buckets if tick % 3 else None}, tick * TICK)
        for sliding in (window._window, window._recent):
            assert all(count > 0 for count in sliding.counts.values())
            assert sliding.total == sum(sliding.counts.values()) <= sum(len(values or ()) for values in ticks)


def test_what_was_there_before_is_not_of_the_window() -> None:
    window, old = Window(10 * S), Recorded()
    old.add([40 * MS] * 100)
    window.take({"old": old.buckets}, 0)
    assert window.reading(SLO, 0) is None
    old.add([20 * MS] * 25)
    window.take({"old": old.buckets}, TICK)
    reading = window.reading(SLO, TICK)
    assert reading is not None
    assert reading.samples == 25


def test_what_a_process_did_stays_in_the_window_when_it_ends_and_another_adds_to_it() -> None:
    window, first, second = Window(10 * S), Recorded(), Recorded()
    window.take({"first": first.buckets}, 0)
    first.add([10 * MS] * 20)
    window.take({"first": first.buckets}, TICK)
    second.add([20 * MS] * 20)
    window.take({"second": second.buckets}, 2 * TICK)
    reading = window.reading(SLO, 2 * TICK)
    assert reading is not None
    assert reading.samples == 40
    assert reading.latency_ns == pytest.approx(20 * MS, rel=0.03)


def test_a_process_that_is_out_of_sight_for_a_while_is_not_counted_twice() -> None:
    window, one = Window(10 * S), Recorded()
    window.take({"one": one.buckets}, 0)
    one.add([10 * MS] * 30)
    for tick, shown in enumerate([True, False, True, False, True], 1):
        window.take({"one": one.buckets if shown else None}, tick * TICK)
    window.take({}, 6 * TICK)
    window.take({"one": one.buckets}, 7 * TICK)
    reading = window.reading(SLO, 7 * TICK)
    assert reading is not None
    assert reading.samples == 30


def test_a_window_without_new_counts_is_unknown_once_it_has_passed() -> None:
    window, one = Window(10 * S), Recorded()
    window.take({"one": one.buckets}, 0)
    one.add([10 * MS] * 30)
    window.take({"one": one.buckets}, S)
    window.take({"one": one.buckets}, 11 * S - 1)
    late = window.reading(SLO, 11 * S - 1)
    assert late is not None
    assert (late.samples, late.recent_ns, late.at_ns) == (30, None, 11 * S - 1)
    window.take({"one": one.buckets}, 11 * S)
    assert window.reading(SLO, 11 * S) is None


def test_few_requests_say_something_about_neither_the_window_nor_the_last_second() -> None:
    window, one = Window(10 * S), Recorded()
    window.take({"one": one.buckets}, 0)
    one.add([10 * MS] * 19)
    window.take({"one": one.buckets}, TICK)
    assert window.reading(SLO, TICK) is None


def test_the_last_second_is_distinguished_from_the_window() -> None:
    window, one = Window(10 * S), Recorded()
    window.take({"one": one.buckets}, 0)
    one.add([10 * MS] * 100)
    window.take({"one": one.buckets}, S)
    one.add([80 * MS] * 20)
    window.take({"one": one.buckets}, 3 * S)
    reading = window.reading(SLO, 3 * S)
    assert reading is not None
    assert reading.latency_ns == pytest.approx(80 * MS, rel=0.03)
    assert (reading.samples, reading.recent_samples) == (120, 20)
    assert reading.recent_ns == pytest.approx(80 * MS, rel=0.03)


def test_a_long_window_is_no_more_to_keep_than_a_short_one() -> None:
    sliding: Sliding[int] = Sliding(3600 * S)
    for tick in range(40_000):
        sliding.add(tick * TICK, {tick % 50: 1})
        sliding.expire(tick * TICK)
    assert len(sliding._kept) <= sliding.slices + 2
    assert abs(sliding.total - 36_000) <= 36_000 / sliding.slices + 1


def test_each_container_has_a_window_of_its_own_until_it_is_gone() -> None:
    requests = Requests()
    windows, one = Windows(requests), Recorded()
    chat, other = ContainerKey("chat"), ContainerKey("other")
    for now in (0, TICK):
        windows.read(chat, {"p": one.buckets}, SLO, now)
        windows.read(other, {"q": Recorded().buckets}, SLO, now)
        one.add([MS] * 30 if not now else [])
    assert (found := windows.read(chat, {"p": one.buckets}, SLO, TICK)) is not None
    assert found.samples == 30
    assert windows.read(other, {"q": Recorded().buckets}, SLO, TICK) is None
    windows.forget([chat])
    assert windows.read(chat, {"p": one.buckets}, SLO, 2 * TICK) is None


def test_requests_and_those_over_the_target_only_ever_grow() -> None:
    requests, (first, second) = Requests(), (Recorded(), Recorded())
    windows, chat = Windows(requests), ContainerKey("chat")
    windows.read(chat, {"p": None}, SLO, 0)
    assert requests.of(chat) is None  # no reading was possible yet
    windows.read(chat, {"p": first.buckets}, SLO, 0)
    assert requests.of(chat) == Counted(0, 0)
    first.add([10 * MS] * 5 + [80 * MS] * 2)
    second.add([90 * MS])
    windows.read(chat, {"p": first.buckets, "q": second.buckets}, SLO, TICK)
    assert requests.of(chat) == Counted(8, 3)
    windows.read(chat, {"p": first.buckets, "q": second.buckets}, SLO, 3600 * S)  # long out of the window
    assert requests.of(chat) == Counted(8, 3)
    windows.read(chat, {"p": Recorded().buckets}, SLO, 3601 * S)  # set back: no request is taken back
    assert requests.of(chat) == Counted(8, 3)
    requests.forget([chat])
    assert requests.of(chat) is None


FAST, SLOW = 10 * MS, 100 * MS  # of a target of 50 ms


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(0, 8), min_size=5, max_size=90), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_miss_is_certain_only_if_the_whole_window_misses_whatever_follows(
    each: int, slow: list[int], quantile: float
) -> None:
    """`each` requests a tick, of which so many are slow; once the miss is certain all that follow are fast."""
    slo = Slo("gpu_wait", quantile, 50 * MS, 10 * S, 1)
    window, one, certain = Window(slo.window_ns), Recorded(), False
    window.take({"one": one.buckets}, 0)
    for tick in range(1, 10 * S // TICK):
        now_slow = 0 if certain or tick > len(slow) else min(each, slow[tick - 1])
        one.add([SLOW] * now_slow + [FAST] * (each - now_slow))
        window.take({"one": one.buckets}, tick * TICK)
        reading = window.reading(slo, tick * TICK)
        assert reading is not None
        certain |= reading.certain_ns is not None and reading.certain_ns > slo.target_ns
    assert reading is not None
    assert reading.latency_ns is not None
    assert not certain or reading.latency_ns > slo.target_ns


def test_a_miss_of_a_whole_window_is_certain_and_one_that_few_requests_show_is_not() -> None:
    slo = Slo("gpu_wait", 0.99, 50 * MS, 10 * S, 20)
    window, one = Window(slo.window_ns), Recorded()
    window.take({"one": one.buckets}, 0)
    found = []
    for tick in range(1, 120):
        one.add([SLOW] * 3 + [FAST] * 7 if tick in (2, 3) or tick > 100 else [FAST] * 10)
        window.take({"one": one.buckets}, tick * TICK)
        reading = window.reading(slo, tick * TICK)
        found.append(reading is not None and (reading.certain_ns or 0) > slo.target_ns)
    assert not any(found[:100])  # six of a hundred so far, but of a thousand in a whole window
    assert all(found[106:])


def test_one_slow_request_of_a_few_is_no_certain_miss() -> None:
    """Five requests a second: the window judges, and its p99 is its slowest request."""
    slo = Slo("gpu_wait", 0.99, 50 * MS, 10 * S, 20)
    window, one = Window(slo.window_ns), Recorded()
    window.take({"one": one.buckets}, 0)
    for second in range(1, 15):
        one.add([SLOW] + [FAST] * 4 if second == 8 else [FAST] * 5)
        window.take({"one": one.buckets}, second * S)
    reading = window.reading(slo, 14 * S)
    assert reading is not None
    assert reading.latency_ns is not None
    assert reading.latency_ns > slo.target_ns
    assert reading.certain_ns is not None
    assert reading.certain_ns < slo.target_ns


def test_both_quantiles_are_of_the_same_requests() -> None:
    also = Slo("gpu_wait", 0.5, 20 * MS, 10 * S, 20)
    slo = replace(also, quantile=0.99, target_ns=50 * MS, also=also)
    window, one = Window(slo.window_ns), Recorded()
    window.take({"one": one.buckets}, 0)
    one.add([10 * MS] * 90 + [90 * MS] * 10)
    window.take({"one": one.buckets}, TICK)
    reading = window.reading(slo, TICK)
    assert reading is not None
    assert reading.also is not None
    assert reading.latency_ns == pytest.approx(90 * MS, rel=0.03)
    assert reading.also.latency_ns == pytest.approx(10 * MS, rel=0.03)
    assert (reading.also.quantile, reading.also.samples) == (0.5, reading.samples)
    assert reading.of(0.5) == reading.also
    assert reading.of(0.9) is None


@pytest.mark.parametrize(("quantile", "samples", "low"), [(0.5, 100, 0.4), (0.99, 100, 0.9701), (0.1, 20, 0.0)])
def test_the_lower_end_of_a_quantile_is_two_deviations_below_it(quantile: float, samples: int, low: float) -> None:
    assert low_quantile(quantile, samples) == pytest.approx(low, abs=1e-4)

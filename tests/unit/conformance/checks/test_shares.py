# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a way of sharing gave to either side, from what the programs wrote down."""

from __future__ import annotations

import pytest

from bench.enforcement.modes import mode_of
from conformance.checks.enforcement.phases import LEAST_REQUESTS, Phase, Times, few
from conformance.checks.enforcement.shares import (
    LEFT,
    MEASURES,
    OFFLINE,
    P50,
    P99,
    AloneFigures,
    figures,
    p99_lower,
    within,
)
from conformance.checks.enforcement.throughput import per_second, read_points, since
from conformance.report.model import Verdict
from tools.harness.arrivals import poisson

SECOND = 1_000_000_000


def phase(*latencies_s: float, busy: float = 0.5, steps: float | None = None, overrun: bool = False) -> Phase:
    return Phase(latencies_s, latencies_s, busy, steps, None, overrun)


def telling(p99_s: float, steps: float | None = None) -> Phase:
    """Enough requests of 2 ms, and those above the p99."""
    slow = LEAST_REQUESTS // 50
    return phase(*[0.002] * (LEAST_REQUESTS - slow), *[p99_s] * slow, steps=steps)


ALONE = AloneFigures(telling(0.004), steps_per_second=100.0)


def test_a_step_counts_by_how_much_of_its_time_lies_in_the_span() -> None:
    points = [(0, 0.0), (2 * SECOND, 10.0), (4 * SECOND, 30.0)]
    assert per_second(points, 1 * SECOND, 3 * SECOND) == pytest.approx((20.0 - 5.0) / 2)


def test_nothing_counts_after_the_last_step() -> None:
    points = [(0, 0.0), (SECOND, 10.0)]
    assert per_second(points, 0, 2 * SECOND) == pytest.approx(5.0)


def test_nothing_counts_before_the_first_step_is_known() -> None:
    assert per_second([(2 * SECOND, 7.0)], 0, 4 * SECOND) == 0.0


def test_a_span_of_no_length_is_refused() -> None:
    with pytest.raises(ValueError, match="no length"):
        per_second([(0, 0.0)], SECOND, SECOND)


def test_a_program_that_went_on_counts_from_where_it_was_idle() -> None:
    points = [(SECOND, 1.0), (2 * SECOND, 2.0), (11 * SECOND, 3.0)]
    begun = since(points, (10 * SECOND, 2.0))
    assert begun == [(10 * SECOND, 2.0), (11 * SECOND, 3.0)]
    assert per_second(begun, 10 * SECOND, 11 * SECOND) == pytest.approx(1.0)


def test_a_line_that_is_still_being_written_does_not_count() -> None:
    assert read_points("1 10\n2 20\n3 3") == [(1, 10.0), (2, 20.0)]


def test_every_measure_is_a_ratio_to_alone() -> None:
    found = {one.measure: one for one in figures(mode_of("timeslice"), phase(0.004, 0.006, 0.012, steps=40.0), ALONE)}
    assert list(found) == list(MEASURES)
    assert found[P99].ratio == pytest.approx(3.0)
    assert found[P50].ratio == pytest.approx(3.0)
    assert found[OFFLINE].ratio == pytest.approx(0.4)
    assert found[LEFT].ratio == pytest.approx(0.8)
    assert {one.verdict for one in found.values()} == {Verdict.MEASURED}


@pytest.mark.parametrize(
    ("name", "p99_s", "steps", "p99", "left"),
    [
        ("headroom@1.1", 0.0044, 35.0, Verdict.OK, Verdict.OK),
        ("headroom@1.1", 0.0058, 35.0, Verdict.DIFFERS, Verdict.OK),
        ("headroom@1.5", 0.0058, 35.0, Verdict.OK, Verdict.DIFFERS),
        ("tgs", 0.0580, 0.0, Verdict.MEASURED, Verdict.MEASURED),
    ],
)
def test_only_our_own_law_promises_anything(name: str, p99_s: float, steps: float, p99: Verdict, left: Verdict) -> None:
    found = {one.measure: one for one in figures(mode_of(name), telling(p99_s, steps), ALONE)}
    assert (found[P99].verdict, found[LEFT].verdict) == (p99, left)


def test_a_phase_of_few_requests_gives_figures_and_no_verdict() -> None:
    found = {one.measure: one for one in figures(mode_of("headroom@1.1"), phase(0.002, 0.1, steps=35.0), ALONE)}
    assert found[P99].verdict is found[LEFT].verdict is Verdict.MEASURED
    assert "2 requests, too few for a p99" in found[P99].note
    assert few(LEAST_REQUESTS) == "2,000 requests"


@pytest.mark.parametrize(("rate", "seconds"), [(420.0, 5.0), (1000.0, 4.0), (100.0, 8.0)])
def test_a_phase_lasts_until_enough_requests_have_come_within_bounds(rate: float, seconds: float) -> None:
    assert Times(0.5, 4.0).fitting(rate, longest=8.0).measured == pytest.approx(seconds)


@pytest.mark.parametrize("rate", [250.0, 420.0, 525.0])
def test_the_arrivals_of_a_fitting_phase_are_enough(rate: float) -> None:
    assert len(poisson(rate, Times(0.5, 4.0).fitting(rate, longest=10.0).measured, 1)) >= LEAST_REQUESTS


def test_a_service_that_fell_behind_is_reported() -> None:
    found = {one.measure: one for one in figures(mode_of("mps"), phase(0.1, steps=1.0, overrun=True), ALONE)}
    assert "lower bound" in found[P99].note


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(1.0, Verdict.OK), (1.5, Verdict.OK), (1.51, Verdict.DIFFERS), (0.67, Verdict.OK), (0.66, Verdict.DIFFERS)],
)
def test_within_a_factor_is_up_and_down(value: float, verdict: Verdict) -> None:
    assert within(value, 1.0, 1.5) is verdict


def test_what_is_not_positive_is_compared_with_nothing() -> None:
    assert within(0.0, 1.0, 1.5) is Verdict.DIFFERS
    assert within(-1.0, -1.0, 1.5) is Verdict.OK


def test_ours_is_compared_with_theirs_only_where_both_were_measured() -> None:
    assert p99_lower({"headroom@1.1": 1.2}, "headroom@1.1", "tgs") is None
    found = p99_lower({"headroom@1.1": 1.3, "tgs": 1.1}, "headroom@1.1", "tgs", "why")
    assert found is not None
    assert (found.verdict, found.baseline, found.note) == (Verdict.DIFFERS, 1.1, "why")


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [(1.0, Verdict.OK), (1.15, Verdict.MEASURED), (1.25, Verdict.MEASURED), (1.35, Verdict.DIFFERS)],
)
def test_two_p99_that_are_nearly_alike_say_nothing_of_which_is_lower(ours: float, verdict: Verdict) -> None:
    found = p99_lower({"ours": ours, "theirs": 1.2}, "ours", "theirs")
    assert found is not None
    assert found.verdict is verdict

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Pairs are measured against jobs of their kind alone, and a miss counts once per pod and penalty."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.model import Job, Slot
from fleet.weights.experience import Experience, Miss, Sight
from fleet.weights.table import MOST_COUNT, Pair, Table

HOUR = 3600.0
JOB = Job("batch/a", "etl", 1 << 33, 0.002)
PAIR = Pair("chat", "etl", "H200")
SLOT = Slot("node", "GPU-0", "H200", "chat", 0.4, 0.010, 0.050, 1 << 35, None)


def sight(online: str | None, launches_per_s: float, expected: float | None = None) -> Sight:
    return Sight(JOB, expected, "H200", online, launches_per_s, 0.4, 0.010)


def test_a_pair_is_measured_against_a_job_of_its_kind_alone_whichever_is_seen_first() -> None:
    for order in (1, -1):
        found, errors = Experience(Table({})).measured([sight(None, 100.0), sight("chat", 60.0, 0.7)][::order])
        assert found.table.pairs[PAIR].throughput == pytest.approx(0.6)
        assert found.table.pairs[PAIR].prior == pytest.approx(0.6 * exp(-0.00115 / 0.010))
        assert errors == pytest.approx([0.1])


def test_where_the_kind_was_never_alone_nothing_is_measured() -> None:
    found, errors = Experience(Table({})).measured([sight("chat", 60.0, 0.7)])
    assert (dict(found.table.pairs), errors) == ({}, ())


def test_a_job_that_stood_still_alone_is_no_reference() -> None:
    found, _ = Experience(Table({})).measured([sight(None, 0.0), sight("chat", 60.0)])
    assert not found.table.pairs


def test_the_predictor_table_uses_what_was_measured_and_physical_does_not() -> None:
    found, _ = Experience(Table({})).measured([sight(None, 100.0), sight("chat", 30.0)])
    weights = {name: found.predictor(name, 0.0).weight(SLOT, JOB) for name in ("physical", "table")}
    assert weights["physical"] is not None
    assert weights["table"] is not None
    assert weights["table"].throughput < weights["physical"].throughput
    assert "measured 1 ×" in weights["table"].why


def test_after_a_miss_the_pair_is_worth_half_for_an_hour() -> None:
    found = Experience(Table({})).missed([Miss("batch/a", PAIR)], 0.0)
    before, during, after = (
        one.predictor("physical", now_s).weight(SLOT, JOB)
        for one, now_s in ((Experience(Table({})), 0.0), (found, HOUR - 1), (found, HOUR))
    )
    assert before is not None
    assert during is not None
    assert after is not None
    assert (during.throughput, after.throughput) == (before.throughput / 2, before.throughput)


def test_a_pod_that_goes_on_missing_counts_again_only_when_its_penalty_is_over() -> None:
    found = Experience(Table({}))
    for minute in range(0, 60, 5):
        found = found.missed([Miss("batch/a", PAIR)], minute * 60.0)
    assert found.penalties.by_pair[PAIR].length_s == HOUR
    found = found.missed([Miss("batch/a", PAIR)], HOUR)
    assert found.penalties.by_pair[PAIR].length_s == 2 * HOUR


def test_another_pod_of_the_pair_that_misses_during_the_penalty_doubles_it() -> None:
    found = Experience(Table({})).missed([Miss("batch/a", PAIR)], 0.0).missed([Miss("batch/b", PAIR)], 60.0)
    assert found.penalties.by_pair[PAIR].length_s == 2 * HOUR


def test_what_was_expected_under_a_penalty_is_no_error_of_the_predictor() -> None:
    found = Experience(Table({})).missed([Miss("batch/a", PAIR)], 0.0)
    _, errors = found.measured([sight(None, 100.0), sight("chat", 60.0, 0.3)])
    assert errors == ()


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3 * MOST_COUNT))
def test_a_mean_stays_within_what_was_measured_and_never_counts_more_than_a_day(rates: list[float]) -> None:
    found = Experience(Table({})).measured([sight(None, 1.0)])[0]
    for rate in rates:
        found, _ = found.measured([sight("chat", rate)])
    measured = found.table.pairs[PAIR]
    assert min(rates) - 1e-9 <= measured.throughput <= max(rates) + 1e-9
    assert measured.count == min(len(rates), MOST_COUNT)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What counts as growth, and that the estimator's day is a short one and nothing of it stays."""

from __future__ import annotations

import pytest

from bench.soak.figures import compare
from bench.soak.ticks import looks


def test_what_grows_by_more_than_its_bound_is_not_flat() -> None:
    grown = compare([{"agent_fds": 100 + n} for n in range(40)])
    assert [row["flat"] for row in grown] == [False]
    assert [row["flat"] for row in compare([{"agent_fds": 100 + n % 3} for n in range(40)])] == [True]


def test_what_is_allocated_once_at_the_beginning_is_no_growth() -> None:
    (row,) = compare([{"agent_rss_mib": 20.0}] * 4 + [{"agent_rss_mib": 60.0}] * 36)
    assert row["flat"]
    assert (row["first"], row["last"]) == (60, 60)


def test_a_figure_that_only_later_looks_have_is_compared_and_one_without_a_bound_is_not_judged() -> None:
    rows = compare([{"passed": 0}, *({"passed": n, "sm_error": 0.01} for n in range(39))])
    assert {row["figure"]: row["flat"] for row in rows} == {"passed": None, "sm_error": True}


def test_without_looks_there_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="nothing was looked at"):
        compare([])


def test_an_hour_of_ticks_is_attributed_with_the_same_error_at_its_end() -> None:
    found = list(looks(1, 5))
    assert len(found) == 4
    assert all(look["tick_sm_error"] < 0.01 for look in found)
    assert found[-1]["processes_seen"] > 400

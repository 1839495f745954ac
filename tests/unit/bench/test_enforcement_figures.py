# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The enforcement bench's rows and marks, from phases that are made up."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.enforcement.agent import SIGNALS, Promise, refusal, write_policy
from bench.enforcement.figures import (
    COLUMNS,
    Baseline,
    Phase,
    left_over_ratio,
    marks,
    middle,
    miss_ratio,
    natural_spread,
    over_rounds,
    row_of,
    unavailable,
)
from bench.enforcement.modes import ALONE, NAMES, mode_of, offline_percentage
from bench.enforcement.report import write_report
from enforce.policy import model

LATENCIES = tuple(n / 1000 for n in range(1, 1001))  # 1 ms to 1 s
ALONE_PHASE = Phase(LATENCIES, online_sm_ratio=0.3, offline_sm_ratio=0.0, online_busy_ratio=0.5)
BASELINE = Baseline(ALONE_PHASE, ALONE_PHASE, offline_sm_ratio=0.6)


def row(pair: str, mode: str, p99: float, left_over: float = 1.0) -> dict[str, Any]:
    return {"pair": pair, "mode": mode, "online_p99_ratio": p99, "offline_left_over_ratio": left_over}


def verdicts(rows: list[dict[str, Any]]) -> dict[str, bool | None]:
    return {mark.text: mark.met for mark in marks(rows)}


def test_half_of_its_throughput_is_all_that_is_left_beside_an_online_side_that_takes_half() -> None:
    assert left_over_ratio(0.3, offline_alone_sm_ratio=0.6, taken_ratio=0.5) == pytest.approx(1.0)
    assert left_over_ratio(0.15, offline_alone_sm_ratio=0.6, taken_ratio=0.5) == pytest.approx(0.5)


@given(st.floats(0, 1), st.floats(0.01, 1), st.floats(0, 0.99))
def test_what_is_left_over_grows_with_throughput_and_is_never_negative(
    offline: float, alone: float, taken: float
) -> None:
    found = left_over_ratio(offline, alone, taken)
    assert 0 <= found <= left_over_ratio(1.0, alone, taken)


@pytest.mark.parametrize(("alone", "taken"), [(0.0, 0.5), (0.5, 1.0)])
def test_where_nothing_is_left_there_is_no_figure(alone: float, taken: float) -> None:
    assert math.isnan(left_over_ratio(0.1, alone, taken))


@given(st.lists(st.floats(0.001, 10), min_size=5, max_size=5))
def test_one_or_two_of_five_phases_that_go_astray_do_not_count(latencies: list[float]) -> None:
    phases = [Phase((latency,), 0.5, 0.5) for latency in latencies]
    assert middle(phases).quantile_s(0.99) == sorted(latencies)[2]


def test_misses_are_the_requests_over_the_target() -> None:
    assert miss_ratio((1.0, 2.0, 3.0, 4.0), 2.0) == 0.5


def test_a_phase_twice_as_slow_has_ratios_of_two() -> None:
    slow = Phase(tuple(2 * latency for latency in LATENCIES), 0.3, 0.3, stolen_ratio=0.01)
    found = row_of("short", mode_of("headroom@1.5"), slow, BASELINE)
    assert set(COLUMNS) <= found.keys()
    assert [found[f"online_{name}_ratio"] for name in ("p50", "p99", "p999")] == [2.0, 2.0, 2.0]
    assert found["offline_left_over_ratio"] == pytest.approx(0.3 / 0.6 / 0.5, abs=1e-3)
    assert found["slo_miss_ratio"] == pytest.approx(1 - 1.5 * 0.99 / 2, abs=2e-3)
    assert found["requests"] == 1000


def test_all_modes_are_divided_by_the_same_time() -> None:
    busy = Phase(LATENCIES, 0.3, 0.3)
    found = [row_of("short", mode_of(mode), busy, BASELINE)["offline_left_over_ratio"] for mode in NAMES]
    assert found == pytest.approx([0.3 / 0.6 / 0.5] * len(NAMES), abs=1e-3)


def test_alone_is_one_and_nothing_offline_ran() -> None:
    found = row_of("short", mode_of(ALONE), BASELINE.both, BASELINE)
    assert [found[f"online_{name}_ratio"] for name in ("p50", "p99", "p999")] == [1.0, 1.0, 1.0]
    assert found["offline_left_over_ratio"] == 0
    assert found["alone_p99_ms"] == [990.0, 990.0]


def test_the_marks_allow_one_pair_in_eight_to_miss_its_target() -> None:
    text = "headroom@1.1: p99 ≤ 1.15 in at least 7 of 8 pairs"
    good = [row(f"p{n}", "headroom@1.1", 1.1) for n in range(7)]
    assert verdicts([*good, row("p7", "headroom@1.1", 1.3)])[text] is True
    assert verdicts([*good[1:], row("p7", "headroom@1.1", 1.3), row("p8", "headroom@1.1", 1.3)])[text] is False
    assert verdicts([row("p7", "headroom@1.1", 1.3)])[text] is False


def test_no_pair_may_be_far_off_its_target() -> None:
    text = "headroom@1.5: p99 never above 1.95"
    assert verdicts([row("a", "headroom@1.5", 1.94)])[text] is True
    assert verdicts([row("a", "headroom@1.5", 1.2), row("b", "headroom@1.5", 1.96)])[text] is False


@pytest.mark.parametrize(("target", "least"), [("1.1", 0.6), ("1.5", 0.8), ("3", 0.95)])
def test_the_median_pair_has_to_give_offline_work_enough(target: str, least: float) -> None:
    text = f"headroom@{target}: offline work gets ≥ {least:g} of the time left (median of the pairs)"
    mode = f"headroom@{target}"
    enough = [row("a", mode, 1.0, 0.0), row("b", mode, 1.0, least), row("c", mode, 1.0, 2.0)]
    assert verdicts(enough)[text] is True
    assert verdicts([*enough[:1], row("b", mode, 1.0, least - 0.01), enough[2]])[text] is False


def test_ours_has_to_beat_the_published_law_in_every_pair_that_has_both() -> None:
    text = "headroom@1.1: p99 better than tgs in every pair"
    both = [row("a", "headroom@1.1", 1.1), row("a", "tgs", 1.2)]
    assert verdicts(both)[text] is True
    assert verdicts([*both, row("b", "headroom@1.1", 1.1), row("b", "tgs", 1.1)])[text] is False
    assert verdicts([*both, {**unavailable("b", "tgs", "not in this version")}])[text] is True
    assert verdicts(both[:1])[text] is None


def test_where_the_published_law_is_not_beaten_the_page_states_what_either_leaves_to_offline_work() -> None:
    rows = [
        row("a", "headroom@1.1", 1.1, 0.9),
        row("a", "tgs", 1.05, 0.1),
        row("b", "headroom@1.1", 1.0),
        row("b", "tgs", 4.0),
    ]
    assert marks(rows)[-1].found == "1 of 2; not a: 1.10 at 0.90 of the time left to 1.05 at 0.10 of the time left"


def test_being_watched_may_cost_a_twentieth_of_p99_in_no_pair_more() -> None:
    text = "the agent only watches: p99 ≤ 1.05 in every pair"
    slower = replace(ALONE_PHASE, latencies_s=tuple(1.2 * latency for latency in LATENCIES))
    for name, watched, met in (("a", (), None), ("b", (ALONE_PHASE,), True), ("c", (ALONE_PHASE, slower), False)):
        baseline = replace(BASELINE, watched=watched)
        assert verdicts([row_of(name, mode_of(ALONE), baseline.both, baseline)])[text] is met


def test_short_phases_of_a_busy_service_differ_by_nature_and_long_ones_less() -> None:
    short, long = (natural_spread(250, 0.5, seconds, draws=60) for seconds in (6, 60))
    assert 0.07 < short < 0.15
    assert long < short / 2
    assert natural_spread(100, 0.05, 20, draws=60) < short


def test_modes_are_those_that_were_promised() -> None:
    fixed = ("alone", "timeslice", "mps", "mps_static", "mps_priority", "tgs")
    assert (*fixed, "headroom@1.1", "headroom@1.5", "headroom@3") == NAMES
    assert [mode_of(name).name for name in NAMES] == list(NAMES)
    assert mode_of("headroom@2.25").target_ratio == 2.25
    for wrong in ("magic", "headroom@", "headroom@1", "headroom@fast", "headroom"):
        with pytest.raises(ValueError, match="there is no mode"):
            mode_of(wrong)


@given(st.floats(0, 1))
def test_the_offline_percentage_is_one_that_mps_takes(online_sm_ratio: float) -> None:
    assert 10 <= offline_percentage(online_sm_ratio) <= 90


@pytest.mark.parametrize("law", ["headroom", "tgs"])
def test_the_agent_takes_the_policies_that_the_bench_writes(tmp_path: Any, law: str) -> None:
    for signal in set(SIGNALS) & set(model.SIGNALS):
        write_policy(tmp_path / "policy.yaml", Promise(law, signal, 8000, 2.5e6, 8.0).text("/bench"))
        assert refusal(tmp_path / "policy.yaml") == ""


def test_a_policy_that_is_refused_gives_the_reason_in_one_line_without_the_files_name(tmp_path: Any) -> None:
    write_policy(tmp_path / "policy.yaml", Promise("magic", "gpu_wait", 0, 2.5e6, 8.0).text("/bench"))
    reason = refusal(tmp_path / "policy.yaml")
    assert "magic" in reason
    assert str(tmp_path) not in reason
    assert "\n" not in reason


def test_the_page_has_a_row_for_each_pair_and_mode() -> None:
    slow = Phase(tuple(2 * latency for latency in LATENCIES), 0.3, 0.3, stolen_ratio=0.01)
    rows = [
        row_of("short", mode_of(ALONE), BASELINE.both, BASELINE),
        row_of("short", mode_of("headroom@1.5"), slow, BASELINE),
        unavailable("short", "tgs", "not in this version"),
    ]
    page = write_report(over_rounds(rows), marks(rows), 8.0, "gpu_wait")
    assert "| short | headroom@1.5 | 2.00 | 2.00 | 2.00 |" in page
    assert "not available: not in this version" in page
    assert "| headroom@1.5: p99 ≤ 1.55 in at least 7 of 8 pairs | 0 of 1; not short 2.00 | **no** |" in page
    assert "One round" in page


def test_of_several_rounds_the_page_has_the_median_and_between_which_figures_they_lie() -> None:
    phases = [
        Phase(tuple(factor * latency for latency in LATENCIES), 0.3, share)
        for factor, share in ((2, 0.3), (4, 0.1), (3, 0.2))
    ]
    rows = [row_of("short", mode_of("headroom@1.5"), phase, BASELINE) for phase in phases]
    (found,) = over_rounds([*rows, unavailable("short", "headroom@1.5", "the machine stalled")])
    assert (found["rounds"], found["online_p99_ratio"]) == (3, 3.0)
    assert (found["least"]["online_p99_ratio"], found["most"]["online_p99_ratio"]) == (2.0, 4.0)
    page = write_report([found], marks([found]), 8.0, "http")
    assert "| short | headroom@1.5 | 3.00 (2.00–4.00) | 3.00 (2.00–4.00) |" in page
    assert "Median (least–most) of 3 rounds" in page
    assert "measured three times" not in page

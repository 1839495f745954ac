# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A histogram on a page of metrics, and what grew between two looks at it."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent.core.model import ContainerKey
from agent.node.http_client import Failure, FetchError
from enforce.policy.model import PrometheusSource, Slo
from enforce.signals.latency_window import Requests
from enforce.signals.prometheus import LatencyHistory
from enforce.signals.scraper import CPU_BUDGET_SECONDS, Cumulative, Scrape, grown, histograms, quantile, slower

S = 1_000_000_000
INF = math.inf
LLAMA = PrometheusSource("http://h/m", "vllm:e2e_request_latency_seconds", (("model_name", ("llama*",)),))
SLO = Slo("prometheus", 0.5, S // 4, 10 * S, 20, LLAMA)

VLLM = """\
# HELP vllm:e2e_request_latency_seconds Histogram of end to end request latency in seconds.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="llama-3"} 12.5
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="llama-3"} 7.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="1.0",model_name="llama-3"} 9.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="llama-3"} 1e+01
vllm:e2e_request_latency_seconds_bucket{engine="1",le="0.3",model_name="llama-3"} 1
vllm:e2e_request_latency_seconds_bucket{engine="1",le="+Inf",model_name="llama-3"} 1 1700000000000
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="mi\\"s{t,r=al}"} 99
vllm:e2e_request_latency_seconds_count{engine="0",model_name="llama-3"} 10
vllm:e2e_request_latency_seconds_bucketed{engine="0",le="0.3",model_name="llama-3"} 50
"""


def test_the_series_that_the_labels_fit_are_found_and_no_others() -> None:
    assert histograms(VLLM, LLAMA) == {
        (("engine", "0"), ("model_name", "llama-3")): {0.3: 7.0, 1.0: 9.0, INF: 10.0},
        (("engine", "1"), ("model_name", "llama-3")): {0.3: 1.0, INF: 1.0},
    }


def test_a_label_with_brackets_and_quotes_is_read_as_it_is_meant() -> None:
    source = PrometheusSource("http://h/m", LLAMA.metric, (("model_name", ('mi"s{t,*',)),))
    assert list(histograms(VLLM, source).values()) == [{INF: 99.0}]


@pytest.mark.parametrize("page", ["", "<html>", "vllm:e2e_request_latency_seconds 3\n", "\0\0\n" * 50])
def test_a_page_of_something_else_has_no_series(page: str) -> None:
    assert histograms(page, LLAMA) == {}


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "1e308", "9007199254740994"])
def test_a_count_that_is_none_is_left_out(value: str) -> None:
    page = f'm_bucket{{le="1"}} {value}\nm_bucket{{le="+Inf"}} 3\n'
    assert histograms(page, PrometheusSource("http://h/m", "m")) == {(): {INF: 3.0}}


@pytest.mark.parametrize("le", ["1e305", "-1e305", "1e9.5", "-Inf", "NaN"])
def test_a_bucket_that_ends_in_no_time_is_left_out(le: str) -> None:
    page = f'm_bucket{{le="{le}"}} 3\nm_bucket{{le="1e9"}} 4\nm_bucket{{le="+Inf"}} 5\n'
    assert histograms(page, PrometheusSource("http://h/m", "m")) == {(): {1e9: 4.0, INF: 5.0}}


def test_counts_that_jump_about_never_void_a_scrape() -> None:
    history, requests, chat = LatencyHistory(SLO, S), Requests(), ContainerKey("docker:chat")
    for at, count in enumerate((0, 1e308, 0, 1e308, 0, 2**53, 0, 2**53), 1):
        page = f'm_bucket{{le="0.1"}} 0\nm_bucket{{le="+Inf"}} {count!r}\n'
        history.read(Scrape(at * S, histograms(page, PrometheusSource("http://h/m", "m"))), at * S)
        requests.add(chat, sum((history.new or {}).values()), history.slow())
    counted = requests.of(chat)
    assert counted is not None
    assert 0 < float(counted.requests) < 1e18
    assert math.isfinite(counted.slow)


def test_a_histogram_that_was_cut_off_is_left_out() -> None:
    page = 'm_bucket{a="1",le="1"} 3\nm_bucket{a="1",le="+Inf"} 3\nm_bucket{a="2",le="1"} 3\n'
    assert list(histograms(page, PrometheusSource("http://h/m", "m"))) == [(("a", "1"),)]


@pytest.mark.parametrize("line", ['m_bucket{le="1" 3', "m_bucket{le=1} 3", 'm_bucket{le="1"} three', "m_bucket{ "])
def test_a_page_that_is_broken_in_the_histogram_is_refused(line: str) -> None:
    with pytest.raises(FetchError) as refused:
        histograms(f"{line}\n", PrometheusSource("http://h/m", "m"))
    assert refused.value.failure is Failure.MALFORMED


def test_a_page_with_endless_series_is_refused() -> None:
    page = "".join(f'm_bucket{{le="{i}"}} 3\n' for i in range(10_001))
    with pytest.raises(FetchError) as refused:
        histograms(page, PrometheusSource("http://h/m", "m"))
    assert refused.value.failure is Failure.TOO_LARGE


@given(st.text(max_size=200), st.text(max_size=50))
def test_whatever_stands_there_is_series_or_a_refusal(text: str, labels: str) -> None:
    try:
        found = histograms(
            f'{text}\nm_bucket{{le="1"}} 3\nm_bucket{{{labels}}} 3\n', PrometheusSource("http://h/m", "m")
        )
    except FetchError:
        return
    assert all(0 <= count <= 2**53 for series in found.values() for count in series.values())


def test_what_grew_is_counted_in_the_bucket_that_it_fell_in() -> None:
    before, after = {0.1: 5.0, 1.0: 9.0, INF: 9.0}, {0.1: 7.0, 1.0: 14.0, INF: 15.0}
    assert grown(after, before) == {0.1: 2, 1.0: 3, INF: 1}


@pytest.mark.parametrize("before", [None, {0.1: 8.0, 1.0: 9.0, INF: 9.0}, {0.5: 1.0, INF: 1.0}])
def test_what_is_new_or_set_back_or_has_other_buckets_counts_from_nothing(before: Cumulative | None) -> None:
    assert grown({0.1: 7.0, 1.0: 14.0, INF: 15.0}, before) == {0.1: 7, 1.0: 7, INF: 1}


cumulative = st.lists(st.floats(0, 1e6), min_size=3, max_size=3).map(
    lambda c: dict(zip([0.1, 1.0, INF], c, strict=True))
)


@given(cumulative, cumulative)
def test_nothing_ever_grows_by_less_than_nothing(after: Cumulative, before: Cumulative) -> None:
    assert all(count > 0 for count in grown(after, before).values())


@pytest.mark.parametrize(
    ("counts", "wanted", "value"),
    [
        ({}, 0.5, None),
        ({0.1: 10}, 0.5, 0.05),  # from 0 on, as histogram_quantile has it
        ({0.2: 10}, 0.5, 0.15),  # buckets without requests bound it too
        ({0.1: 10, 0.4: 10}, 0.9, 0.36),
        ({0.1: 10, 0.2: 10}, 0.5, 0.1),
        ({0.1: 1, INF: 99}, 0.5, 0.4),  # above the last finite end nothing else is known
    ],
)
def test_a_quantile_is_what_histogram_quantile_makes_of_it(
    counts: dict[float, int], wanted: float, value: float | None
) -> None:
    found = quantile(counts, (0.1, 0.2, 0.4, INF), wanted)
    assert found is None if value is None else found == pytest.approx(value)


@pytest.mark.parametrize(
    ("counts", "target", "slow"),
    [
        ({}, 0.1, 0),
        ({0.1: 10, 0.4: 6}, 0.2, 6),
        ({0.1: 10, 0.4: 6}, 0.4, 0),
        ({0.4: 10}, 0.25, 7.5),  # of what lies evenly between 0.2 and 0.4
        ({INF: 10}, 0.4, 10),
        ({INF: 10}, 0.5, 0),  # above the last finite end nothing else is known
    ],
)
def test_of_a_bucket_that_the_target_divides_a_part_is_slow(
    counts: dict[float, int], target: float, slow: float
) -> None:
    assert slower(counts, (0.1, 0.2, 0.4, INF), target) == pytest.approx(slow)


@given(
    st.dictionaries(st.sampled_from((0.1, 0.2, 0.4)), st.integers(1, 1000), min_size=1),
    st.floats(0.01, 0.5),
    st.floats(0.5, 0.99),
)
def test_more_are_slow_than_the_promise_allows_just_where_its_quantile_is_over_the_target(
    counts: dict[float, int], target: float, wanted: float
) -> None:
    latency = quantile(counts, (0.1, 0.2, 0.4, INF), wanted)
    assert latency is not None
    assume(abs(latency - target) > 1e-6)
    assert (slower(counts, (0.1, 0.2, 0.4, INF), target) > (1 - wanted) * sum(counts.values())) is (latency > target)


def test_a_histogram_with_no_bound_but_infinity_gives_no_reading() -> None:
    assert quantile({INF: 10}, (INF,), 0.5) is None


def page(at_s: float, *counts: float, labels: tuple[tuple[str, str], ...] = ()) -> Scrape:
    return Scrape(int(at_s * S), {labels: dict(zip((0.1, 0.2, INF), counts, strict=True))})


def test_what_a_page_shows_first_is_of_unknown_age() -> None:
    history = LatencyHistory(SLO, S)
    assert history.read(page(1, 50, 100, 100), S) is None
    assert history.read(page(2, 50, 110, 110), 2 * S) is None  # ten are too few
    reading = history.read(page(3, 50, 130, 130), 3 * S)
    assert reading is not None
    assert (reading.samples, reading.recent_samples) == (30, 30)
    assert reading.latency_ns == pytest.approx(0.15 * S)


def test_a_page_is_counted_once_however_often_it_is_read() -> None:
    history = LatencyHistory(SLO, S)
    history.read(page(1, 0, 0, 0), S)
    second = page(2, 25, 25, 25)
    readings = [history.read(second, 2 * S + tick * S // 10) for tick in range(5)]
    assert [reading.samples for reading in readings if reading] == [25] * 5


def test_what_a_page_added_is_counted_once_and_nothing_of_one_that_could_not_be_read() -> None:
    history = LatencyHistory(SLO, S)  # the target is 0.25 s
    added, slow = [], []
    for at, scrape in enumerate([page(1, 5, 5, 5), page(2, 6, 8, 11), Scrape(3 * S, {}, "gone"), page(4, 6, 8, 12)], 1):
        for _ in range(2):
            history.read(scrape, at * S)
            added.append(None if history.new is None else sum(history.new.values()))
            slow.append(history.slow())
    assert added == [0, None, 6, None, None, None, 1, None]
    assert slow == [0, 0, 0, 0, 0, 0, 0, 0]  # longer than 0.2 s may be shorter than 0.25 s


def test_series_that_come_later_or_come_back_add_up() -> None:
    history, other = LatencyHistory(SLO, S), (("engine", "1"),)
    history.read(page(1, 10, 10, 10), S)
    both = Scrape(2 * S, {**page(2, 20, 20, 20).series, **page(2, 15, 15, 15, labels=other).series})
    reading = history.read(both, 2 * S)
    assert reading is not None
    assert reading.samples == 10 + 15
    history.read(page(3, 20, 20, 20), 3 * S)  # the other one is not on this page
    reading = history.read(Scrape(4 * S, {**both.series, **page(4, 16, 16, 16, labels=other).series}), 4 * S)
    assert reading is not None
    assert reading.samples == 10 + 15 + 1


def test_after_pages_were_missing_for_longer_than_the_window_it_restarts() -> None:
    history = LatencyHistory(SLO, S)
    history.read(page(1, 0, 0, 0), S)
    assert history.read(page(2, 50, 50, 50), 2 * S) is not None
    assert history.read(Scrape(3 * S, {}, "gone"), 3 * S) is not None
    assert history.trouble
    assert history.read(Scrape(12 * S, {}, "gone"), 12 * S) is None
    assert history.read(page(13, 5000, 5000, 5000), 13 * S) is None
    assert not history.trouble
    assert history.read(page(14, 5030, 5030, 5030), 14 * S) is not None


def test_the_pages_unit_is_that_of_the_reading() -> None:
    history = LatencyHistory(SLO, 1_000_000)
    history.read(page(1, 0, 0, 0), S)
    reading = history.read(page(2, 0, 30, 30), 2 * S)
    assert reading is not None
    assert reading.latency_ns == pytest.approx(150_000)


def _large_page() -> str:
    """4 MiB of a histogram's lines: as much as is fetched, and as many lines as are parsed."""
    line = 'm_bucket{model="%04d",pad="%s",le="+Inf"} 3'
    return "\n".join(line % (number, "x" * 365) for number in range(10_000))


def test_a_page_that_takes_too_long_to_parse_is_given_up_within_its_budget() -> None:
    page, began = _large_page(), time.thread_time()
    with pytest.raises(FetchError, match=r"m takes more than 100 ms of CPU to parse \(10000 lines\); add slo.labels"):
        histograms(page, PrometheusSource("http://h/m", "m"))
    assert time.thread_time() - began < 4 * CPU_BUDGET_SECONDS


def test_of_a_large_page_only_the_lines_with_the_labels_are_parsed() -> None:
    source, times = PrometheusSource("http://h/m", "m", (("model", ("0042",)),)), iter((0.0, 0.0))
    found = histograms(_large_page(), source, lambda: next(times))
    assert [dict(labels)["model"] for labels in found] == ["0042"]


def test_a_budget_that_is_spent_after_the_last_line_loses_nothing() -> None:
    page = "".join(f'm_bucket{{a="{number}",le="+Inf"}} 3\n' for number in range(60))
    times = iter((0.0, 0.0, CPU_BUDGET_SECONDS))
    assert len(histograms(page, PrometheusSource("http://h/m", "m"), lambda: next(times))) == 60

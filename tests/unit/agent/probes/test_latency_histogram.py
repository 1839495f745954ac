# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Quantiles of the kernel's histogram."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agent.probes.abi import middle_ns, quantile_ns, slower
from tests.support.kernel_records import bucket_of


@given(st.integers(1 << 10, (1 << 40) - 1))
def test_a_bucket_is_within_three_percent_of_what_is_in_it(ns: int) -> None:
    assert abs(middle_ns(bucket_of(ns)) - ns) / ns <= 0.016


@given(st.lists(st.integers(1 << 10, (1 << 40) - 1), min_size=1, max_size=300), st.floats(0.01, 0.999))
def test_a_quantile_is_that_of_the_latencies(values: list[int], quantile: float) -> None:
    truth = sorted(values)[max(0, math.ceil(round(quantile * len(values), 9)) - 1)]
    found = quantile_ns(Counter(map(bucket_of, values)), quantile)
    assert found is not None
    assert abs(found - truth) / truth <= 0.016


def test_a_quantile_that_falls_between_two_requests_is_not_taken_for_the_next_one() -> None:
    values = [(1 << 20) * (i + 1) for i in range(100)]  # 0.07 × 100 is 7.000000000000001 to a computer
    assert quantile_ns(Counter(map(bucket_of, values)), 0.07) == middle_ns(bucket_of(values[6]))


def test_no_requests_have_no_quantile() -> None:
    assert quantile_ns({}, 0.99) is None


@given(
    st.lists(st.integers(1 << 10, 1 << 36), min_size=1, max_size=300),
    st.integers(1 << 10, 1 << 36),
    st.integers(50, 99),
)
def test_more_are_slow_than_the_promise_allows_just_where_its_quantile_is_over_the_target(
    values: list[int], target_ns: int, percent: int
) -> None:
    counts = Counter(map(bucket_of, values))
    latency_ns = quantile_ns(counts, percent / 100)
    assert latency_ns is not None
    assert (100 * slower(counts, target_ns) > (100 - percent) * len(values)) is (latency_ns > target_ns)

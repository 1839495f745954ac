# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Quantiles of the kernel's histogram."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from agent.layout import LATENCY_BUCKETS
from enforce.histogram import EMPTY, difference, merge, middle_ns, quantile_ns


def bucket_of(ns: int) -> int:
    """As latency_bucket() in bpf/wait.bpf.c."""
    if ns < 1 << 10:
        return 0
    power = (ns >> 10).bit_length() - 1
    return min(LATENCY_BUCKETS - 1, power << 5 | (ns >> (power + 5)) & 31)


@given(st.integers(1 << 10, (1 << 37) - 1))
def test_a_bucket_is_within_three_percent_of_what_is_in_it(ns: int) -> None:
    assert abs(middle_ns(bucket_of(ns)) - ns) / ns <= 0.03


@given(st.lists(st.integers(1 << 10, 1 << 36), min_size=1, max_size=300), st.floats(0.01, 0.999))
def test_a_quantile_is_that_of_the_latencies(values: list[int], quantile: float) -> None:
    counts = [0] * LATENCY_BUCKETS
    for value in values:
        counts[bucket_of(value)] += 1
    truth = sorted(values)[max(0, math.ceil(quantile * len(values)) - 1)]
    found = quantile_ns(counts, quantile)
    assert found is not None
    assert abs(found - truth) / truth <= 0.032


def test_no_requests_have_no_quantile() -> None:
    assert quantile_ns(EMPTY, 0.99) is None


def test_a_counter_that_wrapped_is_no_negative_count() -> None:
    assert difference((3,), ((1 << 32) - 2,)) == (5,)


def test_histograms_of_several_processes_add_up() -> None:
    assert merge([(1, 2), (3, 4)]) == (4, 6)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""On what was recorded on a real H200, shares are near the truth, and within the error that they are given.

The recordings were looked at while the estimator was built: this keeps what was reached, and is no evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import pytest

from bench.attribution.shares import ContainerSecond
from tests.support.recorded_ticks import play


def error(seconds: Sequence[ContainerSecond]) -> float:
    """Of the mean over the scene."""
    return abs(fmean(one.true for one in seconds) - fmean(one.said for one in seconds))


@pytest.mark.parametrize(
    ("name", "most_mean", "most_worst", "least_covered"),
    [("h200-long", 0.02, 0.05, 0.9), ("h200-short", 0.05, 0.15, 0.7)],
)
def test_shares_on_a_real_gpu_are_near_the_truth(
    name: str, most_mean: float, most_worst: float, least_covered: float
) -> None:
    found = play(name)
    errors = {who: error(seconds) for who, seconds in found.items()}
    assert fmean(errors.values()) <= most_mean, errors
    assert max(errors.values()) <= most_worst, errors
    within = [abs(one.true - one.said) <= (one.bound or 0.0) for seconds in found.values() for one in seconds]
    assert fmean(within) >= least_covered

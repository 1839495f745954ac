# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
from __future__ import annotations

import pytest

from fleet.simulator.outcome import FIGURES, Ended, Outcome, quantile, summary
from tests.support.simulated_jobs import job


def test_the_figures_are_those_of_two_jobs_by_hand() -> None:
    ended = (
        Ended(job("a", 10, 5), 1, 5, 15, 10, 0, 0, 0),
        Ended(job("b", 20, 5), 2, 15, 45, 30, 10, 0, 0),
    )
    assert summary(Outcome("fifo", 4, ended, busy_gpu_s=70, tenant_gpu_s=70)) == pytest.approx(
        {
            "average_jct_s": 25,
            "p50_jct_s": 10,
            "p99_jct_s": 40,
            "average_queueing_s": 5,
            "p50_queueing_s": 0,
            "p99_queueing_s": 10,
            "makespan_s": 40,
            "utilisation_ratio": 70 / 160,
        }
    )


def test_where_nothing_ended_the_figures_are_unknown() -> None:
    assert set(summary(Outcome("fifo", 4, (), 0, 0)).values()) == {None}
    assert len(FIGURES) == 8


def test_a_quantile_is_a_value_that_was_seen() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (50, 99, 100)
    assert quantile([7.0], 0.01) == 7
    assert quantile([], 0.5) is None

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
from __future__ import annotations

from pathlib import Path

import pytest

from bench.fleet.simulate import Goal, main, near
from bench.fleet.stream import OPPORTUNISTIC, PRODUCTION, Stream, drawn, stream_rows
from fleet.model import TraceJob

JOBS = [TraceJob(str(place), 60.0 * place, 1 + place % 2, 1000.0 + place) for place in range(60)]
SMALL = Stream(each=5, gpus=2, draws=2)


def test_a_goal_is_met_between_its_ends() -> None:
    assert near("x", 104, 100, 0.05).met
    assert not near("x", 106, 100, 0.05).met
    assert not near("x", 94, 100, 0.05).met


def test_a_goal_that_sharing_without_slowdown_misses_too_is_out_of_reach() -> None:
    assert Goal("x", 1.1, 0, 0.7, possible=0.8).out_of_reach
    assert not Goal("x", 1.1, 0, 0.7, possible=0.6).out_of_reach
    assert not Goal("x", 1.1, 0, 0.7).out_of_reach
    assert not Goal("x", 0.6, 0, 0.7, possible=0.8).out_of_reach
    assert Goal("x", 1.1, 0, 0.7).line().startswith("MISSED: x: 1.100, goal at most 0.70")


def test_a_draw_has_as_many_jobs_of_either_class_and_depends_on_the_seed_alone() -> None:
    jobs = drawn(JOBS, SMALL, 3)
    assert [job.kind for job in jobs].count(PRODUCTION) == [job.kind for job in jobs].count(OPPORTUNISTIC) == 5
    assert all(job.gpus == 1 and job.online == (job.kind == PRODUCTION) for job in jobs)
    assert jobs == drawn(JOBS, SMALL, 3)
    assert any(jobs != drawn(JOBS, SMALL, seed) for seed in range(3))


def test_ways_are_compared_to_exclusive_and_to_coexecution() -> None:
    rows = {row["policy"]: row for row in stream_rows(JOBS, SMALL)}
    assert rows["exclusive"]["opportunistic_to_exclusive"] == pytest.approx(1)
    assert rows["co-execution"]["production_to_coexecution"] == pytest.approx(1)
    assert rows["pairing"]["opportunistic_to_exclusive"] < 1
    assert rows["pairing"]["production_to_coexecution"] < 1


def test_a_missing_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", str(tmp_path)]) == 3
    assert "muri400.csv is missing" in capsys.readouterr().out

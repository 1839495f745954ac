# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How the benches of the analysis and of the split judge, on small inputs."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from bench.fleet import analyse, split
from fleet.pipeline.search import Level
from fleet.pipeline.split import Pipeline, Stage


def test_a_figure_agrees_only_in_every_digit_given() -> None:
    assert analyse.as_given(19.0667, "19.1") == "19.1"
    assert analyse.as_given(187.77, "188") == "188"
    assert analyse.as_given(19.16, "19.1") == "19.2"
    assert analyse.as_given(None, "19.1") is None


def test_a_figure_that_the_analysis_lacks_does_not_agree() -> None:
    figures = list(analyse.compared({"tables": {}}))
    assert len(figures) == len(analyse.FIGURES)
    assert not any(figure["equal"] for figure in figures)


def test_a_missing_trace_is_said_and_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyse.main(["--trace", str(tmp_path / "philly.csv")]) == 3
    assert "is missing" in capsys.readouterr().out


def test_a_small_trace_is_measured_and_does_not_pass_for_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "philly.csv"
    trace.write_text("timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66,1,66,a\n")
    assert analyse.main(["--trace", str(trace), "--runs", "1"]) == 1
    assert "does NOT hold" in capsys.readouterr().out


def test_an_equal_split_ignores_what_stages_need() -> None:
    levels = (Level(0.08, 0.1), Level(0.09, 0.2))
    one = Pipeline(0.1, (Stage("a", levels), Stage("b", (Level(0.01, 0.1),), ("a",))))
    assert split.length_s(one.stages, split.equal(one)) <= one.slo_s
    tight = Pipeline(0.1, (Stage("a", levels), Stage("b", (Level(0.01, 0.1), Level(0.05, 0.9)), ("a",))))
    assert split.length_s(tight.stages, split.equal(tight)) > tight.slo_s
    for planner in (split.ours, split.proportional):
        assert split.length_s(tight.stages, planner(tight)) <= tight.slo_s


def test_pipelines_are_the_same_for_a_seed_and_always_possible() -> None:
    made = [split.pipeline(Random(seed), 4, 3) for seed in range(20)]
    assert made == [split.pipeline(Random(seed), 4, 3) for seed in range(20)]
    for one in made:
        assert split.best(one) > 0

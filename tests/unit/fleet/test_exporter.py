# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The service's metrics: what is unknown has no series, and each one is in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

from fleet.exporter import Metrics
from fleet.learning import Lessons

PAGE = Path(__file__).parents[3] / "docs/fleet.md"


def test_every_metric_is_in_the_documentation() -> None:
    rows = dict(re.findall(r"^\| `(gpuwarden_fleet_\w+)` \|.*\| ([^|]+)\. \|$", PAGE.read_text(), re.MULTILINE))
    endings = {"counter": "_total"}
    assert rows == {
        f"{one.name}{endings.get(one.type, '')}": one.documentation.rstrip(".") for one in Metrics().families()
    }


def test_before_the_first_plan_there_is_no_value_of_one() -> None:
    assert b"gpuwarden_fleet_plan_value" not in Metrics().page()


def test_an_error_of_a_prediction_counts_with_its_sign() -> None:
    metrics = Metrics()
    metrics.learned(Lessons(errors=(-0.2, 0.02, 0.4), measured=2, penalised=1, failure="away"))
    page = metrics.page().decode()
    counts = {le: float(count) for le, count in re.findall(r'prediction_error_ratio_bucket{le="([^"]+)"} (\S+)', page)}
    assert (counts["-0.15"], counts["0.15"], counts["+Inf"]) == (1.0, 2.0, 3.0)
    for line in ("measured_pairs 2.0", "penalised_pairs 1.0", "learning_failures_total 1.0"):
        assert f"gpuwarden_fleet_{line}" in page

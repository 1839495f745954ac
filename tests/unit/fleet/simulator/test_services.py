# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fleet.model import FleetError
from fleet.simulator.services import read_services
from fleet.weights.physical import Physical
from tests.support.simulated_jobs import job

SERVICE: dict[str, Any] = {"kind": "bert", "load": 0.25, "gap_s": 1e9, "slack_s": 0.01, "free_bytes": 100}
OFFLINE: dict[str, Any] = {
    "train": {"memory_bytes": 10, "kernel_s": 0.001},
    "default": {"memory_bytes": 10, "kernel_s": 1},
}


def file(tmp_path: Path, **parts: Any) -> Path:
    path = tmp_path / "services.json"
    path.write_text(json.dumps({"services": [SERVICE], "offline": OFFLINE, **parts}))
    return path


def test_each_service_is_a_job_without_an_end_on_one_gpu(tmp_path: Path) -> None:
    services = read_services(file(tmp_path, services=[{**SERVICE, "count": 2}, {**SERVICE, "load": 0.5}]))
    jobs = services.jobs(7.0)
    assert [(one.key, one.submit_s, one.gpus, one.duration_s) for one in jobs] == [
        ("bert#0/0", 7, 1, math.inf), ("bert#0/1", 7, 1, math.inf), ("bert#1/0", 7, 1, math.inf),
    ]  # fmt: skip
    assert services.slots["bert#1"].online == "bert"


def test_the_predictor_decides_who_may_join_and_how_fast(tmp_path: Path) -> None:
    services = read_services(file(tmp_path))
    slowdown, (service,) = services.slowdown(Physical()), services.jobs(0.0)
    assert slowdown(service, job("1", 10, kind="train")) == pytest.approx((1.0, 1 / 0.75))
    assert slowdown(service, job("1", 10, kind="other")) is None  # default: kernels of 1 s, over the slack


@pytest.mark.parametrize(
    "parts",
    [
        {"services": []}, {"services": 3}, {"services": [3]}, {"services": [{"kind": "bert"}]}, {"offline": {}},
        {"services": [{**SERVICE, "load": -1}]}, {"services": [{**SERVICE, "load": "x"}]},
        {"services": [{**SERVICE, "count": 0}]}, {"services": [{**SERVICE, "free_bytes": float("nan")}]},
        {"offline": {"a": {}}}, {"offline": {"a": {"memory_bytes": None}}}, {"offline": [1]},
    ],
)  # fmt: skip
def test_a_file_that_describes_no_services_says_what_it_has_to_be(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(FleetError, match=r"services\.json"):
        read_services(file(tmp_path, **parts))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="cannot read the services"):
        read_services(tmp_path / "absent.json")

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet.model import FleetError, Job, Slot, Weight
from fleet.simulator.slowdown import by_resources, constant, measured, predicted, read_table
from tests.support.simulated_jobs import job

TABLE: dict[str, dict[str, Any]] = {
    "a": {"null": 10.0, "b": [5.0, 20.0], "a": [4.0, 4.0], "broken": [0.0, 0.0], "faster": [12.0, 1.0]},
    "b": {"null": [30.0]},
    "broken": {"null": 1.0},
    "faster": {"null": 2.0},
    "unmeasured": {"a": [1.0, 2.0]},
}
A, B = job("1", 10, kind="a"), job("2", 10, kind="b")


def test_a_table_gives_throughput_alone_over_throughput_beside_the_other_in_either_order() -> None:
    slowdown = measured(TABLE)
    assert slowdown(A, B) == (2.0, 1.5)
    assert slowdown(B, A) == (1.5, 2.0)
    assert slowdown(A, A) == (2.5, 2.5)


@pytest.mark.parametrize("kind", ["broken", "unmeasured", "absent", None])
def test_a_pair_that_did_not_run_or_is_unknown_is_no_pair(kind: str | None) -> None:
    assert measured(TABLE)(A, job("3", 10, kind=kind)) is None


def test_a_job_that_was_faster_beside_another_counts_as_not_slowed() -> None:
    assert measured(TABLE)(A, job("3", 10, kind="faster")) == (1.0, 2.0)


def test_a_table_with_several_gpu_types_needs_the_type(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"h200": TABLE, "t4": {"a": {"null": 1, "b": [1, 1]}, "b": {"null": 1}}}))
    assert read_table(path, "t4")(A, B) == (1.0, 1.0)
    assert read_table(path, "h200")(A, B) == (2.0, 1.5)
    with pytest.raises(FleetError, match="--gpu-type and one of h200, t4"):
        read_table(path)
    with pytest.raises(FleetError, match="no GPU type 'v100'; it has h200, t4"):
        read_table(path, "v100")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"t4": 3}', '{"t4": {"a": [1, 2]}}', "\x00"])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(FleetError, match=r"table\.json"):
        read_table(path)


@pytest.mark.parametrize("entry", [None, "x", [1], [1, "x"], [1, None], True, {"a": 1}, [float("nan"), 1.0]])
def test_an_entry_that_holds_no_two_numbers_is_no_pair(entry: object) -> None:
    assert measured({"a": {"null": 1.0, "b": entry}, "b": {"null": 1.0}})(A, B) is None


def test_the_resource_that_both_want_sets_the_slowdown() -> None:
    gpu, both = job("1", 10, resource_s=(0.0, 8.0, 2.0)), job("2", 10, resource_s=(0.5, 0.5, 0.0))
    assert by_resources(gpu, both) == pytest.approx((1.3, 1.3))


def test_jobs_that_want_different_resources_do_not_slow_each_other() -> None:
    assert by_resources(job("1", 10, resource_s=(3.0, 0.0)), job("2", 10, resource_s=(0.0, 1.0))) == (1.0, 1.0)


@pytest.mark.parametrize("times", [None, (1.0,), (0.0, 0.0)])
def test_jobs_without_comparable_times_are_no_pair(times: tuple[float, ...] | None) -> None:
    assert by_resources(job("1", 10, resource_s=times), job("2", 10, resource_s=(1.0, 1.0))) is None


@pytest.mark.parametrize("factor", [0.9, 0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_no_slowdown_is_refused(factor: float) -> None:
    with pytest.raises(FleetError, match="at least 1"):
        constant(factor)


def test_a_predictor_slows_the_offline_job_only() -> None:
    class Half:
        name = "half"

        def weight(self, slot: Slot, job: Job) -> Weight | None:
            return Weight(0.5, 0.0, "half") if job.kind == "b" else None

    slot = Slot("node", "GPU-1", "H200", "s", 0.5, 0.01, 0.01, 2**30, None)
    kinds = {kind: Job(kind, kind, 2**20, None) for kind in ("a", "b")}
    slowdown, service = predicted(Half(), {"s": slot}, kinds), job("s", 10, kind="s", online=True)
    assert (slowdown(service, B), slowdown(B, service)) == ((1.0, 2.0), (2.0, 1.0))
    assert slowdown(service, A) is None
    assert (slowdown(A, B), slowdown(service, service)) == (None, None)

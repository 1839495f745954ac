# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What judges the trial of the fleet on a real cluster, and that its pods are as the documentation has them."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from fleet.model import Job
from fleet.sources.pods import job_of
from tools.shipping.kubernetes.fleet import job
from tools.shipping.kubernetes.fleet import misses as small_misses
from tools.shipping.kubernetes.fleet_scale import Judge, misses, quantile


def pod(name: str, gpu: str | None, node: str | None = "node-1") -> dict[str, Any]:
    annotations = {} if gpu is None else {"gpuwarden.io/gpu": gpu}
    return {
        "metadata": {"name": name, "namespace": "batch", "uid": name, "annotations": annotations},
        "spec": {"nodeName": node},
        "status": {"phase": "Pending"},
    }


def judged(*changes: tuple[str, dict[str, Any]]) -> Judge:
    judge = Judge()
    for kind, one in changes:
        judge.changed(kind, one)
    return judge


def test_two_bound_pods_on_one_gpu_are_a_double_booking() -> None:
    assert judged(("ADDED", pod("a", "GPU-1")), ("ADDED", pod("b", "GPU-1"))).doubles == [
        ("GPU-1", "batch/b", "batch/a")
    ]


def test_a_gpu_that_was_given_back_before_is_none() -> None:
    judge = judged(("ADDED", pod("a", "GPU-1")), ("DELETED", pod("a", "GPU-1")), ("ADDED", pod("b", "GPU-1")))
    assert (judge.doubles, judge.count) == ([], 2)


def test_pods_without_a_gpu_are_none_and_what_is_not_bound_waits() -> None:
    judge = judged(("ADDED", pod("a", None)), ("ADDED", pod("b", None)), ("ADDED", pod("c", "GPU-1", None)))
    assert (judge.doubles, judge.count, judge.waiting()) == ([], 2, 1)


def test_a_pod_counts_as_bound_once() -> None:
    assert judged(("ADDED", pod("a", "GPU-1", None)), *[("MODIFIED", pod("a", "GPU-1"))] * 2).count == 1


def test_a_quantile_is_interpolated_within_its_bucket() -> None:
    buckets = {0.01: 50.0, 0.02: 90.0, 0.03: 100.0, inf: 100.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.01)
    assert quantile(buckets, 0.99) == pytest.approx(0.029)
    assert quantile({0.01: 0.0, inf: 5.0}, 0.5) == 0.01
    assert quantile({}, 0.5) is None


def test_each_goal_that_is_missed_is_named() -> None:
    good = {"filter_p99_ms": 20.0, "pods_per_second": 50.0, "double_bookings": 0}
    assert misses(good) == []
    for name, bad in (
        ("filter_p99_ms", 20.1),
        ("filter_p99_ms", None),
        ("pods_per_second", 49.9),
        ("double_bookings", 1),
    ):
        assert len(misses({**good, name: bad})) == 1
    assert small_misses({"beside_to_alone": 1.2, "scale": {"misses": ["x"]}}) == [
        "online p99 1.20 of alone, goal 1.1",
        "x",
    ]


def test_the_trials_pods_are_jobs_of_the_fleet() -> None:
    found = job_of(job("etl-1"))
    assert isinstance(found, Job)
    assert (found.key, found.kind, found.kernel_s) == ("batch/etl-1", "etl", 0.002)

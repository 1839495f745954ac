# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a window of the agents' counters says of pods beside services, and what it leaves out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from fleet.model import Job
from fleet.sources.prometheus import Sample
from fleet.sources.windows import Running, misses, sights
from fleet.weights.experience import Miss, Sight
from fleet.weights.table import Pair

DEVICE = {"instance": "n1", "UUID": "GPU-1", "gpu": "0"}
CHAT = {"instance": "n1", "container": "main", "pod": "chat", "namespace": "serving", "id": ""}
ETL = {"instance": "n1", "container": "main", "pod": "etl-1", "namespace": "batch", "id": ""}
RUNNING = {"batch/etl-1": Running(Job("batch/etl-1", "etl", 1 << 33, 0.002), 0.7)}
Rows = dict[str, list[Sample]]


def sample(value: float, *labels: dict[str, str], **more: str) -> Sample:
    return Sample({name: text for one in (*labels, more) for name, text in one.items()}, value)


def beside() -> Rows:
    """An offline pod beside an online service for ten minutes, which answered 3 % of its requests too late."""
    return {
        "gpuwarden_container_launches_total offset": [sample(5, ETL, DEVICE), sample(9, CHAT, DEVICE)],
        "increase(gpuwarden_container_launches_total": [sample(6000, ETL, DEVICE), sample(900, CHAT, DEVICE)],
        "max_over_time(gpuwarden_container_role_info": [
            sample(1, ETL, role="offline", rule="batch"),
            sample(1, CHAT, role="online", rule="chat"),
        ],
        "gpuwarden_device_info": [sample(1, DEVICE, model_name="H200")],
        "rate(gpuwarden_device_online_busy_seconds_total": [sample(0.25, DEVICE)],
        "rate(gpuwarden_device_online_gaps_total": [sample(50, DEVICE)],
        "increase(gpuwarden_container_slo_slow_requests_total": [sample(30, CHAT)],
        "increase(gpuwarden_container_slo_requests_total": [sample(1000, CHAT)],
        "max_over_time(gpuwarden_container_slo_quantile_ratio": [sample(0.99, CHAT)],
    }


def seen(rows: Rows) -> list[Sight]:
    return list(sights(lambda text: answer(rows, text), RUNNING, "600s", 600.0))


def missed(rows: Rows) -> list[Miss]:
    return list(misses(lambda text: answer(rows, text), RUNNING, "300s"))


def answer(rows: Rows, expression: str) -> Sequence[Sample]:
    return next(found for metric, found in rows.items() if expression.startswith(metric))


def test_a_pod_beside_a_service_has_a_rate_a_pair_and_the_services_load() -> None:
    (one,) = seen(beside())
    assert (one.pair, one.launches_per_s, one.expected, one.load) == (Pair("chat", "etl", "H200"), 10.0, 0.7, 0.25)
    assert one.gap_s == pytest.approx(0.75 / 50)


def test_a_service_without_a_request_in_the_window_has_no_load_and_one_gap() -> None:
    rows = beside()
    rows["rate(gpuwarden_device_online_busy_seconds_total"] = [sample(0, DEVICE)]
    rows["rate(gpuwarden_device_online_gaps_total"] = [sample(0, DEVICE)]
    (one,) = seen(rows)
    assert (one.load, one.gap_s) == (0.0, math.inf)


@pytest.mark.parametrize("role", ["periodic", ""])
def test_a_pod_beside_work_of_another_role_says_nothing_of_alone_or_of_a_pair(role: str) -> None:
    other = {**CHAT, "pod": "camera"}
    rows = beside()
    rows["increase(gpuwarden_container_launches_total"].append(sample(100, other, DEVICE))
    rows["gpuwarden_container_launches_total offset"].append(sample(1, other, DEVICE))
    if role:
        rows["max_over_time(gpuwarden_container_role_info"].append(sample(1, other, role=role, rule="camera"))
    assert seen(rows) == []


def test_a_rate_that_is_no_number_is_no_measurement() -> None:
    rows = beside()
    rows["increase(gpuwarden_container_launches_total"][0] = sample(math.nan, ETL, DEVICE)
    assert seen(rows) == []


def test_a_pod_alone_has_no_service() -> None:
    rows = beside()
    rows["increase(gpuwarden_container_launches_total"].pop()
    (one,) = seen(rows)
    assert one.online is None


@pytest.mark.parametrize("gone", [0, 1], ids=["the pod", "the service"])
def test_where_one_of_them_came_during_the_window_nothing_is_measured(gone: int) -> None:
    rows = beside()
    rows["gpuwarden_container_launches_total offset"].pop(gone)
    assert seen(rows) == []


def test_two_offline_pods_on_one_gpu_are_not_measured() -> None:
    rows = beside()
    other = {**ETL, "pod": "etl-2"}
    for name in ("gpuwarden_container_launches_total offset", "increase(gpuwarden_container_launches_total"):
        rows[name].append(sample(1, other, DEVICE))
    rows["max_over_time(gpuwarden_container_role_info"].append(sample(1, other, role="offline", rule="batch"))
    assert seen(rows) == []


def test_a_pod_that_is_not_the_fleets_is_left_out() -> None:
    rows = beside()
    assert list(sights(lambda text: answer(rows, text), {}, "600s", 600.0)) == []
    assert list(misses(lambda text: answer(rows, text), {}, "300s")) == []


def test_a_service_with_more_late_requests_than_it_promised_is_a_miss_of_the_pair() -> None:
    assert missed(beside()) == [Miss("batch/etl-1", Pair("chat", "etl", "H200"))]


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("increase(gpuwarden_container_slo_slow_requests_total", 9.0),
        ("increase(gpuwarden_container_slo_requests_total", 5000.0),
    ],
    ids=["too few to tell", "within the promise"],
)
def test_a_promise_that_is_kept_is_no_miss(metric: str, value: float) -> None:
    rows = beside()
    rows[metric] = [sample(value, CHAT)]
    assert missed(rows) == []


def test_a_pod_that_launched_nothing_is_not_blamed() -> None:
    rows = beside()
    rows["increase(gpuwarden_container_launches_total"][0] = sample(0, ETL, DEVICE)
    assert missed(rows) == []

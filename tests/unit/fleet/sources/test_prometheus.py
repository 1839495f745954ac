# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Slots out of figures: what has room, and what makes a GPU none. A real Prometheus is asked in the e2e tier."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from fleet.sources.prometheus import Found, Sample, find_slots

GIB = 1 << 30
DEVICE = {"instance": "n1", "UUID": "GPU-1", "gpu": "0"}
CHAT = {"instance": "n1", "container": "chat", "namespace": "serving", "id": "c1"}
ETL = {"instance": "n1", "container": "etl", "namespace": "batch", "id": "c2"}
Rows = dict[str, list[Sample]]


def sample(value: float, *labels: dict[str, str], **more: str) -> Sample:
    return Sample({name: text for one in (*labels, more) for name, text in one.items()}, value)


def healthy() -> Rows:
    """One GPU with an online service that is busy for a quarter of the time, by the metric that a query begins with."""
    return {
        "gpuwarden_device_info": [sample(1, DEVICE, model_name="H200")],
        "time() - gpuwarden_snapshot_timestamp_seconds": [sample(3, instance="n1")],
        "gpuwarden_device_health": [sample(1, DEVICE, state="healthy")],
        "gpuwarden_enforcing": [sample(1, instance="n1")],
        "gpuwarden_container_role_info": [sample(1, CHAT, role="online", rule="chat")],
        "gpuwarden_container_memory_bytes": [sample(20 * GIB, CHAT, DEVICE)],
        "gpuwarden_device_held_info": [],
        "gpuwarden_device_memory_size_bytes": [sample(80 * GIB, DEVICE)],
        "gpuwarden_device_memory_used_bytes": [sample(20 * GIB, DEVICE)],
        "max_over_time(gpuwarden_container_memory_bytes": [sample(20 * GIB, CHAT, DEVICE)],
        "rate(gpuwarden_device_online_busy_seconds_total": [sample(0.25, DEVICE)],
        "rate(gpuwarden_device_online_gaps_total": [sample(50, DEVICE)],
        "gpuwarden_container_slo_target_seconds": [sample(0.050, CHAT)],
        "max_over_time(gpuwarden_container_slo_latency_seconds": [sample(0.030, CHAT)],
        "gpuwarden_container_slo_also_target_seconds": [],
        "max_over_time(gpuwarden_container_slo_also_latency_seconds": [],
    }


def found(rows: Rows) -> Found:
    """Each query is for the rows under what it begins with."""

    def query(expression: str) -> Sequence[Sample]:
        return next(answer for metric, answer in rows.items() if expression.startswith(metric))

    return find_slots(query)


def test_a_gpu_that_has_room_is_a_slot() -> None:
    (slot,) = found(healthy()).slots
    assert (slot.node, slot.gpu, slot.model, slot.online) == ("n1", "GPU-1", "H200", "chat")
    assert slot.load == 0.25
    assert slot.gap_s == pytest.approx(0.75 / 50)
    assert slot.slack_s == pytest.approx(0.020)
    assert (slot.free_bytes, slot.spatial) == (60 * GIB, None)


def test_a_gpu_without_an_online_service_is_free_all_the_time() -> None:
    rows = {**healthy(), "gpuwarden_container_role_info": [], "gpuwarden_container_memory_bytes": []}
    (slot,) = found(rows).slots
    assert (slot.online, slot.load, slot.gap_s, slot.slack_s) == (None, 0.0, math.inf, math.inf)


def test_before_its_first_request_a_service_has_all_of_its_target_left() -> None:
    (slot,) = found({**healthy(), "max_over_time(gpuwarden_container_slo_latency_seconds": []}).slots
    assert slot.slack_s == pytest.approx(0.050)


def test_a_service_that_misses_its_target_leaves_no_slack() -> None:
    (slot,) = found({**healthy(), "max_over_time(gpuwarden_container_slo_latency_seconds": [sample(0.2, CHAT)]}).slots
    assert slot.slack_s == 0.0


def test_a_gpu_in_mig_mode_is_no_slot_and_its_instances_are() -> None:
    instance = {**DEVICE, "UUID": "MIG-1"}
    rows = healthy()
    rows["gpuwarden_device_info"].append(sample(1, instance, model_name="H200 1g", parent="GPU-1"))
    rows["gpuwarden_device_health"].append(sample(1, instance))
    rows["gpuwarden_device_memory_size_bytes"].append(sample(9 * GIB, instance))
    rows["gpuwarden_device_memory_used_bytes"].append(sample(0, instance))
    result = found(rows)
    assert [slot.gpu for slot in result.slots] == ["MIG-1"]
    assert not result.unknown


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda r: r.update({"time() - gpuwarden_snapshot_timestamp_seconds": [sample(61, instance="n1")]}),
            "stale figures",
        ),
        (
            lambda r: r.update({"time() - gpuwarden_snapshot_timestamp_seconds": [sample(-60, instance="n1")]}),
            "stale figures",
        ),
        (lambda r: r.update({"time() - gpuwarden_snapshot_timestamp_seconds": []}), "stale figures"),
        (lambda r: r.update({"gpuwarden_enforcing": [sample(0, instance="n1")]}), "not enforcing"),
        (lambda r: r.update({"gpuwarden_device_health": [sample(0, DEVICE)]}), "not healthy"),
        (lambda r: r.update({"gpuwarden_device_health": []}), "not healthy"),
        (lambda r: r["gpuwarden_device_info"].append(sample(1, DEVICE, instance="n2")), "two GPUs have its UUID"),
        (
            lambda r: r["gpuwarden_container_memory_bytes"].append(sample(1, ETL, DEVICE)),
            "used by a container without a role",
        ),
        (
            lambda r: r["gpuwarden_device_held_info"].append(sample(1, ETL, DEVICE)),
            "used by a container without a role",
        ),
        (lambda r: r.update({"gpuwarden_device_memory_size_bytes": []}), "impossible figures"),
        (lambda r: r.update({"gpuwarden_device_memory_size_bytes": [sample(-1, DEVICE)]}), "impossible figures"),
        (lambda r: r.update({"gpuwarden_device_memory_used_bytes": []}), "impossible figures"),
        (lambda r: r.update({"gpuwarden_device_memory_used_bytes": [sample(-50 * GIB, DEVICE)]}), "impossible figures"),
        (
            lambda r: r.update({"max_over_time(gpuwarden_container_memory_bytes": [sample(-GIB, CHAT, DEVICE)]}),
            "impossible figures",
        ),
        (
            lambda r: r.update({"max_over_time(gpuwarden_container_slo_latency_seconds": [sample(-1, CHAT)]}),
            "impossible figures",
        ),
        (
            lambda r: r.update({"gpuwarden_container_slo_target_seconds": [sample(math.inf, CHAT)]}),
            "impossible figures",
        ),
        (
            lambda r: r.update({"rate(gpuwarden_device_online_busy_seconds_total": [sample(math.nan, DEVICE)]}),
            "impossible figures",
        ),
        (lambda r: r.update({"rate(gpuwarden_device_online_busy_seconds_total": []}), "load unknown"),
        (lambda r: r.update({"rate(gpuwarden_device_online_gaps_total": [sample(0, DEVICE)]}), "load unknown"),
        (lambda r: r.update({"gpuwarden_container_slo_target_seconds": []}), "no latency is promised"),
    ],
)
def test_a_gpu_of_which_anything_is_missing_stale_or_impossible_is_counted_with_the_reason(
    change: Callable[[Rows], None], reason: str
) -> None:
    rows = healthy()
    change(rows)
    result = found(rows)
    assert result.slots == ()
    assert set(result.unknown) <= {reason, "stale figures"}
    assert result.unknown[reason] >= 1


def test_a_gpu_has_one_offline_job_at_most() -> None:
    rows = healthy()
    rows["gpuwarden_container_memory_bytes"].append(sample(GIB, ETL, DEVICE))
    rows["gpuwarden_container_role_info"].append(sample(1, ETL, role="offline", rule="etl"))
    assert found(rows).unknown == Counter({"has an offline job": 1})


def test_of_two_services_the_least_slack_counts() -> None:
    other = {**CHAT, "container": "rank", "id": "c3"}
    rows = healthy()
    rows["gpuwarden_container_memory_bytes"].append(sample(GIB, other, DEVICE))
    rows["gpuwarden_container_role_info"].append(sample(1, other, role="online", rule="rank"))
    rows["gpuwarden_container_slo_target_seconds"].append(sample(0.010, other))
    (slot,) = found(rows).slots
    assert slot.online == "chat+rank"
    assert slot.slack_s == pytest.approx(0.010)


def test_of_two_promises_of_one_service_the_least_slack_counts() -> None:
    rows = healthy()
    rows["gpuwarden_container_slo_also_target_seconds"] = [sample(0.020, CHAT)]
    rows["max_over_time(gpuwarden_container_slo_also_latency_seconds"] = [sample(0.015, CHAT)]
    (slot,) = found(rows).slots
    assert slot.slack_s == pytest.approx(0.005)


def test_memory_of_a_job_that_has_gone_is_free_and_what_the_service_had_at_its_most_is_not() -> None:
    rows = healthy()
    rows["max_over_time(gpuwarden_container_memory_bytes"] = [
        sample(30 * GIB, CHAT, DEVICE),
        sample(40 * GIB, ETL, DEVICE),  # has ended
    ]
    (slot,) = found(rows).slots
    assert slot.free_bytes == 50 * GIB
    rows["gpuwarden_device_memory_used_bytes"] = [sample(70 * GIB, DEVICE)]  # whatever it is
    (slot,) = found(rows).slots
    assert slot.free_bytes == 0  # the service may grow by 10 GiB again


def test_a_service_without_a_request_in_the_window_leaves_all_the_time() -> None:
    rows = healthy()
    rows["rate(gpuwarden_device_online_busy_seconds_total"] = [sample(0, DEVICE)]
    rows["rate(gpuwarden_device_online_gaps_total"] = [sample(0, DEVICE)]
    (slot,) = found(rows).slots
    assert (slot.online, slot.load, slot.gap_s) == ("chat", 0.0, math.inf)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which pods are jobs, and what they ask for."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.model import FleetError, Job
from fleet.sources.pods import documents, quantity, seconds, waiting

_ASKS = {"gpuwarden.io/memory": "20Gi"}


def pod(name: str, annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """A pod that waits for our scheduler."""
    metadata = {
        "name": name,
        "namespace": "batch",
        "annotations": _ASKS if annotations is None else annotations,
        "creationTimestamp": "2026-11-26T10:00:00Z",
    }
    return {"metadata": metadata, "spec": {"schedulerName": "gpuwarden", **spec}, "status": {"phase": "Pending"}}


def test_a_pod_that_waits_for_our_scheduler_is_a_job() -> None:
    annotations = {
        "gpuwarden.io/memory": "512MiB",
        "gpuwarden.io/kind": "etl",
        "gpuwarden.io/kernel": "2ms",
        "gpuwarden.io/value": "3",
    }
    (job,) = waiting([pod("etl-1", annotations)]).jobs
    assert job == Job("batch/etl-1", "etl", 512 << 20, 0.002, 3.0)


def test_pods_of_one_controller_are_of_one_kind() -> None:
    owned = pod("train-7xk2")
    owned["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "train"}]
    assert [job.kind for job in waiting([owned, pod("alone")]).jobs] == ["batch/alone", "batch/train"]


def test_the_longest_waiting_is_the_first() -> None:
    late = pod("a")
    late["metadata"]["creationTimestamp"] = "2026-11-26T11:00:00Z"
    assert [job.key for job in waiting([late, pod("b")]).jobs] == ["batch/b", "batch/a"]


@pytest.mark.parametrize(
    "other",
    [
        pod("x", schedulerName="default-scheduler"),
        pod("x", nodeName="node-1"),
        {**pod("x"), "status": {"phase": "Running"}},
        {**pod("x"), "metadata": {**pod("x")["metadata"], "deletionTimestamp": "2026-11-26T10:00:00Z"}},
        "no pod",
        {},
    ],
)
def test_any_other_pod_is_none_and_no_mistake(other: Any) -> None:
    assert waiting([other]) == waiting([])


@pytest.mark.parametrize(
    ("annotations", "reason"),
    [
        ({}, "no gpuwarden.io/memory, such as 20Gi"),
        ({"gpuwarden.io/memory": "much"}, "no gpuwarden.io/memory, such as 20Gi"),
        ({"gpuwarden.io/memory": "-1Gi"}, "no gpuwarden.io/memory, such as 20Gi"),
        ({**_ASKS, "gpuwarden.io/kernel": "fast"}, "gpuwarden.io/kernel is no time, such as 2ms"),
        ({**_ASKS, "gpuwarden.io/value": "-1"}, "gpuwarden.io/value is no number from 0.001 to 1000"),
        ({**_ASKS, "gpuwarden.io/value": "1e20"}, "gpuwarden.io/value is no number from 0.001 to 1000"),
        ({"gpuwarden.io/memory": "9" * 400}, "no gpuwarden.io/memory, such as 20Gi"),
        ({**_ASKS, "gpuwarden.io/value": "nan"}, "gpuwarden.io/value is no number from 0.001 to 1000"),
    ],
)
def test_a_pod_that_cannot_be_placed_is_counted_with_the_reason(annotations: dict[str, str], reason: str) -> None:
    found = waiting([pod("x", annotations), pod("good")])
    assert (len(found.jobs), found.refused) == (1, Counter({reason: 1}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"items": 1}', "\x00"])
def test_what_is_no_list_of_pods_is_refused_with_what_to_give(text: str) -> None:
    with pytest.raises(FleetError, match="kubectl get pods -A -o json"):
        waiting(documents(text))


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["9" * 400, "1e300", "20Gi", "2ms"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "kind", "items"]), inner),
)
_ANNOTATIONS = st.dictionaries(
    st.sampled_from([f"gpuwarden.io/{name}" for name in ("memory", "kernel", "kind", "value")]), _ANYTHING
)


@given(
    st.fixed_dictionaries(
        {"name": _ANYTHING, "annotations": _ANNOTATIONS | _ANYTHING, "ownerReferences": _ANYTHING},
        optional={"namespace": _ANYTHING, "creationTimestamp": _ANYTHING},
    )
)
def test_whatever_a_pod_says_of_itself_it_is_a_job_or_refused(metadata: dict[str, Any]) -> None:
    found = waiting(documents(json.dumps({"items": [{**pod("x"), "metadata": metadata}, pod("good")]})))
    assert len(found.jobs) + found.refused.total() == 2
    assert all(0 < job.memory_bytes < 1 << 112 and 0 < job.value <= 1000 for job in found.jobs)


@given(_ANYTHING, st.sampled_from(["metadata", "spec", "status"]))
def test_no_document_raises(document: Any, part: str) -> None:
    """Whatever the API server lists."""
    waiting(documents(json.dumps({"items": [document, {**pod("x"), part: document}]})))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("20Gi", 20 << 30),
        ("20GiB", 20 << 30),
        ("1.5G", 1_500_000_000),
        ("7", 7),
        ("1 Gi", None),
        ("Gi", None),
        ("1e3", None),
    ],
)
def test_quantities_are_read_as_kubernetes_writes_them(text: str, found: int | None) -> None:
    assert quantity(text) == found


@pytest.mark.parametrize(
    ("text", "found"), [("2ms", 0.002), ("500us", 0.0005), ("1.5s", 1.5), ("2", None), ("-2ms", None)]
)
def test_times_have_a_unit(text: str, found: float | None) -> None:
    assert seconds(text) == (None if found is None else pytest.approx(found))

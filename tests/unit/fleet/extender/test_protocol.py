# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The extender's JSON, as kube-scheduler writes and reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleet.extender.answers import Board
from fleet.extender.protocol import (
    BindRequest,
    Question,
    View,
    bind_request,
    bind_result,
    filter_result,
    prioritize_result,
    question,
)
from fleet.extender.reservations import Reservation, Reservations
from fleet.match.plan import solve
from fleet.model import FleetError, Job, Slot
from fleet.weights.physical import Physical

GIB = 1 << 30
POD = {
    "metadata": {
        "name": "etl-1",
        "namespace": "batch",
        "uid": "u1",
        "annotations": {"gpuwarden.io/memory": "20Gi", "gpuwarden.io/kind": "etl", "gpuwarden.io/kernel": "1ms"},
    },
    "spec": {"schedulerName": "gpuwarden"},
    "status": {"phase": "Pending"},
}
SLOTS = [
    Slot("a", "GPU-a", "H200", None, 0.0, 1.0, 1.0, 40 * GIB, None),
    Slot("b", "GPU-b", "H200", None, 0.0, 1.0, 1.0, 10 * GIB, None),
    Slot("spare", "GPU-c", "H200", None, 0.0, 1.0, 1.0, 40 * GIB, None),
]
ARGS = {"Pod": POD, "Nodes": None, "NodeNames": ["a", "b"]}


def view(reservations: Reservations | None = None, refusal: str | None = None) -> View:
    plan = solve(SLOTS, [Job("batch/etl-1", "etl", 20 * GIB, 0.001)], Physical())
    return View(Board.of(plan, Physical()), reservations or Reservations(), refusal)


def reserved(node: str | None) -> Reservations:
    return Reservations().reserved(Reservation("u1", "batch/etl-1", "GPU-a", node, 0.0))


def test_a_filter_says_which_nodes_and_why_not_the_others() -> None:
    golden = """{"Nodes": null, "NodeNames": ["a"], "FailedNodes": {"b": "no healthy GPU with 20 GiB"},
                 "FailedAndUnresolvableNodes": {}, "Error": ""}"""
    assert filter_result(view(), question(ARGS)) == json.loads(golden)


def test_while_nothing_new_is_placed_each_node_is_refused_with_the_reason_and_nobody_is_evicted_for_it() -> None:
    reason = "nothing new is placed: Prometheus does not answer"
    golden = {"a": reason, "b": reason}
    found = filter_result(view(refusal=reason), question(ARGS))
    assert (found["NodeNames"], found["FailedNodes"], found["FailedAndUnresolvableNodes"]) == ([], golden, golden)


def test_a_pod_without_a_memory_request_says_what_it_lacks() -> None:
    bare = {**POD, "metadata": {**POD["metadata"], "annotations": {}}}  # type: ignore[dict-item]
    found = filter_result(view(), question({**ARGS, "Pod": bare}))
    assert "gpuwarden.io/memory, such as 20Gi" in found["FailedNodes"]["a"]


def test_scores_are_a_list_of_host_and_score_of_0_to_10() -> None:
    assert prioritize_result(view(), question(ARGS)) == [{"Host": "a", "Score": 10}, {"Host": "b", "Score": 0}]


def test_a_pod_that_has_a_reservation_is_offered_its_node_only() -> None:
    asked = Question(POD, ("a", "b"))
    found = filter_result(view(reserved("a")), asked)
    assert found["NodeNames"] == ["a"]
    assert found["FailedNodes"] == {"b": "the pod has GPU-a on a reserved"}
    assert prioritize_result(view(reserved("a")), asked)[0] == {"Host": "a", "Score": 10}


def test_a_reservation_whose_node_is_unknown_offers_none() -> None:
    assert filter_result(view(reserved(None)), Question(POD, ("a", "b")))["NodeNames"] == []


def test_a_request_to_bind_has_four_names() -> None:
    document = {"PodName": "etl-1", "PodNamespace": "batch", "PodUID": "u1", "Node": "a"}
    assert bind_request(document) == BindRequest("batch", "etl-1", "u1", "a")
    assert bind_result("") == {"Error": ""}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "no JSON object"),
        ({}, "needs the object Pod"),
        ({"Pod": POD}, "nodeCacheCapable: true"),
        ({"Pod": POD, "Nodes": {"items": []}, "NodeNames": None}, "nodeCacheCapable: true"),
        ({"Pod": POD, "NodeNames": [1]}, "nodeCacheCapable: true"),
    ],
)
def test_what_is_no_question_is_refused_with_what_to_do(document: Any, reason: str) -> None:
    with pytest.raises(FleetError, match=reason):
        question(document)


@pytest.mark.parametrize("lost", ["PodName", "PodNamespace", "PodUID", "Node"])
def test_a_request_to_bind_that_lacks_a_name_says_which(lost: str) -> None:
    document = {"PodName": "etl-1", "PodNamespace": "batch", "PodUID": "u1", "Node": "a", lost: ""}
    with pytest.raises(FleetError, match=lost):
        bind_request(document)

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Pods that declare their own class: only where the policy lets them, and never to another pod's harm."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.containers.identity import Names, applied, bounded
from agent.core.model import Container, ContainerKey
from enforce.audit.status import ContainerFigures, Paused, statuses
from enforce.controller.decision import DecisionInputs, Decisions
from enforce.policy.annotations import KEYS, PREFIX, classified
from enforce.policy.load import parse
from enforce.policy.model import Classification, ContainerFacts, HttpSource, OfflineRule, OnlineRule, PeriodicRule, Role
from enforce.workloads import Workload, log_misconfigured

ALLOWED = "version: 1\nannotations: {online: [serving], offline: [serving, batch], periodic: [serving]}\n"


def classification_of(annotations: dict[str, str], namespace: str = "serving", policy: str = ALLOWED) -> Classification:
    annotations = {f"{PREFIX}{key}": value for key, value in annotations.items()}
    it = Container(ContainerKey("k"), "main", "containerd", "", "p-0", namespace, annotations=annotations)
    return classified(parse(policy, "p"), ContainerFacts(it))


def test_an_online_pod_declares_its_objective() -> None:
    found = classification_of({"class": "online", "slo-p99": "50ms"})
    assert found.role is Role.ONLINE
    assert isinstance(found.rule, OnlineRule)
    slo = found.rule.slo
    assert (slo.quantile, slo.target_ns, slo.window_ns, slo.min_samples) == (0.99, 50_000_000, 10_000_000_000, 20)
    assert (slo.signal, slo.source, found.rule.name) == ("gpu_wait", None, "annotations")


@pytest.mark.parametrize("keys", [("slo-p99", "slo-p50"), ("slo-p50", "slo-p99")])
def test_an_online_pod_may_declare_a_second_quantile_in_any_order(keys: tuple[str, str]) -> None:
    targets = {"slo-p99": "50ms", "slo-p50": "8ms"}
    found = classification_of({"class": "online", **{key: targets[key] for key in keys}})
    assert isinstance(found.rule, OnlineRule)
    slo = found.rule.slo
    assert slo.also is not None
    assert (slo.quantile, slo.target_ns) == (0.99, 50_000_000)
    assert (slo.also.quantile, slo.also.target_ns, slo.also.also) == (0.5, 8_000_000, None)


def test_an_online_pod_may_name_its_port() -> None:
    more = {"signal": "http", "port": "8000", "path": "/v1/", "window": "5s", "min-samples": "50"}
    found = classification_of({"class": "online", "slo-p95": "200ms", **more})
    assert isinstance(found.rule, OnlineRule)
    slo = found.rule.slo
    assert (slo.source, slo.window_ns, slo.min_samples) == (HttpSource(8000, "/v1/"), 5_000_000_000, 50)


def test_an_offline_pod_gets_the_defaults_of_a_rule() -> None:
    found = classification_of({"class": "offline", "weight": "0.5"})
    assert found.role is Role.OFFLINE
    assert isinstance(found.rule, OfflineRule)
    [default] = parse("version: 1\noffline: [{name: annotations, match: {pod: a}}]\n", "p").offline
    assert replace(found.rule, match=default.match, weight=1.0) == default
    assert found.rule.weight == 0.5


def test_a_periodic_pod_has_a_deadline_or_that_of_its_period() -> None:
    found = [classification_of({"class": "periodic", "period": "40ms", **more}) for more in ({}, {"deadline": "30ms"})]
    assert [one.role for one in found] == [Role.PERIODIC] * 2
    deadlines = [one.rule.deadline_ns for one in found if isinstance(one.rule, PeriodicRule)]
    assert deadlines == [40_000_000, 30_000_000]


@pytest.mark.parametrize(
    ("key", "quantile"), [("slo-p50", 0.5), ("slo-p99", 0.99), ("slo-p99.9", 0.999), ("slo-p999", 0.999)]
)
def test_the_quantile_is_in_the_name(key: str, quantile: float) -> None:
    found = classification_of({"class": "online", key: "1s"})
    assert isinstance(found.rule, OnlineRule)
    assert found.rule.slo.quantile == quantile


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({"slo-p99": "50ms"}, "class is not there; write online, offline or periodic"),
        ({"class": "onlin"}, "did you mean online?"),
        ({"class": "online"}, "write one such as gpuwarden.io/slo-p99: 50ms"),
        ({"class": "online", "slo-p99": "50ms", "slo-p50": "9ms", "slo-p9": "1ms"}, "write up to two of them"),
        (
            {"class": "online", "slo-p999": "50ms", "slo-p99.9": "9ms"},
            "slo-p99.9 and slo-p999 are the same",
        ),
        ({"class": "online", "slo-p99": "50ms", "slo-p50": "50ms"}, "slo-p50: is not below slo-p99"),
        ({"class": "online", "slo-p99": "50"}, "slo-p99: '50' is a duration without a unit"),
        ({"class": "online", "slo-p0": "50ms"}, "slo-p0: is no annotation of an online pod; did you mean slo-p99?"),
        ({"class": "online", "slo-p100": "50ms"}, "is no annotation of an online pod"),
        ({"class": "online", "slo-p99": "50ms", "signal": "prometheus"}, "write one of: gpu_wait, http"),
        ({"class": "online", "slo-p99": "50ms", "url": "http://a/m"}, "url: is no annotation of an online pod"),
        ({"class": "online", "slo-p99": "50ms", "signal": "http"}, "has no port"),
        ({"class": "online", "slo-p99": "50ms", "port": "80"}, "only signal http has port"),
        ({"class": "online", "slo-p99": "50ms", "path": "/"}, "only signal http has path"),
        ({"class": "online", "slo-p99": "50ms", "signal": "http", "port": "http"}, "is not a whole number"),
        ({"class": "online", "slo-p99": "50ms", "weight": "1"}, "weight: is no annotation of an online pod"),
        ({"class": "offline", "weight": "2"}, "only the policy file gives more"),
        ({"class": "offline", "weight": "NaN"}, "out of range"),
        ({"class": "offline", "weight": "1e-320"}, "write a number from 0.001 to 1"),
        ({"class": "offline", "slo-p99": "50ms"}, "slo-p99: is no annotation of an offline pod"),
        ({"class": "offline", "wieght": "1"}, "did you mean weight?"),
        ({"class": "periodic", "deadline": "30ms"}, "write one such as gpuwarden.io/period: 40ms"),
        (
            {"class": "periodic", "period": "40ms", "deadline": "50ms"},
            "deadline: is above the period; write up to 40ms",
        ),
        ({"class": "periodic", "period": "40"}, "period: 40 is a duration without a unit"),
        ({"class": "periodic", "period": "40ms", "weight": "1"}, "weight: is no annotation of a periodic pod"),
    ],
)
def test_a_mistake_is_reported_and_the_pod_left_alone(annotations: dict[str, str], expected: str) -> None:
    found = classification_of(annotations)
    assert (found.role, found.rule, found.misconfigured) == (Role.UNMATCHED, None, True)
    assert expected in found.reason


def test_no_policy_that_does_not_name_the_namespace_listens() -> None:
    offline, online = {"class": "offline"}, {"class": "online", "slo-p99": "1s"}
    for one in (offline, online):
        for policy in ("version: 1\n", ALLOWED):
            found = classification_of(one, "other", policy)
            assert (found.role, found.misconfigured) == (Role.UNMATCHED, True)
            assert "does not name its namespace" in found.reason


def test_no_pod_promotes_itself_unless_its_namespace_may() -> None:
    found = classification_of({"class": "online", "slo-p99": "1s"}, "batch")
    assert found.role is Role.UNMATCHED
    assert "annotations.online of the policy does not name its namespace" in found.reason
    assert classification_of({"class": "offline"}, "batch").role is Role.OFFLINE


@pytest.mark.parametrize(
    ("rules", "role"),
    [
        ("offline: [{name: t, match: {pod: p-0}}]\n", Role.OFFLINE),
        ("protect: [{pod: p-0}]\n", Role.PROTECTED),
        ("offline: [{name: t, match: {pod: p-0}}, {name: u, match: {pod: p-*}}]\n", Role.UNMATCHED),
    ],
)
def test_the_files_rules_win(rules: str, role: Role) -> None:
    assert classification_of({"class": "online", "slo-p99": "1s"}, policy=ALLOWED + rules).role is role


def test_a_pod_without_annotations_is_unmatched_as_ever() -> None:
    assert classification_of({}) == Classification(Role.UNMATCHED)


WORDS = st.sampled_from([*KEYS["online"], *KEYS["offline"], "class", "slo-p99", "slo-p5", "min-samples", "x"])
VALUES = st.sampled_from(["online", "offline", "50ms", "1", "0.5", "http", "8000", "/", "NaN", "[" * 200]) | st.text()


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(WORDS | st.text(max_size=9), VALUES, max_size=6), st.text(max_size=9), st.booleans())
def test_any_annotations_are_applied_or_reported_and_harm_no_other_pod(
    annotations: dict[str, str], namespace: str, any_namespace: bool
) -> None:
    policy = 'version: 1\nannotations: {online: "*", offline: "*"}\n' if any_namespace else ALLOWED
    found = classification_of(annotations, namespace or "serving", policy)
    if isinstance(found.rule, OfflineRule):
        assert found.rule.weight <= 1
    elif isinstance(found.rule, OnlineRule):
        assert any_namespace or (namespace or "serving") == "serving"
        assert found.rule.slo.signal in ("gpu_wait", "http")
    else:
        assert found.reason.isprintable() or not all(key.isprintable() for key in annotations)


def test_only_our_annotations_are_kept_and_within_bounds() -> None:
    many = {f"gpuwarden.io/{number}": "x" * 1000 for number in range(100)}
    names = bounded(Names("n", annotations={**many, "checksum/config": "1", "gpuwarden.io/\x1b": "a"}))
    assert all(key.startswith(PREFIX) and key.isprintable() for key in names.annotations)
    assert sum(map(len, names.annotations.values())) <= 16 * 256
    it = applied(names, Container(ContainerKey("k"), "n", "containerd"))
    assert it.annotations == names.annotations


def test_the_snapshot_has_the_reason_why_a_misconfigured_pod_is_left_alone() -> None:
    it = Container(ContainerKey("k"), "main", "containerd", "", "p-0", "serving")
    found = classification_of({"class": "online"})
    figures = ContainerFigures({it.key: Paused(0, 0.0, None)})
    here = {it.key: Workload(it, found, (), frozenset())}
    reported = statuses(DecisionInputs(here, {}, {}), Decisions((), {}), figures)[it.key]
    assert (reported.role, reported.reason) == ("unmatched", found.reason)
    here = {it.key: Workload(it, classification_of({}), (), frozenset())}
    assert statuses(DecisionInputs(here, {}, {}), Decisions((), {}), figures)[it.key].reason is None


def test_a_misconfigured_container_is_logged_once_while_it_is_present_and_again_for_another_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = Container(ContainerKey("k"), "main", "containerd", "", "p-0", "serving")
    first = {it.key: Workload(it, classification_of({"class": "x"}), (), frozenset())}
    with caplog.at_level(logging.WARNING):
        logged = log_misconfigured(first, {})
        logged = log_misconfigured(first, logged)
        assert len(caplog.records) == 1
        assert "serving/p-0/main: its annotations are ignored" in caplog.text
        for _ in range(3):
            logged = log_misconfigured({it.key: Workload(it, classification_of({}), (), frozenset())}, logged)
            logged = log_misconfigured(first, logged)
        assert len(caplog.records) == 1
        logged = log_misconfigured({it.key: Workload(it, classification_of({"class": "y"}), (), frozenset())}, logged)
        assert len(caplog.records) == 2
        logged = log_misconfigured({}, logged)
        assert not logged
        log_misconfigured(first, logged)
    assert len(caplog.records) == 3

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Pods that say of themselves what they are: only where the policy lets them, and never to anybody's harm."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.containers.answers import Names, applied, bounded
from agent.model import Container, ContainerKey
from enforce.amiss import tell
from enforce.decide import Decided
from enforce.policy.annotations import KEYS, PREFIX, classified
from enforce.policy.load import parse
from enforce.policy.model import Classification, Facts, HttpSource, OfflineRule, OnlineRule, Role
from enforce.report import Paused, report
from enforce.roster import Seat

ALLOWED = "version: 1\nannotations: {online: [serving], offline: [serving, batch]}\n"


def said(annotations: dict[str, str], namespace: str = "serving", policy: str = ALLOWED) -> Classification:
    annotations = {f"{PREFIX}{key}": value for key, value in annotations.items()}
    it = Container(ContainerKey("k"), "main", "containerd", "", "p-0", namespace, annotations=annotations)
    return classified(parse(policy, "p"), Facts(it))


def test_an_online_pod_says_what_it_is_promised() -> None:
    found = said({"class": "online", "slo-p99": "50ms"})
    assert found.role is Role.ONLINE
    assert isinstance(found.rule, OnlineRule)
    slo = found.rule.slo
    assert (slo.quantile, slo.target_ns, slo.window_ns, slo.min_samples) == (0.99, 50_000_000, 10_000_000_000, 20)
    assert (slo.signal, slo.source, found.rule.name) == ("gpu_wait", None, "annotations")


def test_an_online_pod_may_name_its_port() -> None:
    more = {"signal": "http", "port": "8000", "path": "/v1/", "window": "5s", "min-samples": "50"}
    found = said({"class": "online", "slo-p95": "200ms", **more})
    assert isinstance(found.rule, OnlineRule)
    slo = found.rule.slo
    assert (slo.source, slo.window_ns, slo.min_samples) == (HttpSource(8000, "/v1/"), 5_000_000_000, 50)


def test_an_offline_pod_gets_the_defaults_of_a_rule() -> None:
    found = said({"class": "offline", "weight": "0.5"})
    assert found.role is Role.OFFLINE
    assert isinstance(found.rule, OfflineRule)
    [default] = parse("version: 1\noffline: [{name: annotations, match: {pod: a}}]\n", "p").offline
    assert replace(found.rule, match=default.match, weight=1.0) == default
    assert found.rule.weight == 0.5


@pytest.mark.parametrize(
    ("key", "quantile"), [("slo-p50", 0.5), ("slo-p99", 0.99), ("slo-p99.9", 0.999), ("slo-p999", 0.999)]
)
def test_the_quantile_is_in_the_name(key: str, quantile: float) -> None:
    found = said({"class": "online", key: "1s"})
    assert isinstance(found.rule, OnlineRule)
    assert found.rule.slo.quantile == quantile


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({"slo-p99": "50ms"}, "class is not there; write online or offline"),
        ({"class": "onlin"}, "did you mean online?"),
        ({"class": "online"}, "write one such as gpuwarden.io/slo-p99: 50ms"),
        ({"class": "online", "slo-p99": "50ms", "slo-p50": "9ms"}, "are both there"),
        ({"class": "online", "slo-p99": "50"}, "slo-p99: '50' is a duration without a unit"),
        ({"class": "online", "slo-p0": "50ms"}, "slo-p0: is nothing that an online pod can say; did you mean slo-p99?"),
        ({"class": "online", "slo-p100": "50ms"}, "is nothing that an online pod can say"),
        ({"class": "online", "slo-p99": "50ms", "signal": "prometheus"}, "write one of: gpu_wait, http"),
        ({"class": "online", "slo-p99": "50ms", "url": "http://a/m"}, "url: is nothing that an online pod can say"),
        ({"class": "online", "slo-p99": "50ms", "signal": "http"}, "has no port"),
        ({"class": "online", "slo-p99": "50ms", "port": "80"}, "only signal http has port"),
        ({"class": "online", "slo-p99": "50ms", "path": "/"}, "only signal http has path"),
        ({"class": "online", "slo-p99": "50ms", "signal": "http", "port": "http"}, "is not a whole number"),
        ({"class": "online", "slo-p99": "50ms", "weight": "1"}, "weight: is nothing that an online pod can say"),
        ({"class": "offline", "weight": "2"}, "only the policy file gives more"),
        ({"class": "offline", "weight": "NaN"}, "out of range"),
        ({"class": "offline", "weight": "1e-320"}, "write a number from 0.001 to 1"),
        ({"class": "offline", "slo-p99": "50ms"}, "slo-p99: is nothing that an offline pod can say"),
        ({"class": "offline", "wieght": "1"}, "did you mean weight?"),
    ],
)
def test_a_mistake_is_told_and_the_pod_left_alone(annotations: dict[str, str], says: str) -> None:
    found = said(annotations)
    assert (found.role, found.rule, found.amiss) == (Role.UNMATCHED, None, True)
    assert says in found.reason


def test_no_policy_that_does_not_name_the_namespace_listens() -> None:
    offline, online = {"class": "offline"}, {"class": "online", "slo-p99": "1s"}
    for one in (offline, online):
        for policy in ("version: 1\n", ALLOWED):
            found = said(one, "other", policy)
            assert (found.role, found.amiss) == (Role.UNMATCHED, True)
            assert "does not name its namespace" in found.reason


def test_nobody_promotes_itself_unless_its_namespace_may() -> None:
    found = said({"class": "online", "slo-p99": "1s"}, "batch")
    assert found.role is Role.UNMATCHED
    assert "annotations.online of the policy does not name its namespace" in found.reason
    assert said({"class": "offline"}, "batch").role is Role.OFFLINE


@pytest.mark.parametrize(
    ("rules", "role"),
    [
        ("offline: [{name: t, match: {pod: p-0}}]\n", Role.OFFLINE),
        ("protect: [{pod: p-0}]\n", Role.PROTECTED),
        ("offline: [{name: t, match: {pod: p-0}}, {name: u, match: {pod: p-*}}]\n", Role.UNMATCHED),
    ],
)
def test_the_files_rules_win(rules: str, role: Role) -> None:
    assert said({"class": "online", "slo-p99": "1s"}, policy=ALLOWED + rules).role is role


def test_who_says_nothing_is_unmatched_as_ever() -> None:
    assert said({}) == Classification(Role.UNMATCHED)


WORDS = st.sampled_from([*KEYS["online"], *KEYS["offline"], "class", "slo-p99", "slo-p5", "min-samples", "x"])
VALUES = st.sampled_from(["online", "offline", "50ms", "1", "0.5", "http", "8000", "/", "NaN", "[" * 200]) | st.text()


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(WORDS | st.text(max_size=9), VALUES, max_size=6), st.text(max_size=9), st.booleans())
def test_whatever_a_pod_says_it_is_taken_or_told_and_harms_nobody(
    annotations: dict[str, str], namespace: str, anybody: bool
) -> None:
    policy = 'version: 1\nannotations: {online: "*", offline: "*"}\n' if anybody else ALLOWED
    found = said(annotations, namespace or "serving", policy)
    if isinstance(found.rule, OfflineRule):
        assert found.rule.weight <= 1
    elif isinstance(found.rule, OnlineRule):
        assert anybody or (namespace or "serving") == "serving"
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


def test_the_snapshot_says_why_a_pod_that_meant_otherwise_is_left_alone() -> None:
    it = Container(ContainerKey("k"), "main", "containerd", "", "p-0", "serving")
    found = said({"class": "online"})
    here = {it.key: Seat(it, found, (), frozenset())}
    told = report(here, {}, Decided((), {}), {it.key: Paused(0, 0.0, None)}, {})[it.key]
    assert (told.role, told.reason) == ("unmatched", found.reason)
    here = {it.key: Seat(it, said({}), (), frozenset())}
    assert report(here, {}, Decided((), {}), {it.key: Paused(0, 0.0, None)}, {})[it.key].reason is None


def test_what_is_amiss_is_logged_once_while_the_container_is_there_and_again_for_another_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = Container(ContainerKey("k"), "main", "containerd", "", "p-0", "serving")
    first = {it.key: Seat(it, said({"class": "x"}), (), frozenset())}
    with caplog.at_level(logging.WARNING):
        told = tell(first, {})
        told = tell(first, told)
        assert len(caplog.records) == 1
        assert "serving/p-0/main: its annotations are not taken" in caplog.text
        for _ in range(3):
            told = tell({it.key: Seat(it, said({}), (), frozenset())}, told)
            told = tell(first, told)
        assert len(caplog.records) == 1
        told = tell({it.key: Seat(it, said({"class": "y"}), (), frozenset())}, told)
        assert len(caplog.records) == 2
        told = tell({}, told)
        assert not told
        tell(first, told)
    assert len(caplog.records) == 3

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A container stays in its offline rule whatever its processes call themselves, and what leaves a rule is counted."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.containers.gpu_processes import GpuProcess
from agent.core.model import HOST, Container, ContainerKey, Process, ProcessId
from enforce.policy.load import parse
from enforce.policy.model import Policy, Role
from enforce.workloads import Memberships

BY_COMMAND = """\
version: 1
online:
  - name: chat
    match: {command: "*vllm*"}
    slo: {signal: gpu_wait, quantile: 0.99, target: 50ms, window: 10s}
offline:
  - {name: training, match: {container: job, command: "*train*"}, law: headroom}
protect:
  - {command: "*debug*"}
"""
JOB = Container(ContainerKey("docker:a"), "job", "docker", "a" * 64, cgroup="/docker/a")


def policy(text: str = BY_COMMAND) -> Policy:
    return parse(text, "p")


def member(tgid: int, command: str, container: Container = JOB) -> GpuProcess:
    return GpuProcess(Process(ProcessId(tgid, 1), command, "root", container.key), container, ())


def role(known: Memberships, members: Iterable[GpuProcess], container: Container = JOB, text: str = BY_COMMAND) -> Role:
    return known.classify(policy(text), container, list(members)).role


@pytest.fixture
def known() -> Memberships:
    known = Memberships()
    known.begin(policy())
    return known


@pytest.mark.parametrize("odd", ["x", "vllm serve", "debug", "train"])
def test_one_odd_process_does_not_take_a_container_out_of_its_rule(known: Memberships, odd: str) -> None:
    first = member(1, "python train.py")
    assert role(known, [first]) is Role.OFFLINE
    for _ in range(3):
        assert role(known, [first, member(2, odd)]) is Role.OFFLINE
    assert not any(known.left.values())


def test_a_process_that_changes_its_own_command_stays_in_its_rule(known: Memberships) -> None:
    assert role(known, [member(1, "python train.py")]) is Role.OFFLINE
    assert role(known, [member(1, "vllm")]) is Role.OFFLINE


def test_processes_that_match_hand_the_rule_on_and_without_one_it_is_left_and_counted(
    known: Memberships, caplog: pytest.LogCaptureFixture
) -> None:
    assert role(known, [member(1, "train 1")]) is Role.OFFLINE
    assert role(known, [member(1, "train 1"), member(2, "train 2"), member(3, "odd")]) is Role.OFFLINE
    assert role(known, [member(2, "train 2"), member(3, "odd")]) is Role.OFFLINE
    with caplog.at_level(logging.WARNING):
        assert role(known, [member(3, "odd")]) is Role.UNMATCHED
    assert known.left["training", "processes"] == 1
    assert "job left rule training, as its processes changed: it is unmatched now (no rule matches)" in caplog.text
    role(known, [member(3, "odd")])
    assert known.left["training", "processes"] == 1


def test_a_container_that_leaves_the_gpu_and_comes_back_under_another_command_is_counted(known: Memberships) -> None:
    role(known, [member(1, "train")])
    assert role(known, [member(2, "odd")]) is Role.UNMATCHED
    assert known.left["training", "processes"] == 1


def test_a_container_that_the_policy_takes_out_is_counted_as_that(known: Memberships) -> None:
    role(known, [member(1, "train")])
    text = BY_COMMAND.replace("container: job", "container: other")
    known.begin(policy(text))
    assert role(known, [member(1, "train")], text=text) is Role.UNMATCHED
    assert known.left["training", "policy"] == 1


def test_a_container_that_loses_its_name_is_counted_as_that(known: Memberships) -> None:
    role(known, [member(1, "train")])
    renamed = replace(JOB, name="another")
    assert role(known, [member(1, "train", renamed)], renamed) is Role.UNMATCHED
    assert known.left["training", "names"] == 1


def test_the_host_is_no_ones_container_and_leaves_a_rule_with_the_first_other_process() -> None:
    text = 'version: 1\noffline:\n  - {name: training, match: {command: "*train*"}, law: headroom}\n'
    host = Container(HOST, "host", "host")
    known = Memberships()
    known.begin(policy(text))
    assert role(known, [member(1, "train", host)], host, text) is Role.OFFLINE
    assert role(known, [member(1, "train", host), member(2, "other", host)], host, text) is Role.UNMATCHED
    assert known.left["training", "processes"] == 1


def test_a_container_that_begins_with_an_odd_process_is_left_alone_and_counted_once(known: Memberships) -> None:
    members = [member(1, "odd"), member(2, "train")]
    for _ in range(3):
        found = known.classify(policy(), JOB, members)
        assert (found.role, found.misconfigured) == (Role.UNMATCHED, True)
        assert found.reason == "rule training matches not all of its processes: left alone"
    assert known.left["training", "mixed"] == 1
    assert role(known, [member(2, "train")]) is Role.OFFLINE
    assert role(known, members) is Role.OFFLINE


COMMANDS = st.sampled_from(["train", "odd", "vllm", "debug"])


@given(st.lists(st.dictionaries(st.integers(2, 6), COMMANDS, max_size=5), max_size=8))
def test_while_the_process_that_matched_lives_nothing_takes_the_container_out(rounds: list[dict[int, str]]) -> None:
    known = Memberships()
    assert role(known, [member(1, "train")]) is Role.OFFLINE
    for others in rounds:
        members = [member(1, "train"), *(member(tgid, command) for tgid, command in others.items())]
        assert role(known, members) is Role.OFFLINE
    assert not known.left

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which containers are online, offline, protected or none of them, and which are left alone when rules disagree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import HOST, Container, ContainerKey
from enforce.policy.load import parse
from enforce.policy.model import ContainerFacts, Match, Policy, ProcessFacts, Role

POD = Container(
    key=ContainerKey("k"),
    name="worker",
    runtime="containerd",
    pod="train-0",
    namespace="batch",
    image="registry.local/train:1.2",
    labels={"app": "train", "team": "vision"},
    cgroup="/kubepods.slice/kubepods-pod1.slice/cri-containerd-abc.scope",
)
UNIT = Container(ContainerKey("u"), "train.service", "systemd", cgroup="/system.slice/train.service")
SLO = "slo: {signal: gpu_wait, quantile: 0.99, target: 50ms, window: 10s}"


def policy(offline: str = "{pod: absent}", online: str = "", protect: str = "") -> Policy:
    text = "version: 1\n"
    for name, match in (("chat", online), ("api", "{pod: never}")):
        text += (
            "online:\n" if name == "chat" else ""
        ) + f"  - {{name: {name}, match: {match or '{pod: none}'}, {SLO}}}\n"
    text += f"offline:\n  - {{name: training, match: {offline}}}\n  - {{name: other, match: {{pod: train-*}}}}\n"
    return parse(text + (f"protect: [{protect}]\n" if protect else ""), "p")


def one(match: str) -> Policy:
    return parse(f"version: 1\noffline:\n  - {{name: training, match: {match}}}\n", "p")


def role(rules: Policy, container: Container = POD, *processes: tuple[str | None, str | None]) -> Role:
    return rules.classify(ContainerFacts(container, tuple(ProcessFacts(*process) for process in processes))).role


def test_a_short_id_is_no_name() -> None:
    full_id = "3f29c1a7" * 8
    unnamed = Container(ContainerKey(f"docker:{full_id}"), full_id[:12], "docker", full_id)
    for pattern in ('"*"', "3f29c1a73f29"):
        assert role(one(f"{{container: {pattern}}}"), unnamed) is Role.UNMATCHED
    assert role(one('{container: "*"}'), replace(unnamed, name="web")) is Role.OFFLINE
    assert role(one('{container: "*"}'), replace(unnamed, id="web", name="web")) is Role.OFFLINE


@pytest.mark.parametrize(
    "match",
    [
        "{namespace: batch}",
        "{namespace: [serving, b*]}",
        '{pod: "train-?"}',
        "{container: worker}",
        '{image: "*/train:*"}',
        "{labels: {app: train, team: [speech, vis*]}}",
        "{unit: cri-containerd-*.scope}",
        "{unit: kubepods.slice}",
        '{cgroup: "/kubepods.slice/*"}',
        "{namespace: batch, pod: train-*, container: w*}",
    ],
)
def test_a_container_is_matched_by_each_key(match: str) -> None:
    assert role(one(match)) is Role.OFFLINE


@pytest.mark.parametrize(
    "match",
    [
        "{namespace: Batch}",
        "{namespace: bat}",
        "{namespace: batch, pod: chat-*}",
        "{labels: {app: train, tier: '*'}}",
        "{user: '*'}",
    ],
)
def test_every_key_must_match_in_full_and_in_case(match: str) -> None:
    assert role(one(match)) is Role.UNMATCHED


def test_containers_of_one_pod_may_be_online_and_offline() -> None:
    text = f"online:\n  - {{name: chat, match: {{pod: train-0, container: server}}, {SLO}}}\n"
    rules = parse(
        f"version: 1\n{text}offline:\n  - {{name: training, match: {{pod: train-0, container: worker}}}}\n", "p"
    )
    server = replace(POD, key=ContainerKey("s"), name="server")
    sidecar = replace(POD, key=ContainerKey("c"), name="sidecar")
    assert [role(rules, one) for one in (server, POD, sidecar)] == [Role.ONLINE, Role.OFFLINE, Role.UNMATCHED]


def test_what_is_unknown_about_a_container_matches_not_even_a_star() -> None:
    assert role(one('{namespace: "*"}'), UNIT) is Role.UNMATCHED
    assert role(one('{image: "*"}'), replace(POD, image=None)) is Role.UNMATCHED
    assert role(one('{user: "*"}'), POD, (None, "python")) is Role.UNMATCHED


def test_a_systemd_unit_is_matched_by_its_name_and_by_the_slice_around_it() -> None:
    assert role(one("{unit: train.service}"), UNIT) is Role.OFFLINE
    assert role(one("{unit: system.slice}"), UNIT) is Role.OFFLINE
    assert role(one("{unit: train}"), UNIT) is Role.UNMATCHED


def test_an_offline_rule_about_users_wants_all_processes_and_an_online_one_any() -> None:
    mixed = (("alice", "python"), ("bob", "python"))
    assert role(one("{user: alice}"), POD, mixed[0]) is Role.OFFLINE
    assert role(one("{user: alice}"), POD, *mixed) is Role.UNMATCHED
    assert role(one("{user: [alice, bob], command: python}"), POD, *mixed) is Role.OFFLINE
    online = parse(f"version: 1\nonline:\n  - {{name: chat, match: {{user: alice}}, {SLO}}}\n", "p")
    assert role(online, POD, *mixed) is Role.ONLINE


def test_user_and_command_must_be_those_of_one_process() -> None:
    protect = parse("version: 1\nprotect: [{user: alice, command: bash}]\n", "p")
    assert role(protect, POD, ("alice", "python"), ("bob", "bash")) is Role.UNMATCHED
    assert role(protect, POD, ("alice", "python"), ("alice", "bash")) is Role.PROTECTED


def test_the_host_is_never_slowed_by_a_rule_that_names_no_user_or_command() -> None:
    host = Container(HOST, "host", "host")
    for match in ('{cgroup: "*"}', "{container: host}"):
        assert role(one(match), host, ("root", "python")) is Role.UNMATCHED
    assert role(one("{command: python}"), host, ("root", "python")) is Role.OFFLINE
    assert role(one("{command: python}"), host, ("root", "python"), ("root", "Xorg")) is Role.UNMATCHED


def test_protect_beats_every_rule() -> None:
    assert role(policy("{namespace: batch}", "{namespace: bat*}", "{pod: train-0}")) is Role.PROTECTED


def test_a_container_that_is_online_and_offline_is_left_alone_and_reported() -> None:
    found = policy("{pod: none2}", "{namespace: batch}").classify(ContainerFacts(POD))
    assert (found.role, found.rule, found.conflict) == (Role.UNMATCHED, None, ("chat", "other"))
    assert "chat and other" in found.reason


def test_a_container_that_is_periodic_and_anything_else_is_left_alone_and_reported() -> None:
    periodic = "periodic: [{name: camera, match: {pod: train-0}, period: 40ms}]\n"
    alone = parse(f"version: 1\n{periodic}", "p").classify(ContainerFacts(POD))
    assert (alone.role, alone.reason) == (Role.PERIODIC, "rule camera")
    both = parse(f"version: 1\nonline: [{{name: chat, match: {{pod: train-0*}}, {SLO}}}]\n{periodic}", "p")
    found = both.classify(ContainerFacts(POD))
    assert (found.role, found.rule, found.conflict) == (Role.UNMATCHED, None, ("chat", "camera"))


def test_a_container_with_two_offline_rules_is_left_alone_and_reported() -> None:
    found = policy("{namespace: batch}").classify(ContainerFacts(POD))
    assert (found.role, found.rule, found.conflict) == (Role.UNMATCHED, None, ("training", "other"))


def test_of_two_online_rules_the_first_holds_and_the_clash_is_reported() -> None:
    online = "online:\n" + "".join(
        f"  - {{name: {name}, match: {match}, {SLO}}}\n"
        for name, match in (("a", "{pod: t*}"), ("b", "{namespace: b*}"))
    )
    found = parse("version: 1\n" + online, "p").classify(ContainerFacts(POD))
    assert found.role is Role.ONLINE
    assert found.rule is not None
    assert (found.rule.name, found.conflict) == ("a", ("a", "b"))


GLOBS = st.sampled_from(["*", "a", "b", "a*", "?", "[ab]", "[!a]", "c"]).map(lambda glob: (glob,))
MATCHES = st.builds(Match, namespace=GLOBS, pod=GLOBS | st.just(()), image=GLOBS | st.just(()))
VALUES = st.sampled_from([None, "a", "b", "ab"])
PODS = st.builds(replace, st.just(POD), namespace=VALUES, pod=VALUES, image=VALUES)


@given(online=MATCHES, offline=MATCHES, other=MATCHES, protect=MATCHES, pod=PODS)
def test_only_what_one_offline_rule_alone_names_is_ever_offline(
    online: Match, offline: Match, other: Match, protect: Match, pod: Container
) -> None:
    base = policy()
    merged = replace(
        base,
        online=(replace(base.online[0], match=online),),
        offline=(replace(base.offline[0], match=offline), replace(base.offline[1], match=other)),
        protect=(protect,),
    )
    claims = [match.fits(ContainerFacts(pod), every_process=True) for match in (online, offline, other, protect)]
    alone = claims in ([False, True, False, False], [False, False, True, False])
    assert (role(merged, pod) is Role.OFFLINE) == alone


MANAGER = "/user.slice/user-1000.slice/user@1000.service"


@pytest.mark.parametrize("below", ["app.slice/ssh.service", "ssh.service", f"ssh.service/docker-{'a' * 64}.scope"])
def test_a_user_session_claims_no_unit_of_the_systems(below: str) -> None:
    runtime = "docker" if "docker" in below else "systemd"
    it = Container(ContainerKey("u"), below.rpartition("/")[2], runtime, cgroup=f"{MANAGER}/{below}")
    for unit in ("ssh.service", "app.slice", "docker-*"):
        assert role(one(f"{{unit: {unit}}}"), it) is Role.UNMATCHED
    for unit in ("user.slice", "user-1000.slice", "user@1000.service"):
        assert role(one(f"{{unit: {unit}}}"), it) is Role.OFFLINE
    assert role(one(f"{{cgroup: '*/{below}'}}"), it) is Role.OFFLINE


def test_a_users_own_manager_is_a_unit_of_the_systems() -> None:
    it = Container(ContainerKey("u"), "user@1000.service", "systemd", cgroup=MANAGER)
    assert role(one('{unit: "user@*.service"}'), it) is Role.OFFLINE


def test_a_name_that_a_user_chose_makes_none_online_or_protected_but_can_be_slowed() -> None:
    it = Container(ContainerKey("lxc:/x"), "chat@1000", "lxc", cgroup="/user.slice/user-1000.slice/lxc/chat", uid=1000)
    match = Match(container=("chat*",))
    assert not match.fits(ContainerFacts(it), every_process=False)
    assert match.fits(ContainerFacts(it), every_process=True)
    assert match.fits(ContainerFacts(replace(it, uid=None)), every_process=False)


def test_a_unit_below_another_one_is_no_unit_of_the_systems() -> None:
    it = Container(ContainerKey("u"), "vllm.service", "systemd", cgroup="/system.slice/jupyter.service/vllm.service")
    assert not Match(unit=("vllm.service",)).fits(ContainerFacts(it), every_process=False)
    assert Match(unit=("jupyter.service",)).fits(ContainerFacts(it), every_process=False)

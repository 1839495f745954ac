# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who may be which container: real cgroups that are named as a victim's, processes named as a runtime's."""

from __future__ import annotations

import os
import re
import secrets
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.core.model import ContainerUsage, Snapshot
from enforce.actuators.freezer.cgroup import Cgroup, FreezerCgroup
from tests.e2e.node import ALWAYS_BUSY, TRAINING, Agent, Node
from tests.support.groups import roots
from tools.harness import cgroups
from tools.harness.containers import Container, Mount
from tools.harness.node import BUILD
from tools.harness.wait import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runc with real cgroups needs root")
PROGRAMS = Path(__file__).with_name("programs")
SERVING = ("--rate", "50", "--kernels", "4", "--kernel-us", "500", "--seconds", "3600", "--start-now")
ONLINE = """\
version: 1
enforce: true
online:
  - name: chat
    match: {{labels: {{io.kubernetes.pod.uid: "{uid}"}}}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
offline:
  - {{name: none, match: {{container: "none-{uid}"}}, law: headroom}}
"""
BY_COMMAND = """\
version: 1
enforce: true
online:
  - name: chat
    match: {{container: "chat-{token}"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
offline:
  - name: training
    match: {{container: "{container}", command: "*offline*"}}
    law: headroom
    limits: {{max_pause: 5s, floor: 0%}}
    ladder: [gate, pace]
"""


def start(node: Node, name: str, cgroup: str, *command: str, output: bool = True) -> Container:
    """A container in that cgroup, below the node's own."""
    return Container.start(
        name,
        command,
        node.stage.environment,
        cgroup_path=f"/gpuwarden-e2e/{node.token}{cgroup}",
        mounts=[Mount(BUILD), Mount(PROGRAMS), Mount(node.folder, read_only=False)],
        output=node.folder / f"{name}.out" if output else None,
        state=node.folder / "containers",
    )


def program(name: str) -> str:
    return str(BUILD / "bin" / name)


def rows(snapshot: Snapshot) -> Mapping[int, ContainerUsage]:
    """By process."""
    return {process.tgid: row for row in snapshot.containers for process in row.processes}


def left(agent: Agent, rule: str, reason: str) -> float:
    found = re.search(
        rf'^gpuwarden_container_left_rule_total{{reason="{reason}",rule="{rule}"}} (\S+)$', agent.metrics(), re.M
    )
    return float(found[1]) if found else -1


@dataclass(frozen=True, slots=True)
class Theft:
    """A victim that is known by its cgroup alone, and those who run in cgroups of its name."""

    uid: str
    victim: Container
    thieves: Mapping[str, Container]  # where they are → they

    @property
    def policy(self) -> str:
        return ONLINE.format(uid=self.uid)


@pytest.fixture
def theft(node: Node) -> Iterator[Theft]:
    """The victim runs first: a claim that root made elsewhere has the id only where no other is."""
    uid, full_id, other = str(uuid.uuid4()), secrets.token_hex(32), secrets.token_hex(32)
    name = f"/kubepods/besteffort/pod{uid}/{full_id}"
    scope = f"/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/cri-containerd-{full_id}.scope"
    places = {
        "manager": f"/user.slice/user-1000.slice/user@1000.service{scope}",
        "slice": f"/user.slice/user-1000.slice/cri-containerd-{full_id}.scope",
        "nested": f"/docker/{other}{name}",
        "owned": f"/theirs{name}",
    }
    with ExitStack() as stack:
        victim = stack.enter_context(start(node, f"victim-{node.token}", name, program("online"), *SERVING))
        theirs = stack.enter_context(cgroups.own(f"/gpuwarden-e2e/{node.token}/theirs"))
        for folder in cgroups.folders(f"/gpuwarden-e2e/{node.token}/theirs"):
            os.chown(folder, 1000, 1000)
        assert theirs.stat().st_uid == 1000
        thieves = {
            place: stack.enter_context(start(node, f"{place}-{node.token}", cgroup, program("offline"), *TRAINING))
            for place, cgroup in places.items()
        }
        yield Theft(uid, victim, thieves)


def test_a_cgroup_named_as_a_victims_gets_neither_its_role_nor_its_bill(node: Node, theft: Theft) -> None:
    with node.agent(theft.policy, run_dir="theft") as agent:
        everyone = {theft.victim.tgid, *(thief.tgid for thief in theft.thieves.values())}
        until(lambda: everyone <= rows(agent.snapshot()).keys(), "all to be seen")
        until(lambda: "online" in {one.role for one in agent.snapshot().enforcement.values()}, "the victim's role")
        before = node.truth()[theft.victim.tgid]
        snapshot = agent.snapshot()
        after = node.truth()[theft.victim.tgid]
        seen = rows(snapshot)
        victim = seen[theft.victim.tgid]
        assert [process.tgid for process in victim.processes] == [theft.victim.tgid]
        assert sum(usage.totals.launches for usage in victim.usage) <= after
        assert before > 0
        roles = {key: one.role for key, one in snapshot.enforcement.items()}
        assert roles[victim.container.key] == "online"
        for place, thief in theft.thieves.items():
            container = seen[thief.tgid].container
            assert container.key != victim.container.key, place
            assert roles[container.key] == "unmatched", place
        assert {place: seen[thief.tgid].container.uid for place, thief in theft.thieves.items()} == {
            "manager": 1000,
            "slice": 1000,
            "nested": None,
            "owned": 1000,
        }
        text = agent.metrics()
        series = [line for line in text.split("\n") if not line.startswith("#")]
        assert len({line.rpartition(" ")[0] for line in series}) == len(series)  # no two of one name and labels


def test_a_second_cgroup_that_claims_an_id_is_refused_and_counted(node: Node, theft: Theft) -> None:
    with node.agent(theft.policy, run_dir="claim") as agent:
        until(lambda: theft.victim.tgid in rows(agent.snapshot()), "the victim to be seen")
        claim = "/elsewhere" + theft.victim.cgroup_path.removeprefix(f"/gpuwarden-e2e/{node.token}")
        with start(node, f"claim-{node.token}", claim, program("offline"), *TRAINING) as thief:
            counted = re.compile(r'^gpuwarden_events_lost_total{reason="id_refused",source="containers"} [1-9]', re.M)
            until(lambda: counted.search(agent.metrics()) and thief.tgid in rows(agent.snapshot()), "the refusal")
            seen = rows(agent.snapshot())
            container = seen[thief.tgid].container
            assert (container.id, container.key) == ("", f"refused:{thief.cgroup_path}")
            assert [process.tgid for process in seen[theft.victim.tgid].processes] == [theft.victim.tgid]
            assert "claims to be" in agent.log.read_text()


def test_containers_with_a_process_named_as_a_runtime_are_frozen_under_their_rule(node: Node) -> None:
    policy = node.policy(enforce=True, max_pause="1s").replace("target: 400ms", "target: 1ms")
    policy = policy.replace("floor: 0%", "floor: 50%").replace("[gate, pace]", "[gate, pace, freeze]")
    version, root = next((version, roots()[version]) for version in (2, 1) if version in roots())
    command = ("/usr/bin/python3", str(PROGRAMS / "called_runc.py"))
    with ExitStack() as stack:
        stack.enter_context(node.container("chat", "online", SERVING))
        named = {}
        for name in ("runc", "containerd-shim", "nvidia-cuda-mps"):
            shown = node.name(f"training-{name}")
            started = start(node, shown, f"/{shown}", *command, name, program("offline"), *TRAINING)
            named[name] = stack.enter_context(started)
        stack.enter_context(node.agent(policy, run_dir="named"))
        for name, training in named.items():
            comm = Path(f"/proc/{training.tgid}/comm")
            until(lambda: comm.read_text() == f"{name}\n", "its name")  # noqa: B023
            with Cgroup(FreezerCgroup.of(version, f"{root}{training.cgroup_path}")) as group:
                until(group.is_frozen, f"{name} to be frozen", step_seconds=0.005)


def test_one_odd_command_does_not_take_a_container_out_of_its_rule_and_what_does_is_counted(node: Node) -> None:
    shown, script = node.name("training"), str(PROGRAMS / "odd_command.py")
    policy = BY_COMMAND.format(token=node.token, container=shown)
    with (
        node.container("chat", "online", ALWAYS_BUSY),
        start(
            node, shown, f"/{shown}", "/usr/bin/python3", script, program("offline"), *TRAINING, output=False
        ) as training,
        node.agent(policy, run_dir="odd") as agent,
    ):
        until(lambda: agent.pauses(shown), "it to be stopped under its rule")
        go_on(training)
        until(lambda: is_seen(agent, shown, "odd"), "the odd one to be seen")
        pauses = agent.pauses(shown)
        until(lambda: agent.pauses(shown) > pauses + 2, "it to be stopped all the same")
        stance = agent.stance(shown)
        assert stance is not None
        assert (stance.role, stance.rule) == ("offline", "training")
        assert left(agent, "training", "processes") == 0
        go_on(training)
        until(lambda: left(agent, "training", "processes") == 1, "the metric")
        assert f"{shown} left rule training, as its processes changed" in agent.log.read_text()


def test_what_a_new_policy_takes_out_of_its_rule_is_counted(node: Node) -> None:
    shown = node.name("training")
    policy = BY_COMMAND.format(token=node.token, container=shown)
    with node.container("training", "offline", TRAINING), node.agent(policy, run_dir="changed") as agent:
        until(lambda: (stance := agent.stance(shown)) is not None and stance.role == "offline", "its rule")
        agent.reload(policy.replace(f'container: "{shown}"', 'container: "another"'))
        until(lambda: left(agent, "training", "policy") == 1, "the metric")
        assert f"{shown} left rule training, as its policy changed" in agent.log.read_text()


def go_on(container: Container) -> None:
    container.stdin.write("\n")
    container.stdin.flush()


def is_seen(agent: Agent, name: str, command: str) -> bool:
    snapshot = agent.snapshot()
    row = next((row for row in snapshot.containers if row.container.name == name), None)
    known = {one.process.id: one.process.command for one in snapshot.processes}
    return row is not None and any(known.get(process, "").startswith(command) for process in row.processes)

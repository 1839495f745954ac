# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Two containers on one GPU: the offline one gets no further than its quota, the online one all that it asks for."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.node.procfs import Procfs
from agent.probes.abi import ProcessKey, QuotaKey
from tests.e2e.kernel_maps import map_of
from tests.e2e.node import ROOT, Agent, Node, state
from tools.harness.containers import Container, Mount
from tools.harness.node import BUILD
from tools.harness.wait import until

GIB = 1 << 30
APPLICATION = Path("/app")
POLICY = """\
version: 1
enforce: true
online:
  - name: chat
    match: {{container: "chat-{token}"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
    reserve: 4GiB
offline:
  - name: training
    match: {{container: "training-{token}*"}}
    limits: {{memory: {quota}, max_hold: 1h}}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stacks.c, which allocates on command."""
    path = tmp_path_factory.mktemp("allocating") / "allocating"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'sim/include'}"]
    source = ROOT / "tests/support/programs/stacks.c"
    subprocess.run(["gcc", *flags, str(source), "-o", str(path), f"-L{BUILD / 'lib'}", "-lcuda"], check=True)
    return path


@contextmanager
def allocating(node: Node, program: Path, name: str) -> Iterator[Container]:
    """A container with that program, ready."""
    shown = node.name(name)
    with Container.start(
        shown,
        [str(APPLICATION / program.name)],
        node.stage.environment,
        cgroup_path=f"/gpuwarden-e2e/{shown}",
        mounts=[Mount(BUILD), Mount(node.folder, read_only=False), Mount(program.parent, APPLICATION)],
        state=node.folder / "containers",
    ) as container:
        assert answer(container) == "ready", container.errors()
        yield container


def keep(container: Container, count: int) -> None:
    """Asks it for 4 MiB that often, and 8 MiB in between."""
    container.stdin.write(f"keep {count}\n")
    container.stdin.flush()


def answer(container: Container) -> str:
    """Its next line; "" when it has ended."""
    assert container.stdout
    return container.stdout.readline().rstrip("\n")


def is_bounded(agent: Agent, tgid: int) -> bool:
    """Whether the kernel looks at its allocations, and leaves its context out of what they may come to."""
    with map_of(agent.process.pid, "memory_rules") as rules, map_of(agent.process.pid, "quotas") as quotas:
        rule = rules.get(ProcessKey.of(Procfs().process_id(tgid)))
        quota = quotas.get(QuotaKey(rule.group, 0)) if rule is not None else None
        return quota is not None and quota.limit_bytes < GIB


def refused(agent: Agent, name: str) -> int:
    """Allocations denied or held so far."""
    stance = agent.stance(name)
    return stance.allocations_denied_total + stance.allocations_held_total if stance else 0


def memory_bytes(agent: Agent, name: str) -> int:
    """By NVML; 0 while it is not known."""
    row = agent.container(name)
    return (row.usage[0].memory_bytes or 0) if row and row.usage else 0


def logged_refusals(agent: Agent, since: int) -> list[dict[str, Any]]:
    """The decision log's lines about refused allocations from that byte on; one that is being written is none yet."""
    lines = map(json.loads, agent.decisions.read_bytes()[since:].split(b"\n")[:-1])
    return [line for line in lines if line.get("act") in ("deny", "hold")]


def test_an_offline_container_is_kept_to_its_quota_while_an_online_one_allocates(node: Node, program: Path) -> None:
    policy = POLICY.format(token=node.token, quota="1GiB")
    with (
        node.agent(policy, run_dir="memory") as agent,
        allocating(node, program, "chat") as chat,
        allocating(node, program, "training-memory") as training,
    ):
        name = node.name("training-memory")
        since = agent.decisions.stat().st_size  # an earlier try's are before it
        keep(training, 1)
        assert answer(training) == "done"
        until(lambda: is_bounded(agent, training.tgid), "the kernel to have its limit")
        keep(training, 300)
        until(lambda: refused(agent, name), "an allocation that is refused")
        if agent.stance(name).allocations_held_total:  # type: ignore[union-attr]
            assert state(training.tgid) == "T"
        keep(chat, 300)
        assert answer(chat) == "done"
        until(lambda: memory_bytes(agent, name) > GIB // 2, "its memory by NVML")
        assert memory_bytes(agent, name) <= GIB
        until(lambda: logged_refusals(agent, since), "the refusal in the decision log")
        refusals = logged_refusals(agent, since)
        assert refusals[0]["container"].endswith(name)
        assert (refusals[0]["rule"], refusals[0]["quota_bytes"], refusals[0]["acted"]) == ("training", GIB, True)
        assert "quota" in refusals[0]["reason"]
        assert f'gpuwarden_container_memory_quota_bytes{{container="{name}"' in agent.metrics()
        if state(training.tgid) == "T":
            agent.reload(POLICY.format(token=node.token, quota="2GiB"))
            assert answer(training) == "done"

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A container without the GPU that says by a library of its own that it uses it, and programs that choose their device
themselves: NVML decides."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.node import ALWAYS_BUSY, TRAINING, Agent, Node
from tests.hostile.programs import compile_program, pretended_libcuda
from tests.support.programs.driver import compile_driver
from tools.harness.containers import Container, Mount
from tools.harness.node import BUILD, simulated_node
from tools.harness.wait import until

GIB, MIB = 1 << 30, 1 << 20
TOGETHER_SECONDS = 8.0  # the tenant was evicted after four
PROGRAMS = Path("/app")
RESERVED = """\
version: 1
enforce: true
online:
  - name: chat
    match: {{container: "chat-{token}"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
    reserve: 2560MiB
offline:
  - name: training
    match: {{container: "training-{token}*"}}
    ladder: [deny, hold, evict]
"""
TWO_DEVICES = """\
version: 1
enforce: true
online:
  - name: chat
    match: {{container: "chat-{token}"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
offline:
  - name: training
    match: {{container: "training-{token}*"}}
    limits: {{max_pause: 200ms, floor: 0%}}
    ladder: [gate, pace]
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """claims, the libcuda.so.1 of its own, allocating, and a library that sets a variable before main."""
    folder = tmp_path_factory.mktemp("claims")
    pretended_libcuda(folder)
    compile_program("claims", folder)
    compile_program("chooses_device", folder, "-shared", "-fPIC")
    shutil.move(compile_driver(folder, "stacks"), folder / "allocating")
    return folder


@contextmanager
def small_node(folder: Path) -> Iterator[Node]:
    with simulated_node(folder / "gpu", {"memory": "4GiB"}):
        yield Node(folder)


def start(node: Node, programs: Path, name: str, *command: str, gpu: bool, **variables: str) -> Container:
    """A container with these programs; without the GPU it has neither the node's library nor its devices."""
    shown = node.name(name)
    mounts = [Mount(programs, PROGRAMS)]
    return Container.start(
        shown,
        command,
        {**(node.stage.environment if gpu else {"LD_LIBRARY_PATH": str(PROGRAMS)}), **variables},
        cgroup_path=f"/gpuwarden-e2e/{shown}",
        mounts=[*mounts, Mount(BUILD), Mount(node.folder, read_only=False)] if gpu else mounts,
        state=node.folder / "containers",
    )


def answer(container: Container) -> str:
    assert container.stdout
    return container.stdout.readline().rstrip("\n")


def keep(container: Container, count: int) -> None:
    """It allocates 4 MiB that often, in turn, and keeps them."""
    container.stdin.write(f"keep {count}\n")
    container.stdin.flush()


def refused(agent: Agent) -> float:
    found = re.search(r'^gpuwarden_events_lost_total\{[^}]*source="claims"[^}]*\} (\S+)$', agent.metrics(), re.M)
    return float(found[1]) if found and 'reason="unlisted"' in found[0] else 0.0


@pytest.mark.parametrize("name", ["stranger", "training-claims"])  # the latter counts against all offline containers
def test_what_a_library_of_its_own_claims_evicts_and_refuses_none(tmp_path: Path, programs: Path, name: str) -> None:
    with (
        small_node(tmp_path / "n") as node,
        node.agent(RESERVED.format(token=node.token)) as agent,
        start(node, programs, "training-honest", f"{PROGRAMS}/allocating", gpu=True) as honest,
    ):
        assert answer(honest) == "ready", honest.errors()
        keep(honest, 75)
        assert answer(honest) == "done"
        until(lambda: used(agent) >= 600 * MIB, "NVML's figure of what it has")
        before = used(agent)
        with start(node, programs, name, f"{PROGRAMS}/claims", gpu=False) as liar:
            assert answer(liar) == "claimed", liar.errors()
            until(lambda: refused(agent) > 0, "the claim to be counted as refused")
            began = time.monotonic()
            while time.monotonic() - began < TOGETHER_SECONDS:
                assert used(agent) == before
                assert honest.alive()
                time.sleep(0.2)
            keep(honest, 10)
            assert answer(honest) == "done"
            stance = agent.stance(node.name("training-honest"))
            assert stance is not None
            assert (stance.allocations_denied_total, stance.allocations_held_total) == (0, 0)
            row = agent.container(node.name(name))
            assert row is None or not any(usage.memory_bytes for usage in row.usage)
        assert refused(agent) > 1


def used(agent: Agent) -> int:
    """Of the only device, as it is shown."""
    (reading,) = agent.snapshot().devices
    return reading.memory_used_bytes or 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with two GPUs."""
    folder = tmp_path_factory.mktemp("pair") / "n"
    with simulated_node(folder / "gpu", {"gpus": "2"}):
        yield Node(folder)


def is_left_alone(agent: Agent, name: str) -> bool:
    """For a second: that time is what is tested."""
    before = agent.pauses(name)
    time.sleep(1)
    return agent.pauses(name) == before


def test_an_online_program_that_chooses_its_device_itself_is_protected_on_that_device(
    pair: Node, programs: Path
) -> None:
    chooses = {"LD_PRELOAD": str(PROGRAMS / "chooses_device")}
    with (
        pair.agent(TWO_DEVICES.format(token=pair.token)) as agent,
        pair.tenant(pair.name("training-zero"), "0", "offline", *TRAINING),
        pair.tenant(pair.name("training-one"), "1", "offline", *TRAINING),
        start(pair, programs, "chat", f"{BUILD}/bin/online", *ALWAYS_BUSY, gpu=True, **chooses),
    ):
        zero, one = pair.name("training-zero"), pair.name("training-one")
        until(lambda: agent.pauses(one) > 5, "the offline container beside it to be stopped")
        until(lambda: is_left_alone(agent, zero), "the other one to be left alone")
        before = agent.pauses(zero), agent.pauses(one)
        until(lambda: agent.pauses(one) > before[1] + 5, "the one beside it to be stopped on")
        assert agent.pauses(zero) == before[0]
